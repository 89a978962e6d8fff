"""The choice of a backend: that reading it costs no compiler, and that torch.compile may fold it."""

import subprocess
import sys

import pytest
import torch

from moebius.kernels.backend import resolve_backend

COMPILERS = ("torch._dynamo", "torch._inductor", "torch.utils.cpp_extension", "setuptools")


@pytest.mark.parametrize("module", ["kernels.functional", "kernels.avx512.backend"])
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
