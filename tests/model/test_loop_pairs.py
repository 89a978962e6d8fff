"""Looped recipes and their unlooped partners are equal in the budget that was asked for."""

from pathlib import Path

import pytest

from moebius.cli.main import main
from moebius.model.loops.pair import BUDGETS, Budget, budgets, unlooped
from moebius.train.config.errors import ConfigError
from moebius.train.config.resolve import resolve
from moebius.train.recipes.smoke import RECIPES

LOOPED = (
    "huginn_small", "huginn_moe", "parcae_small", "parcae_moe", "ouro_moe", "moeut_sandwich",
    "middle_half_twice", "moeut", "naive_ut",
)  # fmt: skip


@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("name", LOOPED)
def test_arms_are_equal_to_the_unit_of_a_width(name: str, budget: Budget) -> None:
    looped = RECIPES[name]()
    model, seq_len = looped.model, looped.data.seq_len
    partner = unlooped(model, seq_len, budget)
    assert partner.loops.is_plain
    assert partner.num_repeats == 1
    key = "d_feed_forward" if partner.experts is None else "d_expert"
    width = getattr(partner.feed_forward, key)
    off = {
        each: abs(
            getattr(budgets(model, seq_len), budget)
            - getattr(budgets(partner.changed({f"feed_forward.{key}": each}), seq_len), budget)
        )
        for each in (width - 1, width, width + 1)
    }
    assert off[width] == min(off.values()), "the next width would come closer"
    assert abs(budgets(model, seq_len).difference(budgets(partner, seq_len), budget)) < 0.005


def test_layers_keep_their_place() -> None:
    partner = resolve("huginn_moe@unlooped", (), RECIPES).model
    assert partner.num_layers == 10
    assert partner.sparse_members == tuple(range(1, 9))
    assert resolve("huginn_moe@unlooped-parameters", (), RECIPES).model.sparse_members == (1, 2)


def test_a_file_changes_its_recipe_before_the_pair(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text('recipe = "huginn_moe@unlooped"\nmodel.num_layers = 18\ntrain.steps = 7\n')
    changes = ["model.num_layers=18", "train.steps=7"]
    assert resolve(str(file), (), RECIPES) == resolve("huginn_moe@unlooped", changes, RECIPES)


def test_changes_are_made_before_the_pair() -> None:
    partner = resolve("parcae_moe@unlooped", ["model.num_layers=18", "train.steps=7"], RECIPES)
    assert (partner.model.num_layers, partner.train.steps) == (18, 7)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("dense@unlooped", "applies no layer twice"),
        ("huginn_moe@unlooped-bytes", "there is no arm @unlooped-bytes; there are @unlooped, "),
        ("nothing@unlooped", "there is no recipe 'nothing'"),
    ],
)
def test_a_partner_that_cannot_be_is_refused(name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        resolve(name, (), RECIPES)


def test_the_command_says_by_how_much_arms_differ(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match=r"^0$"):
        main(["models", "parcae_moe", "--pair", "looped,unlooped"])
    shown = capsys.readouterr().out
    assert "parcae_moe@unlooped: flops -0.182%" in shown
    assert "parcae_moe@unlooped-parameters: parameters -0.030%" in shown
    assert "parcae_moe@unlooped-cache: cache equal" in shown
    with pytest.raises(SystemExit):
        main(["models", "--pair", "looped,unlooped"])
    assert "--pair needs a recipe with loops" in capsys.readouterr().err
