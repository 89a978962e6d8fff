"""Suggests the intended key: by its name in other frameworks, or by spelling."""

import difflib
import re
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

from ...plugins import nearest

# Keys that configurations of 0.2 hold, with the value that means what is always done now. words.txt
# says what replaced them.
REMOVED: dict[str, Any] = {
    "model.attention.expert_dropout": 0.0,
    "model.feed_forward.sub_token_residual": False,
    "model.feed_forward.shared_sum": "plain",
    "data.server": "auto",
    "data.server_bytes": 2**29,
    "prepare.source_field": "source",
    "prepare.sources.source_field": "source",
    "prepare.tokenizer_sample_bytes": 2**25,
    "kernels.onednn": False,
    "train.record_routing": 0,
    "train.spikes": {"action": "off"},
    "train.start_when.segments": None,
    "checkpoint.verify": True,
    "job.give_up_after_s": None,
}
_CAMEL = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")


@cache
def words_known_elsewhere() -> dict[str, list[str]]:
    """Returns words of other frameworks (words.txt), by our key or by an answer.

    They are the last names of keys there, or whole dotted keys. The site shows them as a table.
    """
    lines = (Path(__file__).parent / "words.txt").read_text(encoding="utf-8").splitlines()
    table = (line.partition(" | ") for line in lines)
    return {meant: [name.replace("-", " ") for name in names.split()] for meant, _, names in table}


@cache
def _meanings() -> dict[str, str]:
    table = words_known_elsewhere()
    return {plain(word): meant for meant, words in table.items() for word in words}


def plain(words: str) -> str:
    """Returns words in one spelling: "--Max-Steps" and "max steps" are "max_steps"."""
    return "_".join(re.split(r"[-_\s]+", words.strip("-_ ").lower()))


def meant_by(words: str) -> str:
    """Returns the key, or the answer, for words of other frameworks; "" if there is none."""
    known, last = _meanings(), words.rpartition(".")[2]
    spellings = map(plain, (words, last, _CAMEL.sub("_", last)))
    return next((known[one] for one in spellings if one in known), "")


def suggest(key: str, known: Iterable[str]) -> str:
    """Returns "; did you mean …?" for an unknown key, another hint, or "" if nothing is close.

    Args:
        key: dotted, or its last name alone.
        known: the existing dotted keys.
    """
    keys = list(dict.fromkeys(known))
    name = key.lower().replace("-", "_").rpartition(".")[2]
    same = [path for path in keys if path.rpartition(".")[2] == name]
    meant = _meanings().get(plain(key)) or ("" if same else meant_by(key))
    section = key.rpartition(".")[0]
    beside = {path.rpartition(".")[2]: path for path in keys if path.rpartition(".")[0] == section}
    if meant in keys:
        return f"; did you mean {beside.get(meant.rpartition('.')[2], meant)}?"
    if close := difflib.get_close_matches(name, beside, n=1, cutoff=0.75):
        return f"; did you mean {beside[close[0]]}?"
    if meant and " " in meant:
        return f"; {meant}"
    return _question(same, key) if same else _by_spelling(key, keys)


def _by_spelling(key: str, keys: list[str]) -> str:
    names = {path.rpartition(".")[2] for path in keys}
    close = difflib.get_close_matches(key.rpartition(".")[2], names, n=1, cutoff=0.75)
    if close:
        return _question([path for path in keys if path.rpartition(".")[2] == close[0]], key)
    return nearest(key, keys)


def _question(paths: list[str], key: str) -> str:
    """Asks for keys of one name: for that of the same section, or else for that of a whole one."""
    section = key.rpartition(".")[0]
    near = [path for path in paths if path.rpartition(".")[0] == section]
    near = near or [path for path in paths if path.count(".") == 1] or paths
    return f"; did you mean {' or '.join(near[:3])}?"


def drop_removed(values: Any) -> Iterator[str]:
    """Drops removed keys from a configuration, and yields which had another meaning.

    Args:
        values: plain values, in sections; changed in place.
    """
    for path, harmless in REMOVED.items():
        section, _, name = path.rpartition(".")
        for place in _sections_at(values, section.split(".")):
            given = place.get(name, harmless)
            if ":" in str(place.get("kind")):
                continue  # a part of one's own has keys of its own
            if isinstance(given, dict) and isinstance(harmless, dict):
                given = {key: given.get(key, value) for key, value in harmless.items()}
            if given != harmless:
                yield f"  {path}: unknown key{suggest(path, ())} (given: {given!r:.200})"
            place.pop(name, None)
    for train in _sections_at(values, ["train"]):
        if isinstance(start := train.get("start_when"), dict) and start.keys() <= {"tokens"}:
            train["start_when"] = start.get("tokens")


def _sections_at(values: Any, names: list[str]) -> list[dict[str, Any]]:
    """Returns the sections of a path; those of a list are several."""
    found = values if isinstance(values, list) else [values]
    found = [each for each in found if isinstance(each, dict)]
    if not names:
        return found
    return [one for each in found for one in _sections_at(each.get(names[0]), names[1:])]
