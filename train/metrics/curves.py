"""Names the curve of every number in the metrics, the same in every sink.

`METRICS` lists the names with their units; docs/metrics.md shows them. A number that is not listed
is called "kind/field", so a new field of a line is not lost.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .log import Record
from .step_metrics import LOAD_KINDS


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
    ("rollback", "number"): Metric("run/rollbacks", "", "of the run so far"),
}
# Fields that are not measurements.
_NOT_MEASURED = {
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


def points_of(
    record: Record, *, depths: Sequence[int], by_depth: bool
) -> Iterator[tuple[str, float]]:
    """Yields the numbers of a record, each with the name of its curve.

    Args:
        record: one line of the metrics.
        depths: depth steps whose feed-forward has experts, from 1.
        by_depth: whether to yield a number for every depth step as well.
    """
    for name, value in record.values.items():
        if (record.kind, name) in _NOT_MEASURED:
            continue
        if _is_number(value):
            metric = METRICS.get((record.kind, name))
            yield metric.name if metric else f"{record.kind}/{name}", float(value)
        elif record.kind == "train" and isinstance(value, list):
            yield from _by_depth(name, value, depths, by_depth=by_depth)
        elif record.kind == "train" and isinstance(value, dict):
            yield from _by_group(name, value)


def _by_depth(
    name: str, values: Sequence[Any], depths: Sequence[int], *, by_depth: bool
) -> Iterator[tuple[str, float]]:
    """Yields a router's statistic: the worst depth step's, and if wanted every depth step's."""
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
    """Returns the kind of router that a field is about, and the statistic: "value", "gate_mean".

    Fields of the feed-forward have no prefix; those of other kinds begin with the kind.
    """
    for kind in LOAD_KINDS[1:]:
        if field_name.startswith(f"{kind}_"):
            return kind, field_name.removeprefix(f"{kind}_")
    return LOAD_KINDS[0], field_name


def _by_group(name: str, values: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """Yields the numbers of the two fields that are tables: auxiliary losses and exchanges."""
    for key, entry in values.items():
        if name == "auxiliary_losses" and _is_number(entry):
            yield f"loss/auxiliary/{key}", float(entry)
        elif name == "exchange":
            for figure, value in entry.items():
                yield f"exchange/{figure}/{key}", float(value)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
