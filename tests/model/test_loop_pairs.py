"""Looped recipes and their unlooped partners are equal in the budget that was asked for."""

from pathlib import Path

import pytest

from moebius.cli.main import main
from moebius.model.loops.pair import BUDGETS, Budget, budgets, unlooped
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
    model = RECIPES["huginn_moe"]().model
    partner = unlooped(model, 1024)
    assert partner.num_layers == 10
    assert partner.sparse_members == tuple(range(1, 9))
    assert unlooped(model, 1024, "parameters").sparse_members == (1, 2)


def test_the_command_writes_the_partner_of_the_changed_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    changes = ["model.num_layers=18", "train.steps=7"]
    with pytest.raises(SystemExit, match=r"^0$"):
        main(["config", "parcae_moe", *changes, "--unlooped", "flops"])
    file = tmp_path / "partner.toml"
    file.write_text(capsys.readouterr().out)
    partner, looped = resolve(str(file), (), RECIPES), resolve("parcae_moe", changes, RECIPES)
    assert partner.model == unlooped(looped.model, looped.data.seq_len)
    assert partner.train == looped.train
    with pytest.raises(SystemExit):
        main(["config", "dense", "--unlooped", "flops"])
    assert "applies no layer twice" in capsys.readouterr().err


def test_the_command_says_by_how_much_arms_differ(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match=r"^0$"):
        main(["models", "parcae_moe", "--pair", "looped,unlooped"])
    shown = capsys.readouterr().out
    assert "parcae_moe --unlooped flops: flops -0.182%" in shown
    assert "parcae_moe --unlooped parameters: parameters -0.030%" in shown
    assert "parcae_moe --unlooped cache: cache equal" in shown
    with pytest.raises(SystemExit):
        main(["models", "--pair", "looped,unlooped"])
    assert "--pair needs a recipe with loops" in capsys.readouterr().err
