"""What a chaos run injects, and when: drawn from a seed, so that it can be replayed.

The kinds come in rounds, each round in an order of its own, so that a run of ten faults has seen
them all. Of each injection the plan fixes time, kind and a number between 0 and 1; the number picks
the victim among those that are there then.
"""

import random
from dataclasses import dataclass

# What is hit → how it is told.
KINDS = {
    "rank": "kill -9 a rank",
    "stopped rank": "SIGSTOP a rank",
    "agent": "kill -9 an agent",
    "template": "kill -9 a template",
    "actor": "kill -9 a node's actor",
    "supervisor": "kill -9 the supervisor",
    "tokeniser": "kill -9 a tokenising worker",
    "preparer": "kill -9 the preparing process",
    "node": "power off a node, and add another",
    "raylet": "kill -9 a node's raylet, and add another node",
    "checkpoint": "flip a byte in the newest checkpoint, kill -9 a rank",
    "full disk": "a rank may write no more while a checkpoint is saved",
}
# These cost no recovery: they disturb the data's preparation alone, or a single checkpoint.
WITHOUT_RECOVERY = frozenset({"tokeniser", "preparer", "full disk"})
LEAST_S, MOST_S = 20.0, 60.0  # between two injections


@dataclass(frozen=True)
class Planned:
    """One injection: when, what, and which of the victims."""

    at_s: float  # from the first step on
    kind: str
    draw: float

    def pick(self, number: int) -> int:
        """Returns which of so many victims it hits."""
        return min(int(self.draw * number), number - 1)


def make_plan(seed: int, seconds: float) -> list[Planned]:
    """Returns the injections of a run of so many seconds."""
    rng = random.Random(seed)
    plan: list[Planned] = []
    waiting: list[str] = []
    at_s = rng.uniform(LEAST_S, MOST_S) / 2
    while at_s < seconds:
        if not waiting:
            waiting = rng.sample(sorted(KINDS), len(KINDS))
        plan.append(Planned(round(at_s, 1), waiting.pop(), rng.random()))
        at_s += rng.uniform(LEAST_S, MOST_S)
    return plan
