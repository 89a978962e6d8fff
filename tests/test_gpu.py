"""The same code on a GPU, if there is one: `python -m pytest tests/test_gpu.py`."""

from pathlib import Path
from statistics import median

import pytest
import torch
from family import MAGNIFIES, NAMES, VOCABULARY, make_uneven, tiny_model
from parts import make_config
from small_corpus import shards_of_words
from trained import column, run_training
from world import run_ranks

from moebius.kernels.fused import router
from moebius.model.config.attention_config import SwitchHeadConfig
from moebius.model.config.feed_forward_config import ExpertsConfig
from moebius.model.config.model_config import ModelConfig
from moebius.model.execution.precision import forward_in
from moebius.model.initialise import initialise
from moebius.model.routers.sigmoid import SigmoidConfig
from moebius.model.transformer import Transformer
from moebius.train.config.run_config import Config

pytest_plugins = ["benchmarks.gpu.pytest_plugin"]
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU here")

MODEL = ModelConfig(
    vocab_size=257,
    d_model=64,
    num_layers=4,
    layers_per_group=2,
    attention=SwitchHeadConfig(num_heads=2, d_head=32, num_experts=4, top_k=2),
    feed_forward=ExpertsConfig(num_experts=8, router=SigmoidConfig(top_k=3), d_expert=32),
)


def loss_and_gradients(device: str, dtype: torch.dtype, seed: int) -> dict[str, torch.Tensor]:
    model = Transformer(MODEL)
    initialise(model, 0)
    model.to(device)
    tokens = torch.randint(257, (4, 64), generator=torch.Generator().manual_seed(seed)).to(device)
    output = forward_in(model, dtype, tokens)
    loss = output.logits_BSV.logsumexp(-1).mean() + output.regularisation_B.mean()
    loss.backward()
    return {"loss": loss.detach().cpu()} | gradients_of(model)


def gradients_of(model: Transformer) -> dict[str, torch.Tensor]:
    return {name: p.grad.cpu() for name, p in model.named_parameters() if p.grad is not None}


def typical_errors(device: str, dtype: torch.dtype) -> dict[str, float]:
    """Returns the medians over nine inputs of the relative errors of loss and gradients."""
    each: dict[str, list[float]] = {}
    for seed in range(9):
        found = loss_and_gradients(device, dtype, seed)
        for name, expected in loss_and_gradients("cpu", torch.float32, seed).items():
            error = (found[name] - expected).norm() / expected.norm()
            each.setdefault(name, []).append(error.item())
    return {name: median(errors) for name, errors in each.items()}


@needs_gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_loss_and_gradients_equal_the_cpu(dtype: torch.dtype) -> None:
    """In bfloat16 up to the CPU's own rounding error, which occurs at other places.

    A rounding that changes an expert decides about the error, and which input has one is chance: the
    medians of several inputs are compared.
    """
    found = typical_errors("cuda", dtype)
    allowed = dict.fromkeys(found, 1e-4)
    if dtype is torch.bfloat16:
        rounding = typical_errors("cpu", dtype)
        allowed = {name: max(1e-2, 2 * error) for name, error in rounding.items()}
    too_far = {name: error for name, error in found.items() if error > allowed[name]}
    assert not too_far, {name: (error, allowed[name]) for name, error in too_far.items()}


def three_products(x_TD: torch.Tensor, weight_ED: torch.Tensor) -> torch.Tensor:
    """A router's logits as the kernel computes them (kernels/triton/router.py)."""
    x_high_TD, w_high_ED = x_TD.bfloat16().float(), weight_ED.bfloat16().float()
    x_low_TD, w_low_ED = (x_TD - x_high_TD).bfloat16(), (weight_ED - w_high_ED).bfloat16()
    small = x_low_TD.float() @ w_high_ED.T + x_high_TD @ w_low_ED.float().T
    return small + x_high_TD @ w_high_ED.T


def tiny_pass(name: str, device: str) -> dict[str, torch.Tensor]:
    """Logits and gradients, in evaluation: a GPU draws other random numbers than a CPU."""
    tokens = torch.randint(VOCABULARY, (16, 12), generator=torch.Generator().manual_seed(0))
    model = make_uneven(tiny_model(name)).to(device).eval()
    logits = model(tokens.to(device)).logits_BSV
    logits.square().mean().backward()
    return gradients_of(model) | {"logits": logits.detach().cpu()}


@needs_gpu
@pytest.mark.parametrize("name", NAMES)
def test_the_whole_family_equals_the_cpu(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where loops magnify rounding, up to twice what the router's three products change on the CPU."""
    plain, found = tiny_pass(name, "cpu"), tiny_pass(name, "cuda")
    monkeypatch.setattr(router, "_logits", three_products)
    expected = tiny_pass(name, "cpu")
    assert found.keys() == expected.keys()
    for key, value in found.items():
        error, allowed = (value - expected[key]).norm(), 1e-3 * expected[key].norm() + 1e-7
        if name in MAGNIFIES:
            allowed = max(allowed, 2 * (plain[key] - expected[key]).norm())
        assert error <= allowed, (key, error, allowed)
    if name not in MAGNIFIES:
        torch.testing.assert_close(found["logits"], expected["logits"], rtol=1e-3, atol=1e-4)


@needs_gpu
def test_a_run_over_nccl_with_the_all_to_all_resumes_and_follows_the_cpu(tmp_path: Path) -> None:
    data = shards_of_words(tmp_path, 60)

    def config(device: str, steps: int) -> Config:
        return make_config(
            data,
            model=MODEL,
            data__seq_len=32,
            mesh__dispatcher="alltoall",
            checkpoint__every=3,
            train={"steps": steps, "global_batch": 4, "micro_batch": 2, "device": device},
        )

    for place, device, steps in (("cpu", "cpu", 6), ("gpu", "cuda", 3), ("gpu", "cuda", 6)):
        words = (config(device, steps), tmp_path / place)
        run_ranks(run_training, 1, *words, timeout_s=120)
    assert column(tmp_path / "gpu") == pytest.approx(column(tmp_path / "cpu"), rel=1e-3)
