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
compiling.
"""

import argparse
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from benchmarks.report import RESULTS, save

TOKENS, WIDTH, PER_TOKEN = 16384, 1024, 16
ROWS = 64  # of a program


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
    options = parser.parse_args()
    figures = measure()
    for name, value in figures.items():
        print(f"{name}: {value:,.4g}")
    print(save("gpu_ceilings", {"ceilings": figures}, folder=options.out))


def measure() -> dict[str, float]:
    found = {"copy_tb_per_s": copy_rate(), "product_tflop_per_s": product_rate()}
    for warps in (4, 8):
        for columns in (128, 256):
            gather, adds = (
                gather_rate(columns, warps),
                {t: add_rate(t, columns, warps) for t in ADDED},
            )
            found[f"gather_tb_per_s_{columns}_columns_{warps}_warps"] = gather
            found |= {
                f"add_{name_of(t)}_tb_per_s_{columns}_columns_{warps}_warps": rate
                for t, rate in adds.items()
            }
    for start in ("gather", *(f"add_{name_of(dtype)}" for dtype in ADDED)):
        found[f"{start}_tb_per_s"] = max(
            rate for name, rate in found.items() if name.startswith(f"{start}_tb_per_s_")
        )
    return found


ADDED = (torch.bfloat16, torch.float32)


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
