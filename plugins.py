"""A user's own parts (routers, losses, sources, …), named as `module:name` in a configuration.

Every key that selects a part by a known name also takes `module:name`. Python's import system finds
the module, last in the folder that started the command or the job. Every process imports it on
first use, so on a cluster that folder must exist on every node, or the module must be installed or
on PYTHONPATH there.

A function's settings follow as in a URL: `module:function?length=32&letters=4`.

A file that somebody else may have written (of a run, a checkpoint, prepared data) names no code. Its
reader calls `distrust`: a name in it must then lead to a module of the user's, one that is not
installed and lies neither in that file's folder nor in a package around it, or the user must have typed
it, too (`trust`, PARTS).

This module is below all packages and imports none of them.
"""

import difflib
import hashlib
import importlib
import inspect
import os
import re
import sys
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from importlib.machinery import ModuleSpec
from itertools import accumulate, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qsl

if TYPE_CHECKING:
    from pydantic_core import CoreSchema

PYTHON = "python:"
"""Prefix of an input's or tokenizer's name that a function provides."""
FOLDER = "MOEBIUS_FOLDER"
"""Environment variable with the folder that a job was started from, in its processes."""
PARTS = "MOEBIUS_PARTS"
"""Environment variable with names, `module:name`, that a file of somebody else may use, too."""

_INSTALLED = {"site-packages", "dist-packages"}
_trusted: set[str] = set()
_foreign: set[str] = set()
_PATH = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*(\.[^\W\d]\w*)*")
_digests: dict[str, str] = {}


class PluginError(ValueError):
    """Reports why a user's own part cannot be loaded, and what to do."""


def is_own(name: str) -> bool:
    """Returns whether a text has the form `module:name`, with or without settings."""
    return bool(_PATH.fullmatch(name.partition("?")[0]))


def is_subclass(found: Any, base: type) -> bool:
    """Returns whether something is a class derived from `base`."""
    return isinstance(found, type) and issubclass(found, base)


def is_function(found: Any) -> bool:
    """Returns whether something can be called and is no class, whose result would be an object."""
    return callable(found) and not isinstance(found, type)


def a_kind(found: Any) -> str:
    """Returns the type of an object in words: "an int" or "a str"."""
    name = type(found).__name__
    return f"{'an' if name[0] in 'aeiouAEIOU' else 'a'} {name}"


def nearest(word: str, known: Iterable[str]) -> str:
    """Returns a question with the known word closest to `word`; "" if none is close."""
    close = difflib.get_close_matches(word, list(known), n=1, cutoff=0.65)
    return f"; did you mean {close[0]}?" if close else ""


@dataclass(frozen=True, eq=False)
class Registry:
    """Describes the parts that one key takes: known names, and the requirements of a user's own.

    In `Annotated[str, …]` it is the type of such a key and checks only the spelling of its value.
    It imports nothing, so a configuration can be read without the user's module.
    """

    key: str  # of the configuration
    noun: str  # "a dispatcher"
    known: Mapping[str, Any]  # by name
    own: str  # what a user's own part must be: "a function of a tensor"
    fits: Callable[[Any], bool] = is_function
    settings: bool = False  # whether a user's own function may take settings
    takes: int | None = None  # how many positional arguments it is called with; None: unchecked

    def get(self, name: str) -> Any:
        """Returns the part of that name, with its settings bound.

        Raises:
            PluginError: there is none, or it is something else.
        """
        try:
            self.check(name)
        except PluginError as error:
            raise PluginError(f"{self.key}: {error}") from None
        if name in self.known:
            return self.known[name]
        path, settings = split_settings(name, where=self.key)
        found = import_own(path, where=self.key, wants=self.own, fits=self.fits)
        if self.takes is not None:
            check_call(found, (None,) * self.takes, settings, f"{self.key}: {path}", self.own)
        return partial(found, **settings) if settings else found

    def check(self, name: str) -> str:
        """Returns the name if it is spelled correctly.

        Raises:
            PluginError: it is neither known nor `module:name`.
        """
        if name in self.known or (is_own(name) and (self.settings or "?" not in name)):
            return name
        known = f"choose {', '.join(self.known)}, or " if self.known else ""
        raise PluginError(
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
        PluginError: the name is malformed, or the function does not exist.
    """
    path, settings = split_settings(name.removeprefix(PYTHON), where=where)
    if not is_own(path):
        raise PluginError(f"{where}: write {PYTHON}package.module:function")
    return import_own(path, where=where, wants=wants), settings


def split_settings(path: str, *, where: str) -> tuple[str, dict[str, Any]]:
    """Returns the function's path and its settings, numbers where they parse as such.

    Raises:
        PluginError: the settings are not `name=value&name=value`, or a name occurs twice.
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
        raise PluginError(
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
    """Imports the object that a path names.

    Args:
        path: `module:name`.
        where: the key that names it, for messages.
        wants: what it must be, for messages, for example "a function of a text".
        fits: whether an object is that.

    Raises:
        PluginError: there is no such object, or it is something else.
    """
    module_name, _, attributes = path.partition(":")
    _refuse_installed(path, module_name, where)
    found = _import_module(module_name, where)
    for name in attributes.split("."):
        if not hasattr(found, name):
            raise PluginError(f"{where}: {module_name} has no {attributes!r}: check the name")
        found = getattr(found, name)
    # as `os.system` of a module of one's own
    if inspect.isroutine(found) or isinstance(found, type):
        _refuse_installed(path, getattr(found, "__module__", None) or "builtins", where)
    if not fits(found):
        raise PluginError(f"{where}: {path} is {a_kind(found)} ({found!r:.60}): it must be {wants}")
    return found


def names_in(values: Any) -> Iterator[str]:
    """Yields all that plain values, keys too, hold of the form `module:name`, without settings."""
    stack = [values]
    while stack:
        value = stack.pop()
        if isinstance(value, Mapping):
            stack += [*value, *value.values()]
        elif isinstance(value, list | tuple):
            stack += value
        elif isinstance(value, str):
            words = (word.split(":") for word in re.findall(r"[\w.]+(?::[\w.]+)+", value))
            yield from filter(is_own, (":".join(two) for word in words for two in pairwise(word)))


def trust(values: Any) -> None:
    """Accepts the names in values that the user has typed, whatever file has them, too."""
    _trusted.update(names_in(values))


def distrust(values: Any, folder: Path) -> None:
    """Marks the names in a file that others may have written, in this folder; imports nothing.

    Raises:
        PluginError: a name leads to a module in or around the folder.
    """
    is_checkpoint = folder.parent.name == "checkpoints"
    folder = (folder.parent.parent if is_checkpoint else folder).resolve()
    for path in set(names_in(values)) - _typed():
        _foreign.add(path)
        for _, around, packages in _found(path.partition(":")[0]):
            if folder in around or any(map(folder.is_relative_to, packages)):
                raise _refusal(str(folder), path, "leads to a module in or around that folder")


def _typed() -> set[str]:
    return _trusted.union(names_in(os.environ.get(PARTS, "")))


def _refusal(where: str, path: str, problem: str) -> PluginError:
    return PluginError(
        f"{where}: {path} comes from a file and {problem}, so it is not run. If you trust it, name it "
        f"yourself: type its key=value again, or {PARTS}={path} before the command"
    )


def _refuse_installed(path: str, module: str, where: str) -> None:
    """Refuses a name that only a file has, and that leads to an installed module."""
    if path not in _foreign - _typed():
        return
    libraries = {Path(sysconfig.get_path(key)).resolve() for key in ("stdlib", "platstdlib")}
    for spec, around, _ in _found(module):
        is_ours = spec.name.partition(".")[0] == __name__.partition(".")[0]
        is_built_in = spec.origin is not None and not spec.has_location
        folders = {folder.name for folder in around}
        if is_ours or is_built_in or folders & _INSTALLED or around & libraries:
            raise _refusal(where, path, f"leads to the installed module {module}")


def _found(module: str) -> Iterator[tuple[ModuleSpec, set[Path], list[Path]]]:
    """Yields where Python finds a module and its parents, and the folders around each; runs nothing.

    The last ones are the folders of a package.
    """
    _see_folder_of_job()
    search: list[str] | None = None
    for name in accumulate(module.split("."), "{}.{}".format):
        if (spec := _spec(name, search)) is None:
            return  # the import says so
        if spec.origin is None:  # a folder without __init__.py
            entries = sys.path if search is None else search
            search = [os.path.join(each, name.rpartition(".")[2]) for each in entries]
            search = places = [each for each in search if os.path.isdir(each)]
        else:
            search, places = spec.submodule_search_locations, [spec.origin]
        packages = [Path(each).resolve() for each in search or ()]
        yield spec, {each for place in places for each in _around(place)}, packages
        if search is None:
            return


def _spec(name: str, search: list[str] | None) -> ModuleSpec | None:
    if name in sys.modules:
        known = getattr(sys.modules[name], "__spec__", None)
        return known or ModuleSpec(name, None, origin="running")
    found = (finder.find_spec(name, search) for finder in sys.meta_path)
    try:
        return next(filter(None, found), None)
    except KeyError:  # a folder without __init__.py, in a package that is not imported
        return ModuleSpec(name, None)


def _around(place: str) -> set[Path]:
    """Returns a path and the folders around it, by the names of its links and by what they lead to."""
    path = Path(os.path.abspath(place))
    return {path.resolve(), *path.resolve().parents, *(each.resolve() for each in path.parents)}


def check_call(
    found: Callable[..., Any],
    arguments: tuple[Any, ...],
    settings: Mapping[str, Any],
    where: str,
    wants: str,
) -> None:
    """Checks that a function takes these arguments, without calling it.

    Raises:
        PluginError: it does not.
    """
    try:
        signature = inspect.signature(found)
    except ValueError:  # of some functions in C, Python knows no signature
        return
    try:
        signature.bind(*arguments, **settings)
    except TypeError as error:
        raise PluginError(
            f"{where}{signature} cannot be called: {error}: it must be {wants}"
        ) from None


def own_digests() -> dict[str, str]:
    """Returns the sha256 of every module that this process imported parts from."""
    return dict(_digests)


def folder_of_job() -> str:
    """Returns the folder that this command, or this process's job, was started from."""
    return os.environ.get(FOLDER) or os.getcwd()


def _see_folder_of_job() -> None:
    if (folder := folder_of_job()) not in sys.path:
        sys.path.append(folder)  # last, so that no file there shadows a library


def _import_module(name: str, where: str) -> Any:
    _see_folder_of_job()
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        advice = (
            f"start from the folder that holds it (this is {folder_of_job()}), put that folder on PYTHONPATH, "
            "or install the module; on every node"
            if error.name and f"{name}.".startswith(f"{error.name}.")
            else f"{name} imports it: install it"
        )
        raise PluginError(f"{where}: there is no module {error.name!r}: {advice}") from error
    except Exception as error:
        raise PluginError(
            f"{where}: {name} cannot be imported: {type(error).__name__}: {error}"
        ) from error
    file = getattr(module, "__file__", None)
    if file and name not in _digests:
        _digests[name] = hashlib.sha256(Path(file).read_bytes()).hexdigest()
    return module
