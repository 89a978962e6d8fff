"""Shared memory gives the bits of collectives for all routes: `symmetric` equals `dedup`."""

from typing import Any

import pytest
import torch
from dispatch_cases import (
    KINDS,
    SCENES,
    dispatcher_of,
    own_layer,
    run_layer,
    scene_case,
    world,
)
from pairwise import slow_but
from world import run_ranks

from moebius.distributed.symmetric.outbox import Outbox, open_outbox


def differences(dtype: torch.dtype) -> dict[tuple, list[str]]:
    found = {}
    with world() as (process, group, nodes):
        outbox = open_outbox(group, timeout_s=20)
        assert isinstance(outbox, Outbox), outbox
        for scene in SCENES:
            for kind in KINDS:
                given = scene_case(scene, kind, process.rank, dtype)
                results = []
                for way, memory in (("dedup", None), ("symmetric", outbox)):
                    dispatcher: Any = dispatcher_of(way, group, nodes, outbox=memory)
                    results.append(run_layer(own_layer(process, dispatcher, dtype), given))
                    counted = dispatcher.setup.counters
                    results[-1]["counted"] = torch.tensor(
                        [counted.rows_sent, counted.routes_served]
                    )
                first, result = results
                found[scene, kind] = [
                    key for key, value in result.items() if not torch.equal(value, first[key])
                ]
        messages, by_now = post_once(outbox)
        assert messages < by_now  # it was memory that they went through
        outbox.close()
    return found


def post_once(outbox: Outbox) -> tuple[int, int]:
    """How few messages the scenes are at least, and how many there were."""
    rows = torch.zeros(outbox.num_ranks, 1)
    starts_3P1 = torch.arange(outbox.num_ranks + 1).expand(3, -1).contiguous()
    return len(SCENES) * len(KINDS), outbox.post_answers(rows, starts_3P1)


@pytest.mark.parametrize(
    "dtype", slow_but([torch.float32, torch.bfloat16, torch.float64], torch.float32)
)
def test_memory_gives_the_bits_of_collectives(dtype: torch.dtype) -> None:
    for found in run_ranks(differences, 4, dtype, timeout_s=120):
        assert len(found) == len(SCENES) * len(KINDS)
        assert {key: names for key, names in found.items() if names} == {}
