"""The parts of one run on one rank: built, and restored from a checkpoint."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from ..data_pipeline.read.loader import Batch, Loader
from ..distributed.average import WeightAverage
from ..distributed.checkpoint.checkpoint_folder import DamagedCheckpoint
from ..distributed.checkpoint.checkpointer import Checkpointer
from ..distributed.checkpoint.recovery import WholeCheckpoint
from ..distributed.checkpoint.second_copy import SecondCopy
from ..distributed.checkpoint.source import load_start
from ..distributed.gradients import GradientReducer
from ..distributed.layout import Layout, plan_layout
from ..distributed.mesh import Mesh, build_mesh
from ..distributed.parallelize import build_model
from ..distributed.placement.expert_placement import ExpertPlacement
from ..distributed.placement.replicas import CopyReducer
from ..distributed.process.agreement import code_facts, flat_facts, layout_facts, parameter_facts
from ..distributed.process.process import Process
from ..kernels.backend import build_backend, resolve_backend
from ..model.execution.compiled import check_compiler, compile_dense_parts
from ..model.execution.depth_losses import WeightedLoss, weighted_losses
from ..model.execution.precision import products_dtype, stored_dtype
from ..model.execution.roles import parts_of
from ..model.transformer import Transformer
from .config.run_config import Config, ConfigError
from .cuda_graph import Passes, passes_of
from .metrics.log import MetricsLog
from .metrics.spikes import SkipPolicy, Spike
from .metrics.step_metrics import StepClock, StepMeter
from .metrics.step_traces import TRACES, StepTraces
from .micro_batches import depth_facts
from .optim import changed_numbers, optimizer_of
from .record.heartbeat import Heartbeat, Phase
from .record.run_folder import (
    check_branch,
    check_generation,
    check_same_run,
    end_is_asked,
    settings_of,
)
from .state import TrainingProgress, allocate_moments, model_tensors, restore_numbers, state_tensors

_COMPARE_S = 60.0  # time-out of ranks that compare their runs


@dataclass(frozen=True)
class StepResult:
    """Holds the outcome of one optimizer step, for the hooks."""

    batch: Batch
    meter: StepMeter  # this rank's sums over the step's micro-batches
    learning_rate: float
    grad_norm: float  # before clipping; not finite: all ranks skipped the update
    stop: bool  # a stop was requested; the same on all ranks
    is_last: bool  # the run stops here or is complete
    # targets in the loss, over all ranks; None: all; 0: all ranks skipped the update
    counted_targets: int | None
    own_s: float | None  # forward and backward here, without waiting for others; None: on a GPU
    spike: Spike | None  # if it was one; all ranks skipped its update
    grad_norms: dict[str, float]  # by part of the model, if the step is logged


@dataclass
class RunState:
    """What changes during a run on one rank."""

    progress: TrainingProgress = field(default_factory=TrainingProgress)
    first_step: int = 1  # of this process
    clock: StepClock = field(default_factory=StepClock)  # since the last line of metrics
    saved_step: int = 0  # of the last started checkpoint
    data_is_late: bool = True  # some rank may lack its next batch
    measured_from_s: float = 0.0  # when the first step of this process was logged
    peak_tokens_per_s: float | None = None  # of all ranks, at an MFU of 1; None: unknown
    # of this step, equal on all ranks: the loss as "validation", accuracies by tasks' names
    measured: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Run:
    """The parts of one run on one rank, built by `assemble`."""

    config: Config
    run_dir: Path
    process: Process
    mesh: Mesh
    model: Transformer
    parameters: dict[torch.nn.Parameter, str]  # this rank's shards, each with its part of the model
    optimizer: torch.optim.Optimizer
    expert_placement: ExpertPlacement
    checkpoints: Checkpointer
    generation: int
    backend: str  # of the experts' products
    judge: SkipPolicy
    traces: StepTraces
    depth_losses: tuple[WeightedLoss, ...]  # a user's own
    average: WeightAverage
    heartbeat: Heartbeat
    passes: Passes
    state: RunState = field(default_factory=RunState)

    @property
    def progress(self) -> TrainingProgress:
        """Returns the steps, samples and tokens that the weights have seen."""
        return self.state.progress

    def end_is_requested(self) -> bool:
        """Returns, on rank 0, whether the run must save and end at the next step boundary."""
        return self.process.rank == 0 and (end_is_asked(self.run_dir) or self.checkpoints.must_stop)

    @property
    def reducer(self) -> GradientReducer | CopyReducer:
        """Returns what sums gradients over the ranks; every move of experts replaces it."""
        return self.expert_placement.reducer


@dataclass(frozen=True, kw_only=True)
class OpenRun(Run):
    """A run with its data and its log open at the step where it starts or continues."""

    loader: Loader
    log: MetricsLog
    examine: Callable[["OpenRun"], None] | None = None  # evaluation/while_training.py

    def restart_clock(self) -> None:
        """Restarts the measurement of step times."""
        self.state.clock = StepClock(waited_s=self.loader.wait_s)


@dataclass(frozen=True)
class Resumed:
    """Says what a run found when it continued from a checkpoint."""

    position: dict[str, Any]  # of the data
    set_aside: list[DamagedCheckpoint]
    was_fetched: bool  # from a second copy


def assemble(
    config: Config, run_dir: Path, process: Process, heartbeat: Heartbeat | None = None
) -> Run:
    """Builds everything that exists once per rank, before any data is read or state restored.

    Raises:
        ValueError: the configuration does not fit the world, or ranks differ in configuration, code
            or parameters.
    """
    config.import_parts()
    layout, backend = _agree_on_run(config, process)
    generation = check_generation(run_dir)
    mesh = build_mesh(layout, process)
    model = build_model(
        config.model,
        mesh,
        dispatcher=config.mesh.dispatcher,
        backend=backend,
        seed=config.train.seed,
        device=process.device,
        check_every=config.mesh.check_every,
        ranks_per_node=process.ranks_per_node,
        timeout_s=process.timeout_s,
        sharding=config.mesh.sharding,
        precision=products_dtype(config.train.precision),
        stored=stored_dtype(config.train.precision),
    )
    if config.train.compile:
        compile_dense_parts(model)
    process.agree("model", parameter_facts(model) | depth_facts(config))
    optimizer = optimizer_of(config.optim, model, mesh)
    span = config.train.average_span(config.train.global_batch * config.data.seq_len)
    copy_to = config.checkpoint.copy_to
    checkpoints = Checkpointer(
        run_dir / "checkpoints",
        config.checkpoint,
        mesh=mesh,
        process=process,
        generation=generation,
        generation_file=run_dir / "generation",
        second=SecondCopy(copy_to, run_dir, config.checkpoint) if copy_to else None,
    )
    return Run(
        config=config,
        run_dir=run_dir,
        process=process,
        mesh=mesh,
        model=model,
        parameters=parts_of(model),
        optimizer=optimizer,
        expert_placement=ExpertPlacement(config.mesh, model, optimizer, mesh),
        checkpoints=checkpoints,
        generation=generation,
        backend=backend,
        judge=SkipPolicy(config.train.skip_spikes),
        traces=StepTraces(config.train.profile, run_dir / TRACES, process.rank),
        depth_losses=weighted_losses(config.train.losses),
        average=WeightAverage(optimizer, list(model.parameters()), config.train.average, span),
        heartbeat=heartbeat or Heartbeat(),
        passes=passes_of(config, model, layout, backend=backend, device=process.device),
    )


def _agree_on_run(config: Config, process: Process) -> tuple[Layout, str]:
    """Compares the run with the other ranks' and returns its layout and backend."""
    compare_s = min(_COMPARE_S, process.timeout_s)
    facts = flat_facts("config", config.model_dump(mode="json")) | code_facts()
    process.agree("run", facts, timeout_s=compare_s)
    config.check_world(process.world_size)
    backend = choose_kernels(config, process)
    layout = plan_layout(config.mesh, process.world_size)
    process.agree("layout", layout_facts(layout), timeout_s=compare_s)
    return layout, backend


def choose_kernels(config: Config, process: Process) -> str:
    """Returns the backend of the experts' products.

    Raises:
        ValueError: the backend or torch.compile cannot run here, or the ranks' machines differ.
    """
    refused: ValueError | None = None
    try:
        dtype = products_dtype(config.train.precision)
        backend = resolve_backend(config.kernels.backend, process.device, dtype)
        build_backend(backend)
        if config.train.compile:
            check_compiler(process.device)
    except ValueError as error:  # tell the other ranks before raising, or they would wait
        backend, refused = str(error), error
    process.agree("kernels", {"kernels.backend on the rank's machine": backend})
    if refused is not None:
        raise ConfigError(str(refused)) from refused.__cause__
    return backend


def resume(run: Run) -> Resumed | None:
    """Restores the newest whole checkpoint of the run folder, or loads what the run starts from.

    Sets newer damaged checkpoints aside. A branch without a checkpoint restores its trunk's.

    Returns:
        What it found; None: the run starts from the beginning.

    Raises:
        CheckpointError: no checkpoint is whole and fits; on all ranks.
        ConfigError: it is of a run that computes something else; on all ranks.
    """
    own = run.checkpoints.newest_whole()
    if (found := own or load_start(run.run_dir, *model_tensors(run.model), run.mesh)) is None:
        return None
    saved = settings_of(found.path, found.meta.meta)
    if own is None:
        check_branch(saved, run.config, str(run.run_dir), trunk=found.path)
    elif (run.run_dir / "config.json").exists():  # a run continues only with its own settings
        remedy = "restore this run's own, or delete it and resume from the one before it"
        check_same_run(saved, run.config, found.path, remedy=remedy)
    meta = _load_state(run, found)
    return Resumed(meta["data"], run.checkpoints.adopt(found), found.fetched_for is not None)


def _load_state(run: Run, found: WholeCheckpoint) -> dict[str, Any]:
    """Loads a checkpoint into the run, and returns its meta; a collective call."""
    meta = found.meta.meta
    run.expert_placement.restore(meta.get("experts", {}))
    if updates := meta["progress"]["updates"]:
        allocate_moments(run.model, run.optimizer, updates)
    more = not run.average.restore(meta) or not updates  # old imports have zero moments
    state = state_tensors(run.model, run.optimizer)
    found.load(*state, mesh=run.mesh, allow_unexpected=more)
    counts = {"skipped": meta["progress"]["step"] - updates} | meta["progress"]  # of older runs
    run.state.progress = TrainingProgress(**counts)
    run.state.first_step = run.progress.step + 1
    if "groups" in meta:
        restore_numbers(run.optimizer, meta["groups"])
    run.judge.restore(meta.get("spikes", {}))
    return meta


def save(run: OpenRun) -> None:
    """Starts a checkpoint, which is written in the background while the run continues."""
    meta: dict[str, Any] = {
        "progress": run.progress.as_dict(),
        "data": run.loader.samples.position(run.progress.samples),
        "experts": run.expert_placement.as_dict(),
        "config": run.config.model_dump(mode="json"),
        "measured": dict(run.state.measured),
        **run.average.as_dict(),
    }
    if run.judge.deviations is not None:
        meta["spikes"] = run.judge.as_dict()
    if any(numbers := changed_numbers(run.optimizer)):
        run.process.agree("optimizer", {"numbers in its groups": repr(numbers)})
        meta["groups"] = numbers
    with run.heartbeat.during(Phase.CKPT):
        run.checkpoints.save(run.progress.step, *state_tensors(run.model, run.optimizer), meta)
    run.state.saved_step = run.progress.step
