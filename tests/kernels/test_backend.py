"""The choice of a backend: that reading it costs no compiler, and that torch.compile may fold it."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from moebius.kernels import backend, permute
from moebius.kernels.backend import KernelConfig, resolve_backend
from moebius.kernels.cpu.workspace import workspace
from moebius.kernels.triton import available as triton

COMPILERS = ("torch._dynamo", "torch._inductor", "torch.utils.cpp_extension", "setuptools")


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


def test_switches_of_triton_are_refused_elsewhere() -> None:
    with pytest.raises(
        ValueError,
        match=r"kernels.switches=\['tf32'\] are of the Triton kernels, and .*'segments': set",
    ):
        KernelConfig(backend="segments", switches=("tf32",))
    assert KernelConfig(backend="triton", switches=("tf32",)).switches == ("tf32",)


def test_triton_says_where_it_cannot_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(triton, "find_spec", lambda name: name)
    monkeypatch.setattr(triton, "lacking", lambda device_type: None)
    assert triton.reason_against("meta", torch.bfloat16) is None
    assert triton.reason_against("cuda", torch.bfloat16) is None
    assert "the weights are on cpu" in str(triton.reason_against("cpu", torch.float32))
    monkeypatch.setattr(triton, "find_spec", lambda name: None)
    reason = triton.reason_against("cuda", torch.bfloat16)
    assert reason == f"Triton is not installed: {triton.INSTALL_LINE}"


@pytest.fixture
def no_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """An image with Triton and without a compiler of C."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr(triton, "find_spec", lambda name: name)
    monkeypatch.setenv("PATH", str(tmp_path))
    for cached in (backend.reason_against, backend._fastest):
        cached.cache_clear()
    yield
    for cached in (backend.reason_against, backend._fastest):
        cached.cache_clear()


@pytest.mark.usefixtures("no_compiler")
def test_a_gpu_without_a_compiler_is_known_before_the_first_launch(
    caplog: pytest.LogCaptureFixture,
) -> None:
    gpu = torch.device("cuda")
    with pytest.raises(
        ValueError, match=r"cannot run here: Triton needs a C compiler .* CC; or set"
    ):
        backend.resolve_backend("triton", gpu, torch.bfloat16)
    assert backend.resolve_backend("auto", gpu, torch.bfloat16) == "grouped_mm"
    assert backend.resolve_backend("auto", gpu, torch.float32) == "segments"
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 2
    assert "auto is grouped_mm, which is slower: Triton needs a C compiler" in said[0]


@pytest.mark.usefixtures("no_compiler")
def test_routes_are_sorted_by_torch_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every backend sorts: without Triton's kernels it is done by torch's operations."""
    expert_N = torch.tensor([2, 0, 2, 1, 0])
    asked = list[str]()
    monkeypatch.setattr(permute, "import_module", lambda name, package: asked.append(name))
    monkeypatch.setattr(permute.cpu_routes, "can_sort", lambda expert_N: False)
    assert permute.reason_against("cuda", torch.float32) is not None
    sorting = permute.sort_routes(expert_N, 3)
    assert sorting.order_N is not None
    assert sorting.order_N.tolist() == [1, 4, 3, 0, 2]
    assert asked == []


@pytest.mark.parametrize(
    ("hip", "name", "capability", "reason"),
    [
        ("6.4", "gfx942:sramecc+:xnack-", (9, 4), None),
        ("6.4", "gfx90a", (9, 0), "compiled for gfx942 and gfx950, and this is gfx90a"),
        (None, "", (7, 5), "capability of 8.0 at least, and this GPU has 7.5"),
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
    pretend_chip(monkeypatch, hip, name, capability)
    said = triton.reason_against("cuda", torch.bfloat16)
    assert said is None if reason is None else reason in str(said)


def test_tf32_is_refused_where_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_chip(monkeypatch, "7.0", "gfx950", (9, 5))
    assert backend.resolve_backend("triton", torch.device("cuda"), torch.float32) == "triton"
    with pytest.raises(ValueError, match=r'"tf32"\] cannot be had here: gfx950 has no TensorFloat'):
        backend.resolve_backend("triton+tf32", torch.device("cuda"), torch.float32)
    backend.reason_against.cache_clear()


def pretend_chip(
    monkeypatch: pytest.MonkeyPatch, hip: str | None, name: str, capability: tuple[int, int]
) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(triton, "find_spec", lambda name: name)
    monkeypatch.setattr(triton, "lacking", lambda device_type: None)
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    properties = SimpleNamespace(gcnArchName=name)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    backend.reason_against.cache_clear()


def test_work_memory_is_kept_on_the_cpu_alone() -> None:
    first = workspace("test", (2, 3), torch.empty(1))
    assert workspace("test", (3, 2), torch.empty(1)).data_ptr() == first.data_ptr()
    pretended = workspace("test", (2, 3), torch.empty(1, dtype=torch.bfloat16, device="meta"))
    assert (pretended.device.type, pretended.dtype) == ("meta", torch.bfloat16)
    assert pretended.shape == (2, 3)
