"""A pass through the memory of GPUs, traced with tensors that have no values: nothing is read on the
host.
"""

import pytest
import torch
import torch.distributed as dist
from torch._subclasses import FakeTensorMode
from torch._subclasses.fake_tensor import DataDependentOutputException
from torch.testing._internal.distributed.fake_pg import FakeStore

from experimental.peer_memory import peer_outbox
from experimental.peer_memory.peer_outbox import PeerOutbox
from moebius.distributed.dispatch import expert_map, symmetric
from moebius.distributed.dispatch.base import Setup, equal_rows
from moebius.distributed.dispatch.symmetric import SymmetricDispatcher
from moebius.kernels import functional
from moebius.model.experts import ExpertMLPs
from moebius.model.initialise import normal
from moebius.model.moe import SparseLayer
from moebius.model.routing import token_routes

RANKS, EXPERTS, TOKENS, TOP_K, WIDTH = 4, 8, 13, 3, 16


class Memory:
    """Memory of a GPU for every rank, which is nowhere."""

    def __init__(self, num_bytes: int) -> None:
        self.memories = [torch.empty(num_bytes, dtype=torch.uint8) for _ in range(RANKS)]
        self.address_P = torch.zeros(RANKS, dtype=torch.int64)

    def meet(self) -> None:
        """Meets nobody."""


@pytest.fixture
def layer(monkeypatch: pytest.MonkeyPatch):
    """A layer of experts on the first of four GPUs."""
    monkeypatch.setattr(functional, "resolve_backend", lambda *given: "triton")
    forget_tables()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=RANKS)
    try:
        with FakeTensorMode():
            experts = ExpertMLPs(
                EXPERTS // RANKS,
                WIDTH,
                8,
                backend="triton",
                up_init=normal(1.0),
                down_init=normal(1.0),
            )
            found = SparseLayer(experts)
            assert dist.group.WORLD is not None
            outbox = PeerOutbox(Memory, range(RANKS), 0, routes=4, row_bytes=64)
            found.dispatcher = SymmetricDispatcher(Setup(dist.group.WORLD, outbox=outbox))
            yield found
    finally:
        dist.destroy_process_group()
        forget_tables()


def forget_tables() -> None:
    """Empties the caches of tables on a device: they hold tensors without values now, or would."""
    for module in (expert_map, symmetric, peer_outbox):
        for value in list(vars(module).values()):
            if hasattr(value, "cache_clear"):
                value.cache_clear()


def run(layer: SparseLayer) -> None:
    experts = torch.zeros(TOKENS, TOP_K, dtype=torch.int64)
    weights = torch.rand(TOKENS, TOP_K, requires_grad=True)
    x = torch.randn(TOKENS, WIDTH, requires_grad=True)
    routes = token_routes(experts, weights, num_experts=EXPERTS)
    y = layer(x, routes)
    assert y.shape == x.shape
    y.sum().backward()
    assert x.grad is not None
    assert weights.grad is not None


def test_a_pass_with_room_reads_nothing(layer: SparseLayer) -> None:
    with equal_rows():
        run(layer)
    assert isinstance(layer.dispatcher, SymmetricDispatcher)
    assert layer.dispatcher.setup.room.take() is not None
    assert layer.dispatcher.setup.counters.unread_3 is not None


def test_a_pass_without_room_reads(layer: SparseLayer) -> None:
    with pytest.raises(DataDependentOutputException):
        run(layer)
