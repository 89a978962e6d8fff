"""Draws the injections of a chaos run from a seed, so that it can be repeated.

Kinds are drawn in rounds, each in its own order, so that a run of as many faults as kinds has seen them all.
An injection has a time, a kind and a number between 0 and 1, which picks one of the victims that exist then.
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
LEAST_S, MOST_S = 20.0, 60.0  # between two injections


@dataclass(frozen=True)
class Planned:
    """One injection: when, what, and which victim."""

    at_s: float  # from the first step on
    kind: str
    draw: float

    def pick(self, number: int) -> int:
        """Returns which of `number` victims is hit."""
        return min(int(self.draw * number), number - 1)


def make_plan(seed: int, seconds: float) -> list[Planned]:
    """Returns the injections of a run that lasts `seconds`."""
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
