"""Configuration sections with kinds: `kind` selects the class that reads a section.

Each kind has only its own keys, so dense attention has no key for experts and an error can list the
valid keys. The table also says which keys survive a change of kind: those that mean the same in the
new one.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from ...plugins import Registry, is_own, nearest

_WANTED = {  # by the first word of a pydantic error's type
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "string": "text",
    "list": "a list",
    "tuple": "a list",
    "dict": "a table",
    "model": "a section",
}
CONSTRAINTS = {  # on values of the right type, by a pydantic error's type
    "finite_number": "must be finite",
    "string_too_short": "must not be empty",
    "too_short": "must not be empty",
    "string_too_long": "must have at most {max_length} characters",
    "string_pattern_mismatch": "must consist of the characters {1} and begin with one of {0}",
}


class Keys(BaseModel):
    """Holds the keys of a section, each with its docstring; an unknown key is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


@dataclass(frozen=True)
class Section:
    """Describes one section of a configuration and the classes that read its kinds."""

    path: str  # below the model, as in an override: "attention.positions"
    noun: str  # in errors: "attention"
    classes: Mapping[str, Any]  # by kind
    config_of: Callable[[Any], type[BaseModel]] = lambda entry: entry  # an entry's configuration
    kept: tuple[str, ...] = ()  # keys that survive a change of kind, if the new kind has them
    own: str = ""  # what a user's own kind must be; "": not allowed
    fits: Callable[[Any], bool] = callable  # whether an object is that
    inner: tuple["Section", ...] = ()  # sections with kinds among its keys

    def entry(self, kind: str) -> Any:
        """Returns the entry of a kind, including a user's own (`module:Class`).

        Raises:
            PluginError: there is none.
        """
        key, noun = f"model.{self.path}.kind", self.noun
        return Registry(key, noun, self.classes, self.own, self.fits).get(kind)

    def has(self, kind: Any) -> bool:
        """Returns whether a kind is known, or written as a user's own."""
        return isinstance(kind, str) and (kind in self.classes or (bool(self.own) and is_own(kind)))

    def fields(self, kind: str) -> dict[str, Any]:
        """Returns the annotations of a kind's keys, without `kind`."""
        fields = self.config_of(self.entry(kind)).model_fields
        return {name: field.annotation for name, field in fields.items() if name != "kind"}

    def of_kind(self, values: Mapping[str, Any], kind: Any) -> dict[str, Any]:
        """Returns the keys of `values` that survive a change to another kind."""
        if not self.has(kind):
            return {}
        known = self.fields(kind)
        return {key: values[key] for key in self.kept if key in values and key in known}

    def read(self, value: Any) -> Any:
        """Reads the section from plain values, by their `kind`.

        Raises:
            ValueError: the kind or a key is unknown, or a value is invalid.
        """
        if isinstance(value, BaseModel):
            return value
        name = self.path.rpartition(".")[2]
        if not isinstance(value, dict):
            known = isinstance(value, str) and value in self.classes
            example = value if known else next(iter(self.classes))
            raise ValueError(
                f"{name}={value!r}: the {self.noun} is a section; write its kind, for example "
                f"model.{self.path}.kind={example}"
            )
        kinds = ", ".join(self.classes)
        if "kind" not in value:
            keys = f"keys: {', '.join(map(str, value))}" if value else "no keys"
            raise ValueError(f"the {self.noun} has no kind ({keys}); there are {kinds}")
        kind = value["kind"]
        if not self.has(kind):
            own = f", or {self.own} as module:name" if self.own else ""
            raise ValueError(f"kind={kind!r} is no {self.noun}; there are {kinds}{own}")
        try:
            return self.config_of(self.entry(kind)).model_validate(value)
        except ValidationError as error:
            told = _joined(self._explain(entry, kind) for entry in error.errors())
            raise ValueError("; ".join(told)) from None

    def _explain(self, entry: Any, kind: str) -> str:
        where = ".".join(str(part) for part in entry["loc"])
        if entry["type"] == "extra_forbidden":
            known = list(self.fields(kind))
            meant = nearest(where, known)
            for section in self.inner:
                name = section.path.rpartition(".")[2]
                if name in known and any(where in section.fields(one) for one in section.classes):
                    meant = f"; did you mean {name}.{where}?"
            has = f"it has {', '.join(known)}" if known else "it has none"
            return f"the {self.noun} {kind!r} has no key {where!r}; {has}{meant}"
        message = plain_message(entry)
        if "must be" in message:
            where = ".".join(
                str(part) for part in entry["loc"] if re.fullmatch(r"(?!bool|int)\w+", str(part))
            )
        if not where or isinstance(entry["input"], dict) or message.startswith(f"{where}="):
            return message
        return f"{where}={entry['input']!r}: {message}"


def _joined(messages: Iterable[str]) -> Iterator[str]:
    """Yields messages, each once; those of a union's types are one: "must be true, false or 'all'"."""
    wanted: dict[str, dict[str, None]] = {}
    for message in messages:
        place, must_be, what = message.partition(": must be ")
        wanted.setdefault(place + must_be, {})[what] = None
    for place, choices in wanted.items():
        what = ", ".join(choices)
        if len(choices) > 1:
            what = " or ".join(what.replace(" or ", ", ").rsplit(", ", 1))
        yield place + what


def plain_message(entry: Any) -> str:
    """Returns the message of a pydantic error without the names of Python's types."""
    if entry["type"] in CONSTRAINTS:
        known = entry.get("ctx", {})
        sets = re.findall(r"\[(.+?)\]", str(known.get("pattern")))
        spaced = (" ".join(re.findall(r"\w-\w|.", each)) for each in sets)
        return CONSTRAINTS[entry["type"]].format(*spaced, **known)
    kind, _, what = entry["type"].partition("_")
    if kind in _WANTED and what in ("type", "parsing", "from_float", "parsing_size"):
        return f"must be {_WANTED[kind]}"
    message = str(entry["msg"]).removeprefix("Value error, ")
    return message.replace("Input should be", "must be")


def merge(
    base: dict[str, Any],
    changes: Mapping[str, Any],
    sections: Mapping[str, Section],
    path: str = "",
) -> dict[str, Any]:
    """Returns `base` updated with `changes`, section by section.

    A section of another kind replaces the old one and keeps the keys in `Section.kept`.

    Args:
        base: plain values.
        changes: nested values to set.
        sections: those with kinds, by their path from `base`.
        path: the path of `base` itself.
    """
    merged = dict(base)
    if path in sections and changes.get("kind", base.get("kind")) != base.get("kind"):
        merged = sections[path].of_kind(base, changes["kind"])
    for key, value in changes.items():
        inner = f"{path}.{key}" if path else key
        both = isinstance(value, Mapping) and isinstance(merged.get(key), dict)
        merged[key] = merge(merged[key], value, sections, inner) if both else value
    return merged


def set_value(
    values: dict[str, Any], path: str, value: Any, sections: Mapping[str, Section]
) -> None:
    """Sets one value under a dotted key, in place.

    A new kind clears a section that has kinds, but for `Section.kept`.

    Args:
        values: plain values.
        path: the dotted key.
        value: the new value.
        sections: those with kinds, by their path from `values`.

    Raises:
        ValueError: the path leads through something that is not a section.
    """
    *names, key = path.split(".")
    entries = values
    for depth, name in enumerate(names, start=1):
        if entries.get(name) is None:
            entries[name] = {}
        entries = entries[name]
        if not isinstance(entries, dict):
            raise ValueError(f"{'.'.join(names[:depth])} is not a section")
    section = sections.get(".".join(names))
    if section is not None and key == "kind" and value != entries.get("kind"):
        kept = section.of_kind(entries, value)
        entries.clear()
        entries.update(kept)
    entries[key] = value


def kinds_first(path: str) -> bool:
    """Sort key for dotted keys that sets a section's kind before its other keys."""
    return not path.endswith(".kind")
