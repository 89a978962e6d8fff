"""What text a run reads, how it becomes tokens, and in which mixture the tokens come.

Two hashes keep apart what must not be mixed: `DataConfig.spec_hash` (here) names the bytes that
`prepare` writes; that of a loader's position names the order in which a run reads them and adds
`seq_len`, `seed` and the mixture. Changing the latter costs nothing: the shards hold whole documents and are
cut into rows on the way out.
"""

import hashlib
import json
from collections.abc import Iterable
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from .prepare_config import DecontaminateConfig, FilterConfig, LanguageConfig, NearDuplicateConfig

FORMAT_VERSION = 2
"""The prepared folder's format. What old readers cannot read raises it, and every spec hash."""

NUM_BYTE_IDS = 257  # 256 bytes and the end of a document
SOURCE_NAME = r"^[a-z0-9][a-z0-9_-]{0,63}$"
"""What a source may be called: its name is the beginning of the names of its shards."""

DEFAULT_SOURCE = "text"
"""The name of the one source of a configuration that gives `input` instead of `sources`."""

_FIELDS = ("text_field", "source_field", "id_field", "prompt_field", "answer_field")
_NOT_IN_THE_BYTES = {
    *("directory", "seq_len", "seed"),  # where they are and in which order they are read
    *("stages", "packing", "document_attention", "targets"),
    *("when_corrupt", "replicas", "max_skipped_batches", "override_position"),
    *("server", "server_bytes"),
    *("input", "validation_input", "sources", *_FIELDS),  # see `spec`
}
_NOT_IN_A_SOURCES_BYTES = {"weight", "licence", "max_epochs"}


class SourceConfig(BaseModel):
    """Names one source of text, what its records look like, and its share of the mixture."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str = Field(pattern=SOURCE_NAME)
    input: tuple[str, ...] = Field(min_length=1)
    validation_input: tuple[str, ...] = ()
    text_field: str = Field(default="text", min_length=1)
    # a record's own name for where it comes from; the file's name where it has none
    source_field: str = "source"
    # a record's own name for itself, kept beside its tokens; "": it has none
    id_field: str = ""
    # with both set, a record is a prompt and its answer, and only the answer's tokens are learned
    prompt_field: str = ""
    answer_field: str = ""
    # rows of this source among the rows of all, relative to the other sources' weights
    weight: float = Field(default=1.0, gt=0.0, allow_inf_nan=False)
    licence: str = Field(default="", max_length=200)  # as people read it, e.g. an SPDX name
    max_epochs: int = Field(default=0, ge=0)  # passes over the source; 0: as many as a run takes

    @model_validator(mode="after")
    def _check_prompt_and_answer(self) -> "SourceConfig":
        _check_pair(self.prompt_field, self.answer_field, who=f"source {self.name!r}: ")
        return self

    @property
    def has_loss_mask(self) -> bool:
        """Returns whether some tokens of this source are read and not learned."""
        return bool(self.prompt_field)


class Stage(BaseModel):
    """Sets the weights of the mixture from a position of the run on, counted in tokens."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    at_tokens: int = Field(ge=0)
    weights: dict[str, float] = Field(min_length=1)

    @model_validator(mode="after")
    def _check_weights(self) -> "Stage":
        wrong = {name: value for name, value in self.weights.items() if not 0 <= value < 2.0**64}
        if wrong or not any(self.weights.values()):
            raise ValueError(
                f"the stage at {self.at_tokens} tokens has weights {self.weights}: each must be at "
                "least 0 and finite, and one of them above 0"
            )
        return self


class DataConfig(BaseModel):
    """Names sources, tokenizer and order of one data set.

    `input` and `validation_input` take file names, folders, globs and fsspec URLs of .txt and .jsonl
    (also .gz and .zst), .parquet and .arrow, python:package.module:function for records of your own
    function, and the word "embedded" for the English prose that every Python carries. With an empty
    `validation_input`, documents whose hash falls below `validation_fraction` are held out of
    `input`. Text of several kinds is given as `sources` instead; `input` is short for the one source
    "text".
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    input: tuple[str, ...] = ("embedded",)
    validation_input: tuple[str, ...] = ()
    validation_fraction: float = Field(default=0.01, ge=0.0, lt=1.0)
    text_field: str = Field(default="text", min_length=1)
    # a record's own name for where it comes from; the file's name where it has none
    source_field: str = "source"
    # a record's own name; of its prompt and its answer: see `SourceConfig`
    id_field: str = ""
    prompt_field: str = ""
    answer_field: str = ""
    sources: tuple[SourceConfig, ...] = ()
    # the mixture from a position on: until the first stage the sources' own weights hold
    stages: tuple[Stage, ...] = ()
    # "bpe" (trained on the text), "bytes", or one that exists: a .json or .model file, its folder,
    # hf://owner/name of the hub (`tokenizers/hub.py`), or python:package.module:function that gives
    # words, each of which is a token (`tokenizers/words.py`)
    tokenizer: str = "bpe"
    # which special token ends a document, of a tokenizer that exists; "": the one it names itself
    end_of_document: str = ""
    # what BPE training aims at (a small corpus may yield fewer), or the most ids that one that
    # exists may have
    vocab_size: int = Field(default=8000, ge=NUM_BYTE_IDS, le=2**24)
    # text that BPE is trained on: 32 MiB take about 20 s
    tokenizer_sample_bytes: int = Field(default=32 * 2**20, ge=1)
    # tokens per record batch: zstd's ratio stops growing here
    batch_tokens: int = Field(default=128 * 1024, ge=1, le=2**24)
    # a larger .txt, .jsonl or .parquet becomes several input splits
    split_bytes: int = Field(default=64 * 2**20, ge=1)
    # tokens of an era: what is sealed, read and shuffled as one; a run can start at the first
    era_tokens: int = Field(default=2**28, ge=1)
    # what is done with text that is not valid in its encoding
    encoding_faults: Literal["error", "drop"] = "error"
    # documents that are left out: none of them unless it is asked for
    filters: FilterConfig = FilterConfig()
    language: LanguageConfig | None = None
    decontaminate: DecontaminateConfig | None = None
    near_duplicates: NearDuplicateConfig | None = None
    # spread the documents of a source over all its shards, instead of keeping the files' order
    shuffle_documents: bool = False
    # how documents become rows: cut wherever a row is full, or fitted whole into rows
    packing: Literal["concat", "best_fit"] = "concat"
    document_attention: bool = False  # no token sees another document's
    # what is predicted at a token: the next one; or, of documents that are pairs of an input and its
    # label ("a 1 b 2 …"), the label, and only the inputs are read
    targets: Literal["next", "paired"] = "next"
    # a record batch fails its checksum: end; read it again and from `replicas`; or then pass over
    # its rows, of so many batches at most (corruption.py)
    when_corrupt: Literal["fail", "refetch", "skip"] = "fail"
    replicas: tuple[str, ...] = ()
    max_skipped_batches: int = Field(default=10, ge=0)
    # continue a run although its data or their order are not those of its checkpoint
    override_position: bool = False
    # one process per node decodes for all its ranks (serving/); auto: where a node has four ranks or
    # more, and the data is more than two windows of the order
    server: Literal["auto", "on", "off"] = "auto"
    # memory of a node that the decoded chunks take at most
    server_bytes: int = Field(default=512 * 2**20, ge=1)
    seq_len: int = Field(default=256, ge=1)
    seed: int = Field(default=0, ge=0)
    directory: str = ""  # where the shards are; empty: the caller decides

    @model_validator(mode="before")
    @classmethod
    def _fill_in(cls, values: Any) -> Any:
        """Sets what need not be given: the raw bytes' vocabulary, no `input` beside `sources`."""
        if not isinstance(values, dict):
            return values
        if values.get("tokenizer") == "bytes":
            values = {"vocab_size": NUM_BYTE_IDS} | values
        if values.get("sources"):
            values = {"input": ()} | values
        return values

    @model_validator(mode="after")
    def _check_vocab_size(self) -> "DataConfig":
        if self.tokenizer == "bytes" and self.vocab_size != NUM_BYTE_IDS:
            raise ValueError(
                f"tokenizer='bytes' always has {NUM_BYTE_IDS} ids (256 bytes and the end of a "
                "document), but "
                f"vocab_size={self.vocab_size} was given: set vocab_size={NUM_BYTE_IDS}, or choose "
                "tokenizer='bpe'"
            )
        return self

    @model_validator(mode="after")
    def _check_tokenizer(self) -> "DataConfig":
        if not self.loads_tokenizer:
            if self.end_of_document:
                raise ValueError(
                    f"end_of_document={self.end_of_document!r} is for a tokenizer that exists; "
                    f"tokenizer={self.tokenizer!r} has its own: leave it out"
                )
        elif not (
            "/" in self.tokenizer
            or self.tokenizer.endswith((".json", ".model"))
            or self.tokenizer.startswith("python:")
        ):
            raise ValueError(
                f"tokenizer={self.tokenizer!r}: it is 'bpe', 'bytes', a .json or .model file, a "
                "folder (with a slash in its name, such as ./mine), hf://owner/name, or "
                "python:package.module:function for the words of a function"
            )
        return self

    @model_validator(mode="after")
    def _check_prompt_and_answer(self) -> "DataConfig":
        _check_pair(self.prompt_field, self.answer_field)
        return self

    @model_validator(mode="after")
    def _check_sources(self) -> "DataConfig":
        if bool(self.input) == bool(self.sources):
            given = f"input={list(self.input)} and {len(self.sources)} sources"
            raise ValueError(
                f"{given} were given: name the text by one of the two (with sources, set input=[])"
            )
        if self.sources and self.validation_input:
            raise ValueError(
                f"validation_input={list(self.validation_input)} beside sources: give it to the "
                "source that it belongs to"
            )
        defaults = type(self).model_fields
        given = [name for name in _FIELDS if getattr(self, name) != defaults[name].default]
        if self.sources and given:
            raise ValueError(
                f"{', '.join(given)} beside sources: give it to the source that it belongs to"
            )
        if repeated := _repeated(source.name for source in self.sources):
            raise ValueError(f"several sources are named {repeated!r}: give each its own name")
        return self

    @model_validator(mode="after")
    def _check_stages(self) -> "DataConfig":
        starts = [stage.at_tokens for stage in self.stages]
        if starts != sorted(set(starts)):
            raise ValueError(f"stages begin at {starts} tokens: each must begin after the last")
        names = {source.name for source in self.all_sources}
        for stage in self.stages:
            if unknown := sorted(stage.weights.keys() - names):
                raise ValueError(
                    f"the stage at {stage.at_tokens} tokens weighs {', '.join(unknown)}: the "
                    f"sources are {', '.join(sorted(names))}"
                )
        return self

    @model_validator(mode="after")
    def _check_targets(self) -> "DataConfig":
        if self.targets == "paired" and self.seq_len % 2:
            raise ValueError(
                f"targets='paired' with seq_len={self.seq_len}: rows are pairs of an input and its "
                f"label, so the length is even; set seq_len={self.seq_len + 1}"
            )
        return self

    @property
    def all_sources(self) -> tuple[SourceConfig, ...]:
        """Returns the sources: `sources`, or the one source that `input` is short for."""
        if self.sources:
            return self.sources
        one = SourceConfig(
            name=DEFAULT_SOURCE,
            input=self.input,
            validation_input=self.validation_input,
            text_field=self.text_field,
            source_field=self.source_field,
            id_field=self.id_field,
            prompt_field=self.prompt_field,
            answer_field=self.answer_field,
        )
        return (one,)

    @property
    def loads_tokenizer(self) -> bool:
        """Returns whether `tokenizer` names one that exists, instead of a kind."""
        return self.tokenizer not in ("bpe", "bytes")

    @property
    def gives_document_ids(self) -> bool:
        """Returns whether batches say which documents their rows are of, and what is padding."""
        return self.document_attention or self.packing == "best_fit"

    @property
    def num_token_ids(self) -> int:
        """Returns an upper bound of the vocabulary.

        It is what an embedding needs before the tokenizer exists.
        """
        return NUM_BYTE_IDS if self.tokenizer == "bytes" else self.vocab_size

    @property
    def spec(self) -> dict[str, Any]:
        """Returns all that decides the prepared bytes, and nothing else.

        It is equal for another directory, seed or mixture, and for `input` and the same written as
        one of `sources`.
        """
        spec = self.model_dump(mode="json", exclude=_NOT_IN_THE_BYTES)
        spec["sources"] = [
            source.model_dump(mode="json", exclude=_NOT_IN_A_SOURCES_BYTES)
            for source in self.all_sources
        ]
        if self.tokenizer != "bpe":
            del spec["vocab_size"], spec["tokenizer_sample_bytes"]
        if all(source.validation_input for source in self.all_sources):
            del spec["validation_fraction"]
        return spec

    @property
    def spec_hash(self) -> str:
        """Returns the hex sha256 of `spec` and the format of the files."""
        versioned = self.spec | {"format_version": FORMAT_VERSION}
        return hashlib.sha256(json.dumps(versioned, sort_keys=True).encode()).hexdigest()


def _check_pair(prompt_field: str, answer_field: str, *, who: str = "") -> None:
    if bool(prompt_field) != bool(answer_field) or (prompt_field and prompt_field == answer_field):
        raise ValueError(
            f"{who}prompt_field={prompt_field!r} and answer_field={answer_field!r} belong together: "
            "give two fields, or neither and text_field"
        )


def _repeated(names: Iterable[str]) -> str | None:
    seen: set[str] = set()
    for name in names:
        if name in seen:
            return name
        seen.add(name)
    return None
