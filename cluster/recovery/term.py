"""Which supervisor of a run is the one that counts: a number in the run folder.

Each supervisor takes the next number when it begins. Who finds a higher one than its own has a
successor, which has taken over its nodes and the generation on them: it says and ends nothing more.
The nodes compare, too: a call of a supervisor with a lower number than the last caller's is refused.

The generation's number (the file `generation`) fences ranks; a generation may outlive the
supervisor that started it, so supervisors need a number of their own.
"""

from dataclasses import dataclass
from pathlib import Path

from ..job import write_atomically

TERM = "term"


class ReplacedError(Exception):
    """Says that another supervisor has taken over this one's nodes."""


@dataclass(frozen=True)
class Term:
    """A supervisor's number."""

    run_dir: Path
    number: int

    @classmethod
    def begin(cls, run_dir: Path) -> "Term":
        """Takes the next number; all supervisors before are replaced from now on."""
        number = read_term(run_dir) + 1
        write_atomically(run_dir / TERM, str(number))
        return cls(run_dir, number)

    def check(self) -> None:
        """Raises ReplacedError when this supervisor has a successor."""
        if (current := read_term(self.run_dir)) > self.number:
            raise ReplacedError(f"supervisor {self.number} was replaced by {current}")


def read_term(run_dir: Path) -> int:
    """Returns the number of the last supervisor; 0 before the first."""
    try:
        return int((run_dir / TERM).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return 0
