"""When a step counts as a spike, and what is done about it."""

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, PositiveInt

from ...distributed.checkpoint.checkpoint_config import CheckpointConfig


class SpikeConfig(BaseModel):
    """Configures which steps are spikes, and what a run does about them (docs/training.md)."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    # "skip": leave out the update of a spike. "rollback": also go back to an earlier checkpoint
    # after several, and leave out the samples since.
    action: Literal["off", "skip", "rollback"] = "off"
    # A spike's loss or gradient norm is more than so many deviations above the median of the last
    # good steps; a deviation is 1.4826 times their median distance from it.
    window: int = Field(default=128, ge=4)  # good steps; half of them are needed to judge
    loss_deviations: float = Field(default=8.0, gt=0)
    grad_norm_deviations: float = Field(default=16.0, gt=0)
    warmup_steps: NonNegativeInt = 100  # of the run, which are not judged
    # Spikes after which the run goes back, if they come within so many steps.
    rollback_after: PositiveInt = 3
    rollback_within: PositiveInt = 20
    # It goes back at least so many steps before the first of them.
    rollback_steps: PositiveInt = 100
    max_rollbacks: NonNegativeInt = 10  # of the run; then a further one ends it

    def check_checkpoints(self, checkpoint: CheckpointConfig) -> None:
        """Checks that a run which goes back keeps a checkpoint that is old enough.

        Raises:
            ValueError: it does not.
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
                f"rollback_steps={self.rollback_steps} − 1), and those of "
                f"checkpoint.every={checkpoint.every} with "
                f"checkpoint.keep_last={checkpoint.keep_last} reach back {kept} only: keep more of "
                "them, or go back less far"
            )
