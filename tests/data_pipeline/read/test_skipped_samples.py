"""Steps over the remaining samples: a slow loop, and the two formulas."""

import random

import pytest
from made_folder import MadeFolder, documents
from steps import seen, steps_of

from moebius.data_pipeline.read.skipped_samples import SkippedSamples


def slowly(skipped: SkippedSamples, count: int, steps: int) -> list[range]:
    """Returns the samples of each step: the next `count` consecutive ones, none of them skipped."""
    gone = {sample for stretch in skipped.ranges for sample in stretch}
    found, sample = [], 0
    while len(found) < steps:
        step = range(sample, sample + count)
        hit = [one for one in step if one in gone]
        if not hit:
            found.append(step)
            sample += count
        else:  # after the whole range
            sample = next(one.stop for one in skipped.ranges if hit[0] in one)
    return found


@pytest.mark.parametrize("seed", range(30))
def test_the_formulas_count_as_the_loop_does(seed: int) -> None:
    draw = random.Random(seed)
    starts = [draw.randrange(60) for _ in range(draw.randrange(4))]
    skipped = SkippedSamples.of(range(start, start + draw.randrange(12)) for start in starts)
    count = draw.randrange(1, 6)
    expected = slowly(skipped, count, 30)
    assert [skipped.step_at(step, count) for step in range(1, 31)] == expected
    at = 0
    for step in expected:
        assert skipped.next_step(at, count) == step.start
        at = step.stop


def test_ranges_that_touch_become_one() -> None:
    found = SkippedSamples.of([range(8, 12), range(0), range(2, 4), range(12, 16), range(3, 5)])
    assert found.ranges == (range(2, 5), range(8, 16))


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_loader_skips_them_on_any_number_of_ranks(
    tmp_path_factory: pytest.TempPathFactory, num_ranks: int
) -> None:
    folder = MadeFolder(tmp_path_factory.mktemp("made"))
    data = folder.seal("text", documents(0, 30)).complete().config()
    whole = seen(steps_of(data, 6, global_batch=4))
    skipped = SkippedSamples.of([range(8, 16)])
    found = steps_of(data, 4, global_batch=4, num_ranks=num_ranks, skipped_samples=skipped)
    assert seen(found) == [whole[step] for step in (0, 1, 4, 5)]
