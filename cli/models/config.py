"""`moebius config`: looks up configuration keys, and writes a run's whole configuration."""

import argparse
import re
from collections.abc import Container, Iterable, Sequence
from typing import TYPE_CHECKING

from ..arguments import Commands, add_command, add_overrides
from ..console import console, print_plain

if TYPE_CHECKING:
    from rich.console import RenderableType

    from ...train.config.keys import Key
    from ...train.config.run_config import Config

_MOST_FOUND = 10  # rows of a search


def add_commands(commands: Commands) -> None:
    """Declares `moebius config` and its options."""
    parser = add_command(
        commands,
        "config",
        _config,
        "look up configuration keys, or write a recipe as a commented TOML file",
        examples=[
            "config",
            "config train.steps",
            'config "gradient checkpointing"',
            "config smoke optim.learning_rate=1e-3 > mine.toml",
            "config smoke --diff",
            "config huginn_moe --unlooped flops > partner.toml",
        ],
    )
    parser.add_argument(
        "name",
        nargs="?",
        metavar="SECTION[.KEY]|RECIPE|FILE.toml|WORD",
        help="what to show, or words to search for; default: every section",
    )
    add_overrides(parser)
    parser.add_argument(
        "--diff", action="store_true", help="only the values that differ from their defaults"
    )
    parser.add_argument(
        "--unlooped",
        choices=["flops", "parameters", "cache"],
        help="the partner without loops that is equal in this (docs/models.md)",
    )


def _config(options: argparse.Namespace) -> int:
    from ...train.config.reference import commented
    from ...train.config.resolve import resolve
    from ...train.config.run_config import Config
    from ...train.recipes.smoke import RECIPES
    from .catalogue import partner_of

    name = options.name or ""
    if found := _search(" ".join([name, *options.overrides]), RECIPES):
        console().print(found, highlight=False)
        return 0
    if name and name.partition(".")[0] not in Config.model_fields:
        config = resolve(name, options.overrides, RECIPES)
        if options.unlooped:
            config = partner_of(config, options.unlooped)
        if options.diff:
            console().print(_differences(config))
        else:
            print_plain(commented(config).removesuffix("\n"))
        return 0
    if options.overrides or options.diff or options.unlooped:
        raise ValueError(
            f"moebius config {name}: overrides and options belong to a recipe or a TOML file, "
            "for example moebius config smoke --diff"
        )
    console().print(_look_up(name) if name else _sections(), highlight=False)
    return 0


def _search(words: str, recipes: Container[str]) -> "RenderableType | None":
    """Returns the keys that words of the user's name or describe; None if these are no such words."""
    from ...train.config.reference import keys
    from ...train.config.run_config import Config
    from ...train.config.suggestions import meant_by, plain, words_known_elsewhere

    first = words.partition(" ")[0]
    is_section = first.partition(".")[0] in Config.model_fields
    if not words or is_section or first in recipes or re.search(r"[=:/@]|\.toml$", words):
        return None
    answer, wanted = meant_by(words), plain(words).split("_")
    by_a_part = [
        meant
        for meant, phrases in words_known_elsewhere().items()
        if any({*wanted} <= {*plain(phrase).split("_")} for phrase in phrases)
    ]
    named, described = [], []
    for key in keys():
        if key.path == answer or _has_words(key.path, wanted):
            named.append(key)
        elif key.path in by_a_part or _has_words(key.meaning, wanted):
            described.append(key)
    named.sort(key=lambda key: key.path != answer)
    found = [*named, *described]
    rows = [(key.path, key.default_text, key.meaning) for key in found[:_MOST_FOUND]]
    if more := len(found) - len(rows):
        rows.append((f"… and {more} more", "", "more words find fewer keys"))
    rows += [(words, "", text) for text in by_a_part if " " in text and text != answer]
    if " " in answer:
        rows = [(words, "", answer), *rows[: 0 if answer.startswith("not here") else None]]
    return _table(["key", "default", "meaning"], rows) if rows else None


def _has_words(text: str, words: Sequence[str]) -> bool:
    """Returns whether a text has words that begin with these; up to three letters must be all of one."""
    known = re.split(r"[^a-z0-9]+", text.lower())
    return all(
        any(one == word or (len(word) > 3 and one.startswith(word)) for one in known)
        for word in words
    )


def _sections() -> "RenderableType":
    """Returns all sections with their descriptions."""
    from ...train.config.reference import section_documents

    return _table([], section_documents().items())


def _look_up(name: str) -> "RenderableType":
    """Returns one key in full, or a table of the keys in a section.

    Raises:
        ConfigError: there is no such key or section.
    """
    from ...train.config.errors import ConfigError
    from ...train.config.reference import keys
    from ...train.config.suggestions import suggest

    known = {key.path: key for key in keys()}
    below = [key for path, key in known.items() if path.startswith(f"{name}.")]
    if name in known and not below:
        return _table([], _entry(known[name]))
    if not below:
        raise ConfigError(f"there is no key or section {name}{suggest(name, known)}")
    rows = [(key.path, key.default_text, key.meaning) for key in below]
    return _table(["key", "default", "meaning"], rows)


def _entry(key: "Key") -> list[tuple[str, str]]:
    """Returns everything about one key as rows."""
    rows = {
        key.path: key.meaning,
        "type": key.type,
        "unit": key.unit,
        "default": key.default_text,
        "only with": f"{key.section}.kind = {', '.join(key.kinds)}" if key.kinds else "",
        "example": key.example,
    }
    return [(title, text) for title, text in rows.items() if text]


def _differences(config: "Config") -> "RenderableType":
    """Returns the values of a configuration that differ from their defaults."""
    from ...train.config.keys import toml_value
    from ...train.config.reference import changes

    rows = [(path, *map(toml_value, values)) for path, *values in changes(config)]
    return _table(["key", "value", "default"], rows)


def _table(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> "RenderableType":
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, show_header=bool(titles), header_style="bold", padding=(0, 2, 0, 0))
    for title in titles:
        table.add_column(title, overflow="fold")
    for row in rows:
        table.add_row(*map(Text, row))
    return table
