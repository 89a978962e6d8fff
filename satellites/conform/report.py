"""Holds the result of a check, for people (rich) and for scripts (JSON)."""

import io
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from .faults import FaultClass


@dataclass(frozen=True)
class Finding:
    """Describes one fault on one number of ranks: where it shows, and what was measured."""

    fault: FaultClass
    size: int
    quantity: str
    scenes: tuple[str, ...]
    detail: str
    ranks: tuple[int, ...] = ()
    worst: float | None = None  # the largest relative error
    follows: tuple[str, ...] = ()  # other errors that are possibly consequences
    text: str = ""  # the whole traceback, or the stacks of a hang


@dataclass(frozen=True)
class Report:
    """Holds what was played and found. `errors` maps (ranks, scene) to the worst relative error or
    the reason why there is none.
    """

    spec: str
    findings: tuple[Finding, ...]
    errors: Mapping[tuple[int, str], float | str]
    notes: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()
    rtol: float = 0.0
    seconds: float = field(default=0.0, compare=False)

    @property
    def ok(self) -> bool:
        """Tells whether something was played and no fault found."""
        return bool(self.errors) and not self.findings

    @property
    def classes(self) -> tuple[str, ...]:
        """Returns the names of the classes of faults found."""
        return tuple(dict.fromkeys(finding.fault.name for finding in self.findings))

    def text(self) -> str:
        """Returns the report as plain text."""
        console = Console(file=io.StringIO(), width=100, color_system=None)
        self.print(console)
        assert isinstance(console.file, io.StringIO)
        return console.file.getvalue()

    def json(self) -> str:
        """Returns the report as JSON, with null for NaN and infinity."""
        return json.dumps(
            {
                "layer": self.spec,
                "ok": self.ok,
                "classes": self.classes,
                "findings": [_as_json(finding) for finding in self.findings],
                "scenes": [
                    {"ranks": size, "scene": name, "error": _finite(error)}
                    for (size, name), error in self.errors.items()
                ],
                "notes": self.notes,
                "left_out": self.left_out,
                "seconds": round(self.seconds, 2),
            },
            indent=1,
        )

    def print(self, console: Console) -> None:
        """Prints the scenes as a table, then the faults by class."""
        console.print(self._table())
        for fault in dict.fromkeys(finding.fault for finding in self.findings):
            _print_fault(console, fault, [f for f in self.findings if f.fault is fault])
        for note in self.notes:
            console.print(Text(f"note: {note}"))
        for name in self.left_out:
            console.print(Text(f"skipped by the layer: {name}"))
        console.print(Text(self._last_line(), style="bold green" if self.ok else "bold red"))

    def _table(self) -> Table:
        sizes = sorted({size for size, _ in self.errors})
        table = Table(title=Text(self.spec), title_justify="left")
        table.add_column("scene")
        for size in sizes:
            table.add_column(f"{size} ranks", justify="right")
        named = {(f.size, scene) for f in self.findings for scene in f.scenes}
        for name in dict.fromkeys(name for _, name in self.errors):
            cells = [
                _cell(self.errors.get((size, name)), self.rtol, (size, name) in named)
                for size in sizes
            ]
            table.add_row(Text(name), *cells)
        return table

    def _last_line(self) -> str:
        if self.ok:
            sizes = sorted({size for size, _ in self.errors})
            return (
                f"conforms: {len(self.errors)} scenes on {', '.join(map(str, sizes))} ranks "
                f"({self.seconds:.0f} s)"
            )
        found = ", ".join(self.classes) or "nothing was played"
        return f"does not conform: {found} ({self.seconds:.0f} s)"


def _cell(error: float | str | None, rtol: float, named: bool) -> Text:
    if error is None:
        return Text("-")
    words = error if isinstance(error, str) else f"{error:.1e}"
    wrong = named or (isinstance(error, float) and not error <= rtol)
    return Text(f"{'✗' if wrong else '✓'} {words}", style="red" if wrong else "green")


def _print_fault(console: Console, fault: FaultClass, findings: list[Finding]) -> None:
    console.print()
    console.print(Text(f"✗ {fault.name}", style="bold red"), Text(f"- {fault.meaning}"))
    for finding in findings:
        error = "" if finding.worst is None else f" [error {finding.worst:.2g}]"
        console.print(Text(f"  {finding.size} ranks, {finding.quantity}: {finding.detail}{error}"))
        console.print(Text(f"    in: {', '.join(finding.scenes)}"))
    follows = sorted({name for finding in findings for name in finding.follows})
    if follows:
        console.print(Text(f"  also wrong, possibly as a consequence: {', '.join(follows)}"))
    for text in dict.fromkeys(finding.text for finding in findings if finding.text):
        console.print(Text("\n".join(f"    {line}" for line in text.splitlines()[-24:])))
    if fault.seen:
        console.print(Text(f"  seen in the wild: {', '.join(fault.seen)}"))


def _as_json(finding: Finding) -> dict[str, Any]:
    return {
        "class": finding.fault.name,
        "meaning": finding.fault.meaning,
        "ranks": finding.size,
        "quantity": finding.quantity,
        "on_ranks": finding.ranks,
        "scenes": finding.scenes,
        "detail": finding.detail,
        "error": _finite(finding.worst),
        "follows": finding.follows,
        "text": finding.text,
        "seen": finding.fault.seen,
    }


def _finite(value: float | str | None) -> float | str | None:
    return None if isinstance(value, float) and not math.isfinite(value) else value
