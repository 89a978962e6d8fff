"""The layers that benchmarks/kernels/expert_layer.py times: their shapes, their data, their meaning
in float64.

A setting is one feed-forward of experts (y = Σ g·relu(x W_up[e]) W_down[e]), or the V and O
projections of a SwitchHead, one after the other (`heads` > 1: every token has `top_k` routes for
each head). Both take 12·T·K·D·F floating-point operations for a forward and a backward pass, where
K counts the routes of a token.

Data for timing are drawn from a normal distribution. Data for checking are small multiples of 1/8
where they enter the first product: its sums are then exact in float32 in every order of addition,
so no sign changes from one implementation to the next and a ReLU's gradient can be compared (with
one changed sign in a million the gradients of two correct ones differ by 5e-4).

Legend: T tokens, D model width, F expert width, E experts, H heads, K experts chosen (of a head), N
= T·H·K routes.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from moebius.kernels.functional import routed_linear, routed_mlp
from moebius.model.routing import head_to_token_routes, token_routes, token_to_head_routes

# standard deviation of what every token's logits have in common: the fullest expert gets 3 to 6
# times the mean
SKEW = 0.5


@dataclass(frozen=True)
class Setting:
    """Shapes of a layer."""

    name: str
    tokens: int
    d_model: int
    d_expert: int
    num_experts: int  # of all heads
    top_k: int
    heads: int = 1
    d_dense: int | None = (
        None  # hidden width of the same layer in the dense model of equal parameters
    )
    what: str = ""

    @property
    def routes(self) -> int:
        """N."""
        return self.tokens * self.heads * self.top_k

    @property
    def active_width(self) -> int:
        """Hidden width of the dense layer with the same active multiply-accumulates."""
        return self.heads * self.top_k * self.d_expert

    @property
    def flop(self) -> float:
        """Of a forward and a backward pass."""
        return 12.0 * self.routes * self.d_model * self.d_expert

    @property
    def is_switchhead(self) -> bool:
        return self.heads > 1

    def ideal_bytes(self, itemsize: int) -> int:
        """The least that a backward pass needs besides the weights: x, hidden rows, gates, sorted
        order and its inverse.

        A SwitchHead: x, the ungated outputs of V, the rows of O, and both lists of routes.
        """
        routes_bytes = self.routes * (4 + 2 * 4)
        rows = self.tokens * self.d_model + self.routes * self.d_expert
        if self.is_switchhead:
            return (rows + self.tokens * self.heads * self.d_expert) * itemsize + 2 * routes_bytes
        return rows * itemsize + routes_bytes


# fmt: off
CPU_SETTINGS = (
    Setting("A", 8192, 512, 128, 64, 8, what="few experts"),
    Setting("B", 8192, 1024, 128, 256, 16, what="MoEUT-244M's width, 256 experts"),
    Setting("C", 8192, 416, 128, 155, 12, d_dense=2053, what="MoEUT-44M, its width padded"),
    Setting("44M", 2048, 412, 128, 155, 12, d_dense=2053, what="MoEUT-44M, 8 sequences of 256"),
    Setting("44M attention", 2048, 412, 82, 32, 2, heads=4, d_dense=410, what="V and O of MoEUT-44M"),
)
GPU_SETTINGS = (
    Setting("244M", 16384, 1024, 128, 387, 16, d_dense=4110, what="MoEUT-244M, 16 sequences of 1,024"),
    Setting("44M", 16384, 412, 128, 155, 12, d_dense=2053, what="MoEUT-44M, 16 sequences of 1,024"),
    Setting("244M attention", 16384, 1024, 128, 40, 2, heads=4, d_dense=1024, what="V and O of MoEUT-244M"),
)
# fmt: on


@dataclass(frozen=True)
class Choice:
    """What a router chose for every token and head."""

    experts_THK: Tensor  # int64, numbered over all heads
    gates_THK: Tensor  # float32, a leaf


@dataclass(frozen=True)
class Bank:
    """The weights that all contenders share, and what they read and get back. Weights and rows are
    leaves in the dtype timed.
    """

    setting: Setting
    x_TD: Tensor
    w_up_EDF: Tensor
    w_down_EFD: Tensor
    grad_TD: Tensor  # of the outputs

    @property
    def weights(self) -> tuple[Tensor, Tensor]:
        return self.w_up_EDF, self.w_down_EFD

    def to(self, dtype: torch.dtype) -> "Bank":
        """The same values in another dtype, as new leaves."""
        x, w_up, w_down = (
            t.detach().to(dtype).requires_grad_() for t in (self.x_TD, *self.weights)
        )
        return Bank(self.setting, x, w_up, w_down, self.grad_TD.to(dtype))


def draw_bank(
    setting: Setting, dtype: torch.dtype, generator: torch.Generator, *, exact: bool = False
) -> Bank:
    """Weights, rows and the outputs' gradient, of bfloat16's grid in every dtype; `exact`: for
    checking.
    """
    experts, width, hidden = setting.num_experts, setting.d_model, setting.d_expert

    def normal(*shape: int, scale: float = 1.0) -> Tensor:
        drawn = torch.randn(shape, generator=generator, device=generator.device) * scale
        return drawn.to(torch.bfloat16).to(dtype)

    def eighths(*shape: int) -> Tensor:
        return (
            torch.randint(-8, 9, shape, generator=generator, device=generator.device).to(dtype) / 8
        )

    x = eighths(setting.tokens, width) if exact else normal(setting.tokens, width)
    w_up = (
        eighths(experts, width, hidden)
        if exact
        else normal(experts, width, hidden, scale=width**-0.5)
    )
    w_down = normal(experts, hidden, width, scale=hidden**-0.5)
    for leaf in (x, w_up, w_down):
        leaf.requires_grad_()
    return Bank(setting, x, w_up, w_down, normal(setting.tokens, width))


def draw_choices(setting: Setting, skew: float, generator: torch.Generator) -> tuple[Choice, ...]:
    """One router's decisions; of a SwitchHead V's and O's. Gates are of bfloat16's grid."""
    return tuple(_draw_choice(setting, skew, generator) for _ in range(1 + setting.is_switchhead))


def _draw_choice(setting: Setting, skew: float, generator: torch.Generator) -> Choice:
    per_head = setting.num_experts // setting.heads
    shape, device = (setting.heads, per_head), generator.device
    logits = torch.randn((setting.tokens, *shape), generator=generator, device=device)
    logits += skew * torch.randn(shape, generator=generator, device=device)
    values, chosen = logits.topk(setting.top_k)
    first_H1 = torch.arange(setting.heads, device=device)[:, None] * per_head
    gates = torch.sigmoid(values).to(torch.bfloat16).float()
    return Choice(chosen + first_H1, gates.requires_grad_())


def run_layer(
    x_TD: Tensor,
    w_up_EDF: Tensor,
    w_down_EFD: Tensor,
    choices: Sequence[Choice],
    *,
    backend: str,
    activation: str = "relu",
) -> Tensor:
    """Runs the layer as the model does."""
    first, last, num_experts = choices[0], choices[-1], w_up_EDF.shape[0]
    if len(choices) == 1:
        routes = token_routes(
            first.experts_THK[:, 0], first.gates_THK[:, 0], num_experts=num_experts
        )
        return routed_mlp(
            x_TD, w_up_EDF, w_down_EFD, routes, activation=activation, backend=backend
        )
    to_heads = token_to_head_routes(first.experts_THK, first.gates_THK, num_experts=num_experts)
    to_tokens = head_to_token_routes(last.experts_THK, last.gates_THK, num_experts=num_experts)
    return routed_linear(
        routed_linear(x_TD, w_up_EDF, to_heads, backend=backend),
        w_down_EFD,
        to_tokens,
        backend=backend,
    )


@dataclass(frozen=True)
class Result:
    """Holds a layer's result and the gradients of rows, gates of every router, and weights."""

    y_TD: Tensor
    grads: tuple[Tensor, ...]

    def error(self, expected: "Result") -> float:
        """The largest relative norm of a difference; of gradients that this output does not have,
        none.
        """
        pairs = [(self.y_TD, expected.y_TD), *zip(self.grads, expected.grads, strict=False)]
        return max(float((ours.double() - theirs).norm() / theirs.norm()) for ours, theirs in pairs)


def result_of(forward: Callable[[], Tensor], grad_TD: Tensor, leaves: Sequence[Tensor]) -> Result:
    """Runs both passes."""
    y = forward()
    y.backward(grad_TD)
    grads = tuple(torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in leaves)
    return Result(y.detach(), grads)


def meaning(
    bank: Bank, choices: Sequence[Choice], *, activation: str = "relu", chunk: int = 4096
) -> Result:
    """What the reference says in float64, some tokens at a time for the memory's sake."""
    wide = bank.to(torch.float64)
    parts, gates = [], [choice.gates_THK.detach().double().requires_grad_() for choice in choices]
    for start in range(0, bank.setting.tokens, chunk):
        rows = slice(start, start + chunk)
        some = [Choice(c.experts_THK[rows], g[rows]) for c, g in zip(choices, gates, strict=True)]
        y = run_layer(
            wide.x_TD[rows], *wide.weights, some, backend="reference", activation=activation
        )
        y.backward(wide.grad_TD[rows])
        parts.append(y.detach())
    leaves = (wide.x_TD, *gates, *wide.weights)
    return Result(torch.cat(parts), tuple(leaf.grad for leaf in leaves if leaf.grad is not None))
