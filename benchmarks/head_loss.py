"""What the read-out and its cross-entropy cost: chunk by chunk (model/head_loss.py), and on full
logits as everybody writes it.

    python -m benchmarks.head_loss [--rounds 5] [--device cpu|cuda]

Forward and backward from the last hidden rows to the gradients of rows, weight and bias, for the
shapes of MoEUT-44M and for a vocabulary of 50,257, in float32 and bfloat16, with chunks of several
lengths. In turns in one process, for the machine's speed drifts: seconds (of the process on a CPU,
one thread; of the device on a GPU), fastest and median; bytes that wait for the backward pass, and
the peak above what was there before. The peer is F.cross_entropy. Prints a table and writes
results/head_loss_DEVICE.json; two minutes.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import partial

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor

from benchmarks.memory import saved_bytes
from benchmarks.report import save
from moebius.distributed.process.host_memory import keep_freed_memory
from moebius.evaluation.compare.peak_memory import peak_bytes
from moebius.model.head_loss import head_loss, rows_of_chunk

# Tokens, width, vocabulary: a micro-batch of 8 sequences of the 44M models, and one of 16 of 1,024
# positions of the 244M ones.
SHAPES = {
    "cpu": ((2048, 412, 8000), (2048, 412, 50257)),
    "cuda": ((16384, 1024, 8000), (16384, 1024, 50257)),
}
ROWS = {"cpu": (128, 256, 512, 1024), "cuda": (512, 1024, 2048, 4096, 8192)}


@dataclass
class Way:
    """One way to compute the loss of one shape, and what was measured of it. `rows` None: full
    logits.
    """

    tokens: int
    width: int
    vocabulary: int
    dtype: str
    rows: int | None
    default: bool
    saved_bytes: int = 0
    peak_bytes: int | None = None
    fastest_s: float = 0.0
    median_s: float = 0.0
    times_s: list[float] = field(default_factory=list)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu"
    )
    options = parser.parse_args()
    torch.set_num_threads(1)
    device = torch.device(options.device)
    ways = [
        Way(*shape, dtype, rows, default=rows == default)
        for shape in SHAPES[options.device]
        for dtype in ("float32", "bfloat16")
        for default in [rows_of_chunk(shape[2], options.device)]
        for rows in (None, *sorted({*ROWS[options.device], default}))
    ]
    for way in ways:
        measure_memory(way, device)
    keep_freed_memory()  # as a training run does; and so after the peaks, which it would hide
    for _ in range(options.rounds + 1):
        for way in ways:
            way.times_s.append(timed(pass_of(way, device), device))
    for way in ways:
        way.times_s.pop(0)  # the first of a shape prepares its products
        way.fastest_s, way.median_s = min(way.times_s), statistics.median(way.times_s)
    show(ways)
    print(save(f"head_loss_{options.device}", {"ways": [asdict(way) for way in ways]}))


def operands(way: Way, device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(way.tokens, way.width, generator=generator).to(device)
    weight = torch.randn(way.vocabulary, way.width, generator=generator).mul_(0.05)
    bias = torch.zeros(way.vocabulary, device=device)
    targets = torch.randint(way.vocabulary, (way.tokens,), generator=generator).to(device)
    return (
        x.requires_grad_(),
        weight.to(device, getattr(torch, way.dtype)).requires_grad_(),
        bias.requires_grad_(),
        targets,
    )


def full_logits(x: Tensor, weight: Tensor, bias: Tensor, targets: Tensor) -> Tensor:
    logits = F.linear(x.to(weight.dtype), weight, bias.to(weight.dtype)).float()
    return F.cross_entropy(logits, targets, reduction="sum")


def loss_of(way: Way) -> Callable[..., Tensor]:
    return full_logits if way.rows is None else partial(head_loss, rows=way.rows)


def pass_of(way: Way, device: torch.device) -> Callable[[], object]:
    *inputs, targets = operands(way, device)
    return lambda: torch.autograd.grad(loss_of(way)(*inputs, targets) / way.tokens, inputs)


def measure_memory(way: Way, device: torch.device) -> None:
    run = pass_of(way, device)
    run()  # what libraries prepare once is nobody's
    way.peak_bytes = peak_bytes(run, device)
    *inputs, targets = operands(way, device)
    _, way.saved_bytes = saved_bytes(
        lambda: loss_of(way)(*inputs, targets), beside=(*inputs, targets)
    )


def timed(run: Callable[[], object], device: torch.device) -> float:
    if device.type == "cuda":
        run()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        end.record()
        torch.cuda.synchronize(device)
        return start.elapsed_time(end) / 1e3
    started = time.process_time()
    run()
    return time.process_time() - started


def show(ways: list[Way]) -> None:
    table = Table(
        "T × D × V", "dtype", "chunk", "waits MB", "peak MB", "fastest s", "median s", "÷ full"
    )
    peers = {(way.vocabulary, way.dtype): way for way in ways if way.rows is None}
    for way in ways:
        peer = peers[way.vocabulary, way.dtype]
        chunk = (
            "full logits"
            if way.rows is None
            else f"{way.rows}{' (default)' if way.default else ''}"
        )
        peak = "" if way.peak_bytes is None else f"{way.peak_bytes / 1e6:,.0f}"
        table.add_row(
            f"{way.tokens} × {way.width} × {way.vocabulary}",
            way.dtype,
            chunk,
            f"{way.saved_bytes / 1e6:,.1f}",
            peak,
            f"{way.fastest_s:.4f}",
            f"{way.median_s:.4f}",
            f"{way.fastest_s / peer.fastest_s:.2f}",
        )
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
