"""Compiled parts compute what eager ones do, in few graphs, under recomputation too."""

import os
import shutil

import pytest
import torch
from family import VOCABULARY, make_uneven, tiny_model
from torch import Tensor
from torch._dynamo.utils import counters

from moebius.model.compiled import check_compiler, compile_dense_parts
from moebius.model.precision import forward_in
from moebius.model.transformer import Transformer
from moebius.train.loss import micro_batch_loss

needs_compiler = pytest.mark.skipif(
    shutil.which(os.environ.get("CXX", "g++")) is None, reason="torch.compile needs a C++ compiler on CPUs"
)


def gradients(model: Transformer, dtype: torch.dtype) -> dict[str, Tensor]:
    rows = torch.randint(VOCABULARY, (4, 9), generator=torch.Generator().manual_seed(1))
    model.before_step(0)
    result = micro_batch_loss(lambda tokens: forward_in(model, dtype, tokens), rows, global_sequences=4)
    result.loss.backward()
    return {"loss": result.loss.detach()} | {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("name", ["moeut", "sut"])  # SwitchHead's and MoMHA's attention; halting
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_graphs_are_whole_few_and_right(name: str, dtype: torch.dtype) -> None:
    """With a backend that makes no code, whose results have the same bits."""
    torch._dynamo.reset()
    counters.clear()
    expected = gradients(make_uneven(tiny_model(name)), dtype)
    model = make_uneven(tiny_model(name))
    compile_dense_parts(model, backend="aot_eager")
    for mode in ("none", "selective", "full"):
        model.recompute_layers(mode)
        model.zero_grad()
        for key, value in gradients(model, dtype).items():
            torch.testing.assert_close(value, expected[key], rtol=1e-4, atol=1e-6, msg=lambda m, k=key: f"{k}: {m}")
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


@needs_compiler
@pytest.mark.slow  # half a minute of compiling
def test_compiled_code_computes_the_same() -> None:
    expected = gradients(tiny_model("dense", num_layers=2, group_size=1), torch.float32)
    model = tiny_model("dense", num_layers=2, group_size=1)
    compile_dense_parts(model)
    for mode in ("none", "full"):
        model.recompute_layers(mode)
        model.zero_grad()
        for key, value in gradients(model, torch.float32).items():
            torch.testing.assert_close(value, expected[key], rtol=1e-3, atol=1e-5, msg=lambda m, k=key: f"{k}: {m}")


def test_without_a_compiler_the_user_hears_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(ValueError, match=r"C\+\+ compiler .* no 'no-such-compiler' here: install g\+\+"):
        compile_dense_parts(tiny_model("dense"))
    check_compiler(torch.device("meta"))  # nothing is compiled for it
