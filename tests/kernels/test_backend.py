"""The choice of a backend: which are refused where, and that resolving one imports no compiler."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from pydantic import ValidationError

from moebius.kernels import backend
from moebius.kernels.backend import KernelConfig, resolve_backend
from moebius.kernels.cpu.library import workspace
from moebius.kernels.triton import available as triton

COMPILERS = ("torch._dynamo", "torch._inductor", "torch.utils.cpp_extension", "setuptools")
CPU, GPU = torch.device("cpu"), torch.device("cuda")
F64, F32, BF16 = torch.float64, torch.float32, torch.bfloat16


@pytest.fixture(autouse=True)
def nothing_is_remembered() -> Iterator[None]:
    cached = (backend.reason_against, backend._fastest, triton.reason_against)
    for each in cached:
        each.cache_clear()
    yield
    for each in cached:
        each.cache_clear()


@pytest.mark.sample(1)
@pytest.mark.parametrize("module", ["kernels.functional", "kernels.cpu.brgemm"])
def test_importing_it_imports_no_compiler(module: str) -> None:
    script = f"import sys, moebius.{module}; print(*set(sys.modules) & set({COMPILERS}))"
    found = subprocess.run(
        [sys.executable, "-c", script], check=True, capture_output=True, text=True
    )
    assert found.stdout.split() == []


def test_it_is_marked_as_torch_marks_a_constant() -> None:
    def marked() -> None: ...

    torch.compiler.assume_constant_result(marked)
    assert marked.__dict__ == resolve_backend.__dict__ != {}


@pytest.mark.parametrize("name", [{}, [], 3, "avx"])
def test_what_is_no_backend_is_refused(name: object) -> None:
    with pytest.raises(ValidationError, match="Input should be 'auto', 'reference'"):
        KernelConfig.model_validate({"backend": name})


@pytest.mark.parametrize(
    ("device", "dtype"), [("cpu", F64), ("cuda", F32), ("cuda", torch.float16)]
)
def test_grouped_mm_is_refused_in_other_dtypes(device: str, dtype: torch.dtype) -> None:
    with pytest.raises(ValueError, match=rf"'grouped_mm' cannot run here: .*{dtype}: choose"):
        resolve_backend("grouped_mm", torch.device(device), dtype)


def test_triton_says_where_it_cannot_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(triton, "find_spec", lambda name: name)
    searched = list[str]()
    monkeypatch.setattr(triton, "lacking", searched.append)  # for a compiler, which takes long
    assert triton.reason_against("meta", BF16) is None
    for _ in range(3):  # routers and sorts ask for every call
        assert triton.reason_against("cuda", BF16) is None
    assert searched == ["cuda"]
    assert "the weights are on cpu" in str(triton.reason_against("cpu", F32))
    monkeypatch.setattr(triton, "find_spec", lambda name: None)
    triton.reason_against.cache_clear()
    reason = triton.reason_against("cuda", BF16)
    assert reason == f"Triton is not installed: {triton.INSTALL_LINE}"


@pytest.fixture
def no_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """An image with Triton and without a compiler of C."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr(triton, "find_spec", lambda name: name)
    monkeypatch.setenv("PATH", str(tmp_path))


@pytest.mark.usefixtures("no_compiler")
def test_a_gpu_without_a_compiler_is_known_before_the_first_launch(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with pytest.raises(ValueError, match=r"cannot run here: Triton needs a C compiler .* CC; or"):
        resolve_backend("triton", GPU, BF16)
    assert resolve_backend("auto", GPU, BF16) == "grouped_mm"
    assert resolve_backend("auto", GPU, F32) == "segments"
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 2
    assert "auto is grouped_mm, which is slower: Triton needs a C compiler" in said[0]


@pytest.mark.parametrize(
    ("hip", "name", "capability", "reason"),
    [
        ("6.4", "gfx942:sramecc+:xnack-", (9, 4), None),
        ("6.4", "gfx90a", (9, 0), "support gfx942 and gfx950, and this GPU is gfx90a"),
        (None, "", (7, 5), "compute capability 8.0, and this GPU has 7.5"),
        (None, "", (12, 0), None),
    ],
)
def test_chips_that_it_was_not_compiled_for_are_refused_by_name(
    hip: str | None,
    name: str,
    capability: tuple[int, int],
    reason: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(triton, "find_spec", lambda name: name)
    monkeypatch.setattr(triton, "lacking", lambda device_type: None)
    monkeypatch.setattr(torch.version, "hip", hip)
    properties = SimpleNamespace(gcnArchName=name)
    for attribute, value in (
        ("is_available", True),
        ("current_device", 0),
        ("get_device_capability", capability),
        ("get_device_properties", properties),
    ):
        monkeypatch.setattr(torch.cuda, attribute, lambda *_, value=value: value)
    said = triton.reason_against("cuda", BF16)
    assert said is None if reason is None else reason in str(said)


def test_work_memory_is_kept_on_the_cpu_alone() -> None:
    first = workspace("test", (2, 3), torch.empty(1))
    assert workspace("test", (3, 2), torch.empty(1)).data_ptr() == first.data_ptr()
    pretended = workspace("test", (2, 3), torch.empty(1, dtype=BF16, device="meta"))
    assert (pretended.device.type, pretended.dtype) == ("meta", BF16)
    assert pretended.shape == (2, 3)
