"""The sections `train` and `evaluate` of a configuration: the loop, and what it measures."""

import math
import re
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeInt,
    PositiveInt,
    field_validator,
    model_validator,
)

from ...data_pipeline.data_config import MAY_CHANGE, OneOrMore
from ...model.config.model_config import Precision
from ...model.execution.depth_losses import DEPTH_LOSS
from ...model.execution.recompute import Recompute

_SECTION = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)
_SPAN = re.compile(r"([0-9]+\.?[0-9]*(?:e[+-]?[0-9]+)?) *(step|token)s?")
# Of an average: by default its share of the run's steps, its fewest updates, and what it may be.
_SPANS = {
    "ema": (0.02, 1, "a decay per update between 0 and 1, as 0.999, or a half-life with its unit"),
    "last": (0.1, 2, "a window with its unit"),
}


class TrainConfig(BaseModel):
    """Configures the training loop: its length, batch sizes, precision and reports."""

    model_config = _SECTION

    steps: Annotated[PositiveInt, MAY_CHANGE] = 1000
    """Optimizer steps of the whole run."""

    tokens: Annotated[PositiveInt | None, MAY_CHANGE] = Field(default=None, examples=["2e9"])
    """Tokens of the whole run, instead of `steps`, which follow, rounded up."""

    epochs: Annotated[float | None, MAY_CHANGE] = Field(
        default=None, gt=0, le=1_000_000, examples=[1.5]
    )
    """Passes over the training split of one source, instead of `steps`, which follow, rounded down,
    once the data is prepared.
    """

    global_batch: PositiveInt = 16
    """Sequences per optimizer step, over all ranks."""

    micro_batch: Annotated[PositiveInt, MAY_CHANGE] = 4
    """Sequences per forward pass of one rank."""

    precision: Precision = "float32"
    """Precision of the run. "bfloat16" applies to matrix products, while decisions, norms and
    weights stay float32. "bfloat16_only" applies to all weights, AdamW's moments and router logits;
    selection biases, temperatures and exit gates stay float32.
    """

    recompute: Annotated[Recompute, MAY_CHANGE] = "none"
    """Activations that the backward pass recomputes instead of keeping."""

    compile: bool = False
    """Compiles the dense parts of the model with torch.compile."""

    cuda_graph: Annotated[bool | Literal["auto"], MAY_CHANGE] = Field(
        default="auto", examples=[False]
    )
    """Replays each micro-batch's forward and backward pass as one CUDA graph; "auto" does so wherever
    the pass can be captured, and true is refused where it cannot.
    """

    device: Annotated[Literal["auto", "cpu", "cuda"], MAY_CHANGE] = "auto"
    """Where to train; "auto" takes a GPU if there is one."""

    seed: int = 0
    """Seeds the weights and every random choice of a step."""

    log_every: Annotated[PositiveInt, MAY_CHANGE] = 1
    """Steps between lines of metrics."""

    eval_every: Annotated[NonNegativeInt, MAY_CHANGE] = 0
    """Steps between evaluations; 0: only at the start and at the end."""

    eval_rows: Annotated[NonNegativeInt, MAY_CHANGE] = 0
    """Maximum number of validation rows per evaluation; 0: all."""

    eval_batch: Annotated[PositiveInt | None, MAY_CHANGE] = None
    """Validation rows per forward pass of one rank; none: `micro_batch`."""

    balance_documents: bool = False
    """Takes balancing losses over documents instead of sequences; needs document ids."""

    threads: Annotated[int, MAY_CHANGE] = Field(default=1, ge=0, le=4096)
    """CPU threads of one rank; 0: torch's default."""

    start_when: Annotated[PositiveInt | None, MAY_CHANGE] = Field(
        default=None, examples=[50_000_000]
    )
    """Starts the ranks once this many training tokens are sealed, and some of every source; prepares
    the rest meanwhile. None: prepares all data first.
    """

    timeout_s: Annotated[float, MAY_CHANGE] = Field(default=600.0, gt=0)
    """How long a collective may take."""

    sinks: Annotated[
        tuple[Literal["tensorboard", "wandb", "mlflow"], ...], OneOrMore, MAY_CHANGE
    ] = Field(default=("tensorboard",), examples=[["wandb"]])
    """Destinations of metrics beside metrics.jsonl (docs/metrics.md); keys and server addresses
    come from the environment.
    """

    losses: dict[Annotated[str, DEPTH_LOSS], float] = Field(
        default={}, examples=['{"my_losses:smooth" = 0.1}']
    )
    """Your own losses on the states of the depth steps, with their weights."""

    profile: Annotated[dict[NonNegativeInt, tuple[PositiveInt, ...]], MAY_CHANGE] = Field(
        default={}, examples=["{0 = [20, 21], 3 = [20]}"]
    )
    """Steps of which a rank's torch profiler writes traces into RUN/profile, for ui.perfetto.dev,
    by rank.
    """

    skip_spikes: Annotated[float | None, MAY_CHANGE] = Field(default=None, gt=0, examples=[8.0])
    """Skips the update of a step whose loss exceeds the median of the last 128 good steps by more
    than this many robust deviations, or whose gradient norm does by twice as many; none: off.
    """

    average: Annotated[Literal["ema", "last"] | None, MAY_CHANGE] = None
    """Keeps a float32 average of the weights beside them, for validation and `--weights average`: of
    all updates with an exponential decay, or of the last ones alone; none: no average.
    """

    average_decay: Annotated[float | str | None, MAY_CHANGE] = Field(
        default=None, examples=['"500 steps"']
    )
    """The decay per update of "ema" or its half-life with a unit, or the window of "last" with a unit;
    none: 2 % and 10 % of the run's steps.
    """

    def average_span(self, tokens_per_step: int) -> float:
        """Returns the decay per update of "ema", or the window of "last" in updates; 0 without one.

        Raises:
            ValueError: `average_decay` does not fit `average`.
        """
        given, kind = self.average_decay, self.average
        if kind is None and given is not None:
            raise ValueError(
                f"train.average_decay={given!r} without train.average, which alone reads it: set "
                "train.average=ema or last, or leave train.average_decay out"
            )
        if kind is None:
            return 0.0
        if kind == "ema" and isinstance(given, float) and 0 < given < 1:
            return given
        share, fewest, wanted = _SPANS[kind]
        match = _SPAN.fullmatch(str(given).strip().lower())
        updates = float(match[1]) if match else max(fewest, share * self.steps)
        if match and match[2] == "token":
            updates /= tokens_per_step
        if not fewest <= updates < math.inf or (given is not None and match is None):
            raise ValueError(
                f'train.average_decay={given!r} with train.average="{kind}": give {wanted}, as "500 steps" '
                f'or "1e8 tokens", and at least {fewest} × {tokens_per_step:,} tokens'
            )
        return 0.5 ** (1 / updates) if kind == "ema" else updates // 1

    @model_validator(mode="after")
    def _check_sinks(self) -> Self:
        if len(set(self.sinks)) < len(self.sinks):
            raise ValueError(f"train.sinks={list(self.sinks)} names a sink twice: name each once")
        return self


class EvaluateConfig(BaseModel):
    """Configures zero-shot scores of the model, and texts that it writes, while it trains."""

    model_config = _SECTION

    every: NonNegativeInt = 0
    """Steps between two times, and once more at the end; 0: never."""

    tasks: Annotated[tuple[str, ...], OneOrMore] = Field(
        default=(), examples=[["hellaswag", "piqa"]]
    )
    """Zero-shot tasks to score, as in `moebius eval --tasks`."""

    data: str = "hub"
    """The folder of the tasks' files; hub: their published sets."""

    items: PositiveInt = 200
    """Maximum number of items per task, spread evenly over its file."""

    prompts: Annotated[tuple[str, ...], OneOrMore] = Field(
        default=(), examples=[["Once upon a time"]]
    )
    """Texts to continue by 100 tokens, as `moebius eval --prompt` does."""

    @field_validator("data")
    @classmethod
    def _find_folder(cls, data: str) -> str:
        """Makes a folder absolute, because ranks run elsewhere."""
        return data if data == "hub" else str(Path(data).absolute())

    @model_validator(mode="after")
    def _check_parts(self) -> Self:
        if bool(self.every) != bool(self.tasks or self.prompts):
            raise ValueError(
                f"evaluate.every={self.every} with {len(self.tasks)} tasks and {len(self.prompts)} prompts: "
                "set evaluate.every=1000, for example, and name evaluate.tasks or evaluate.prompts, or "
                "turn it off: evaluate.every=0 evaluate.tasks=[] evaluate.prompts=[]"
            )
        return self
