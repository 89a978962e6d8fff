"""The configuration reference: every key with its type, default, meaning and an example.

`moebius config` prints it, and the site's configuration page is built from it.
"""

import textwrap
from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from .keys import Key, default_kind, key_of, keys_of, plain, toml_value
from .run_config import Config

_WIDTH = 88


def keys() -> list[Key]:
    """Returns every key of a run's configuration in section order, over all kinds."""
    return keys_of(Config)


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
        default = plain(info.get_default(call_default_factory=True))
        if path.endswith(".kind"):
            default = default_kind(path, Config)
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
            lines += [
                f"# {line}" for line in _explanation(known.get(path) or key_of(path, info, Config))
            ]
            lines.append(f"# {name} =" if value is None else f"{name} = {toml_value(value)}")
    return "\n".join(lines[1:]) + "\n"


def _values_of(section: BaseModel, path: str = "") -> Iterator[tuple[str, FieldInfo, Any]]:
    for name, info in type(section).model_fields.items():
        where = f"{path}.{name}" if path else name
        value = getattr(section, name)
        if isinstance(value, BaseModel):
            yield from _values_of(value, where)
        else:
            yield where, info, plain(value)


def _tables(config: Config) -> dict[str, list[tuple[str, FieldInfo, Any]]]:
    """Groups a configuration's values by TOML table, in order."""
    tables: dict[str, list[tuple[str, FieldInfo, Any]]] = {}
    for path, info, value in _values_of(config):
        tables.setdefault(path.rpartition(".")[0], []).append((path, info, value))
    return tables


def _explanation(key: Key) -> list[str]:
    default = f"default: {key.default_text}"
    return textwrap.wrap(f"{key.meaning} ({key.type}; {default})".strip(), _WIDTH)


def _first_sentence(text: str) -> str:
    return " ".join(text.partition("\n\n")[0].split())
