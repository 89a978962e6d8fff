"""Defines the layers that expert_layer.py times: shapes, data, float64 meaning, and contenders.

A setting is one feed-forward of experts (y = Σ g·a(x W_up[e]) W_down[e], a = relu unless it names
another activation), or the V and O projections of a SwitchHead in sequence (`heads` > 1: every token
has `top_k` routes for each head).

Timing uses normally distributed data. Checking uses small multiples of 1/8 for the first product,
whose sums are then exact in float32 in any order of addition. No sign changes between
implementations, so a ReLU's gradient can be compared. (With one changed sign in a million, the
gradients of two correct implementations differ by 5e-4.)

Contenders:

    ceiling   a dense MLP of equal active multiply-accumulates: no routing, one product of full size
    dense     the same layer of the dense model of equal parameters, which a MoEUT layer should match;
              if its width is odd, also with the next one that a GPU multiplies fast
    peer      the same sum over experts, written with plain torch, and, for swiglu, transformers' own
              Qwen3 experts with its `grouped_mm` implementation and weights as it stores them
    ours      the functions of moebius.kernels.functional, one contender per backend; "in a step" is
              a ninth of nine calls that share the bank, as in a pass of MoEUT-244M, whose weight
              gradients are computed together

On CPUs torch's float32 products, of all but ours, run in every mode that is exact on this machine:
through MKL, and through oneDNN, which torch selects for "bf16" precision. On AMD CPUs oneDNN is
faster; a CPU with matrix units (AMX) would round. The mode applies to the whole process.

Legend: T tokens, D model width, F expert width, W columns before the activation (F, or 2F if it is
gated), E experts, H heads, K experts chosen (of a head), N = T·H·K routes.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, Literal, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moebius.kernels.backend import BACKENDS
from moebius.kernels.functional import routed_linear, routed_mlp
from moebius.kernels.gradients import accumulate_weight_gradients
from moebius.kernels.reference import activate, columns_of
from moebius.model.routing import head_to_token_routes, token_routes, token_to_head_routes

# standard deviation of what every token's logits have in common: the fullest expert gets 3 to 6
# times the mean
SKEW = 0.5
Role = Literal["ceiling", "dense", "peer", "ours"]
Mode = Literal["default", "oneDNN"]


@dataclass(frozen=True)
class Setting:
    """Holds the shapes of a layer."""

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
    activation: str = "relu"
    checked_experts: int | None = None  # fewer, where float64 needs too much; also for peak memory

    @property
    def routes(self) -> int:
        """Returns N, the number of routes."""
        return self.tokens * self.heads * self.top_k

    @property
    def active_width(self) -> int:
        """Returns the hidden width of the dense layer with the same active multiply-accumulates."""
        return self.heads * self.top_k * self.d_expert

    @property
    def is_switchhead(self) -> bool:
        return self.heads > 1

    def ideal_bytes(self, itemsize: int) -> int:
        """Returns the minimum that a backward pass needs besides the weights.

        That is x, hidden rows (a gated activation's columns), gates, sorted order and its inverse.
        For a SwitchHead: x, the ungated outputs of V, the rows of O, and both lists of routes.
        """
        routes_bytes = self.routes * (4 + 2 * 4)
        columns = columns_of(self.d_expert, self.activation)
        rows = self.tokens * self.d_model + self.routes * columns
        if self.is_switchhead:
            return (rows + self.tokens * self.heads * self.d_expert) * itemsize + 2 * routes_bytes
        return rows * itemsize + routes_bytes


# fmt: off
CPU_SETTINGS = (
    Setting("A", 8192, 512, 128, 64, 8, what="few experts"),
    Setting("B", 8192, 1024, 128, 256, 16, what="MoEUT-244M's width, 256 experts"),
    Setting("C", 8192, 416, 128, 155, 12, d_dense=2053, what="MoEUT-44M, its width padded"),
    Setting("D", 4096, 1024, 512, 16, 2, what="wide experts, two per token"),
    Setting("44M", 2048, 412, 128, 155, 12, d_dense=2053, what="MoEUT-44M, 8 sequences of 256"),
    Setting("44M attention", 2048, 412, 82, 32, 2, heads=4, d_dense=410, what="V and O of MoEUT-44M"),
    Setting("Qwen3", 2048, 2048, 768, 128, 8, what="Qwen3-30B-A3B", activation="swiglu", checked_experts=16),
)
GPU_SETTINGS = (
    Setting("244M", 16384, 1024, 128, 387, 16, d_dense=4110, what="MoEUT-244M, 16 sequences of 1,024"),
    Setting("44M", 16384, 412, 128, 155, 12, d_dense=2053, what="MoEUT-44M, 16 sequences of 1,024"),
    Setting("244M attention", 16384, 1024, 128, 40, 2, heads=4, d_dense=1024, what="V and O of MoEUT-244M"),
    Setting("Qwen3", 16384, 2048, 768, 128, 8, what="Qwen3-30B-A3B", activation="swiglu", checked_experts=16),
)
# fmt: on


@dataclass(frozen=True)
class Choice:
    """Holds a router's choices for every token and head."""

    experts_THK: Tensor  # int64, numbered over all heads
    gates_THK: Tensor  # float32, a leaf


@dataclass(frozen=True)
class Bank:
    """Holds the weights that all contenders share, with inputs and output gradients.

    Weights and rows are leaves in the timed dtype.
    """

    setting: Setting
    x_TD: Tensor
    w_up_EDW: Tensor
    w_down_EFD: Tensor
    grad_TD: Tensor  # of the outputs

    @property
    def weights(self) -> tuple[Tensor, Tensor]:
        return self.w_up_EDW, self.w_down_EFD

    def to(self, dtype: torch.dtype) -> "Bank":
        """Returns the same values in another dtype, as new leaves."""
        x, w_up, w_down = (
            t.detach().to(dtype).requires_grad_() for t in (self.x_TD, *self.weights)
        )
        return Bank(self.setting, x, w_up, w_down, self.grad_TD.to(dtype))


def draw_bank(
    setting: Setting, dtype: torch.dtype, generator: torch.Generator, *, exact: bool = False
) -> Bank:
    """Draws weights, rows and output gradients on bfloat16's grid for any dtype; `exact`: for
    checking.
    """
    experts, width, hidden = setting.num_experts, setting.d_model, setting.d_expert
    columns = columns_of(hidden, setting.activation)

    def normal(*shape: int, scale: float = 1.0) -> Tensor:
        drawn = torch.randn(shape, generator=generator, device=generator.device).mul_(scale)
        return drawn.to(torch.bfloat16).to(dtype)

    def eighths(*shape: int) -> Tensor:
        return (
            torch.randint(-8, 9, shape, generator=generator, device=generator.device).to(dtype) / 8
        )

    x = eighths(setting.tokens, width) if exact else normal(setting.tokens, width)
    w_up = (
        eighths(experts, width, columns)
        if exact
        else normal(experts, width, columns, scale=width**-0.5)
    )
    w_down = normal(experts, hidden, width, scale=hidden**-0.5)
    for leaf in (x, w_up, w_down):
        leaf.requires_grad_()
    return Bank(setting, x, w_up, w_down, normal(setting.tokens, width))


def draw_choices(setting: Setting, skew: float, generator: torch.Generator) -> tuple[Choice, ...]:
    """Draws one router's decisions, or V's and O's of a SwitchHead. Gates are on bfloat16's grid."""
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
    w_up_EDW: Tensor,
    w_down_EFD: Tensor,
    choices: Sequence[Choice],
    *,
    activation: str,
    backend: str,
    defer: bool = False,
) -> Tensor:
    """Runs the layer as the model does."""
    how: dict[str, Any] = {"backend": backend, "defer": defer}
    first, last, num_experts = choices[0], choices[-1], w_up_EDW.shape[0]
    if len(choices) == 1:
        routes = token_routes(
            first.experts_THK[:, 0], first.gates_THK[:, 0], num_experts=num_experts
        )
        return routed_mlp(x_TD, w_up_EDW, w_down_EFD, routes, activation=activation, **how)
    to_heads = token_to_head_routes(first.experts_THK, first.gates_THK, num_experts=num_experts)
    to_tokens = head_to_token_routes(last.experts_THK, last.gates_THK, num_experts=num_experts)
    values = routed_linear(x_TD, w_up_EDW, to_heads, **how)
    return routed_linear(values, w_down_EFD, to_tokens, **how)


@dataclass(frozen=True)
class Result:
    """Holds a layer's result and the gradients of rows, gates of every router, and weights."""

    y_TD: Tensor
    grads: tuple[Tensor, ...]

    def error(self, expected: "Result") -> float:
        """Returns the largest relative norm of a difference, ignoring gradients that this output
        lacks. A matrix of another shape is the transposed one, as transformers stores it.
        """
        pairs = [(self.y_TD, expected.y_TD), *zip(self.grads, expected.grads, strict=False)]
        return max(
            float((ours.double() - theirs).norm() / theirs.norm())
            for ours, given in pairs
            for theirs in [given if ours.shape == given.shape else given.mT]
        )


def result_of(forward: Callable[[], Tensor], grad_TD: Tensor, leaves: Sequence[Tensor]) -> Result:
    """Runs both passes."""
    y = forward()
    y.backward(grad_TD)
    grads = tuple(torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in leaves)
    return Result(y.detach(), grads)


def meaning(bank: Bank, choices: Sequence[Choice], *, chunk: int = 4096) -> Result:
    """Returns the reference's result in float64, some tokens at a time to save memory."""
    wide = bank.to(torch.float64)
    parts, gates = [], [choice.gates_THK.detach().double().requires_grad_() for choice in choices]
    for start in range(0, bank.setting.tokens, chunk):
        rows = slice(start, start + chunk)
        some = [Choice(c.experts_THK[rows], g[rows]) for c, g in zip(choices, gates, strict=True)]
        given: dict[str, Any] = {"activation": bank.setting.activation, "backend": "reference"}
        y = run_layer(wide.x_TD[rows], *wide.weights, some, **given)
        y.backward(wide.grad_TD[rows])
        parts.append(y.detach())
    leaves = (wide.x_TD, *gates, *wide.weights)
    return Result(torch.cat(parts), tuple(leaf.grad for leaf in leaves if leaf.grad is not None))


# Who runs -----------------------------------------------------------------------------------------


class Layer(Protocol):
    """Holds a layer with its weights."""

    @property
    def weights(self) -> tuple[Tensor, ...]: ...

    def __call__(self, x_TD: Tensor, choices: Sequence[Choice]) -> Tensor: ...


@dataclass(frozen=True)
class Contender:
    """Describes one way to run a setting."""

    name: str
    role: Role
    build: Callable[[Bank], Layer]
    mode: Mode = "default"
    calls: int = 1  # that share the bank in a timed pass; times are of one of them


def run_calls(
    layer: Layer, bank: Bank, every: Sequence[Sequence[Choice]]
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Runs calls that share a bank forward and then backward, as a training step does.

    No gradient is copied into a leaf: in a step rows and the bank's low-precision copy are none.

    Returns:
        The first call's output, and the gradients of each call's rows and gates, then of the weights.
    """
    rows = [bank.x_TD.detach().requires_grad_() for _ in every]
    gates = [choice.gates_THK for choices in every for choice in choices]
    with accumulate_weight_gradients():
        outputs = [layer(x_TD, choices) for x_TD, choices in zip(rows, every, strict=True)]
    given = [bank.grad_TD] * len(outputs)
    return outputs[0].detach(), torch.autograd.grad(outputs, [*rows, *gates, *layer.weights], given)


def whole_rows(width: int) -> int:
    """Returns the next width whose rows are a multiple of 16 bytes in bfloat16.

    Other rows are not aligned, and a GPU's products take some 2.7 times as long.
    """
    return -(-width // 8) * 8


# What a run that is cut short must have answered.
_FIRST = ("dense, equal MACs", "dense baseline", "ours: triton", "ours: triton, in a step")
STEP_CALLS = 9
_FIRST = (*_FIRST, "transformers: grouped_mm", "grouped_mm", "the loop")


def contenders(setting: Setting, modes: Sequence[Mode]) -> list[Contender]:
    """Returns all contenders of a setting, the most telling first; trying shows which can run here.

    A bank that is too large to be checked is too large for loops: autograd adds up a gradient of the
    whole bank per expert.
    """
    found, has_loops = list[Contender](), setting.checked_experts is None
    for mode in modes:
        found.append(Contender("dense, equal MACs", "ceiling", dense(setting.active_width), mode))
        if setting.d_dense is not None:
            found.append(Contender("dense baseline", "dense", dense(setting.d_dense), mode))
            if (width := whole_rows(setting.d_dense)) != setting.d_dense:
                name = f"dense baseline of {width} columns"
                found.append(Contender(name, "dense", dense(width), mode))
        if setting.activation == "swiglu":
            found.append(Contender("transformers: grouped_mm", "peer", transformers_layer, mode))
        run = partial(grouped, activation=setting.activation)
        found.append(Contender("grouped_mm", "peer", partial(ExpertLayer, run=run), mode))
    if has_loops and not setting.is_switchhead:
        run = partial(where_loop, activation=setting.activation)
        found.append(Contender("the loop", "peer", partial(ExpertLayer, run=run)))
    for name in BACKENDS[0 if has_loops else 1 :]:  # the first is the reference
        run = partial(run_layer, activation=setting.activation, backend=name)
        build = partial(ExpertLayer, run=run)
        found.append(Contender(f"ours: {name}", "ours", build))
    run = partial(run_layer, activation=setting.activation, backend="triton", defer=True)
    build = partial(ExpertLayer, run=run)
    found.append(Contender("ours: triton, in a step", "ours", build, calls=STEP_CALLS))
    return sorted(found, key=lambda each: (*_FIRST, each.name).index(each.name))


@contextmanager
def exact_mode(mode: Mode) -> Iterator[None]:
    """Runs float32 products on CPUs through that library."""
    products: Any = torch.backends.mkldnn.matmul  # pyright: ignore[reportAttributeAccessIssue]
    before = products.fp32_precision
    products.fp32_precision = "bf16" if mode == "oneDNN" else "ieee"
    try:
        yield
    finally:
        products.fp32_precision = before


def onednn_error() -> float:
    """Measures the relative error of float32 products through oneDNN against float64."""
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(512, 768, generator=generator) for _ in range(2))
    exact = a.double() @ b.double().T
    with exact_mode("oneDNN"):
        return float(((a @ b.T).double() - exact).norm() / exact.norm())


@dataclass(frozen=True)
class DenseLayer:
    """Computes a(x W_up) W_down; without an activation for attention's projections."""

    w_up_DW: Tensor
    w_down_FD: Tensor
    activation: str | None

    @property
    def weights(self) -> tuple[Tensor, ...]:
        return self.w_up_DW, self.w_down_FD

    def __call__(self, x_TD: Tensor, choices: Sequence[Choice]) -> Tensor:
        h = x_TD @ self.w_up_DW
        return (activate(h, self.activation) if self.activation else h) @ self.w_down_FD


def dense(width: int) -> Callable[[Bank], DenseLayer]:
    """Makes dense layers of that hidden width."""

    def build(bank: Bank) -> DenseLayer:
        d_model, x = bank.setting.d_model, bank.x_TD
        activation = None if bank.setting.is_switchhead else bank.setting.activation
        shapes = ((d_model, columns_of(width, activation or "relu")), (width, d_model))
        up, down = (
            torch.randn(s, device=x.device).mul_(s[0] ** -0.5).to(x.dtype).requires_grad_()
            for s in shapes
        )
        return DenseLayer(up, down, activation)

    return build


@dataclass(frozen=True)
class ExpertLayer:
    """Holds stacked weights and the function that computes the sum over experts."""

    bank: Bank
    run: Callable[..., Tensor]

    @property
    def weights(self) -> tuple[Tensor, ...]:
        return self.bank.weights

    def __call__(self, x_TD: Tensor, choices: Sequence[Choice]) -> Tensor:
        return self.run(x_TD, *self.weights, choices)


class TransformersLayer:
    """Holds transformers' Qwen3 experts with its `grouped_mm` implementation, on weights of its own.

    Raises:
        ImportError: transformers is not installed, or has no such experts.
    """

    def __init__(self, bank: Bank) -> None:
        modules: dict[str, Any] = sys.modules
        modules["kernels"] = None  # transformers would take our folder for a library of that name
        try:
            from transformers import Qwen3MoeConfig
            from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts
        finally:
            del modules["kernels"]
        given: dict[str, Any] = {
            "num_experts": bank.setting.num_experts,
            "hidden_size": bank.setting.d_model,
            "moe_intermediate_size": bank.setting.d_expert,
            "experts_implementation": "grouped_mm",
        }
        with torch.device("meta"):
            self.experts = Qwen3MoeExperts(Qwen3MoeConfig(**given))
        for name, weight in zip(("gate_up_proj", "down_proj"), bank.weights, strict=True):
            setattr(self.experts, name, nn.Parameter(weight.detach().mT.contiguous()))

    @property
    def weights(self) -> tuple[Tensor, ...]:
        return tuple(self.experts.parameters())

    def __call__(self, x_TD: Tensor, choices: Sequence[Choice]) -> Tensor:
        [choice] = choices
        gates_TK = choice.gates_THK[:, 0].to(x_TD.dtype)
        return self.experts(x_TD, choice.experts_THK[:, 0], gates_TK)


@lru_cache(maxsize=2)  # the bank that is checked and the one that is timed; all modes share them
def transformers_layer(bank: Bank) -> TransformersLayer:
    """Makes transformers' layer with a bank's values."""
    return TransformersLayer(bank)


def where_loop(
    x_TD: Tensor, w_up: Tensor, w_down: Tensor, choices: Sequence[Choice], *, activation: str
) -> Tensor:
    """The common loop, as in Transformers: find an expert's tokens, index its weights, add in
    place.
    """
    [choice] = choices
    experts_TK, gates_TK = choice.experts_THK[:, 0], choice.gates_THK[:, 0].to(x_TD.dtype)
    chosen_EKT = F.one_hot(experts_TK, len(w_up)).permute(2, 1, 0)
    y_TD = torch.zeros_like(x_TD)
    for expert in (chosen_EKT.sum((1, 2)) > 0).nonzero().flatten().tolist():
        slot, token = torch.where(chosen_EKT[expert])
        outputs = activate(x_TD[token] @ w_up[expert], activation) @ w_down[expert]
        y_TD.index_add_(0, token, outputs * gates_TK[token, slot, None])
    return y_TD


def grouped(
    x_TD: Tensor,
    w_up: Tensor,
    w_down: Tensor,
    choices: Sequence[Choice],
    *,
    activation: str = "relu",
) -> Tensor:
    """Sorts the routes, gathers, multiplies by torch's grouped product and adds up; the gate
    weights the narrow rows.
    """
    tokens, heads, top_k = choices[0].experts_THK.shape
    route_N = torch.arange(tokens * heads * top_k, device=x_TD.device)
    token_N, head_row_N = route_N // (heads * top_k), route_N // top_k
    if len(choices) == 2:
        into, out = choices
        order_N, ends_E, gate_N1 = _sorted(into, w_up)
        rows = F.grouped_mm(x_TD[token_N[order_N]], w_up, offs=ends_E) * gate_N1
        values = rows.new_zeros(tokens * heads, w_up.shape[2])
        values = values.index_add(0, head_row_N[order_N], rows)
        order_N, ends_E, gate_N1 = _sorted(out, w_down)
        rows = F.grouped_mm(values[head_row_N[order_N]] * gate_N1, w_down, offs=ends_E)
    else:
        order_N, ends_E, gate_N1 = _sorted(choices[0], w_up)
        h = activate(F.grouped_mm(x_TD[token_N[order_N]], w_up, offs=ends_E), activation)
        rows = F.grouped_mm(h * gate_N1, w_down, offs=ends_E)
    return torch.zeros_like(x_TD).index_add(0, token_N[order_N], rows)


def _sorted(choice: Choice, w: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns routes in order of their expert, each expert's end (int32, for grouped_mm), and their
    gates, without synchronization.
    """
    sorted_N, order_N = choice.experts_THK.flatten().sort(stable=True)
    every_E = torch.arange(len(w), device=sorted_N.device)
    ends_E = torch.searchsorted(sorted_N, every_E, right=True).to(torch.int32)
    return order_N, ends_E, choice.gates_THK.flatten()[order_N, None].to(w.dtype)
