"""Where a run is placed, and what it puts up with: the section `job` of a configuration.

It is here and not in cluster/, because a recipe describes a run whole, placement included.
"""

from typing import Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeInt,
    PositiveInt,
    model_validator,
)

from ..record.process_log import MAX_BYTES, PIECES
from .limits import PhaseLimits


class JobConfig(BaseModel):
    """Configures where a run is placed, and how often it is started again."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str = Field(default="run", pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$", max_length=100)
    num_nodes: PositiveInt = 1
    ranks_per_node: PositiveInt = 1
    # A job that has lost nodes goes on with so many, at least; none: with all of num_nodes only.
    min_nodes: PositiveInt | None = None
    wait_for_node_s: float = Field(default=60.0, ge=0)  # for a replacement, before it goes on so
    # How long a job that has too few nodes waits for more before it fails; none: for ever.
    give_up_after_s: float | None = Field(default=None, gt=0)
    max_restarts: NonNegativeInt = 3  # after failures of the ranks
    # Failures are forgotten when the run has made so many new steps; none: never.
    reset_restarts_after_steps: PositiveInt | None = 1000
    max_node_losses: NonNegativeInt = 100  # nodes and agents that died: restarts of their own
    start_timeout_s: float = Field(
        default=120.0, gt=0
    )  # from a generation's start until every rank has built its model
    limits: PhaseLimits = PhaseLimits()
    # Fault drill: one rank is killed, once, when the run has reached this step. The run must not
    # notice.
    rehearse_failure_at_step: PositiveInt | None = None

    # Agents and ranks are forks of one process per node that has imported everything, so that a
    # restart takes seconds. Linux; elsewhere, and with false, they are started as programs.
    warm_start: bool = True

    # Logs of ranks and agents are rotated when they are so large; so many older pieces are kept.
    log_max_bytes: int = Field(default=MAX_BYTES, ge=64 << 10)
    log_pieces: PositiveInt = PIECES

    @model_validator(mode="after")
    def _check_min_nodes(self) -> Self:
        if self.min_nodes is not None and self.min_nodes > self.num_nodes:
            raise ValueError(
                f"job.min_nodes={self.min_nodes} is more than job.num_nodes={self.num_nodes}: a "
                "job goes on with fewer nodes than it was asked to have, not with more"
            )
        return self
