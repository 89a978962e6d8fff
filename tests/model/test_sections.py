"""A section of the configuration is read by its kind, and what cannot be read is said."""

import pytest

from moebius.model.config.attention_config import ATTENTION
from moebius.model.config.model_config import ModelConfig
from moebius.model.config.sections import merge, set_value


@pytest.mark.parametrize(
    ("attention", "message"),
    [
        (["dense"], r"attention=\['dense'\]: the attention is a section; write its kind"),
        (7, r"attention=7: the attention is a section; .* model\.attention\.kind="),
        ("switchhead", r"the attention is a section; .*model\.attention\.kind=switchhead"),
        ({}, r"the attention has no kind \(keys: \); there are .*dense"),
        ({"num_heads": 2}, r"the attention has no kind \(keys: num_heads\)"),
        ({"kind": "densee"}, r"kind='densee' is no attention; there are .*dense"),
        ({"kind": ["dense"]}, r"kind=\['dense'\] is no attention"),
        (
            {"kind": "dense", "num_head": 2},
            r"the attention 'dense' has no key 'num_head'; .*did you",
        ),
        (
            {"kind": "dense", "num_heads": "two"},
            r"num_heads='two': must be a whole number",
        ),
    ],
)
def test_what_is_no_section_is_explained(attention: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ModelConfig.model_validate({"attention": attention})


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
