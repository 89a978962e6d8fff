"""The sinks beside metrics.jsonl: TensorBoard, Weights & Biases, MLflow.

Server addresses and keys come only from the environment: WANDB_API_KEY, MLFLOW_TRACKING_URI, …

W&B and MLflow only append. A run that resumes repeats steps with the same numbers, which `SentLines`
skips: it records in the run folder what was sent. A run that went back and repeats steps with other
numbers continues as another run there, from the step that it went back to. TensorBoard hides the
abandoned steps instead.
"""

import contextlib
import importlib
import inspect
import json
import logging
import math
import os
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from ...data_pipeline.files import append_line, append_to
from ...distributed.checkpoint.format import CheckpointError
from ...distributed.checkpoint.source import read_source
from ..config.errors import ConfigError
from ..config.run_config import Config
from ..record.redaction import redact, redact_values
from .curves import points_of
from .log import BackgroundSink, MetricsLog, Record, Sink

logger = logging.getLogger(__name__)

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
_TELLING = ("loss", "learning_rate", "digest")  # the latter is of the step's data
_ROUNDING = 1e-3  # of a loss, on other ranks
# Kinds of lines in which a step occurs once; any other line is a separate event.
_ONCE_PER_STEP = {
    "train", "eval", "scores", "checkpoint", "checkpoint_copy", "expert_placement", "spike"
}  # fmt: skip


@dataclass(frozen=True)
class RunFacts:
    """Holds what a sink knows about its run."""

    run_dir: Path
    config: Mapping[str, Any]  # the configuration as plain values, without secrets
    expert_depths: tuple[int, ...]  # depth steps that have experts, from 1
    first_step: int = 1  # of this process

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


class _Service:
    """Sends lines to a service that only appends, with its own run for each history of the run folder."""

    NAME: str

    def __init__(self, facts: RunFacts, _first_step: int | None = None) -> None:
        """Creates the service's run, or continues the one recorded in the run folder."""
        self._facts = facts
        self._sent = SentLines(facts, self.NAME)
        self._open()

    def write(self, records: Sequence[Record]) -> None:
        """Sends the lines that the service's run lacks, or all lines of this process to another run."""
        lines = self._sent.unsent(records)
        if self._sent.run is None:
            self.close("stopped")
            self._open()
        self._send(lines)
        self._sent.note(lines)

    def _open(self) -> None:
        raise NotImplementedError

    def _send(self, records: Sequence[Record]) -> None:
        raise NotImplementedError

    def close(self, state: str) -> None:
        """Ends the service's run."""
        raise NotImplementedError


class WandB(_Service):
    """Sends numbers to Weights & Biases.

    The step is a number of each line and every chart's axis, because W&B's own counter only grows
    and would refuse a checkpoint's line about an earlier step. W&B neither rewinds nor forks runs
    with such an axis, and would draw both values of a step.
    """

    NAME = "wandb"

    def _open(self) -> None:
        import wandb

        if self._sent.run is None:
            self._sent.begin_run(secrets.token_hex(4))
        self._run: Any = wandb.init(
            project=os.environ.get("WANDB_PROJECT") or "moebius",
            id=self._sent.run,
            name=self._sent.name,
            group=os.environ.get("WANDB_RUN_GROUP") or self._facts.name,
            resume="allow",
            dir=str(self._facts.run_dir),
            settings=wandb.Settings(
                console="off",  # the ranks' output stays here
                silent=True,
                disable_git=True,
                save_code=False,
                disable_job_creation=True,
                init_timeout=60.0,
            ),
        )
        self._run.config.update(dict(self._facts.config), allow_val_change=True)
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def _send(self, records: Sequence[Record]) -> None:
        for record in records:
            row = dict(self._facts.points(record))
            if row:
                self._run.log(row | {"step": record.step})

    def close(self, state: str) -> None:
        """Waits until the server has everything, and ends W&B's process."""
        import wandb

        try:
            self._run.finish(exit_code=1 if state == "failed" else 0)
        finally:
            wandb.teardown()


class MLflow(_Service):
    """Sends numbers to an MLflow tracking server."""

    NAME = "mlflow"

    def _open(self) -> None:
        from mlflow.tracking import MlflowClient

        _mlflow_gives_up_soon()
        self._client = MlflowClient()
        run = self._sent.run
        self._run = run if run is not None and self._has_resumed(run) else self._create_run()

    def _send(self, records: Sequence[Record]) -> None:
        from mlflow.entities import Metric

        metrics = [
            Metric(curve, value, round(record.time_s * 1000), record.step)
            for record in records
            for curve, value in self._facts.points(record)
        ]
        for some in _batches(metrics, _MOST_METRICS):
            self._client.log_batch(self._run, metrics=some)

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
        run = self._client.create_run(experiment, run_name=self._sent.name).info.run_id
        self._sent.begin_run(run)
        flat = flat_values(self._facts.config)
        parameters = [Param(key, str(flat[key])[:_MOST_CHARS]) for key in flat]
        for some in _batches(parameters, _MOST_PARAMETERS):
            self._client.log_batch(run, params=some)
        return run


class SentLines:
    """Records a service's run and what it was sent, in the run folder's `sinks/NAME.json`, by line."""

    def __init__(self, facts: RunFacts, name: str) -> None:
        """Reads the file; an absent or damaged one counts as empty."""
        self._path = _file_of(facts.run_dir, name)
        self.run: str | None = None
        self.name = facts.name  # of the service's run
        self._run_folder = facts.name
        self._known: dict[tuple[str, int], dict[str, float]] = {}  # what this process may repeat
        self._repeated: list[Record] = []  # lines of this process up to `_last`
        for line in _lines_of(self._path):
            if "run" in line:
                self.run, self.name, self._known = line["run"], line.get("name", self.name), {}
            elif line["step"] >= facts.first_step - 1:
                self._known[line["kind"], line["step"]] = line["numbers"]
        self._last = max((step for _, step in self._known), default=-1)

    def begin_run(self, run: str) -> None:
        """Starts another run of the service, with nothing sent."""
        self.run, self._known, self._last = run, {}, -1
        self._append()

    def unsent(self, records: Sequence[Record]) -> list[Record]:
        """Returns the records that were not sent yet.

        If one was sent with other numbers, the run went back: `run` is None, and all records of this
        process are for the next one.
        """
        unsent: list[Record] = []
        for record in records:
            if record.step <= self._last:
                self._repeated.append(record)
            before = self._known.get((record.kind, record.step))
            if before is None:
                unsent.append(record)
            elif not _are_equal(before, _numbers(record)):
                first = min(one.step for one in self._repeated if one.kind in _ONCE_PER_STEP)
                self.run, self.name = None, f"{self._run_folder} from step {first}"
                self._known, self._last = {}, -1
                unsent = list(self._repeated)
        return unsent

    def note(self, records: Sequence[Record]) -> None:
        """Records on disk that records were sent."""
        lines = [
            {"kind": record.kind, "step": record.step, "numbers": _numbers(record)}
            for record in records
            if record.kind in _ONCE_PER_STEP
        ]
        if lines:
            self._append(*lines)

    def _append(self, *lines: Mapping[str, Any]) -> None:
        """Appends lines; the run comes first in a new file, also where the old one was deleted."""
        try:
            self._path.parent.mkdir(exist_ok=True)
            with append_to(self._path) as file:
                if not lines or not os.fstat(file.fileno()).st_size:
                    lines = ({"run": self.run, "name": self.name}, *lines)
                append_line(file, "\n".join(map(json.dumps, lines)))
        except OSError as error:
            logger.warning("%s: not written (%s): its steps may be sent twice", self._path, error)


def _file_of(run_dir: Path, name: str) -> Path:
    return run_dir / "sinks" / f"{name}.json"


def _lines_of(path: Path) -> Iterator[dict[str, Any]]:
    """Yields the whole lines about runs and steps."""
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return
    for line in text.splitlines():
        try:
            found: Any = json.loads(line)
        except (ValueError, RecursionError):
            continue
        match found:
            case {"run": str()} | {"kind": str(), "step": int(), "numbers": dict()}:
                yield found


def _numbers(record: Record) -> dict[str, float]:
    """Returns the numbers by which a repeated step is told from another one."""
    return {name: value for name in _TELLING if (value := record.values.get(name)) is not None}


def _are_equal(before: Mapping[str, Any], now: Mapping[str, float]) -> bool:
    """Returns whether two lines are of the same step: only the loss may differ, by rounding."""
    first, second = float(before.get("loss", 0)), float(now.get("loss", 0))
    is_close = math.isclose(first, second, rel_tol=_ROUNDING) or str(first) == str(second) == "nan"
    return is_close and {**before, "loss": 0} == {**now, "loss": 0}


# Opening sinks ----------------------------------------------------------------------------------


def _why_wandb_is_closed(has_worked: bool) -> str:
    """Returns why W&B would refuse this user; "" if it would not, or where nothing is sent."""
    import wandb

    if wandb.setup().settings.mode in ("offline", "disabled", "dryrun"):
        return ""
    asks = inspect.signature(wandb.login).parameters
    silent: dict[str, Any] = {"prompt": False} if "prompt" in asks else {}
    try:
        known = wandb.login(verify=not has_worked, **silent)
    except wandb.Error as error:
        return str(error)
    return "" if known else "there is no API key"


def _why_mlflow_is_closed(has_worked: bool) -> str:
    """Returns why MLflow's server does not answer; "" if it does, or has done so in this run."""
    if not os.environ.get("MLFLOW_TRACKING_URI"):
        return "MLFLOW_TRACKING_URI is not set, for example to http://mlflow.example:5000"
    from mlflow.exceptions import MlflowException
    from mlflow.tracking import MlflowClient

    _mlflow_gives_up_soon()
    try:
        client = MlflowClient()
        if not has_worked:
            client.search_experiments(max_results=1)
    except (MlflowException, ImportError) as error:
        return str(error)
    return ""


def _mlflow_gives_up_soon() -> None:
    for name, value in (("MAX_RETRIES", "0"), ("TIMEOUT", "30")):  # our thread retries
        os.environ.setdefault(f"MLFLOW_HTTP_REQUEST_{name}", value)


@dataclass(frozen=True)
class SinkKind:
    """Describes how to open a kind of sink, and its requirements."""

    open: Callable[[RunFacts, int | None], Sink]
    module: str  # imported before the first step, in the main thread
    advice: str  # for when it fails
    extra: str | None = None  # of moebius, which installs the module; None: a dependency does
    why_closed: Callable[[bool], str] | None = None  # to this user; given whether it once worked


SINKS: Mapping[str, SinkKind] = {
    "tensorboard": SinkKind(
        TensorBoard, "torch.utils.tensorboard", "the disk of the run folder may be full"
    ),
    "wandb": SinkKind(
        WandB,
        "wandb",
        "run `wandb login` or set WANDB_API_KEY where the run is started, or WANDB_MODE=offline "
        "where no server can be reached, and send the run later with `wandb sync`",
        extra="wandb",
        why_closed=_why_wandb_is_closed,
    ),
    "mlflow": SinkKind(
        MLflow,
        "mlflow.tracking",
        "check that the server of $MLFLOW_TRACKING_URI is up and accepts MLFLOW_TRACKING_USERNAME "
        "and _PASSWORD, or _TOKEN",
        extra="mlflow",
        why_closed=_why_mlflow_is_closed,
    ),
}


def check_sinks(
    config: Config, on_rank_0: Callable[[Callable[[], str]], str | None], run_dir: Path
) -> None:
    """Checks before the first step that the configured sinks can work; all ranks raise alike.

    Args:
        config: the run's configuration.
        on_rank_0: calls a function on rank 0 and returns its result on all ranks; collective.
        run_dir: the run's folder. A server that has answered this run may be away for a while.

    Raises:
        ConfigError: rank 0 lacks a package, an environment variable or a key, or a server has never
            answered this run.
    """
    names = config.train.sinks
    if why := on_rank_0(lambda: _missing(names, run_dir)):
        raise ConfigError(
            f"train.sinks={list(names)}: {why} (on the machine of rank 0), or leave it out"
        )


def _missing(names: Sequence[str], run_dir: Path) -> str:
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
        has_worked = any(_lines_of(_file_of(run_dir, name)))
        if kind.why_closed and (why := kind.why_closed(has_worked)):
            faults.append(f"{name!r} cannot be used ({redact(why)}): {kind.advice}")
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
    facts = RunFacts(run_dir, values, tuple(config.model.expert_depths), first_step)
    sinks = [
        BackgroundSink(
            name,
            partial(SINKS[name].open, facts),
            first_step=first_step,
            advice=SINKS[name].advice,
        )
        for name in config.train.sinks
    ]
    has_trained = any((run_dir / "checkpoints").glob("step_*"))
    lacks_to = first_step - 1 if has_trained and not _was_written(run_dir, first_step - 1) else 0
    return MetricsLog(run_dir, active=True, sinks=sinks, lacks_to=lacks_to)


def _was_written(run_dir: Path, step: int) -> bool:
    """Returns whether a run began with a checkpoint of this step that no training made."""
    with contextlib.suppress(CheckpointError):  # source.json is damaged, and not needed any more
        began = read_source(run_dir)
        return began is not None and (began.kind, began.step) == ("written", step)
    return False


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
