"""When the state of a run is saved, how much of it is kept, and where else."""

from typing import Literal

from pydantic import BaseModel, ConfigDict, NonNegativeInt, PositiveInt

OnFailure = Literal["go_on", "stop"]


class CheckpointConfig(BaseModel):
    """Configures when the state is saved and how much of it is kept."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    every: NonNegativeInt = 100  # steps; 0: at the end only
    keep_last: PositiveInt = 3
    verify: bool = True  # read a checkpoint back from the disk before an older one is dropped
    # A save that fails, of a full disk for example: train on and save again at the next time, or
    # end the run at the next step. At the run's end a failed save is an error either way.
    on_failure: OnFailure = "go_on"
    # A folder or URL (s3://bucket/checkpoints) in which the run has a folder of its name with a
    # copy of its last checkpoints, made in the background.
    copy_to: str | None = None
