"""Batches of rows contain each row once, share only common beginnings, and pad little."""

from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest

from moebius.evaluation.batches import (
    LEAST_SHARED,
    PASS_TOKENS,
    Family,
    Row,
    RowBatch,
    plan_batches,
    rolling_rows,
    rows_alone,
)


def questions(
    seed: int, *, prefix: tuple[int, int], end: tuple[int, int], context: int
) -> list[Family]:
    """Twenty questions with four answers each, cut on the left where too long."""
    rng = np.random.default_rng(seed)
    families = []
    for _ in range(20):
        before = rng.integers(1000, size=rng.integers(*prefix)).tolist()
        ends = [rng.integers(1000, size=rng.integers(*end)).tolist() for _ in range(4)]
        lines = [(*before, *own)[-context - 1 :] for own in ends]
        families.append(
            [Row(line, min(len(own), context)) for line, own in zip(lines, ends, strict=True)]
        )
    return families


def computed(families: Sequence[Family], batches: Sequence[RowBatch]) -> int:
    """Counts the tokens that go through the model."""
    total = 0
    for batch in batches:
        ends = [len(families[f][r].tokens) - 1 - batch.prefix for f, r in batch.rows]
        total += len(batch.families) * batch.prefix + len(ends) * max(ends)
    return total


def padded(families: Sequence[Family], batch: RowBatch) -> int:
    """Counts a batch's tokens beyond those of its families alone."""
    alone = 0
    for f, rows in batch.families:
        lines = [families[f][r].tokens for r in rows]
        prefix = 0
        while batch.prefix and all(
            line[prefix] == lines[0][prefix] and prefix < len(line) - 1 - families[f][r].num_scored
            for r, line in zip(rows, lines, strict=True)
        ):
            prefix += 1
        alone += prefix * (len(rows) > 1) + len(rows) * (max(map(len, lines)) - 1 - prefix)
    return computed(families, [batch]) - alone


KINDS = {
    "short": questions(0, prefix=(2, 30), end=(2, 6), context=99),
    "long ends": questions(1, prefix=(17, 30), end=(5, 90), context=200),
    "cut on the left": questions(2, prefix=(120, 200), end=(2, 5), context=90),
}


@pytest.mark.parametrize("kind", KINDS)
def test_every_row_is_in_one_batch_of_one_rank(kind: str) -> None:
    families = KINDS[kind]
    ranks = [list(plan_batches(families, rank, 3)) for rank in range(3)]
    found = Counter(place for batches in ranks for batch in batches for place in batch.rows)
    assert found == Counter((f, r) for f, family in enumerate(families) for r in range(len(family)))
    for batch in (one for batches in ranks for one in batches):
        assert batch.prefix == 0 or batch.prefix >= LEAST_SHARED
        for f, rows in batch.families:
            lines = [families[f][r] for r in rows]
            assert len({row.tokens[: batch.prefix] for row in lines}) == 1
            assert all(len(row.tokens) - 1 - row.num_scored >= batch.prefix for row in lines)
        assert padded(families, batch) <= (2 if batch.prefix else 1) * PASS_TOKENS


def test_what_is_cut_at_the_same_place_is_computed_once() -> None:
    families = KINDS["cut on the left"]
    num_lengths = sum(len({family[r].num_scored for r in range(4)}) for family in families)
    one_line_each = 90 * num_lengths + 90 * 20
    assert computed(families, list(plan_batches(families, 0, 1))) < one_line_each


def test_long_ends_are_not_padded_for_a_short_beginning() -> None:
    families = KINDS["long ends"]
    real = sum(len(row.tokens) - 1 for family in families for row in family)
    batches = list(plan_batches(families, 0, 1))
    assert sum(batch.prefix > 0 for batch in batches) < len(batches)  # most rows go without
    assert computed(families, batches) < real + len(batches) * PASS_TOKENS


def test_rows_that_go_alone() -> None:
    families = KINDS["short"]
    batches = [batch for rank in (0, 1) for batch in rows_alone(families, rank, 2)]
    assert {batch.prefix for batch in batches} == {0}
    assert sorted(place for batch in batches for place in batch.rows) == [
        (f, r) for f in range(20) for r in range(4)
    ]


@pytest.mark.parametrize("stride", [1, 3, 7])
def test_a_text_is_rolled_over_once(stride: int) -> None:
    rows = rolling_rows(list(range(30)), 99, 7, stride=stride)
    assert [t for row in rows for t in row.tokens[-row.num_scored :]] == list(range(30))
    assert rows[0].tokens[0] == 99
    assert all(len(row.tokens) == 8 for row in rows[1:])
