"""The parts of one run on one rank, put together, and continued where a checkpoint left them."""

import json
import logging
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from .. import __version__
from ..data_pipeline.read.loader import Loader
from ..data_pipeline.read.skipped_samples import LeftOut
from ..distributed.checkpoint.checkpoint_folder import DamagedCheckpoint
from ..distributed.checkpoint.checkpointer import Checkpointer
from ..distributed.checkpoint.format import CheckpointMeta
from ..distributed.checkpoint.loading import load
from ..distributed.checkpoint.recovery import WholeCheckpoint
from ..distributed.checkpoint.second_copy import SecondCopy
from ..distributed.dispatch.choose import dispatcher_of
from ..distributed.gradients import GradientReducer
from ..distributed.layout import Layout, plan_layout
from ..distributed.local_shard import local_shard_of
from ..distributed.mesh import Mesh, build_mesh
from ..distributed.parallelize import build_model
from ..distributed.placement.replicas import CopyReducer
from ..distributed.process.agreement import code_facts, flat_facts, layout_facts, parameter_facts
from ..distributed.process.process import Process
from ..kernels.backend import build_backend, resolve_backend
from ..kernels.cpu import onednn
from ..model.execution.compiled import compile_dense_parts
from ..model.execution.precision import products_dtype, stored_dtype
from ..model.transformer import Transformer
from .config.run_config import Config, ConfigError
from .expert_placement import ExpertPlacement
from .metrics.log import MetricsLog
from .metrics.sinks import open_metrics
from .optim import make_optimizer
from .rank_data import open_data_server
from .record.heartbeat import Heartbeat, Phase
from .record.route_trace import StepTrace
from .spikes.detector import Spike, SpikeDetector
from .spikes.record import (
    Rollback,
    as_values,
    from_values,
    left_out_by,
    read_rollbacks,
    why_abandoned,
    write_rollbacks,
)
from .state import TrainingProgress, allocate_moments, set_updates, state_tensors

logger = logging.getLogger(__name__)

_MOST_SKIPS = 100
# Why an update is skipped, and what helps where it is every time.
_NOT_FINITE = "gradients that are not finite"
_NO_TARGET = "no target that counts in the loss"
_SPIKE = "a spike of the loss or the gradient norm"
_ADVICE = {
    _NOT_FINITE: "lower optim.learning_rate or optim.clip_norm, or train in float32",
    _NO_TARGET: "look at the data's loss mask (prompts without answers?)",
    _SPIKE: "look at metrics.jsonl for what train.spikes judged, and whether it judges too strictly",
}
_COMPARE_S = 60.0  # how long ranks that have met already may take to compare what they are to run


@dataclass
class Run:
    """The parts of one run on one rank, and how far it has come."""

    config: Config
    run_dir: Path
    process: Process
    mesh: Mesh
    model: Transformer
    parameters: list[torch.nn.Parameter]  # this rank's shards
    optimizer: torch.optim.AdamW
    expert_placement: ExpertPlacement
    checkpoints: Checkpointer
    generation: int
    backend: str  # of the experts' products
    progress: TrainingProgress = field(default_factory=TrainingProgress)
    skipped_in_a_row: int = 0
    heartbeat: Heartbeat = field(default_factory=Heartbeat)
    set_aside: list[DamagedCheckpoint] = field(default_factory=list)  # when it was loaded last
    was_fetched: bool = False  # what it was resumed from, from the second place
    spikes: SpikeDetector | None = None  # None: it is off
    rollbacks: tuple[Rollback, ...] = ()

    @property
    def left_out(self) -> LeftOut:
        """Returns the samples that no step takes, since the run has gone back from them."""
        return left_out_by(self.rollbacks)

    @property
    def reducer(self) -> GradientReducer | CopyReducer:
        """What sums the gradients over the ranks; another one after every move of experts."""
        return self.expert_placement.reducer

    def count_skipped(self, why: str | None) -> None:
        """Counts steps that were skipped in a row, and ends a run that only skips.

        Every rank counts the same. `why`: what `why_skipped` says of the step that has just ended.

        Raises:
            ValueError: after so many skipped steps in a row it will not get better by itself.
        """
        self.skipped_in_a_row = 0 if why is None else self.skipped_in_a_row + 1
        if why == _NO_TARGET and self.process.rank == 0:
            logger.warning("step %d had %s, and its update was skipped", self.progress.step, why)
        if why is not None and self.skipped_in_a_row == _MOST_SKIPS:
            raise ValueError(
                f"{_MOST_SKIPS} steps in a row up to step {self.progress.step} were skipped, the "
                f"last for {why}: {_ADVICE[why]}, and continue from a checkpoint"
            )


def why_skipped(grad_norm: float, counted_targets: int | None) -> str | None:
    """Returns why a step must leave the weights as they are; None where it updates them.

    Args:
        grad_norm: of the whole gradient.
        counted_targets: of the step, over all ranks; None: every one counts.
    """
    if not math.isfinite(grad_norm):
        return _NOT_FINITE
    return _NO_TARGET if counted_targets == 0 else None


def judge(
    run: Run, grad_norm: float, counted_targets: int | None, loss: Sequence[float]
) -> tuple[str | None, Spike | None]:
    """Returns why the step must leave the weights as they are, and if it is a spike which.

    `loss`: of the step over all ranks, where spikes are looked for.
    """
    skipped, spike = why_skipped(grad_norm, counted_targets), None
    if run.spikes is not None and skipped != _NO_TARGET:
        spike = run.spikes.judge(run.progress.step + 1, loss[0], grad_norm)
    return skipped or (_SPIKE if spike else None), spike


def assemble(config: Config, run_dir: Path, process: Process) -> Run:
    """Builds everything that exists once per rank; no data has been read and nothing resumed yet.

    Raises:
        ValueError: the configuration does not fit the world, or the ranks differ in it, in their
            code or in their parameters.
    """
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
        overlap_chunks=config.mesh.overlap_chunks,
        check_every=config.mesh.check_every,
        ranks_per_node=process.ranks_per_node,
        timeout_s=process.timeout_s,
        sharding=config.mesh.sharding,
        precision=products_dtype(config.train.precision),
        stored=stored_dtype(config.train.precision),
    )
    model.recompute_layers(config.train.recompute)
    if config.train.compile:
        compile_dense_parts(model)
    process.agree("model", parameter_facts(model))
    optimizer = make_optimizer(config.optim, model.parameters())
    allocate_moments(model, optimizer)
    copy_to, keep_last = config.checkpoint.copy_to, config.checkpoint.keep_last
    checkpoints = Checkpointer(
        run_dir / "checkpoints",
        mesh=mesh,
        process=process,
        keep_last=keep_last,
        generation=generation,
        generation_file=run_dir / "generation",
        verify=config.checkpoint.verify,
        on_failure=config.checkpoint.on_failure,
        second=SecondCopy(copy_to, run_dir, keep_last=keep_last) if copy_to else None,
    )
    return Run(
        config=config,
        run_dir=run_dir,
        process=process,
        mesh=mesh,
        model=model,
        parameters=list(model.parameters()),
        optimizer=optimizer,
        expert_placement=ExpertPlacement(config.mesh, model, optimizer, mesh),
        checkpoints=checkpoints,
        generation=generation,
        backend=backend,
        spikes=SpikeDetector(config.train.spikes) if config.train.spikes.action != "off" else None,
    )


def _agree_on_run(config: Config, process: Process) -> tuple[Layout, str]:
    """Compares with the other ranks what is to be run; returns the layout and the backend."""
    compare_s = min(_COMPARE_S, process.timeout_s)
    process.agree(
        "run",
        flat_facts("config", config.model_dump(mode="json")) | code_facts(),
        timeout_s=compare_s,
    )
    config.check_world(process.world_size)
    backend = choose_kernels(config, process)
    layout = plan_layout(config.mesh, process.world_size)
    process.agree("layout", layout_facts(layout), timeout_s=compare_s)
    return layout, backend


def choose_kernels(config: Config, process: Process) -> str:
    """Returns the backend of the experts' products, which is the same on every rank.

    It also sets how float32 is multiplied on CPUs.

    Raises:
        ValueError: it cannot run here, or the ranks' machines differ; or float32 through oneDNN is
            asked for and not exact here.
    """
    refused: ValueError | None = None
    try:
        backend = resolve_backend(
            config.kernels.name, process.device, products_dtype(config.train.precision)
        )
        build_backend(backend)
        if config.kernels.onednn:
            onednn.allow_if_exact()
    except ValueError as error:  # told to the other ranks first, which would wait for this one
        backend, refused = str(error), error
    process.agree("kernels", {"kernels.backend on the rank's machine": backend})
    if refused is not None:
        raise refused
    return backend


def check_generation(run_dir: Path) -> int:
    """Returns this process's generation; 0 where no supervisor started it.

    Raises:
        ConfigError: a supervisor has numbered the generations of this folder, and this process is
            none of them.
    """
    mine = os.environ.get("MOEBIUS_GENERATION")
    if mine is None and (run_dir / "generation").exists():
        raise ConfigError(
            f"{run_dir}: belongs to a job, whose supervisor alone starts its ranks; continue it "
            "with `moebius train` or `moebius submit` and --run-dir, or use a folder of its own"
        )
    return int(mine or 0)


def resume(run: Run) -> dict[str, Any] | None:
    """Continues from the newest whole checkpoint of the run folder, if there ever was one.

    Newer ones that are damaged are set aside, once the state is loaded. What the run has left out
    stays left out.

    Returns:
        The checkpoint's position in the data; None: the run starts at its beginning.

    Raises:
        CheckpointError: there were checkpoints, and none is whole or fits; on all ranks.
    """
    written = run.checkpoints.on_rank_0(lambda: as_values(read_rollbacks(run.run_dir)))
    run.rollbacks = from_values(written)
    found = run.checkpoints.newest_whole(why_not=partial(why_not_from, run))
    if found is None:
        return None
    meta = load_state(run, found)
    known = from_values(meta.get("rollbacks", []))
    if len(known) > len(run.rollbacks):  # the file was lost
        run.rollbacks = known
        run.checkpoints.on_rank_0(lambda: write_rollbacks(run.run_dir, known))
    run.set_aside = run.checkpoints.adopt(found)
    run.was_fetched = found.fetched_for is not None
    return meta["data"]


def why_not_from(run: Run, meta: CheckpointMeta) -> str:
    """Returns why the run must not go on from a checkpoint: "" where it may."""
    return why_abandoned(meta.step, len(meta.meta.get("rollbacks", [])), run.rollbacks)


def load_state(run: Run, found: WholeCheckpoint) -> dict[str, Any]:
    """Loads a checkpoint into the run as it stands, and returns its meta; a collective call."""
    run.expert_placement.restore(found.meta.meta.get("experts", {}))
    tensors, shards = state_tensors(run.model, run.optimizer)
    meta = load(found.path, tensors, shards, mesh=run.mesh, check_bytes=False)
    run.progress = TrainingProgress(**meta["progress"])
    set_updates(run.model, run.optimizer, run.progress.updates)
    if run.spikes is not None:
        run.spikes.restore(meta.get("spikes", {}))
    return meta


def save(run: Run, loader: Loader) -> None:
    """Starts a checkpoint; it is written in the background while the run goes on."""
    meta: dict[str, Any] = {
        "progress": run.progress.as_dict(),
        "data": loader.position(run.progress.samples),
        "experts": run.expert_placement.as_dict(),
        "rollbacks": as_values(run.rollbacks),
        "config": run.config.model_dump(mode="json"),
    }
    if run.spikes is not None:
        meta["spikes"] = run.spikes.as_dict()
    tensors, shards = state_tensors(run.model, run.optimizer)
    with run.heartbeat.during(Phase.CKPT):
        run.checkpoints.save(run.progress.step, tensors, shards, meta)


def log_saved(run: Run, log: MetricsLog) -> None:
    """Writes to the log which checkpoints were completed since the last call."""
    for record in run.checkpoints.poll():
        log.write(
            "checkpoint",
            record.step,
            seconds=round(record.seconds, 3),
            blocked_s=round(record.blocked_s, 5),
            verify_s=round(record.verify_s, 3),
            bytes=record.num_bytes,
            error=record.error,
        )
    for copy in run.checkpoints.poll_copies():
        log.write(
            "checkpoint_copy",
            copy.step,
            seconds=round(copy.seconds, 3),
            bytes=copy.num_bytes,
            error=copy.error,
        )


def trace_next_step(run: Run) -> StepTrace:
    """Returns what records the coming step's routes, if `train.record_routing` wants them."""
    return StepTrace(
        run.model,
        run.run_dir,
        step=run.progress.step + 1,
        every=run.config.train.record_routing,
        rank=run.process.rank,
        num_ranks=run.process.world_size,
    )


def open_log(run: Run, *, resumed: bool, start_s: Mapping[str, float]) -> MetricsLog:
    """Opens the run's log of metrics, and writes the first line, which says what runs where.

    `start_s`: how long each phase of this rank's start took.
    """
    active, first_step = run.process.rank == 0, run.progress.step + 1
    log = open_metrics(run.config, run.run_dir, active=active, first_step=first_step)
    log.write(
        "start",
        run.progress.step,
        generation=run.generation,
        version=__version__,
        world_size=run.process.world_size,
        resumed_from_step=run.progress.step if resumed else None,
        **({"fetched_from_second_copy": True} if run.was_fetched else {}),
        layout=str(run.mesh.layout),
        device=str(run.process.device),
        steps=run.config.train.steps,
        parameters=count_global_parameters(run),
        expert_depths=run.config.model.expert_depths,
        kernels=run.backend,
        **_dispatcher_facts(run.model),
        start_s=dict(start_s),
    )
    log_set_aside(run, log)
    return log


def _dispatcher_facts(model: torch.nn.Module) -> dict[str, str]:
    """Returns the dispatcher of a model whose experts are spread, and why it was chosen."""
    setup = dispatcher_of(model)
    if setup is None:
        return {}
    return {"dispatcher": setup.name} | ({"dispatcher_why": setup.why} if setup.why else {})


def log_set_aside(run: Run, log: MetricsLog) -> None:
    """Writes to the log which damaged checkpoints were passed over when the run was loaded."""
    for damaged in run.set_aside:
        logger.warning("%s; it is set aside as %s", damaged.why, damaged.path.name)
        log.write(
            "checkpoint_set_aside",
            damaged.step,
            path=damaged.path.name,
            why=damaged.why,
            resumed_from_step=run.progress.step,
        )


def open_loader(run: Run, position: dict[str, Any] | None) -> Loader:
    """Opens the data where the run stands: a seek, whatever the number of ranks was before.

    `position` is of the checkpoint that the data must go on from.
    """
    config = run.config
    start = run.progress.samples
    loader = Loader(
        config.data,
        global_batch=config.train.global_batch,
        micro_batch=config.train.micro_batch,
        rank=run.process.rank,
        num_ranks=run.process.world_size,
        start_sample=run.progress.samples,
        skip_folder=run.run_dir / "skipped",
        server=open_data_server(config, run.process, start),
        left_out=run.left_out,
        continues=None if config.data.override_position else position,
    )
    try:
        _check_data(run, loader, position)
    except BaseException:
        loader.close()
        raise
    return loader


def _check_data(run: Run, loader: Loader, position: dict[str, Any] | None) -> None:
    """Says where the data is another than the checkpoint's, and checks that it is enough."""
    config = run.config
    if position is not None and config.data.override_position and run.process.rank == 0:
        for difference in loader.differences(position):
            logger.warning("data.override_position: continuing on other data: %s", difference)
    last = run.left_out.step_at(config.train.steps, config.train.global_batch)
    loader.check_enough(last.stop)


def write_result(run: Run, state: str) -> None:
    """Writes result.json, on rank 0, when the run has ended as it should.

    Without it the supervisor does not believe an exit code of 0.
    """
    if run.process.rank == 0:
        partial_file = run.run_dir / "result.json.tmp"
        partial_file.write_text(
            json.dumps({"state": state, "step": run.progress.step}) + "\n", encoding="utf-8"
        )
        partial_file.replace(run.run_dir / "result.json")


def count_global_parameters(run: Run) -> int:
    """Returns the number of parameters of the whole model, whatever this rank stores of it."""
    return sum(math.prod(local_shard_of(parameter).global_shape) for parameter in run.parameters)
