"""Parts of the user's own, named as `module:name` in a configuration: a router, a loss, a source, ….

A key that selects a part by a known name takes `module:name` as well. The module is found as Python
finds any module, and last in the folder that the command or the job was started from. Every process
imports it when it needs the part, so on a cluster that folder must exist on every node, or the module
must be installed or lie on PYTHONPATH there.

Where a function takes settings, these follow as in a URL: `module:function?length=32&letters=4`.

This module lies below all rooms and imports nothing of ours.
"""

import difflib
import hashlib
import importlib
import os
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qsl

if TYPE_CHECKING:
    from pydantic_core import CoreSchema

PYTHON = "python:"
"""What the name of an input or a tokenizer begins with that a function gives."""
FOLDER = "MOEBIUS_FOLDER"
"""Names, in a job's processes, the folder that the job was started from."""

_PATH = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*(\.[^\W\d]\w*)*")
_digests: dict[str, str] = {}


class OwnPartError(ValueError):
    """Says why a part of the user's own cannot be had, and what to do."""


def is_own(name: str) -> bool:
    """Returns whether a text has the form `module:name`, settings allowed."""
    return bool(_PATH.fullmatch(name.partition("?")[0]))


def is_subclass(found: Any, base: type) -> bool:
    """Returns whether something is a class below `base`."""
    return isinstance(found, type) and issubclass(found, base)


def nearest(word: str, known: Iterable[str]) -> str:
    """Returns a question after the known word that is most like `word`; "" if none is like it."""
    close = difflib.get_close_matches(word, list(known), n=1, cutoff=0.5)
    return f"; did you mean {close[0]}?" if close else ""


@dataclass(frozen=True, eq=False)
class Wanted:
    """Describes the parts that one key takes: known ones, and what one of the user's own must be.

    In `Annotated[str, …]` it is the type of such a key, and checks how its value is written. Nothing
    is imported for that, so a configuration can be read where the user's module is absent.
    """

    key: str  # of the configuration
    noun: str  # "a dispatcher"
    known: Mapping[str, Any]  # by name
    own: str  # what a part of the user's own must be: "a function of a tensor"
    fits: Callable[[Any], bool] = callable
    settings: bool = False  # whether a function of the user's own may be given some

    def get(self, name: str) -> Any:
        """Returns the part of that name; a function with settings has them bound.

        Raises:
            OwnPartError: there is none, or it is something else.
        """
        try:
            self.check(name)
        except OwnPartError as error:
            raise OwnPartError(f"{self.key}: {error}") from None
        if name in self.known:
            return self.known[name]
        path, settings = split_settings(name, where=self.key)
        found = import_own(path, where=self.key, wants=self.own, fits=self.fits)
        return partial(found, **settings) if settings else found

    def check(self, name: str) -> str:
        """Returns the name if it is written as one.

        Raises:
            OwnPartError: it is neither known nor `module:name`.
        """
        if name in self.known or (is_own(name) and (self.settings or "?" not in name)):
            return name
        known = f"choose {', '.join(self.known)}, or " if self.known else ""
        raise OwnPartError(
            f"{name!r} is not {self.noun}{nearest(name, self.known) or ':'} {known}write module:name "
            f"of your own, which must be {self.own}"
        )

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> "CoreSchema":
        from pydantic_core import core_schema

        return core_schema.no_info_after_validator_function(self.check, handler(source))


def named_function(
    name: str, *, where: str, wants: str
) -> tuple[Callable[..., Any], dict[str, Any]]:
    """Returns the function of a name like `python:module:function?length=32`, and its settings.

    Raises:
        OwnPartError: it is no such name, or there is no such function.
    """
    path, settings = split_settings(name.removeprefix(PYTHON), where=where)
    if not is_own(path):
        raise OwnPartError(f"{where}: write {PYTHON}package.module:function")
    return import_own(path, where=where, wants=wants), settings


def split_settings(path: str, *, where: str) -> tuple[str, dict[str, Any]]:
    """Returns the function's path, and the settings that follow it.

    A setting is a number where it reads as one, otherwise a text.

    Raises:
        OwnPartError: what follows is no `name=value&name=value`, or names one twice.
    """
    path, mark, query = path.partition("?")
    if not mark:
        return path, {}
    try:
        pairs = parse_qsl(query, keep_blank_values=True, strict_parsing=True)
    except ValueError:
        pairs = []
    names = [name for name, _ in pairs]
    if not names or len(set(names)) < len(names) or not all(map(str.isidentifier, names)):
        raise OwnPartError(
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


def import_own(path: str, *, where: str, wants: str, fits: Callable[[Any], bool] = callable) -> Any:
    """Returns what a path names.

    Args:
        path: `module:name`.
        where: what names it, for messages.
        wants: what it must be, for messages, for example "a function of a text".
        fits: tells whether it is that.

    Raises:
        OwnPartError: there is no such part, or it is something else.
    """
    module_name, _, attributes = path.partition(":")
    found = _import_module(module_name, where)
    for name in attributes.split("."):
        if not hasattr(found, name):
            raise OwnPartError(f"{where}: {module_name} has no {attributes!r}: check the name")
        found = getattr(found, name)
    if not fits(found):
        raise OwnPartError(
            f"{where}: {path} is a {type(found).__name__} ({found!r:.60}): it must be {wants}"
        )
    return found


def own_digests() -> dict[str, str]:
    """Returns the sha256 of every module that parts were imported from so far in this process."""
    return dict(_digests)


def folder_of_job() -> str:
    """Returns the folder that this command, or the job of this process, was started from."""
    return os.environ.get(FOLDER) or os.getcwd()


def _import_module(name: str, where: str) -> Any:
    folder = folder_of_job()
    if folder not in sys.path:
        sys.path.append(folder)  # last, so that no file there hides a library
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        advice = (
            f"start from the folder that holds it (this is {folder}), put that folder on PYTHONPATH, "
            "or install the module; on every node"
            if error.name and f"{name}.".startswith(f"{error.name}.")
            else f"{name} imports it: install it"
        )
        raise OwnPartError(f"{where}: there is no module {error.name!r}: {advice}") from error
    except Exception as error:
        raise OwnPartError(
            f"{where}: {name} cannot be imported: {type(error).__name__}: {error}"
        ) from error
    file = getattr(module, "__file__", None)
    if file and name not in _digests:
        _digests[name] = hashlib.sha256(Path(file).read_bytes()).hexdigest()
    return module
