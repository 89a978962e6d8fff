"""How the C++ kernels come to be, what is said where they cannot, and what torch's micro-kernels are
trusted with.
"""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from pydantic import ValidationError

from moebius.kernels import backend
from moebius.kernels.backend import KernelConfig, resolve_backend
from moebius.kernels.cpu import brgemm as kernels
from moebius.kernels.cpu import library as ours
from moebius.kernels.functional import routed_mlp
from moebius.model.routing import token_routes

CPU = torch.device("cpu")
EVERY_FLAG = frozenset(
    {"avx2", "bmi2", "fma", "avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512_bf16"}
)
ROOT = Path(__file__).resolve().parents[3]

READ_FLAGS = ours._flags_of_cpu.__wrapped__  # the fixture below puts EVERY_FLAG in its place
can_run = pytest.mark.skipif(
    ours.reason_against(torch.float32) is not None, reason=f"{ours.reason_against(torch.float32)}"
)


@pytest.fixture
def elsewhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A machine that has the CPU and nothing compiled yet; what it answers is not remembered."""
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    monkeypatch.delenv("ONEDNN_MAX_CPU_ISA", raising=False)
    monkeypatch.setattr(ours, "_flags_of_cpu", lambda: EVERY_FLAG)
    monkeypatch.setattr(ours.platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(ours, "_micro_kernels", lambda: [1, 2, 3])
    for remembered in ("reason_against", "_fastest"):
        monkeypatch.setattr(backend, remembered, getattr(backend, remembered).__wrapped__)
    return tmp_path


@can_run
@pytest.mark.slow
def test_it_is_compiled_once_and_nothing_else_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    path = ours.library().file
    assert ours.load_library.__wrapped__() is not None
    assert "compiling brgemm.cpp, once on this machine: a few seconds" in capfd.readouterr().err
    assert {file for file in tmp_path.rglob("*") if file.is_file()} == {
        path,
        path.with_name("lock"),
    }
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert ours.load_library.__wrapped__() is not None
    assert capfd.readouterr().err == ""


@pytest.mark.usefixtures("elsewhere")
@pytest.mark.parametrize(
    ("flags", "allowed", "dtype", "told"),
    [
        (EVERY_FLAG - {"avx2"}, "", torch.float32, "for float32 this CPU has no avx2"),
        (EVERY_FLAG - {"avx512_bf16"}, "", torch.bfloat16, "this CPU has no avx512_bf16"),
        (EVERY_FLAG, "", torch.float64, "for float32 and bfloat16, not float64"),
        (EVERY_FLAG, "AVX", torch.float32, r"no avx2, .* \(with ONEDNN_MAX_CPU_ISA=AVX\)"),
        (EVERY_FLAG, "avx2_vnni", torch.bfloat16, r"avx512vl \(with ONEDNN_MAX_CPU_ISA=avx2_vnni"),
        (EVERY_FLAG, "AVX512_CORE", torch.bfloat16, r"avx512_bf16 \(with ONEDNN_MAX_CPU_ISA"),
    ],
)
def test_a_cpu_or_dtype_that_cannot_is_told(
    flags: frozenset[str],
    allowed: str,
    dtype: torch.dtype,
    told: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ours, "_flags_of_cpu", lambda: flags)
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", allowed)
    with pytest.raises(ValueError, match=told):
        resolve_backend("brgemm", CPU, dtype)
    assert resolve_backend("auto", CPU, dtype) == "segments"


@pytest.mark.usefixtures("elsewhere")
@pytest.mark.parametrize(
    ("owner", "name", "value", "told"),
    [
        (ours.platform, "machine", lambda: "aarch64", "on x86-64 alone, and this CPU is aarch64"),
        (ours, "_micro_kernels", lambda: None, "has no at::native::cpublas::brgemm"),
        (torch.backends.mkldnn, "is_available", lambda: False, "built without oneDNN"),
    ],
)
def test_another_torch_or_machine_is_told(
    owner: object, name: str, value: object, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owner, name, value)
    with pytest.raises(ValueError, match=told):
        resolve_backend("brgemm", CPU, torch.float32)
    assert resolve_backend("auto", CPU, torch.float32) == "segments"


def test_a_torch_without_the_names_has_no_micro_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ours, "_MICRO_KERNELS", ("no_such_function",))
    assert ours._micro_kernels() is None


def test_without_a_list_of_the_cpus_flags_there_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on macOS, which has no /proc."""

    def read(*_: object, **__: object) -> str:
        raise FileNotFoundError("/proc/cpuinfo")

    monkeypatch.setattr(Path, "read_text", read)
    assert READ_FLAGS() == frozenset()


@pytest.mark.usefixtures("elsewhere")
def test_bfloat16_alone_may_be_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ours, "_flags_of_cpu", lambda: EVERY_FLAG - {"avx512_bf16"})
    monkeypatch.setenv("CXX", "true")  # a compiler that is there
    assert ours.reason_against(torch.float32) is None
    assert ours.reason_against(torch.bfloat16) is not None


@pytest.mark.usefixtures("elsewhere")
def test_without_a_compiler_one_is_told_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(
        ValueError,
        match=r"no C\+\+ compiler 'no-such-compiler': .* CXX; or set kernels\.backend=auto",
    ):
        resolve_backend("brgemm", CPU, torch.float32)


@pytest.mark.usefixtures("elsewhere")
def test_what_is_compiled_already_needs_no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    ours.library().file.parent.mkdir(parents=True)
    ours.library().file.touch()
    assert ours.reason_against(torch.float32) is None


@pytest.mark.usefixtures("elsewhere")
def test_each_kind_of_cpu_has_a_library_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    wide = ours.library()
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
    narrow = ours.library()
    assert "-mavx512f" in wide.flags
    assert not any("avx512" in flag for flag in narrow.flags)
    assert wide.file != narrow.file


def test_on_a_gpu_it_is_refused() -> None:
    with pytest.raises(ValueError, match="it is for CPUs, and the weights are on cuda"):
        resolve_backend("brgemm", torch.device("cuda"), torch.float32)


def test_who_asks_for_avx512_is_told_what_there_is() -> None:
    with pytest.raises(ValueError, match="'avx512' is no more: set brgemm"):
        KernelConfig.model_validate({"backend": "avx512"})
    with pytest.raises(ValueError, match="'avx512' is no more: set brgemm"):
        resolve_backend("avx512", CPU, torch.float32)


@pytest.mark.parametrize("name", [{}, [], 3, "avx"])
def test_what_is_no_backend_is_refused(name: object) -> None:
    with pytest.raises(ValidationError, match="Input should be 'auto', 'reference'"):
        KernelConfig.model_validate({"backend": name})


@can_run
def test_float32_is_exact_and_an_error_where_it_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    assert 0 < ours.relative_error(ours.load_library()) < 1e-6
    monkeypatch.setattr(ours, "relative_error", lambda loaded: 2e-3)
    with pytest.raises(ValueError, match=r"relative error of 2\.0e-03 .* kernels.backend=segments"):
        ours.load_library.__wrapped__()


@pytest.mark.skipif(
    ours.reason_against(torch.bfloat16) is not None, reason=f"{ours.reason_against(torch.bfloat16)}"
)
def test_a_product_that_torch_refuses_is_an_error_and_no_end_of_the_process() -> None:
    x, w_up, w_down = (torch.ones(s, dtype=torch.bfloat16) for s in ((3, 8), (1, 8, 8), (1, 8, 8)))
    routes = token_routes(torch.zeros(3, 1, dtype=torch.int64), torch.ones(3, 1), num_experts=1)
    with (
        torch.backends.mkldnn.flags(enabled=False),
        pytest.raises(RuntimeError, match="no micro-kernel for a product in bfloat16 here"),
    ):
        routed_mlp(x, w_up, w_down, routes, backend="brgemm")
    assert torch.all(routed_mlp(x, w_up, w_down, routes, backend="brgemm") == 64)


# Oldest first: what oneDNN is held to stands for a machine that has no more.
@can_run
@pytest.mark.slow
@pytest.mark.parametrize("allowed", ["AVX2", "AVX512_CORE"])
def test_on_older_cpus_values_and_bits_are_as_right(allowed: str) -> None:
    """The comparison with the reference and those of bits, held to an older instruction set."""
    ran = run_tests(
        ["tests/kernels/test_functional.py", "tests/kernels/test_slots.py"],
        "brgemm and float32 and not any_shape",
        environment={"ONEDNN_MAX_CPU_ISA": allowed},
    )
    assert ran.returncode == 0, ran.stdout[-3000:]
    assert " passed" in ran.stdout
    assert "skipped" not in ran.stdout.splitlines()[-1]


def run_tests(
    files: Sequence[str], which: str, *, environment: dict[str, str]
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *files, "-k", which],
        cwd=ROOT,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_threads_share_the_rows_and_change_no_bit(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With more shares than experts, with experts that begin and end within one, and with one that
    has so many rows that threads share its weights' gradients.
    """
    if (reason := ours.reason_against(dtype)) is not None:
        pytest.skip(reason)
    counts = [0, 1, 300, 0, 0, 65, 3, 0, 1200, 64, 0]
    expert = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))[:, None]
    routes = token_routes(expert, torch.ones(len(expert), 1), num_experts=len(counts))
    generator = torch.Generator().manual_seed(0)
    x, grad = (torch.randn(len(expert), 41, generator=generator).to(dtype) for _ in range(2))
    w_up, w_down = (
        (0.2 * torch.randn(len(counts), *shape, generator=generator)).to(dtype).requires_grad_()
        for shape in ((41, 9), (9, 41))
    )
    seen = []
    for threads in (1, 2, 3, 7):
        monkeypatch.setattr(kernels.torch, "get_num_threads", lambda threads=threads: threads)
        y = routed_mlp(x, w_up, w_down, routes, backend="brgemm")
        seen.append((y.detach(), *torch.autograd.grad(y, (w_up, w_down), grad)))
    expected = torch.relu(x.double()[:, None] @ w_up.double()[expert[:, 0]])
    expected = (expected @ w_down.double()[expert[:, 0]])[:, 0]
    error = (seen[0][0] - expected).norm() / expected.norm()
    assert error < (1e-6 if dtype == torch.float32 else 1e-2)
    for one in seen[1:]:
        assert all(torch.equal(a, b) for a, b in zip(one, seen[0], strict=True))
