"""Predicts and ranks every legal layout for a number of nodes, with and without expert parallelism.

A layout is legal if ep divides dp_shard and every bank of experts, and dp_shard divides the world.
Hardly anything divides the banks of published MoEUTs (387 feed-forward experts, 40 of attention),
so the planner rounds such banks up and says so. (Training also accepts the original bank: the first
ranks hold one expert more, at the cost of the rounded one.)

Each layout gets its fastest dispatcher and the least recomputation that fits into memory. A layout
takes about 0.5 ms.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from ..distributed.dispatch.table import LOCAL, by_collectives, needs_nodes
from .communication import ranks_sharing_a_node
from .cost_model import RECOMPUTATION, SHARDINGS, predict
from .prediction import LayoutCandidate, Prediction, Scenario
from .workload import rounded


@dataclass(frozen=True)
class Constraints:
    """Holds what the user has fixed about the layout; None leaves it open."""

    ep: int | None = None
    sharding: str | None = None
    dispatcher: str | None = None
    recompute: str | None = None


UNCONSTRAINED = Constraints()


@dataclass(frozen=True)
class LayoutPlan:
    """Holds one layout with its prediction and what using it would change."""

    prediction: Prediction
    scenario: Scenario  # with rounded-up experts, if ep required it
    changes: tuple[tuple[str, int], ...] = ()  # rounded-up banks: kind, experts per head

    @property
    def candidate(self) -> LayoutCandidate:
        """Returns the layout of this plan."""
        return self.prediction.candidate


@dataclass(frozen=True)
class RankedPlans:
    """Holds all plans for one number of nodes, best first; those that do not fit come last."""

    nodes: int
    plans: tuple[LayoutPlan, ...]

    @property
    def fitting(self) -> tuple[LayoutPlan, ...]:
        """Returns the plans that fit into memory, best first."""
        return tuple(plan for plan in self.plans if plan.prediction.fits)

    def best(self, *, with_ep: bool) -> LayoutPlan | None:
        """Returns the fastest plan that fits, with or without expert parallelism."""
        return next((plan for plan in self.fitting if (plan.candidate.ep > 1) == with_ep), None)


def rank_plans(
    scenario: Scenario, nodes: int, constraints: Constraints = UNCONSTRAINED
) -> RankedPlans:
    """Ranks every layout of `nodes` nodes by the whole world's tokens per second.

    Raises:
        ValueError: no layout is legal or fits into memory; the message says what is missing.
    """
    ranks = nodes * scenario.hardware.ranks_per_node
    ranked = sorted(
        _of_world(scenario, ranks, constraints),
        key=lambda plan: (not plan.prediction.fits, *_slowness(plan.prediction)),
    )
    if not ranked:
        raise ValueError(_nothing_legal(scenario, ranks, constraints))
    if not ranked[0].prediction.fits:
        raise ValueError(_nothing_fits(scenario, nodes, ranked))
    return RankedPlans(nodes, tuple(ranked))


def _of_world(scenario: Scenario, world: int, constraints: Constraints) -> Iterator[LayoutPlan]:
    for ep in _divisors(world):
        if constraints.ep not in (None, ep):
            continue
        if ep > 1 and not scenario.workload.uses:
            continue
        fitted = rounded(scenario.workload, ep) if ep > 1 else (scenario.workload, {})
        if fitted is None:
            continue
        workload, changes = fitted
        changed = replace(scenario, workload=workload)
        for sharding, dp_shard in _shardings(world, ep, constraints.sharding):
            layout = LayoutCandidate(world // dp_shard, dp_shard, ep, sharding, LOCAL)
            best = best_way(changed, layout, constraints)
            yield LayoutPlan(best, changed, tuple(sorted(changes.items())))


def _shardings(world: int, ep: int, wanted: str | None) -> Iterator[tuple[str, int]]:
    for sharding in SHARDINGS if wanted is None else (wanted,):
        if sharding == "none":
            yield sharding, ep
        else:
            yield from (("fsdp", size) for size in _divisors(world) if size % ep == 0 and size > 1)


def best_way(
    scenario: Scenario, layout: LayoutCandidate, constraints: Constraints = UNCONSTRAINED
) -> Prediction:
    """Returns the prediction with the fastest dispatcher and the least recomputation that fits.

    If nothing fits, returns the one that needs the least memory.
    """
    tried: list[Prediction] = []
    for dispatcher in _dispatchers(scenario, layout, constraints):
        for recompute in [constraints.recompute] if constraints.recompute else RECOMPUTATION:
            way = replace(layout, dispatcher=dispatcher, recompute=recompute)
            tried.append(predict(scenario, way))
            if tried[-1].fits:
                break
    fitting = [prediction for prediction in tried if prediction.fits]
    if fitting:
        return min(fitting, key=_slowness)
    return min(tried, key=lambda prediction: prediction.memory.total)


def _slowness(prediction: Prediction) -> tuple[float, float]:
    """Ranks by throughput; layouts that all wait for the host rank by device time."""
    return -prediction.tokens_per_s, prediction.time.device


def _dispatchers(
    scenario: Scenario, layout: LayoutCandidate, constraints: Constraints
) -> list[str]:
    if layout.ep == 1:
        return [LOCAL]
    per_node = scenario.hardware.ranks_per_node
    one_node = ranks_sharing_a_node(layout.ep, per_node) == layout.ep
    if constraints.dispatcher:
        return [constraints.dispatcher]
    return [name for name in by_collectives() if not (one_node and needs_nodes(name))]


def _divisors(number: int) -> list[int]:
    small = [size for size in range(1, int(number**0.5) + 1) if number % size == 0]
    return sorted({*small, *(number // size for size in small)})


def _nothing_legal(scenario: Scenario, ranks: int, constraints: Constraints) -> str:
    banks = (
        ", ".join(f"{bank.kind} {bank.total_experts}" for bank, _ in scenario.workload.uses)
        or "none"
    )
    ep = constraints.ep or 1
    if ep > ranks:
        per_node = scenario.hardware.ranks_per_node
        return (
            f"no layout: ep {ep} needs {ep} ranks, and there are only {ranks}; take "
            f"{-(-ep // per_node)} nodes or a smaller ep"
        )
    return (
        f"no layout of {ranks} ranks has ep {ep}: it must divide the ranks, each rank of an ep group "
        f"must hold an equal number of every bank's experts ({banks}), at least one, and the planner "
        "rounds banks up by at most a quarter; choose another ep"
    )


def _nothing_fits(scenario: Scenario, nodes: int, ranked: Sequence[LayoutPlan]) -> str:
    least = min(ranked, key=lambda plan: plan.prediction.memory.total)
    memory = least.prediction.memory
    room = scenario.hardware.usable_memory * scenario.hardware.memory_bytes
    parts = sorted(vars(memory).items(), key=lambda part: -part[1])[:3]
    return (
        f"the model fits on no layout of {nodes} {'node' if nodes == 1 else 'nodes'} of "
        f"{scenario.hardware.name}: the smallest, "
        f"{least.candidate} with {least.candidate.recompute} recomputation, "
        f"needs {memory.total / 1e9:.1f} GB of {room / 1e9:.1f} GB per rank, mostly "
        f"{', '.join(f'{name} {size / 1e9:.1f} GB' for name, size in parts)}. "
        "Add nodes to shard the weights further, or lower --tokens-per-rank to shrink activations "
        "and logits"
    )


# From which size expert parallelism pays ----------------------------------------------------------


def ep_pays(ranked_plans: RankedPlans) -> bool | None:
    """Tells whether the best plan with expert parallelism beats the best without.

    None if no plan has expert parallelism.
    """
    tokens, weights = ranked_plans.best(with_ep=True), ranked_plans.best(with_ep=False)
    if tokens is None:
        return None
    return weights is None or tokens.prediction.tokens_per_s > weights.prediction.tokens_per_s
