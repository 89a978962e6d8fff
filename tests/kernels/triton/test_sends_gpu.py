"""What an exchange sends, on a GPU, against loops."""

from dataclasses import fields, is_dataclass, replace
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")
if not torch.cuda.is_available():
    pytest.skip("there is no GPU here", allow_module_level=True)

from send_cases import CASES, addresses, check_received, check_sends, weights

from moebius.kernels import sends


def moved(value: Any, device: str) -> Any:
    """Returns a tensor, or everything of a record, on that device."""
    if isinstance(value, torch.Tensor):
        return value.to(device)
    if isinstance(value, tuple):
        return tuple(moved(each, device) for each in value)
    if is_dataclass(value) and not isinstance(value, type):
        own = {field.name: moved(getattr(value, field.name), device) for field in fields(value)}
        return replace(value, **own)
    return value


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
