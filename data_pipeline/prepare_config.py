"""The section `prepare`: which text becomes tokens, and how.

`PrepareConfig.spec_hash` identifies the bytes that `moebius prepare` writes; a folder of another
specification is refused. This module stays apart from `make/`, because every command reads a
configuration but few need numpy or Arrow.
"""

import hashlib
import json
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    field_validator,
    model_validator,
)

from ..plugins import is_own
from .data_config import FORMAT_VERSION, OneOrMore, SourceName
from .words import some_of

if TYPE_CHECKING:
    from .manifest import Header

NUM_BYTE_IDS = 257  # 256 bytes and the end of a document
MAX_LABEL_BYTES = 1024
"""The most bytes of a document's origin and of its id; longer origins are cut."""

DEFAULT_SOURCE = "text"
"""The name of the only source, if a configuration gives `input` instead of `sources`."""

OWN_TEXTS = "texts"
"""The folder that recipes for your own text read, unless you name other input."""

TOKENS = "tokens:"
"""The prefix of input that is the ids of an existing tokenizer (`sources/tokens.py`)."""

Name = Annotated[str, Field(min_length=1)]
"""A file, folder, glob, URL or function; an empty name would be the working folder."""


class RecordFields(BaseModel):
    """Names the fields of a source's records."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    text_field: str = Field(default="text", min_length=1)
    """The field that holds a record's text."""

    id_field: str = Field(default="", examples=["id"])
    """The field of a record's id, which is stored beside its tokens; empty: no ids."""

    prompt_field: str = Field(default="", examples=["question"])
    """The field of a prompt; with `answer_field`, only the answer's tokens are learned."""

    answer_field: str = Field(default="", examples=["answer"])
    """The field of the answer to the prompt."""

    @model_validator(mode="after")
    def _check_prompt_and_answer(self) -> Self:
        prompt, answer = self.prompt_field, self.answer_field
        if bool(prompt) != bool(answer) or (prompt and prompt == answer):
            owner = "prepare." if isinstance(self, PrepareConfig) else "the source's "
            raise ValueError(
                f"prompt_field={prompt!r} and answer_field={answer!r} belong together: set both, to "
                f"different fields, or set {owner}text_field instead"
            )
        return self


class SourceConfig(RecordFields):
    """Names one source of text and the fields of its records."""

    name: SourceName = Field(examples=["books"])
    """The source's name, the prefix of its shards' names."""

    input: Annotated[tuple[Name, ...], OneOrMore] = Field(min_length=1, examples=[["books/*.txt"]])
    """Files, folders, globs, URLs or functions, as in `prepare.input`."""

    validation_input: Annotated[tuple[Name, ...], OneOrMore] = Field(
        default=(), examples=[["held_out.txt"]]
    )
    """Text to validate on; empty: a share of `input`."""

    licence: str = Field(default="", max_length=200, examples=["CC0-1.0"])
    """The licence of the text, e.g. an SPDX name; for information only."""

    @property
    def has_loss_mask(self) -> bool:
        """Returns whether some tokens of this source are not learned."""
        return bool(self.prompt_field)


class DecontaminateConfig(BaseModel):
    """Names evaluation sets whose text must not occur in training documents."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    evaluation_sets: Annotated[tuple[str, ...], OneOrMore] = Field(
        min_length=1, examples=[["test.jsonl"]]
    )
    """Local .jsonl and .jsonl.zst files, one item per line."""

    fields: Annotated[tuple[str, ...], OneOrMore] = Field(default=(), examples=[["question"]])
    """The fields of an item's text; empty: every string in its record."""

    ngram_words: int = Field(default=13, ge=2, le=1024)
    """Consecutive words that a document must share with an item to be dropped."""


_REPEATED_IN_SOURCES = {"input", "validation_input", *RecordFields.model_fields}


# Keys in the headers of 0.2, with the value that means what is always done now.
_OLD_KEYS = {"tokenizer_sample_bytes": 2**25, "source_field": "source"}


def _without_old_keys(spec: dict[str, Any]) -> dict[str, Any]:
    """Returns the specification of a folder, of 0.2 too, with the keys of today."""

    def kept(section: dict[str, Any]) -> dict[str, Any]:
        return {key: value for key, value in section.items() if _OLD_KEYS.get(key, ...) != value}

    return kept(spec) | {"sources": [kept(source) for source in spec.get("sources", ())]}


class PrepareConfig(RecordFields):
    """Configures how a folder is prepared: sources, tokenizer, and what is dropped.

    Give several kinds of text as `sources`; `input` is short for one source named "text".
    """

    input: Annotated[tuple[Name, ...], OneOrMore] = Field(
        default=("embedded",), examples=[["texts/*.txt"]]
    )
    """Files, folders, globs and fsspec URLs of .txt, .md, .jsonl, .json (also .gz, .zst), .parquet and
    .arrow; python:package.module:function for your own records; tokens:FILE for ids of `tokenizer`; or
    "embedded", the English prose that comes with every Python."""

    validation_input: Annotated[tuple[Name, ...], OneOrMore] = Field(
        default=(), examples=[["held_out.txt"]]
    )
    """Text to validate on; empty: `validation_fraction` of `input`."""

    validation_fraction: float = Field(default=0.01, ge=0.0, lt=1.0)
    """Share of the documents to hold out, by their hash; not used with `validation_input`."""

    sources: tuple[SourceConfig, ...] = Field(
        default=(), examples=[[{"name": "books", "input": ["books/*.txt"]}]]
    )
    """Several sources instead of `input`, each with its own fields."""

    format: Literal["", "txt", "jsonl", "parquet", "arrow"] = Field(default="", examples=["jsonl"])
    """What all files hold, whatever their names end in; empty: by the suffixes of their names."""

    tokenizer: str = Field(default="bpe", examples=["bytes"])
    """"bpe" (trained on the text), "bytes", or an existing one: a .json or .model file, its folder,
    hf://owner/name, or python:package.module:function, which returns words, each a token."""

    end_of_document: str = Field(default="", examples=["<|endoftext|>"])
    """The special token of an existing tokenizer that ends a document; empty: its own end token."""

    chat_template: bool = True
    """Whether prompts and answers go through the chat template of an existing tokenizer, if it has one."""

    vocab_size: int = Field(default=8000, ge=1, le=2**24)
    """Vocabulary size for BPE training; the most ids that an existing tokenizer may have."""

    batch_tokens: int = Field(default=128 * 1024, ge=1, le=2**24)
    """Tokens per record batch; larger batches do not compress better."""

    split_bytes: int = Field(default=64 * 2**20, ge=1)
    """Size above which a .txt, .jsonl or .parquet file is split between workers."""

    segment_tokens: int = Field(default=2**28, ge=1)
    """Training tokens per segment, the unit of sealing and shuffling."""

    encoding_faults: Literal["error", "drop"] | Annotated[int, Field(ge=0)] = "error"
    """What to do with text that is not valid Unicode and lines that are not JSON: end with an error,
    drop the document, or drop at most this many."""

    filters: Annotated[tuple[str, ...], OneOrMore] = Field(
        default=(), examples=[["my_filters:too_short"]]
    )
    """Functions (package.module:function) that take a document's text and return None to keep it, or
    the reason to drop it."""

    decontaminate: DecontaminateConfig | None = Field(
        default=None, examples=[{"evaluation_sets": ["test.jsonl"]}]
    )
    """Drops documents that share text with evaluation sets."""

    shuffle_documents: bool = False
    """Whether to spread each source's documents over all its shards, in a second pass."""

    @field_validator("filters")
    @classmethod
    def _check_filters(cls, filters: tuple[str, ...]) -> tuple[str, ...]:
        for path in filters:
            if not is_own(path):
                raise ValueError(
                    f"{path!r} is not a function: write package.module:function, for example "
                    "my_filters:too_short"
                )
        return filters

    @model_validator(mode="before")
    @classmethod
    def _fill_in(cls, values: Any) -> Any:
        """Sets the vocabulary size of raw bytes, and no `input` beside `sources`."""
        if not isinstance(values, dict):
            return values
        if values.get("tokenizer") == "bytes":
            values = {"vocab_size": NUM_BYTE_IDS} | values
        if values.get("sources"):
            values = {"input": ()} | values
        return values

    @model_validator(mode="after")
    def _check_vocab_size(self) -> Self:
        if self.tokenizer == "bytes" and self.vocab_size != NUM_BYTE_IDS:
            raise ValueError(
                f"tokenizer='bytes' has {NUM_BYTE_IDS} ids (256 bytes and the end of a document), not "
                f"vocab_size={self.vocab_size}: set vocab_size={NUM_BYTE_IDS} (prepare.vocab_size), or "
                "prepare.tokenizer=bpe"
            )
        if self.tokenizer == "bpe" and self.vocab_size < NUM_BYTE_IDS:
            raise ValueError(
                f"vocab_size={self.vocab_size} is too small for tokenizer='bpe', which has a token for "
                f"each of the 256 bytes and the end of a document: set it to at least {NUM_BYTE_IDS}"
            )
        return self

    @model_validator(mode="after")
    def _check_tokenizer(self) -> Self:
        if not self.loads_tokenizer:
            if self.end_of_document:
                raise ValueError(
                    f"end_of_document={self.end_of_document!r} is only for existing tokenizers; "
                    f"tokenizer={self.tokenizer!r} has its own: leave it out"
                )
        elif not (
            "/" in self.tokenizer or "." in self.tokenizer or self.tokenizer.startswith("python:")
        ):
            raise ValueError(
                f"tokenizer={self.tokenizer!r} is unknown: give 'bpe', 'bytes', a .json or .model "
                "file, a folder (with a slash in its name, such as ./mine), hf://owner/name, or "
                "python:package.module:function"
            )
        return self

    @model_validator(mode="after")
    def _check_sources(self) -> Self:
        if bool(self.input) == bool(self.sources):
            named = some_of(map(repr, self.input)) if self.input else ""
            raise ValueError(
                f"input=[{named}] and {len(self.sources)} sources: give one of the two (with "
                "sources, set input=[])"
            )
        if self.sources and self.validation_input:
            raise ValueError(
                f"validation_input=[{some_of(map(repr, self.validation_input))}] beside sources: move it into the "
                "source that it belongs to"
            )
        fields = RecordFields.model_fields
        given = [name for name, field in fields.items() if getattr(self, name) != field.default]
        if self.sources and given:
            raise ValueError(
                f"{', '.join(given)} beside sources: move it into the source that it belongs to"
            )
        names = [source.name for source in self.sources]
        if repeated := [name for name in names if names.count(name) > 1]:
            raise ValueError(f"several sources are named {repeated[0]!r}: give each its own name")
        return self

    @model_validator(mode="after")
    def _check_token_files(self) -> Self:
        inputs = (name for one in self.all_sources for name in one.input + one.validation_input)
        if self.tokenizer == "bpe" and (found := [one for one in inputs if one.startswith(TOKENS)]):
            raise ValueError(
                f"input {found[0]!r} holds the ids of a tokenizer, and tokenizer='bpe' would train "
                "another one: name the one that made the file, tokenizer=NAME (--tokenizer): a .json "
                "or .model file, its folder, or hf://owner/name"
            )
        return self

    @classmethod
    def of_folder(cls, header: "Header") -> Self | None:
        """Returns a prepared folder's configuration; None if its header does not record all of it."""
        licences = {source.name: source.licence for source in header.sources}
        values = {"vocab_size": header.tokenizer.vocab_size} | _without_old_keys(header.spec)
        if licences == {DEFAULT_SOURCE: ""}:
            for source in values.pop("sources", ()):
                values |= {key: value for key, value in source.items() if key != "name"}
        else:
            values["sources"] = [
                source | {"licence": licences.get(source["name"], "")}
                for source in values.get("sources", ())
            ]
        for chat_template in (True, False):  # recorded only where it was used
            try:
                found = cls.model_validate({"chat_template": chat_template} | values)
            except ValidationError:
                return None
            if found.describes(header):
                return found
        return None

    def describes(self, header: "Header") -> bool:
        """Returns whether this configuration would prepare a folder's bytes."""
        if header.spec_hash == self.spec_hash:
            return True
        return _without_old_keys(header.spec) == self.spec

    @property
    def all_sources(self) -> tuple[SourceConfig, ...]:
        """Returns `sources`, or the one source that `input` is short for."""
        if self.sources:
            return self.sources
        fields = {name: getattr(self, name) for name in RecordFields.model_fields}
        one = SourceConfig(
            name=DEFAULT_SOURCE,
            input=self.input,
            validation_input=self.validation_input,
            **fields,
        )
        return (one,)

    @property
    def loads_tokenizer(self) -> bool:
        """Returns whether `tokenizer` names an existing tokenizer instead of a kind."""
        return self.tokenizer not in ("bpe", "bytes")

    @property
    def uses_chat_template(self) -> bool:
        """Returns whether prompts go through the tokenizer's chat template, if it has one."""
        has_prompts = any(source.has_loss_mask for source in self.all_sources)
        return self.chat_template and self.loads_tokenizer and has_prompts

    @property
    def num_token_ids(self) -> int:
        """Returns an upper bound of the vocabulary, for models built before the tokenizer exists."""
        return NUM_BYTE_IDS if self.tokenizer == "bytes" else self.vocab_size

    @property
    def spec(self) -> dict[str, Any]:
        """Returns exactly the settings that determine the prepared bytes.

        `input` and the equivalent entry of `sources` give the same result.
        """
        spec = self.model_dump(mode="json", exclude={*_REPEATED_IN_SOURCES, "sources"})
        if self.encoding_faults != "error":
            spec["encoding_faults"] = "drop"  # a limit ends a preparation, but changes no bytes
        if not self.uses_chat_template:
            del spec["chat_template"]
        if not self.format:
            del spec["format"]  # folders that are older than the key remain valid
        spec["sources"] = [
            source.model_dump(mode="json", exclude={"licence"}) for source in self.all_sources
        ]
        if self.tokenizer != "bpe":
            del spec["vocab_size"]
        if all(source.validation_input for source in self.all_sources):
            del spec["validation_fraction"]
        return spec

    @property
    def spec_hash(self) -> str:
        """Returns the hex sha256 of `spec` and the file format's version."""
        versioned = self.spec | {"format_version": FORMAT_VERSION}
        return hashlib.sha256(json.dumps(versioned, sort_keys=True).encode()).hexdigest()
