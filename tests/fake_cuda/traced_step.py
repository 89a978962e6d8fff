"""Traces whole training steps of any run on a GPU that is not there, on one rank of a world that is
not there either.

    (given `cases` as JSON on the standard input, in a process that test_step.py starts)
    python tests/fake_cuda/traced_step.py

Everything is as in a run (train/loop.py), but that tensors have no values: forward, backward, the
sum of the gradients, clipping, AdamW, and an evaluation. Whoever asks for a value is told one, and
counted; so is every copy of what lies on the host, for which a GPU's queue waits unless it is pinned.
Streams are stood for by objects that do nothing.
"""

import json
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any, Self
from unittest import mock

import numpy as np
import torch
import torch._dynamo  # before the patches: it looks at what torch.cuda has
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch._library.custom_ops import OPDEFS
from torch._subclasses import FakeTensorMode
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from triton.runtime.jit import JITFunction

import moebius
from moebius.data_pipeline.read.loader import Batch, ValidationBatch
from moebius.distributed import parallelize
from moebius.distributed.dispatch import alltoall, expert_map
from moebius.distributed.dispatch.allgather import AllGatherDispatcher
from moebius.distributed.dispatch.exchange import Counters
from moebius.distributed.dispatch.table import needs_nodes
from moebius.distributed.mesh import Mesh
from moebius.distributed.process.process import Process
from moebius.kernels import backend, permute
from moebius.kernels.fused import router
from moebius.kernels.triton import tiles
from moebius.model import layers
from moebius.train import evaluate
from moebius.train import run as train_run
from moebius.train.config.run_config import Config
from moebius.train.loop import Run, step
from moebius.train.run import assemble

DEVICE = torch.device("cuda", 0)
ROOT = str(Path(moebius.__file__).parent)
_SIZED_BY_VALUES = ("masked_select", "unique", "_unique2", "bincount")
NORM = 2.0  # of the gradient, for whoever reads it: it must be clipped


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


def _pinned(values: Tensor) -> Tensor:
    copy = values.clone()
    copy.pinned_here = True  # pyright: ignore[reportAttributeAccessIssue]
    return copy


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
    streams = ("current_stream", "default_stream", "Stream", "Event", "stream", "device")
    values = {
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "set_device": _no_reason,
        "synchronize": _no_reason,
        "get_device_capability": lambda *_: (9, 0),
    }
    patches = [
        *(
            mock.patch.object(module, "reason_against", _no_reason)
            for module in (backend.triton_library, permute, router)
        ),
        mock.patch.multiple(torch.cuda, **values, **dict.fromkeys(streams, _Stream)),
        mock.patch.object(tiles, "target", return_value="sm_90"),
        mock.patch.object(Process, "agree", _no_reason),
        mock.patch.object(train_run, "Checkpointer", _Checkpoints),
        mock.patch.object(nn.Module, "to_empty", _to_empty),
        mock.patch.object(Tensor, "pin_memory", _pinned),
        mock.patch.object(Mesh, "device_mesh", _device_mesh),
        # the mode would prepare a device that can compute
        mock.patch.object(FakeTensorMode, "avoid_device_init", True),
        mock.patch.object(parallelize, "draw", _no_values),
    ]
    backend.reason_against.cache_clear()
    backend._fastest.cache_clear()
    with ExitStack() as stack:
        for patch in patches:
            stack.enter_context(patch)
        # what makes literals on the device is a setting of the thread
        stack.enter_context(torch.autograd.set_multithreading_enabled(False))
        yield


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
    for module in (alltoall, expert_map, layers):
        for value in list(vars(module).values()):
            if hasattr(value, "cache_clear"):
                value.cache_clear()


# What a step does on the device ---------------------------------------------------------------------


class Watch(TorchDispatchMode):
    """Counts by (what, where) while it is entered: `reads`, values that the host waits for, and
    `copies`, of what lies on the host.

    Custom operators are taken apart, and what they return is compared with what they promise to
    tracers.
    """

    def __init__(self) -> None:
        super().__init__()
        self.reads: Counter[tuple[str, str]] = Counter()
        self.copies: Counter[tuple[str, str]] = Counter()
        self.wrong: list[str] = []  # what is not as it must be

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "prim":  # asks where a tensor is
            return func(*args, **kwargs)
        if func.namespace == "moebius":
            return self._taken_apart(func, args, kwargs)
        name = func.__name__.split(".")[0]
        where = _launched_at()
        self.note(name, where, (args, kwargs))
        given = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
        on_device = [each for each in given if each.is_cuda]
        if name == "_local_scalar_dense":  # a value of the host has none here either
            if on_device:
                self.reads["item", where] += 1
            return _pretended(args[0])
        if name in _SIZED_BY_VALUES and on_device:
            raise NotImplementedError(f"{name} of {_form(args[0])}: say here how long it can be")
        if name == "nonzero" and on_device:
            self.reads[name, where] += 1
            return args[0].new_empty(args[0].numel(), args[0].dim(), dtype=torch.int64)
        if name == "index" and any(_is_mask(each) for each in args[1]):
            self.reads["index by a mask", where] += 1
            everywhere = [
                torch.arange(len(i), device=i.device) if _is_mask(i) else i for i in args[1]
            ]
            return func(args[0], everywhere)
        result = func(*args, **kwargs)
        if name in ("_to_copy", "copy_") and given[-1].is_cuda and not result.is_cuda:
            self.reads["copy to the host", where] += 1
        if copied := _copied(name, args, given, result):
            self.copies[copied, where] += 1
        return result

    def note(self, name: str, where: str, given: Any) -> None:
        """Is told of every call, and of every launch of Triton's; for who compares them."""

    def _taken_apart(self, func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        promised = func(*args, **kwargs)
        with self:
            result = OPDEFS[func.name().rsplit(".", 1)[0]]._init_fn(*args, **kwargs)
        for one, other in zip(tree_leaves(promised), tree_leaves(result), strict=True):
            if isinstance(one, Tensor) and _form(one) != _form(other):
                self.wrong.append(f"{func.name()} promises {_form(one)} and returns {_form(other)}")
        return result


@contextmanager
def watched(
    num_parts: int = 1, *, rest: float = 0.0, watch: Watch | None = None
) -> Iterator[Watch]:
    """Watches what is done under a `FakeTensorMode`, Triton's launches included.

    `num_parts`: among so many ranks, or nodes, a layer's routes are shared evenly, for whoever reads
    how many go where. `rest`: what is read of a list behind its first number, which is `NORM`: of a
    step the flags, which nobody has set.
    """
    watch = watch or Watch()
    begin_pass, share = Counters.begin_pass, [1]

    def begin(self: Counters, num_routes: int, *, recomputed: bool) -> None:
        share[0] = num_routes // num_parts
        begin_pass(self, num_routes, recomputed=recomputed)

    def launch(kernel: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        del warmup
        assert all(size > 0 for size in grid), f"{kernel.__name__}: {grid}"
        tensors = [each for each in (*args, *kwargs.values()) if isinstance(each, Tensor)]
        if away := [str(each.device) for each in tensors if not each.is_cuda]:
            watch.wrong.append(f"{kernel.__name__} at {_launched_at()}: {away}")
        watch.note(kernel.fn.__name__, _launched_at(), (grid, args, kwargs))

    def counts(self: Counters, values: Tensor) -> Any:
        watch.reads["counts", _launched_at()] += 1
        return _filled(values.shape, share[0])

    def all_sizes(self: Any, x_UD: Tensor, routes: Any, rank_N: Tensor) -> list[list[int]]:
        watch.reads["counts", "allgather"] += 1
        shares = [share[0]] * num_parts
        return [[len(x_UD), routes.num_targets, len(rank_N), *shares]] * num_parts

    def to_list(values: Tensor) -> Any:
        if values.is_cuda:
            watch.reads["tolist", _launched_at()] += 1
        if values.dim() == 1:
            return [NORM] + [rest] * (values.numel() - 1)
        return _filled(values.shape, 1)

    with (
        mock.patch.object(JITFunction, "run", launch),
        mock.patch.object(Counters, "begin_pass", begin),
        mock.patch.object(Counters, "read", counts),
        mock.patch.object(AllGatherDispatcher, "_sizes", all_sizes),
        mock.patch.object(FakeTensor, "tolist", to_list),
        mock.patch.object(FakeTensor, "data_ptr", return_value=0, create=True),
        mock.patch.object(F, "scaled_dot_product_attention", _fused_attention),
        mock.patch.object(torch.cuda, "device_of", return_value=nullcontext()),
        watch,
    ):
        yield watch


def _fused_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    *,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Stands for torch's choice of a kernel, which it makes by asking the device."""
    if enable_gqa:
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    bias = attn_mask
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        bias = torch.zeros_like(attn_mask, dtype=q.dtype).masked_fill_(~attn_mask, -torch.inf)
    fused = torch.ops.aten._scaled_dot_product_efficient_attention
    return fused(q, k, v, bias, True, 0.0, is_causal, scale=scale)[0]


def _launched_at() -> str:
    """Returns FILE:FUNCTION of the innermost frame of the library; "" where torch's own node runs."""
    frame = sys._getframe(1)
    beside = tuple(f"{ROOT}/{name}" for name in ("tests", ".venv"))
    while frame is not None and frame.f_code.co_name != "_engine_run_backward":
        file = frame.f_code.co_filename
        if file.startswith(ROOT) and not file.startswith(beside):
            return f"{Path(file).relative_to(ROOT)}:{frame.f_code.co_name}"
        frame = frame.f_back
    return ""


def _form(tensor: Tensor) -> tuple[Any, ...]:
    return tuple(tensor.shape), tensor.dtype, tensor.device


def _pretended(scalar: Tensor) -> Any:
    """A value for whoever reads one: so that loops end, and shapes are not empty."""
    return {True: 1.0, False: 1}[scalar.is_floating_point()]


def _is_mask(index: Tensor | None) -> bool:
    return index is not None and index.is_cuda and index.dtype == torch.bool


def _copied(name: str, args: tuple, given: list[Tensor], result: Any) -> str:
    """Returns how a call copies what lies on the host to the device; "": not at all."""
    if name in ("_to_copy", "copy_") and result.is_cuda and not given[-1].is_cuda:
        return "pinned" if getattr(given[-1], "pinned_here", False) else "unpinned"
    if name.startswith("index") and given[0].is_cuda and isinstance(args[1], (list, tuple)):
        return "unpinned index" if any(i is not None and not i.is_cuda for i in args[1]) else ""
    return ""


def _filled(shape: torch.Size, value: int) -> Any:
    return [_filled(shape[1:], value) for _ in range(shape[0])] if shape else value


# The trace -------------------------------------------------------------------------------------------


def trace(config: Config, num_ranks: int) -> dict[str, Watch]:
    """Returns what a step did, and what an evaluation did."""
    with (
        tempfile.TemporaryDirectory() as folder,
        pretended_gpu(),
        pretended_world(num_ranks) as process,
        FakeTensorMode(allow_non_fake_inputs=True),
    ):
        run = assemble(config, Path(folder), process)
        batch = batch_of(config, num_ranks)
        parts = 2 if needs_nodes(config.mesh.dispatcher) else num_ranks
        with watched(parts) as first:
            step(run, batch, 1e-4)
        with watched(parts) as second:
            step(run, batch, 1e-4)
        second.wrong += first.wrong
        return {"step": second, "evaluation": _trace_evaluation(run, parts)}


def batch_of(config: Config, num_ranks: int) -> Batch:
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
    for case in json.load(sys.stdin):
        try:
            traced = trace(Config.model_validate(case["config"]), case["num_ranks"])
        except Exception as error:
            error.add_note(f"while {case['name']} was traced")
            raise
        print(json.dumps({part: _figures(watch) for part, watch in traced.items()}), flush=True)


def _figures(watch: Watch) -> dict[str, Any]:
    counted = {"reads": watch.reads, "copies": watch.copies}
    return {
        what: [[*key, number] for key, number in found.most_common()]
        for what, found in counted.items()
    } | {"wrong": watch.wrong}


if __name__ == "__main__":
    main()
