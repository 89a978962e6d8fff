"""From the load of a bank's experts to an expert map that evens out the ranks. Pure arithmetic: who
has the counts has the answer.

A step waits for the rank with the most routes, so what counts is the hottest rank's factor: its
load over the mean of all ranks.
    1. copies: while slots are left the expert with the most load per copy gets one more, at most
       one per rank;
    2. packing: copies go, the heaviest first, each to the rank with the least load that has a free
       slot and no copy of it;
    3. the new map is taken if it is better than the old one by 1 % at least, for a move
       costs something too.
Steps 1 and 2 are those of EPLB, DeepSeek's balancer for serving (github.com/deepseek-ai/EPLB);
heaviest first is Graham's LPT rule. An expert's copies share its load as `ExpertMap.seen_from`
says, with source ranks taken to be alike.

Cost: 3 ms for 155 experts on 8 ranks, 20 ms on 64. What replicas cost in a run: replicas.py.

Legend: E experts, S slots, P ranks.
"""

import heapq
from collections.abc import Sequence

from ..dispatch.expert_map import ExpertMap
from ..layout import expert_blocks

_WORTH = 0.01  # of the factor: below this a move is not made


def rank_loads(expert_map: ExpertMap, load_E: Sequence[float]) -> list[float]:
    """Returns every rank's load, if every source rank has an equal share of every expert's."""
    num_ranks = len(expert_map.slots_P)
    loads = [0.0] * num_ranks
    for expert, slots in enumerate(expert_map.slots_E):
        if len(slots) == 1:
            loads[expert_map.rank_S[slots[0]]] += load_E[expert]
    if copied := [expert for expert, slots in enumerate(expert_map.slots_E) if len(slots) > 1]:
        for source in range(num_ranks):
            [*slot_E] = expert_map.seen_from(source).slot_E or ()
            for expert in copied:
                loads[expert_map.rank_S[slot_E[expert]]] += load_E[expert] / num_ranks
    return loads


def load_imbalance(expert_map: ExpertMap, load_E: Sequence[float]) -> float:
    """Returns the hottest rank's load over the mean of all ranks; 1 where nothing was routed."""
    loads = rank_loads(expert_map, load_E)
    total = sum(loads)
    return max(loads) * len(loads) / total if total else 1.0


def rebalanced(expert_map: ExpertMap, load_E: Sequence[float], *, replicas: int = 0) -> ExpertMap:
    """Returns an expert map that evens out this load, or `expert_map` if nothing is gained.

    It has `replicas` slots per rank beyond the equal share. No rank gets more slots than there are
    experts. Deterministic: ties go to the lower number.
    """
    blocks = expert_blocks(len(load_E), len(expert_map.slots_P))
    candidate = packed(load_E, [min(len(block) + replicas, len(load_E)) for block in blocks])
    better = load_imbalance(candidate, load_E) < (1 - _WORTH) * load_imbalance(expert_map, load_E)
    return candidate if better else expert_map


def packed(load_E: Sequence[float], slots_P: Sequence[int]) -> ExpertMap:
    """Fills every slot: chooses copies by load, then packs them, the heaviest first.

    Raises:
        ValueError: fewer slots than experts, or a rank with more slots than there are experts, or
            slots so uneven that copies of one expert would meet on a rank.
    """
    if sum(slots_P) < len(load_E) or max(slots_P) > len(load_E):
        raise ValueError(
            f"{list(slots_P)} slots for {len(load_E)} experts: at least as many in all, at most so "
            "many per rank"
        )
    copies_E = num_copies(load_E, sum(slots_P), len(slots_P))
    weight_E = [load / count for load, count in zip(load_E, copies_E, strict=True)]
    items = [expert for expert, count in enumerate(copies_E) for _ in range(count)]
    held_P: list[set[int]] = [set() for _ in slots_P]
    for expert in sorted(items, key=lambda expert: (-weight_E[expert], expert)):
        held_P[_free_rank(expert, held_P, slots_P, weight_E)].add(expert)
    return _as_expert_map(held_P, slots_P, len(load_E))


def num_copies(load_E: Sequence[float], num_slots: int, num_ranks: int) -> list[int]:
    """Returns how many slots every expert gets.

    Each gets one; the rest go one by one to the expert with the most load per copy.
    """
    copies_E = [1] * len(load_E)
    heap = [(-load, expert) for expert, load in enumerate(load_E)] if num_ranks > 1 else []
    heapq.heapify(heap)
    for _ in range(num_slots - len(load_E)):
        _, expert = heapq.heappop(heap)
        copies_E[expert] += 1
        if copies_E[expert] < num_ranks:
            heapq.heappush(heap, (-load_E[expert] / copies_E[expert], expert))
    return copies_E


def _free_rank(
    expert: int, held_P: Sequence[set[int]], slots_P: Sequence[int], weight_E: Sequence[float]
) -> int:
    """Returns the rank with the least load that can take a copy of an expert.

    Where only ranks are free that have one already, one of them takes another expert from a full
    rank, whose place becomes free.
    """
    load_P = [sum(weight_E[other] for other in sorted(held)) for held in held_P]
    free = [rank for rank, held in enumerate(held_P) if len(held) < slots_P[rank]]
    if fitting := [rank for rank in free if expert not in held_P[rank]]:
        return min(fitting, key=lambda rank: (load_P[rank], rank))
    exchanges = [
        (load_P[giver] - weight_E[other], giver, taker, other)
        for taker in free
        for giver, held in enumerate(held_P)
        if expert not in held
        for other in sorted(held - held_P[taker])
    ]
    if not exchanges:
        raise ValueError(
            f"no rank can take a copy of expert {expert}: {list(slots_P)} slots are too uneven"
        )
    _, giver, taker, other = min(exchanges)
    held_P[giver].remove(other)
    held_P[taker].add(other)
    return giver


def _as_expert_map(
    held_P: Sequence[set[int]], slots_P: Sequence[int], num_experts: int
) -> ExpertMap:
    """Makes a map with the experts of every rank in ascending order.

    The first copy of an expert is the one on the lowest rank.
    """
    expert_S = [expert for held in held_P for expert in sorted(held)]
    slots_E: list[list[int]] = [[] for _ in range(num_experts)]
    for slot, expert in enumerate(expert_S):
        slots_E[expert].append(slot)
    copies = tuple((expert, slot) for expert, slots in enumerate(slots_E) for slot in slots[1:])
    return ExpertMap(tuple(slots_P), tuple(slots[0] for slots in slots_E), copies)
