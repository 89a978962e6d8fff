"""The section `data`: which prepared folder a run reads, in which order, and how.

What makes the folder is a section of its own (`prepare_config`). A folder knows its sources, its
tokenizer and its vocabulary, so a rank needs nothing of that section. Changing what stands here costs
no new shards: they hold whole documents, which are cut into rows on the way out.
"""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

FORMAT_VERSION = 3
"""The prepared folder's format. A change that old readers cannot follow raises it."""

SOURCE_NAME = r"^[a-z0-9][a-z0-9_-]{0,63}$"
"""The pattern of a source's name, which begins the names of its shards."""


def _listed(value: Any) -> Any:
    return (value,) if isinstance(value, str) else value


OneOrMore = BeforeValidator(_listed)
"""Lets a list of texts be given as a single text."""

SourceName = Annotated[str, Field(pattern=SOURCE_NAME)]


class Stage(BaseModel):
    """Sets the weights of the mixture from a position of the run on, counted in tokens."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    at_tokens: int = Field(ge=0, examples=[1_000_000])
    """Tokens that the run has read when the stage begins."""

    weights: dict[str, float] = Field(min_length=1, examples=[{"books": 1.0}])
    """Weights by source; a source that is not named gets no rows."""

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
    """Configures what a rank reads: a prepared folder, the order of its rows, and their form."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    directory: str = Field(default="", examples=["shards"])
    """The prepared folder; empty: one below `runs/data`, named after the hash of `prepare`."""

    seq_len: int = Field(default=256, ge=1)
    """Tokens that a row predicts; a row holds one more."""

    seed: int = Field(default=0, ge=0)
    """Seed of the order in which rows are read."""

    packing: Literal["concat", "best_fit"] = "concat"
    """How documents become rows: cut wherever a row is full, or fitted whole into rows."""

    document_attention: bool = False
    """Whether a token sees only its own document."""

    targets: Literal["next", "paired"] = "next"
    """What a token predicts: the next token; or, if documents alternate between inputs and labels
    ("a 1 b 2 …"), the label of an input. The model then reads only the inputs."""

    weights: dict[SourceName, Annotated[float, Field(gt=0.0, allow_inf_nan=False)]] = Field(
        default={}, examples=[{"books": 2.0, "web": 1.0}]
    )
    """Relative share of each source in the rows that are read; 1 if not given."""

    max_epochs: dict[SourceName, Annotated[int, Field(ge=0)]] = Field(
        default={}, examples=[{"books": 4}]
    )
    """Passes over a source after which the run ends; 0 or not given: no limit."""

    stages: tuple[Stage, ...] = Field(
        default=(), examples=[[{"at_tokens": 1_000_000, "weights": {"books": 1.0}}]]
    )
    """Later weights of the mixture; `weights` apply until the first stage."""

    when_corrupt: Literal["fail", "refetch", "skip"] = "fail"
    """What to do about a record batch that fails its checksum: end the run; read it again, also from
    `replicas`; or, if that fails too, replace its rows by others."""

    replicas: Annotated[tuple[str, ...], OneOrMore] = Field(
        default=(), examples=[["copies/shards"]]
    )
    """Copies of the folder from which damaged record batches are read."""

    max_skipped_batches: int = Field(default=10, ge=0)
    """Damaged record batches that a run may skip."""

    override_position: bool = False
    """Whether a run continues although its data or their order differ from its checkpoint's."""

    @model_validator(mode="after")
    def _check_stages(self) -> "DataConfig":
        starts = [stage.at_tokens for stage in self.stages]
        if starts != sorted(set(starts)):
            raise ValueError(f"stages begin at {starts} tokens: each must begin after the last")
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
    def mixture_names(self) -> set[str]:
        """Returns the sources that weights, limits and stages name."""
        return {*self.weights, *self.max_epochs}.union(*(stage.weights for stage in self.stages))

    @property
    def gives_document_ids(self) -> bool:
        """Returns whether batches tell documents and padding apart."""
        return self.document_attention or self.packing == "best_fit"
