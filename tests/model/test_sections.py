"""A section of the configuration is read by its kind, and what cannot be read is said."""

import pytest

from moebius.model.config.attention_config import ATTENTION
from moebius.model.config.model_config import ModelConfig
from moebius.model.config.sections import merge, set_value


def test_a_value_of_no_known_kind_keeps_no_keys_of_the_old_one() -> None:
    assert ATTENTION.of_kind({"num_heads": 3}, "densee") == {}
    assert ATTENTION.of_kind({"num_heads": 3}, ["dense"]) == {}


def test_a_section_of_another_kind_takes_the_place_of_the_old_one() -> None:
    base = {"attention": {"kind": "switchhead", "num_heads": 3, "num_experts": 7}, "halting": 1}
    changes = {"attention": {"kind": "dense", "d_head": 8}}
    assert merge(base, changes, {"attention": ATTENTION}) == {
        "attention": {"kind": "dense", "num_heads": 3, "d_head": 8},
        "halting": 1,
    }


def test_a_section_whose_kinds_share_their_keys_keeps_them() -> None:
    depth = ModelConfig().changed(
        {"loops.inject": "add", "loops.depth": {"kind": "poisson", "gradient_loops": 2}}
    )
    fixed = depth.changed({"loops.depth.kind": "fixed"})
    assert (fixed.loops.depth.kind, fixed.loops.depth.gradient_loops) == ("fixed", 2)
    merged = merge(
        {"optim": {"kind": "adamw", "learning_rate": 1}}, {"optim": {"kind": "own:o"}}, {}
    )
    assert merged == {"optim": {"kind": "own:o", "learning_rate": 1}}


def test_a_value_has_no_keys() -> None:
    values = {"train": {"steps": 5}}
    with pytest.raises(ValueError, match=r"train\.steps is not a section"):
        set_value(values, "train.steps.x", 3, {})
    assert values == {"train": {"steps": 5}}
