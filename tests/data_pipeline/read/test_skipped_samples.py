"""Steps of what is left: by a slow loop, and by the two formulas."""

import random

import pytest
from made_folder import MadeFolder, documents

from moebius.data_pipeline.document_order import RunOrder
from moebius.data_pipeline.errors import DataError
from moebius.data_pipeline.read.loader import Loader
from moebius.data_pipeline.read.skipped_samples import NOTHING, LeftOut


def slowly(left_out: LeftOut, count: int, steps: int) -> list[range]:
    """The samples of each step: the next so many neighbours of which none is left out."""
    gone = {sample for stretch in left_out.stretches for sample in stretch}
    found, sample = [], 0
    while len(found) < steps:
        step = range(sample, sample + count)
        hit = [one for one in step if one in gone]
        if not hit:
            found.append(step)
            sample += count
        else:  # behind the whole stretch
            sample = next(one.stop for one in left_out.stretches if hit[0] in one)
    return found


@pytest.mark.parametrize("seed", range(30))
def test_the_formulas_count_as_the_loop_does(seed: int) -> None:
    draw = random.Random(seed)
    starts = [draw.randrange(60) for _ in range(draw.randrange(4))]
    left_out = LeftOut.of(range(start, start + draw.randrange(12)) for start in starts)
    count = draw.randrange(1, 6)
    expected = slowly(left_out, count, 30)
    assert [left_out.step_at(step, count) for step in range(1, 31)] == expected
    at = 0
    for step in expected:
        assert left_out.next_step(at, count) == step.start
        at = step.stop
    owner = {sample: number for number, step in enumerate(expected, start=1) for sample in step}
    for sample in range(expected[-1].stop):
        assert left_out.step_of(sample, count) == owner.get(sample)


def test_stretches_that_touch_become_one() -> None:
    found = LeftOut.of([range(8, 12), range(0), range(2, 4), range(12, 16), range(3, 5)])
    assert found.stretches == (range(2, 5), range(8, 16))
    assert found.num_samples == 11
    assert not NOTHING.num_samples


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_the_loader_and_the_order_pass_over_the_same_samples(
    tmp_path_factory: pytest.TempPathFactory, num_ranks: int
) -> None:
    folder = MadeFolder(tmp_path_factory.mktemp("made"))
    data = folder.seal("text", documents(0, 30)).complete().config()
    left_out = LeftOut.of([range(8, 16)])
    batches = []
    for rank in range(num_ranks):
        with Loader(
            data,
            global_batch=4,
            micro_batch=1,
            rank=rank,
            num_ranks=num_ranks,
            left_out=left_out,
        ) as loader:
            batches.append([next(loader) for _ in range(4)])
    assert [batch.first_sample for batch in batches[0]] == [0, 4, 16, 20]
    with RunOrder(data, global_batch=4, num_steps=4, skip_folder=None, left_out=left_out) as order:
        assert order.num_samples == 24
        for number, step in enumerate(zip(*batches, strict=True), start=1):
            _, rows = order.read(order.samples_of_step(number))
            mine = [row for batch in step for row in batch.tokens.reshape(4 // num_ranks, -1)]
            assert [row.tolist() for row in mine] == rows.tokens.tolist()
        assert [row.step for row in order.rows_of(range(6, 18))] == [2] * 2 + [None] * 8 + [3] * 2
        gone = order.parts_of(order.rows_of(range(8, 9))[0])[0].document
        seen = {one for epoch in order.sightings(gone, most_epochs=4).epochs for one in epoch.steps}
        assert None not in seen
        with pytest.raises(DataError, match=r"24 \(4 steps of 4, and 8 that it left out\)"):
            order.rows_of(range(20, 25))
