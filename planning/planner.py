"""Predicts and ranks every legal layout for a number of nodes, with and without expert parallelism.

A layout is legal if ep divides dp_shard, dp_shard divides the world, and every bank has at least ep
experts. If ep does not divide a bank, as with the 387 feed-forward experts of published MoEUTs, the
first ranks hold one expert more, and the fullest rank decides.

Each layout gets its fastest dispatcher and the least recomputation that fits into memory. A layout
takes about 0.5 ms.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from ..distributed.dispatch.table import LOCAL, by_collectives, needs_nodes
from .communication import ranks_sharing_a_node
from .cost_model import RECOMPUTATION, SHARDINGS, predict
from .prediction import LayoutCandidate, Prediction, Scenario


@dataclass(frozen=True)
class Constraints:
    """Holds what the user has fixed about the layout; None leaves it open."""

    ep: int | None = None
    sharding: str | None = None
    dispatcher: str | None = None
    recompute: str | None = None


def rank_plans(scenario: Scenario, nodes: int, constraints: Constraints) -> list[Prediction]:
    """Ranks every layout of `nodes` nodes by the whole world's tokens per second.

    Those that do not fit come last.

    Raises:
        ValueError: no layout is legal or fits into memory; the message says what is missing.
    """
    ranks = nodes * scenario.hardware.ranks_per_node
    layouts = _layouts(scenario, ranks, constraints)
    ranked = [best_way(scenario, layout, constraints) for layout in layouts]
    if not ranked:
        raise ValueError(_nothing_legal(scenario, ranks, constraints))
    ranked.sort(key=lambda plan: (not plan.fits, *_slowness(plan)))
    if not ranked[0].fits:
        raise ValueError(_nothing_fits(scenario, nodes, ranked))
    return ranked


def _layouts(scenario: Scenario, world: int, constraints: Constraints) -> Iterator[LayoutCandidate]:
    sizes = _divisors(world)
    most = min((bank.total_experts for bank, _ in scenario.workload.uses), default=1)
    shardings = SHARDINGS if constraints.sharding is None else (constraints.sharding,)
    for ep in sizes if constraints.ep is None else {constraints.ep} & {*sizes}:
        if ep > most:
            continue
        for sharding in shardings:
            shards = [size for size in sizes if size % ep == 0 and size > 1]
            for dp_shard in [ep] if sharding == "none" else shards:
                yield LayoutCandidate(world // dp_shard, dp_shard, ep, sharding, LOCAL)


def best_way(scenario: Scenario, layout: LayoutCandidate, constraints: Constraints) -> Prediction:
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
    fitting = [plan for plan in tried if plan.fits]
    if fitting:
        return min(fitting, key=_slowness)
    return min(tried, key=lambda plan: plan.memory.total)


def _slowness(prediction: Prediction) -> tuple[float, float]:
    """Ranks by throughput; layouts that all wait for the host rank by device time."""
    return -prediction.tokens_per_s, prediction.time.device


def _dispatchers(
    scenario: Scenario, layout: LayoutCandidate, constraints: Constraints
) -> list[str]:
    if layout.ep == 1:
        return [LOCAL]
    if constraints.dispatcher:
        return [constraints.dispatcher]
    per_node = scenario.hardware.ranks_per_node
    one_node = ranks_sharing_a_node(layout.ep, per_node) == layout.ep
    return [name for name in by_collectives() if not (one_node and needs_nodes(name))]


def _divisors(number: int) -> list[int]:
    return [size for size in range(1, number + 1) if number % size == 0]


def _nothing_legal(scenario: Scenario, ranks: int, constraints: Constraints) -> str:
    ep, per_node = constraints.ep or 1, scenario.hardware.ranks_per_node
    if ep > ranks:
        return (
            f"no layout: ep {ep} needs {ep} ranks, and there are only {ranks}; take "
            f"{-(-ep // per_node)} nodes or a smaller ep"
        )
    banks = [f"{bank.kind} {bank.total_experts}" for bank, _ in scenario.workload.uses]
    return (
        f"no layout of {ranks} ranks has ep {ep}: it must divide the ranks, and each rank of an ep "
        f"group holds at least one expert of every bank ({', '.join(banks) or 'none'}); choose "
        "another ep"
    )


def _nothing_fits(scenario: Scenario, nodes: int, ranked: Sequence[Prediction]) -> str:
    least = min(ranked, key=lambda plan: plan.memory.total)
    room = scenario.hardware.usable_memory * scenario.hardware.memory_bytes
    parts = sorted(vars(least.memory).items(), key=lambda part: -part[1])[:3]
    return (
        f"the model fits on no layout of {nodes} {'node' if nodes == 1 else 'nodes'} of "
        f"{scenario.hardware.name}: the smallest, "
        f"{least.candidate} with {least.candidate.recompute} recomputation, "
        f"needs {least.memory.total / 1e9:.1f} GB of {room / 1e9:.1f} GB per rank, mostly "
        f"{', '.join(f'{name} {size / 1e9:.1f} GB' for name, size in parts)}. "
        "Add nodes to shard the weights further, or lower --tokens-per-rank to shrink activations "
        "and logits"
    )
