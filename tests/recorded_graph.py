"""A CUDA graph's rules on a CPU: records every call that a pass makes below autograd, and repeats the
calls on the same memory without any Python of the pass.

Whatever Python computed (a key, a branch, an entry of a dictionary, `.grad = …`) stays as it was when it
was recorded, as in a graph. A capture does no work: what it wrote into older memory is restored, and what
it made has no values before a replay. It refuses what CUDA refuses: the host reads a value, a size
depends on values, or values come from the host's memory. Our own operators are one call each: inside,
the CPU's read what the GPU's do not.
"""

from collections.abc import Callable
from typing import Any, cast
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode
from torch.utils._pytree import tree_leaves, tree_map_only

from moebius.train.cuda_graph import CudaDriver, Pass
from moebius.train.loss import MicroBatchLoss

_REFUSED = {
    **dict.fromkeys(("_local_scalar_dense", "is_nonzero", "equal"), "the host reads a value"),
    **dict.fromkeys(
        ("nonzero", "masked_select", "_unique2", "unique_dim", "bincount", "repeat_interleave"),
        "a size depends on values",
    ),
    "lift_fresh": "values come from the host's memory",
}
_BY_INDEX = ("index", "index_put", "index_put_")
_NO_WORK = ("empty", "empty_like", "new_empty", "empty_strided")
_POISON = -7


class NotCapturable(RuntimeError):
    """A pass does what a CUDA graph cannot hold."""


class Recording(TorchDispatchMode):
    """Records the calls of the passes that run within it."""

    def __init__(self) -> None:
        super().__init__()
        self._calls: list[tuple[Callable[..., Any], Any, Any, list[Tensor]]] = []
        self._made: set[int] = set()  # storages that the calls returned
        self._before: dict[int, tuple[Tensor, Tensor]] = {}  # older memory that they wrote

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Makes a call, and records it."""
        kwargs, name = kwargs or {}, func.__name__.partition(".")[0]
        if func.namespace == "prim":
            return func(*args, **kwargs)
        _check(func, name, args)
        for argument, value in zip(func._schema.arguments, args, strict=False):
            if argument.alias_info is not None and argument.alias_info.is_write:
                self._keep(_tensors(value))
        result = func(*args, **kwargs)
        if not _returns_view(func):
            outs = [each.detach() for each in _tensors(result)]
            self._made.update(_storage(each) for each in outs if _storage(each) not in self._before)
            if name not in _NO_WORK:
                same = tree_map_only(Tensor, Tensor.detach, (args, kwargs))  # the same memory
                self._calls.append((func, *same, outs))
        return result

    def _keep(self, written: list[Tensor]) -> None:
        for each in written:
            if _storage(each) not in self._made | self._before.keys():
                whole = torch.empty(0, dtype=each.dtype).set_(each.untyped_storage())
                self._before[_storage(each)] = whole, whole.clone()

    @torch.no_grad()
    def undo(self) -> None:
        """Takes back what the calls did."""
        for *_, outs in self._calls:
            for out in outs:
                if _storage(out) in self._made:
                    out.fill_(_POISON)
        for whole, values in self._before.values():
            whole.copy_(values)

    @torch.no_grad()
    def replay(self) -> None:
        """Repeats the calls; new results go where those of the recorded calls are."""
        for func, args, kwargs, outs in self._calls:
            for old, new in zip(outs, _tensors(func(*args, **kwargs)), strict=True):
                if _storage(old) != _storage(new):
                    old.copy_(new)


class RecordingDriver(CudaDriver):
    """Takes CudaDriver's place on a CPU, and counts."""

    def __init__(self) -> None:
        self.warm_ups = self.captures = self.replays = 0

    def warm_up(self, run: Pass) -> MicroBatchLoss:
        """Runs a pass as it is."""
        self.warm_ups += 1
        return run()

    def capture(self, run: Pass) -> tuple[MicroBatchLoss, Callable[[], None]]:
        """Records a pass."""
        recording, tolist = Recording(), Tensor.tolist

        def read(tensor: Tensor) -> Any:
            if _get_current_dispatch_mode() is recording:
                raise NotCapturable("tolist: the host reads a value")
            return tolist(tensor)

        try:
            with (
                mock.patch.object(Tensor, "tolist", read),
                torch.autograd.set_multithreading_enabled(False),
                recording,
            ):
                result = run()
        finally:
            recording.undo()
        self.captures += 1

        def replay() -> None:
            self.replays += 1
            recording.replay()

        return result, replay


def _check(func: Any, name: str, args: Any) -> None:
    why = _REFUSED.get(name)
    if name in _BY_INDEX and any(each.dtype == torch.bool for each in _tensors(args[1])):
        why = "a size depends on values"
    if why is not None:
        raise NotCapturable(f"{func}: {why}")


def _returns_view(func: Any) -> bool:
    returned = func._schema.returns
    alias = returned[0].alias_info if returned else None
    return "_unsafe_view" in str(func) or (alias is not None and not alias.is_write)


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _tensors(value: Any) -> list[Tensor]:
    return [cast("Tensor", each) for each in tree_leaves(value) if isinstance(each, Tensor)]
