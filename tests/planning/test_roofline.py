"""One kernel's time: what anyone believes of huge copies and products, waves, and a case by hand."""

from dataclasses import replace
from math import ceil

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moebius.planning.expert_kernels import ExpertCall
from moebius.planning.hardware import HARDWARE, hardware_of_gpu
from moebius.planning.roofline import (
    Grid,
    Precision,
    Time,
    grid_time,
    matrix_bytes,
    missed_bytes,
    product_time,
    rate,
    stream_time,
)
from moebius.planning.roofline import TileShape as Tile

H100, H200, A100 = HARDWARE["h100"], HARDWARE["h200"], HARDWARE["a100"]
few = settings(max_examples=60, deadline=None)

# By hand, for a machine of round figures: 10 multiprocessors of 1 TFLOP/s and 128 GB/s through
# shared memory each.
ROUND = replace(
    H200,
    multiprocessors=10,
    clock_hz=1e9,
    peak_bf16=10e12,
    product_ceiling=1.0,
    memory_bandwidth=1e12,
    copy_ceiling=1.0,
    l2_bandwidth=2e12,
    memory_latency_s=1e-6,
    kernel_gap_s=5e-6,
)
# 10 µs on the tensor cores, 4 µs through shared memory, 8 steps of a pipeline of 3 stages: 4 µs
GRID = Grid(
    programs=20,
    flops=10e6,
    steps=8,
    step_bytes=32e3,
    matrix_bytes=256e3,
    stages=3,
    at_once=2,
)


def microseconds(grid: Grid, *, hbm: float = 0.0, l2: float = 0.0, longest: float = 1.0) -> Time:
    found = grid_time(ROUND, grid, "bf16", hbm_bytes=hbm, l2_bytes=l2, longest=longest)
    return Time(round(1e6 * found.seconds, 6), found.bound)


def test_a_grid_by_hand() -> None:
    """Two programs on each multiprocessor: 2 · 10 µs, the first tile's 3 µs, a gap of 5."""
    assert microseconds(GRID) == Time(28, "compute")
    # alone: 3 + 10 µs, one after the other
    assert microseconds(replace(GRID, at_once=1)) == Time(2 * 13 + 5, "latency")
    # 2 stages fetch a tile in 1 µs, and 12 of them wait longer than 2 · 5 µs of shared memory take
    waiting = replace(GRID, flops=1e6, steps=12, step_bytes=32e3, stages=2)
    assert microseconds(waiting) == Time(3 + 12 + 5, "latency")
    assert microseconds(replace(GRID, flops=1e6)) == Time(2 * 4 + 3 + 5, "shared memory")
    assert microseconds(GRID, hbm=40e6) == Time(40 + 5, "HBM")
    assert microseconds(GRID, l2=90e6) == Time(45 + 5, "L2")
    assert microseconds(GRID, longest=4.0) == Time(4 * 13 + 5, "longest program")
    assert microseconds(replace(GRID, programs=0)) == Time(5, "launch")


def test_programs_come_in_waves() -> None:
    times = {
        n: microseconds(replace(GRID, programs=n)).seconds for n in (1, 10, 11, 20, 21, 30, 31)
    }
    assert times[1] == times[10] < times[11] == times[20] < times[21] == times[30] < times[31]
    assert times[31] - times[21] == pytest.approx(10)


@pytest.mark.parametrize("name", HARDWARE)
def test_a_huge_copy_takes_its_bytes(name: str) -> None:
    hardware = HARDWARE[name]
    found = stream_time(hardware, 64e9)
    assert found.bound == "HBM"
    assert found.seconds == pytest.approx(64e9 / (0.9 * hardware.memory_bandwidth), rel=1e-3)
    nothing = stream_time(hardware, 8, launches=3)
    assert nothing.bound == "launch"
    assert nothing.seconds == pytest.approx(3 * hardware.kernel_gap_s, rel=1e-3)


@pytest.mark.parametrize("name", ["h100", "h200", "a100"])
@pytest.mark.parametrize("precision", ["bf16", "tf32", "fp32"])
def test_a_huge_product_takes_its_flops(name: str, precision: Precision) -> None:
    hardware = HARDWARE[name]
    found = product_time(hardware, 2**15, 2**15, 2**15, precision)
    assert found.seconds == pytest.approx(2 * 2.0**45 / rate(hardware, precision), rel=0.05)
    assert found.bound in ("compute", "shared memory")


def test_the_one_product_that_was_measured() -> None:
    """788 TFLOP/s of 8192³ in bfloat16 on an H200: what the ceiling was taken from."""
    found = 2 * 8192**3 / product_time(H200, 8192, 8192, 8192, "bf16").seconds
    assert found == pytest.approx(788e12, rel=0.05)


def test_a_product_of_few_rows_takes_its_weights_bytes() -> None:
    """One row: a matrix is read, whatever the tensor cores could do."""
    found = product_time(H200, 1, 16384, 16384, "bf16")
    least = 2 * 16384**2 / (0.9 * H200.memory_bandwidth)
    assert least < found.seconds < 1.6 * least


@given(
    rows=st.integers(1, 40_000),
    more=st.integers(1, 40_000),
    columns=st.sampled_from([40, 387, 1024, 4110]),
    precision=st.sampled_from(["bf16", "fp32"]),
)
@few
def test_more_rows_never_take_less(
    rows: int, more: int, columns: int, precision: Precision
) -> None:
    less = product_time(H100, rows, columns, 1024, precision).seconds
    assert product_time(H100, rows + more, columns, 1024, precision).seconds >= less


def test_what_a_cache_loses_is_read_again() -> None:
    held = 0.6 * H200.l2_bytes
    assert missed_bytes(H200, held, 16 * held) == held  # once
    assert missed_bytes(H200, 2 * held, 32 * held) == pytest.approx(2 * held + 0.5 * 30 * held)
    assert missed_bytes(H200, 1e15, 2e15) == pytest.approx(2e15, rel=1e-3)  # every time
    assert missed_bytes(H200, 1e9, 1e6) == 1e6  # not what nobody reads


def test_shared_memory_that_tensor_cores_read() -> None:
    """128 × 128 over 64 in bfloat16, 8 warps: Hopper's two groups read all columns each."""
    tile = Tile(128, 128, 64, 8, 3)
    assert matrix_bytes(H100, tile, 64, 2) == (128 + 2 * 128) * 64 * 2
    assert matrix_bytes(HARDWARE["b200"], tile, 64, 2) == (128 + 128) * 64 * 2
    assert matrix_bytes(A100, tile, 64, 2) == (128 * 4 + 128 * 2) * 64 * 2  # 2 × 4 warps


@pytest.mark.parametrize("spread", [0.0, 0.5, 1.5])
@pytest.mark.parametrize("experts", [1, 40, 387])
def test_loads_add_up_and_fill_tiles(experts: int, spread: float) -> None:
    call = ExpertCall(262_144, experts, 1024, 128, 16384, 16384, "bf16", spread)
    assert sum(load * count for load, count in call.loads) == pytest.approx(262_144)
    assert sum(count for _, count in call.loads) == pytest.approx(experts)
    mean = 262_144 / experts
    deviation = sum(count * (load - mean) ** 2 for load, count in call.loads) / experts
    if experts > 1:
        assert deviation**0.5 / mean == pytest.approx(spread, rel=0.25)
    tiles = call.row_tiles(128)
    assert 262_144 / 128 <= tiles <= 262_144 / 128 + experts
    if spread == 0:
        assert tiles == pytest.approx(experts * ceil(mean / 128))
    elif experts == 387:  # an expert's last tile is half empty on average
        assert tiles == pytest.approx(262_144 / 128 + experts / 2, rel=0.01)


@pytest.mark.parametrize(
    ("device", "name"),
    [
        ("NVIDIA H200", "h200"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("NVIDIA GB200", "gb200_nvl72"),
        ("NVIDIA B200", "b200"),
    ],
)
def test_gpus_are_found_by_what_drivers_call_them(device: str, name: str) -> None:
    assert hardware_of_gpu(device) is HARDWARE[name]
    assert hardware_of_gpu("NVIDIA T4") is None
