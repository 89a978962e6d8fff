"""The kernels' C++ library: errors where it cannot run, the exactness of torch's micro-kernels, and
equal bits without a compiler.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from moebius.kernels import backend
from moebius.kernels.backend import resolve_backend
from moebius.kernels.cpu import brgemm, library
from moebius.kernels.cpu.build import CppLibrary
from moebius.kernels.functional import routed_mlp
from moebius.model.routing import token_routes

CPU, F32, BF16 = torch.device("cpu"), torch.float32, torch.bfloat16
EVERY_FLAG = library.AVX512 | {library.BFLOAT16}
ROOT = Path(__file__).resolve().parents[3]

can_run = pytest.mark.skipif(
    brgemm.reason_against(F32) is not None, reason=f"{brgemm.reason_against(F32)}"
)


@pytest.fixture
def elsewhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A machine with a full-featured CPU and an empty cache; answers are not memoised."""
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    monkeypatch.delenv("ONEDNN_MAX_CPU_ISA", raising=False)
    monkeypatch.setattr(library, "_flags_of_cpu", lambda: EVERY_FLAG)
    monkeypatch.setattr(library.platform, "machine", lambda: "x86_64")
    for remembered in ("reason_against", "_fastest"):
        monkeypatch.setattr(backend, remembered, getattr(backend, remembered).__wrapped__)
    return tmp_path


@pytest.mark.usefixtures("elsewhere")
@pytest.mark.parametrize(
    ("flags", "allowed", "dtype", "told"),
    [
        (EVERY_FLAG - {"avx2"}, "", F32, "for float32 this CPU has no avx2"),
        (EVERY_FLAG - {"avx512_bf16"}, "", BF16, "this CPU has no avx512_bf16"),
        (EVERY_FLAG, "", torch.float64, "supports float32 and bfloat16, not float64"),
        (EVERY_FLAG, "AVX", F32, r"no avx2, .* \(with ONEDNN_MAX_CPU_ISA=AVX\)"),
        (EVERY_FLAG, "avx2_vnni", BF16, r"avx512vl \(with ONEDNN_MAX_CPU_ISA=avx2_vnni"),
        (EVERY_FLAG, "AVX512_CORE", BF16, r"avx512_bf16 \(with ONEDNN_MAX_CPU_ISA"),
    ],
)
def test_a_cpu_or_dtype_that_cannot_is_told(
    flags: frozenset[str],
    allowed: str,
    dtype: torch.dtype,
    told: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(library, "_flags_of_cpu", lambda: flags)
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", allowed)
    with pytest.raises(ValueError, match=told):
        resolve_backend("brgemm", CPU, dtype)
    assert resolve_backend("auto", CPU, dtype) == "segments"


@pytest.mark.usefixtures("elsewhere")
@pytest.mark.parametrize(
    ("owner", "name", "value", "told"),
    [
        (library.platform, "machine", lambda: "aarch64", "x86-64 only, and this CPU is aarch64"),
        (brgemm, "HEADER", Path("no such header"), "lacks at::native::cpublas::brgemm"),
        (torch.backends.mkldnn, "is_available", lambda: False, "built without oneDNN"),
        (os, "environ", os.environ | {"CXX": "no-such"}, r"no C\+\+ compiler 'no-such': .* CXX"),
    ],
)
def test_another_torch_or_machine_is_told(
    owner: object, name: str, value: object, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if name == "environ":
        monkeypatch.setenv("CXX", "no-such")
    else:
        monkeypatch.setattr(owner, name, value)
    with pytest.raises(ValueError, match=told):
        resolve_backend("brgemm", CPU, F32)
    assert resolve_backend("auto", CPU, F32) == "segments"


@pytest.mark.usefixtures("elsewhere")
def test_each_kind_of_cpu_has_a_library_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    wide = library.library()
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
    narrow = library.library()
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX")
    old = library.library()
    assert "-mavx512f" in wide.flags
    assert not any("avx512" in flag for flag in narrow.flags)
    assert [each.name for each in old.sources] == ["lists.cpp", "scores.cpp"]
    assert len({each.file for each in (wide, narrow, old)}) == 3


def test_a_compiler_that_does_not_work_is_said_and_torch_does_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def load(_self: object) -> None:
        raise ValueError("moebius_kernels could not be compiled")

    monkeypatch.setattr(CppLibrary, "load", load)
    monkeypatch.setattr(CppLibrary, "reason_against", lambda _self: None)
    with pytest.warns(UserWarning, match="moebius_kernels could not be compiled"):
        assert library.loaded.__wrapped__() is None


@can_run
def test_float32_is_exact_and_an_error_where_it_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    brgemm.prepare()
    assert 0 < brgemm.relative_error() < 1e-6
    monkeypatch.setattr(brgemm, "relative_error", lambda: 2e-3)
    with pytest.raises(ValueError, match=r"relative error of 2\.0e-03 .* kernels.backend=segments"):
        brgemm.prepare.__wrapped__()


@pytest.mark.skipif(brgemm.reason_against(BF16) is not None, reason="no bfloat16 here")
def test_a_product_that_torch_refuses_is_an_error_and_no_end_of_the_process() -> None:
    x, w_up, w_down = (torch.ones(s, dtype=BF16) for s in ((3, 8), (1, 8, 8), (1, 8, 8)))
    routes = token_routes(torch.zeros(3, 1, dtype=torch.int64), torch.ones(3, 1), num_experts=1)
    with (
        torch.backends.mkldnn.flags(enabled=False),
        pytest.raises(RuntimeError, match="no micro-kernel for a product in bfloat16 here"),
    ):
        routed_mlp(x, w_up, w_down, routes, backend="brgemm")
    assert torch.all(routed_mlp(x, w_up, w_down, routes, backend="brgemm") == 64)


# Oldest first: limiting oneDNN stands for an older machine.
@can_run
@pytest.mark.slow
@pytest.mark.parametrize("allowed", ["AVX2", "AVX512_CORE"])
def test_on_older_cpus_values_and_bits_are_as_right(allowed: str) -> None:
    """Runs the comparisons with the reference and of bits with an older instruction set."""
    files = ["tests/kernels/test_backends.py", "tests/kernels/test_slots.py"]
    ran = subprocess.run(
        [
            *(sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *files),
            *("-k", "brgemm and float32 and not any_shape"),
        ],
        cwd=ROOT,
        env=os.environ | {"ONEDNN_MAX_CPU_ISA": allowed},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout[-3000:]
    assert " passed" in ran.stdout
    assert "skipped" not in ran.stdout.splitlines()[-1]


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_threads_share_the_rows_and_change_no_bit(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With more shares than experts, with experts that begin and end within one, and with one that
    has so many rows that threads share its weights' gradients.
    """
    if (reason := brgemm.reason_against(dtype)) is not None:
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
        monkeypatch.setattr(brgemm.torch, "get_num_threads", lambda threads=threads: threads)
        y = routed_mlp(x, w_up, w_down, routes, backend="brgemm")
        seen.append((y.detach(), *torch.autograd.grad(y, (w_up, w_down), grad)))
    expected = torch.relu(x.double()[:, None] @ w_up.double()[expert[:, 0]])
    expected = (expected @ w_down.double()[expert[:, 0]])[:, 0]
    error = (seen[0][0] - expected).norm() / expected.norm()
    assert error < (1e-6 if dtype == F32 else 1e-2)
    for one in seen[1:]:
        assert all(torch.equal(a, b) for a, b in zip(one, seen[0], strict=True))
