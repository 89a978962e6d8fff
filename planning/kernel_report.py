"""The kernels of a predicted step, as a table, as words and as plain values: what each takes, and what
bounds it.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, cast

from rich.console import Group
from rich.table import Table
from rich.text import Text

from .kernel import Kernel
from .planner import Plan, describe_candidate
from .prediction import Scenario
from .rank_kernels import rank_kernels, why_no_kernels


@dataclass(frozen=True)
class KernelLine:
    """All calls of one kind of kernel in a step's forward and backward pass."""

    part: str
    name: str
    is_forward: bool
    calls: float
    seconds: float  # of all calls
    bound: str  # of the call that takes longest

    @property
    def seconds_per_call(self) -> float:
        """Returns the seconds of one call, on average."""
        return self.seconds / self.calls if self.calls else 0.0


def kernel_lines(kernels: Iterable[Kernel]) -> list[KernelLine]:
    """Adds up kernels of one name; parts with most time first, and so within them."""
    found: dict[tuple[str, str, bool], list[Kernel]] = {}
    for kernel in kernels:
        if kernel.seconds:
            found.setdefault((kernel.part, kernel.name, kernel.forward), []).append(kernel)
    lines = [
        KernelLine(
            *key,
            sum(kernel.calls for kernel in alike),
            sum(kernel.seconds for kernel in alike),
            max(alike, key=lambda kernel: kernel.seconds).time.bound,
        )
        for key, alike in found.items()
    ]
    of_part = parts_of(lines)
    return sorted(lines, key=lambda line: (-of_part[line.part], line.part, -line.seconds))


def parts_of(lines: Sequence[KernelLine]) -> dict[str, float]:
    """Returns the seconds of every part."""
    found: dict[str, float] = {}
    for line in lines:
        found[line.part] = found.get(line.part, 0.0) + line.seconds
    return found


def computation_line(scenario: Scenario) -> str:
    """Says where the seconds of computation are from."""
    reason = why_no_kernels(scenario)
    if reason is None and scenario.kernel_ratios:
        return (
            f"computation: predicted kernel by kernel, {len(scenario.kernel_ratios)} kernels corrected "
            "by what was measured (--kernels shows them)"
        )
    if reason is None:
        return "computation: predicted kernel by kernel, never measured (--kernels shows them)"
    return f"computation: products at a flat share of the peak, for {reason}"


_COLUMNS = {"part": "left", "kernel": "left", "": "left", "calls": "right", "µs": "right"}
_COLUMNS |= {"ms": "right", "%": "right", "bound by": "left"}


def render_kernels(plan: Plan) -> Group:
    """Renders the kernels of a plan's computation, by part; it fits 100 columns."""
    kernels = rank_kernels(plan.scenario, plan.candidate)
    title = Text(
        f"\nkernels of a micro-batch, predicted: {describe_candidate(plan.candidate)}", "bold"
    )
    if kernels is None:
        return Group(title, Text(computation_line(plan.scenario)))
    lines = kernel_lines(kernels)
    whole = sum(line.seconds for line in lines)
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False, header_style="dim")
    for heading, justify in _COLUMNS.items():
        table.add_column(heading, justify=cast(Any, justify), overflow="fold")
    for part, of_part in groupby(lines, key=lambda line: line.part):
        found = list(of_part)
        seconds = sum(line.seconds for line in found)
        table.add_row(part, "", "", "", "", *_shares(seconds, whole), "", style="bold")
        for line in found:
            calls = (f"{line.calls:g}", f"{1e6 * line.seconds_per_call:,.0f}")
            direction = "forward" if line.is_forward else "backward"
            shares = _shares(line.seconds, whole)
            table.add_row("", line.name, direction, *calls, *shares, line.bound)
    table.add_row("all", "", "", "", "", *_shares(whole, whole), "", style="bold")
    hardware = plan.scenario.hardware
    words = (
        f"a lower bound of a kind, by figures of {hardware.name} that --sources shows; no GPU has "
        "run these kernels. Not in it: the optimizer, exchanges, and the host"
    )
    return Group(title, table, Text(words, style="dim"))


def _shares(seconds: float, whole: float) -> tuple[str, str]:
    return f"{1e3 * seconds:.2f}", f"{100 * seconds / whole:.0f}"


def kernels_as_json(plan: Plan) -> dict[str, Any]:
    """Returns the kernels of a plan's computation as plain values: seconds of a micro-batch."""
    kernels = rank_kernels(plan.scenario, plan.candidate)
    if kernels is None:
        return {"why_not": why_no_kernels(plan.scenario), "lines": []}
    lines = [
        {
            "part": line.part,
            "kernel": line.name,
            "pass": "forward" if line.is_forward else "backward",
            "calls": line.calls,
            "seconds": line.seconds,
            "bound": line.bound,
        }
        for line in kernel_lines(kernels)
    ]
    return {"why_not": None, "lines": lines}
