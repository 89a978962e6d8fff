"""The all-to-all dispatcher equals one rank bitwise on real processes, also for adversarial routings.

One world runs many cases, because starting it costs more than they do.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from dispatch_cases import (
    EXPERTS,
    SCENES,
    Case,
    Scene,
    bank_layer,
    joined,
    run_layer,
    scene_case,
)
from meshes import meshed
from torch import Tensor
from world import run_ranks

from moebius.distributed.dispatch.choose import make_dispatcher
from moebius.distributed.dispatch.exchange import AllToAll, Pending
from moebius.model.moe import SparseLayer

F32, BF16 = torch.float32, torch.bfloat16
DTYPES = [F32, BF16, torch.float64]
Exchanges = list[tuple[torch.dtype, bool]]  # of rows of that dtype, and whether splits are uneven


@dataclass(frozen=True)
class Passed:
    """A scene, and the dtypes of the experts and of the rows: in bfloat16 training the residual
    stream is float32, the experts' weights are not.
    """

    scene: Scene
    experts: torch.dtype = F32
    rows: torch.dtype = F32
    kind: str = "token"
    form: Mapping[str, Any] = field(default_factory=dict)

    def layer(self, first: int = 0, count: int = EXPERTS) -> SparseLayer:
        return bank_layer(self.experts, first, count, **self.form)

    def given(self, rank: int) -> Case:
        found = scene_case(self.scene, self.kind, rank, self.rows)
        return replace(found, grad=found.grad.to(self.experts))


def on_ranks(
    passes: list[Passed], ep: int, counts: str
) -> list[tuple[dict[str, Tensor], Exchanges]]:
    """This rank's results, and the exchanges of each pass; counts may be "unread"."""
    found, share = [], EXPERTS // ep
    with meshed(ep=ep) as (_, mesh):
        own = [(each.layer(mesh.rank * share, share), each.given(mesh.rank)) for each in passes]
        exchanges = record_exchanges()
        if counts == "unread":
            forbid_reading_counts()
        for layer, given in own:
            layer.dispatcher = make_dispatcher("alltoall", mesh.ep_group)
            exchanges.clear()
            found.append((run_layer(layer, given), list(exchanges)))
    return found


def record_exchanges() -> Exchanges:
    """Wraps the collective for the rest of this process's life, which is a test's."""
    seen: Exchanges = []
    start = AllToAll.start

    def recorded(self: AllToAll, rows: Tensor) -> Pending:
        seen.append((rows.dtype, len({*self.sent, *self.received}) > 1))
        return start(self, rows)

    AllToAll.start = recorded
    return seen


def forbid_reading_counts() -> None:
    def refuse(*_args, **_options) -> None:
        raise AssertionError("counts are read or sorted")

    torch.argsort = torch.sort = torch.bincount = refuse
    Tensor.tolist = Tensor.item = refuse  # pyright: ignore[reportAttributeAccessIssue]


def compare_with_one_rank(
    world_size: int, passes: list[Passed], counts: str = "read"
) -> list[list[Exchanges]]:
    """Compares, and returns every rank's exchanges of each pass."""
    by_rank = run_ranks(on_ranks, world_size, passes, world_size, counts)
    for each, *ranks in zip(passes, *by_rank, strict=True):
        whole = joined([each.given(rank) for rank in range(world_size)])
        for key, value in run_layer(each.layer(), whole).items():
            found = torch.cat([results[key] for results, _ in ranks])
            assert torch.equal(found, value), (each, key, (found - value).abs().max())
    return [[exchanges for _, exchanges in rank] for rank in by_rank]


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_alltoall_equals_one_rank_bitwise(world_size: int) -> None:
    dtypes = DTYPES if world_size == 4 else DTYPES[:1]
    passes = [Passed(scene, dtype, dtype) for scene in SCENES.values() for dtype in dtypes]
    compare_with_one_rank(world_size, [*passes, Passed(SCENES["uneven"], BF16, F32)])


@pytest.mark.parametrize("world_size", [2, 4])
def test_known_counts_travel_unasked_and_equal_one_rank_bitwise(world_size: int) -> None:
    """Expert choice, where a rank's row may have many routes or none."""
    passes = [
        Passed(SCENES["uneven"], dtype, dtype, "expert choice", form)
        for form in ({}, {"activation": "swiglu", "bias": True})
        for dtype in (F32, BF16)
    ]
    for rank in compare_with_one_rank(world_size, passes, "unread"):
        for each, exchanges in zip(passes, rank, strict=True):
            # Forward: rows, gate weights, answers. Backward: the same in the other direction. Never a
            # count, never uneven splits.
            rows, gates = (each.rows, False), (F32, False)
            assert exchanges[:3] == [rows, gates, rows]
            assert sorted(exchanges[3:], key=str) == sorted([rows, gates, rows], key=str)


def test_one_expert_per_rank_on_eight_ranks_is_bitwise_too() -> None:
    scene = Scene((5, 0, 7, 3, 9, 1, 4, 6))
    compare_with_one_rank(8, [Passed(scene, dtype, dtype) for dtype in DTYPES])
