"""What an exchange sends and what ranks read of each other, on a GPU, against loops; and torch's
symmetric memory for one rank, as far as one GPU can have it.
"""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import fields, is_dataclass, replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("triton", reason="Triton is not installed")
if not torch.cuda.is_available():
    pytest.skip("there is no GPU here", allow_module_level=True)

from dispatch_cases import KINDS, own_layer, run_layer, scene_case
from peer_cases import DTYPES, ONE_CHUNK, check_back, check_out
from send_cases import CASES, addresses, check_received, check_sends, weights
from world import run_ranks

from moebius.distributed.dispatch.base import equal_rows
from moebius.distributed.dispatch.choose import make_dispatcher
from moebius.distributed.process.process import start_process
from moebius.distributed.symmetric.peer_outbox import PeerOutbox, open_peer_outbox
from moebius.kernels import peers, sends
from moebius.kernels.peers import Peers


def moved(value: Any, device: str) -> Any:
    """Returns a tensor, or everything of a record, on that device."""
    if isinstance(value, torch.Tensor):
        return value.to(device)
    if isinstance(value, Peers):
        messages = [message.to(device) for message in value.messages]
        address_P = torch.tensor([message.data_ptr() for message in messages], device=device)
        return replace(value, messages=messages, address_P=address_P)
    if isinstance(value, tuple):
        return tuple(moved(each, device) for each in value)
    if is_dataclass(value) and not isinstance(value, type):
        own = {field.name: moved(getattr(value, field.name), device) for field in fields(value)}
        return replace(value, **own)
    return value


class OnGpu:
    """The functions of a module, with arguments that are brought to the GPU and results back."""

    def __init__(self, module: Any) -> None:
        self._module = module

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def called(*args: Any) -> Any:
            given = [moved(each, "cuda") for each in args]
            found = moved(getattr(self._module, name)(*given), "cpu")
            torch.cuda.synchronize()
            return found

        return called


@pytest.mark.parametrize("shuffled", [False, True], ids=["in order", "shuffled"])
@pytest.mark.parametrize("name", CASES)
def test_everything_is_written_down_as_by_loops(name: str, shuffled: bool) -> None:
    to = addresses(name, shuffled=shuffled)
    for dtype in (torch.float32, torch.float64):
        weight_N = weights(to, dtype)
        counts = sends.count_sends(moved(to, "cuda"))
        packed = sends.pack_sends(moved(to, "cuda"), counts, weight_N.cuda())
        check_sends(to, moved(counts, "cpu"), moved(packed, "cpu"), weight_N)
        came = sends.unpack_sends(packed.metadata_N4, counts.counts_V3, 7)
        check_received(moved(came, "cpu"), packed.metadata_N4.cpu(), counts.counts_V3.cpu())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ONE_CHUNK)
def test_every_rank_finds_what_is_its_own(name: str, dtype: torch.dtype) -> None:
    check_out(OnGpu(peers), name, dtype, 20)
    check_back(OnGpu(peers), name, dtype, 20)


def through_own_memory() -> dict[str, list[str]]:
    found = {}
    with start_process("cuda", timeout_s=60) as process:
        assert dist.group.WORLD is not None
        outbox = open_peer_outbox(dist.group.WORLD, process.device, timeout_s=10)
        assert isinstance(outbox, PeerOutbox), outbox
        for kind in KINDS:
            given = moved(scene_case("even", kind, process.rank), "cuda")
            results = []
            for name, memory, promise in (
                ("dedup", None, nullcontext),
                ("symmetric", outbox, nullcontext),
                ("symmetric", outbox, equal_rows),  # with room, and without a read on the host
            ):
                dispatcher: Any = make_dispatcher(name, dist.group.WORLD, outbox=memory)
                layer = own_layer(process, dispatcher).cuda()
                with promise():
                    results.append(run_layer(layer, given))
            found[kind] = [
                name
                for name, value in results[0].items()
                if not all(torch.equal(value, other[name]) for other in results[1:])
            ]
    return found


def test_torch_gives_one_rank_symmetric_memory() -> None:
    """Between GPUs it is for a machine with several."""
    assert run_ranks(through_own_memory, 1, timeout_s=120) == [{kind: [] for kind in KINDS}]
