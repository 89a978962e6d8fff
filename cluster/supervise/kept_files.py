"""Keeps the supervisor's files of the run folder as it wrote them.

People and sync programs delete, empty and replace files. The supervisor looks several times a second and
rewrites the files that only it may write. A look costs one `stat` per file.
"""

import contextlib
from pathlib import Path

from ...data_pipeline.files import write_atomically
from ...train.record.untrusted import read_text


class KeptFiles:
    """Remembers the contents of files, and restores them."""

    def __init__(self, run_dir: Path):
        self._run_dir = run_dir
        self._texts: dict[str, str] = {}
        self._seen: dict[str, tuple[int, ...] | None] = {}  # the file's mark when it was as kept

    def keep(self, name: str, text: str) -> None:
        """Restores this file to `text` from now on."""
        self._texts[name] = text
        self._seen.pop(name, None)

    def add(self, name: str, text: str) -> None:
        """Extends a kept file's text by what was appended to the file."""
        self.keep(name, self._texts.get(name, "") + text)

    def forget(self, name: str) -> None:
        """Leaves a file to others."""
        self._texts.pop(name, None)

    def restore(self, *, strictly: bool = False) -> list[str]:
        """Writes changed files again and returns their names.

        One that cannot be written is retried at the next look, or `strictly` raises OSError.
        """
        restored = []
        for name, text in self._texts.items():
            with contextlib.suppress(*(() if strictly else (OSError,))):
                if self._restore(name, text):
                    restored.append(name)
        return restored

    def _restore(self, name: str, text: str) -> bool:
        path = self._run_dir / name
        mark = _mark_of(path)
        if mark is not None and mark == self._seen.get(name):
            return False
        is_changed = mark is None or read_text(path) != text
        if is_changed:
            write_atomically(path, text)
        self._seen[name] = _mark_of(path)
        return is_changed


def _mark_of(path: Path) -> tuple[int, ...] | None:
    """Returns what changes whenever a file is written or replaced; None without one."""
    try:
        found = path.stat()
    except FileNotFoundError:
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns
