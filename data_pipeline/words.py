"""Words of messages: a few of many, and what a name of a run or a checkpoint means.

Every room may import this module, which imports files.py alone.
"""

import difflib
import os
import re
from collections.abc import Callable, Iterable
from itertools import islice
from pathlib import Path
from typing import Any

from .files import json_object, read_regular

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

    It is RUN, RUN@STEP, RUN@last, RUN@best (`checkpoint.keep_best`), or the path of a checkpoint's
    folder in a run. A folder whose own name contains "@" is itself, and so is a checkpoint outside
    of runs.

    Args:
        named: the name.
        step: from an option beside it.

    Raises:
        ValueError: what follows "@" names no step, or the name and the option name two steps.
    """
    path, found = Path(named), None
    real = path if path.parent.name == "checkpoints" else Path(os.path.realpath(path))
    if real.parent.name == "checkpoints" and (match := _STEP.fullmatch(real.name)):
        path, found = real.parent.parent, int(match[1])
    elif not os.path.lexists(path) and (match := _AT.fullmatch(str(path))):
        if at := _STEP.fullmatch(match[2]):
            path, found = Path(match[1]), int(at[1])
        elif is_run(Path(match[1])):
            path, found = Path(match[1]), _step_called(match[2], Path(match[1]))
    if None not in (step, found) and step != found:
        raise ValueError(f"{named} and step {step} name two steps: leave one of them out")
    return path, step if found is None else found


def _step_called(word: str, run: Path) -> int:
    """Returns the step of a run's checkpoint that is called "last" or "best"."""
    found = (path.name for path in run.glob("checkpoints/step_*"))
    names = sorted(filter(_STEP.fullmatch, found), key=step_of)
    there = f"the run has checkpoints of {some_of(f'step {step_of(name)}' for name in names)}"
    if word not in ("best", "last") or not names:
        raise ValueError(
            f"{run}@{word}: a step follows the @, as in {run}@100, or best, or last; {there}"
        )
    if word == "last":
        return step_of(names[-1])
    read = reads_in(run / "checkpoints")
    best = best_of(names, _in_meta(names[-1], read, "config", "checkpoint", "keep_best"), read)
    if best is None:
        raise ValueError(
            f"{run}@best: no checkpoint has a score, which checkpoint.keep_best saves; {there}"
        )
    return step_of(best[0])


def step_of(name: str) -> int:
    """Returns the step in a checkpoint's directory name."""
    return int(name.removeprefix("step_"))


def reads_in(folder: Path) -> Callable[[str], bytes]:
    """Returns the function that reads a folder's files by their names, for `best_of`."""
    return lambda name: read_regular(folder / name)


def best_of(
    names: Iterable[str], measure: str | None, read: Callable[[str], bytes]
) -> tuple[str, float] | None:
    """Returns the checkpoint that scored best, the earliest of equal ones, and its score.

    Args:
        names: of their directories.
        measure: "validation" for the lowest loss, or a task for the highest accuracy; None: nothing is read.
        read: returns the bytes of a file, for example of "step_00000050/meta.json".

    Raises:
        OSError: a file that exists cannot be read.
    """
    found = {name: _in_meta(name, read, "measured", measure) for name in names if measure}
    scores = {name: score for name, score in found.items() if isinstance(score, float)}
    sign = 1 if measure == "validation" else -1
    best = min(scores, key=lambda name: (sign * scores[name], step_of(name)), default=None)
    return None if best is None else (best, scores[best])


def _in_meta(name: str, read: Callable[[str], bytes], *keys: str | None) -> Any:
    """Returns a value in a checkpoint's meta.json; None: it is not there, or the file is damaged."""
    try:
        value: Any = json_object(read(f"{name}/meta.json"), name)["meta"]
        for key in keys:
            value = value[key]
    except (FileNotFoundError, ValueError, LookupError, TypeError):
        return None
    return value


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
