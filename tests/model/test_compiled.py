"""Compiled parts compute what eager ones do, in few graphs, under recomputation too."""

import importlib.util
import os
import sysconfig
from pathlib import Path

import pytest
import torch
from family import gradients_of, make_uneven, set_options, some_tokens, tiny_model
from torch._dynamo.utils import counters

from moebius.model.execution.compiled import check_compiler, compile_dense_parts
from moebius.model.execution.precision import forward_in


@pytest.fixture(scope="module")
def cannot_compile() -> str:
    """Why torch compiles nothing here, by trying; it does: an empty text."""
    try:
        torch.compile(lambda x: x + 1)(torch.ones(2))
    except RuntimeError as error:  # whatever the compiler's was
        return str(error)
    return ""


@pytest.fixture
def needs_compiler(cannot_compile: str) -> None:
    """Not by `check_compiler`: one that refuses for nothing would skip what it keeps from running."""
    if cannot_compile:
        pytest.skip(cannot_compile)


@pytest.mark.slow
def test_a_compiler_is_asked_for_where_there_is_none_and_only_there(cannot_compile: str) -> None:
    refusal = ""
    try:
        check_compiler(torch.device("cpu"))
    except ValueError as error:
        refusal = str(error)
    assert bool(refusal) == bool(cannot_compile), (
        f"check_compiler: {refusal or 'fine'}; tried: {cannot_compile or 'fine'}"
    )


ROWS = some_tokens(4, 9, seed=1)


@pytest.mark.sample(1)
# SwitchHead's and MoMHA's attention and halting; latents; sinks and windows
@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["moeut", "sut", "deepseek_v3_small", "gpt_oss_small", "olmo2_small"]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_graphs_are_whole_few_and_right(name: str, dtype: torch.dtype) -> None:
    """With a backend that makes no code, whose results have the same bits."""
    torch._dynamo.reset()
    counters.clear()
    expected = gradients_of(make_uneven(tiny_model(name)), dtype, ROWS)
    model = make_uneven(tiny_model(name))
    compile_dense_parts(model, backend="aot_eager")
    for mode in ("none", "selective", "full"):
        set_options(model, recompute=mode)
        model.zero_grad()
        found = gradients_of(model, dtype, ROWS)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)
    kinds = counters["stats"]["unique_graphs"]
    assert (
        3 <= kinds <= 5
    )  # norm, attention, halting, read-out; not one for every layer, or for every way of recomputing
    model.eval()
    with torch.no_grad():
        for batch in (4, 3):  # evaluation, and an unusual batch
            forward_in(model, dtype, torch.zeros(batch, 8, dtype=torch.int64))
        graphs = counters["stats"]["unique_graphs"]
        assert graphs <= 3 * kinds
        for batch in (7, 6, 2):
            forward_in(model, dtype, torch.zeros(batch, 8, dtype=torch.int64))
    assert counters["stats"]["unique_graphs"] == graphs
    assert not counters["graph_break"]


@pytest.mark.usefixtures("needs_compiler")
@pytest.mark.slow  # half a minute of compiling
def test_compiled_code_computes_the_same() -> None:
    shape = {"num_layers": 2, "layers_per_group": 1}
    expected = gradients_of(tiny_model("dense", shape), torch.float32, ROWS)
    model = tiny_model("dense", shape)
    compile_dense_parts(model)
    for mode in ("none", "full"):
        set_options(model, recompute=mode)
        model.zero_grad()
        found = gradients_of(model, torch.float32, ROWS)
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-5)


def test_without_a_compiler_the_user_hears_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(
        ValueError,
        match=r"C\+\+ compiler on CPU devices, and there is no 'no-such-compiler' here: install g\+\+",
    ):
        compile_dense_parts(tiny_model("dense"))
    check_compiler(torch.device("meta"))  # nothing is compiled for it


def test_gpus_need_a_compiler_of_c_too(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Triton compiles a module in C, with CC, gcc or clang; it is not installed where there is no
    GPU.
    """
    gpu = torch.device("cuda")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match="needs Triton on GPUs: pip install triton"):
        check_compiler(gpu)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    with pytest.raises(
        ValueError,
        match=r"a C compiler on CUDA devices, and there is no 'gcc' and no 'clang' here: .* CC",
    ):
        check_compiler(gpu)
    (tmp_path / "clang").touch(mode=0o755)
    with_headers(monkeypatch, tmp_path)
    check_compiler(gpu)
    monkeypatch.setenv("CC", "gcc")  # what is named is taken, and nothing in its place
    with pytest.raises(ValueError, match="there is no 'gcc' here"):
        check_compiler(gpu)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_both_need_the_headers_of_python(
    device: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    for variable in ("CC", "CXX"):
        monkeypatch.setenv(variable, "sh")
    monkeypatch.setattr(sysconfig, "get_path", lambda name, scheme: str(tmp_path / scheme))
    monkeypatch.delenv("CPATH", raising=False)
    with pytest.raises(ValueError, match=r"no .*posix_prefix/Python.h: install them \(python3-dev"):
        check_compiler(torch.device(device))
    with_headers(monkeypatch, tmp_path)
    check_compiler(torch.device(device))


def with_headers(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    (folder / "Python.h").touch()
    monkeypatch.setenv("CPATH", f"/nowhere{os.pathsep}{folder}")
