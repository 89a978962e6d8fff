"""How the C++ kernels come to be, and what is said where they cannot."""

import threading
import time
from pathlib import Path

import pytest
import torch
from torch.utils import cpp_extension

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
    path = ours.library_file()
    assert ours.load_library.__wrapped__() is not None
    assert {file for file in elsewhere.rglob("*") if file.is_file()} == {
        path,
        path.with_name("lock"),
    }
    monkeypatch.setattr(ours, "_build", pytest.fail)
    assert ours.load_library.__wrapped__() is not None


def test_processes_that_start_together_compile_it_once(
    elsewhere: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled = []

    def load(name: str, *_args: object, build_directory: str, **_options: object) -> None:
        compiled.append(name)
        time.sleep(0.2)  # the others are there meanwhile
        (Path(build_directory) / f"{name}.so").touch()

    monkeypatch.setattr(cpp_extension, "load", load)
    threads = [threading.Thread(target=ours._build, args=(ours.library_file(),)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert compiled == [ours._NAME]
    assert ours.library_file().exists()


def test_another_source_is_another_library(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    before, changed = ours.library_file(), tmp_path / "changed.cpp"
    changed.write_text("// nothing")
    monkeypatch.setattr(ours, "_SOURCE", changed)
    assert ours.library_file() != before


def test_a_source_that_does_not_compile_says_what_the_compiler_says(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, elsewhere: Path
) -> None:
    if reason := ours.reason_against(torch.float32):
        pytest.skip(reason)
    broken = tmp_path / "broken.cpp"
    broken.write_text("int answer = forty_two;")
    monkeypatch.setattr(ours, "_SOURCE", broken)
    with pytest.raises(
        ValueError, match=r"could not be compiled; set kernels.backend=segments(.|\n)*forty_two"
    ):
        ours.load_library.__wrapped__()
    assert not ours.library_file().exists()
    assert [file.name for file in ours.library_file().parent.iterdir()] == ["lock"]


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
    monkeypatch.setattr(cpp_extension, "is_ninja_available", lambda: True)
    assert ours.reason_against(torch.float32) is None


def test_without_a_compiler_or_ninja_one_is_told_what_to_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(
        ValueError,
        match=r"no C\+\+ compiler 'no-such-compiler': install g\+\+, or name another in .* CXX",
    ):
        resolve_backend("avx512", CPU, torch.float32)
    monkeypatch.setenv("CXX", "true")
    monkeypatch.setattr(cpp_extension, "is_ninja_available", lambda: False)
    with pytest.raises(ValueError, match=r"pip install ninja; or set kernels\.backend=auto"):
        resolve_backend("avx512", CPU, torch.float32)


def test_a_folder_that_cannot_be_written_is_told(
    monkeypatch: pytest.MonkeyPatch, elsewhere: Path
) -> None:
    monkeypatch.setenv("CXX", "true")
    monkeypatch.setattr(ours.os, "access", lambda folder, _mode: folder != elsewhere)
    with pytest.raises(
        ValueError,
        match=f"nothing can be compiled into {elsewhere}, .* another in TORCH_EXTENSIONS_DIR",
    ):
        resolve_backend("avx512", CPU, torch.float32)


def test_ninja_is_found_beside_python_where_the_environment_is_not_activated(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CXX", "/bin/true")
    monkeypatch.setenv("PATH", "/nowhere")
    assert ours.reason_against(torch.float32) is None


def test_what_is_compiled_already_needs_no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    ours.library_file().parent.mkdir(parents=True)
    ours.library_file().touch()
    assert ours.reason_against(torch.float32) is None


def test_on_a_gpu_it_is_refused() -> None:
    with pytest.raises(ValueError, match="it is for CPUs, and the weights are on cuda"):
        resolve_backend("avx512", torch.device("cuda"), torch.float32)
