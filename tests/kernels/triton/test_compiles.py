"""Every Triton kernel, with every tile of the table, compiled for every kind of GPU by a machine without
one.

What a call of the backend would launch is written down instead, and compiled as it would have been
there. Asked of the result: tensor cores in every product, no spilled register, registers and shared
memory that the chip has, rows that come by asynchronous copies while others are computed with, and no
atomics where the output is to be deterministic. Speed is not asked: that needs the GPU.
"""

import os
import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

triton = pytest.importorskip("triton", reason="Triton is not installed")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("the interpreter compiles nothing", allow_module_level=True)

from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402
from triton.runtime.jit import JITFunction  # noqa: E402

from moebius.kernels import peers as peer_messages  # noqa: E402
from moebius.kernels.activations import columns_of  # noqa: E402
from moebius.kernels.addresses import Addresses  # noqa: E402
from moebius.kernels.operands import MLPBank, MLPCall, MLPGradients, SortedRoutes  # noqa: E402
from moebius.kernels.triton import backend as ours  # noqa: E402
from moebius.kernels.triton import peers, sends  # noqa: E402
from moebius.kernels.triton import tiles as triton_tiles  # noqa: E402
from moebius.kernels.triton import weight_gradients as triton_weight_gradients  # noqa: E402
from moebius.kernels.triton.routing import sort_routes, tile_table  # noqa: E402

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

BF16, FP32 = torch.bfloat16, torch.float32
REGISTERS = 64 * 1024  # of one multiprocessor
PRODUCTS = {
    "gathered_activation",
    "gathered_gate",
    "gathered_hidden_gradient",
    "gathered_input_gradient",
    "rows_product",
    "fused_mlp",
    "ragged_product",
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
Launch = tuple[Any, tuple, dict[str, Any]]


@pytest.fixture
def used() -> set[tuple[str, str, str]]:
    """Entries of the table of tiles."""
    return set()


@pytest.fixture
def launches(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, used: set[tuple[str, str, str]]
) -> list[Launch]:
    """Of the calls that a test makes; nothing runs."""
    found: list[Launch] = []

    def note(self: Any, *args: Any, grid: Any, warmup: bool, **constants: Any) -> None:
        found.append((self, args, constants))

    def choose(
        kernel: str, dtype: torch.dtype, num_rows: int, num_experts: int
    ) -> triton_tiles.Tile:
        load = "few" if num_rows < triton_tiles.FEW * num_experts else "many"
        used.add((kernel, "bf16" if dtype is BF16 else "fp32", load))
        return triton_tiles.choose(kernel, dtype, num_rows, num_experts)

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(JITFunction, "run", note)
    monkeypatch.setattr(
        ours, "check_tensor", lambda rows: None
    )  # rows of a CPU do here: nothing is read
    monkeypatch.setattr(ours, "choose", choose)
    monkeypatch.setattr(triton_weight_gradients, "choose", choose)
    return found


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


def faults_of(launch: Launch, target: str, *, exact: bool = False) -> list[str]:
    """What is wrong with a launch there.

    `exact`: products that need not be on tensor cores, and may have a few bytes of stack.
    """
    kernel, _, constants = launch
    name, chip = kernel.fn.__name__, CHIPS[target]
    result = compiled((*launch[:2], dict(constants)), target)
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
        # float32 rows of K3 and K12 are copied one step ahead at most; and without wgmma Triton does
        # not overlap K3's, whose rows are found through an index
        "copies are waited for at once": is_product
        and not chip.is_amd
        and (name != "ragged_product" or chip.products != "mma.sync")
        and constants.get("PRECISION") == "ieee"
        and max(waits, default=0) == 0,
        "atomics": name not in ("_histogram", "_mark")
        and not constants.get("ADD")
        and re.search(r"\b(atom|red)\.|_atomic_", code) is not None,
    }
    about = f"{constants}: {registers} registers, {stack} bytes of stack, {shared} shared, {waits}"
    return [f"{target} {name}: {what}: {about}" for what, is_so in wrong.items() if is_so]


def check(launches: list[Launch], target: str = "sm_90") -> None:
    faults = [fault for launch in launches for fault in faults_of(launch, target)]
    assert not faults, "\n".join(faults)


def test_routing(launches: list[Launch]) -> None:
    sort_routes(torch.empty(4096 * 16, dtype=torch.int64), 565)
    tile_table(torch.empty(566, dtype=torch.int32), 4096 * 16, rows=128)
    assert [kernel.fn.__name__ for kernel, *_ in launches] == [
        "_histogram",
        "_scan",
        "_scatter",
        "_tile_table",
    ]
    check(launches)


@pytest.mark.parametrize(("ranks", "chunks"), [(8, 1), (64, 2), (1, 1)])
@pytest.mark.parametrize("into_sources", [True, False])
def test_sends(ranks: int, chunks: int, into_sources: bool, launches: list[Launch]) -> None:
    rows_N = torch.empty(16384 * 8, dtype=torch.int64)
    targets_N = rows_N if into_sources else torch.empty_like(rows_N)
    tables = (torch.empty(64, dtype=torch.int32), torch.empty(64, dtype=torch.int32))
    to = Addresses(
        *(rows_N, targets_N, torch.empty_like(rows_N), *tables, 16384, 16384, ranks, chunks),
        into_sources=into_sources,
    )
    counts = sends.count_sends(to)
    packed = sends.pack_sends(to, counts, torch.empty(len(rows_N)))
    sends.unpack_sends(packed.metadata_N4, counts.counts_V3, 8)
    lists = ["_list"] if into_sources else ["_list", "_list"]
    kernels = [kernel.fn.__name__ for kernel, *_ in launches]
    assert kernels == ["_mark", "_number", "_describe", *lists, "_unpack"]
    check(launches)


@pytest.mark.parametrize("dtype", [BF16, FP32])
@pytest.mark.parametrize("ranks", [2, 8])
def test_peers(ranks: int, dtype: torch.dtype, launches: list[Launch]) -> None:
    layout = peer_messages.Layout(ranks, 16384 * 8, 16384 * 2048)
    messages = [torch.empty(0, dtype=torch.uint8)] * ranks
    own = peer_messages.Peers(layout, messages, torch.empty(ranks, dtype=torch.int64), 1)
    header_PW, like = peers.read_headers(own), torch.empty(0, 1024, dtype=dtype)
    peers.take_rows(own, header_PW, 0, 30000, like)
    peers.take_routes(own, header_PW, peer_messages.Room(30000, 120000, 30000), 16, torch.empty(0))
    peers.sum_rows(own, header_PW, 2, torch.empty(ranks, 16384, dtype=torch.int32), like)
    to_N, counts_P3 = torch.empty(131072, dtype=torch.int32), torch.empty(ranks, 3).long()
    peers.take_weights(own, header_PW, to_N, to_N, counts_P3, torch.empty(0))
    kernels = [kernel.fn.__name__ for kernel, *_ in launches]
    assert kernels == ["_read_headers", "_take_rows", "_take_routes", "_sum_rows", "_take_weights"]
    check(launches)


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


@pytest.mark.parametrize("target", triton_tiles.TARGETS)
def test_every_kernel_of_the_experts(
    target: str,
    launches: list[Launch],
    used: set[tuple[str, str, str]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(triton_tiles, "target", lambda: target)
    faults: list[str] = []
    seen: set[tuple] = set()
    with_tf32 = () if target in triton_tiles.WITHOUT_TF32 else tensorfloat_calls()
    for call, exact in (*calls(), *((call, False) for call in with_tf32)):
        launches.clear()
        call()
        for launch in launches:
            kernel, args, constants = launch
            kind = (
                kernel.fn.__name__,
                *(arg if not isinstance(arg, Tensor) else (arg.dtype, arg.dim()) for arg in args),
                *constants.items(),
            )
            if kind not in seen:
                seen.add(kind)
                faults += faults_of(launch, target, exact=exact)
    assert not faults, "\n".join(faults)
    assert len(seen) > 150
    left_out = set(triton_tiles.TILES) - used
    assert all(target in triton_tiles.WITHOUT_TF32 and key[1] == "fp32" for key in left_out)
