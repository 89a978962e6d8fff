"""Groups are blocks of the global sample index, so no layout changes who is routed together."""

from pathlib import Path
from typing import Any

import pytest
import torch
from family import tiny_config
from pairwise import slow_but
from parts import layers, make_config
from torch import Tensor
from trained import assembled, check_near, gradients
from world import run_ranks

from moebius.train.config.run_config import Config
from moebius.train.evaluate import evaluate
from moebius.train.loop import step
from moebius.train.rank_data import open_loader

GROUP = 4
ROUTERS: dict[str, dict[str, Any]] = {
    "mixture": {"kind": "mixture_of_tokens", "sequences_per_group": GROUP},
    "expert choice": {"kind": "expert_choice", "sequences_per_group": GROUP, "mean_experts": 2.0},
    "transition": {"kind": "transition", "sequences_per_group": GROUP, "switch_step": 5},
}


def config_of(data: Path, router: dict[str, Any], micro_batch: int, **changes: Any) -> Config:
    model = {
        "vocab_size": 257,
        "feed_forward.sparse_layers": "all",
        "feed_forward.num_experts": router["sequences_per_group"],
        "feed_forward.router": router,
    }
    return make_config(
        data,
        model=tiny_config("mixture_of_tokens", model),
        data__seq_len=24,
        optim__clip_norm=1e9,
        train={"global_batch": 16, "micro_batch": micro_batch, "eval_rows": 26},
        **changes,
    )


def step_and_evaluation(config: Config, run_dir: Path) -> tuple[float, float, dict[str, Tensor]]:
    """Returns loss, validation loss before it, and gradients of one step."""
    with assembled(config, run_dir) as run:
        # At the start all rows of a group weigh nearly alike, whatever the group.
        with torch.no_grad():
            for layer in layers(run.model):
                layer.feed_forward.router.weight.mul_(30)
                layer.feed_forward.sparse.experts.w_down.mul_(10)
        validation = evaluate(run.model, config, run.process).loss
        with open_loader(run, None) as loader:
            result = step(run, next(loader), 0.0)
        return result.meter.reduce()["loss"].item(), validation, gradients(run)


@pytest.mark.slow
@pytest.mark.parametrize("kind", slow_but(ROUTERS, "transition"))
def test_no_layout_changes_loss_gradients_or_validation(
    kind: str, data: Path, tmp_path: Path
) -> None:
    found = []
    for world, micro_batch in ((1, 16), (1, 4), (2, 4), (4, 4)):
        config = config_of(data, ROUTERS[kind], micro_batch)
        folder = tmp_path / f"{world}-{micro_batch}"
        found += run_ranks(step_and_evaluation, world, config, folder)
    expected = found[0]
    for loss, validation, grads in found:
        assert (loss, validation) == pytest.approx(expected[:2], rel=1e-6)
        check_near(grads, expected[2], 2e-6)
    config = config_of(data, ROUTERS[kind] | {"sequences_per_group": 8}, 8)
    [other] = run_ranks(step_and_evaluation, 1, config, tmp_path / "other")
    for one, another in zip(other[:2], expected[:2], strict=True):
        assert abs(one - another) > 1e-5 * another  # who is in a group does matter


@pytest.mark.slow
def test_evaluation_may_have_other_groups_and_larger_batches(data: Path, tmp_path: Path) -> None:
    """A batch that is not a multiple of the group grows to whole groups."""
    eights = {"evaluation_sequences_per_group": 8}
    found = []
    for world, options, eval_batch in (
        (1, {}, None),
        (1, {}, 16),
        (2, {}, 6),
        (1, eights, None),
        (2, eights, None),
    ):
        router = ROUTERS["mixture"] | options
        config = config_of(data, router, 4, train__eval_batch=eval_batch)
        folder = tmp_path / f"{len(found)}"
        found.append(run_ranks(step_and_evaluation, world, config, folder)[0][:2])
    first, large, uneven, of_eights, on_two_ranks = found
    assert large == pytest.approx(first, rel=1e-6)
    assert uneven == pytest.approx(first, rel=1e-6)
    assert of_eights == pytest.approx(on_two_ranks, rel=1e-6)
    assert of_eights[0] == pytest.approx(first[0], rel=1e-6)
    assert abs(of_eights[1] - first[1]) > 1e-5


def test_a_micro_batch_that_would_cut_a_group_is_refused(data: Path) -> None:
    with pytest.raises(
        ValueError,
        match=r"micro_batch=6 is not a multiple of 4, .*'mixture_of_tokens' routes together: use 8",
    ):
        config_of(data, ROUTERS["mixture"], 6)
