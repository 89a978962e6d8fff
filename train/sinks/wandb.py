"""Weights & Biases: one run there per run folder, whatever restarts come between.

The key comes from the environment (WANDB_API_KEY, or what `wandb login` has left), and so do
WANDB_MODE, WANDB_ENTITY and the rest. What the process prints, its source and git's addresses are
not sent. Lines have the step as a number of their own that every chart is drawn over: W&B's own
counter only grows, and would refuse what a checkpoint that is written meanwhile says of an earlier
step.
"""

import os
import secrets
from collections.abc import Sequence
from typing import Any

from ..metrics.curves import points_of
from ..metrics.records import Record, RunFacts
from .kept import Kept

NAME = "wandb"
_INIT_S = 60.0


class WandB:
    """Sends numbers to W&B through its own process, which keeps them until the server takes them."""

    def __init__(self, facts: RunFacts) -> None:
        """Opens the run over there, or goes on with the one that the run folder names."""
        import wandb

        self._facts = facts
        self._kept = Kept(facts.run_dir, NAME)
        if "run" not in self._kept.ids:
            self._kept.start_anew({"run": secrets.token_hex(4)})
        project = facts.settings.project or os.environ.get("WANDB_PROJECT") or "moebius"
        self._run: Any = wandb.init(
            project=project,
            id=self._kept.ids["run"],
            name=facts.name,
            resume="allow",
            dir=str(facts.run_dir),
            settings=wandb.Settings(
                console="off",  # the ranks' logs stay here
                silent=True,
                disable_git=True,
                save_code=False,
                disable_job_creation=True,
                init_timeout=_INIT_S,
            ),
        )
        self._run.config.update(dict(facts.config), allow_val_change=True)
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def write(self, records: Sequence[Record]) -> None:
        """Sends what was not sent before."""
        for record in filter(self._kept.is_new, records):
            row = {
                point.path: point.value
                for point in points_of(
                    record,
                    depths=self._facts.expert_depths,
                    by_depth=record.number % self._facts.settings.depths_every == 0,
                )
            }
            if row:
                self._run.log(row | {"step": record.step})
            self._kept.note(record)
        self._kept.save()

    def go_back_to(self, step: int) -> None:
        """Leaves what was sent: W&B cannot take it back (kept.py says what follows)."""

    def close(self, state: str) -> None:
        """Ends the run, once the server has what was sent, and then W&B's process."""
        import wandb

        try:
            self._run.finish(exit_code=1 if state == "failed" else 0)
        finally:
            wandb.teardown()
