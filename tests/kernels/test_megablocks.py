"""Errors where MegaBlocks cannot run. For the backend see test_backends.py (on a stand-in) and
triton/test_gpu.py.
"""

import sys
from collections.abc import Iterator
from types import ModuleType

import pytest
import torch
from megablocks_stand_in import forget

from moebius.kernels.backend import resolve_backend
from moebius.kernels.libraries import megablocks


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    forget()
    yield
    forget()


@pytest.mark.parametrize("missing", ["megablocks.ops", "grouped_gemm.backend"])
def test_the_error_names_the_part_that_is_missing_and_the_line_that_installs_it(
    missing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("megablocks", "megablocks.ops", "grouped_gemm.backend"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(ValueError, match="backend='megablocks' cannot run here") as error:
        resolve_backend("megablocks", torch.device("cuda"), torch.bfloat16)
    assert f"(import of {missing} halted" in str(error.value)
    assert megablocks.INSTALL_LINE in str(error.value)


@pytest.mark.parametrize(
    ("device", "dtype"), [("cpu", torch.bfloat16), ("cuda", torch.float32)], ids=str
)
def test_other_devices_and_dtypes_are_refused(device: str, dtype: torch.dtype) -> None:
    told = f"MegaBlocks supports bfloat16 on CUDA, and the weights are {dtype} on {device}"
    with pytest.raises(ValueError, match=told):
        resolve_backend("megablocks", torch.device(device), dtype)


def test_without_data_it_need_not_be_there() -> None:
    """A dry run on the meta device plans for a machine that has it."""
    assert resolve_backend("megablocks", torch.device("meta"), torch.bfloat16) == "megablocks"
