"""Shows zero-shot scores and losses: a table for people, JSON values for scripts."""

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ...evaluation.tasks.table import STAND_INS
from ...evaluation.tasks.task import PAPER
from ...evaluation.zero_shot import Estimate, TaskResult, ZeroShotReport

_SHARES = (PAPER, "acc", "acc_norm")  # shown as percentages, in columns of their own
_LONG_ITEMS = {
    "cut": "items were longer than the context and lost their left end",
    "skipped": "items were skipped: an answer is longer than the context",
}


def plain_report(report: ZeroShotReport) -> dict[str, Any]:
    """Returns a report as JSON values; numbers that are not finite become null."""
    mean = report.paper_mean
    found = {
        **dataclasses.asdict(report),
        "tasks": {result.name: dataclasses.asdict(result) for result in report.tasks},
        "paper_mean": mean and dataclasses.asdict(mean),
        "paper_mean_with": mean and _stand_ins(report),
        "is_subset": any(map(_is_subset, report.tasks)),
    }
    return _finite(found)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(own) for key, own in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


def render_report(report: ZeroShotReport) -> RenderableType:
    """Returns a report's table with its notes."""
    title = f"{report.run}, step {report.step}: zero-shot"
    table = Table(title=title, title_justify="left", box=None)
    table.add_column("task", overflow="fold")
    table.add_column("items", justify="right")
    for name in _SHARES:
        table.add_column(f"{name} %", justify="right", no_wrap=True)
    table.add_column("other", overflow="fold")
    for result in report.tasks:
        others = [name for name in result.metrics if name not in _SHARES]
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
    text = f"{100 * estimate.value:.1f} ± {_error(100 * estimate.stderr, '.1f')}"
    return text if not estimate.spread else f"{text} (draws ± {100 * estimate.spread:.1f})"


def _number(estimate: Estimate) -> str:
    text = f"{estimate.value:,.4g} ± {_error(estimate.stderr, '.2g')}"
    return text if not estimate.spread else f"{text} (draws ± {estimate.spread:.2g})"


def _error(value: float, form: str) -> str:
    return "?" if math.isnan(value) else format(value, form)


def _has_no_error(result: TaskResult) -> bool:
    return any(found.count and math.isnan(found.stderr) for found in result.metrics.values())


def _is_subset(result: TaskResult) -> bool:
    return 0 < result.items < result.published or result.items < result.available


def _stand_ins(report: ZeroShotReport) -> dict[str, str]:
    """Returns the paper's tasks that are replaced, with their replacements."""
    names = {result.name for result in report.tasks}
    return {
        name: other for name, other in STAND_INS.items() if name not in names and other in names
    }


def _notes(report: ZeroShotReport) -> Iterator[str]:
    yield (
        f"± standard error over the items. Context {report.context:,} tokens, "
        f"{report.seconds:.0f} s on {report.ranks} rank{'s' if report.ranks > 1 else ''}."
    )
    if any(_has_no_error(result) for result in report.tasks):
        yield "± ? stands where a task, or one of its groups, has a single item."
    if any(map(_is_subset, report.tasks)):
        yield "Scores are from a subset; the table shows how many items of the published set."
    if report.paper_mean is not None:
        for name, other in _stand_ins(report).items():
            yield f"The mean uses {other} instead of {name}: compare it with no published figure."
    for field, words in _LONG_ITEMS.items():
        for result in report.tasks:
            if count := getattr(result, field):
                yield f"{result.title}: {count:,} {words}."
    if report.draws:
        yield (
            f"Each item stands among other sequences of training text: {report.draws} draws from "
            f"seed {report.seed}."
        )
