"""Activation recomputation: a depth step keeps its input, and is run again when its backward pass
comes.

    none        all that the backward pass needs waits for it
    selective   a step keeps its input, its routing decisions and what travelled: the rows that came, the sum of the answers
    full        a step keeps its input and its routing decisions; rows travel once more

The second run must decide as the first did, whatever the rounding: one token at another expert, and
ranks would disagree about how many rows pass between them. So every decision is made with
`save_decision`, which returns in the second run what it gave in the first. Tensors that travel between ranks go
through `save_dispatch`, `skip_combine` and `save_combine`. Side effects (counters, checks) ask `recomputing`.
Without recomputation all of these only call what they are given.

The second run sees the same random numbers, for the generators are set back. That holds only while
both runs draw equally many: numbers are drawn beside `save_decision`, never inside.

The second run begins where the backward pass enters the step, and not where the first tensor
happens to be missing: with `full` it exchanges rows, so its place among the exchanges of the
backward pass must not depend on which rows a rank has.

Cost: `selective` and `full` do every layer's forward pass twice. Per token and depth step remain
the 4·D bytes of the residual stream and 8 of every route; with `selective`, across ranks, also the
rows that came and one answer per target row.
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

Recompute = Literal["none", "selective", "full"]
T = TypeVar("T")


# For the code of a step ----------------------------------------------------------------------------------------------


def recomputing() -> bool:
    """Whether this is a second run, whose side effects have happened already."""
    tape = _tape.get()
    return tape is not None and tape.replaying


def save_decision(make: Callable[[], T]) -> T:
    """make(); in a second run what it gave in the first. For decisions: without gradient, and
    without random draws.
    """
    tape = _tape.get()
    return make() if tape is None else tape.save(make)


def save_topk(scores: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The `count` largest scores along the last axis, differentiable, and where they stand: a
    decision.
    """
    if _tape.get() is None:
        found = scores.topk(count, dim=-1)
        return found.values, found.indices
    index = save_decision(lambda: scores.detach().topk(count, dim=-1).indices)
    return gather_unique(scores, index), index


def gather_unique(scores: Tensor, index: Tensor) -> Tensor:
    """Entries along the last axis, none twice. Unlike `gather` it does not keep the scores for the
    backward pass.
    """
    return _Take.apply(scores, index)  # pyright: ignore[reportReturnType]


def save_dispatch(start: Callable[[], Tensor]) -> Tensor:
    """Starts an exchange; in a second run with `selective` what came the first time."""
    tape = _tape.get()
    return tape.save(start) if tape is not None and tape.saves_exchanges else start()


def skip_combine(start: Callable[[], Tensor]) -> Tensor:
    """Starts an exchange of answers; in a second run with `selective` zeros of that shape without
    memory.

    Their values do not matter there: what is made of them goes through `save_combine`.
    """
    tape = _tape.get()
    if tape is None or not tape.saves_exchanges:
        return start()
    if tape.replaying:
        return tape.save(_Form.of).hollow()
    came = start()
    tape.save(lambda: _Form.of(came))
    return came


def save_combine(answers: Tensor) -> Tensor:
    """Answers that came home and were added up; in a second run with `selective` their first
    values.
    """
    tape = _tape.get()
    if tape is None or not tape.saves_exchanges:
        return answers
    return _Keep.apply(answers, tape)  # pyright: ignore[reportReturnType]


# For the owner of a step ---------------------------------------------------------------------------------------------


def run_recomputed(
    mode: Recompute,
    layer: nn.Module,
    step: Callable[..., tuple[Tensor, T]],
    x: Tensor,
    *others: Tensor,
) -> tuple[Tensor, T]:
    """step(x, *others), a method of `layer`, whose activations are made again in the backward pass.

    The second run sees the weights of the first, where these were put in from outside (copies in
    low precision). Hooks on `layer` itself run once, since this happens inside of it.
    """
    borrowed: dict[str, Tensor] = {
        f"layer.{name}": weight
        for name, weight in layer.named_parameters()
        if not isinstance(weight, nn.Parameter)
    }
    tape = _Tape(saves_exchanges=mode == "selective")

    def run(*inputs: Tensor) -> tuple[Tensor, T]:
        if tape.replaying and borrowed:
            y, rest = functional_call(_Borrower(layer, step), borrowed, inputs)
        else:
            y, rest = step(*inputs)
        return _Enter.apply(y), rest  # pyright: ignore[reportReturnType]

    turns = (_Turn(tape, replaying=False), _Turn(tape, replaying=True))
    return checkpoint(run, x, *others, use_reentrant=False, context_fn=lambda: turns)  # pyright: ignore[reportReturnType]


class _Borrower(nn.Module):
    """Lets `functional_call` put weights into a layer without calling it, for its hooks have run."""

    def __init__(self, layer: nn.Module, step: Callable[..., Any]) -> None:
        super().__init__()
        self.layer, self.step = layer, step

    def forward(self, *inputs: Tensor) -> Any:
        return self.step(*inputs)


@dataclass(frozen=True)
class _Form:
    """All of a tensor but its values."""

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device

    @staticmethod
    def of(tensor: Tensor) -> "_Form":
        return _Form(tensor.shape, tensor.dtype, tensor.device)

    def hollow(self) -> Tensor:
        return torch.zeros((), dtype=self.dtype, device=self.device).expand(self.shape)


class _Tape:
    """What a step keeps of its first run, in the order in which it was made."""

    def __init__(self, *, saves_exchanges: bool) -> None:
        self.saves_exchanges, self.replaying = saves_exchanges, False
        self._saved: list[Any] = []
        self._next = 0

    def turn(self, *, replaying: bool) -> None:
        """A run begins. There may be several second ones: a graph can be retained."""
        self.replaying, self._next = replaying, 0

    def save(self, make: Callable[..., Any]) -> Any:
        if not self.replaying:
            value = make()
            self._saved.append(_apart(value))
            return value
        if self._next == len(self._saved):
            raise AssertionError(
                f"a second run asked for more than the {len(self._saved)} values of the first"
            )
        self._next += 1
        return _apart(self._saved[self._next - 1])


def _apart(value: Any) -> Any:
    """The same memory as another tensor: autograd writes a history into the one that a function
    returns.
    """
    return value.detach() if isinstance(value, Tensor) else value


_tape: ContextVar[_Tape | None] = ContextVar(
    "tape", default=None
)  # of one thread: ranks may be threads


class _Turn:
    """A run under a tape; can be entered again."""

    def __init__(self, tape: _Tape, *, replaying: bool) -> None:
        self._tape, self._replaying = tape, replaying
        self._outer: list[Token[_Tape | None]] = []

    def __enter__(self) -> None:
        self._tape.turn(replaying=self._replaying)
        self._outer.append(_tape.set(self._tape))

    def __exit__(self, *_raised: object) -> None:
        _tape.reset(self._outer.pop())


class _Take(torch.autograd.Function):
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


class _Keep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, answers: Tensor, tape: _Tape) -> Tensor:
        return tape.save(lambda: answers)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple:  # pyright: ignore[reportIncompatibleMethodOverride]
        return grads[0], None


class _Enter(torch.autograd.Function):
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
