"""Messages through memory that devices read of each other, here files: the bits of collectives."""

from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from dispatch_cases import (
    KINDS,
    SCENES,
    dispatcher_of,
    own_layer,
    run_layer,
    scene_case,
    world,
)
from family import VOCABULARY, tiny_config
from torch._C._distributed_c10d import _SymmetricMemory
from torch.distributed import _symmetric_memory
from world import run_ranks

from experimental.peer_memory import peer_outbox, peers
from experimental.peer_memory.peer_outbox import open_peer_outbox
from experimental.peer_memory.symmetric_memory import SymmetricMemory
from experimental.peer_memory.tests.shared_files import open_files, to_nearest
from moebius.distributed.dispatch import measure
from moebius.distributed.layout import MeshConfig, plan_layout
from moebius.distributed.mesh import Mesh, build_mesh
from moebius.distributed.parallelize import build_model
from moebius.distributed.process.process import start_process
from moebius.distributed.symmetric.interface import OutboxError
from moebius.kernels import sends
from moebius.model.execution.precision import forward_in
from moebius.model.execution.recompute import Recompute
from moebius.train.loss import micro_batch_loss

QUICK = ("even", "a rank without tokens")  # of the scenes


def differences(dtype: torch.dtype, scenes: tuple[str, ...]) -> dict[tuple, list[str]]:
    found = {}
    with world() as (process, group, nodes):
        sends._sum_by_row = to_nearest
        outbox = open_files(group, row_bytes=64)  # which is never enough
        room = outbox.num_bytes
        for scene in scenes:
            for kind in KINDS:
                given = scene_case(scene, kind, process.rank, dtype)
                results = []
                for way, memory in (("dedup", None), ("symmetric", outbox)):
                    dispatcher: Any = dispatcher_of(way, group, nodes, outbox=memory, check_every=2)
                    results.append(run_layer(own_layer(process, dispatcher, dtype), given))
                    counted = dispatcher.stats()
                    results[-1]["counted"] = torch.tensor(
                        [counted.rows_sent, counted.routes_served]
                    )
                first, result = results
                found[scene, kind] = [
                    key for key, value in result.items() if not torch.equal(value, first[key])
                ]
        assert outbox.num_bytes > room
    return found


@pytest.mark.parametrize(
    ("dtype", "scenes"),
    [
        (torch.float32, QUICK),
        *(
            pytest.param(dtype, tuple(SCENES), marks=pytest.mark.slow)
            for dtype in (torch.float32, torch.bfloat16, torch.float64)
        ),
    ],
)
def test_memory_of_devices_gives_the_bits_of_collectives(
    dtype: torch.dtype, scenes: tuple[str, ...]
) -> None:
    for found in run_ranks(differences, 4, dtype, scenes, timeout_s=120):
        assert len(found) == len(scenes) * len(KINDS)
        assert {key: names for key, names in found.items() if names} == {}


def recomputed() -> list[str]:
    """What differs between recomputing nothing and recomputing, and from `dedup`."""
    found = []
    with start_process("cpu", timeout_s=60) as process:
        mesh = build_mesh(plan_layout(MeshConfig(ep=2), 2), process)
        sends._sum_by_row = to_nearest
        measure._wanted_outbox = lambda group, *_: open_files(group, row_bytes=64)
        for name, dtype in (("moeut", torch.float32), ("sut", torch.bfloat16)):
            results = {
                (dispatcher, mode): gradients(name, dispatcher, mode, dtype, mesh)
                for dispatcher in ("dedup", "symmetric")
                for mode in ("none", "selective", "full")
            }
            wanted = results["dedup", "none"]
            for key, result in results.items():
                unequal = [n for n, value in wanted.items() if not torch.equal(value, result[n])]
                found += [f"{name} {key}: {unequal}"] * bool(unequal)
    return found


def gradients(
    name: str, dispatcher: str, mode: Recompute, dtype: torch.dtype, mesh: Mesh
) -> dict[str, torch.Tensor]:
    device = torch.device("cpu")
    config = tiny_config(name, {"num_layers": 2})
    model = build_model(config, mesh, dispatcher=dispatcher, backend="auto", seed=0, device=device)
    model.recompute_layers(mode)
    model.before_step(0)
    generator = torch.Generator().manual_seed(mesh.rank)
    rows = torch.randint(VOCABULARY, (4, 7), generator=generator)
    torch.manual_seed(mesh.rank)
    result = micro_batch_loss(partial(forward_in, model, dtype), rows, global_sequences=4)
    result.loss.backward()
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return found | {"loss": result.loss.detach()}


@pytest.mark.slow
def test_recomputed_passes_have_the_same_bits() -> None:
    assert run_ranks(recomputed, 2, timeout_s=240) == [[]] * 2


def reads_of_a_pass() -> tuple[int, int]:
    """How often a pass and its gradients read a number from a tensor that a device would hold."""
    with world() as (process, group, nodes):
        given = scene_case("even", "token", process.rank)
        dispatcher: Any = dispatcher_of("symmetric", group, nodes, outbox=open_files(group))
        layer = own_layer(process, dispatcher)
        run_layer(layer, given)
        headers = list[int]()
        tolist = torch.Tensor.tolist

        def counted(self: torch.Tensor) -> object:
            if self.shape == (process.world_size, peers.Layout(process.world_size, 0, 0).words):
                headers.append(1)
            return tolist(self)

        torch.Tensor.tolist = counted  # pyright: ignore[reportAttributeAccessIssue]
        posted = dispatcher.outbox._next
        run_layer(layer, given)
        return len(headers), dispatcher.outbox._next - posted


def test_a_pass_is_four_messages_and_one_read_on_the_host() -> None:
    assert run_ranks(reads_of_a_pass, 2, timeout_s=60) == [(1, 4)] * 2


def refusals() -> list[str]:
    """What is said where ranks or callers do what cannot be."""
    said = []
    with world() as (process, group, nodes):
        given = scene_case("even", "token", process.rank)
        outbox = open_files(group)
        chunks = dispatcher_of("symmetric", group, nodes, outbox=outbox, overlap_chunks=2)
        with pytest.raises(ValueError, match="overlap_chunks=2") as error:
            run_layer(own_layer(process, chunks), given)
        said.append(str(error.value))
        wide = given.x if process.rank else given.x[:, :3]
        dispatcher = dispatcher_of("symmetric", group, nodes, outbox=outbox)
        dispatched = dispatcher.dispatch(wide, given.routes)
        with pytest.raises(OutboxError, match="two exchanges at a time"):
            dispatcher.dispatch(wide, given.routes)
        with pytest.raises(OutboxError, match="exchange different things") as error:
            _ = dispatched.chunks[0].x_UD
        said.append(str(error.value))
    return said


def test_what_cannot_be_is_refused_on_every_rank() -> None:
    for chunks, different in run_ranks(refusals, 2, timeout_s=60):
        assert 'set mesh.overlap_chunks=1, or mesh.dispatcher="dedup"' in chunks
        assert "bytes of a row" in different


def test_auto_leaves_gpus_with_collectives_and_says_why() -> None:
    reason = measure._outbox_of(None, torch.device("cuda"), None, 1.0)  # pyright: ignore[reportArgumentType]
    assert 'ask for it by name (mesh.dispatcher="symmetric")' in str(reason)


def test_torch_is_asked_as_it_wants_to_be(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch's symmetric memory wants a GPU: its functions' signatures are all that is seen here."""
    own = torch.zeros(64, dtype=torch.uint8)
    handle = mock.create_autospec(_SymmetricMemory, instance=True, spec_set=True)
    handle.world_size = 2
    handle.get_buffer.side_effect = lambda rank, sizes, dtype: own[: sizes[0]].view(dtype)
    empty = mock.create_autospec(_symmetric_memory.empty, return_value=own)
    rendezvous = mock.create_autospec(_symmetric_memory.rendezvous, return_value=handle)
    monkeypatch.setattr(_symmetric_memory, "empty", empty)
    monkeypatch.setattr(_symmetric_memory, "rendezvous", rendezvous)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    group = mock.create_autospec(dist.ProcessGroup, instance=True)
    memory = SymmetricMemory(64, group, torch.device("cpu"), timeout_s=2.5)
    empty.assert_called_once_with(64, dtype=torch.uint8, device=torch.device("cpu"))
    rendezvous.assert_called_once_with(own, group)
    assert memory.address_P.tolist() == [own.data_ptr()] * 2
    memory.meet()
    handle.barrier.assert_called_once_with(channel=0, timeout_ms=2500)
    shown = [_SymmetricMemory.barrier.__doc__, _SymmetricMemory.get_buffer.__doc__]
    assert all(word in str(shown) for word in ("channel:", "timeout_ms:", "sizes:", "dtype:"))


def test_a_machine_without_gpus_says_so() -> None:
    found = run_ranks(without_gpus, 2, timeout_s=60)
    assert found[0] == found[1]
    assert "the GPUs cannot read each other's memory" in found[0]


def without_gpus() -> str:
    with world() as (_, group, _):
        found = open_peer_outbox(group, torch.device("cuda"), timeout_s=5)
        assert isinstance(found, str)
        return found


def test_gpus_without_triton_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(peer_outbox, "reason_against", lambda *_: "Triton is not installed")
    group = mock.create_autospec(dist.ProcessGroup, instance=True)
    found = open_peer_outbox(group, torch.device("cuda"), timeout_s=5)
    assert "Triton is not installed" in str(found)
