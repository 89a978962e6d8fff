"""Reads records from a user's function: the input `python:package.module:function`.

    # my_texts.py, in the folder of the command
    def letters():                               # one split
        yield {"text": "Dear …", "id": "letter/1"}
    def pages(split_index, num_splits):          # many, read by many workers
        for number in range(split_index, 10_000, num_splits):
            yield page(number)
    pages.num_splits = 64

    moebius prepare --input python:my_texts:pages --output shards --workers 8

The function gets settings by name: `python:my_texts:pages?first=10&language=en`.

A record is a string, or a dict with the fields that JSON lines would have. The function is called two
or three times per split (to scan, to train the tokenizer, to tokenise), in any process, and must yield
the same records each time, determined by the split's number alone.
"""

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from ...plugins import PYTHON, a_kind, named_function
from ..errors import InputError
from ..words import some_of
from .documents import Document, InputSplit, SplitRange
from .records import RecordRules, checked, document_of

MAX_SPLITS = 100_000
_RESULT = "an iterable of strings or dicts"


def function_size(url: str) -> int:
    """Returns the number of splits that a function declares, 1 by default.

    Raises:
        InputError: the function does not exist, or does not take the arguments.
    """
    function, settings = _function(url)
    declared = getattr(function, "num_splits", None)
    if declared is None:
        _check_takes(function, (), settings, url)
        return 1
    is_number = isinstance(declared, int) and not isinstance(declared, bool)
    if not is_number or not 1 <= declared <= MAX_SPLITS:
        raise InputError(
            f"input {url!r} declares num_splits={declared!r}: it must be a whole number from 1 to "
            f"{MAX_SPLITS:,}"
        )
    _check_takes(function, (0, declared), settings, url)
    return declared


def function_ranges(url: str, size: int, split_bytes: int) -> Iterator[SplitRange]:
    """Yields one range per split; the size of its text is unknown."""
    for index in range(size):
        yield SplitRange(index, index + 1, split_bytes)


def read_function(split: InputSplit, rules: RecordRules) -> Iterator[Document]:
    """Reads the records of one split."""
    name = split.url.removeprefix(PYTHON)
    for row, record in enumerate(_records(split)):
        where = f"{split.label}, record {row}"
        if isinstance(record, str):
            if rules.fields.prompt_field or rules.fields.id_field:
                wanted = f"a dict with the fields {some_of(map(repr, rules.names))}"
                raise InputError(f"{where}: a string, but the source needs {wanted}")
            yield checked(Document(record, name, row), rules, where=where)
        elif isinstance(record, Mapping):
            yield document_of(record, row, rules, where=where, file_name=name)
        else:
            raise InputError(
                f"{where}: {a_kind(record)} ({record!r:.60}): a record must be a string, or a "
                "dict with fields"
            )


def _records(split: InputSplit) -> Iterator[Any]:
    """Yields the function's records; turns its exceptions into InputErrors."""
    function, settings = _function(split.url)
    declares = getattr(function, "num_splits", None) is not None
    arguments = (split.start, split.size) if declares else ()
    row = 0
    try:
        found = function(*arguments, **settings)
        if isinstance(found, str | bytes | Mapping) or not isinstance(found, Iterable):
            raise InputError(f"input {split.url!r} returned {a_kind(found)}, not {_RESULT}")
        for record in found:
            yield record
            row += 1
    except InputError:
        raise
    except Exception as error:
        raise InputError(
            f"{split.label}, record {row}: the function raised {type(error).__name__}: {error}"
        ) from error


def _function(url: str) -> tuple[Callable[..., Any], dict[str, Any]]:
    """Returns the function that an input names, and its settings."""
    wants = f"a function that returns {_RESULT}"
    return named_function(url, where=f"input {url!r}", wants=wants)


def _check_takes(
    function: Callable[..., Any], arguments: tuple[int, ...], settings: dict[str, Any], url: str
) -> None:
    """Checks that a function takes the arguments that it will get."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # some builtins have none
        return
    try:
        signature.bind(*arguments, **settings)
    except TypeError as error:
        name = url.rpartition(":")[2]
        wanted = "nothing" if not arguments else "split_index and num_splits"
        if settings:
            wanted = f"{', '.join(settings)} (of its name) and {wanted}"
        advice = f"; to be called per split, declare {name}.num_splits = 64" * (not arguments)
        raise InputError(
            f"input {url!r} is called with {wanted}, but it takes {signature}{advice}"
        ) from error
