"""Activation recomputation: a depth step keeps its input, and is run again when its backward pass
comes.

    none        all that the backward pass needs waits for it
    selective   a step keeps its input, its routing decisions and what was exchanged: the rows that
                were received, the sum of the outputs
    full        a step keeps its input and its routing decisions; rows are sent once more

The second run must decide as the first did, whatever the rounding: one token at another expert, and
ranks would disagree about how many rows pass between them. So every decision is made with
`save_decision`, which returns in the second run what it gave in the first. Exchanges are started
with `save_dispatch` or `skip_combine`, and their sum goes through `save_combine`. Side effects
(counters, checks) ask `recomputing`. Without recomputation all of these only call what they are
given.

The second run sees the same random numbers, for the generators are set back. That holds only while
both runs draw equally many: numbers are drawn beside `save_decision`, never inside.

The second run begins where the backward pass enters the step, and not where the first tensor
happens to be missing: with `full` it exchanges rows, so its place among the exchanges of the
backward pass must not depend on which rows a rank has.

Why not torch's selective checkpointing (`create_selective_checkpoint_contexts`), whose policies
name operators? It can replay an asynchronous exchange, if both the collective and the tensor that
it fills are saved; but a policy can only save a result or make it again. The outputs that come back
must be neither: their values are not needed, only their sum is, which is K times smaller where K
ranks send, so `selective` would hold K times as much or send all of it once more. Both exchanges
are the same operator, and what is decided on the host is none. And it sees every operator in
Python: a step of a MoEUT of width 64 on one core took 209 ms instead of 158.

Cost: `selective` and `full` do every layer's forward pass twice. Per token and depth step remain
the 4·D bytes of the residual stream and 8 of every route; with `selective`, across ranks, also the
received rows and one row of outputs per target row.
"""

from collections.abc import Callable
from contextvars import ContextVar, Token
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

from ...kernels.fused.router import finds_first, greatest

Recompute = Literal["none", "selective", "full"]
T = TypeVar("T")


# For the code of a step ----------------------------------------------------------------------------------------------


def recomputing() -> bool:
    """Returns whether this is a second run, whose side effects have happened already."""
    saved = _saved.get()
    return saved is not None and saved.replaying


def save_decision(make: Callable[[], T]) -> T:
    """Returns make(), or in a second run what it returned in the first.

    For decisions: without gradient, and without random draws.
    """
    saved = _saved.get()
    return make() if saved is None else saved.save(make)


def save_topk(scores: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Returns the `count` largest scores along the last axis, differentiable, and where they stand,
    which is a decision.

    In float32 on a CPU with a C++ compiler the first of equal scores is taken; else any.
    """
    if _saved.get() is None and not finds_first(scores):
        found = scores.topk(count, dim=-1)
        return found.values, found.indices
    index = save_decision(lambda: greatest(scores.detach(), count))
    return gather_unique(scores, index), index


def save_choice(
    choose: Callable[[Tensor | None], tuple[Tensor, Tensor, Tensor]],
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns choose(None): logits, experts and gates, of which the experts are a decision.

    In a second run returns choose(experts of the first), which takes them instead of choosing.
    """
    saved = _saved.get()
    if saved is not None and saved.replaying:
        return choose(saved.save(lambda: None))
    found = choose(None)
    save_decision(lambda: found[1])
    return found


def gather_unique(scores: Tensor, index: Tensor) -> Tensor:
    """Gathers entries along the last axis, none twice.

    Unlike `gather` it does not keep the scores for the backward pass.
    """
    return _GatherUnique.apply(scores, index)  # pyright: ignore[reportReturnType]


def save_dispatch(start: Callable[[], Tensor]) -> Tensor:
    """Starts an exchange of rows; in a second run with `selective` returns those of the first."""
    saved = _saved.get()
    return saved.save(start) if saved is not None and saved.saves_exchanges else start()


def skip_combine(start: Callable[[], Tensor]) -> Tensor:
    """Starts an exchange of outputs; in a second run with `selective` returns zeros of that shape
    without memory.

    Their values do not matter there: the sum that is made of them goes through `save_combine`.
    """
    saved = _saved.get()
    if saved is None or not saved.saves_exchanges:
        return start()
    if saved.replaying:
        return saved.save(_Shape.of).zeros()
    received = start()
    saved.save(lambda: _Shape.of(received))
    return received


def save_combine(sums: Tensor) -> Tensor:
    """Returns outputs that were added up; in a second run with `selective` their first values."""
    saved = _saved.get()
    if saved is None or not saved.saves_exchanges:
        return sums
    return _SaveForward.apply(sums, saved)  # pyright: ignore[reportReturnType]


# For the owner of a step ---------------------------------------------------------------------------------------------


def run_recomputed(
    mode: Recompute,
    layer: nn.Module,
    step: Callable[..., tuple[Tensor, T]],
    x: Tensor,
    *others: Tensor,
) -> tuple[Tensor, T]:
    """Returns step(x, *others), and makes its activations again in the backward pass.

    `step` is a method of `layer`.

    The second run sees the weights of the first, where these were put in from outside (copies in
    low precision). Hooks on `layer` itself run once, since this happens inside of it.
    """
    copies: dict[str, Tensor] = {
        f"layer.{name}": weight
        for name, weight in layer.named_parameters()
        if not isinstance(weight, nn.Parameter)
    }
    saved = _SavedValues(saves_exchanges=mode == "selective")

    def run(*inputs: Tensor) -> tuple[Tensor, T]:
        if saved.replaying and copies:
            y, rest = functional_call(_WithWeights(layer, step), copies, inputs)
        else:
            y, rest = step(*inputs)
        return _BeginBackward.apply(y), rest  # pyright: ignore[reportReturnType]

    runs = (_Run(saved, replaying=False), _Run(saved, replaying=True))
    return checkpoint(run, x, *others, use_reentrant=False, context_fn=lambda: runs)  # pyright: ignore[reportReturnType]


class _WithWeights(nn.Module):
    """Lets `functional_call` put weights into a layer whose hooks have run already."""

    def __init__(self, layer: nn.Module, step: Callable[..., Any]) -> None:
        super().__init__()
        self.layer, self.step = layer, step

    def forward(self, *inputs: Tensor) -> Any:
        return self.step(*inputs)


@dataclass(frozen=True)
class _Shape:
    """A tensor's shape, dtype and device, without its values."""

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device

    @staticmethod
    def of(tensor: Tensor) -> "_Shape":
        return _Shape(tensor.shape, tensor.dtype, tensor.device)

    def zeros(self) -> Tensor:
        return torch.zeros((), dtype=self.dtype, device=self.device).expand(self.shape)


class _SavedValues:
    """Values that a step saves in its first run, in the order in which they were made."""

    def __init__(self, *, saves_exchanges: bool) -> None:
        self.saves_exchanges, self.replaying = saves_exchanges, False
        self._values: list[Any] = []
        self._next = 0

    def begin_run(self, *, replaying: bool) -> None:
        """Begins a run. There may be several second ones: a graph can be retained."""
        self.replaying, self._next = replaying, 0

    def save(self, make: Callable[..., Any]) -> Any:
        if not self.replaying:
            value = make()
            self._values.append(_detached(value))
            return value
        if self._next == len(self._values):
            raise AssertionError(
                f"a second run asked for more than the {len(self._values)} values of the first"
            )
        self._next += 1
        return _detached(self._values[self._next - 1])


def _detached(value: Any) -> Any:
    """The same memory as another tensor: autograd writes a history into the one that a function
    returns.
    """
    return value.detach() if isinstance(value, Tensor) else value


_saved: ContextVar[_SavedValues | None] = ContextVar(
    "saved",
    default=None,  # of one thread: ranks may be threads
)


class _Run:
    """The context of one run of a step; can be entered again."""

    def __init__(self, saved: _SavedValues, *, replaying: bool) -> None:
        self._values, self._replaying = saved, replaying
        self._outer: list[Token[_SavedValues | None]] = []

    def __enter__(self) -> None:
        self._values.begin_run(replaying=self._replaying)
        self._outer.append(_saved.set(self._values))

    def __exit__(self, *_raised: object) -> None:
        _saved.reset(self._outer.pop())


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
    """The last operation of a step and so the first of its backward pass: asks for a tensor, and
    the second run begins.
    """

    @staticmethod
    def forward(ctx: Any, y: Tensor) -> Tensor:
        ctx.save_for_backward(y.new_empty(0))
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple:  # pyright: ignore[reportIncompatibleMethodOverride]
        _ = ctx.saved_tensors
        return grads
