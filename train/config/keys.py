"""Every key of a configuration: its type, default, meaning, and an example of a value.

It is read from the sections' classes, so it cannot differ from what a run accepts.
"""

import json
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from ...model.config.model_config import SECTIONS
from ...plugins import Registry

# The sections with kinds, by their whole path.
KINDS = {f"model.{path}": section for path, section in SECTIONS.items()}
_WORDS = {bool: "true or false", int: "integer", float: "number", str: "text", NoneType: "none"}
_UNITS = {"_s": "seconds", "_bytes": "bytes", "_tokens": "tokens", "steps": "steps"}
_LIMITS = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}
_BETWEEN = {"ge": "from ", "gt": "above ", "le": " to ", "lt": ", below "}


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


def keys_of(kind: type[BaseModel]) -> list[Key]:
    """Returns every key of a kind of configuration in section order, over all kinds of sections."""
    found: dict[str, Key] = {}
    for path, info in known_keys(kind):
        if path not in found and path not in KINDS and not _is_section(info.annotation):
            found[path] = key_of(path, info, kind)
    return list(found.values())


def known_keys(kind: type[BaseModel], path: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """Yields every possible key of a configuration, over all kinds, sections before their keys."""
    for name, field in kind.model_fields.items():
        where = f"{path}.{name}" if path else name
        yield where, field
        if where in KINDS:
            section = KINDS[where]
            kinds: Any = Literal[tuple(section.classes)]
            yield f"{where}.kind", FieldInfo(annotation=kinds)
            models = map(section.config_of, section.classes.values())
        else:
            models = _models_in(field.annotation)
        for model in models:
            yield from known_keys(model, where)


def _models_in(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for part in get_args(annotation):
        yield from _models_in(part)


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


def key_of(path: str, info: FieldInfo, kind: type[BaseModel]) -> Key:
    """Describes a key of a kind of configuration."""
    limits = _limits(info.metadata)
    type_text = f"{_type_of(info.annotation)} {limits}".strip()
    if registries := [entry for entry in info.metadata if isinstance(entry, Registry)]:
        type_text = f"one of {', '.join(registries[0].known)}, or module:name of your own"
    if limits and type_text.endswith(f" or none {limits}"):
        more = f" {limits}{',' * (', ' in limits)} or none"
        type_text = type_text.replace(f" or none {limits}", more)
    default = plain(info.get_default(call_default_factory=True))
    meaning = " ".join((info.description or "").split())
    if (section := KINDS.get(path.removesuffix(".kind"))) is not None:
        default = default_kind(path, kind)
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


def default_kind(path: str, kind: type[BaseModel]) -> str:
    """Returns a section's default kind."""
    first, *names = path.split(".")
    section: Any = kind.model_fields[first].annotation
    value = section()
    for name in names:
        value = getattr(value, name)
    return value


def _type_of(annotation: Any) -> str:
    origin, parts = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return f"{_type_of(parts[0])} {_limits(parts[1:])}".strip()
    if origin is Literal:
        return "one of " * (len(parts) > 1) + ", ".join(str(part) for part in parts)
    if origin in (Union, UnionType):
        return " or ".join(_type_of(part) for part in parts)
    if origin is tuple:
        return f"list of {_type_of(parts[0]).removeprefix('one of ')}"
    if origin is dict:
        return f"table of {_type_of(parts[1])}"
    if _is_section(annotation):
        return "section"
    return _WORDS[annotation]


def _limits(metadata: Any) -> str:
    """Returns the limits of a value: "≥ 1", "from 0 to 1", "above 0, at most 1", or ""."""
    found = dict(_named_limits(metadata))
    if len(found) < 2:
        return "".join(f"{_LIMITS[name]} {limit}" for name, limit in found.items())
    text = "".join(f"{word}{found[name]}" for name, word in _BETWEEN.items() if name in found)
    return text if "ge" in found else text.replace(" to ", ", at most ")


def _named_limits(metadata: Any) -> Iterator[tuple[str, str]]:
    for entry in metadata:
        for name in _LIMITS:
            if (limit := getattr(entry, name, None)) is not None:
                yield name, f"{limit:,}" if isinstance(limit, int) else f"{limit:g}"
        yield from _named_limits(getattr(entry, "metadata", ()))


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
    if origin is tuple:
        return [_example(parts[0], PydanticUndefined)]
    return {int: 2, float: 0.5}.get(annotation, default)


def plain(value: Any) -> Any:
    """Returns a value without sections and tuples, as in a file."""
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json")
    if isinstance(value, list | tuple):
        return [plain(entry) for entry in value]
    return value
