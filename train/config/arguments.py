"""Checks the arguments of public functions, and tells what is wrong with one in words."""

import errno
import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from numbers import Integral, Real
from os import PathLike
from types import UnionType
from typing import Any, Literal, TypeVar, Union, cast, get_args, get_origin

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
    "model": 'moebius.load("runs/mine")',
    "overrides": '"train.steps=20"',
    "draw_anew": '["embedding"]',
    "grow": '"split=2"',
    "tasks": '["piqa"]',
    "prompt": '"Once upon a time"',
    "text": '"Once upon a time"',
    "tokens_BS": "torch.tensor([[1, 2, 3]])",
    "rows": "torch.tensor([[1, 2, 3]])",
    "ids": "[1, 2, 3]",
    "on_record": "print",
}
_Function = TypeVar("_Function", bound=Callable[..., Any])


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
