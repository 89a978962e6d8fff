"""Implements `moebius tasks`: exact match of checkpoints on a task's test sets."""

import argparse
import json
import statistics
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.table import Table

    from .tasks.score import ExactMatch, RunScores

_FIGURES = (("exact_match", 100.0), ("accuracy", 100.0), ("loss", 1.0))  # with their scale


def main(words: Sequence[str]) -> int:
    """Scores runs and prints a table (entry point of the group moebius.commands).

    Raises:
        ValueError: a run cannot be read or belongs to no task, or its model cannot be scored.
    """
    options = _parser().parse_args(words)
    scores = [_score(run_dir, options) for run_dir in options.runs]
    if options.json:
        print(json.dumps([asdict(each) for each in scores], indent=2))
        return 0
    from rich.console import Console

    Console().print(score_table(scores))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="moebius tasks",
        description="Scores runs on the test sets of their task by exact match.",
    )
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN[@STEP]", help="runs of a task")
    parser.add_argument(
        "--step", type=int, metavar="N", help="of which checkpoint; default: the newest"
    )
    text = "how often layers are applied in all, of models that share them; default: as in training"
    parser.add_argument("--depth-steps", type=int, metavar="N", help=text)
    parser.add_argument("--json", action="store_true", help="print the scores as JSON")
    return parser


def _score(run_dir: Path, options: argparse.Namespace) -> "RunScores":
    import moebius

    from .tasks.recipes import TASKS, task_of
    from .tasks.score import score_run

    task = task_of(moebius.load_config(run_dir))
    if task is None:
        raise ValueError(f"{run_dir}: its data belongs to none of the tasks {', '.join(TASKS)}")
    tests = TASKS[task]().tests
    return score_run(run_dir, tests, step=options.step, depth_steps=options.depth_steps)


def score_table(scores: Sequence["RunScores"]) -> "Table":
    """Returns a row per test set and figure, a column per arm: mean ± deviation (by seed)."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table
    from rich.text import Text

    arms: dict[tuple[str, int, int], list[RunScores]] = {}
    for each in sorted(scores, key=lambda each: each.seed):
        arms.setdefault((each.run, each.step, each.depth_steps), []).append(each)
    table = Table("test set", "", box=SIMPLE_HEAD)
    for (run, step, depth_steps), found in arms.items():
        trained = found[0].trained_depth_steps
        depth = f"{depth_steps} depth steps"
        depth += f" (trained with {trained})" if depth_steps != trained else ""
        table.add_column(Text(f"{run}\nstep {step:,}\n{depth}"), justify="right")
    for name in dict.fromkeys(name for each in scores for name in each.scores):
        for figure, scale in _FIGURES:
            cells = [
                _cell([run.scores[name] for run in found if name in run.scores], figure, scale)
                for found in arms.values()
            ]
            unit = " %" if scale == 100 else ""
            table.add_row(Text(name), figure.replace("_", " ") + unit, *cells)
    return table


def _cell(found: Sequence["ExactMatch"], figure: str, scale: float) -> str:
    values = [scale * getattr(score, figure) for score in found]
    if not values:
        return ""
    form = ".1f" if scale == 100 else ".3f"
    if len(values) == 1:
        return f"{values[0]:{form}}"
    by_seed = ", ".join(f"{value:{form}}" for value in values)
    return f"{statistics.mean(values):{form}} ± {statistics.stdev(values):{form}} ({by_seed})"
