"""The one-sided dispatcher equals `dedup` bit for bit, whatever the routes."""

from typing import Any

import pytest
import torch
from dispatch_cases import KINDS, dispatcher_of, own_layer, run_layer, scene_case, world
from dispatch_scenes import SCENES
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
                for chunks in (1, 2, 3):
                    options: dict[str, Any] = {"overlap_chunks": chunks}
                    first = run_layer(
                        own_layer(process, dispatcher_of("dedup", group, nodes, **options), dtype),
                        given,
                    )
                    layer = own_layer(
                        process,
                        dispatcher_of("symmetric", group, nodes, outbox=outbox, **options),
                        dtype,
                    )
                    result = run_layer(layer, given)
                    found[scene, kind, chunks] = [
                        key for key, value in result.items() if not torch.equal(value, first[key])
                    ]
        outbox.close()
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_it_equals_dedup_bit_for_bit(dtype: torch.dtype) -> None:
    for found in run_ranks(differences, 4, dtype, timeout_s=120):
        assert len(found) == len(SCENES) * len(KINDS) * 3
        assert {key: names for key, names in found.items() if names} == {}
