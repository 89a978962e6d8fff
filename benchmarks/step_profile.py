"""Where the time of a training step goes, by part of the model: forward and backward together.

Forward: the parts' methods are wrapped in ranges of torch's profiler. Backward: every node of
autograd carries a number that grew in the forward pass, so a node belongs to the part in whose
range its number was given out. On a GPU the time is that of kernels, on a CPU that of operations;
profiling itself makes a step of many small operations longer, so shares say more than times.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch._C._autograd import DeviceType, _get_sequence_nr  # pyright: ignore[reportAttributeAccessIssue]
from torch.profiler import ProfilerActivity, profile, record_function

import moebius.model.execution.precision as precision
import moebius.train.loop as loop
from moebius.data_pipeline.read.loader import Batch
from moebius.model.attention.attention import DenseAttention, SwitchHead
from moebius.model.experts import ExpertMLPs
from moebius.model.layers import DenseMLP, LayerNorm
from moebius.model.moe import SparseLayer
from moebius.model.routers.router import Router
from moebius.train.run import Run

_PREFIX = "part: "
_NODE = "autograd::engine::evaluate_function: "
REST = "everything else"


@dataclass
class Parts:
    """Ranges of autograd's numbers by part, innermost first where they lie in each other."""

    ranges: list[tuple[int, int, str]] = field(default_factory=list)

    def labelled(self, label: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            first = _get_sequence_nr()
            with record_function(_PREFIX + label):
                result = function(*args, **kwargs)
            self.ranges.append((first, _get_sequence_nr(), label))
            return result

        return run

    def of(self, number: int) -> str:
        """Ranges are noted when they end, so the innermost of several stands before the others."""
        return next((label for first, end, label in self.ranges if first <= number < end), REST)


def profile_step(run: Run, batch: Batch) -> dict[str, float]:
    """Milliseconds of one training step by part, the largest first."""
    parts = Parts()
    on_gpu = run.process.device.type == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    with wrapped(run, parts), profile(activities=activities) as recorded:
        with record_function(_PREFIX + REST):
            loop.step(run, batch, 1e-4)
            if on_gpu:
                torch.cuda.synchronize()
    return add_up(list(recorded.events() or ()), parts, on_gpu=on_gpu)


def add_up(events: list[Any], parts: Parts, *, on_gpu: bool) -> dict[str, float]:
    spent: dict[str, float] = defaultdict(float)

    def milliseconds(event: Any) -> float:
        return (event.device_time_total if on_gpu else event.cpu_time_total) / 1e3

    for event in events:
        label = label_of(event, parts)
        if event.device_type != DeviceType.CPU or label is None:
            continue
        spent[label] += milliseconds(event)
        around = labelled_around(event, parts)
        if around is not None:
            spent[around] -= milliseconds(event)
    return dict(sorted(spent.items(), key=lambda item: -item[1]))


def label_of(event: Any, parts: Parts) -> str | None:
    """The part that an event stands for; None for those inside of one."""
    name = event.name
    if name.startswith(_PREFIX):
        return name.removeprefix(_PREFIX)
    if name.startswith("Optimizer.step"):
        return "optimizer"
    if name.startswith(_NODE):
        return "sum of gradients" if "AccumulateGrad" in name else parts.of(event.sequence_nr)
    return None


def labelled_around(event: Any, parts: Parts) -> str | None:
    """The part whose time has this event's in it. Nodes of another thread (a GPU's backward) stand
    alone.
    """
    outer = event.cpu_parent
    while outer is not None:
        label = label_of(outer, parts)
        if label is not None:
            return label
        outer = outer.cpu_parent
    return None


@contextmanager
def wrapped(run: Run, parts: Parts) -> Iterator[None]:
    """Ranges around the parts of the model and of the step, taken away again."""
    undo: list[tuple[Any, str, Any]] = []
    try:
        for owner, name, label in [*_methods(run.model), *_FUNCTIONS]:
            undo.append((owner, name, vars(owner).get(name)))
            setattr(owner, name, parts.labelled(label, getattr(owner, name)))
        yield
    finally:
        for owner, name, before in reversed(undo):
            if before is None:
                delattr(owner, name)
            else:
                setattr(owner, name, before)


_FUNCTIONS: tuple[tuple[Any, str, str], ...] = (
    (loop, "clip_gradients", "clipping"),
    (precision, "cast_weights", "casts of weights"),
)


def _methods(model: nn.Module) -> Iterator[tuple[Any, str, str]]:
    for module in model.modules():
        if isinstance(module, SparseLayer):
            mlp = isinstance(module.experts, ExpertMLPs)
            yield module, "forward", "feed-forward experts" if mlp else "attention experts (V, O)"
        elif isinstance(module, Router):
            for name in (
                "forward",
                *(["choose_per_head"] if hasattr(module, "choose_per_head") else []),
            ):
                yield module, name, "routers"
            yield module, "statistics", "balance statistics"
        elif isinstance(module, SwitchHead):
            yield module, "attend", "attention (Q, K, softmax)"
        elif isinstance(module, DenseAttention):
            yield module, "forward", "attention"
        elif isinstance(module, LayerNorm):
            yield module, "forward", "norms"
        elif isinstance(module, DenseMLP):
            yield module, "forward", "dense feed-forward"
    yield model.head, "forward", "head + cross-entropy"
