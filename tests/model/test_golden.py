"""Agreement with recorded runs of the official release and of the paper's training code."""

import pytest
import torch
import torch.nn.functional as F
from golden import Golden, load_golden, training_config
from parts import layers

from moebius.kernels.backend import resolve_backend
from moebius.model.config.model_config import ModelConfig
from moebius.model.transformer import ModelOutput, Transformer

RELEASE = ["moeut_tiny_g2", "moeut_tiny_noshare", "moeut_tiny_dense_att"]
TRAINING = [
    "train_tiny_moeut_train",
    "train_tiny_moeut_preln",
    "train_tiny_sigma_moe",
    "train_tiny_dense",
    "train_tiny_sut_act",
]
CPU = torch.device("cpu")
# The meaning, the fallback, and what `auto` takes on this machine: on most CPUs the C++ kernels.
BACKENDS = list(
    dict.fromkeys(["reference", "segments", resolve_backend("auto", CPU, torch.float32)])
)

pytestmark = pytest.mark.needs_shared


def run(golden: Golden, model: Transformer) -> tuple[ModelOutput, torch.Tensor, torch.Tensor]:
    tokens = golden["tokens"]
    output = model(tokens[:, :-1])
    cross_entropy = F.cross_entropy(output.logits_BSV.flatten(0, 1), tokens[:, 1:].flatten())
    return output, cross_entropy, output.regularisation_B.mean()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", RELEASE + TRAINING)
def test_logits_losses_and_every_gradient_agree(name: str, backend: str) -> None:
    golden = load_golden(name)
    model = golden.model(backend=backend)
    output, cross_entropy, regularisation = run(golden, model)
    torch.testing.assert_close(output.logits_BSV, golden["logits"], rtol=0, atol=1e-5)
    torch.testing.assert_close(cross_entropy, golden["loss_ce"], rtol=0, atol=1e-5)
    torch.testing.assert_close(regularisation, golden["loss_reg"], rtol=0, atol=1e-6)
    (cross_entropy + regularisation).backward()
    found = {name: parameter.grad for name, parameter in model.named_parameters()}
    torch.testing.assert_close(found, golden.tensors("g/"), rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", ["moeut_tiny_g2", "moeut_tiny_noshare", "moeut_tiny_dense_att"])
def test_the_same_experts_are_selected_at_every_depth_step(name: str) -> None:
    golden = load_golden(name)
    model = golden.model()
    seen: list[tuple[torch.Tensor, torch.Tensor]] = []
    for layer in layers(model):
        layer.feed_forward.router.register_forward_hook(
            lambda _, __, out: seen.append((out.wanted_TK, out.logits_THA))
        )
    run(golden, model)
    selected, logits = zip(*seen, strict=True)
    expected = golden["trace/ff_sel"]
    ours = torch.stack(selected).sort(-1).values.view(expected.shape)
    assert torch.equal(ours, expected)
    torch.testing.assert_close(
        torch.stack(logits).view(golden["trace/ff_logits"].shape),
        golden["trace/ff_logits"],
        rtol=0,
        atol=1e-5,
    )


@pytest.mark.parametrize("name", RELEASE)
def test_evaluation_mode_gives_the_same_logits_and_no_regularisation(name: str) -> None:
    golden = load_golden(name)
    output, _, regularisation = run(golden, golden.model().eval())
    torch.testing.assert_close(output.logits_BSV, golden["logits_eval"], rtol=0, atol=1e-5)
    assert regularisation.item() == golden["loss_reg_eval"].item() == 0.0


@pytest.mark.parametrize("name", RELEASE)
def test_five_optimizer_steps_follow_the_recorded_trajectory(name: str) -> None:
    golden = load_golden(name)
    model = golden.model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2.5e-4, weight_decay=0.01)
    for step in range(5):
        _, cross_entropy, regularisation = run(golden, model)
        optimizer.zero_grad()
        (cross_entropy + regularisation).backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.25)
        optimizer.step()
        assert cross_entropy.item() == pytest.approx(golden["traj/ce"][step].item(), abs=1e-5)
        assert regularisation.item() == pytest.approx(golden["traj/reg"][step].item(), abs=1e-6)
        assert norm.item() == pytest.approx(golden["traj/grad_norm"][step].item(), abs=1e-5)
    weights = {name: parameter.detach() for name, parameter in model.named_parameters()}
    torch.testing.assert_close(weights, golden.tensors("w_after/"), rtol=0, atol=1e-5)


def count(name: str, **changes: object) -> tuple[int, ModelConfig]:
    """Parameters of a recorded run with some of its arguments changed."""
    golden = load_golden(name)
    recorded = golden.recorded | {f"transformer.{key}": value for key, value in changes.items()}
    config = training_config(recorded)
    model = Transformer(config)
    return sum(parameter.numel() for parameter in model.parameters()), config


def test_runs_that_were_not_recorded_have_the_sizes_that_were_published() -> None:
    """Parameter counts that the training code printed for the same tiny arguments."""
    assert count("train_tiny_dense")[0] == 17_873
    shared, config = count("train_tiny_dense", variant="preln_rope_universal")  # a naive UT
    assert (shared, config.layers_per_group) == (17_873 - 2 * 5_076, 1)  # one layer for three
    assert count("train_tiny_sigma_moe")[0] == 20_573
    assert count("train_tiny_sut_act")[0] == 15_099
    assert count("train_tiny_sut_act", variant="sut_universal")[0] == 14_451
    preln, config = count("train_tiny_moeut_preln")
    assert (preln, config.norm) == (24_965, "pre")
    postln, config = count("train_tiny_moeut_preln", variant="moe_universal")
    assert (postln, config.norm) == (24_917, "post")
    aabb, config = count("train_tiny_moeut_train", **{"universal.group_type": "aabb"})
    assert (aabb, config.norm, config.order) == (24_965, "peri", "aabb")
