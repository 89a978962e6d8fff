"""Words that users read in messages, and those they type: the nearest known word, what a path names.

This module is below all others of the package and imports none of them.
"""

import difflib
import errno
import inspect
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import wraps
from itertools import islice
from numbers import Integral, Real
from os import PathLike
from pathlib import Path
from types import UnionType
from typing import Any, Literal, TypeVar, Union, cast, get_args, get_origin

_AT = re.compile(r"(.+)@([^/@]+)")
_STEP = re.compile(r"(?:step_)?(\d+)")
# org/name, or a word that begins with a published family's name
_HUB_NAME = re.compile(
    r"(?!runs/)[\w.-]+/[\w.-]+|(gpt|llama|qwen|olmo|mi[sx]tral|pythia|deepseek|phi|gemma|smollm)[\w.-]*",
    re.I,
)
# Errors for a path that the system refuses: too long, a circle of links, below a file, or not permitted.
_NO_PATHS = {
    errno.ENAMETOOLONG,
    errno.ELOOP,
    errno.ENOTDIR,
    errno.EISDIR,
    errno.EACCES,
    errno.EROFS,
}
_NUMBERS: Mapping[Any, Any] = {int: Integral, float: Real}
_WORDS = {
    "str": "a string",
    "PathLike": "a name or path",
    "int": "a whole number",
    "float": "a number",
    "bool": "True or False",
    "NoneType": "None",
    "Sequence": "a list",
    "Callable": "a function",
}
_EXAMPLES = {  # of arguments, by name
    "config": 'moebius.recipe("smoke", "train.steps=20")',
    "run_dir": '"runs/mine"',
    "path": '"runs/mine"',
    "source": '"runs/mine"',
    "folder": '"runs"',
    "name": '"smoke"',
    "overrides": '"train.steps=20"',
    "draw_anew": '["embedding"]',
    "tasks": '["piqa"]',
    "prompt": '"Once upon a time"',
    "text": '"Once upon a time"',
    "tokens_BS": "torch.tensor([[1, 2, 3]])",
    "rows": "torch.tensor([[1, 2, 3]])",
    "ids": "[1, 2, 3]",
    "on_record": "print",
}
_Function = TypeVar("_Function", bound=Callable[..., Any])
_MOST = 10  # words in a message
_MOST_COMPARED = 10_000  # in 0.3 s


def nearest(word: str, known: Iterable[str]) -> str:
    """Returns a question with the known word closest to `word`; "" if none is close."""
    close = difflib.get_close_matches(word, list(known), n=1, cutoff=0.65)
    return f"; did you mean {close[0]}?" if close else ""


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
        raise ValueError(f"{named} and --step {step} name two steps: leave one of them out")
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
            f"with --from {run}@{step}"
        )
    is_alone = path.parent == Path()
    if _HUB_NAME.fullmatch(str(path)) and not os.path.exists(path if is_alone else path.parent):
        hub = f"hf://{'org/' if is_alone else ''}{path}"
        return f"; a model on the Hugging Face hub is written --from {hub}"
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


def bad_path(error: OSError) -> str:
    """Returns what to do about a path that the system refuses; "" for any other error."""
    if error.errno not in _NO_PATHS or error.filename is None:
        return ""
    return f"{error.filename!s:.200}: {error.strerror}; name another path"


def checked(function: _Function) -> _Function:
    """Makes a public function, or a class's methods, tell a wrong argument in words.

    The error names what must be there, and an example.
    """
    if isinstance(function, type):
        methods = {name: found for name, found in vars(function).items() if name[0] != "_"}
        for name, found in methods.items():
            if inspect.isfunction(found):
                setattr(function, name, checked(found))
        return cast("_Function", function)
    signature = inspect.signature(function)

    @wraps(function)
    def call(*given: Any, **named: Any) -> Any:
        try:
            bound = signature.bind(*given, **named).arguments
        except TypeError as error:
            names = [each.replace(annotation=each.empty) for each in signature.parameters.values()]
            call_as = signature.replace(parameters=names, return_annotation=signature.empty)
            raise TypeError(f"{error}: call {function.__name__}{call_as}") from None
        for name, value in bound.items():
            parameter = signature.parameters[name]
            is_many = parameter.kind is parameter.VAR_POSITIONAL
            for one in value if is_many else [value]:
                _check_argument(function.__name__, parameter, one)
        try:
            return function(*given, **named)
        except OSError as error:
            if problem := bad_path(error):
                raise ValueError(problem) from error
            raise

    return cast("_Function", call)


def _check_argument(called: str, parameter: inspect.Parameter, value: Any) -> None:
    hint, name = parameter.annotation, parameter.name
    if name in ("self", "cls") or parameter.kind is parameter.VAR_KEYWORD or _fits(value, hint):
        return
    example = f", for example {_EXAMPLES[name]}" if name in _EXAMPLES else ""
    kind, shown = type(value).__name__, " ".join(f"{value!r:.60}".split())
    each = ""
    if isinstance(value, list | tuple) and value and all(_fits(one, hint) for one in value):
        each = "; call it once for each"
    raise TypeError(f"{called}: {name} must be {_words(hint)}{example}, not {shown} ({kind}){each}")


def _fits(value: Any, hint: Any) -> bool:
    origin, parts = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        return any(_fits(value, part) for part in parts)
    if origin is Literal:
        return value in parts
    if origin is Sequence:
        is_list = isinstance(value, Sequence) and not isinstance(value, str | bytes)
        return is_list and all(_fits(one, parts[0]) for one in value)
    if hint in _NUMBERS:
        return isinstance(value, _NUMBERS[hint]) and not isinstance(value, bool)
    kind: Any = origin or hint
    return value is None if kind is None else isinstance(value, kind)


def _words(hint: Any) -> str:
    origin, parts = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        words = [_words(part) for part in parts if part is not str or PathLike[str] not in parts]
        return " or ".join([", ".join(words[:-1]), words[-1]] if words[1:] else words)
    if origin is Literal:
        return " or ".join(map(repr, parts))
    name = getattr(origin or hint, "__name__", "")
    return _WORDS.get(name) or f"a {name}"
