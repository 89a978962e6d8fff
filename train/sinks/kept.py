"""What a sink remembers in the run folder, so that the next process of the run goes on with it.

`sinks/wandb.json` and `sinks/mlflow.json`: the id of the run there, and how far each kind of line
has come. Steps that a restart repeats have the same numbers, so they are not sent twice; after a
rollback (docs/training.md) they have others, which these two services can only add and not replace:
there the first way stays until the second has passed it.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..metrics.records import Record

FOLDER = "sinks"
# Kinds of which each step counts once; of the others every line is an event of its own.
_ONCE_PER_STEP = {"train", "eval", "checkpoint", "checkpoint_copy", "expert_placement", "spike"}


class Kept:
    """The file of one sink."""

    def __init__(self, run_dir: Path, name: str) -> None:
        """Reads the file, if there is one; a damaged one counts as none."""
        self._path = run_dir / FOLDER / f"{name}.json"
        self.ids: dict[str, str] = {}
        self._sent: dict[str, int] = {}
        self._read()

    def is_new(self, record: Record) -> bool:
        """Returns whether a line has not been sent yet."""
        return record.step > self._sent.get(record.kind, -1)

    def note(self, record: Record) -> None:
        """Remembers that a line was sent; `save` makes it last."""
        if record.kind in _ONCE_PER_STEP:
            self._sent[record.kind] = max(record.step, self._sent.get(record.kind, -1))

    def start_anew(self, ids: Mapping[str, str]) -> None:
        """Begins with another run over there, to which nothing was sent."""
        self.ids, self._sent = dict(ids), {}
        self.save()

    def save(self) -> None:
        """Writes the file, all or nothing."""
        self._path.parent.mkdir(exist_ok=True)
        partial = self._path.with_suffix(".tmp")
        partial.write_text(json.dumps({"ids": self.ids, "sent": self._sent}) + "\n")
        partial.replace(self._path)

    def _read(self) -> None:
        try:
            values: Any = json.loads(self._path.read_text(encoding="utf-8"))
            self.ids = {str(name): str(value) for name, value in values["ids"].items()}
            self._sent = {str(kind): int(step) for kind, step in values["sent"].items()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            self.ids, self._sent = {}, {}
