"""Words of messages: a few of many, and what a name of a run or a checkpoint means.

Every room may import this module, which imports files.py alone.
"""

import difflib
import hashlib
import math
import os
import re
from collections.abc import Callable, Iterable, Mapping
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
_SUM_BYTES = 16  # of a checksum in a checkpoint's manifest.json
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
    try:
        return step_of(names[-1]) if word == "last" else _best_in(run / "checkpoints", names)
    except (OSError, ValueError) as error:
        raise ValueError(f"{run}@best: {error}; {there}") from None


def _best_in(folder: Path, names: list[str]) -> int:
    """Returns the step of the best checkpoint, by the `keep_best` that the newest was saved with."""
    read = reads_in(folder)
    measure = _in_meta(names[-1], read, "config", "checkpoint", "keep_best")
    if not isinstance(measure, str):
        raise ValueError("the run was saved without checkpoint.keep_best, so none is the best")
    scores = scores_of(names, measure, read)
    if damaged := [name for name, score in scores.items() if math.isnan(score)]:
        raise ValueError(f"the score in {folder / damaged[0]} cannot be read")
    if (best := best_of(scores, measure)) is None:
        raise ValueError(f"no checkpoint has a score of {measure!r} yet")
    return step_of(best)


def step_of(name: str) -> int:
    """Returns the step in a checkpoint's directory name."""
    return int(name.removeprefix("step_"))


def reads_in(folder: Path) -> Callable[[str], bytes]:
    """Returns the function that reads a folder's files by their names, for `scores_of`."""
    return lambda name: read_regular(folder / name)


def scores_of(
    names: Iterable[str], measure: str | None, read: Callable[[str], bytes]
) -> dict[str, float]:
    """Returns what checkpoints scored when they were saved; nan: it cannot be read.

    Args:
        names: of their directories.
        measure: "validation" for the loss, or a task for the accuracy; None: nothing is read.
        read: returns the bytes of a file, for example of "step_00000050/meta.json".
    """
    scores: dict[str, float] = {}
    for name in names if measure else ():
        try:
            score = _in_meta(name, read, "measured", str(measure))
        except FileNotFoundError:  # it is incomplete, or was deleted meanwhile
            continue
        except (OSError, ValueError):
            scores[name] = math.nan
            continue
        if isinstance(score, float) and math.isfinite(score):
            scores[name] = score
    return scores


def best_of(scores: Mapping[str, float], measure: str | None) -> str | None:
    """Returns the checkpoint of the lowest loss or the highest accuracy, the earliest of equal ones."""
    sign = 1 if measure == "validation" else -1
    known = {name: sign * score for name, score in scores.items() if not math.isnan(score)}
    return min(known, key=lambda name: (known[name], step_of(name)), default=None)


def _in_meta(name: str, read: Callable[[str], bytes], *keys: str) -> Any:
    """Returns a value that a run has saved in a checkpoint's meta.json; None: it has not.

    Raises:
        ValueError: the file is not the one in manifest.json.
        OSError: it cannot be read.
    """
    file, data = f"{name}/meta.json", read(f"{name}/meta.json")
    manifest = json_object(read(f"{name}/manifest.json"), f"{name}/manifest.json")
    found = hashlib.blake2b(data, digest_size=_SUM_BYTES).hexdigest()
    if found != _value_at(manifest, "files", "meta.json", "blake2b"):
        raise ValueError(f"{file} does not match its checksum")
    return _value_at(json_object(data, file), "meta", *keys)


def _value_at(values: Any, *keys: str) -> Any:
    for key in keys:
        values = values.get(key) if isinstance(values, dict) else None
    return values


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
