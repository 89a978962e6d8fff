"""The section `train` of a configuration: the loop's length, batches, precision and reports."""

from typing import Annotated, Literal, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeInt,
    PositiveInt,
    model_validator,
)

from ...data_pipeline.data_config import OneOrMore
from ...distributed.checkpoint.checkpoint_folder import CheckpointConfig
from ...model.config.model_config import Precision
from ...model.execution.depth_losses import DEPTH_LOSS
from ...model.execution.recompute import Recompute
from .start_when import StartWhen

_SECTION = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class SpikeConfig(BaseModel):
    """Configures which steps count as spikes, and how a run reacts (docs/train.md)."""

    model_config = _SECTION

    action: Literal["off", "skip", "rollback"] = "off"
    """The reaction to spikes: "skip" skips the update; "rollback" also returns to an earlier
    checkpoint after several spikes, and skips the samples since then.
    """

    window: int = Field(default=128, ge=4)
    """Number of good steps that a step is compared with; judging needs half of them."""

    warmup_steps: NonNegativeInt = 100
    """First steps of a run, which are never judged."""

    loss_deviations: float = Field(default=8.0, gt=0)
    """A spike's loss exceeds the window's median by more than this many robust deviations."""

    grad_norm_deviations: float = Field(default=16.0, gt=0)
    """The same limit for the gradient norm."""

    rollback_after: PositiveInt = 3
    """Number of spikes within `rollback_within` steps that causes a rollback."""

    rollback_within: PositiveInt = 20
    """Number of steps in which spikes count together."""

    rollback_steps: PositiveInt = 100
    """Minimum number of steps that a rollback goes back before the first spike."""

    def check_checkpoints(self, checkpoint: CheckpointConfig) -> None:
        """Checks that a run that may roll back keeps an old enough checkpoint.

        Raises:
            ValueError: no checkpoint would be old enough.
        """
        if self.action != "rollback":
            return
        if self.rollback_after > self.rollback_within:
            raise ValueError(
                f"train.spikes.rollback_after={self.rollback_after} spikes cannot happen within "
                f"train.spikes.rollback_within={self.rollback_within} steps: lower it"
            )
        reach = self.rollback_within + self.rollback_steps - 1
        kept = (checkpoint.keep_last - 1) * checkpoint.every
        if kept < reach:
            raise ValueError(
                f"train.spikes.action='rollback' needs a checkpoint {reach} steps old "
                f"(train.spikes.rollback_within={self.rollback_within} + "
                f"rollback_steps={self.rollback_steps} − 1), but "
                f"checkpoint.every={checkpoint.every} with "
                f"checkpoint.keep_last={checkpoint.keep_last} reaches back only {kept}: keep more "
                "checkpoints, or roll back less far"
            )


class TrainConfig(BaseModel):
    """Configures the training loop: its length, batch sizes, precision and reports."""

    model_config = _SECTION

    steps: PositiveInt = 1000
    """Optimizer steps of the whole run."""

    global_batch: PositiveInt = 16
    """Sequences per optimizer step, over all ranks."""

    micro_batch: PositiveInt = 4
    """Sequences per forward pass of one rank."""

    precision: Precision = "float32"
    """Precision of the run. "bfloat16" applies to matrix products, while decisions, norms and
    weights stay float32. "bfloat16_only" applies to everything stored, including AdamW's moments.
    """

    recompute: Recompute = "none"
    """Activations that the backward pass recomputes instead of keeping."""

    compile: bool = False
    """Compiles the dense parts of the model with torch.compile."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to train; "auto" takes a GPU if there is one."""

    seed: int = 0
    """Seeds the weights and every random choice of a step."""

    log_every: PositiveInt = 1
    """Steps between lines of metrics."""

    eval_every: NonNegativeInt = 0
    """Steps between evaluations; 0: only at the start and at the end."""

    eval_rows: NonNegativeInt = 0
    """Maximum number of validation rows per evaluation; 0: all."""

    eval_batch: PositiveInt | None = None
    """Validation rows per forward pass of one rank; none: `micro_batch`."""

    balance_documents: bool = False
    """Takes balancing losses over documents instead of sequences; needs document ids."""

    threads: int = Field(default=1, ge=0, le=4096)
    """CPU threads of one rank; 0: torch's default."""

    start_when: StartWhen | None = Field(default=None, examples=[{"segments": 2}])
    """Starts the ranks once this much data is sealed, and prepares the rest meanwhile; none:
    prepares all data first.
    """

    timeout_s: float = Field(default=600.0, gt=0)
    """How long a collective may take."""

    sinks: Annotated[tuple[Literal["tensorboard", "wandb", "mlflow"], ...], OneOrMore] = Field(
        default=("tensorboard",), examples=[["wandb"]]
    )
    """Destinations of metrics beside metrics.jsonl (docs/metrics.md); keys and server addresses
    come from the environment.
    """

    losses: dict[Annotated[str, DEPTH_LOSS], float] = Field(
        default={}, examples=['{"my_losses:smooth" = 0.1}']
    )
    """Your own losses on the states of the depth steps, with their weights."""

    spikes: SpikeConfig = SpikeConfig()

    @model_validator(mode="after")
    def _check_sinks(self) -> Self:
        if len(set(self.sinks)) < len(self.sinks):
            raise ValueError(f"train.sinks={list(self.sinks)} names a sink twice: name each once")
        return self
