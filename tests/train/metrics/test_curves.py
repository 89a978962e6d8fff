"""The names of curves, equal in every sink."""

from pathlib import Path

from moebius.train.metrics.curves import METRICS, points_of
from moebius.train.metrics.log import Record
from moebius.train.metrics.sinks import flat_values

LINE = Record(
    "train",
    7,
    1.0,
    {
        "loss": 2.5,
        "learning_rate": 1e-3,
        "grad_norm_attention": 0.5,
        "left_s": 60.0,
        "digest": 12345,
        "tokens_per_s": 10,
        "auxiliary_losses": {"balance": 0.5},
        "expert_load": [[0.5, 0.5], [1.0, 0.0]],
        "max_violation": [0.0, 1.0],
        "effective_experts": [2.0, 1.0],
        "value_gate_mean": [0.25, 0.75],
        "exchange": {"0/feed_forward": {"rows_sent": 8}},
    },
)


def paths(record: Record, *, by_depth: bool) -> dict[str, float]:
    return dict(points_of(record, depths=(2, 4), by_depth=by_depth))


def test_a_line_about_a_step_has_the_names_that_people_look_for() -> None:
    assert paths(LINE, by_depth=False) == {
        "loss/train": 2.5,
        "learning_rate": 1e-3,
        "gradient/norm_attention": 0.5,
        "progress/left_s": 60.0,
        "throughput/tokens_per_s": 10.0,
        "loss/auxiliary/balance": 0.5,
        "experts/max_violation/feed_forward": 1.0,
        "experts/effective_experts/feed_forward": 1.0,
        "experts/gate_mean/value": 0.5,
        "exchange/rows_sent/0/feed_forward": 8.0,
    }


def test_depth_steps_have_their_own_numbers() -> None:
    of_depths = {
        path: value
        for path, value in paths(LINE, by_depth=True).items()
        if path.startswith("experts_by_depth/")
    }
    assert of_depths == {
        # depth steps 2 and 4 have experts
        "experts_by_depth/max_violation/feed_forward/depth_02": 0.0,
        "experts_by_depth/max_violation/feed_forward/depth_04": 1.0,
        "experts_by_depth/effective_experts/feed_forward/depth_02": 2.0,
        "experts_by_depth/effective_experts/feed_forward/depth_04": 1.0,
        "experts_by_depth/gate_mean/value/depth_01": 0.25,
        "experts_by_depth/gate_mean/value/depth_02": 0.75,
    }


def test_other_kinds_of_lines() -> None:
    evaluation = Record("eval", 7, 1.0, {"loss": 2.0, "perplexity": 7.4, "is_last": True})
    assert paths(evaluation, by_depth=True) == {
        "loss/validation": 2.0,
        "perplexity/validation": 7.4,
    }
    # what a line newly tells is not lost
    assert paths(Record("news", 7, 1.0, {"what": 3, "why": "x"}), by_depth=True) == {"news/what": 3}


def test_the_docs_list_every_name() -> None:
    text = (Path(__file__).parents[3] / "docs" / "metrics.md").read_text(encoding="utf-8")
    for metric in METRICS.values():
        assert f"| `{metric.name}` | {metric.unit or '–'} | " in text


def test_a_configuration_becomes_flat() -> None:
    nested = {"train": {"steps": 3, "start_when": None}, "sinks": ["a"], "is": True}
    assert flat_values(nested) == {
        "train.steps": 3,
        "train.start_when": "none",
        "sinks": '["a"]',
        "is": True,
    }
