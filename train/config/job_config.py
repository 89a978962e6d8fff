"""The section `job` of a configuration: where a run is placed, and which failures it survives.

It is in train/ rather than cluster/ because a recipe describes a whole run, including placement.
"""

from typing import Annotated, Self

from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, PositiveInt, model_validator

_SECTION = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)
_Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class PhaseLimits(BaseModel):
    """Limits how long ranks may stay in one phase before they count as hanging.

    A generation hangs when *every* rank exceeds its phase's limit, so a rank that waits for
    another's checkpoint is fine while that one is. Time without a CPU does not count. Waiting for
    data has no limit: a slow store is not a hang.
    """

    model_config = _SECTION

    step_s: _Seconds | None = None
    """Seconds of a step; none: 60, or ten times the median of the last steps if that is longer."""

    phase_s: _Seconds | None = 3600.0
    """Seconds of every other phase: compiling, a checkpoint, an evaluation; none: no limit."""


class JobConfig(BaseModel):
    """Configures where a run is placed, and how often it is restarted."""

    model_config = _SECTION

    name: str = Field(default="run", pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$", max_length=100)
    """Prefix of the run folder's name."""

    num_nodes: PositiveInt = 1
    """Nodes, real or simulated."""

    ranks_per_node: PositiveInt = 1
    """Ranks of each node; on GPUs, one per device."""

    min_nodes: PositiveInt | None = None
    """Fewest nodes that a job continues with after losses; none: `num_nodes`."""

    wait_for_node_s: float = Field(default=60.0, ge=0)
    """How long a job waits for a replacement before it continues with fewer nodes."""

    max_restarts: NonNegativeInt = 3
    """Restarts after rank failures; 1,000 new steps reset the count."""

    max_node_losses: NonNegativeInt = 100
    """Restarts after losses of nodes and agents, counted separately."""

    start_timeout_s: float = Field(default=120.0, gt=0)
    """How long a generation may take until every rank has built its model."""

    limits: PhaseLimits = PhaseLimits()

    rehearse_failure_at_step: PositiveInt | None = None
    """Fault drill: kills one rank, once, at this step."""

    warm_start: bool = True
    """Forks agents and ranks from one process per node that has imported everything, so a restart
    takes seconds. Linux only; otherwise each starts as a program.
    """

    @model_validator(mode="after")
    def _check_min_nodes(self) -> Self:
        if self.min_nodes is not None and self.min_nodes > self.num_nodes:
            raise ValueError(
                f"job.min_nodes={self.min_nodes} is more than job.num_nodes={self.num_nodes}: set it "
                "to job.num_nodes or less"
            )
        return self
