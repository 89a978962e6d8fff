"""How long a rank may stay in one phase before it counts as hanging: the section `job.limits`.

Judged by whoever supervises the ranks (cluster/watching/): a generation hangs when *every* rank is
over the limit of its phase, so one that waits in a step for another that writes a checkpoint is
within bounds as long as that one is. Time in which a rank was ready to run and got no CPU does not
count. How long the start may take says `job.start_timeout_s`.
"""

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

_Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class PhaseLimits(BaseModel):
    """Limits in seconds; None: there is none, except of a step."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    compile_s: _Seconds | None = 1800.0  # the first step of a process, and the second
    # A slow store is no hang, it may take an hour: it is told in the journal, and not ended.
    data_wait_s: _Seconds | None = None
    step_s: _Seconds | None = None  # None: 60 s, or 10 × the median of the last steps if longer
    ckpt_s: _Seconds | None = 1800.0
    eval_s: _Seconds | None = 3600.0
    end_s: _Seconds | None = 300.0  # leaving the world after the last step
