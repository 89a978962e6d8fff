"""What the agents and ranks of one node tell each other about a round, as files in the folder of
the heartbeats.

The folder lies in memory, only this user can enter it, and it is of one generation.

    round.json       the newest order, written by the node when the supervision has ordered a round
    rank3.in_place   written by a rank: empty while it could take part in a round, or why it cannot
    lost.json        written by the agent, which holds its other ranks: who has died (cluster/warm)
"""

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

ROUND_NUMBER = "MOEBIUS_ROUND"  # in the environment of a process that replaces a rank
IN_PLACE = "MOEBIUS_IN_PLACE"  # set to 1 in that of ranks whose agent can replace others


@dataclass(frozen=True)
class RoundOrder:
    """Orders all ranks of a generation to leave their groups and to meet anew.

    Or, where it is `refused`, tells those that wait for one that none will come.
    """

    number: int  # rounds of a generation count from 1
    lost: tuple[int, ...] = ()  # ranks that are other processes from now on
    refused: str = ""


def write_order(folder: Path, order: RoundOrder) -> None:
    """Writes an order for the agent and the ranks of this node."""
    _write(folder / "round.json", json.dumps(asdict(order)))


def read_order(folder: Path) -> RoundOrder | None:
    """Returns the newest order; None before the first."""
    try:
        plain = json.loads((folder / "round.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    return RoundOrder(plain["number"], tuple(plain["lost"]), plain["refused"])


def write_readiness(folder: Path, rank: int, why_not: str = "") -> None:
    """Says whether a rank could take part in a round: "" or why it could not."""
    _write(_readiness(folder, rank), why_not)


def withdraw_readiness(folder: Path, rank: int) -> None:
    """Takes back what a rank has said."""
    _readiness(folder, rank).unlink(missing_ok=True)


def read_readiness(folder: Path, rank: int) -> str | None:
    """Returns what a rank has said last; None: nothing."""
    try:
        return _readiness(folder, rank).read_text(encoding="utf-8")
    except FileNotFoundError:
        return None


def _readiness(folder: Path, rank: int) -> Path:
    return folder / f"rank{rank}.in_place"


def _write(path: Path, text: str) -> None:
    partial = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    partial.write_text(text, encoding="utf-8")
    partial.replace(path)
