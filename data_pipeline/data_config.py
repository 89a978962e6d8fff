"""The section `data`: which prepared folder a run reads, in which order, and how.

The section `prepare` (`prepare_config`) makes the folder, which records its sources, tokenizer and
vocabulary, so ranks need only `data`. Changing `data` never needs new shards: they hold whole
documents, which are cut into rows as they are read.
"""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

FORMAT_VERSION = 3
"""The prepared folder's format; a change that old readers cannot follow raises it."""

MAX_DOCUMENT_BYTES = 2**27
"""Longer documents are dropped, which bounds the memory of a record batch."""


def _listed(value: Any) -> Any:
    return (value,) if isinstance(value, str) else value


OneOrMore = BeforeValidator(_listed)
"""Accepts a single string for a list of strings."""

MAY_CHANGE = "a continued run may change it"
"""Marks the keys and sections that decide where a run computes, how long, and what it reports; all
others decide what it computes."""

SourceName = Annotated[str, Field(pattern="^[a-z0-9][a-z0-9_-]*$", max_length=64)]
"""A source's name, which is the prefix of its shards' names."""

_OLD_KEYS = {"when_corrupt", "max_skipped_batches"}


class Stage(BaseModel):
    """Sets the mixture's weights from a position of the run on, counted in tokens."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    at_tokens: int = Field(ge=0, examples=[1_000_000])
    """Tokens that the run has read when the stage begins."""

    weights: dict[str, float] = Field(min_length=1, examples=[{"books": 1.0}])
    """Weight of every source; 0: no rows."""

    @model_validator(mode="after")
    def _check_weights(self) -> "Stage":
        wrong = {name: value for name, value in self.weights.items() if not 0 <= value < 2.0**64}
        if wrong or not any(self.weights.values()):
            raise ValueError(
                f"the stage at {self.at_tokens} tokens has weights {self.weights}: each must be "
                "finite and at least 0, and one of them above 0"
            )
        return self


class DataConfig(BaseModel):
    """Configures what a rank reads: a prepared folder, and the order and form of its rows."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    directory: Annotated[str, MAY_CHANGE] = Field(default="", examples=["shards"])
    """The prepared folder; empty: a folder in `runs/data`, named after the hash of `prepare`."""

    dataset: str = Field(default="", examples=["train: 900 rows, 5f1c2a9e03b7d846"])
    """Sizes and digests of the rows that `moebius.fit(data=)` was given, which sets it."""

    seq_len: int = Field(default=256, ge=1)
    """Tokens that a row predicts; a row holds one more."""

    seed: int = Field(default=0, ge=0)
    """Seed of the order of rows."""

    packing: Literal["concat", "best_fit"] = "concat"
    """How documents become rows: cut where a row is full, or fitted whole into rows."""

    document_attention: bool = False
    """Whether a token attends only to its own document."""

    targets: Literal["next", "paired"] = "next"
    """What a token predicts: the next token; or, in documents that alternate inputs and labels
    ("a 1 b 2 …"), an input's label. The model then reads only the inputs."""

    weights: dict[SourceName, Annotated[float, Field(gt=0.0, allow_inf_nan=False)]] = Field(
        default={}, examples=[{"books": 2.0, "web": 1.0}]
    )
    """Relative share of every source in the rows; empty: all are equal."""

    max_epochs: dict[SourceName, Annotated[int, Field(ge=0)]] = Field(
        default={}, examples=[{"books": 4}]
    )
    """Passes over a source after which the run ends; 0, the default, means no limit."""

    stages: tuple[Stage, ...] = Field(
        default=(), examples=[[{"at_tokens": 1_000_000, "weights": {"books": 1.0}}]]
    )
    """Later weights of the mixture; `weights` apply until the first stage."""

    replicas: Annotated[tuple[str, ...], OneOrMore, MAY_CHANGE] = Field(
        default=(), examples=[["copies/shards"]]
    )
    """Copies of the folder, read if a record batch stays damaged after three tries."""

    override_position: Annotated[bool, MAY_CHANGE] = False
    """Whether to continue although the data or its order differs from the checkpoint's."""

    @model_validator(mode="after")
    def _check_stages(self) -> "DataConfig":
        starts = [stage.at_tokens for stage in self.stages]
        if starts != sorted(set(starts)):
            raise ValueError(f"stages begin at {starts} tokens: each must begin after the last")
        return self

    @model_validator(mode="before")
    @classmethod
    def _drop_old_keys(cls, values: Any) -> Any:
        """Accepts the saved configurations of runs that were begun with `when_corrupt`."""
        if not isinstance(values, dict):
            return values
        if values.get("when_corrupt") == "skip":
            raise ValueError(
                "data.when_corrupt=skip is gone, since it changed the data that a run sees: leave it "
                "out, and restore damaged shards or name copies of the folder in data.replicas"
            )
        return {key: value for key, value in values.items() if key not in _OLD_KEYS}

    @model_validator(mode="after")
    def _check_targets(self) -> "DataConfig":
        if self.targets == "paired" and self.seq_len % 2:
            raise ValueError(
                f"targets='paired' needs an even seq_len, for pairs of an input and its label, not "
                f"{self.seq_len}: set data.seq_len={self.seq_len + 1}"
            )
        return self

    @model_validator(mode="after")
    def _check_dataset(self) -> "DataConfig":
        keys = ("directory", "packing", "document_attention", "weights", "max_epochs", "stages")
        given = [key for key in keys if getattr(self, key) != type(self).model_fields[key].default]
        if self.dataset and given:
            raise ValueError(
                f"data.{given[0]}={getattr(self, given[0])!r} is for prepared folders, and the run reads "
                "rows of fit(data=): leave it out"
            )
        return self

    @property
    def mixture_names(self) -> set[str]:
        """Returns the sources that weights, limits and stages name."""
        return {*self.weights, *self.max_epochs}.union(*(stage.weights for stage in self.stages))

    @property
    def gives_document_ids(self) -> bool:
        """Returns whether batches tell documents and padding apart."""
        return self.document_attention or self.packing == "best_fit"
