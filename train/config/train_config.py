"""The section `train` of a configuration: how long to train, on how much at a time, how exactly."""

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
    """Configures which steps count as spikes, and what a run does about them (docs/train.md)."""

    model_config = _SECTION

    action: Literal["off", "skip", "rollback"] = "off"
    """What is done about spikes: "skip" skips the update; "rollback" also returns to an earlier
    checkpoint after several spikes, and skips the samples since then."""

    window: int = Field(default=128, ge=4)
    """The number of good steps that a step is compared with; half of them are needed to judge."""

    warmup_steps: NonNegativeInt = 100
    """The first steps of a run, which are never judged."""

    loss_deviations: float = Field(default=8.0, gt=0)
    """A spike's loss is more than so many robust deviations above the window's median."""

    grad_norm_deviations: float = Field(default=16.0, gt=0)
    """The same limit for the gradient norm."""

    rollback_after: PositiveInt = 3
    """So many spikes within `rollback_within` steps cause a rollback."""

    rollback_within: PositiveInt = 20
    """The number of steps in which spikes count together."""

    rollback_steps: PositiveInt = 100
    """A rollback goes back at least so many steps before the first of the spikes."""

    def check_checkpoints(self, checkpoint: CheckpointConfig) -> None:
        """Checks that a run that may roll back keeps a checkpoint that is old enough.

        Raises:
            ValueError: no checkpoint would be old enough.
        """
        if self.action != "rollback":
            return
        if self.rollback_after > self.rollback_within:
            raise ValueError(
                f"train.spikes.rollback_after={self.rollback_after} spikes cannot come within "
                f"train.spikes.rollback_within={self.rollback_within} steps: make it smaller"
            )
        reach = self.rollback_within + self.rollback_steps - 1
        kept = (checkpoint.keep_last - 1) * checkpoint.every
        if kept < reach:
            raise ValueError(
                f"train.spikes.action='rollback' needs a checkpoint that is {reach} steps old "
                f"(train.spikes.rollback_within={self.rollback_within} + "
                f"rollback_steps={self.rollback_steps} − 1), but those of "
                f"checkpoint.every={checkpoint.every} with "
                f"checkpoint.keep_last={checkpoint.keep_last} reach back {kept} only: keep more "
                "checkpoints, or roll back less far"
            )


class TrainConfig(BaseModel):
    """Configures the training loop: its length, batch sizes, precision and what it reports."""

    model_config = _SECTION

    steps: PositiveInt = 1000
    """Optimizer steps of the whole run."""

    global_batch: PositiveInt = 16
    """Sequences per optimizer step, over all ranks."""

    micro_batch: PositiveInt = 4
    """Sequences per forward pass of one rank."""

    precision: Precision = "float32"
    """Precision of the run. With "bfloat16", matrix products use it, and decisions, norms and weights
    stay float32. With "bfloat16_only", all that is stored uses it, AdamW's moments included."""

    recompute: Recompute = "none"
    """Which activations the backward pass recomputes instead of keeping them."""

    compile: bool = False
    """Compiles the dense parts of the model with torch.compile."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to train; "auto" takes a GPU if there is one."""

    seed: int = 0
    """Seeds the weights and every random choice of a step."""

    log_every: PositiveInt = 1
    """Steps from one line of metrics to the next."""

    eval_every: NonNegativeInt = 0
    """Steps from one evaluation to the next; 0: only at the start and at the end."""

    eval_rows: NonNegativeInt = 0
    """The most validation rows of an evaluation; 0: all of them."""

    eval_batch: PositiveInt | None = None
    """Validation rows per forward pass of one rank; none: `micro_batch`."""

    balance_documents: bool = False
    """Takes balancing losses over documents instead of sequences; the data must tell them apart."""

    record_routing: NonNegativeInt = 0
    """Writes the routes of the first and of every n-th step into the run folder; 0: of none."""

    threads: int = Field(default=1, ge=0, le=4096)
    """CPU threads of one rank; 0: torch's default."""

    start_when: StartWhen | None = Field(default=None, examples=[{"segments": 2}])
    """Starts the ranks once so much data is sealed, and prepares the rest meanwhile; none: prepares
    all data first."""

    timeout_s: float = Field(default=600.0, gt=0)
    """How long a collective may take."""

    sinks: Annotated[tuple[Literal["tensorboard", "wandb", "mlflow"], ...], OneOrMore] = Field(
        default=("tensorboard",), examples=[["wandb"]]
    )
    """Where metrics go beside metrics.jsonl (docs/metrics.md); keys and server addresses come from
    the environment."""

    losses: dict[Annotated[str, DEPTH_LOSS], float] = Field(
        default={}, examples=['{"my_losses:smooth" = 0.1}']
    )
    """Your own losses on the states of the depth steps, with the weight of each."""

    spikes: SpikeConfig = SpikeConfig()

    @model_validator(mode="after")
    def _check_sinks(self) -> Self:
        if len(set(self.sinks)) < len(self.sinks):
            raise ValueError(f"train.sinks={list(self.sinks)} names a sink twice: name each once")
        return self
