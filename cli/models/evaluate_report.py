"""Zero-shot scores as a table for people and as plain values for scripts."""

import dataclasses
import math
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ...evaluation.tasks.table import PAPER_TASKS, STAND_INS
from ...evaluation.tasks.task import PAPER
from ...evaluation.zero_shot import Estimate, TaskResult, ZeroShotReport

_SHARES = (PAPER, "acc", "acc_norm")  # shown as percentages, in columns of their own


def plain_report(report: ZeroShotReport) -> dict[str, Any]:
    """Returns all of a report for JSON; what is no number is null."""
    mean = report.paper_mean
    found = dataclasses.asdict(report)
    found["tasks"] = {result.name: _plain_task(result) for result in report.tasks}
    found["paper_mean"] = None if mean is None else _plain_estimate(mean)
    found["paper_mean_with"] = None if mean is None else _stand_ins(report)
    found["is_subset"] = any(_is_subset(result) for result in report.tasks)
    return found


def _plain_task(result: TaskResult) -> dict[str, Any]:
    found = dataclasses.asdict(result)
    found["metrics"] = {name: _plain_estimate(one) for name, one in result.metrics.items()}
    return found


def _plain_estimate(estimate: Estimate) -> dict[str, Any]:
    values = dataclasses.asdict(estimate)
    return {
        name: None if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in values.items()
    }


def render_report(report: ZeroShotReport) -> RenderableType:
    """Returns the table of a report with its notes."""
    table = Table(
        title=f"{report.run}, step {report.step}: zero-shot", title_justify="left", box=None
    )
    table.add_column("task", overflow="fold")
    table.add_column("items", justify="right")
    for name in _SHARES:
        table.add_column(f"{name} %", justify="right", no_wrap=True)
    table.add_column("other", overflow="fold")
    for result in report.tasks:
        others = [n for n in result.metrics if n not in _SHARES]
        table.add_row(
            Text(result.title),
            _items(result),
            *(_share(result.metrics.get(name)) for name in _SHARES),
            Text("\n".join(f"{name} {_number(result.metrics[name])}" for name in others)),
        )
    mean = report.paper_mean
    if mean is not None:
        table.add_section()
        table.add_row("mean of the paper's six", f"{mean.count:,}", _share(mean), "", "", "")
    return Group(table, Text("\n".join(_notes(report))))


def _items(result: TaskResult) -> str:
    return f"{result.items:,} of {result.published:,}" if result.published else f"{result.items:,}"


def _share(estimate: Estimate | None) -> str:
    if estimate is None or not estimate.count:
        return "–"
    text = f"{100 * estimate.value:.1f} ± {_short(100 * estimate.stderr, 1)}"
    return text if not estimate.spread else f"{text} (draws ± {100 * estimate.spread:.1f})"


def _number(estimate: Estimate) -> str:
    text = f"{estimate.value:,.4g} ± {_short(estimate.stderr, 2)}"
    return text if not estimate.spread else f"{text} (draws ± {estimate.spread:.2g})"


def _short(value: float, digits: int) -> str:
    if math.isnan(value):
        return "?"
    return f"{value:.{digits}f}" if digits == 1 else f"{value:.{digits}g}"


def _is_subset(result: TaskResult) -> bool:
    return 0 < result.items < result.published or result.items < result.available


def _stand_ins(report: ZeroShotReport) -> dict[str, str]:
    """The paper's tasks that another one stands in for."""
    names = {result.name for result in report.tasks}
    return {
        name: other for name, other in STAND_INS.items() if name not in names and other in names
    }


def _notes(report: ZeroShotReport) -> list[str]:
    notes = [
        f"± standard error over the items. Context {report.context:,} tokens, "
        f"{report.seconds:.0f} s on {report.ranks} rank{'s' if report.ranks > 1 else ''}."
    ]
    if any(_is_subset(result) for result in report.tasks):
        notes.append("On the subset: items are so many of the published set, as the table says.")
    notes += [
        f"{name} is not here: the mean is with {other} in its place, and no figure of the paper's."
        for name, other in _stand_ins(report).items()
        if report.paper_mean is not None and name in PAPER_TASKS
    ]
    notes += [
        f"{result.title}: {result.cut:,} items were longer than the context and lost their left end."
        for result in report.tasks
        if result.cut
    ]
    notes += [
        f"{result.title}: {result.skipped:,} items were skipped: an answer is longer than the context."
        for result in report.tasks
        if result.skipped
    ]
    notes += [
        f"{result.title}: {result.truncated:,} items have an answer longer than the context, of "
        "which only the end is scored."
        for result in report.tasks
        if result.truncated
    ]
    if report.draws:
        notes.append(
            f"Each item among other sequences of training text: {report.draws} draws from seed "
            f"{report.seed}."
        )
    return notes
