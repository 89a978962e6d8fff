"""Tests `moebius models`."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from moebius.cli.models.catalogue import short
from moebius.model.cost import count_parameters, forward_flops
from moebius.model.routers.router import Promises
from moebius.train.recipes.smoke import RECIPES

Command = Callable[..., Any]  # the fixture `moebius` of conftest.py


def test_every_recipe_has_a_line_with_its_description(moebius: Command) -> None:
    said = moebius("models").out
    lines = said.splitlines()[1 : 1 + len(RECIPES)]
    assert [line.split()[0] for line in lines] == list(RECIPES)
    for name, recipe in RECIPES.items():
        assert recipe.__doc__, name
        assert recipe.__doc__.strip().split("\n")[0][:30] in said


def test_descriptions_are_whole_however_narrow_the_terminal(
    moebius: Command, terminal: None
) -> None:
    answer = moebius("models", "x_moe_torchscale", "sut")
    lines = answer.out.splitlines()
    assert lines[1].startswith("x_moe_torchscale")
    assert lines[2].startswith("sut")
    assert lines[3].strip() == ""
    assert max(map(len, lines[:8])) <= 80
    for name in ("x_moe_torchscale", "sut"):
        description = (RECIPES[name].__doc__ or "").strip().split("\n")[0].rstrip(".")
        assert set(description.split()) <= set(answer.text.split()), name


def test_a_line_says_what_the_model_costs_and_promises(moebius: Command) -> None:
    said = moebius("models", "moeut_44m", "dense_1b", "switch_causal").out
    header, moeut, dense, switch, *_ = [line.split() for line in said.splitlines()[:4]]
    columns = "recipe parameters active training FLOPs/token g promises architecture"
    assert header == columns.split()
    assert moeut[1:9] == ["44.35M", "10.94M", "292.3M", "1", "C", "I", "D", "·"]
    assert dense[1:9] == ["1.044B", "1.044B", "6.869G", "1", "C", "I", "D", "B"]
    assert switch[3:10] == ["≤", "8.663M", "1", "C", "·", "·", "·"]


def test_json_is_exact(moebius: Command) -> None:
    (found,) = json.loads(moebius("models", "--json", "expert_choice").out)
    config = RECIPES["expert_choice"]()
    model, length = config.model, config.data.seq_len
    flops = found["flops"]
    forward = (
        *("attention_projections", "attention_scores", "feed_forward"),
        *("sub_tokens", "routing", "read_out"),
    )
    assert flops["training"] == 3 * sum(flops[part] for part in forward)
    assert flops["training"] == forward_flops(model, length).training
    assert found["parameters"]["total"] == count_parameters(model, length).total
    assert Promises(**found["promises"]) == model.promises
    assert (found["group_sequences"], found["seq_len"]) == (model.group_sequences, length)


def test_a_file_is_a_model_too(tmp_path: Path, moebius: Command) -> None:
    file = tmp_path / "mine.toml"
    file.write_text('recipe = "dense"\n[model.feed_forward]\nd_feed_forward = 1024\n')
    mine, dense = json.loads(moebius("models", "--json", file, "dense").out)
    assert mine["flops"]["training"] - dense["flops"]["training"] == 4 * 3 * 4 * 128 * 512
    assert mine["description"] == ""


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (0, "0"),
        (999, "999"),
        (1000, "1.000K"),
        (44_345_792, "44.35M"),
        (727_424_320, "727.4M"),
        (4.216e9, "4.216G"),
    ],
)
def test_numbers_have_four_digits(number: float, text: str) -> None:
    assert short(number) == text
