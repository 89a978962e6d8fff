"""Watches what a traced step does on the device: reads on the host, uploads, tensors out of place."""

import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._library.custom_ops import OPDEFS
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from triton.runtime.jit import JITFunction

from moebius.distributed.dispatch.allgather import AllGatherDispatcher
from moebius.distributed.dispatch.exchange import Counters

ROOT = str(Path(__file__).parents[2])
_SIZED_BY_VALUES = ("nonzero", "masked_select", "unique", "_unique2", "bincount")
NORM = 2.0  # of the gradient, for whoever reads it: it must be clipped


class Watch(TorchDispatchMode):
    """Counts `reads` and `uploads` by (what, where) while it is entered.

    A read is a value of the device that the host waits for; an upload a value of the host that goes
    to the device. Custom operators are taken apart, and what they return is compared
    with what they promise to tracers.
    """

    def __init__(self) -> None:
        super().__init__()
        self.reads: Counter[tuple[str, str]] = Counter()
        self.uploads: Counter[tuple[str, str]] = Counter()
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
        given = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
        on_device = [each for each in given if each.is_cuda]
        if name == "_local_scalar_dense":  # a value of the host has none here either
            if on_device:
                self.reads["item", where] += 1
            return _pretended(args[0])
        if name in _SIZED_BY_VALUES and on_device:
            self.reads[name, where] += 1
            return _as_long_as_it_can_be(name, args)
        if name == "index" and any(_is_mask(each) for each in args[1]):
            self.reads["index by a mask", where] += 1
            everywhere = [
                torch.arange(len(i), device=i.device) if _is_mask(i) else i for i in args[1]
            ]
            return func(args[0], everywhere)
        result = func(*args, **kwargs)
        results = [each for each in tree_leaves(result) if isinstance(each, Tensor)]
        if name in ("_to_copy", "copy_"):
            source = given[-1]
            if source.is_cuda and not results[0].is_cuda:
                self.reads["copy to the host", where] += 1
            elif results[0].is_cuda and not source.is_cuda:
                self.uploads["copy to the device", where] += 1
        if name in ("lift_fresh", "lift") and any(each.is_cuda for each in results):
            self.uploads["literal", where] += 1
        return result

    def kernel(self, name: str, tensors: list[Tensor]) -> None:
        """Checks a launch of Triton's, whose tensors must be on the device."""
        if not all(each.is_cuda for each in tensors):
            self.wrong.append(
                f"{name} at {_launched_at()}: {[str(each.device) for each in tensors]}"
            )

    def _taken_apart(self, func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        promised = func(*args, **kwargs)
        with self:
            result = OPDEFS[func.name().rsplit(".", 1)[0]]._init_fn(*args, **kwargs)
        for one, other in zip(tree_leaves(promised), tree_leaves(result), strict=True):
            if isinstance(one, Tensor) and _form(one) != _form(other):
                self.wrong.append(f"{func.name()} promises {_form(one)} and returns {_form(other)}")
        return result


@contextmanager
def watched(num_parts: int = 1, *, rest: float = 0.0) -> Iterator[Watch]:
    """Watches what is done under a `FakeTensorMode`, Triton's launches included.

    `num_parts`: among so many ranks, or nodes, a layer's routes are shared evenly, for whoever reads
    how many go where. `rest`: what is read of a list behind its first number, which is `NORM`: of a
    step the flags, which nobody has set.
    """
    watch = Watch()
    begin_pass, share = Counters.begin_pass, [1]

    def begin(self: Counters, num_routes: int, *, recomputed: bool) -> None:
        share[0] = num_routes // num_parts
        begin_pass(self, num_routes, recomputed=recomputed)

    def launch(kernel: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        del warmup
        assert all(size > 0 for size in grid), f"{kernel.__name__}: {grid}"
        watch.kernel(
            kernel.__name__,
            [each for each in (*args, *kwargs.values()) if isinstance(each, Tensor)],
        )

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
) -> Tensor:
    """Stands for torch's choice of a kernel, which it makes by asking the device."""
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


def _filled(shape: torch.Size, value: int) -> Any:
    return [_filled(shape[1:], value) for _ in range(shape[0])] if shape else value


def _as_long_as_it_can_be(name: str, args: tuple) -> Tensor:
    given = args[0]
    if name == "nonzero":
        return given.new_empty(given.numel(), given.dim(), dtype=torch.int64)
    raise NotImplementedError(f"{name} of {_form(given)}: say here how long its result can be")
