"""Compiles every Triton kernel with every tile for every kind of GPU, on a machine without one.

The launches of backend calls are recorded and compiled for each target. The tests check tensor cores
in every product, no spilled registers, the chip's registers and shared memory, asynchronous copies
that overlap with computation, and no atomics in deterministic kernels. Speed needs a GPU. CI compiles
for one target, `make kernels` for all.
"""

import os
import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

triton = pytest.importorskip("triton", reason="Triton is not installed")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("the interpreter compiles nothing", allow_module_level=True)

from triton._C.libtriton import ir  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource, make_backend  # noqa: E402
from triton.runtime.jit import JITFunction  # noqa: E402

from moebius.kernels.calls import Deferred, GradientBuffers, LinearCall, MLPCall  # noqa: E402
from moebius.kernels.fused.norm import WIDEST  # noqa: E402
from moebius.kernels.fused.router import MOST_EXPERTS  # noqa: E402
from moebius.kernels.reference import columns_of  # noqa: E402
from moebius.kernels.triton import (  # noqa: E402
    backend,
    grouped_gemm,
    router,
    router_gradients,
    routing,
    weight_gradients,
)
from moebius.kernels.triton import norm as norms  # noqa: E402
from moebius.kernels.triton import rotary as rotations  # noqa: E402
from moebius.kernels.triton import tiles as triton_tiles  # noqa: E402

pytestmark = pytest.mark.timeout(900)

BF16, FP32 = torch.bfloat16, torch.float32
KERNELS = backend.TritonKernels()
MODULES = (grouped_gemm, norms, rotations, router, router_gradients, routing, weight_gradients)
PRODUCTS = {
    "gathered_activation",
    "gathered_gate",
    "gathered_hidden_gradient",
    "gathered_input_gradient",
    "rows_product",
    "ragged_product",
    "route",
    "row_gradient",
    "weight_gradient",
}
# Kernels that store (st) or load (ld) rows that are read once: these leave the L2 before others.
STREAMS = {
    "gathered_gate": "st",
    "gathered_input_gradient": "st",
    "rows_product": "st",
    "_sum_equal": "ld",
    "_sum_listed": "ld",
    "_add_chunks": "ld",
}
POINTERS = {BF16: "*bf16", FP32: "*fp32", torch.int32: "*i32", torch.int64: "*i64"}


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
LOADS = ("many", "few")
TOKENS_AND_EXPERTS = {"many": (4096, 16), "few": (1024, 128), "one": (1, 1)}  # 16 routes per token
Launch = tuple[Any, tuple, dict[str, Any]]


@dataclass
class Recorded:
    """What calls of the backend would have launched, and which tiles of the table they took."""

    launches: list[Launch] = field(default_factory=list)
    used: set[tuple[str, str, str]] = field(default_factory=set)

    def choose(self, kernel: str, dtype: torch.dtype, num_rows: int, num_experts: int) -> Any:
        """Stands for the table."""
        self.used.add(triton_tiles.entry_of(kernel, dtype, num_rows, num_experts))
        return triton_tiles.choose(kernel, dtype, num_rows, num_experts)


@contextmanager
def recorded() -> Iterator[Recorded]:
    """Writes launches down instead of making them; nothing runs."""
    found = Recorded()

    def note(kernel: Any, *args: Any, grid: Any, warmup: bool, **constants: Any) -> None:
        found.launches.append((kernel, args, constants))

    with ExitStack() as patches:
        patches.enter_context(patch.object(JITFunction, "run", note))
        for module in (backend, weight_gradients):
            patches.enter_context(patch.object(module, "choose", found.choose))
        yield found


# What is called -----------------------------------------------------------------------------------


def make_routes(load: str) -> dict[str, Any]:
    """The fields of a list of routes."""
    tokens, experts = TOKENS_AND_EXPERTS[load]
    order_N = torch.empty(16 * tokens, dtype=torch.int32)
    sizes = {"num_targets": tokens, "per_source": 16, "per_target": 16, "per_expert": 0}
    return sizes | {
        "weight_N": torch.empty(16 * tokens),
        "order_N": order_N,
        "place_N": order_N,
        "starts_E1": torch.empty(experts + 1, dtype=torch.int32),
        "source_N": None,
        "target_N": None,
        "backend": "triton",
        "number": 0,
    }


def call_mlp(
    load: str,
    widths: tuple[int, int],
    dtype: torch.dtype,
    activation: str = "relu",
    *,
    biased: bool = False,
    deferred: bool = False,
) -> None:
    """Forward and backward of perceptrons."""
    (tokens, experts), (width, hidden) = TOKENS_AND_EXPERTS[load], widths
    new, columns = partial(torch.empty, dtype=dtype), columns_of(hidden, activation)
    call = MLPCall(
        **make_routes(load),
        x_UD=new(tokens, width),
        w_up_EDW=new(experts, width, columns),
        w_down_EFO=new(experts, hidden, width),
        b_up_EW=new(experts, columns) if biased else None,
        b_down_EO=new(experts, width) if biased else None,
        activation=activation,
    )
    _, saved = KERNELS.mlp_forward(call)
    grad_TO = torch.empty_like(call.x_UD)
    if deferred:
        found = KERNELS.mlp_backward_rows(call, grad_TO, saved)
        KERNELS.mlp_weight_gradients([Deferred(call, grad_TO, saved, found.z_NW)] * 2)
    else:
        into = GradientBuffers([call.w_up_EDW, call.w_down_EFO])
        KERNELS.mlp_backward(call, grad_TO, saved, into)


def call_linear(load: str, widths: tuple[int, int], dtype: torch.dtype) -> None:
    """Forward and backward of matrices."""
    (tokens, experts), new = TOKENS_AND_EXPERTS[load], partial(torch.empty, dtype=dtype)
    w_EDO = new(experts, *widths)
    call = LinearCall(**make_routes(load), x_UD=new(tokens, widths[0]), w_EDO=w_EDO)
    _, saved = KERNELS.linear_forward(call)
    KERNELS.linear_backward(call, new(tokens, widths[1]), saved, GradientBuffers([w_EDO]))


def calls(loads: Sequence[str] = LOADS) -> Iterator[tuple[Callable[[], None], bool]]:
    """Calls of the backend, which together launch every kernel with every tile; and which are exact."""
    for load in loads:
        for activation in ("relu", "gelu", "swiglu", "clamped_swiglu"):
            biased = activation in ("gelu", "clamped_swiglu")
            yield partial(call_mlp, load, (1024, 128), BF16, activation, biased=biased), False
            call = partial(call_mlp, load, (1024, 128), FP32, activation, deferred=True)
            yield call, True
        yield partial(call_mlp, load, (1024, 128), BF16, "swiglu", deferred=True), False
        yield partial(call_mlp, load, (412, 128), BF16), False
        yield partial(call_mlp, load, (1024, 82), FP32), True
        for widths in ((1024, 128), (128, 1024), (412, 82), (82, 412)):
            yield partial(call_linear, load, widths, BF16), False
        for widths in ((1024, 128), (128, 1024)):
            yield partial(call_linear, load, widths, FP32), True
    # Whether there are tensor cores for tiny widths is all the same.
    for activation in ("relu", "swiglu", "clamped_swiglu"):
        yield partial(call_mlp, "one", (5, 3), BF16, activation, biased=True), True
    for widths in ((3, 5), (5, 3)):
        yield partial(call_linear, "one", widths, BF16), True


def call_routers() -> None:
    """Routers of the feed-forward's experts and of V and O, the widest, and one that is given.

    Backward with gradients of all results, of gates, and of logits; some need not be made.
    """
    for tokens, width, routers, heads, per_head, top_k, gate in (
        (16384, 1024, 1, 1, 387, 16, "sigmoid"),
        (16384, 1024, 2, 4, 10, 2, "sigmoid"),
        (4096, 412, 1, 1, 155, 12, "softmax"),
        (16384, 1536, 1, 1, MOST_EXPERTS, 24, "softmax_of_chosen"),
    ):
        x, w = torch.empty(tokens, width), torch.empty(routers * heads * per_head, width)
        logits_TE, experts, gates, sums_BE = router.route_top_k(
            x, w, None, gate, top_k, heads, routers, num_sequences=16
        )
        made = (experts, gates, logits_TE)
        for grads, wants in (
            ((logits_TE, gates, sums_BE), (True, True)),
            ((None, gates, None), (True, False)),
            ((logits_TE, None, None), (False, True)),
        ):
            router_gradients.route_top_k_backward(x, w, made, grads, gate=gate, wants=wants)
    router.route_top_k(
        x, w, torch.empty(tokens, heads, top_k, dtype=torch.int64), gate, top_k, heads
    )


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


def call_routing() -> None:
    """The sort of routes, and the sum of rows with unequally many routes."""
    routing.sort_routes(torch.empty(4096 * 16, dtype=torch.int64), 565)
    routing.sum_rows(torch.empty(64, 1024, dtype=BF16), torch.zeros(64, dtype=torch.int64), 8, 0)


def call_rotations(channels: int) -> None:
    """Usual and unusual strides; one table for all sequences, and one per sequence."""
    width = channels // 4 * 2
    for dtype, shape in ((BF16, (1024, width)), (FP32, (16, 1, 1024, width))):
        rows = torch.empty(16, 1024, 4, channels, dtype=dtype).transpose(1, 2)
        apart = torch.empty(16, 4, channels, 1024, dtype=dtype).mT
        table = torch.empty(shape), torch.empty(shape)
        for pair in ((rows, rows), (rows, apart)):
            for back in (False, True):
                rotations.rotate_pair(pair, table, (rows, rows), scale=0.3, back=back)


# What is made of it -------------------------------------------------------------------------------


def source_of(launch: Launch, target: str) -> tuple[ASTSource, GPUTarget, dict[str, Any]]:
    """Returns what the runtime compiles for a launch there, tensors lying at multiples of 16 bytes."""
    kernel, args, constants = launch
    options = {name: constants[name] for name in ("num_warps", "num_stages") if name in constants}
    values = dict(zip(kernel.arg_names, args, strict=False)) | constants
    signature, fixed, attributes = {}, {}, {}
    for place, parameter in enumerate(kernel.params):
        value = values[parameter.name]
        is_one = type(value) is int and value == 1 and not parameter.do_not_specialize
        if parameter.is_constexpr or value is None or is_one:
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
    gpu = GPUTarget("hip", target, 64)
    if not CHIPS[target].is_amd:
        gpu = GPUTarget("cuda", int(target.removeprefix("sm_")), 32)
    return ASTSource(kernel, signature, fixed, attributes), gpu, options


def compiled(launch: Launch, target: str) -> Any:
    """Compiles a launch as the runtime would."""
    source, gpu, options = source_of(launch, target)
    return triton.compile(source, target=gpu, options=options)


def front_end(launch: Launch, target: str) -> None:
    """Compiles a launch to Triton's IR, in 0.02 s: here a Triton refuses what it does not know."""
    source, gpu, given = source_of(launch, target)
    compiler: Any = make_backend(gpu)
    options, context = compiler.parse_options(given), ir.context()
    ir.load_dialects(context)
    compiler.load_dialects(context)
    functions = compiler.get_codegen_implementation(options)
    module = source.make_ir(gpu, options, functions, compiler.get_module_map(), context)
    stages: dict[str, Any] = {}
    compiler.add_stages(stages, options, source.language)
    stages["ttir"](module, {})


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
        command = [tool, "-res-usage", file.name]
        shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", shown)
    assert found, shown
    return int(found[1]), int(found[2])


def kind_of(launch: Launch) -> tuple:
    """What tells launches apart that are compiled apart."""
    kernel, args, constants = launch
    return kernel.fn.__name__, *map(form_of, args), *constants.items()


def form_of(arg: Any) -> Any:
    """What of an argument tells launches apart."""
    if isinstance(arg, tuple):
        return tuple(map(form_of, arg))
    return (arg.dtype, arg.dim()) if isinstance(arg, Tensor) else arg


# The tests ----------------------------------------------------------------------------------------

REGISTERS = 64 * 1024  # of one multiprocessor
mark = pytest.mark
on_every_gpu = mark.parametrize(
    "target",
    [
        pytest.param(target, marks=mark.slow if target == "sm_90" else mark.nightly)
        for target in triton_tiles.TARGETS
    ],
)


@pytest.fixture
def target() -> str:
    """The kind of GPU of tests that name none."""
    return "sm_90"


@pytest.fixture
def noted(target: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Recorded]:
    """Records the launches of a test's calls for a target; nothing runs."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    for module in (triton_tiles, router, router_gradients):
        monkeypatch.setattr(module, "target", lambda: target)
    with recorded() as found:
        yield found


@pytest.fixture
def launches(noted: Recorded) -> list[Launch]:
    """The recorded launches of a test's calls."""
    return noted.launches


def faults_of(launch: Launch, target: str, *, exact: bool = False) -> list[str]:
    """Returns the faults of a launch on a target.

    `exact` products need no tensor cores and may use a few bytes of stack.
    """
    kernel, _, constants = launch
    name, chip = kernel.fn.__name__, CHIPS[target]
    result = compiled(launch, target)
    registers, stack = resources(result.asm, chip)
    code, shared = result.asm["amdgcn" if chip.is_amd else "ptx"], result.metadata.shared
    is_product = name in PRODUCTS and not exact
    waits = [int(count) for count in re.findall(r"cp.async.wait_group\s+(\d+)", code)]
    wrong = {
        "stack": stack > (64 if exact else chip.stack),
        "registers": not chip.is_amd and registers * 32 * result.metadata.num_warps > REGISTERS,
        "shared memory": shared > 1024 * chip.shared_kib,
        "no tensor cores": is_product and chip.products not in code,
        "older tensor cores": is_product and target == "sm_90" and "\tmma.sync" in code,
        "no asynchronous copies": is_product and not chip.is_amd and "cp.async" not in code,
        # Without wgmma Triton does not overlap K3's indexed copies; on Blackwell it overlaps no products
        # that share operands outside registers.
        "copies are waited for at once": is_product
        and not chip.is_amd
        and (name != "ragged_product" or chip.products != "mma.sync")
        and (name != "row_gradient" or chip.products != "tcgen05.mma")
        and max(waits, default=0) == 0,
        "rows that are read once stay in the cache": name in STREAMS
        and not chip.is_amd
        and re.search(rf"{STREAMS[name]}\.global\.L1::evict_first", code) is None,
        "atomics": re.search(r"\b(atom|red)\.(?!shared)|_atomic_", code) is not None,
    }
    about = f"{constants}: {registers} registers, {stack} bytes of stack, {shared} shared, {waits}"
    return [f"{target} {name}: {what}: {about}" for what, is_so in wrong.items() if is_so]


def distinct(launches: list[Launch]) -> list[Launch]:
    """Drops launches that would be compiled to the same."""
    return list({kind_of(launch): launch for launch in launches}.values())


def kernels_in_source() -> set[str]:
    """Returns the names of the Triton functions that no other one calls."""
    functions = {
        name: each
        for module in MODULES
        for name, each in vars(module).items()
        if isinstance(each, JITFunction)
    }
    source = "".join(each.src.partition(":")[2] for each in functions.values())
    return {name for name in functions if not re.search(rf"\b{name}\(", source)}


BESIDE_THE_EXPERTS: dict[str, Callable[[], None]] = {
    "routing": call_routing,
    "router": call_routers,
    **{f"rotation {channels}": partial(call_rotations, channels) for channels in (82, 128, 41)},
    **{f"norm {width}": partial(call_norms, width) for width in (412, 1024, WIDEST)},
}


@pytest.mark.slow
def test_the_front_end_takes_every_kernel(noted: Recorded) -> None:
    """What one Triton takes another refuses: `make range` runs this with the oldest and the newest."""
    for call in BESIDE_THE_EXPERTS.values():
        call()
    for call, _ in calls(loads=["many"]):
        call()
    launches = distinct(noted.launches)
    assert {kernel.fn.__name__ for kernel, *_ in launches} == kernels_in_source()
    for launch in launches:
        front_end(launch, "sm_90")


@on_every_gpu
@mark.parametrize("name", BESIDE_THE_EXPERTS)
def test_every_kernel_beside_the_experts(name: str, target: str, launches: list[Launch]) -> None:
    BESIDE_THE_EXPERTS[name]()
    faults = [fault for launch in distinct(launches) for fault in faults_of(launch, target)]
    assert not faults, "\n".join(faults)


@on_every_gpu
def test_every_kernel_of_the_experts(target: str, noted: Recorded) -> None:
    faults: list[str] = []
    seen: set[tuple] = set()
    for call, exact in calls():
        noted.launches.clear()
        call()
        for launch in noted.launches:
            kind = kind_of(launch)
            if kind not in seen:
                seen.add(kind)
                faults += faults_of(launch, target, exact=exact)
    assert not faults, "\n".join(faults)
    assert len(seen) > 100
    assert noted.used == set(triton_tiles.TILES)
