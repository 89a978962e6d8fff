"""Names the curve of every number in the metrics, the same in every sink.

`METRICS` lists the names with their units; docs/metrics.md explains them. An unlisted number is
called "kind/field", so a new field is never lost.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .log import Record
from .step_metrics import LOAD_KINDS


@dataclass(frozen=True)
class Metric:
    """Names a curve and its unit; "" for a plain number."""

    name: str
    unit: str


METRICS: dict[tuple[str, str], Metric] = {
    ("train", "loss"): Metric("loss/train", "nats per token"),
    ("eval", "loss"): Metric("loss/validation", "nats per token"),
    ("eval", "average_loss"): Metric("loss/validation_average", "nats per token"),
    ("eval", "perplexity"): Metric("perplexity/validation", ""),
    ("train", "regularisation"): Metric("loss/regularisation", "nats per token"),
    ("train", "auxiliary_losses"): Metric("loss/auxiliary/NAME", ""),
    ("train", "learning_rate"): Metric("learning_rate", ""),
    ("train", "muon_learning_rate"): Metric("muon_learning_rate", ""),
    ("train", "grad_norm"): Metric("gradient/norm", ""),
    ("train", "grad_norm_PART"): Metric("gradient/norm_PART", ""),
    ("train", "tokens_per_s"): Metric("throughput/tokens_per_s", "tokens/s"),
    ("train", "step_s"): Metric("throughput/step_s", "s"),
    ("train", "mfu"): Metric("throughput/mfu", ""),
    ("train", "left_s"): Metric("progress/left_s", "s"),
    ("train", "tokens"): Metric("progress/tokens", "tokens"),
    ("train", "passes"): Metric("progress/passes", "passes"),
    ("train", "skipped"): Metric("progress/skipped_steps", "steps"),
    ("train", "data_wait_s"): Metric("data/wait_s", "s"),
    ("train", "counted_targets"): Metric("data/counted_targets", "tokens"),
    ("data_wait", "seconds"): Metric("data/stall_s", "s"),
    ("data_wait", "ranks"): Metric("data/stalled_ranks", "ranks"),
    ("train", "max_violation"): Metric("experts/max_violation/KIND", ""),
    ("train", "effective_experts"): Metric("experts/effective_experts/KIND", "experts"),
    ("train", "drop_fraction"): Metric("experts/drop_fraction/KIND", ""),
    ("train", "gate_mean"): Metric("experts/gate_mean/KIND", ""),
    ("exchange", "rows_sent"): Metric("exchange/rows_sent/LAYER", "rows"),
    ("exchange", "rows_one_per_route"): Metric("exchange/rows_one_per_route/LAYER", "rows"),
    ("exchange", "bytes_intra_node"): Metric("exchange/bytes_intra_node/LAYER", "bytes"),
    ("exchange", "bytes_inter_node"): Metric("exchange/bytes_inter_node/LAYER", "bytes"),
    ("exchange", "waited_s"): Metric("exchange/waited_s/LAYER", "s"),
    ("exchange", "hottest_rank"): Metric("exchange/hottest_rank/LAYER", ""),
    ("eval", "tokens"): Metric("validation/tokens", "tokens"),
    ("eval", "seconds"): Metric("validation/seconds", "s"),
    ("scores", "TASK"): Metric("scores/TASK", ""),
    ("scores", "items"): Metric("scores/items", "items"),
    ("scores", "seconds"): Metric("scores/seconds", "s"),
    ("checkpoint", "seconds"): Metric("checkpoint/seconds", "s"),
    ("checkpoint", "blocked_s"): Metric("checkpoint/blocked_s", "s"),
    ("checkpoint", "verify_s"): Metric("checkpoint/verify_s", "s"),
    ("checkpoint", "bytes"): Metric("checkpoint/bytes", "bytes"),
    ("checkpoint_copy", "seconds"): Metric("checkpoint/copy_seconds", "s"),
    ("checkpoint_copy", "bytes"): Metric("checkpoint/copy_bytes", "bytes"),
    ("expert_placement", "hottest_before"): Metric("placement/hottest_before", ""),
    ("expert_placement", "hottest_after"): Metric("placement/hottest_after", ""),
    ("expert_placement", "moved_experts"): Metric("placement/moved_experts", "experts"),
    ("expert_placement", "moved_bytes"): Metric("placement/moved_bytes", "bytes"),
    ("expert_placement", "seconds"): Metric("placement/seconds", "s"),
    ("spike", "loss"): Metric("spikes/loss", "nats per token"),
    ("spike", "loss_limit"): Metric("spikes/loss_limit", "nats per token"),
    ("spike", "grad_norm"): Metric("spikes/gradient_norm", ""),
    ("spike", "grad_norm_limit"): Metric("spikes/gradient_norm_limit", ""),
    ("spike", "in_a_row"): Metric("spikes/in_a_row", "steps"),
    ("start", "generation"): Metric("run/generation", ""),
    ("start", "world_size"): Metric("run/ranks", "ranks"),
    ("start", "parameters"): Metric("run/parameters", ""),
}
# Fields that are not measurements.
_NOT_MEASURED = {
    ("train", "digest"),
    ("start", "steps"),
    ("spike", "first_sample"),
    ("checkpoint_set_aside", "resumed_from_step"),
    ("start", "resumed_from_step"),
}
# Reduces the depth steps to one number, the worst.
_WORST: dict[str, Callable[[Sequence[float]], float]] = {
    "max_violation": max,
    "effective_experts": min,
    "drop_fraction": max,
    "gate_mean": lambda values: sum(values) / len(values),
}


def points_of(
    record: Record, *, depths: Sequence[int], by_depth: bool
) -> Iterator[tuple[str, float]]:
    """Yields a record's numbers with the names of their curves.

    Args:
        record: one line of the metrics.
        depths: depth steps whose feed-forward has experts, from 1.
        by_depth: also yield a number for every depth step.
    """
    for name, value in record.values.items():
        if (record.kind, name) in _NOT_MEASURED:
            continue
        if _is_number(value):
            metric = METRICS.get((record.kind, name))
            other = f"{record.kind}/{name}".replace("train/grad_norm_", "gradient/norm_")
            yield metric.name if metric else other, float(value)
        elif record.kind == "train" and isinstance(value, list):
            yield from _by_depth(name, value, depths, by_depth=by_depth)
        elif record.kind == "train" and isinstance(value, dict):
            yield from _by_group(name, value)


def _by_depth(
    name: str, values: Sequence[Any], depths: Sequence[int], *, by_depth: bool
) -> Iterator[tuple[str, float]]:
    """Yields a router's statistic: the worst depth step's, and optionally every depth step's."""
    kind, statistic = _router_of(name)
    worst = _WORST.get(statistic)
    if worst is None or not values:
        return
    yield f"experts/{statistic}/{kind}", worst(values)
    if not by_depth:
        return
    all_steps = range(1, len(values) + 1)
    steps = depths if kind == LOAD_KINDS[0] and len(depths) == len(values) else all_steps
    for step, value in zip(steps, values, strict=True):
        yield f"experts_by_depth/{statistic}/{kind}/depth_{step:02d}", value


def _router_of(field_name: str) -> tuple[str, str]:
    """Returns the router kind and the statistic of a field: "value", "gate_mean".

    Only fields of the feed-forward have no prefix.
    """
    for kind in LOAD_KINDS[1:]:
        if field_name.startswith(f"{kind}_"):
            return kind, field_name.removeprefix(f"{kind}_")
    return LOAD_KINDS[0], field_name


def _by_group(name: str, values: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """Yields the numbers of the two tables: auxiliary losses and exchanges."""
    for key, entry in values.items():
        if name == "auxiliary_losses" and _is_number(entry):
            yield f"loss/auxiliary/{key}", float(entry)
        elif name == "exchange":
            for figure, value in entry.items():
                yield f"exchange/{figure}/{key}", float(value)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
