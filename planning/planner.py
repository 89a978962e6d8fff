"""Which layout for so many machines: every legal one predicted, ranked, and compared with doing
without expert parallelism.

A layout is legal if ep divides dp_shard, dp_shard the world, and ep every bank of experts.
Published MoEUTs have banks that hardly anything divides (387 feed-forward experts, 40 of
attention): such a layout is offered with the bank rounded up, and says so. (The bank as it is runs
too, the first ranks holding one expert more; that costs what the rounded one costs.) Where the
world's own divisors are poor (1,249 nodes are a prime number) worlds that leave a few nodes out are
tried as well.

Of every layout the fastest dispatcher is taken, with as little recomputation as fits into memory.
About 0.5 ms per layout.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from ..distributed.dispatch.table import LOCAL, by_collectives, needs_nodes
from .communication import ranks_sharing_a_node
from .cost_model import RECOMPUTATION, SHARDINGS, predict
from .prediction import LayoutCandidate, Prediction, Scenario
from .workload import rounded

MOST_UNUSED = 0.1  # of the nodes, in search of better divisors


@dataclass(frozen=True)
class Constraints:
    """What the user has decided about the layout; None leaves it open."""

    ep: int | None = None
    sharding: str | None = None
    dispatcher: str | None = None
    recompute: str | None = None


UNCONSTRAINED = Constraints()


@dataclass(frozen=True)
class LayoutPlan:
    """One layout with its prediction, and what taking it would change."""

    prediction: Prediction
    scenario: Scenario  # with the experts rounded up, where they had to be
    unused_ranks: int
    changes: tuple[tuple[str, int], ...] = ()  # rounded-up banks: kind, experts of a head

    @property
    def candidate(self) -> LayoutCandidate:
        """Returns the layout that is planned."""
        return self.prediction.candidate


@dataclass(frozen=True)
class RankedPlans:
    """All plans for one number of nodes, best first; those that do not fit come last."""

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
    """Returns every layout of `nodes` nodes, ranked by the tokens per second of the whole world.

    Raises:
        ValueError: no layout is legal, or none fits into memory; the message says what is missing.
    """
    ranks = nodes * scenario.hardware.ranks_per_node
    found: dict[tuple[int, int, int, str], LayoutPlan] = {}
    for world in _worlds(nodes, scenario.hardware.ranks_per_node, constraints.ep):
        for plan in _of_world(scenario, world, ranks - world, constraints):
            candidate = plan.candidate
            found[candidate.dp_replicate, candidate.dp_shard, candidate.ep, candidate.sharding] = (
                plan
            )
    if not found:
        raise ValueError(_nothing_legal(scenario, ranks, constraints))
    ranked = sorted(
        found.values(),
        key=lambda plan: (not plan.prediction.fits, *_slowness(plan.prediction)),
    )
    if not ranked[0].prediction.fits:
        raise ValueError(_nothing_fits(scenario, nodes, ranked))
    return RankedPlans(nodes, tuple(ranked))


def _worlds(nodes: int, ranks_per_node: int, ep: int | None) -> list[int]:
    """Returns the whole world, and smaller ones whose number of nodes has more divisors.

    Of a given ep it is the largest multiple.
    """
    whole = nodes * ranks_per_node
    if ep is not None and whole % ep:
        return [whole // ep * ep] if whole >= ep else []
    rounder = {nodes - nodes % 2**power for power in range(7)}
    return [
        count * ranks_per_node
        for count in sorted(rounder, reverse=True)
        if count >= (1 - MOST_UNUSED) * nodes
    ]


def _of_world(
    scenario: Scenario, world: int, unused: int, constraints: Constraints
) -> Iterator[LayoutPlan]:
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
            yield LayoutPlan(best, changed, unused, tuple(sorted(changes.items())))


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

    If nothing fits, it is the one that needs the least memory.
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
    """Ranks by throughput and, where all wait for the host, by what the device needs."""
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
            f"no layout: ep {ep} needs {ep} ranks, and there are {ranks}, all of which would be "
            "unused; "
            f"take {-(-ep // per_node)} nodes or a smaller ep"
        )
    return (
        f"no layout of {ranks} ranks has ep {ep}: every rank of an ep group holds equally many of "
        "each bank's experts "
        f"({banks}), at least one, and banks are rounded up by a quarter at most; choose another ep"
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
        f"needs {memory.total / 1e9:.1f} GB of {room / 1e9:.1f} GB per rank, "
        f"{(memory.total - room) / 1e9:.1f} GB too many; most of it "
        f"{', '.join(f'{name} {size / 1e9:.1f} GB' for name, size in parts)}. "
        "More nodes share weights further, fewer --tokens-per-rank need less for activations and "
        "logits"
    )


# From which size expert parallelism pays ----------------------------------------------------------


@dataclass(frozen=True)
class SizeRange:
    """Consecutive sizes of the world at which expert parallelism is faster, or is not."""

    first_ranks: int
    last_ranks: int
    ep_pays: bool


def ep_pays(ranked_plans: RankedPlans) -> bool | None:
    """Tells whether the best plan with expert parallelism is faster than the best without.

    None if there is no plan with expert parallelism.
    """
    tokens, weights = ranked_plans.best(with_ep=True), ranked_plans.best(with_ep=False)
    if tokens is None:
        return None
    return weights is None or tokens.prediction.tokens_per_s > weights.prediction.tokens_per_s


def size_ranges(plans: Sequence[RankedPlans], ranks_per_node: int) -> list[SizeRange]:
    """Groups the planned sizes by whether expert parallelism pays, in ascending order."""
    found: list[SizeRange] = []
    for ranked in sorted(plans, key=lambda ranked: ranked.nodes):
        pays = ep_pays(ranked)
        if pays is None:
            continue
        ranks = ranked.nodes * ranks_per_node
        if found and found[-1].ep_pays == pays:
            found[-1] = replace(found[-1], last_ranks=ranks)
        else:
            found.append(SizeRange(ranks, ranks, pays))
    return found
