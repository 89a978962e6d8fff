"""Who runs in expert_layer.py: dense layers, what others write or have, and our backends, all as
one kind of record.

    ceiling   a dense MLP of equal active multiply-accumulates: no routing, one product of full size
    dense     the same layer of the dense model of equal parameters: what a MoEUT layer has to be as
              fast as
    peer      the same sum over experts, written with plain torch or run by an installed package
    ours      the functions of moebius.kernels.functional, one contender per backend

On CPUs float32 products of torch run in every mode that is numerically exact on this machine:
through MKL, torch's default, and through oneDNN, which torch takes with `fp32_precision = "bf16"`
and which computes in full float32 on a CPU without bfloat16 tiles (`kernels/cpu/onednn.py` measures
it). The setting is the process's.

Legend: T tokens, D model width, F expert width, E experts, H heads, K experts chosen, N routes.
"""

import importlib.util
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.kernels.problem import Bank, Choice, run_layer
from moebius.kernels.backend import BACKENDS
from moebius.kernels.cpu import onednn

Role = Literal["ceiling", "dense", "peer", "ours"]
Mode = Literal["default", "oneDNN"]
TORCH_PRODUCTS = ("segments", "grouped_mm")  # of our backends: those whose products are torch's own


class Layer(Protocol):
    """A layer with its weights."""

    @property
    def weights(self) -> tuple[Tensor, ...]: ...

    def __call__(self, x_TD: Tensor, choices: Sequence[Choice]) -> Tensor: ...


@dataclass(frozen=True)
class Contender:
    """One way to run a setting."""

    name: str
    role: Role
    build: Callable[[Bank], Layer]
    mode: Mode = "default"
    activation: str = "relu"  # what its experts do between their products
    work: float = (
        1.0  # multiply-accumulates ÷ those of the setting, where it cannot do the setting itself
    )

    @property
    def label(self) -> str:
        return self.name if self.mode == "default" else f"{self.name} ({self.mode})"


def contenders(bank: Bank, modes: Sequence[Mode]) -> list[Contender]:
    """All that a setting has, whether or not they can run here: that is found out by trying."""
    setting = bank.setting
    found = [
        Contender("dense, equal MACs", "ceiling", dense(setting.active_width), mode)
        for mode in modes
    ]
    if setting.d_dense is not None:
        found += [
            Contender("dense baseline", "dense", dense(setting.d_dense), mode) for mode in modes
        ]
    if not setting.is_switchhead:
        found.append(Contender("loop, where + index_add", "peer", weights_and(where_loop)))
    for mode in modes:
        found += [
            Contender(
                "loop, sorted + unbind",
                "peer",
                weights_and(sorted_peer(unbound, gate="outputs")),
                mode,
            ),
            Contender(
                "grouped_mm", "peer", weights_and(sorted_peer(grouped, gate="outputs")), mode
            ),
            Contender(
                "grouped_mm, gate in h",
                "peer",
                weights_and(sorted_peer(grouped, gate="narrow")),
                mode,
            ),
        ]
    if bank.x_TD.is_cuda and not setting.is_switchhead:
        found += packages(bank)
    return found + [
        Contender(f"ours: {name}", "ours", weights_and(ours(name)), mode)
        for name in BACKENDS
        for mode in (modes if name in TORCH_PRODUCTS else ("default",))
    ]


def exact_mode(mode: Mode) -> AbstractContextManager[None]:
    """Float32 products on CPUs through that library."""
    return onednn.allowed(mode == "oneDNN")


# Dense --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class DenseLayer:
    """relu(x W_up) W_down; without relu in the place of attention's projections."""

    w_up_DW: Tensor
    w_down_WD: Tensor
    has_relu: bool

    @property
    def weights(self) -> tuple[Tensor, ...]:
        return self.w_up_DW, self.w_down_WD

    def __call__(self, x_TD: Tensor, choices: Sequence[Choice]) -> Tensor:
        h = x_TD @ self.w_up_DW
        return (h.relu() if self.has_relu else h) @ self.w_down_WD


def dense(width: int) -> Callable[[Bank], DenseLayer]:
    def build(bank: Bank) -> DenseLayer:
        d_model, x = bank.setting.d_model, bank.x_TD
        shapes = ((d_model, width), (width, d_model))
        up, down = (
            torch.randn(s, device=x.device).mul_(s[0] ** -0.5).to(x.dtype).requires_grad_()
            for s in shapes
        )
        return DenseLayer(up, down, not bank.setting.is_switchhead)

    return build


# Of experts ---------------------------------------------------------------------------------------

Experts = Callable[
    [Tensor, Tensor, Tensor, Sequence[Choice]], Tensor
]  # rows, both weights, choices → outputs


@dataclass(frozen=True)
class ExpertLayer:
    """Stacked weights, and how the sum over experts is computed."""

    w_up_EDF: Tensor
    w_down_EFD: Tensor
    run: Experts

    @property
    def weights(self) -> tuple[Tensor, ...]:
        return self.w_up_EDF, self.w_down_EFD

    def __call__(self, x_TD: Tensor, choices: Sequence[Choice]) -> Tensor:
        return self.run(x_TD, self.w_up_EDF, self.w_down_EFD, choices)


def weights_and(run: Experts) -> Callable[[Bank], ExpertLayer]:
    return lambda bank: ExpertLayer(*bank.weights, run)


def ours(backend: str) -> Experts:
    def run(x_TD: Tensor, w_up: Tensor, w_down: Tensor, choices: Sequence[Choice]) -> Tensor:
        return run_layer(x_TD, w_up, w_down, choices, backend=backend)

    return run


def where_loop(x_TD: Tensor, w_up: Tensor, w_down: Tensor, choices: Sequence[Choice]) -> Tensor:
    """The loop that everyone writes, as in Transformers: find an expert's tokens, index its
    weights, add in place.
    """
    [choice] = choices
    experts_TK, gates_TK = choice.experts_THK[:, 0], choice.gates_THK[:, 0].to(x_TD.dtype)
    chosen_EKT = F.one_hot(experts_TK, len(w_up)).permute(2, 1, 0)
    y_TD = torch.zeros_like(x_TD)
    for expert in (chosen_EKT.sum((1, 2)) > 0).nonzero().flatten().tolist():
        slot, token = torch.where(chosen_EKT[expert])
        outputs = (x_TD[token] @ w_up[expert]).relu() @ w_down[expert]
        y_TD.index_add_(0, token, outputs * gates_TK[token, slot, None])
    return y_TD


Product = Callable[
    [Tensor, Tensor, Tensor], Tensor
]  # sorted rows, weights, where each expert's rows end → rows


def unbound(rows: Tensor, w: Tensor, ends_E: Tensor) -> Tensor:
    """A loop over split rows and unbound weights, whose gradients are written once."""
    counts = ends_E.diff(prepend=ends_E.new_zeros(1)).tolist()
    return torch.cat(
        [some @ one for some, one in zip(rows.split(counts), w.unbind(0), strict=True)]
    )


def grouped(rows: Tensor, w: Tensor, ends_E: Tensor) -> Tensor:
    """torch's own grouped product."""
    return F.grouped_mm(rows, w, offs=ends_E)


def sorted_peer(product: Product, *, gate: Literal["outputs", "narrow"]) -> Experts:
    """Sort the routes, gather, products, add up. The gate weighs the outputs, or wherever rows are
    narrow.
    """

    def projection(
        rows: Tensor,
        w: Tensor,
        choice: Choice,
        source_N: Tensor,
        target_N: Tensor,
        num_targets: int,
    ) -> Tensor:
        order_N, ends_E = _sorted(choice, len(w))
        gate_N1 = choice.gates_THK.flatten()[order_N, None].to(rows.dtype)
        gathered = rows.index_select(0, source_N[order_N])
        if gate == "narrow" and w.shape[1] < w.shape[2]:
            outputs = product(gathered * gate_N1, w, ends_E)
        else:
            outputs = product(gathered, w, ends_E) * gate_N1
        return rows.new_zeros(num_targets, w.shape[2]).index_add(0, target_N[order_N], outputs)

    def run(x_TD: Tensor, w_up: Tensor, w_down: Tensor, choices: Sequence[Choice]) -> Tensor:
        tokens, heads, top_k = choices[0].experts_THK.shape
        route_N = torch.arange(tokens * heads * top_k, device=x_TD.device)
        token_N, head_row_N = route_N // (heads * top_k), route_N // top_k
        if len(choices) == 2:
            value = projection(x_TD, w_up, choices[0], token_N, head_row_N, tokens * heads)
            return projection(value, w_down, choices[1], head_row_N, token_N, tokens)
        order_N, ends_E = _sorted(choices[0], len(w_up))
        source_N = token_N[order_N]
        gate_N1 = choices[0].gates_THK.flatten()[order_N, None].to(x_TD.dtype)
        h = product(x_TD.index_select(0, source_N), w_up, ends_E).relu()
        outputs = (
            product(h * gate_N1, w_down, ends_E)
            if gate == "narrow"
            else product(h, w_down, ends_E) * gate_N1
        )
        return torch.zeros_like(x_TD).index_add(0, source_N, outputs)

    return run


def _sorted(choice: Choice, num_experts: int) -> tuple[Tensor, Tensor]:
    """The routes in order of their expert, and where each expert's end (int32, as grouped_mm wants
    it). No synchronisation.
    """
    sorted_N, order_N = choice.experts_THK.flatten().sort(stable=True)
    every_E = torch.arange(num_experts, device=sorted_N.device)
    return order_N, torch.searchsorted(sorted_N, every_E, right=True).to(torch.int32)


# Installed packages -------------------------------------------------------------------------------


def packages(bank: Bank) -> list[Contender]:
    """Returns peers that can be installed from elsewhere; none of their code is here."""
    return [
        Contender("ScatterMoE", "peer", scattermoe),
        # Its experts are SwiGLU ones: three matrices, so a layer of equal width has 1.5 times the
        # work.
        Contender("Liger fused MoE, SwiGLU", "peer", liger, activation="swiglu", work=1.5),
    ]


def scattermoe(bank: Bank) -> Layer:
    _need("scattermoe", "not on PyPI: put its source tree on PYTHONPATH")
    from scattermoe.parallel_experts import flatten_sort_count, parallel_linear  # pyright: ignore[reportMissingImports]

    def run(x_TD: Tensor, w_up: Tensor, w_down: Tensor, choices: Sequence[Choice]) -> Tensor:
        experts_TK, gates_TK = (
            choices[0].experts_THK[:, 0],
            choices[0].gates_THK[:, 0].to(x_TD.dtype),
        )
        order = flatten_sort_count(experts_TK, len(w_up))
        h = parallel_linear(x_TD, w_up, experts_TK.shape[1], *order, grouped_out=True).relu()
        return parallel_linear(h, w_down, 1, *order, gates=gates_TK, grouped_in=True)

    return ExpertLayer(*bank.weights, run)


@dataclass(frozen=True)
class LigerLayer:
    """Both first matrices in one, transposed, as that package wants them."""

    gate_up_EWD: Tensor
    down_EDF: Tensor

    @property
    def weights(self) -> tuple[Tensor, ...]:
        return self.gate_up_EWD, self.down_EDF

    def __call__(self, x_TD: Tensor, choices: Sequence[Choice]) -> Tensor:
        from liger_kernel.ops.fused_moe import LigerFusedMoEFunction  # pyright: ignore[reportMissingImports]

        [choice] = choices
        experts_TK, gates_TK = choice.experts_THK[:, 0].to(torch.int32), choice.gates_THK[:, 0]
        return LigerFusedMoEFunction.apply(
            x_TD, self.gate_up_EWD, self.down_EDF, experts_TK, gates_TK
        )


def liger(bank: Bank) -> Layer:
    _need("liger_kernel", "pip install --no-deps liger-kernel")
    up = bank.w_up_EDF.detach().transpose(1, 2)
    gate_up, down = torch.cat((up, up), 1), bank.w_down_EFD.detach().transpose(1, 2).contiguous()
    return LigerLayer(gate_up.requires_grad_(), down.requires_grad_())


def _need(package: str, install: str) -> None:
    if importlib.util.find_spec(package) is None:
        raise ImportError(f"{package} is not installed ({install})")
