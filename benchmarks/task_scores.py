"""How runs on a task do on its test sets: a table over seeds, and a picture of a figure by step.

    python -m benchmarks.task_scores runs/compare/p_hop/*/seed-* [--figure accuracy] [--out FOLDER]

Reads the lines `task` of each run folder's metrics.jsonl; runs of one recipe with different seeds are
an arm. A run that has not finished counts with what it has, and the table says how many steps that
is. Writes task_scores.md and task_scores.png, and prints the table.
"""

import argparse
import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from moebius.evaluation.analysis.drawing import (
    INK,
    MARKERS,
    PALETTE,
    finish_lines,
    label,
    new_figure,
    png,
    title,
)

Curve = dict[int, float]  # a figure by step
_PANEL_HEIGHT = 1.75  # inches


@dataclass(frozen=True)
class TaskRun:
    """One run: its recipe, its seed, and every figure of every test set by step."""

    arm: str
    seed: int
    curves: dict[str, dict[str, Curve]]  # test set -> figure -> curve

    @property
    def last_step(self) -> int:
        """The last step whose scores are there."""
        return max(
            step for sets in self.curves.values() for curve in sets.values() for step in curve
        )


def read_run(folder: Path) -> TaskRun | None:
    """A run folder; None where nothing has been scored yet.

    Raises:
        ValueError: it is no run folder.
    """
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise ValueError(f"{folder}: is no run that has begun ({error.strerror})") from None
    curves: dict[str, dict[str, Curve]] = {}
    for record in filter(None, map(_record, lines)):
        for key, value in record.items():
            test_set, slash, figure = key.rpartition("/")
            if record.get("kind") == "task" and slash:  # of a step written twice the last counts
                curve = curves.setdefault(test_set, {}).setdefault(figure, {})
                curve[record["step"]] = float(value)
    if not curves:
        return None
    return TaskRun(config["job"]["name"], config["train"]["seed"], curves)


def _record(line: str) -> dict[str, Any]:
    try:
        return json.loads(line)
    except ValueError:  # a last line that is torn
        return {}


def table(runs: Sequence[TaskRun]) -> str:
    """Markdown: a row per test set and figure, a column per arm, mean ± deviation over seeds."""
    arms = _arms(runs)
    heads = [f"{arm} ({len(found)} × {_steps(found)} steps)" for arm, found in arms.items()]
    lines = [f"| test set | | {' | '.join(heads)} |", f"|---|---|{'---:|' * len(arms)}"]
    for test_set in _test_sets(runs):
        for figure, percent in (("exact_match", True), ("accuracy", True), ("loss", False)):
            cells = [_cell(found, test_set, figure, percent=percent) for found in arms.values()]
            named = figure.replace("_", " ") + " %" * percent
            lines.append(f"| {test_set} | {named} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _cell(runs: Sequence[TaskRun], test_set: str, figure: str, *, percent: bool) -> str:
    """The figure after the last step, over seeds, and the seeds one by one."""
    values = [run.curves[test_set][figure][run.last_step] for run in runs if test_set in run.curves]
    if not values:
        return ""
    scale, form = (100, ".1f") if percent else (1, ".3f")
    values = [scale * value for value in values]
    spread = f" ± {statistics.stdev(values):{form}}" if len(values) > 1 else ""
    by_seed = ", ".join(f"{value:{form}}" for value in values)
    return f"{statistics.mean(values):{form}}{spread} ({by_seed})"


def draw(runs: Sequence[TaskRun], *, figure: str = "exact_match") -> bytes:
    """A panel per test set: the figure by step, a line per arm (mean), its band the seeds' range."""
    names = _test_sets(runs)
    picture = new_figure(_PANEL_HEIGHT * len(names) + 0.9)
    panels = picture.subplots(len(names), 1, sharex=True, squeeze=False)[:, 0]
    for panel, name in zip(panels, names, strict=True):
        for number, (arm, found) in enumerate(_arms(runs).items()):
            _line(
                panel,
                [run.curves[name][figure] for run in found if name in run.curves],
                number,
                arm,
            )
        panel.set_ylim(-3, 103)
        finish_lines(panel)
        title(panel, name.replace("_", " "))
        label(panel, y="%")
    label(panels[-1], x="step", y="%")
    panels[0].legend(fontsize=8.5, frameon=False, labelcolor=INK)
    seeds = sorted({run.seed for run in runs})
    named = figure.replace("_", " ")
    of = "test items" if figure == "exact_match" else "the answers' tokens"
    return png(picture, f"{named}, % of {of}; mean and range over seeds {seeds}")


def _line(panel: Any, curves: Sequence[Curve], number: int, name: str) -> None:
    steps = sorted(set.intersection(*(set(curve) for curve in curves))) if curves else []
    if not steps:
        return
    values = 100 * np.array([[curve[step] for step in steps] for curve in curves])
    colour, marker = PALETTE[number % len(PALETTE)], MARKERS[number % len(MARKERS)]
    panel.fill_between(steps, values.min(0), values.max(0), color=colour, alpha=0.18, linewidth=0)
    panel.plot(
        *(steps, values.mean(0)), color=colour, marker=marker, markersize=4, linewidth=1.4, label=name
    )  # fmt: skip


def _arms(runs: Sequence[TaskRun]) -> dict[str, list[TaskRun]]:
    found: dict[str, list[TaskRun]] = {}
    for run in sorted(runs, key=lambda run: run.seed):
        found.setdefault(run.arm, []).append(run)
    return dict(sorted(found.items()))


def _test_sets(runs: Sequence[TaskRun]) -> list[str]:
    return list(dict.fromkeys(name for run in runs for name in run.curves))


def _steps(runs: Sequence[TaskRun]) -> str:
    least, most = (choose(run.last_step for run in runs) for choose in (min, max))
    return f"{least:,}" if least == most else f"{least:,} to {most:,}"


def main() -> None:
    parser = argparse.ArgumentParser(description="Test sets of runs over seeds.")
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="run folders")
    parser.add_argument("--out", type=Path, default=Path(), help="default: the working folder")
    parser.add_argument(
        "--figure",
        choices=["exact_match", "accuracy"],
        default="exact_match",
        help="of the picture; default: %(default)s",
    )
    options = parser.parse_args()
    runs = [run for run in map(read_run, options.runs) if run is not None]
    if not runs:
        raise SystemExit("none of these runs has scored test sets yet")
    options.out.mkdir(parents=True, exist_ok=True)
    found = table(runs)
    (options.out / "task_scores.md").write_text(found, encoding="utf-8")
    (options.out / "task_scores.png").write_bytes(draw(runs, figure=options.figure))
    print(found)


if __name__ == "__main__":
    main()
