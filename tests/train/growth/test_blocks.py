"""Any block of a grown tensor is that of the whole, whatever its regions copy, turn, draw and add."""

import math
from itertools import product
from typing import Any

import pytest
import torch
from grown_case import InMemory, whole

from moebius.distributed.checkpoint.format import CheckpointError
from moebius.distributed.checkpoint.grown import GrownReader, Take, takes_to_json
from moebius.distributed.checkpoint.pieces import from_rows

TAKES = (
    Take("bank", (0, 0, 0), (1, 4, 6), "dense", (6, 0), (2, 1), factor=2.0),
    Take("bank", (1, 0, 0), (1, 2, 6), std=0.5, seed=3),
    Take("bank", (1, 2, 0), (1, 2, 6), "old", (1, 0, 0), (0, 1, 2), plus=1.0),
    Take("bank", (2, 0, 0), (1, 4, 6), eye=1.0),
)
STATE = {"dense": torch.arange(48.0).view(12, 4), "old": torch.arange(24.0).view(2, 2, 6)}


def test_any_block_is_that_of_the_whole() -> None:
    reader = GrownReader(InMemory(STATE), from_rows(Take, takes_to_json(TAKES)))
    bank = whole(reader, "model.bank")
    assert torch.equal(bank[0], 2 * STATE["dense"][6:].T)
    assert torch.equal(bank[1, 2:], STATE["old"][1] + 1)
    assert torch.equal(bank[2], torch.eye(4, 6))
    assert 0.1 < bank[1, :2].std() < 1
    for offsets in product(range(3), range(4), range(6)):
        rest = (3 - offsets[0], 4 - offsets[1], 6 - offsets[2])
        for sizes in {rest, (1, 1, 1), (1, *rest[1:]), (*rest[:2], 1)}:
            ends = [at + size for at, size in zip(offsets, sizes, strict=True)]
            block = torch.empty(sizes)
            reader.fill(block, "model.bank", offsets)
            assert torch.equal(block, bank[tuple(map(slice, offsets, ends))])


@pytest.mark.parametrize(
    ("takes", "answer"),
    [
        (TAKES[:2] + TAKES[3:], "bank: rows 1 of 3"),
        (TAKES + TAKES[:1], "more than once"),
        ((Take("bank", (0, 0), (4, 8), "dense", (5, 0), (1, 0)),), r"\(5, 0\) of dense, .*12, 4"),
        ((Take("bank", (0, 0), (4, 8), "dense", (0, -1), (1, 0)),), r"at \(0, -1\) of dense"),
        ((Take("bank", (0, 0), (2, 4), "dense", (0, 0), (1, 1)),), r"copies \[4, 4\]"),
        ((Take("bank", (0, 0, 0), (2, 4, 8), "dense", (0, 0), (2, 1)),), r"copies \[8, 4\]"),
        ((Take("bank", (0,), (4,), "none", (0,), (0,)),), "of none, which is None"),
    ],
)
def test_a_table_that_does_not_fit_is_refused(takes: tuple[Take, ...], answer: str) -> None:
    with pytest.raises(CheckpointError, match=answer):
        GrownReader(InMemory(STATE), takes)


COPY = ["bank", [0], [4], "dense", [0], [0], 1.0, 0.0, 0.0, 0.0, 0]
WRONG = {
    0: [5, None, ["a"]],
    1: [0, "0", [0, 0]],
    2: [[math.nan], [-1]],
    3: [None],
    4: ["000", [0.5]],
}
WRONG |= {5: [[9], [-1], "0"], 6: ["x", None, math.nan], 9: [math.inf, "1"], 10: [{}, -1]}
CHANGED = [[*COPY[:at], value, *COPY[at + 1 :]] for at, values in WRONG.items() for value in values]


@pytest.mark.parametrize("row", [COPY[:2], "bank", *CHANGED], ids=repr)
def test_a_table_of_other_rows_is_refused(row: Any) -> None:
    assert from_rows(Take, [COPY])
    with pytest.raises(CheckpointError, match="parts of tensors is damaged"):
        from_rows(Take, [row])
