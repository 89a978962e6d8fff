"""The tasks' recipes: documents fill their rows, and arms are fair."""

from itertools import islice

import pytest

import moebius
from moebius_science.tasks.recipes import ARMS, TASKS

SMALL = [task for task in TASKS if task != "composition_published"]


def recipe(task: str, arm: str) -> moebius.Config:
    return moebius.recipe(f"moebius_science.tasks.recipes:{task}_{arm}")


@pytest.mark.parametrize("task", TASKS)
def test_every_recipe_is_found_by_its_name_and_fits_one_machine(task: str) -> None:
    for arm in ARMS:
        config = recipe(task, arm)
        config.check_world(config.world_size)
        assert config.job.name == f"{task}_{arm}"
    with pytest.raises(moebius.ConfigError, match="recipes has no"):
        recipe(task, "gru")


@pytest.mark.parametrize("task", SMALL)
def test_test_items_fit_the_rows_of_the_recipe(task: str) -> None:
    """In tokens including the end, with one token per word."""
    data = recipe(task, "dense").data
    name, make = next(iter(TASKS[task]().tests.items()))
    assert name.startswith("in_distribution")
    records = list(islice(make(), 30))
    lengths = {len(f"{record['prompt']} {record['answer']}".split()) + 1 for record in records}
    if data.targets == "paired":
        assert lengths == {data.seq_len}  # each a row of its own, as rows are cut
    else:
        assert max(lengths) <= data.seq_len + 1  # none is cut


@pytest.mark.parametrize("task", SMALL)
def test_arms_differ_in_the_model_alone(task: str) -> None:
    configs = [recipe(task, arm) for arm in ARMS]
    for config in configs[1:]:
        for section in ("data", "prepare", "optim", "train", "checkpoint"):
            assert getattr(config, section) == getattr(configs[0], section)
        for size in ("vocab_size", "d_model", "num_layers"):
            assert getattr(config.model, size) == getattr(configs[0].model, size)
    dense, naive, moeut = (moebius.size_of(config).parameters.total for config in configs)
    assert naive < moeut < dense < 1.25 * moeut
    width = configs[0].model.feed_forward.d_feed_forward
    experts = configs[2].model.experts
    assert experts is not None
    top_k = experts.router.model_dump()["top_k"]
    assert top_k * experts.d_expert == width  # as many columns for a token
    num_layers = configs[0].model.num_layers
    assert 2 * experts.num_experts * experts.d_expert == num_layers * width  # and in all
