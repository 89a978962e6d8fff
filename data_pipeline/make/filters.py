"""Rules that drop single documents: the user's filters, and decontamination.

A filter takes a document's normalised text with its prompt. It returns None to keep the document, or a
short reason to drop it; drops are counted by reason. Every process that reads documents imports the
filter, which must be a pure function. See examples/filter_documents.py.

    moebius prepare … prepare.filters="['my_filters:too_short']"
"""

from collections.abc import Callable
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Any

from ...plugins import import_own
from ..atomic import atomic_write
from ..errors import InputError, PrepareError
from ..prepare_config import PrepareConfig
from .decontaminate import build_index, load_index

_INDEX_FILE = "evaluation_sets.arrow"
_MAX_REASON_CHARS = 100


DocumentRule = Callable[[str], str | None]
"""Returns the reason to drop a document with this text, or None."""


def set_up_rules(config: PrepareConfig, work: Path) -> None:
    """Indexes the evaluation sets for all processes.

    Args:
        config: names evaluation sets.
        work: the folder of unfinished files, which takes the index.

    Raises:
        InputError: an evaluation set cannot be read.
        PrepareError: an evaluation set has changed since the preparation began.
    """
    if config.decontaminate is not None:
        with BytesIO() as index:
            build_index(config.decontaminate).save(index)
            _write_index(work / _INDEX_FILE, index.getvalue())


def document_rules(config: PrepareConfig, work: Path) -> tuple[DocumentRule, ...]:
    """Returns this process's rules: the filters in order, then decontamination."""
    wants = "a function of a document's text"
    rules: list[DocumentRule] = [
        partial(_reason_of, path, import_own(path, where="prepare.filters", wants=wants))
        for path in config.filters
    ]
    if config.decontaminate is not None:
        index = load_index(work / _INDEX_FILE)
        rules.append(lambda text: (found := index.find(text)) and f"evaluation set: {found}")
    return tuple(rules)


def _reason_of(path: str, function: Callable[[str], Any], text: str) -> str | None:
    """Calls a user's filter and checks its result."""
    try:
        reason = function(text)
    except Exception as error:
        raise InputError(
            f"prepare.filters: {path} raised {type(error).__name__} ({error}) on a document "
            f"that begins {text[:60]!r}"
        ) from error
    if reason is None or (isinstance(reason, str) and 0 < len(reason) <= _MAX_REASON_CHARS):
        return reason
    raise InputError(
        f"prepare.filters: {path} returned {reason!r:.100} for a document that begins "
        f"{text[:60]!r}: it must return None, or a reason of at most {_MAX_REASON_CHARS} "
        "characters"
    )


def _write_index(path: Path, data: bytes) -> None:
    if not path.exists():
        with atomic_write(path) as file:
            file.write(data)
    elif path.read_bytes() != data:
        raise PrepareError(
            f"{path.parent.parent} holds an unfinished preparation, and its evaluation sets have "
            "changed since: delete the folder and prepare again"
        )
