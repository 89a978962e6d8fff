"""What text a run reads and how it becomes tokens.

Two hashes keep apart what must not be mixed: `DataConfig.spec_hash` (here) names the bytes that
`prepare` writes; `Loader.spec_hash` names the order in which a run reads them and adds `seq_len`
and `seed`. Changing the latter two costs nothing: the shards hold whole documents and are cut into
rows on the way out.
"""

import hashlib
import json
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

FORMAT_VERSION = 1
"""The prepared folder's format. What old readers cannot read raises it, and every spec hash."""

NUM_BYTE_IDS = 257  # 256 bytes and the end of a document
_NOT_IN_THE_BYTES = {"directory", "seq_len", "seed"}


class DataConfig(BaseModel):
    """Names input, tokenizer and order of one data set.

    `input` and `validation_input` take file names, globs and fsspec URLs of .txt, .jsonl,
    .jsonl.zst and .parquet, and the word "embedded" for the English prose that every Python
    carries. With an empty `validation_input`, documents whose hash falls below
    `validation_fraction` are held out of `input`.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    input: tuple[str, ...] = Field(default=("embedded",), min_length=1)
    validation_input: tuple[str, ...] = ()
    validation_fraction: float = Field(default=0.01, ge=0.0, lt=1.0)
    text_field: str = Field(default="text", min_length=1)
    # a record's own name for where it comes from; the file's name where it has none
    source_field: str = "source"
    tokenizer: Literal["bpe", "bytes"] = "bpe"
    # what BPE training aims at; a small corpus may yield fewer
    vocab_size: int = Field(default=8000, ge=NUM_BYTE_IDS)
    # text that BPE is trained on: 32 MiB take about 20 s
    tokenizer_sample_bytes: int = Field(default=32 * 2**20, ge=1)
    # tokens per record batch: zstd's ratio stops growing here
    batch_tokens: int = Field(default=128 * 1024, ge=1)
    # a larger .txt, .jsonl or .parquet becomes several input splits
    split_bytes: int = Field(default=64 * 2**20, ge=1)
    seq_len: int = Field(default=256, ge=1)
    seed: int = Field(default=0, ge=0)
    directory: str = ""  # where the shards are; empty: the caller decides

    @model_validator(mode="before")
    @classmethod
    def _know_the_bytes(cls, values: Any) -> Any:
        """Sets the vocabulary of the raw bytes, so that it need not be given."""
        if isinstance(values, dict) and values.get("tokenizer") == "bytes":
            return {"vocab_size": NUM_BYTE_IDS} | values
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

    @property
    def num_token_ids(self) -> int:
        """Returns an upper bound of the vocabulary.

        It is what an embedding needs before the tokenizer exists.
        """
        return NUM_BYTE_IDS if self.tokenizer == "bytes" else self.vocab_size

    @property
    def spec(self) -> dict[str, Any]:
        """Returns all that decides the prepared bytes, and nothing else.

        It is equal for another directory, seq_len or seed.
        """
        spec = self.model_dump(mode="json", exclude=_NOT_IN_THE_BYTES)
        if self.tokenizer == "bytes":
            del spec["vocab_size"], spec["tokenizer_sample_bytes"]
        if self.validation_input:
            del spec["validation_fraction"]
        return spec

    @property
    def spec_hash(self) -> str:
        """Returns the hex sha256 of `spec` and the format of the files."""
        versioned = self.spec | {"format_version": FORMAT_VERSION}
        return hashlib.sha256(json.dumps(versioned, sort_keys=True).encode()).hexdigest()
