"""The sinks beside metrics.jsonl: TensorBoard, Weights & Biases, MLflow.

Server addresses and keys come only from the environment: WANDB_API_KEY, MLFLOW_TRACKING_URI, …

An append-only service must not receive a step twice. Steps repeated after a restart have the same
numbers, so `SentLines` records in the run folder what was sent and skips it. TensorBoard hides
steps instead.
"""

import importlib
import json
import os
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from ...data_pipeline.files import write_atomically
from ..config.errors import ConfigError
from ..config.run_config import Config
from ..record.redaction import redact, redact_values
from .curves import points_of
from .log import BackgroundSink, MetricsLog, Record, Sink

_DEPTHS_EVERY = 10  # lines between those with every depth step
# TensorBoard's page "Custom Scalars": one chart per statistic, with a curve for each depth step.
_LAYOUT = {
    "loss": {"train and validation": ["Multiline", [r"loss/(train|validation)"]]},
    "experts by depth step": {
        statistic: ["Multiline", [rf"experts_by_depth/{statistic}/.*"]]
        for statistic in ("max_violation", "effective_experts", "drop_fraction", "gate_mean")
    },
}
_MOST_METRICS, _MOST_PARAMETERS = 1000, 100  # of one request to MLflow
_MOST_CHARS = 500  # of a parameter's value, the limit of older MLflow servers
_MLFLOW_STATUS = {"finished": "FINISHED", "stopped": "KILLED", "failed": "FAILED"}
# Kinds of lines in which a step occurs once; any other line is a separate event.
_ONCE_PER_STEP = {"train", "eval", "checkpoint", "checkpoint_copy", "expert_placement", "spike"}


@dataclass(frozen=True)
class RunFacts:
    """Holds what a sink knows about its run."""

    run_dir: Path
    config: Mapping[str, Any]  # the configuration as plain values, without secrets
    expert_depths: tuple[int, ...]  # depth steps that have experts, from 1

    @property
    def name(self) -> str:
        """Returns the run's name, which is that of its folder."""
        return self.run_dir.absolute().name

    def points(self, record: Record) -> Iterator[tuple[str, float]]:
        """Yields a line's curves and numbers; every tenth line has those of every depth step."""
        by_depth = record.number % _DEPTHS_EVERY == 0
        return points_of(record, depths=self.expert_depths, by_depth=by_depth)


class TensorBoard:
    """Writes event files into the run folder; `purge_step` hides the steps of abandoned attempts."""

    def __init__(self, facts: RunFacts, first_step: int | None) -> None:
        """Opens a new event file; hides steps from `first_step` on, unless it is None."""
        from torch.utils.tensorboard import SummaryWriter

        self._facts = facts
        folder = str(facts.run_dir / "tensorboard")
        self._writer = SummaryWriter(folder, purge_step=first_step, flush_secs=20)
        self._writer.add_custom_scalars(_LAYOUT)
        configuration = json.dumps(facts.config, indent=2).replace("\n", "\n    ")
        self._writer.add_text("configuration", f"    {configuration}", 0)

    def write(self, records: Sequence[Record]) -> None:
        """Writes the numbers of some records as curves."""
        for record in records:
            for curve, value in self._facts.points(record):
                self._writer.add_scalar(curve, value, record.step, record.time_s)

    def close(self, state: str) -> None:
        """Writes what is left, and closes the event file."""
        self._writer.close()


class WandB:
    """Sends numbers to Weights & Biases, as one run per run folder.

    The step is a number of each line and every chart's axis, because W&B's own counter only grows
    and would refuse a checkpoint's line about an earlier step.
    """

    def __init__(self, facts: RunFacts, _first_step: int | None = None) -> None:
        """Creates the run, or continues the one recorded in the run folder."""
        import wandb

        self._facts = facts
        self._sent = SentLines(facts.run_dir, "wandb")
        if self._sent.run is None:
            self._sent.begin_run(secrets.token_hex(4))
        self._run: Any = wandb.init(
            project=os.environ.get("WANDB_PROJECT") or "moebius",
            id=self._sent.run,
            name=facts.name,
            resume="allow",
            dir=str(facts.run_dir),
            settings=wandb.Settings(
                console="off",  # the ranks' output stays here
                silent=True,
                disable_git=True,
                save_code=False,
                disable_job_creation=True,
                init_timeout=60.0,
            ),
        )
        self._run.config.update(dict(facts.config), allow_val_change=True)
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def write(self, records: Sequence[Record]) -> None:
        """Sends the lines that were not sent before."""
        for record in self._sent.unsent(records):
            row = dict(self._facts.points(record))
            if row:
                self._run.log(row | {"step": record.step})
        self._sent.note(records)

    def close(self, state: str) -> None:
        """Waits until the server has everything, and ends W&B's process."""
        import wandb

        try:
            self._run.finish(exit_code=1 if state == "failed" else 0)
        finally:
            wandb.teardown()


class MLflow:
    """Sends numbers to an MLflow tracking server, as one run per run folder."""

    def __init__(self, facts: RunFacts, _first_step: int | None = None) -> None:
        """Creates the run, or continues the one recorded in the run folder."""
        from mlflow.tracking import MlflowClient

        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")  # our thread retries
        self._facts = facts
        self._sent = SentLines(facts.run_dir, "mlflow")
        self._client = MlflowClient()
        run = self._sent.run
        self._run = run if run is not None and self._has_resumed(run) else self._create_run()

    def write(self, records: Sequence[Record]) -> None:
        """Sends the lines that were not sent before."""
        from mlflow.entities import Metric

        metrics = [
            Metric(curve, value, round(record.time_s * 1000), record.step)
            for record in self._sent.unsent(records)
            for curve, value in self._facts.points(record)
        ]
        for some in _batches(metrics, _MOST_METRICS):
            self._client.log_batch(self._run, metrics=some)
        self._sent.note(records)

    def close(self, state: str) -> None:
        """Tells the server how the run ended."""
        self._client.set_terminated(self._run, status=_MLFLOW_STATUS[state])

    def _has_resumed(self, run: str) -> bool:
        """Continues a run; returns False if the server does not know it."""
        from mlflow.exceptions import MlflowException

        try:
            self._client.update_run(run, status="RUNNING")
        except MlflowException as error:
            if error.error_code != "RESOURCE_DOES_NOT_EXIST":
                raise
            return False
        return True

    def _create_run(self) -> str:
        """Creates the run, with the configuration as its parameters."""
        from mlflow.entities import Param

        name = os.environ.get("MLFLOW_EXPERIMENT_NAME") or "moebius"
        known = self._client.get_experiment_by_name(name)
        experiment = known.experiment_id if known else self._client.create_experiment(name)
        run = self._client.create_run(experiment, run_name=self._facts.name).info.run_id
        self._sent.begin_run(run)
        flat = flat_values(self._facts.config)
        parameters = [Param(key, str(flat[key])[:_MOST_CHARS]) for key in flat]
        for some in _batches(parameters, _MOST_PARAMETERS):
            self._client.log_batch(run, params=some)
        return run


class SentLines:
    """Records a service's run id and the sent steps, in the run folder's `sinks/NAME.json`."""

    def __init__(self, run_dir: Path, name: str) -> None:
        """Reads the file; an absent or damaged one counts as empty."""
        self._path = run_dir / "sinks" / f"{name}.json"
        self.run: str | None = None
        self._last_steps: dict[str, int] = {}
        try:
            values: Any = json.loads(self._path.read_text(encoding="utf-8"))
            self.run = str(values["run"])
            self._last_steps = {str(kind): int(step) for kind, step in values["sent"].items()}
        except (OSError, ValueError, RecursionError, KeyError, TypeError, AttributeError):
            pass

    def begin_run(self, run: str) -> None:
        """Starts another run of the service, with nothing sent."""
        self.run, self._last_steps = run, {}
        self._save()

    def unsent(self, records: Sequence[Record]) -> list[Record]:
        """Returns the records that were not sent yet."""
        return [one for one in records if one.step > self._last_steps.get(one.kind, -1)]

    def note(self, records: Sequence[Record]) -> None:
        """Records, also on disk, that records were sent."""
        for record in records:
            if record.kind in _ONCE_PER_STEP:
                last = self._last_steps.get(record.kind, -1)
                self._last_steps[record.kind] = max(last, record.step)
        self._save()

    def _save(self) -> None:
        self._path.parent.mkdir(exist_ok=True)
        text = json.dumps({"run": self.run, "sent": self._last_steps}) + "\n"
        write_atomically(self._path, text, durable=False)


# Opening sinks ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class SinkKind:
    """Describes how to open a kind of sink, and its requirements."""

    open: Callable[[RunFacts, int | None], Sink]
    module: str  # imported before the first step, in the main thread
    advice: str  # for when it fails
    extra: str | None = None  # of moebius, which installs the module; None: a dependency does
    variable: str | None = None  # required environment variable


SINKS: Mapping[str, SinkKind] = {
    "tensorboard": SinkKind(
        TensorBoard, "torch.utils.tensorboard", "the disk of the run folder may be full"
    ),
    "wandb": SinkKind(
        WandB,
        "wandb",
        "set WANDB_API_KEY where the run is started, or WANDB_MODE=offline where no server can be "
        "reached, and send the run later with `wandb sync`",
        extra="wandb",
    ),
    "mlflow": SinkKind(
        MLflow,
        "mlflow.tracking",
        "check that the server of $MLFLOW_TRACKING_URI is up and accepts MLFLOW_TRACKING_USERNAME "
        "and _PASSWORD, or _TOKEN",
        extra="mlflow",
        variable="MLFLOW_TRACKING_URI",
    ),
}


def check_sinks(config: Config, on_rank_0: Callable[[Callable[[], str]], str | None]) -> None:
    """Checks before the first step that the configured sinks can work; all ranks raise alike.

    Args:
        config: the run's configuration.
        on_rank_0: calls a function on rank 0 and returns its result on all ranks; collective.

    Raises:
        ConfigError: rank 0 lacks a package or an environment variable.
    """
    names = config.train.sinks
    if why := on_rank_0(lambda: _missing(names)):
        raise ConfigError(
            f"train.sinks={list(names)}: {why} (on the machine of rank 0), or leave it out"
        )


def _missing(names: Sequence[str]) -> str:
    """Returns what these sinks lack and what to do; "" if nothing.

    It imports their modules in the main thread, because two threads importing parts of one library
    may see half-imported modules.
    """
    faults = []
    for name in names:
        kind = SINKS[name]
        try:
            importlib.import_module(kind.module)
        except ImportError as error:
            install = f'pip install "moebius[{kind.extra}]"' if kind.extra else "reinstall moebius"
            faults.append(f"{name!r} cannot be imported ({redact(str(error))}): {install}")
            continue
        if kind.variable and not os.environ.get(kind.variable):
            faults.append(
                f"{name!r} needs the environment variable {kind.variable}: set it where the run is "
                "started, for example to http://mlflow.example:5000"
            )
    return "; ".join(faults)


def open_metrics(config: Config, run_dir: Path, *, active: bool, first_step: int) -> MetricsLog:
    """Opens a run's metrics log with its configured sinks.

    Args:
        config: the run's configuration.
        run_dir: the run's folder.
        active: whether this is rank 0; on other ranks the log writes nothing.
        first_step: the first step to write. Sinks that can, hide a lost process's later steps.
    """
    if not active:
        return MetricsLog(run_dir, active=False)
    values = redact_values(config.model_dump(mode="json"))
    facts = RunFacts(run_dir, values, tuple(config.model.expert_depths))
    sinks = [
        BackgroundSink(
            name,
            partial(SINKS[name].open, facts),
            first_step=first_step,
            advice=SINKS[name].advice,
        )
        for name in config.train.sinks
    ]
    return MetricsLog(run_dir, active=True, sinks=sinks)


# Shared by sinks --------------------------------------------------------------------------------


def flat_values(values: Mapping[str, Any], before: str = "") -> dict[str, bool | str | float | int]:
    """Returns nested values under dotted names; lists and None become text."""
    flat: dict[str, bool | str | float | int] = {}
    for key, value in values.items():
        name = f"{before}{key}"
        if isinstance(value, Mapping):
            flat |= flat_values(value, f"{name}.")
        elif isinstance(value, bool | str | float | int):
            flat[name] = value
        else:
            flat[name] = "none" if value is None else json.dumps(value)
    return flat


def _batches(values: list[Any], size: int) -> Iterator[list[Any]]:
    for first in range(0, len(values), size):
        yield values[first : first + size]
