"""How the C++ kernels come to be, and what is said where they cannot."""

from pathlib import Path

import pytest
import torch

from moebius.kernels import backend
from moebius.kernels.avx512 import build as ours
from moebius.kernels.backend import resolve_backend

CPU = torch.device("cpu")
EVERY_FLAG = frozenset(
    {"avx512f", "avx512bw", "avx512vl", "avx512dq", "fma", "bmi2", "avx512_bf16"}
)

READ_FLAGS = ours._cpu_flags.__wrapped__  # the fixture below puts EVERY_FLAG in its place


@pytest.fixture(autouse=True)
def elsewhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A machine that has the CPU and nothing compiled yet; what it answers is not remembered."""
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    monkeypatch.setattr(ours, "_cpu_flags", lambda: EVERY_FLAG)
    for remembered in ("reason_against", "_fastest"):
        monkeypatch.setattr(backend, remembered, getattr(backend, remembered).__wrapped__)
    return tmp_path


@pytest.mark.slow
@pytest.mark.skipif(
    ours.reason_against(torch.float32) is not None, reason=f"{ours.reason_against(torch.float32)}"
)
def test_it_is_compiled_once_and_nothing_else_is_left(
    elsewhere: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = ours.LIBRARY.file
    assert ours.load_library.__wrapped__() is not None
    assert {file for file in elsewhere.rglob("*") if file.is_file()} == {
        path,
        path.with_name("lock"),
    }
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert ours.load_library.__wrapped__() is not None


@pytest.mark.parametrize(
    ("flags", "dtype", "told"),
    [
        (EVERY_FLAG - {"avx512f"}, torch.float32, "this CPU has no avx512f"),
        (EVERY_FLAG - {"avx512_bf16"}, torch.bfloat16, "this CPU has no avx512_bf16"),
        (EVERY_FLAG, torch.float64, "for float32 and bfloat16, not float64"),
    ],
)
def test_a_cpu_or_dtype_that_cannot_is_told(
    flags: frozenset[str], dtype: torch.dtype, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ours, "_cpu_flags", lambda: flags)
    with pytest.raises(ValueError, match=told):
        resolve_backend("avx512", CPU, dtype)
    assert resolve_backend("auto", CPU, dtype) == "segments"


def test_without_a_list_of_the_cpus_flags_there_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on macOS, which has no /proc."""

    def read(*_: object, **__: object) -> str:
        raise FileNotFoundError("/proc/cpuinfo")

    monkeypatch.setattr(Path, "read_text", read)
    assert READ_FLAGS() == frozenset()


def test_bfloat16_alone_may_be_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ours, "_cpu_flags", lambda: EVERY_FLAG - {"avx512_bf16"})
    monkeypatch.setenv("CXX", "true")  # a compiler that is there
    assert ours.reason_against(torch.float32) is None


def test_without_a_compiler_one_is_told_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(
        ValueError,
        match=r"no C\+\+ compiler 'no-such-compiler': .* CXX; or set kernels\.backend=auto",
    ):
        resolve_backend("avx512", CPU, torch.float32)


def test_what_is_compiled_already_needs_no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    ours.LIBRARY.file.parent.mkdir(parents=True)
    ours.LIBRARY.file.touch()
    assert ours.reason_against(torch.float32) is None


def test_on_a_gpu_it_is_refused() -> None:
    with pytest.raises(ValueError, match="it is for CPUs, and the weights are on cuda"):
        resolve_backend("avx512", torch.device("cuda"), torch.float32)
