"""The Triton kernels of an exchange's sends against loops. Run it with TRITON_INTERPRET=1."""

from typing import Any

import pytest
import torch
from send_cases import CASES, addresses, check_received, check_sends, weights

from experimental.triton_sends import triton_sends as ours
from moebius.kernels.sends import UnpackedSends


def test_cases_fill_several_blocks() -> None:
    assert any(len(addresses(name).expert_N) > 2 * ours._BLOCK for name in CASES)
    assert any(addresses(name).num_sources > ours._ROWS for name in CASES)


QUICK = ("tokens", "from heads")  # and not shuffled
SLOW = [
    (name, shuffled)
    for name in CASES
    for shuffled in (False, True)
    if shuffled or name not in QUICK
]


@pytest.mark.parametrize(
    ("name", "shuffled"),
    [
        *((name, False) for name in QUICK),
        *(pytest.param(*each, marks=pytest.mark.slow) for each in SLOW),
    ],
)
def test_everything_is_written_down_as_by_loops(
    name: str, shuffled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if name != "more than a block":  # smaller blocks, so that others have several, too
        monkeypatch.setattr(ours, "_BLOCK", 32)
        monkeypatch.setattr(ours, "_ROWS", 16)
        monkeypatch.setattr(ours, "_SCAN", 32)
    to = addresses(name, shuffled=shuffled)
    for dtype in (torch.float32, torch.float64):
        weight_N = weights(to, dtype)
        counts, blocks = ours.count_sends(to)
        packed = ours.pack_sends(to, counts, blocks, weight_N)
        check_sends(to, counts, packed, weight_N)
        places_3R, weight_R = ours.unpack_sends(packed.metadata_N4, counts.counts_P3, 7)
        source_R, slot_R, target_R = places_3R.unbind(0)
        came = UnpackedSends(source_R, slot_R, target_R, weight_R)
        check_received(came, packed.metadata_N4, counts.counts_P3)


def test_so_few_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    launched: list[Any] = []
    launch = ours.launch
    monkeypatch.setattr(
        ours, "launch", lambda kernel, *args, **meta: launched.append(launch(kernel, *args, **meta))
    )
    for name, more in (("tokens", 0), ("into heads", 1)):
        launched.clear()
        to = addresses(name)
        counts, blocks = ours.count_sends(to)
        packed = ours.pack_sends(to, counts, blocks, weights(to))
        ours.unpack_sends(packed.metadata_N4, counts.counts_P3, 7)
        assert len(launched) == 5 + more
