"""Compiles every Triton kernel with every tile for every kind of GPU, on a machine without one.

The launches of backend calls are recorded and compiled for each target. The tests check tensor cores
in every product, no spilled registers, the chip's registers and shared memory, asynchronous copies
that overlap with computation, and no atomics in deterministic kernels. Speed needs a GPU.
"""

import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

triton = pytest.importorskip("triton", reason="Triton is not installed")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("the interpreter compiles nothing", allow_module_level=True)

from triton_compiling import (  # noqa: E402
    CHIPS,
    NORM_WIDTHS,
    PRODUCTS,
    Launch,
    Recorded,
    call_norms,
    call_routers,
    calls,
    compiled,
    kind_of,
    recorded,
    resources,
)

from moebius.kernels.triton import rotary as rotations  # noqa: E402
from moebius.kernels.triton import router, router_gradients  # noqa: E402
from moebius.kernels.triton import tiles as triton_tiles  # noqa: E402
from moebius.kernels.triton.routing import sort_routes, tile_table  # noqa: E402

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

BF16, FP32 = torch.bfloat16, torch.float32
REGISTERS = 64 * 1024  # of one multiprocessor


@pytest.fixture
def noted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Recorded]:
    """Records the launches of a test's calls; nothing runs."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
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
        "atomics": name != "_histogram" and re.search(r"\b(atom|red)\.|_atomic_", code) is not None,
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


@pytest.mark.parametrize("target", triton_tiles.TARGETS)
@pytest.mark.parametrize("channels", [82, 128, 41])
def test_rotation(channels: int, target: str, launches: list[Launch]) -> None:
    """Usual and unusual strides; one table for all sequences, and one per sequence."""
    width = channels // 4 * 2
    for dtype, shape in ((BF16, (1024, width)), (FP32, (16, 1, 1024, width))):
        rows = torch.empty(16, 1024, 4, channels, dtype=dtype).transpose(1, 2)
        apart = torch.empty(16, 4, channels, 1024, dtype=dtype).mT
        table = torch.empty(shape), torch.empty(shape)
        for pair in ((rows, rows), (rows, apart)):
            for back in (False, True):
                rotations.rotate_pair(pair, table, (rows, rows), scale=0.3, back=back)
    check(launches, target)
    assert [kernel.fn.__name__ for kernel, *_ in launches] == ["_rotate_pair"] * 8


@pytest.mark.parametrize("target", triton_tiles.TARGETS)
def test_router(target: str, launches: list[Launch], monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (triton_tiles, router, router_gradients):
        monkeypatch.setattr(module, "target", lambda: target)
    call_routers()
    forward, products = ["_split", "route"], ["row_gradient", "weight_gradient"]
    backward = ["logit_gradient", *products]
    for product in products:
        backward += ["logit_gradient", product]
    expected = 4 * (forward + backward) + forward
    assert [kernel.fn.__name__ for kernel, *_ in launches] == expected
    check(list({kind_of(launch): launch for launch in launches}.values()), target)


@pytest.mark.parametrize("target", triton_tiles.TARGETS)
@pytest.mark.parametrize("width", NORM_WIDTHS)
def test_norms(width: int, target: str, launches: list[Launch]) -> None:
    call_norms(width)
    check(launches, target)
    names = [kernel.fn.__name__ for kernel, *_ in launches]
    assert names == ["_add_norm", "_add_norm_backward", "_sum_partial"] * 2


@pytest.mark.parametrize("target", triton_tiles.TARGETS)
def test_every_kernel_of_the_experts(
    target: str, noted: Recorded, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(triton_tiles, "target", lambda: target)
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
