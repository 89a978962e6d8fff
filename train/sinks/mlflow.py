"""MLflow: one run on its tracking server per run folder, whatever restarts come between.

The server and the way in come from the environment: MLFLOW_TRACKING_URI, MLFLOW_TRACKING_TOKEN, …
"""

import logging
import os
from collections.abc import Sequence
from typing import Any

from ..metrics.curves import points_of
from ..metrics.records import Record, RunFacts, flat_values
from .kept import Kept

logger = logging.getLogger(__name__)

NAME = "mlflow"
URI = "MLFLOW_TRACKING_URI"
_MOST_METRICS, _MOST_PARAMETERS = 1000, 100  # of one request
_MOST_CHARS = 500  # of a parameter's value, which older servers take
_STATUS = {"finished": "FINISHED", "stopped": "KILLED", "failed": "FAILED"}


class MLflow:
    """Sends numbers to a tracking server, many lines in one request."""

    def __init__(self, facts: RunFacts) -> None:
        """Opens the run over there, or goes on with the one that the run folder names."""
        from mlflow.tracking import MlflowClient

        # The thread that calls tries again itself, without a warning each time.
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
        self._facts = facts
        self._kept = Kept(facts.run_dir, NAME)
        self._client = MlflowClient()
        if "run" not in self._kept.ids or not self._has_resumed(self._kept.ids["run"]):
            self._create_run()
        self._id = self._kept.ids["run"]

    def write(self, records: Sequence[Record]) -> None:
        """Sends what was not sent before."""
        from mlflow.entities import Metric

        metrics = [
            Metric(point.path, point.value, round(record.time_s * 1000), record.step)
            for record in filter(self._kept.is_new, records)
            for point in points_of(
                record,
                depths=self._facts.expert_depths,
                by_depth=record.number % self._facts.settings.depths_every == 0,
            )
        ]
        for first in range(0, len(metrics), _MOST_METRICS):
            self._client.log_batch(self._id, metrics=metrics[first : first + _MOST_METRICS])
        for record in records:
            self._kept.note(record)
        self._kept.save()

    def go_back_to(self, step: int) -> None:
        """Leaves what was sent: MLflow cannot take it back (kept.py says what follows)."""

    def close(self, state: str) -> None:
        """Says over there how the run has ended."""
        self._client.set_terminated(self._id, status=_STATUS[state])

    def _has_resumed(self, run: str) -> bool:
        """Goes on with a run; returns whether the server knows it."""
        from mlflow.exceptions import MlflowException

        try:
            self._client.update_run(run, status="RUNNING")
        except MlflowException as error:
            if error.error_code != "RESOURCE_DOES_NOT_EXIST":
                raise
            logger.warning("metrics: MLflow does not know the run %s, and gets another", run)
            return False
        return True

    def _create_run(self) -> None:
        """Makes the run, with the configuration as its parameters."""
        from mlflow.entities import Param

        name = self._facts.settings.project or os.environ.get("MLFLOW_EXPERIMENT_NAME") or "moebius"
        experiment = self._client.get_experiment_by_name(name)
        number: Any = (
            self._client.create_experiment(name) if experiment is None else experiment.experiment_id
        )
        run = self._client.create_run(number, run_name=self._facts.name)
        self._kept.start_anew({"run": run.info.run_id, "experiment": str(number)})
        parameters = [
            Param(name, str(value)[:_MOST_CHARS])
            for name, value in flat_values(self._facts.config).items()
        ]
        for first in range(0, len(parameters), _MOST_PARAMETERS):
            some = parameters[first : first + _MOST_PARAMETERS]
            self._client.log_batch(run.info.run_id, params=some)
