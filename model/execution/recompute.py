"""Activation recomputation: a depth step keeps its input, and runs again in its backward pass.

    none        keeps everything that the backward pass needs
    selective   keeps a step's input, its routing decisions and its exchanges: the received rows and the sum of
                the outputs
    full        keeps a step's input and its routing decisions; rows are sent again

The second run must decide as the first did, whatever the rounding: with one token at another
expert, ranks would disagree about how many rows to exchange. So every decision is made with
`save_decision`, which returns the first run's value in the second. `save_dispatch` and
`skip_combine` start exchanges, and their sum goes through `save_combine`. Side effects (counters,
checks) ask `recomputing`. Without recomputation all of them only call their argument.

Both runs draw the same numbers (draws.py), and equally many, so draw beside `save_decision`, never
inside. For a user's own part, which may draw otherwise, torch's generators are reset.

The second run begins when the backward pass enters the step, not when the first tensor is missing.
With `full` it exchanges rows, so its place among the backward pass's exchanges must not depend on
which rows a rank has.

Torch's selective checkpointing (`create_selective_checkpoint_contexts`) does not fit. Its policies
name operators and can only save or recompute a result. The returned outputs need neither: only
their sum is needed, which is K times smaller if K ranks send, so `selective` would hold K times as
much or send everything again. Both exchanges are the same operator, and host decisions are none. It
also sees every operator in Python: one step of a MoEUT of width 64 took 209 ms on one core instead
of 158.

Cost: `selective` and `full` run every layer's forward pass twice. Per token and depth step they
keep the 4·D bytes of the residual stream and 8 bytes per route; `selective` across ranks also keeps
the received rows and one output row per target row.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

from ...kernels.fused.router import Routed, finds_first, greatest
from ...kernels.pass_scope import pass_scope, sharing

Recompute = Literal["none", "selective", "full"]
T = TypeVar("T")


# Called inside a step ------------------------------------------------------------------------------------------------


def recomputing() -> bool:
    """Returns whether this is a second run, whose side effects have already happened."""
    saved = _saved()
    return saved is not None and saved.replaying


def keeps_operands() -> bool:
    """Returns whether products may keep their operands for the backward pass: outside of a step that
    is recomputed, which would free them.
    """
    return _saved() is None


def save_decision(make: Callable[[], T]) -> T:
    """Returns make(), or in a second run the first run's value.

    Decisions have no gradient and draw no random numbers.
    """
    saved = _saved()
    return make() if saved is None else saved.save(make)


def save_topk(scores: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Returns the `count` largest scores along the last axis, differentiable, and their indices, a
    decision.

    Among equal scores, float32 on a CPU with a C++ compiler takes the first; otherwise any.
    """
    if _saved() is None and not finds_first(scores):
        found = scores.topk(count, dim=-1)
        return found.values, found.indices
    index = save_decision(lambda: greatest(scores.detach(), count))
    return gather_unique(scores, index), index


def save_choice(choose: Callable[[Tensor | None], Routed]) -> Routed:
    """Returns choose(None), of which the experts are a decision.

    A second run returns choose(the first run's experts), which takes them instead of choosing.
    """
    saved = _saved()
    if saved is not None and saved.replaying:
        return choose(saved.save(lambda: None))
    found = choose(None)
    save_decision(lambda: found.experts_THK)
    return found


def gather_unique(scores: Tensor, index: Tensor) -> Tensor:
    """Gathers distinct entries along the last axis; unlike `gather` it keeps no scores for
    backward.
    """
    return _GatherUnique.apply(scores, index)  # pyright: ignore[reportReturnType]


def save_dispatch(start: Callable[[], Tensor]) -> Tensor:
    """Starts an exchange of rows; a second run with `selective` returns the first run's rows."""
    saved = _saved()
    return saved.save(start) if saved is not None and saved.saves_exchanges else start()


def skip_combine(start: Callable[[], Tensor]) -> Tensor:
    """Starts an exchange of outputs; a second run with `selective` returns zeros without memory.

    Their values are not used there, because their sum goes through `save_combine`.
    """
    saved = _saved()
    if saved is None or not saved.saves_exchanges:
        return start()
    if saved.replaying:
        return saved.save(_Shape.of).zeros()
    received = start()
    saved.save(lambda: _Shape.of(received))
    return received


def save_combine(sums: Tensor) -> Tensor:
    """Returns summed outputs; a second run with `selective` returns the first run's values."""
    saved = _saved()
    if saved is None or not saved.saves_exchanges:
        return sums
    return _SaveForward.apply(sums, saved)  # pyright: ignore[reportReturnType]


def _saved() -> "_SavedValues | None":
    """Returns the values of the recomputed step that runs; None: none does."""
    return pass_scope().saved


# Called by the owner of a step ---------------------------------------------------------------------------------------


def run_recomputed(
    mode: Recompute,
    layer: nn.Module,
    step: Callable[..., tuple[Tensor, T]],
    x: Tensor,
    *others: Tensor,
    reset_generators: bool = False,
) -> tuple[Tensor, T]:
    """Returns step(x, *others), and recomputes its activations in the backward pass.

    `step` is a method of `layer`. The second run sees the first run's weights, including
    low-precision copies set from outside. Hooks on `layer` run once, outside of this call.
    `reset_generators`: it also sees the first run's torch generators, whose state a pass that is
    recorded cannot read.
    """
    copies: dict[str, Tensor] = {
        f"layer.{name}": weight
        for name, weight in layer.named_parameters()
        if not isinstance(weight, nn.Parameter)
    }
    saved = _SavedValues(saves_exchanges=mode == "selective")

    def run(*inputs: Tensor) -> tuple[Tensor, T]:
        if saved.replaying and copies:
            y, rest = functional_call(_StepOfLayer(layer, step), copies, inputs)
        else:
            y, rest = step(*inputs)
        return _BeginBackward.apply(y), rest  # pyright: ignore[reportReturnType]

    runs = (_Run(saved, replaying=False), _Run(saved, replaying=True))
    return checkpoint(  # pyright: ignore[reportReturnType]
        run,
        x,
        *others,
        use_reentrant=False,
        context_fn=lambda: runs,
        preserve_rng_state=reset_generators,
    )


class _StepOfLayer(nn.Module):
    """Lets `functional_call` replace a layer's weights without running its hooks again."""

    def __init__(self, layer: nn.Module, step: Callable[..., Any]) -> None:
        super().__init__()
        self.layer, self.step = layer, step

    def forward(self, *inputs: Tensor) -> Any:
        return self.step(*inputs)


@dataclass(frozen=True)
class _Shape:
    """Holds a tensor's shape, dtype and device without its values."""

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device

    @staticmethod
    def of(tensor: Tensor) -> "_Shape":
        return _Shape(tensor.shape, tensor.dtype, tensor.device)

    def zeros(self) -> Tensor:
        return torch.zeros((), dtype=self.dtype, device=self.device).expand(self.shape)


class _SavedValues:
    """Holds the values that a step saves in its first run, in order."""

    def __init__(self, *, saves_exchanges: bool) -> None:
        self.saves_exchanges, self.replaying = saves_exchanges, False
        self._values: list[Any] = []
        self._next = 0

    def begin_run(self, *, replaying: bool) -> None:
        """Begins a run; a retained graph has several second runs."""
        self.replaying, self._next = replaying, 0

    def save(self, make: Callable[..., Any]) -> Any:
        if not self.replaying:
            value = make()
            self._values.append(_detached(value))
            return value
        if self._next == len(self._values):
            raise AssertionError(
                f"a second run requested more than the first run's {len(self._values)} values"
            )
        self._next += 1
        return _detached(self._values[self._next - 1])


def _detached(value: Any) -> Any:
    """Returns another tensor on the same memory, because autograd attaches history to returned
    tensors.
    """
    return value.detach() if isinstance(value, Tensor) else value


class _Run:
    """The re-enterable context of one run of a step."""

    def __init__(self, saved: _SavedValues, *, replaying: bool) -> None:
        self._values, self._replaying = saved, replaying
        self._open: list[AbstractContextManager[None]] = []

    def __enter__(self) -> None:
        self._values.begin_run(replaying=self._replaying)
        self._open.append(sharing(saved=self._values))
        self._open[-1].__enter__()

    def __exit__(self, *raised: Any) -> None:
        self._open.pop().__exit__(*raised)


class _GatherUnique(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, scores: Tensor, index: Tensor) -> Tensor:
        ctx.save_for_backward(index)
        ctx.shape = scores.shape
        return scores.gather(-1, index)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple:  # pyright: ignore[reportIncompatibleMethodOverride]
        [index] = ctx.saved_tensors
        return grads[0].new_zeros(ctx.shape).scatter_(-1, index, grads[0]), None


class _SaveForward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, sums: Tensor, saved: _SavedValues) -> Tensor:
        return saved.save(lambda: sums)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple:  # pyright: ignore[reportIncompatibleMethodOverride]
        return grads[0], None


class _BeginBackward(torch.autograd.Function):
    """Starts the second run: a step's last operation is the first of its backward pass."""

    @staticmethod
    def forward(ctx: Any, y: Tensor) -> Tensor:
        ctx.save_for_backward(y.new_empty(0))
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple:  # pyright: ignore[reportIncompatibleMethodOverride]
        _ = ctx.saved_tensors
        return grads
