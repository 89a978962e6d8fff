"""Traces whole training steps of any run on a GPU that is not there, on one rank of a world that is
not there either.

    (given `cases` as JSON on the standard input, in a process that device.py starts)
    python tests/fake_cuda/traced_step.py

Everything is as in a run (train/loop.py), but that tensors have no values: forward, backward, the
sum of the gradients, clipping, AdamW, and an evaluation. Whoever asks for a value is told one, and
counted. Streams are stood for by objects that do nothing.
"""

import json
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, Self
from unittest import mock

import numpy as np
import torch
import torch._dynamo  # before the patches: it looks at what torch.cuda has
import torch.distributed as dist
from torch import nn
from torch._subclasses import FakeTensorMode
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.testing._internal.distributed.fake_pg import FakeStore
from watch import Watch, watched

from moebius.data_pipeline.read.loader import Batch, ValidationBatch
from moebius.distributed import parallelize
from moebius.distributed.dispatch import alltoall, expert_map
from moebius.distributed.dispatch.table import needs_nodes
from moebius.distributed.mesh import Mesh
from moebius.distributed.process.process import Process
from moebius.kernels import backend, permute
from moebius.kernels.fused import router
from moebius.kernels.triton import tiles
from moebius.train import evaluate
from moebius.train import run as train_run
from moebius.train.config.run_config import Config
from moebius.train.loop import Run, step
from moebius.train.run import assemble

DEVICE = torch.device("cuda", 0)


class Case(NamedTuple):
    """A run to trace: its whole configuration, and how many ranks there are."""

    name: str
    config: Mapping[str, Any]
    num_ranks: int = 1


class _Stream:
    """A stream, an event, and what enters them: nothing happens."""

    def __init__(self, *_args: Any, **_named: Any) -> None: ...

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **named: self

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None: ...


class _Checkpoints:
    """Checkpoints of a run that never saves."""

    must_stop = False

    def __init__(self, *_args: Any, **_named: Any) -> None: ...


def _to_empty(module: nn.Module, *, device: torch.device) -> nn.Module:
    """Does what torch's does, which cannot exchange a tensor that has no storage."""
    for part in module.modules():
        for name, parameter in part.named_parameters(recurse=False):
            on_device = nn.Parameter(torch.empty_like(parameter, device=device))
            on_device.requires_grad_(parameter.requires_grad)
            part.register_parameter(name, on_device)
        for name, buffer in part.named_buffers(recurse=False):
            part.register_buffer(name, torch.empty_like(buffer, device=device))
    return module


def _no_values(name: str, like: nn.Parameter, seed: int) -> torch.Tensor:
    del name, seed
    return torch.empty(like.shape)


def _device_mesh(mesh: Mesh, *axes: str) -> Any:
    with unset_fake_temporarily():  # it reads the ranks that it is given
        return _make_device_mesh(mesh, *axes)


_make_device_mesh = Mesh.device_mesh


def _no_reason(*_: object, **__: object) -> None:
    return None


@contextmanager
def pretended_gpu() -> Iterator[None]:
    """Lets the library believe in an H100 whose driver, streams and memory do nothing."""
    places = [(backend.triton_library, "reason_against")]
    places += [(each, "reason_against") for each in (permute, router)]
    patches = [mock.patch.object(module, name, _no_reason) for module, name in places]
    patches += [
        mock.patch.object(torch.cuda, name, value)
        for name, value in {
            "is_available": lambda: True,
            "device_count": lambda: 1,
            "current_device": lambda: 0,
            "set_device": _no_reason,
            "synchronize": _no_reason,
            "current_stream": _Stream,
            "default_stream": _Stream,
            "Stream": _Stream,
            "Event": _Stream,
            "stream": _Stream,
            "device": _Stream,
        }.items()
    ]
    patches += [
        mock.patch.object(tiles, "target", return_value="sm_90"),
        mock.patch.object(Process, "agree", _no_reason),
        mock.patch.object(train_run, "Checkpointer", _Checkpoints),
        mock.patch.object(nn.Module, "to_empty", _to_empty),
        mock.patch.object(Mesh, "device_mesh", _device_mesh),
        # the mode would prepare a device that can compute
        mock.patch.object(FakeTensorMode, "avoid_device_init", True),
        mock.patch.object(parallelize, "draw", _no_values),
    ]
    backend.reason_against.cache_clear()
    backend._fastest.cache_clear()
    for patch in patches:
        patch.start()
    try:
        # what makes literals on the device is a setting of the thread
        with torch.autograd.set_multithreading_enabled(False):
            yield
    finally:
        for patch in reversed(patches):
            patch.stop()


@contextmanager
def pretended_world(num_ranks: int) -> Iterator[Process]:
    """Joins a world of which no other rank exists: what comes from them has a shape and no value."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=num_ranks)
    _forget_tables()
    try:
        per_node = max(1, num_ranks // 2)
        yield Process(0, num_ranks, 0, DEVICE, "fake", 60.0, ranks_per_node=per_node)
    finally:
        dist.destroy_process_group()
        _forget_tables()


def _forget_tables() -> None:
    """Empties the caches of tables on a device, which belong to one trace."""
    for module in (alltoall, expert_map):
        for value in list(vars(module).values()):
            if hasattr(value, "cache_clear"):
                value.cache_clear()


def trace(case: Case) -> tuple[Watch, Watch]:
    """Returns what a step did, and what an evaluation did."""
    config = Config.model_validate(case.config)
    with (
        tempfile.TemporaryDirectory() as folder,
        pretended_gpu(),
        pretended_world(case.num_ranks) as process,
        FakeTensorMode(allow_non_fake_inputs=True),
    ):
        run = assemble(config, Path(folder), process)
        batch = _batch(config, case.num_ranks)
        parts = 2 if needs_nodes(config.mesh.dispatcher) else case.num_ranks
        with watched(parts) as first:
            step(run, batch, 1e-4)
        with watched(parts) as second:
            step(run, batch, 1e-4)
        second.wrong += first.wrong
        return second, _trace_evaluation(run, parts)


def _batch(config: Config, num_ranks: int) -> Batch:
    micro = config.train.micro_batch
    shape = (config.train.global_batch // num_ranks // micro, micro, config.data.seq_len + 1)
    return Batch(np.ones(shape, dtype=np.int64), 0, 0, equal_shapes=True)


def _trace_evaluation(run: Run, parts: int) -> Watch:
    config = run.config
    rows = np.ones((config.train.micro_batch, config.data.seq_len + 1), dtype=np.int64)
    group = config.model.evaluation_group_sequences
    rows = rows.repeat(-(-len(rows) // group) * group // len(rows) or 1, axis=0)
    batch = ValidationBatch(rows, np.ones(len(rows), dtype=bool))
    with (
        mock.patch.object(evaluate, "validation_batches", return_value=[batch]),
        mock.patch.object(evaluate, "open_fetcher"),
        watched(parts, rest=1.0) as watch,
    ):
        evaluate.evaluate(run.model, config, run.process)
    return watch


def main() -> None:
    """Traces the cases of the standard input, and prints a line of JSON for each."""
    for words in json.load(sys.stdin):
        case, began_s = Case(**words), time.perf_counter()
        try:
            traced = trace(case)
        except Exception as error:
            error.add_note(f"while {case.name} was traced")
            raise
        found = dict(zip(("step", "evaluation"), map(_figures, traced), strict=True))
        seconds = round(time.perf_counter() - began_s, 2)
        print(json.dumps({"name": case.name, "seconds": seconds, **found}), flush=True)


def _figures(watch: Watch) -> dict[str, Any]:
    def rows(counter: Counter[tuple[str, str]]) -> list[list[Any]]:
        return [[*key, number] for key, number in counter.most_common()]

    return {
        "reads": rows(watch.reads),
        "uploads": rows(watch.uploads),
        "wrong": watch.wrong,
    }


if __name__ == "__main__":
    main()
