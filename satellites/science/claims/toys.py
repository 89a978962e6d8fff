"""Defines the claims' toys: one small model per arm, on the same text, width, depth, batch and
schedule.

d 96, four blocks of which the last two have experts, 64 tokens × 32 sequences, AdamW with peak rate
1e-3, 5 % warm-up and a cosine to a tenth. The embedded corpus with 512 BPE tokens has 0.95M
training tokens: at most 1.1 epochs. All initialize by one rule (truncated normals of variance 0.1 /
fan-in). The seed draws the weights and the order of the data, so arms of one seed differ only in
the model.

Active width is 256 everywhere: a token costs as much in an arm's experts as in the dense layer. In
the Multi-Head MoE comparison with gated experts, it costs as much as in that comparison's other
arms.
"""

from dataclasses import dataclass
from typing import Any

import moebius

VOCABULARY, WIDTH, SEQ_LEN, BATCH, PEAK_RATE = 512, 96, 64, 32, 1e-3
EVALUATION_ROWS = 256
# logits divided by it change no float32 weight: every token gets 1/group, as with a router frozen
# at 0
UNIFORM_TEMPERATURE = 1e9
GRANULARITIES = (1, 4, 8)
WINDOWS = (4, 8, 16)  # tokens in which activated experts are counted


@dataclass(frozen=True)
class Arm:
    """Describes one model, and what its training records."""

    name: str
    steps: int  # unless the caller wants others
    feed_forward: dict[str, Any]
    evaluations: int = 5  # of the validation loss, after that of the start
    probes: int = 0  # held-out routings looked at, evenly spaced, the last after the last step
    windows: tuple[
        int, ...
    ] = ()  # tokens; in which activated experts are counted, after the last step


_COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "d_model": WIDTH,
    "num_layers": 4,
    "layers_per_group": 4,
    "norm": "pre",
    "attention": {"kind": "dense", "num_heads": 4, "d_head": 24},
    "initialisation": {"kind": "scaled"},
}
_DENSE_WIDTH = {"d_feed_forward": 256}


def _experts(router: dict[str, Any], **sizes: Any) -> dict[str, Any]:
    """Returns experts in the last half of the layers."""
    shape = {"kind": "experts", "sparse_layers": "last_half", "router": router}
    return shape | _DENSE_WIDTH | sizes


def _mixture(**router: Any) -> dict[str, Any]:
    """Returns MoT 32E/8: groups of 32, eight experts of an eighth of the width for each full one."""
    router = {"kind": "mixture_of_tokens", "sequences_per_group": 32, **router}
    return _experts(router, num_experts=256, d_expert=32)


def _top1(**router: Any) -> dict[str, Any]:
    return _experts({"top_k": 1, **router}, num_experts=16, d_expert=256)


def _gated(num_experts: int, d_expert: int, top_k: int, sub_tokens: int = 1) -> dict[str, Any]:
    """Returns experts of equal FLOPs, with parameters within 3 % (arXiv 2411.16205, an eighth of
    its width).
    """
    return _experts(
        {"kind": "token_choice", "top_k": top_k, "renormalise": top_k > 1},
        activation="swiglu",
        num_experts=num_experts,
        d_expert=d_expert,
        sub_tokens=sub_tokens,
    )


def granular(granularity: int, *, norm: bool) -> str:
    """Returns the arm whose experts have a G-th of the width, with G per token on average."""
    return f"G={granularity}, {'norm' if norm else 'no norm'}"


def _granular(granularity: int, *, norm: bool) -> Arm:
    router = {
        "kind": "expert_choice",
        "sequences_per_group": 32,
        "mean_experts": float(granularity),
    }
    sizes = _experts(
        router, num_experts=8 * granularity, d_expert=256 // granularity, output_norm=norm
    )
    return Arm(granular(granularity, norm=norm), 350, sizes)


_ALL = (
    Arm("dense", 500, {"kind": "dense", **_DENSE_WIDTH}, evaluations=20),
    Arm("MoT", 500, _mixture(), evaluations=20),
    Arm("MoT, uniform", 500, _mixture(temperature=UNIFORM_TEMPERATURE), evaluations=20),
    Arm("top-1, balance 0", 350, _top1(kind="token_choice", balance=0.0)),
    Arm("top-1, balance 0.01", 350, _top1(kind="token_choice", balance=0.01), probes=10),
    Arm("X-MoE", 350, _top1(kind="cosine", balance=0.01), probes=10),
    Arm("SMoE", 250, _gated(8, 256, 1), probes=1, windows=WINDOWS),
    Arm("fine-grained", 250, _gated(16, 128, 2), probes=1, windows=WINDOWS),
    Arm("MH-MoE h=2", 250, _gated(40, 96, 2, sub_tokens=2), probes=1, windows=WINDOWS),
    Arm("MH-MoE h=3", 250, _gated(96, 64, 3, sub_tokens=3), probes=1, windows=WINDOWS),
    *(_granular(granularity, norm=norm) for norm in (True, False) for granularity in GRANULARITIES),
)
ARMS = {arm.name: arm for arm in _ALL}


def toy(arm: Arm, *, seed: int, steps: int, text: str, data: str, device: str) -> moebius.Config:
    """Returns the run of one arm with one seed.

    Args:
        text: a file, or "embedded".
        data: the folder of prepared data; "": none yet.
    """
    warmup = steps // 20
    return moebius.Config.model_validate(
        {
            "model": _COMMON | {"feed_forward": arm.feed_forward},
            "data": {"seq_len": SEQ_LEN, "directory": data, "seed": seed},
            "prepare": {"input": [text], "vocab_size": VOCABULARY, "validation_fraction": 0.05},
            "optim": {
                "learning_rate": PEAK_RATE,
                "warmup_steps": warmup,
                "decay_steps": max(1, steps - warmup),
                "clip_norm": 1.0,
            },
            "train": {
                "steps": steps,
                "global_batch": BATCH,
                "micro_batch": BATCH,
                "device": device,
                "seed": seed,
                "log_every": 5,
                "eval_every": max(1, steps // arm.evaluations),
                "eval_rows": EVALUATION_ROWS,
            },
            "checkpoint": {
                "every": max(1, steps // arm.probes) if arm.probes else 0,
                "keep_last": 2 * steps,
            },
        }
    )
