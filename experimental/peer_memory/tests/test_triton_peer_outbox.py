"""A whole exchange between processes by Triton's kernels, which read the memory of other processes:
the bits of collectives.
"""

import pytest
import torch
from dispatch_cases import KINDS, dispatcher_of, own_layer, run_layer, scene_case, world
from world import run_ranks

from experimental.peer_memory import peers
from experimental.peer_memory.tests.shared_files import open_files
from moebius.kernels import sends
from moebius.kernels.cpu import sends as cpu_sends


def differences() -> dict[str, list[str]]:
    found = {}
    with world() as (process, group, nodes):
        outbox = open_files(group, row_bytes=64)
        for kind in KINDS:
            given = scene_case("even", kind, process.rank)
            wanted = run_layer(own_layer(process, dispatcher_of("dedup", group, nodes)), given)
            by_torch = cpu_sends.can_send, sends._has_triton, peers._by_triton
            cpu_sends.can_send = lambda tensor: False
            sends._has_triton = lambda tensor: True
            peers._by_triton = lambda messages: True
            dispatcher = dispatcher_of("symmetric", group, nodes, outbox=outbox)
            result = run_layer(own_layer(process, dispatcher), given)
            cpu_sends.can_send, sends._has_triton, peers._by_triton = by_torch
            found[kind] = [
                name for name, value in result.items() if not torch.equal(value, wanted[name])
            ]
    return found


@pytest.mark.slow
def test_the_kernels_give_the_bits_of_collectives() -> None:
    assert run_ranks(differences, 2, timeout_s=120) == [{kind: [] for kind in KINDS}] * 2
