"""Composition over a knowledge graph: combine two facts that were learned separately.

Source: Wang, Yue, Su, Sun, "Grokked Transformers are implicit reasoners" (arXiv 2405.15071),
section 3 and appendix F (models that share layers); sizes as in the notebook of its code. The
rebuttal of MoEUT (arXiv 2405.16039) reports about 70 % out of distribution.

1. 2000 entities, 200 relations. Each entity has 20 different relations, each to a uniform entity:
   40,000 atomic facts (h, r, t).
2. 5 % of them are "OOD", the others "ID".
3. Two-hop facts (h, r1, r2) → t through a bridge, all combinations. Both hops ID: 0.5 % are the ID
   test, the others can be trained on. Both hops OOD: the OOD test. One of each: unused.
4. Training: all atomic facts, ID and OOD, and `ratio` two-hop facts for every ID atomic fact.

    prompt e_17 r_3       answer e_5          an atomic fact
    prompt e_17 r_3 r_8   answer e_9          a two-hop fact

Use `data.targets="next"` and `data.packing="best_fit"` with data.seq_len=4: one row per fact. The
published sizes are the defaults; a tenth is entities=200, relations=40.

Chance: 1/entities. A model that knows r2 and guesses among its tails gets about
relations/(entities·facts_per_entity) times the number of entities that have r2, which is not much
more. The sides partition all two-hop facts and are therefore disjoint.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from .draw import NUM_SPLITS, Record, check_sizes, share_of

_OOD_FACTS = 0.05
_ID_TEST = 0.005


@dataclass(frozen=True)
class Graph:
    """Holds the facts of one graph: rows (h, r, t) and (h, r1, r2, t) of numbers."""

    atomic: np.ndarray  # int64 [facts, 3]
    is_ood: np.ndarray  # bool [facts]
    two_hop: np.ndarray  # int64 [all combinations, 4]
    side: np.ndarray  # int8 [all combinations]: one of the three below, or −1: nothing


TRAIN, ID_TEST, OOD_TEST = range(3)


def words(*, entities: int = 2000, relations: int = 200) -> list[str]:
    """Returns the task's words: entities and relations."""
    return [*(f"e_{index}" for index in range(entities)), *(f"r_{r}" for r in range(relations))]


def train(
    split_index: int, num_splits: int, *, ratio: float = 18.0, **sizes: int
) -> Iterator[Record]:
    """Yields a split of the training facts, in random order.

    Args:
        split_index: number of the split.
        num_splits: number of splits.
        ratio: two-hop facts per ID atomic fact; published: 3.6, 5.4, 7.2, 9, 12.6, 18.
        sizes: of `graph`.

    Raises:
        ValueError: the sizes make no graph, or the graph has too few facts for the ratio.
    """
    facts = training_facts(ratio, **sizes)
    count = share_of(len(facts), split_index, num_splits)
    start = sum(share_of(len(facts), before, num_splits) for before in range(split_index))
    yield from map(_record, facts[start : start + count])


train.num_splits = NUM_SPLITS  # type: ignore[attr-defined]


def held_out(
    *, split: str = "in_distribution", most: int = 3000, ratio: float = 18.0, **sizes: int
) -> Iterator[Record]:
    """Yields test facts.

    Args:
        split: in_distribution or out_of_distribution, two-hop facts that are never trained on; or
            trained facts, to test what is known: atomic_in_distribution,
            atomic_out_of_distribution, trained.
        most: upper limit, chosen at random.
        ratio: as in training; used by `trained`.
        sizes: of `graph`.

    Raises:
        ValueError: the split is unknown, or the sizes make no graph.
    """
    found = graph(**sizes)
    atomic = [tuple(fact) for fact in found.atomic.tolist()]
    sides = {"in_distribution": ID_TEST, "out_of_distribution": OOD_TEST}
    if split in sides:
        facts = [tuple(fact) for fact in found.two_hop[found.side == sides[split]].tolist()]
    elif split == "trained":
        facts = [fact for fact in training_facts(ratio, **sizes) if len(fact) == 4]
    elif split.removeprefix("atomic_") in sides:
        wanted = split == "atomic_out_of_distribution"
        facts = [fact for fact, ood in zip(atomic, found.is_ood, strict=True) if ood == wanted]
    else:
        raise ValueError(
            f"split={split!r} must be one of {', '.join(sides)}, atomic_in_distribution, "
            "atomic_out_of_distribution, trained"
        )
    order = np.random.default_rng([sizes.get("seed", 0), 2]).permutation(len(facts))[:most]
    yield from (_record(facts[index]) for index in order)


@lru_cache(maxsize=2)
def graph(
    *, entities: int = 2000, relations: int = 200, facts_per_entity: int = 20, seed: int = 0
) -> Graph:
    """Draws a graph and assigns its facts to sides.

    Raises:
        ValueError: the sizes make no graph.
    """
    check_sizes(
        entities=(entities, 2, 2**20), relations=(relations, 2, 2**20),
        facts_per_entity=(facts_per_entity, 1, relations),
    )  # fmt: skip
    rng = np.random.default_rng([seed, 0])
    per = facts_per_entity
    relation_EF = rng.random((entities, relations)).argsort(axis=1)[:, :per]
    tail_EF = rng.integers(entities, size=(entities, per))
    head_EF = np.repeat(np.arange(entities)[:, None], per, axis=1)
    is_ood_EF = np.zeros(entities * per, dtype=bool)
    is_ood_EF[rng.permutation(entities * per)[: round(_OOD_FACTS * entities * per)]] = True
    is_ood_EF = is_ood_EF.reshape(entities, per)
    shape = (entities, per, per)  # head, first fact, second fact of the bridge
    first = [np.broadcast_to(part[:, :, None], shape) for part in (head_EF, relation_EF, is_ood_EF)]
    second = [part[tail_EF] for part in (relation_EF, tail_EF, is_ood_EF)]
    two_hop = np.stack([first[0], first[1], second[0], second[1]], axis=-1).reshape(-1, 4)
    ood_first, ood_second = first[2].reshape(-1), second[2].reshape(-1)
    side = np.full(len(two_hop), -1, dtype=np.int8)
    side[ood_first & ood_second] = OOD_TEST
    both_id = np.flatnonzero(~ood_first & ~ood_second)
    side[both_id] = TRAIN
    side[rng.permutation(both_id)[: round(_ID_TEST * len(both_id))]] = ID_TEST
    atomic = np.stack([head_EF, relation_EF, tail_EF], axis=-1).reshape(-1, 3)
    return Graph(atomic, is_ood_EF.reshape(-1), two_hop, side)


def training_facts(ratio: float, **sizes: int) -> list[tuple[int, ...]]:
    """Returns all atomic facts and the chosen two-hop facts, in random order.

    Raises:
        ValueError: the graph has too few two-hop facts for the ratio.
    """
    return _training_facts(float(ratio), tuple(sorted(sizes.items())))


@lru_cache(maxsize=1)
def _training_facts(ratio: float, sizes: tuple[tuple[str, Any], ...]) -> list[tuple[int, ...]]:
    found = graph(**dict(sizes))
    pool = np.flatnonzero(found.side == TRAIN)
    count = round(ratio * int((~found.is_ood).sum()))
    if not 0 <= count <= len(pool):
        raise ValueError(
            f"ratio={ratio} asks for {count} two-hop facts to train on, and the graph has "
            f"{len(pool)}: give a ratio from 0 to {len(pool) / (~found.is_ood).sum():.2f}"
        )
    rng = np.random.default_rng([dict(sizes).get("seed", 0), 1])
    chosen = found.two_hop[rng.choice(pool, size=count, replace=False)].tolist()
    facts = [tuple(fact) for fact in (*found.atomic.tolist(), *chosen)]
    return [facts[index] for index in rng.permutation(len(facts))]


def _record(fact: tuple[int, ...]) -> Record:
    head, *relations, tail = fact
    prompt = " ".join([f"e_{head}", *(f"r_{relation}" for relation in relations)])
    return {"prompt": prompt, "answer": f" e_{tail}"}
