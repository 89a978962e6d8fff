"""Which sinks there are, what each needs, and how a run opens those that its configuration names."""

import importlib
import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from ..config.run_config import Config, ConfigError
from ..record.redaction import redact, redact_values
from ..sinks.mlflow import URI, MLflow
from ..sinks.prometheus import Prometheus
from ..sinks.tensorboard import TensorBoard
from ..sinks.wandb import WandB
from .background import BackgroundSink
from .log import MetricsLog
from .records import RunFacts, Sink

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class SinkKind:
    """One kind of sink: how it is opened, and what it needs."""

    open: Callable[[RunFacts, int | None], Sink]
    module: str  # imported before the first step, in the main thread
    extra: str | None  # of moebius that brings it; None: it is a dependency
    advice: str  # where it fails
    variable: str | None = None  # of the environment, without which it cannot be
    takes_matrices: bool = False


SINKS: Mapping[str, SinkKind] = {
    "tensorboard": SinkKind(
        TensorBoard,
        "torch.utils.tensorboard",
        None,
        "the disk of the run folder may be full",
        takes_matrices=True,
    ),
    "wandb": SinkKind(
        lambda facts, _: WandB(facts),
        "wandb",
        "wandb",
        "set WANDB_API_KEY where the run is started, or WANDB_MODE=offline where no server is "
        "reached, and send it later with `wandb sync`",
    ),
    "mlflow": SinkKind(
        lambda facts, _: MLflow(facts),
        "mlflow.tracking",
        "mlflow",
        f"look whether the server of ${URI} is there, and takes MLFLOW_TRACKING_USERNAME and "
        "_PASSWORD, or _TOKEN",
        variable=URI,
    ),
    "prometheus": SinkKind(
        lambda facts, _: Prometheus(facts),
        "prometheus_client",
        "prometheus",
        "if the port is taken, train.metrics.prometheus_port=0 takes a free one",
    ),
}


def why_not_open(names: tuple[str, ...]) -> str:
    """Returns which sinks of these cannot be here, why, and what to do; "": all can.

    It imports what they need, in the main thread: two threads that import parts of one library may
    see each other's halves.
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


def check_sinks(config: Config, on_rank_0: Callable[[Callable[[], str]], str | None]) -> None:
    """Checks, before the first step, that the sinks can be; all ranks raise alike.

    Args:
        config: of the run.
        on_rank_0: calls a function there and tells all ranks its result; a collective call.

    Raises:
        ConfigError: a package or a variable is missing on rank 0.
    """
    names = config.train.metrics.sinks
    if why := on_rank_0(lambda: why_not_open(names)):
        raise ConfigError(
            f"train.metrics.sinks={list(names)}: {why} (on the machine of rank 0), or leave it out"
        )


def open_metrics(config: Config, run_dir: Path, *, active: bool, first_step: int) -> MetricsLog:
    """Opens the log of a run's metrics with the sinks that its configuration names.

    Args:
        config: of the run.
        run_dir: its folder.
        active: whether this is rank 0; the others have a silent log.
        first_step: the one after a resumed checkpoint; sinks that can forget what a lost
            generation wrote from there on.
    """
    if not active:
        return MetricsLog(run_dir, active=False)
    facts = RunFacts(
        run_dir,
        config.train.metrics,
        redact_values(config.model_dump(mode="json")),
        tuple(config.model.expert_depths),
    )
    if why := why_not_open(config.train.metrics.sinks):  # of a rank that takes another's place
        logger.warning("metrics: %s", why)
    sinks = [
        BackgroundSink(
            name,
            partial(SINKS[name].open, facts),
            first_step=first_step,
            advice=SINKS[name].advice,
            takes_matrices=SINKS[name].takes_matrices,
        )
        for name in config.train.metrics.sinks
    ]
    return MetricsLog(run_dir, active=True, sinks=sinks)
