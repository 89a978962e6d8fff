"""Turns records, objects with fields, into documents.

JSON lines, columns and functions yield records, with the same checks and messages for all of them.
"""

import shlex
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from ...plugins import a_kind
from ..errors import InputError
from ..prepare_config import DEFAULT_SOURCE, MAX_LABEL_BYTES, SourceConfig
from ..tokenizers.interface import Tokenizer
from ..words import some_of
from .documents import Document

NOT_UTF8 = "not UTF-8"
"""The reason for dropping a document whose bytes are not UTF-8."""

LONE_SURROGATE = "not Unicode (lone surrogates)"
"""The reason for dropping a document with half a character, which JSON can spell and UTF-8 cannot."""

NOT_JSON = "not JSON"
"""The reason for dropping a line that is no JSON object."""

FAULTS = (NOT_UTF8, LONE_SURROGATE, NOT_JSON)

ORIGIN_FIELD = "source"
"""The field of a record's origin; records without it get the file's name."""

SHOWN_CHARS = 1000  # of a dropped document
# names of the field that holds the text in published corpora, the likeliest first
_USUAL_NAMES = ("text", "content", "contents", "raw_content", "body", "document", "passage", "code")


@dataclass(frozen=True)
class RecordRules:
    """Names the fields of a record, and whether to drop what is not Unicode or JSON."""

    fields: SourceConfig
    drop_faults: bool = False
    tokenizer: Tokenizer | None = None  # of token files

    @property
    def names(self) -> tuple[str, ...]:
        """Returns the fields that every record must have."""
        fields = self.fields
        texts = (fields.prompt_field, fields.answer_field) if fields.prompt_field else ()
        return (*(texts or (fields.text_field,)), *filter(None, (fields.id_field,)))

    def setting_of(self, name: str) -> str:
        """Returns the configuration key that names a field."""
        fields = self.fields
        settings = {
            fields.text_field: "text_field",
            fields.prompt_field: "prompt_field",
            fields.answer_field: "answer_field",
            fields.id_field: "id_field",
        }
        return settings[name]

    def advice(
        self,
        name: str,
        there: Collection[str],
        texts: Sequence[str],
        nested: Collection[str],
        noun: str = "fields",
    ) -> str:
        """Returns the fields that there are, and the whole key to type in place of `name`.

        `texts` are those that hold text, the likeliest first; `nested` are lists and objects.
        """
        setting = self.setting_of(name)
        usual = [*(one for one in _USUAL_NAMES if one in texts), *texts]
        meant = usual[0] if usual and setting == "text_field" else "FIELD"
        typed = shlex.quote(f"prepare.{setting}={meant}")
        if self.fields.name != DEFAULT_SOURCE:
            typed = f'{setting} = "{meant}" in the source {self.fields.name!r} of prepare.sources'
        typed = f"write {typed}"
        if nested and setting != "id_field":
            inside = "prepare.input=python:MODULE:FUNCTION reads text inside of "
            inside += f"{some_of(map(repr, nested))} with a function of yours (docs/data.md)"
            is_there = texts and (name.partition(".")[0] not in nested or usual[0] in _USUAL_NAMES)
            typed = f"{typed}, or {inside}" if is_there else inside
        return f"its {noun} are {some_of(map(repr, there), near=repr(name))}; {typed}"


def document_of(
    record: Mapping[str, object], row: int, rules: RecordRules, *, where: object, file_name: str
) -> Document:
    """Returns the document of a record.

    Args:
        record: its fields by name.
        row: its number in its split.
        rules: the fields to read.
        where: its place, whose `str` messages show.
        file_name: its origin, unless the record names one.

    Raises:
        InputError: a field is missing or has the wrong type.
    """
    fields = rules.fields
    prompt = _text(record, fields.prompt_field, rules, where) if fields.prompt_field else ""
    text = _text(record, fields.answer_field or fields.text_field, rules, where)
    record_id = _record_id(record, fields.id_field, rules, where) if fields.id_field else ""
    source = record.get(ORIGIN_FIELD)
    source = source if isinstance(source, str) and source else file_name
    document = Document(text, source, row, prompt=prompt, record_id=record_id)
    return checked(document, rules, where=where)


def checked(document: Document, rules: RecordRules, *, where: object) -> Document:
    """Returns a document, or a fault in its place if part of it is not valid Unicode.

    Raises:
        InputError: it is not, and `rules.drop_faults` is off.
    """
    texts = (document.prompt, document.text, document.record_id, document.source)
    if all(map(str.isascii, texts)):
        return document
    broken = next((text for text in texts if not _is_unicode(text)), None)
    if broken is None:
        return document
    if not rules.drop_faults:
        place = next(at for at, character in enumerate(broken) if "\ud800" <= character <= "\udfff")
        raise InputError(
            f"{where}: not Unicode (half a surrogate pair, \\u{ord(broken[place]):x}, at character "
            f"{place}): repair the record, or drop such documents with prepare.encoding_faults=drop"
        )
    beginning = document.whole[:SHOWN_CHARS].encode(errors="backslashreplace").decode()
    return Document(beginning, "", document.row, fault=LONE_SURROGATE)


def shown(data: bytes) -> str:
    """Returns the beginning of invalid UTF-8, with its faulty bytes escaped."""
    return data[:SHOWN_CHARS].decode("utf-8", errors="backslashreplace")


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _text(record: Mapping[str, object], name: str, rules: RecordRules, where: object) -> str:
    value = _value(record, name, rules, where)
    if value is None:  # a missing value is an empty document
        return ""
    if not isinstance(value, str):
        raise InputError(
            f"{where}: field {name!r} holds {a_kind(value)}, not text; "
            f"{_advice(record, name, rules)}"
        )
    return value


def _record_id(record: Mapping[str, object], name: str, rules: RecordRules, where: object) -> str:
    value = _value(record, name, rules, where)
    if isinstance(value, bool) or not isinstance(value, str | int) or value == "":
        given = "an empty text" if value == "" else a_kind(value)
        raise InputError(
            f"{where}: field {name!r} holds {given}, not an id (a text or a whole number): give every "
            "record an id, or set prepare.id_field to another field or to nothing"
        )
    found = str(value)
    if len(found.encode(errors="backslashreplace")) > MAX_LABEL_BYTES:  # a shard would keep it cut
        raise InputError(
            f"{where}: field {name!r} is longer than {MAX_LABEL_BYTES} bytes ({found[:40]!r}…), the "
            "limit of an id: set prepare.id_field to another field"
        )
    return found


def _value(record: Mapping[str, object], name: str, rules: RecordRules, where: object) -> object:
    if name not in record:
        raise InputError(f"{where}: no field {name!r}; {_advice(record, name, rules)}")
    return record[name]


def _advice(record: Mapping[str, object], name: str, rules: RecordRules) -> str:
    sizes = {key: len(value) for key, value in record.items() if isinstance(value, str)}
    nested = [key for key, value in record.items() if isinstance(value, list | dict)]
    return rules.advice(name, record, sorted(sizes, key=sizes.__getitem__, reverse=True), nested)
