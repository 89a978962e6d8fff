"""Measures a GPU's limits in the four motions of expert kernels. benchmarks/gpu runs it; alone:

    python -m benchmarks.gpu.ceilings [--out FOLDER]

  copy      from memory to memory, 2 GiB each way
  product   8192³ in bfloat16, on random data (zeros need less power and run faster)
  gather    rows of 2 KiB by a random index out of 33 MB, which fits into the second-level cache;
            summed, so that nothing is written
  add       atomic additions of bfloat16 and float32 into random rows of 33 MB or 67 MB, 16
            to every row

The third bounds kernels that gather as they multiply. The fourth decides whether outputs are added
directly into the tokens' rows, or stored and summed by another kernel. Takes half a minute, mostly
compiling. Every figure is written as it comes; one that fails is the reason instead.
"""

import argparse
import itertools
import json
import statistics
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from benchmarks.gpu.attempt import UNFINISHED, is_broken, reason_of, require_gpu, restart
from benchmarks.report import RESULTS, save

TOKENS, WIDTH, PER_TOKEN = 16384, 1024, 16
ROWS = 64  # of a program
ADDED = (torch.bfloat16, torch.float32)
NAME = "gpu_ceilings"  # of the file


@triton.jit
def gather_kernel(x, index, out, width: tl.constexpr, rows: tl.constexpr, columns: tl.constexpr):
    program = tl.program_id(0)
    row = tl.load(index + program * rows + tl.arange(0, rows))
    total = tl.zeros((rows, columns), tl.float32)
    for start in range(0, width, columns):
        total += tl.load(x + row[:, None] * width + start + tl.arange(0, columns)[None, :]).to(
            tl.float32
        )
    tl.store(out + program * columns + tl.arange(0, columns), tl.sum(total, 0))


@triton.jit
def add_kernel(out, index, width: tl.constexpr, rows: tl.constexpr, columns: tl.constexpr):
    program = tl.program_id(0)
    row = tl.load(index + program * rows + tl.arange(0, rows))
    ones = tl.full((rows, columns), 1, out.dtype.element_ty)
    for start in range(0, width, columns):
        tl.atomic_add(
            out + row[:, None] * width + start + tl.arange(0, columns)[None, :], ones, sem="relaxed"
        )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--go-on", action="store_true", help=argparse.SUPPRESS)  # after a restart
    options = parser.parse_args()
    require_gpu()
    found: dict[str, float | str] = {}
    if options.go_on:
        found |= json.loads((options.out / f"{NAME}.json").read_text(encoding="utf-8"))["ceilings"]
    keep = partial(save, NAME, {"ceilings": found}, folder=options.out)
    for name, rate in motions():
        if name not in found:
            found[name] = UNFINISHED
            keep()
            found[name] = attempt(rate)
            print(line_of(name, found[name]), flush=True)
            keep()
            if is_broken():
                restart("benchmarks.gpu.ceilings", "--go-on")
    for name, best in fastest(found).items():
        found[name] = best
        print(line_of(name, best), flush=True)
    print(keep())


def motions() -> Iterator[tuple[str, Callable[[], float]]]:
    """Yields what is measured: its name, and the function that returns the rate."""
    yield "copy_tb_per_s", copy_rate
    yield "product_tflop_per_s", product_rate
    for warps, columns in itertools.product((4, 8), (128, 256)):
        with_tile = f"tb_per_s_{columns}_columns_{warps}_warps"
        for dtype in ADDED:
            yield f"add_{name_of(dtype)}_{with_tile}", partial(add_rate, dtype, columns, warps)
        yield f"gather_{with_tile}", partial(gather_rate, columns, warps)


def attempt(rate: Callable[[], float]) -> float | str:
    """Returns the rate, or why there is none."""
    try:
        return rate()
    except Exception as error:  # noqa: BLE001 (compilers and drivers have no common base)
        return reason_of(error)


def fastest(found: Mapping[str, float | str]) -> dict[str, float]:
    """Returns the best rate of each motion that was measured with several tiles."""
    best: dict[str, float] = {}
    for name, rate in found.items():
        start, tile, _ = name.partition("_tb_per_s_")
        if tile and isinstance(rate, float):
            best[f"{start}_tb_per_s"] = max(rate, best.get(f"{start}_tb_per_s", 0.0))
    return best


def line_of(name: str, rate: float | str) -> str:
    return f"{name}: {rate}" if isinstance(rate, str) else f"{name}: {rate:,.4g}"


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def copy_rate() -> float:
    source = torch.randn(2**30, device="cuda").to(torch.bfloat16)
    target = torch.empty_like(source)
    return 2 * source.nbytes / seconds(lambda: target.copy_(source)) / 1e12


def product_rate(size: int = 8192) -> float:
    a, b = (torch.randn(size, size, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    out = torch.empty_like(a)
    return 2 * size**3 / seconds(lambda: torch.mm(a, b, out=out)) / 1e12


def gather_rate(columns: int, warps: int) -> float:
    x, index = torch.randn(TOKENS, WIDTH, device="cuda").to(torch.bfloat16), routes()
    programs = index.numel() // ROWS
    out = torch.empty(programs, columns, device="cuda")

    kernel: Any = gather_kernel

    def run() -> Any:
        return kernel[(programs,)](x, index, out, WIDTH, ROWS, columns, num_warps=warps)

    return index.numel() * WIDTH * 2 / seconds(run) / 1e12


def add_rate(dtype: torch.dtype, columns: int, warps: int) -> float:
    out, index = torch.zeros(TOKENS, WIDTH, device="cuda", dtype=dtype), routes()
    programs = index.numel() // ROWS

    kernel: Any = add_kernel

    def run() -> Any:
        return kernel[(programs,)](out, index, WIDTH, ROWS, columns, num_warps=warps)

    return index.numel() * WIDTH * out.element_size() / seconds(run) / 1e12


def routes() -> Tensor:
    """Returns every token as often as it has experts, in random order."""
    return (torch.randperm(TOKENS * PER_TOKEN, device="cuda") // PER_TOKEN).to(torch.int32)


def seconds(run: Callable[[], Any], times: int = 20) -> float:
    """Returns the median seconds of one call."""
    run()
    torch.cuda._sleep(20_000_000)  # some 10 ms, in which the host gets ahead
    spans = []
    for _ in range(times):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        end.record()
        spans.append((start, end))
    torch.cuda.synchronize()
    return statistics.median(start.elapsed_time(end) for start, end in spans) / 1e3


if __name__ == "__main__":
    main()
