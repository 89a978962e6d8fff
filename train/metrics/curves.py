"""What the numbers of a line are called where people look at curves, the same in every sink.

`METRICS` is the list, with units; docs/metrics.md shows it. A number that is not in it is called
"kind/field", so that what a line newly tells is not lost.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from .records import Record, is_matrix
from .step_metrics import LOAD_KINDS

_DEPTHS = "experts_by_depth"


@dataclass(frozen=True)
class Metric:
    """Names a curve, and says what it shows."""

    name: str
    unit: str
    what: str


METRICS: dict[tuple[str, str], Metric] = {
    ("train", "loss"): Metric("loss/train", "nats per token", "cross-entropy of the step's batch"),
    ("eval", "loss"): Metric("loss/validation", "nats per token", "of the validation split"),
    ("eval", "perplexity"): Metric("perplexity/validation", "", "exp of the validation loss"),
    ("train", "regularisation"): Metric(
        "loss/regularisation", "nats per token", "all that is added to the cross-entropy"
    ),
    ("train", "auxiliary_losses"): Metric(
        "loss/auxiliary/NAME", "", "each auxiliary loss without its coefficient"
    ),
    ("train", "learning_rate"): Metric("learning_rate", "", "of the step"),
    ("train", "grad_norm"): Metric("gradient/norm", "", "of all parameters, before clipping"),
    ("train", "tokens_per_s"): Metric("throughput/tokens_per_s", "tokens/s", "of all ranks"),
    ("train", "step_s"): Metric(
        "throughput/step_s", "s", "per step, all that goes on beside it too"
    ),
    ("train", "tokens"): Metric("progress/tokens", "tokens", "trained on so far"),
    ("train", "skipped"): Metric("progress/skipped_steps", "steps", "without an update, so far"),
    ("train", "data_wait_s"): Metric("data/wait_s", "s", "waiting for data per step, all ranks"),
    ("train", "counted_targets"): Metric("data/counted_targets", "tokens", "in the step's loss"),
    ("train", "ranks_without_data_server"): Metric(
        "data/ranks_without_server", "ranks", "whose data server has ended"
    ),
    ("data_wait", "seconds"): Metric("data/stall_s", "s", "the run has stood still for data"),
    ("data_wait", "ranks"): Metric("data/stalled_ranks", "ranks", "that had no batch then"),
    ("train", "max_violation"): Metric(
        "experts/max_violation/KIND",
        "",
        "largest load ÷ mean − 1, of the worst depth step; 0 is even",
    ),
    ("train", "effective_experts"): Metric(
        "experts/effective_experts/KIND",
        "experts",
        "exp of the load's entropy, of the worst depth step",
    ),
    ("train", "drop_fraction"): Metric(
        "experts/drop_fraction/KIND", "", "routes that a capacity refused, of the worst depth step"
    ),
    ("train", "gate_mean"): Metric(
        "experts/gate_mean/KIND", "", "mean gate, mean of the depth steps"
    ),
    ("exchange", "rows_sent"): Metric(
        "exchange/rows_sent/LAYER", "rows", "that set out for experts"
    ),
    ("exchange", "rows_one_per_route"): Metric(
        "exchange/rows_one_per_route/LAYER", "rows", "what `alltoall` would have sent"
    ),
    ("exchange", "bytes_intra_node"): Metric(
        "exchange/bytes_intra_node/LAYER", "bytes", "within nodes, forward"
    ),
    ("exchange", "bytes_inter_node"): Metric(
        "exchange/bytes_inter_node/LAYER", "bytes", "between nodes, forward"
    ),
    ("exchange", "waited_s"): Metric(
        "exchange/waited_s/LAYER", "s", "hosts stood still for exchanges, all ranks"
    ),
    ("exchange", "hottest_rank"): Metric(
        "exchange/hottest_rank/LAYER", "", "routes of the busiest rank ÷ mean; 1 is even"
    ),
    ("eval", "tokens"): Metric("validation/tokens", "tokens", "that the validation loss is of"),
    ("eval", "seconds"): Metric("validation/seconds", "s", "that the evaluation took"),
    ("checkpoint", "seconds"): Metric("checkpoint/seconds", "s", "until it was complete"),
    ("checkpoint", "blocked_s"): Metric("checkpoint/blocked_s", "s", "that steps waited for it"),
    ("checkpoint", "verify_s"): Metric("checkpoint/verify_s", "s", "of these for reading it back"),
    ("checkpoint", "bytes"): Metric("checkpoint/bytes", "bytes", "written"),
    ("checkpoint_copy", "seconds"): Metric("checkpoint/copy_seconds", "s", "of the second copy"),
    ("checkpoint_copy", "bytes"): Metric("checkpoint/copy_bytes", "bytes", "of the second copy"),
    ("expert_placement", "hottest_before"): Metric(
        "placement/hottest_before", "", "busiest rank ÷ mean before experts moved"
    ),
    ("expert_placement", "hottest_after"): Metric("placement/hottest_after", "", "and after"),
    ("expert_placement", "moved_experts"): Metric("placement/moved_experts", "experts", "moved"),
    ("expert_placement", "moved_bytes"): Metric("placement/moved_bytes", "bytes", "moved"),
    ("expert_placement", "seconds"): Metric("placement/seconds", "s", "that the move took"),
    ("spike", "loss"): Metric("spikes/loss", "nats per token", "of a step that was a spike"),
    ("spike", "loss_limit"): Metric("spikes/loss_limit", "nats per token", "above which it is one"),
    ("spike", "grad_norm"): Metric("spikes/gradient_norm", "", "of a step that was a spike"),
    ("spike", "grad_norm_limit"): Metric("spikes/gradient_norm_limit", "", "above which it is one"),
    ("spike", "in_a_row"): Metric("spikes/in_a_row", "steps", "spikes without a good step between"),
    ("start", "generation"): Metric("run/generation", "", "of the job; each restart begins one"),
    ("start", "world_size"): Metric("run/ranks", "ranks", "that train"),
    ("start", "parameters"): Metric("run/parameters", "", "of the model"),
    ("in_place", "round"): Metric("run/replacements", "", "rounds in which ranks were replaced"),
    ("rollback", "number"): Metric("run/rollbacks", "", "of the run so far"),
}
# Fields that are no measurement.
_LEFT_OUT = {
    ("train", "digest"),
    ("start", "steps"),
    ("spike", "first_sample"),
    ("checkpoint_set_aside", "resumed_from_step"),
    ("start", "resumed_from_step"),
    *(("rollback", name) for name in ("to_step", "first_sample", "end_sample", "most")),
    ("rollback_impossible", "at_most"),
}
# How the depth steps become one number: the worst of them.
_WORST: dict[str, Callable[[Sequence[float]], float]] = {
    "max_violation": max,
    "effective_experts": min,
    "drop_fraction": max,
    "gate_mean": lambda values: sum(values) / len(values),
}


@dataclass(frozen=True)
class Point:
    """One number of a record: a curve's name, what it is about, and its value."""

    name: str  # "experts_by_depth/max_violation"
    value: float
    labels: Mapping[str, str] = field(default_factory=dict)  # kind, depth, layer or name

    @property
    def path(self) -> str:
        """Returns the name with its labels: experts_by_depth/max_violation/feed_forward/depth_03."""
        parts = [
            f"depth_{int(value):02d}" if label == "depth" else value
            for label, value in self.labels.items()
        ]
        return "/".join([self.name, *parts])


def points_of(record: Record, *, depths: Sequence[int], by_depth: bool) -> Iterator[Point]:
    """Yields the numbers of a record under the names that people look for.

    Args:
        record: one line.
        depths: depth steps whose feed-forward has experts, from 1.
        by_depth: a point for every depth step as well.
    """
    for name, value in record.values.items():
        if (record.kind, name) in _LEFT_OUT or is_matrix(value):
            continue
        if is_number(value):
            yield Point(_name_of(record.kind, name), float(value))
        elif record.kind == "train" and isinstance(value, list):
            yield from _of_depths(name, value, depths, by_depth=by_depth)
        elif record.kind == "train" and isinstance(value, dict):
            yield from _of_groups(name, value)


def is_number(value: Any) -> bool:
    """Returns whether a value of a record is one number; a truth is none."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def router_of(field_name: str) -> tuple[str, str]:
    """Returns whose statistic a field is, and which: ("value", "max_violation").

    The feed-forward's go under plain names in a line, the others' with the kind as prefix.
    """
    for kind in LOAD_KINDS[1:]:
        if field_name.startswith(f"{kind}_"):
            return kind, field_name.removeprefix(f"{kind}_")
    return LOAD_KINDS[0], field_name


def depth_numbers(kind: str, count: int, depths: Sequence[int]) -> Sequence[int]:
    """Returns which depth steps the `count` entries of a statistic are, from 1."""
    if kind == LOAD_KINDS[0] and len(depths) == count:
        return depths
    return range(1, count + 1)


def _name_of(kind: str, name: str) -> str:
    metric = METRICS.get((kind, name))
    return metric.name if metric else f"{kind}/{name}"


def _of_depths(
    name: str, values: Sequence[Any], depths: Sequence[int], *, by_depth: bool
) -> Iterator[Point]:
    kind, statistic = router_of(name)
    worst = _WORST.get(statistic)
    if worst is None or not values or not all(map(is_number, values)):
        return
    yield Point(f"experts/{statistic}", worst(values), {"kind": kind})
    if by_depth:
        for depth, value in zip(depth_numbers(kind, len(values), depths), values, strict=True):
            yield Point(f"{_DEPTHS}/{statistic}", value, {"kind": kind, "depth": str(depth)})


def _of_groups(name: str, values: Mapping[str, Any]) -> Iterator[Point]:
    """Yields the points of the two fields that are tables: auxiliary losses and exchanges."""
    for key, entry in values.items():
        if name == "auxiliary_losses" and is_number(entry):
            yield Point("loss/auxiliary", float(entry), {"name": key})
        elif name == "exchange" and isinstance(entry, dict):
            for figure, value in entry.items():
                if is_number(value):
                    yield Point(f"exchange/{figure}", float(value), {"layer": key})
