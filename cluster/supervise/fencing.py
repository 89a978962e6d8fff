"""Decides which supervisor of a run is current, by a number in the run folder.

Each supervisor takes the next number when it begins. One that finds a higher number has a successor: it
writes and ends nothing more, and nodes refuse calls with a lower number than the last caller's. (The
generation's number fences ranks. A generation may outlive its supervisor, so supervisors have their own
number.)
"""

from dataclasses import dataclass
from pathlib import Path

from ..job import JobError, write_atomically

SUPERVISOR = "supervisor"


class Superseded(Exception):
    """Says that another supervisor has announced a newer generation."""


class ReplacedError(Exception):
    """Says that another supervisor has taken over this one's nodes."""


@dataclass(frozen=True)
class SupervisorNumber:
    """Identifies one supervisor of a run."""

    run_dir: Path
    number: int

    @classmethod
    def take(cls, run_dir: Path) -> "SupervisorNumber":
        """Takes the next number, which replaces all earlier supervisors."""
        number = last_supervisor(run_dir) + 1
        write_atomically(run_dir / SUPERVISOR, str(number))
        return cls(run_dir, number)

    def check(self) -> None:
        """Raises ReplacedError if this supervisor has a successor."""
        if (current := last_supervisor(self.run_dir)) > self.number:
            raise ReplacedError(f"supervisor {self.number} was replaced by {current}")


def last_supervisor(run_dir: Path) -> int:
    """Returns the number of the last supervisor, 0 before the first; JobError if the file is damaged."""
    path = run_dir / SUPERVISOR
    try:
        return int(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return 0
    except ValueError as error:
        raise JobError(f"{path}: is damaged ({error}): remove it, and `moebius resume`") from None
