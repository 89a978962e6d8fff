"""Words of messages: a few of many, and what a name of a run or a checkpoint means.

Like files.py it imports no module of ours, so every room may use it.
"""

import difflib
import os
import re
from collections.abc import Iterable
from itertools import islice
from pathlib import Path
from typing import Any

_AT = re.compile(r"(.+)@([^/@]+)")
_STEP = re.compile(r"(?:step_)?(\d+)")
# org/name, or a word that begins with a published family's name
_HUB_NAME = re.compile(
    r"(?!runs/)[\w.-]+/[\w.-]+|(gpt|llama|qwen|olmo|mi[sx]tral|pythia|deepseek|phi|gemma|smollm)[\w.-]*",
    re.I,
)
_MOST = 10  # words in a message
_MOST_COMPARED = 10_000  # in 0.3 s


def some_of(words: Iterable[Any], near: str = "", *, between: str = ", ", most: int = 200) -> str:
    """Returns at most ten words for a message, those nearest to `near` first, and how many more."""
    known = [word if len(word) <= most else f"{word[:most]}…" for word in map(str, words)]
    shown = known
    if near and _MOST < len(known) <= _MOST_COMPARED:
        shown = difflib.get_close_matches(near, known, n=_MOST, cutoff=0.0)
    more = f"{between.strip(' ,;')} and {len(known) - _MOST:,} more" if len(known) > _MOST else ""
    return between.join(shown[:_MOST]) + more if known else "none"


def run_and_step(named: str | os.PathLike[str], step: int | None = None) -> tuple[Path, int | None]:
    """Splits a checkpoint's name into its run and its step; None: the newest.

    It is RUN, RUN@STEP, or the path of a checkpoint's folder in a run. A folder whose own name
    contains "@" is itself, and so is a checkpoint outside of runs.

    Args:
        named: the name.
        step: from an option beside it.

    Raises:
        ValueError: what follows "@" is no step, or the name and the option name two steps.
    """
    path, found = Path(named), None
    real = path if path.parent.name == "checkpoints" else Path(os.path.realpath(path))
    if real.parent.name == "checkpoints" and (match := _STEP.fullmatch(real.name)):
        path, found = real.parent.parent, int(match[1])
    elif not os.path.lexists(path) and (match := _AT.fullmatch(str(path))):
        if not (at := _STEP.fullmatch(match[2])) and is_run(Path(match[1])):
            raise ValueError(
                f"{named}: a step follows the @, as in {match[1]}@100; the run has checkpoints of "
                f"{_steps_of(Path(match[1]))}"
            )
        path, found = (Path(match[1]), int(at[1])) if at else (path, None)
    if None not in (step, found) and step != found:
        raise ValueError(f"{named} and step {step} name two steps: leave one of them out")
    return path, step if found is None else found


def _steps_of(run: Path) -> str:
    names = [path.name for path in run.glob("checkpoints/step_*")]
    steps = sorted(int(match[1]) for match in map(_STEP.fullmatch, names) if match)
    return some_of(f"step {step}" for step in steps)


def runs_near(path: Path) -> str:
    """Returns a hint at what a path without a run may mean: a run, or a model of the hub; "" if it is a run."""
    if is_run(path):
        return ""
    if is_published(path):
        return f"; it holds published weights: `moebius ckpt import {path} --run-dir RUN` makes a run of them"
    run, step = run_and_step(path)
    if step is not None and is_run(run):
        return (
            f"; it names a checkpoint of the run {run}: name the run itself, or branch off there "
            f"with --from {run}@{step} (in Python, start_from)"
        )
    is_alone = path.parent == Path()
    if _HUB_NAME.fullmatch(str(path)) and not os.path.exists(path if is_alone else path.parent):
        hub = f"hf://{'org/' if is_alone else ''}{path}"
        return f'; for a model on the Hugging Face hub, write --from {hub}, or start_from("{hub}") in Python'
    folders = {at.absolute(): at for at in (path, path.parent, Path("runs")) if os.path.isdir(at)}
    found = [run for folder in folders.values() for run in islice(folder.glob("*"), _MOST_COMPARED)]
    runs = {run.name: run for run in found if is_run(run)}
    if not runs:
        return "; there is no run here: `moebius train smoke` makes the first one"
    close = difflib.get_close_matches(path.name, runs, n=1)
    if close and not os.path.isdir(path):
        return f"; did you mean {runs[close[0]]}?"
    return f"; runs here: {some_of(runs.values(), str(path))}"


def is_run(folder: Path) -> bool:
    """Returns whether a folder holds a run, which may only have been imported."""
    return os.path.isfile(folder / "journal.jsonl") or os.path.isdir(folder / "checkpoints")


def is_published(folder: Path) -> bool:
    """Returns whether a folder holds published weights with their config.json."""
    return os.path.isfile(folder / "config.json") and any(folder.glob("*.safetensors"))
