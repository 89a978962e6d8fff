"""Compiles every Triton kernel, with every tile of the table, for every kind of GPU on a machine
without one, and says what came out.

What a call of the backend would launch is written down instead (`recorded`), and compiled as it
would have been there. tests/kernels/triton/test_compiles.py holds the result to what is asked of
it.
"""

import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from moebius.kernels.activations import columns_of
from moebius.kernels.calls import MLPBank, MLPCall, MLPGradients, SortedRoutes
from moebius.kernels.fused.norm import WIDEST
from moebius.kernels.fused.router import MOST_EXPERTS
from moebius.kernels.triton import backend as ours
from moebius.kernels.triton import norm as norms
from moebius.kernels.triton import router, router_gradients
from moebius.kernels.triton import tiles as triton_tiles
from moebius.kernels.triton import weight_gradients as triton_weight_gradients

BF16, FP32 = torch.bfloat16, torch.float32
PRODUCTS = {
    "gathered_activation",
    "gathered_gate",
    "gathered_hidden_gradient",
    "gathered_input_gradient",
    "rows_product",
    "fused_mlp",
    "ragged_product",
    "route",
    "row_gradient",
    "weight_gradient",
}
POINTERS = {
    BF16: "*bf16",
    FP32: "*fp32",
    torch.bool: "*i1",
    torch.int32: "*i32",
    torch.int64: "*i64",
}


@dataclass(frozen=True)
class Chip:
    """What one block may have, and what the instructions of its tensor cores are called."""

    shared_kib: int
    products: str
    stack: int = 0  # bytes that may be spilled: for two chips ptxas spills a register or two

    @property
    def is_amd(self) -> bool:
        """Whether it is one of AMD's."""
        return "mfma" in self.products


CHIPS = {
    "sm_80": Chip(163, "mma.sync"),
    "sm_89": Chip(99, "mma.sync"),
    "sm_90": Chip(227, "wgmma.mma_async"),
    "sm_100": Chip(227, "tcgen05.mma", stack=8),
    "sm_120": Chip(99, "mma.sync", stack=8),
    "gfx942": Chip(64, "v_mfma"),
    "gfx950": Chip(160, "v_mfma"),
}
TOKENS_AND_EXPERTS = {
    "many": (4096, 16),
    "few": (1024, 128),
    "one": (1, 1),
}  # at 16 routes per token
LOADS = ("many", "few")
NORM_WIDTHS = (412, 1024, WIDEST)
Launch = tuple[Any, tuple, dict[str, Any]]
Key = tuple[str, str, str]  # of the tiles' table: kernel, precision, load


@dataclass
class Recorded:
    """What calls of the backend would have launched, and which entries of the tiles' table they
    took.
    """

    launches: list[Launch] = field(default_factory=list)
    # of each launch: the entry that was chosen last before it, which is its own if it is a product
    entries: list[Key | None] = field(default_factory=list)
    used: set[Key] = field(default_factory=set)
    _last: Key | None = field(default=None, init=False)

    def note(self, kernel: Any, *args: Any, grid: Any, warmup: bool, **constants: Any) -> None:
        """Stands for Triton's launch."""
        self.launches.append((kernel, args, constants))
        self.entries.append(self._last)

    def choose(
        self, kernel: str, dtype: torch.dtype, num_rows: int, num_experts: int
    ) -> triton_tiles.Tile:
        """Stands for the table."""
        load = "few" if num_rows < triton_tiles.FEW * num_experts else "many"
        self._last = kernel, "bf16" if dtype is BF16 else "fp32", load
        self.used.add(self._last)
        return triton_tiles.choose(kernel, dtype, num_rows, num_experts)


@contextmanager
def recorded(target: str | None = None) -> Iterator[Recorded]:
    """Writes launches down instead of making them; nothing runs. `target`: whose tiles to take."""
    found = Recorded()

    def note(self: Any, *args: Any, **words: Any) -> None:
        found.note(self, *args, **words)

    with ExitStack() as patches:
        patches.enter_context(patch.object(JITFunction, "run", note))
        # rows of a CPU do here: nothing is read
        for module in (ours, router):
            patches.enter_context(patch.object(module, "check_tensor", lambda rows: None))
        patches.enter_context(patch.object(ours, "choose", found.choose))
        patches.enter_context(patch.object(triton_weight_gradients, "choose", found.choose))
        if target is not None:
            for module in (triton_tiles, router, router_gradients):
                patches.enter_context(patch.object(module, "target", lambda: target))
        yield found


def make_routes(load: str) -> SortedRoutes:
    tokens, experts = TOKENS_AND_EXPERTS[load]
    weight_N, order_N = torch.empty(16 * tokens), torch.empty(16 * tokens, dtype=torch.int32)
    starts_E1 = torch.empty(experts + 1, dtype=torch.int32)
    return SortedRoutes(weight_N, order_N, order_N, starts_E1, None, None, tokens, 16, 16, 0)


def call_mlp(
    load: str,
    widths: tuple[int, int],
    dtype: torch.dtype,
    activation: str = "relu",
    *,
    biased: bool = False,
    options: ours.Options = ours.DEFAULT,
    deferred: bool = False,
) -> None:
    routes, (width, hidden), columns = make_routes(load), widths, columns_of(widths[1], activation)
    new = partial(torch.empty, dtype=dtype)
    num_experts = routes.starts_E1.shape[0] - 1
    biases = (new(num_experts, columns), new(num_experts, width)) if biased else (None, None)
    bank = MLPBank(
        new(num_experts, width, columns), new(num_experts, hidden, width), *biases, activation
    )
    x, grad = new(routes.num_targets, width), new(routes.num_targets, width)
    _, saved = ours.mlp_forward(x, bank, routes, options=options)
    if deferred:
        *_, d_z = ours.mlp_backward_rows(grad, x, bank, routes, saved, options=options)
        ours.mlp_weight_gradients([MLPCall(grad, x, routes, saved, d_z, bank)] * 2)
    else:
        into = MLPGradients(bank.w_up_EDW, bank.w_down_EFO)
        ours.mlp_backward(grad, x, bank, routes, saved, into, options=options)


def call_linear(
    load: str, widths: tuple[int, int], dtype: torch.dtype, options: ours.Options = ours.DEFAULT
) -> None:
    routes, new = make_routes(load), partial(torch.empty, dtype=dtype)
    w, x = new(routes.starts_E1.shape[0] - 1, *widths), new(routes.num_targets, widths[0])
    _, saved = ours.linear_forward(x, w, routes, options=options)
    ours.linear_backward(
        new(routes.num_targets, widths[1]), x, w, routes, saved, w, options=options
    )


def call_routers() -> None:
    """Routers of the feed-forward's experts and of V and O, the widest, and one that is given.

    Backward with gradients of the logits, of the gates, and of both; some need not be made.
    """
    for tokens, width, heads, per_head, top_k, gate in (
        (16384, 1024, 1, 387, 16, "sigmoid"),
        (16384, 1024, 4, 10, 2, "sigmoid"),
        (4096, 412, 1, 155, 12, "softmax"),
        (16384, 1536, 1, MOST_EXPERTS, 24, "softmax_of_chosen"),
    ):
        x, w = torch.empty(tokens, width), torch.empty(heads * per_head, width)
        logits_TE, experts_THK, gates_THK = router.route_top_k(
            x, w, None, top_k=top_k, heads=heads, gate=gate
        )
        made = (experts_THK, gates_THK, logits_TE)
        for of_logits, of_gates, wants in (
            (logits_TE, gates_THK, (True, True)),
            (None, gates_THK, (True, False)),
            (logits_TE, None, (False, True)),
        ):
            router_gradients.route_top_k_backward(
                x, w, made, (of_logits, of_gates), gate=gate, wants=wants
            )
    given_THK = torch.empty(tokens, heads, top_k, dtype=torch.int64)
    router.route_top_k(x, w, given_THK, top_k=top_k, heads=heads, gate=gate)


def call_norms(width: int) -> None:
    """Peri-layernorm in mixed precision, which adds and copies most; a norm alone in bfloat16."""
    weight_D, mean_T = torch.empty(width), torch.empty(16384)
    wide_TD, low_TD = torch.empty(16384, width), torch.empty(16384, width, dtype=BF16)
    for s, y, w, copies in (
        (wide_TD, low_TD, weight_D, (low_TD, low_TD)),
        (low_TD, None, weight_D.to(BF16), (None, None)),
    ):
        total = None if y is None else s
        norms.add_norm(s, y, w, w, 1e-5, (total, s, *copies), (mean_T, mean_T))
        norms.add_norm_backward(
            *(s, w, (mean_T, mean_T), (s, s, *copies), (s, y), (w, w)), second_is_normed=False
        )


def compiled(launch: Launch, target: str) -> Any:
    """What the runtime would make of a launch there, tensors lying at multiples of 16 bytes."""
    kernel, args, constants = launch
    options = {
        name: constants.pop(name) for name in ("num_warps", "num_stages") if name in constants
    }
    values = dict(zip(kernel.arg_names, args, strict=False)) | constants
    signature, fixed, attributes = {}, {}, {}
    for place, parameter in enumerate(kernel.params):
        value = values[parameter.name]
        if (
            parameter.is_constexpr
            or value is None
            or (type(value) is int and value == 1 and not parameter.do_not_specialize)
        ):
            signature[parameter.name] = "constexpr"
            fixed[place,] = value
        elif isinstance(value, tuple):
            signature[parameter.name] = tuple(
                "constexpr" if each is None else POINTERS[each.dtype] for each in value
            )
            fixed |= {(place, at): None for at, each in enumerate(value) if each is None}
        elif isinstance(value, Tensor):
            signature[parameter.name] = POINTERS[value.dtype]
            attributes[place,] = [["tt.divisibility", 16]]
        else:
            signature[parameter.name] = "i32"
            if not parameter.do_not_specialize and value % 16 == 0:
                attributes[place,] = [["tt.divisibility", 16]]
    return triton.compile(
        ASTSource(kernel, signature, fixed, attributes),
        target=(
            GPUTarget("hip", target, 64)
            if CHIPS[target].is_amd
            else GPUTarget("cuda", int(target.removeprefix("sm_")), 32)
        ),
        options=options,
    )


def resources(asm: dict[str, Any], chip: Chip) -> tuple[int, int]:
    """Registers of a thread, and bytes of its stack: what is spilled lies there."""
    if chip.is_amd:
        counts = [
            re.search(rf"\.vgpr_{what}:\s+(\d+)", asm["amdgcn"])
            for what in ("count", "spill_count")
        ]
        registers, spilled = (int(count[1]) for count in counts if count is not None)
        return registers, 4 * spilled
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(asm["cubin"])
        file.flush()
        shown = subprocess.run(
            [tool, "-res-usage", file.name], capture_output=True, text=True, check=True
        ).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", shown)
    assert found, shown
    return int(found[1]), int(found[2])


def kind_of(launch: Launch) -> tuple:
    """What tells launches apart that are compiled apart."""
    kernel, args, constants = launch
    return (
        kernel.fn.__name__,
        *(arg if not isinstance(arg, Tensor) else (arg.dtype, arg.dim()) for arg in args),
        *constants.items(),
    )


def calls() -> Iterator[tuple[Callable[[], None], bool]]:
    """Calls of the backend, which together launch every kernel with every tile; and which are exact."""
    fast = ours.Options(fused=True, scatter_add=True)
    for load in LOADS:
        for activation in ("relu", "gelu", "swiglu"):
            biased = activation == "gelu"
            yield partial(call_mlp, load, (1024, 128), BF16, activation, biased=biased), False
        for activation in ("relu", "swiglu"):
            call = partial(call_mlp, load, (1024, 128), BF16, activation, options=fast)
            yield partial(call, deferred=True), False
        for widths in ((1024, 128), (128, 1024), (412, 82), (82, 412)):
            yield partial(call_linear, load, widths, BF16), False
        yield partial(call_mlp, load, (412, 128), BF16), False
        yield partial(call_mlp, load, (1024, 128), FP32), True
        for widths in ((1024, 128), (128, 1024)):
            yield partial(call_linear, load, widths, FP32), True
    # Whether there are tensor cores for tiny widths is all the same.
    for activation in ("relu", "swiglu"):
        yield partial(call_mlp, "one", (5, 3), BF16, activation, biased=True), True
    for widths in ((3, 5), (5, 3)):
        yield partial(call_linear, "one", widths, BF16), True


def tensorfloat_calls() -> Iterator[Callable[[], None]]:
    """Calls with float32 products in TensorFloat-32."""
    tf32, fused = ours.Options(tf32=True), ours.Options(tf32=True, fused=True)
    for load in LOADS:
        yield partial(call_mlp, load, (1024, 128), FP32, "swiglu", options=tf32)
        yield partial(call_mlp, load, (412, 128), FP32, options=fused)
        yield partial(call_mlp, load, (1024, 128), FP32, "swiglu", options=fused)
        yield partial(call_mlp, load, (1024, 82), FP32, options=tf32)
