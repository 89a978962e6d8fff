"""Recomputation across ranks gives the same bits and counters; `selective` resends nothing, `full`
everything.
"""

from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, Self

import pytest
import torch
from family import make_uneven, micro_batch_of, set_options, some_tokens, tiny_config
from meshes import meshed, model_on
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch_modes import LiveMemory, Operations
from world import run_ranks

from moebius.distributed.dispatch.choose import counters_of
from moebius.distributed.dispatch.table import needs_outbox
from moebius.distributed.mesh import Mesh
from moebius.distributed.symmetric.outbox import Outbox
from moebius.model.execution.precision import forward_in
from moebius.model.execution.recompute import Recompute
from moebius.planning.hardware import HARDWARE
from moebius.planning.prediction import LayoutCandidate, Scenario
from moebius.planning.routing_skew import RoutingSkew
from moebius.planning.step_memory import predict_memory
from moebius.planning.workload import describe
from moebius.train.loss import micro_batch_loss

RANKS, MICRO_BATCH, POSITIONS = 4, 4, 6
MODES: tuple[Recompute, ...] = ("none", "selective", "full")


@dataclass(frozen=True)
class Way:
    dispatcher: str
    check_every: int = 0
    backend: str = "auto"
    dtype: torch.dtype = torch.float32


# Experts on V and O; a random second expert and a capacity; halting; routes of known counts of both
# kinds.
RECIPES = {
    "moeut": {"num_layers": 2},
    "gshard": {},
    "sut": {"num_layers": 3},
    "mixture_of_tokens": {
        "feed_forward.router": {"kind": "mixture_of_tokens", "sequences_per_group": 4}
    },
    "expert_choice": {
        "feed_forward.router": {
            "kind": "expert_choice",
            "sequences_per_group": 4,
            "mean_experts": 2,
        }
    },
}
LOW = torch.bfloat16
CASES = [
    *(
        ("moeut", way)
        for way in (
            Way("allgather"),
            Way("alltoall"),
            Way("dedup"),
            Way("hierarchical"),
            Way("symmetric"),
            Way("symmetric", check_every=1),
            Way("alltoall", check_every=2),
            Way("dedup", check_every=1),
            Way("dedup", backend="reference"),
            Way("alltoall", dtype=LOW),
            Way("hierarchical", dtype=LOW),
        )
    ),
    *(
        (name, way)
        for name in ("gshard", "sut")
        for way in (Way("alltoall"), Way("dedup", dtype=LOW))
    ),
    ("mixture_of_tokens", Way("dedup")),
    ("expert_choice", Way("alltoall", dtype=LOW)),
]


class Exchanges(TorchDispatchMode):
    """The kinds of collectives and of posted messages, in their order."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __enter__(self) -> Self:
        self._post = {name: getattr(Outbox, name) for name in ("_post_out", "_post_back")}
        for name, post in self._post.items():
            setattr(Outbox, name, self._counted(post))
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        for name, post in self._post.items():
            setattr(Outbox, name, post)
        super().__exit__(*error)

    def _counted(self, post: Any) -> Any:
        def counted(*args: Any, **kwargs: Any) -> Any:
            self.names.append("rows")
            return post(*args, **kwargs)

        return counted

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func)
        if name.startswith("c10d."):
            kind = "integers" if args[0].dtype == torch.int64 else "rows"
            self.names.append(kind)
        return func(*args, **(kwargs or {}))


@dataclass(frozen=True)
class Taken:
    """The results and exchanges of one forward and backward pass."""

    values: dict[str, Tensor]
    forward: list[str]
    backward: list[str]
    counted: dict[str, dict[str, float]]


def take(name: str, mode: Recompute, way: Way, mesh: Mesh) -> Taken:
    model = model_on(
        mesh,
        tiny_config(name, RECIPES[name]),
        dispatcher=way.dispatcher,
        backend=way.backend,
        check_every=way.check_every,
        ranks_per_node=RANKS if needs_outbox(way.dispatcher) else 2,  # it stays inside a node
    )
    set_options(make_uneven(model), recompute=mode)
    model.before_step(0)
    rows = some_tokens(MICRO_BATCH, POSITIONS + 1, seed=mesh.rank)
    if mesh.rank == 3:
        rows[:] = 7  # every token alike: some ranks get nothing of it
    torch.manual_seed(mesh.rank)
    with Exchanges() as forward:
        result = micro_batch_loss(
            partial(forward_in, model, way.dtype),
            micro_batch_of(rows),
            global_sequences=MICRO_BATCH,
        )
    with Exchanges() as backward:
        result.loss.backward()
    values = {name: p.grad for name, p in model.named_parameters() if p.grad is not None} | {
        "loss": result.loss.detach()
    }
    counted = {layer: asdict(counters) for layer, counters in counters_of(model).items()}
    for counters in counted.values():
        counters.pop("waited_s")
    return Taken(values, forward.names, backward.names, counted)


def differences(name: str, way: Way, mesh: Mesh) -> list[str]:
    """What is wrong on this rank."""
    none, *others = (take(name, mode, way, mesh) for mode in MODES)
    found = []
    for mode, other in zip(MODES[1:], others, strict=True):
        unequal = [
            key for key, value in none.values.items() if not torch.equal(value, other.values[key])
        ]
        again = exchanged_again(none.forward, way) if mode == "full" else 0
        more = len(other.backward) - len(none.backward)
        checks = {
            f"other values of {unequal}": bool(unequal),
            f"counted {other.counted}, not {none.counted}": other.counted != none.counted,
            f"exchanges of the forward pass {other.forward}, not {none.forward}": other.forward
            != none.forward,
            f"{more} exchanges more in the backward pass, not {again}": more != again,
        }
        found += [f"{name}, {mode}, {way}: {text}" for text, wrong in checks.items() if wrong]
    return found


def exchanged_again(forward: list[str], way: Way) -> int:
    """All rows, but no counts or checks; for `allgather` also one table of routes per table of counts."""
    return forward.count("rows") + (
        forward.count("integers") // 2 if way.dispatcher == "allgather" else 0
    )


def everything() -> list[str]:
    with meshed(ep=RANKS) as (_, mesh):
        return [fault for name, way in CASES for fault in differences(name, way, mesh)]


@pytest.mark.slow
def test_every_dispatcher_keeps_its_bits_and_repeats_what_it_should() -> None:
    assert run_ranks(everything, RANKS, timeout_s=240) == [[]] * RANKS


WIDE = tiny_config("moeut", {"d_model": 128, "attention.d_head": 32, "feed_forward.d_expert": 64})


def remaining_bytes(tokens: int) -> dict[str, float]:
    """Bytes per token that each mode saves for the backward pass on this rank."""
    found = {}
    with meshed(ep=2) as (_, mesh):
        for mode in MODES:
            live = []
            for sequences in (tokens // POSITIONS, 2 * tokens // POSITIONS):
                model = model_on(mesh, WIDE, dispatcher="dedup")
                set_options(model, recompute=mode)
                rows = some_tokens(sequences, POSITIONS + 1, seed=mesh.rank)
                with LiveMemory() as memory:
                    output = forward_in(model, torch.bfloat16, rows[:, :-1], targets_BS=rows[:, 1:])
                live.append(memory.num_bytes)
                del output
            found[mode] = (live[1] - live[0]) / tokens
    return found


@pytest.mark.slow
def test_the_planner_knows_what_remains() -> None:
    work = describe(WIDE, seq_len=POSITIONS, precision="bfloat16")
    scenario = Scenario(work, HARDWARE["h100"], 1, RoutingSkew())
    memory = {
        mode: predict_memory(scenario, LayoutCandidate(1, 2, 2, "none", "dedup", mode))
        for mode in MODES
    }
    planned = {mode: each.activations + each.routed for mode, each in memory.items()}
    for found in run_ranks(remaining_bytes, 2, 600):
        # Both with one step at work and its buffers, which the planner counts, and the read-out,
        # which is there.
        assert found["selective"] - found["full"] == pytest.approx(
            planned["selective"] - planned["full"], rel=0.05
        )
        kept = work.num_layers * (
            4 * WIDE.d_model + 8 * sum(bank.routes for bank in work.members[0].banks)
        )
        read_out = 8 * WIDE.d_model  # what the final norm reads, and the gradient of what it gives
        assert found["full"] == pytest.approx(kept + read_out, rel=0.2)
        assert found["none"] == pytest.approx(planned["none"], rel=0.2)


def sharded_differences(ep: int, layers_per_group: int, dtype: torch.dtype) -> list[str]:
    """Gathers, scatters and gradients of sharded weights; layers that repeat, which stay gathered,
    and layers that do not.
    """
    found = []
    with meshed(ep=ep, dp_shard=2) as (_, mesh):
        none, *others = (sharded_pass(mode, layers_per_group, dtype, mesh) for mode in MODES)
        for mode, other in zip(MODES[1:], others, strict=True):
            wrong = [key for key, value in none[0].items() if not torch.equal(value, other[0][key])]
            found += [f"{mode}: {wrong}"] * bool(wrong)
            found += [f"{mode}: {other[1]}, not {none[1]}"] * (other[1] != none[1])
    return found


def sharded_pass(
    mode: Recompute, layers_per_group: int, dtype: torch.dtype, mesh: Mesh
) -> tuple[dict[str, Tensor], dict[str, int]]:
    config = tiny_config("moeut", {"layers_per_group": layers_per_group})
    model = model_on(mesh, config, sharding="fsdp", precision=dtype)
    set_options(model, recompute=mode)
    model.before_step(0)
    rows = some_tokens(MICRO_BATCH, POSITIONS, seed=mesh.rank)
    operations = Operations()
    for _ in range(2):  # the first pass of sharded weights is another than all that follow
        with operations:
            micro_batch_loss(
                partial(forward_in, model, dtype), micro_batch_of(rows), global_sequences=8
            ).loss.backward()
    gathers = {
        name: count
        for name, count in operations.names.items()
        if name.startswith("c10d.") and "alltoall" not in name
    }
    assert gathers["c10d._allgather_base_.default"] > 0
    values = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {n: v.to_local() if isinstance(v, DTensor) else v for n, v in values.items()}, gathers


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ep", "layers_per_group", "dtype"),
    [(1, 2, torch.float32), (2, 2, LOW), (2, 4, torch.float32)],
)
def test_sharded_weights_are_gathered_no_more_often(
    ep: int, layers_per_group: int, dtype: torch.dtype
) -> None:
    assert run_ranks(sharded_differences, 2, ep, layers_per_group, dtype) == [[]] * 2
