"""Functions of the user's own, named as `package.module:function` in a configuration.

Where they take settings these follow as in a URL: `package.module:function?length=32&letters=4`.

They are imported in every process that needs them, so their module must be installed or lie on
PYTHONPATH, on every machine.
"""

import importlib
import re
from collections.abc import Callable
from typing import Any
from urllib.parse import parse_qsl

from .errors import InputError

PYTHON = "python:"
"""What the name of an input or a tokenizer begins with that a function gives."""

_PATH = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*(\.[^\W\d]\w*)*")


def is_function_path(path: str) -> bool:
    """Returns whether a text has the form `package.module:function`."""
    return bool(_PATH.fullmatch(path))


def named_function(
    name: str, *, where: str, purpose: str
) -> tuple[Callable[..., Any], dict[str, Any]]:
    """Returns the function of a name like `python:package.module:function?length=32`, and its settings.

    A setting is a number where it reads as one, otherwise a text.

    Args:
        name: what the user gave.
        where: what names it, for messages.
        purpose: what it should be, for messages, for example "a function of a text".

    Raises:
        InputError: it is no such name, or there is no such function.
    """
    path, settings = _split_settings(name.removeprefix(PYTHON), where)
    if not is_function_path(path):
        raise InputError(f"{where}: write {PYTHON}package.module:function")
    return import_function(path, where=where, purpose=purpose), settings


def _split_settings(path: str, where: str) -> tuple[str, dict[str, Any]]:
    path, mark, query = path.partition("?")
    if not mark:
        return path, {}
    try:
        pairs = parse_qsl(query, keep_blank_values=True, strict_parsing=True)
    except ValueError:
        pairs = []
    names = [name for name, _ in pairs]
    if not names or len(set(names)) < len(names) or not all(map(str.isidentifier, names)):
        raise InputError(
            f"{where}: what follows the question mark is {query!r}: write each setting once, as "
            "function?name=value&name=value"
        )
    return path, {name: _number_or_text(value) for name, value in pairs}


def _number_or_text(value: str) -> int | float | str:
    for kind in (int, float):
        try:
            return kind(value)
        except ValueError:
            continue
    return value


def import_function(path: str, *, where: str, purpose: str) -> Callable[..., Any]:
    """Returns the function of a path.

    Args:
        path: `package.module:function`.
        where: what names it, for messages.
        purpose: what it should be, for messages, for example "a function of a text".

    Raises:
        InputError: there is none.
    """
    module_name, _, attributes = path.partition(":")
    found = _import_module(module_name, where)
    for name in attributes.split("."):
        if not hasattr(found, name):
            raise InputError(f"{where}: {module_name} has no {attributes!r}: check the name")
        found = getattr(found, name)
    if not callable(found):
        raise InputError(
            f"{where}: {attributes!r} is a {type(found).__name__}, which cannot be called: name "
            f"{purpose}"
        )
    return found


def _import_module(name: str, where: str) -> Any:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        advice = (
            "install it, or put its folder on PYTHONPATH"
            if error.name and f"{name}.".startswith(f"{error.name}.")
            else f"{name} imports it: install it"
        )
        raise InputError(f"{where}: there is no module {error.name!r}: {advice}") from error
    except Exception as error:
        raise InputError(
            f"{where}: {name} cannot be imported: {type(error).__name__}: {error}"
        ) from error
