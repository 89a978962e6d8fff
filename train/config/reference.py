"""The configuration reference: every key with its type, default, meaning and an example.

`moebius config` prints it, and the site's configuration page is built from it. It is read from the
sections' classes, so it cannot differ from what a run accepts.
"""

import json
import os
import re
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from ...plugins import Registry
from .run_config import Config
from .validation import KINDS, known_keys

_WIDTH = 88
_WORDS = {bool: "true or false", int: "integer", float: "number", str: "text", NoneType: "none"}
_UNITS = {"_s": "seconds", "_bytes": "bytes", "_tokens": "tokens", "steps": "steps"}
_LIMITS = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}


@dataclass(frozen=True)
class Key:
    """Describes one key: its type, default and meaning."""

    path: str
    type: str
    default: Any  # plain; PydanticUndefined: required
    meaning: str
    example: str  # as an override
    kinds: list[str]  # the kinds of its section with this key; empty: all

    @property
    def section(self) -> str:
        """Returns the dotted path of the key's section."""
        return self.path.rpartition(".")[0]

    @property
    def unit(self) -> str:
        """Returns the unit in the key's name, or ""."""
        return next((unit for end, unit in _UNITS.items() if self.path.endswith(end)), "")

    @property
    def wanted(self) -> str:
        """Returns what a value must be, with an example."""
        kind = re.sub(
            "^(integer)", r"an \1", re.sub("^(number|list|table|section)", r"a \1", self.type)
        )
        kind = re.sub(r"of (integer|number|section)\b", r"of \1s", kind)
        return f"{kind.rstrip()}, for example {self.example}"

    @property
    def default_text(self) -> str:
        """Returns the default as written in a TOML file."""
        return toml_value(self.default)


def keys() -> list[Key]:
    """Returns every key of a run's configuration in section order, over all kinds."""
    found: dict[str, Key] = {}
    for path, info in known_keys(Config):
        if path not in found and path not in KINDS and not _is_section(info.annotation):
            found[path] = _key(path, info)
    return list(found.values())


def section_documents() -> dict[str, str]:
    """Returns the first sentence of every section's description, by dotted path."""
    return {
        name: _first_sentence(info.annotation.__doc__ or "")
        for name, info in Config.model_fields.items()
        if info.annotation is not None
    }


def changes(config: Config) -> Iterator[tuple[str, Any, Any]]:
    """Yields (path, value, default) for every key that differs from its kind's default."""
    for path, info, value in _values_of(config):
        default = _plain(info.get_default(call_default_factory=True))
        if path.endswith(".kind"):
            default = _default_kind(path)
        if value != default:
            yield path, value, default


def commented(config: Config) -> str:
    """Returns the configuration as a TOML file with a comment on every key."""
    known = {key.path: key for key in keys()}
    lines: list[str] = []
    for section, entries in _tables(config).items():
        lines += ["", f"[{section}]"]
        for path, info, value in entries:
            if path == "train.steps" and (config.train.tokens or config.train.epochs):
                value = None  # follows, and a file may say only one of them
            name = path.rpartition(".")[2]
            lines += [f"# {line}" for line in _explanation(known.get(path) or _key(path, info))]
            lines.append(f"# {name} =" if value is None else f"{name} = {toml_value(value)}")
    return "\n".join(lines[1:]) + "\n"


def toml_value(value: Any) -> str:
    """Returns a plain value as TOML; None and missing defaults become words."""
    if value is None:
        return "none"
    if value is PydanticUndefined:
        return "required"
    if isinstance(value, float):
        return repr(value)  # inf and nan too
    if isinstance(value, Mapping):
        entries = (f"{json.dumps(key)} = {toml_value(entry)}" for key, entry in value.items())
        return "{" + ", ".join(entries) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(toml_value, value)) + "]"
    return json.dumps(value, ensure_ascii=False, default=os.fspath)


def _key(path: str, info: FieldInfo) -> Key:
    limits = " ".join(_limits(info.metadata))
    type_text = f"{_type_of(info.annotation)} {limits}".strip()
    if registries := [entry for entry in info.metadata if isinstance(entry, Registry)]:
        type_text = f"one of {', '.join(registries[0].known)}, or module:name of your own"
    if limits and type_text.endswith(f" or none {limits}"):
        type_text = type_text.replace(f" or none {limits}", f" {limits} or none")
    default = _plain(info.get_default(call_default_factory=True))
    meaning = " ".join((info.description or "").split())
    if (section := KINDS.get(path.removesuffix(".kind"))) is not None:
        default = _default_kind(path)
        type_text += ", or module:name of your own" if section.own else ""
        meaning = f"Selects the {section.noun}; each kind has its own keys."
    value = info.examples[0] if info.examples else _example(info.annotation, default)
    written = value if isinstance(value, str) else toml_value(value)
    return Key(path, type_text, default, meaning, f"{path}={written}", _kinds_with(path))


def _kinds_with(path: str) -> list[str]:
    """Returns the kinds of a section that have a key; empty if all have it."""
    parent, _, name = path.rpartition(".")
    if parent not in KINDS or name == "kind":
        return []
    classes = KINDS[parent].classes
    kinds = [kind for kind in classes if name in KINDS[parent].fields(kind)]
    return kinds if len(kinds) < len(classes) else []


def _is_section(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)


def _default_kind(path: str) -> str:
    """Returns a section's default kind."""
    value: Any = Config()
    for name in path.removesuffix(".kind").split("."):
        value = getattr(value, name)
    return value.kind


def _type_of(annotation: Any) -> str:
    origin, parts = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return " ".join([_type_of(parts[0]), *_limits(parts[1:])])
    if origin is Literal:
        return "one of " * (len(parts) > 1) + ", ".join(str(part) for part in parts)
    if origin in (Union, UnionType):
        return " or ".join(_type_of(part) for part in parts)
    if origin is tuple:
        return f"list of {_type_of(parts[0])}"
    if origin is dict:
        return f"table of {_type_of(parts[1])}"
    if _is_section(annotation):
        return "section"
    return _WORDS[annotation]


def _limits(metadata: Any) -> Iterator[str]:
    """Yields the limits of a value: "≥ 1", "< 1"."""
    for entry in metadata:
        for name, sign in _LIMITS.items():
            if (limit := getattr(entry, name, None)) is not None:
                yield f"{sign} {limit:,}" if isinstance(limit, int) else f"{sign} {limit:g}"
        yield from _limits(getattr(entry, "metadata", ()))


def _example(annotation: Any, default: Any) -> Any:
    """Returns a value that the key accepts; types without one need `examples`."""
    origin, parts = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return next(part for part in parts if part != default)
    if origin is Annotated:
        return _example(parts[0], default)
    if isinstance(default, bool):
        return not default
    if default is not PydanticUndefined and default not in (None, "", [], {}):
        return default
    if origin in (Union, UnionType):
        return _example(parts[0], default)
    return {int: 2, float: 0.5}.get(annotation, default)


def _values_of(section: BaseModel, path: str = "") -> Iterator[tuple[str, FieldInfo, Any]]:
    for name, info in type(section).model_fields.items():
        where = f"{path}.{name}" if path else name
        value = getattr(section, name)
        if isinstance(value, BaseModel):
            yield from _values_of(value, where)
        else:
            yield where, info, _plain(value)


def _tables(config: Config) -> dict[str, list[tuple[str, FieldInfo, Any]]]:
    """Groups a configuration's values by TOML table, in order."""
    tables: dict[str, list[tuple[str, FieldInfo, Any]]] = {}
    for path, info, value in _values_of(config):
        tables.setdefault(path.rpartition(".")[0], []).append((path, info, value))
    return tables


def _explanation(key: Key) -> list[str]:
    default = f"default: {key.default_text}"
    return textwrap.wrap(f"{key.meaning} ({key.type}; {default})".strip(), _WIDTH)


def _plain(value: Any) -> Any:
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json")
    if isinstance(value, list | tuple):
        return [_plain(entry) for entry in value]
    return value


def _first_sentence(text: str) -> str:
    return " ".join(text.partition("\n\n")[0].split())
