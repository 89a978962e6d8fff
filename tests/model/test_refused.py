"""Configurations of a model that cannot work are refused with the values and the way out."""

from typing import Any

import pytest
from pydantic import ValidationError

from moebius.model.config.model_config import ModelConfig

ALLOWED = {"feed_forward.allow_future_leak": True}
ROUTERS: list[tuple[dict[str, Any], str]] = [
    ({"kind": "token_choice", "top_k": 1, "renormalise": True}, "learns nothing"),
    ({"kind": "token_choice", "top_k": 1, "second_expert": "random"}, "top_k=2 and renormalise="),
    ({"kind": "token_choice", "top_k": 2, "second_expert": "random"}, "renormalise=false: its"),
    (
        {"kind": "token_choice", "top_k": 3, "renormalise": True, "second_expert": "random"},
        "top_k=3",
    ),
    ({"kind": "token_choice", "top_k": 17}, "router.top_k=17 is more than num_experts=16"),
    ({"kind": "token_choice", "capacity_factor": 0.0}, "capacity_factor"),
    ({"kind": "token_choice", "jitter": 1.0}, "jitter"),
    ({"kind": "token_choice", "drop_order": "first"}, "position_major"),
    *(
        ({"kind": "token_choice", "capacity_factor": 1.0, "drop_order": order}, "allow_future_leak")
        for order in ("token_major", "slot_major", "priority")
    ),
    ({"kind": "deepseek", "top_k": 1}, "learns nothing"),
    ({"kind": "deepseek", "num_groups": 3}, "num_groups=3 does not divide num_experts=16"),
    ({"kind": "deepseek", "kept_groups": 2}, "kept_groups=2 is more than num_groups=1"),
    (
        {"kind": "deepseek", "top_k": 9, "num_groups": 4, "kept_groups": 2},
        "more than the 8 experts of kept_groups=2 groups of 4",
    ),
    ({"kind": "deepseek", "top_k": 17}, "top_k=17 is more than the 16 experts"),
    ({"kind": "deepseek", "top_k": 2, "num_groups": 16, "kept_groups": 4}, "at least two experts"),
    ({"kind": "deepseek", "capacity_factor": 1.0}, "no key 'capacity_factor'"),
    ({"kind": "cosine", "behaviour": "torchscale", "gate": "sigmoid"}, "gate='sigmoid', top_k=1:"),
    ({"kind": "cosine", "behaviour": "torchscale", "top_k": 3}, "one or two experts"),
    ({"kind": "cosine", "behaviour": "torchscale", "d_routing": 8}, "d_routing=8"),
    (
        {"kind": "cosine", "behaviour": "torchscale", "balance_temperature": 0.3},
        "no temperature",
    ),
    ({"kind": "cosine", "initial_temperature": 0.0}, "initial_temperature"),
    ({"kind": "cosine", "top_k": 17}, "top_k=17 is more than num_experts=16"),
    (
        {"kind": "expert_choice", "sequences_per_group": 4},
        r"=1.0 · 4 rows of a group / num_experts=16\) = 0 rows.*at least 8 sequences",
    ),
    (
        {"kind": "expert_choice", "mean_experts": 40.0},
        r"mean_experts=40.0 is more than num_experts=16",
    ),
    (
        {"kind": "soft_moe"},
        r"slots_per_expert is not set.*num_experts=16.*for 128 positions: 8",
    ),
    ({"kind": "soft_moe", "slots_per_expert": 2}, "lets a position read later ones"),
    ({"kind": "transition", "sequences_per_group": 1}, "=1: a softmax over a group of one"),
    ({"kind": "transition", "switch_step": 0}, "switch_step"),
    (
        {"kind": "transition", "sequences_per_group": 4},
        "num_experts=16 must be router.sequences_per_group=4 × router.top_k=1 = 4, so that",
    ),
    *(
        (
            {"kind": "mixture_of_tokens", name: 1},
            r"=1: a softmax over a group of one token is 1 for every expert.*use 2 or more",
        )
        for name in ("sequences_per_group", "evaluation_sequences_per_group")
    ),
    (
        {"kind": "mixture_of_tokens", "separate_emit_temperature": True},
        "no temperature is learned",
    ),
]


@pytest.mark.parametrize(("router", "message"), ROUTERS)
def test_routers(router: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        ModelConfig.from_dotted({"feed_forward.router": router})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_layers": 7}, "num_layers=7 is not divisible by layers_per_group=2"),
        ({"d_model": 0}, "greater than 0"),
        (
            {"attention.d_head": 82, "attention.positions.width": 41},
            "positions.width=41 with d_head=82",
        ),
        ({"feed_forward.router.top_k": 17}, "top_k=17 is more than num_experts=16"),
        ({"attention.top_k": 5, "attention.num_experts": 4}, "top_k=5 is more than"),
        ({"attention.single_expert": "gated_experts", "attention.num_experts": 1}, "set top_k=1"),
        (
            {"attention.kind": "momha", "attention.top_k": 9, "attention.num_experts": 4},
            r"top_k=9 is more than num_experts=4 ",
        ),
        (
            {"attention.kind": "momha", "attention.num_experts": 1},
            "top_k=2 is more than num_experts=1: set top_k=1",
        ),
        (
            {"feed_forward.sparse_layers": 2},
            "sparse_layers=2 with layers_per_group=2 leaves no layer with experts",
        ),
        ({"feed_forward.sub_tokens": 5}, "sub_tokens=5 does not divide d_model=128"),
    ],
)
def test_models(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        ModelConfig.from_dotted(changes)
