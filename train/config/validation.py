"""Validates a configuration's plain values, and explains errors in words."""

import copy
import math
from collections.abc import Iterator
from dataclasses import replace
from functools import cached_property
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from ...data_pipeline.words import some_of
from ...model.config.sections import CONSTRAINTS, plain_message
from ...plugins import nearest
from ..record.redaction import secret_places
from .errors import ConfigError
from .keys import Key, keys_of, known_keys
from .suggestions import drop_removed, suggest

MAX_WHOLE = 2**63 - 1  # the largest number of torch and Arrow
Model = TypeVar("Model", bound=BaseModel)


def validated(kind: type[Model], values: Any, *, origin: str) -> Model:
    """Builds a configuration from plain values.

    Args:
        kind: the class to build.
        values: plain values, in sections.
        origin: their source, for messages.

    Raises:
        ConfigError: the values are invalid; it lists the first ten problems.
    """
    try:
        values = copy.deepcopy(values)
    except RecursionError:
        raise ConfigError(f"{origin}: the configuration is nested too deeply") from None
    problems = [*drop_removed(values)]
    try:
        built = kind.model_validate(values)
    except ValidationError as error:
        problems += dict.fromkeys(_explain(entry, kind) for entry in error.errors())
    else:
        plain = built.model_dump(mode="json")
        problems += [*_unusable(values, plain), *_secrets(plain)]
        if not problems:
            return built
    listed = some_of(problems, between="\n", most=2_000)
    raise ConfigError(f"{origin}: the configuration is not valid\n{listed}")


def check_keys(model: BaseModel, path: str = "") -> None:
    """Raises ConfigError if a configuration has unknown keys, which pydantic's `model_copy` accepts."""
    for name, value in vars(model).items():
        where = f"{path}.{name}" if path else name
        if isinstance(getattr(type(model), name, None), cached_property):
            continue
        if name not in type(model).model_fields:
            raise ConfigError(f"{where}: unknown key{nearest(name, type(model).model_fields)}")
        if isinstance(value, BaseModel):
            check_keys(value, where)


def _explain(entry: Any, kind: type[BaseModel]) -> str:
    is_name = entry["loc"][-1:] == ("[key]",)
    loc = entry["loc"][:-2] if is_name else entry["loc"]
    where = ".".join(f"{part!s:.200}" for part in loc)
    if entry["type"] == "extra_forbidden":
        return f"  {where}: unknown key{suggest(where, (key for key, _ in known_keys(kind)))}"
    message = plain_message(entry)
    is_section = isinstance(entry["input"], dict) or not where
    if entry["type"] != "value_error" and (key := _key_at(loc, kind)):
        is_section = False
        where = key.path
        may_be_empty = key.type.startswith("list") and key.default_text != "required"
        if entry["type"] not in CONSTRAINTS:
            message = f"must be {key.wanted}"
            message += "; [] for none" if may_be_empty and entry["input"] is None else ""
        elif is_name:
            message = f"each name {message}"
    given = "" if is_section else f" (given: {entry['input']!r:.200})"
    if entry["type"].endswith("_parsing") and "," in str(entry["input"]):
        message += "; digits are grouped by underscores, as in 10_000_000"
    return f"  {where}: {message}{given}" if where else f"  {message}"


def _key_at(place: tuple[int | str, ...], kind: type[BaseModel]) -> Key | None:
    """Returns the key at the place of an error, or what it says of a table's entry there."""
    known = {key.path: key for key in keys_of(kind)}
    for end in range(len(place), 0, -1):
        shown = place[:end]
        key = known.get(".".join(part for part in shown if isinstance(part, str)))
        if key is None or isinstance(shown[-1], int):
            continue
        wanted, example = key.type, key.example
        if wanted.startswith("table of ") and len(place) > end:
            shown, wanted = place[: end + 1], wanted.removeprefix("table of ")
        elif any(isinstance(part, int) for part in shown):
            example = example.removeprefix(f"{key.section}.")
        path = ".".join(f"{part!s:.200}" for part in shown)
        return replace(key, path=path, type=wanted, example=example)
    return None


def _unusable(given: Any, built: Any, where: str = "") -> Iterator[str]:
    """Yields what pydantic accepts but no run can use: booleans as numbers, numbers out of range.

    Args:
        given: the values as written.
        built: the validated values, as JSON values.
        where: the dotted name of the place.
    """
    if isinstance(built, dict):
        given = given if isinstance(given, dict) else {}
        for key, value in built.items():
            yield from _unusable(given.get(key), value, f"{where}.{key}" if where else str(key))
    elif isinstance(built, list):
        given = given if isinstance(given, list | tuple) else []
        for number, value in enumerate(built):
            yield from _unusable(given[number] if number < len(given) else None, value, where)
    elif isinstance(given, bool) != isinstance(built, bool) and given is not None:
        wanted = "true or false" if isinstance(built, bool) else "a number"
        yield f"  {where}: must be {wanted} (given: {given!r})"
    elif isinstance(built, float) and not math.isfinite(built):
        yield f"  {where}: must be a finite number (given: {given!r})"
    elif isinstance(built, int) and abs(built) > MAX_WHOLE:
        yield f"  {where}: must be at most {MAX_WHOLE:,} (given: {given!r})"


def _secrets(values: dict[str, Any]) -> list[str]:
    """Lists the places of secrets, because a configuration is saved in plain text."""
    return [
        f"  {place}: holds what looks like a secret; leave it out, and set the environment "
        "variable that the library reads instead"
        for place in sorted(set(secret_places(values)))
    ]
