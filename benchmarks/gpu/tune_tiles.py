"""Measures tiles of the Triton kernels on this GPU, and rewrites the table in
kernels/triton/tiles.py.

    python -m benchmarks.gpu.tune_tiles [--seconds 90] [--kernels gather rows …]
                                       [--precision bf16] [--out FOLDER]

Entries are measured in the order of their cost in an expert layer. The backend's call that uses an
entry is captured in a CUDA graph with each candidate, so that only GPU time counts, and replayed.
The calls are forward, backward of the rows, or weight gradients of a layer of the 244M model: D
1024, F 128, E 387, K 16, at 16,384 tokens for "many" rows per expert and 4,096 for "few".
Everything else stays the same, so the fastest call has the fastest tile. Other launches use an
entry too: K1 forward's is used by GELU and by V's gate, whose 256 rows of odd widths spill on
sm_90. Run `make kernels` before keeping a tile. All candidates of an entry are compiled at the same
time before the first is timed. One that does not compile or fit the chip, or changes the output, is
rejected. When the time is over, unmeasured candidates stay out.

Writes kernels/triton/tiles.py, every time or reason to tune_tiles.json in FOLDER (default results/),
and with --out also a copy of that module, all of it after every candidate.
"""

import argparse
import itertools
import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import astuple, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from triton import AsyncCompileMode
from triton.runtime.jit import JITFunction

from benchmarks.gpu.attempt import UNFINISHED, Broken, is_broken, reason_of, require_gpu, restart
from benchmarks.report import RESULTS, environment, replace_text, save
from moebius.kernels.calls import (
    Deferred,
    LinearCall,
    MLPCall,
    SortedRoutes,
)
from moebius.kernels.permute import sort_routes
from moebius.kernels.reference import columns_of
from moebius.kernels.triton import tiles as triton_tiles
from moebius.kernels.triton.backend import TritonKernels
from moebius.kernels.triton.tiles import TILES, Tile

Key = tuple[str, str, str]
Measured = dict[Key, dict[Tile, float | str]]  # milliseconds, or why there are none
TOKENS = {"many": 16384, "few": 4096}
WIDTH, HIDDEN, EXPERTS, TOP_K, ODD_WIDTH, ODD_HEAD = 1024, 128, 387, 16, 412, 82
ORDER = (
    "ragged",
    "gather",
    "rows",
    "gather_back",
    "gather_two",
    "gather_back_smooth",
    "ragged_small",
)
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
REPLAYS = 10
KERNELS = TritonKernels()
DEVICE = "cuda"
TOLERANCE = 2e-2  # of the norm: another tile adds in another order, no more


NAME = "tune_tiles"  # of the file


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=90.0)
    parser.add_argument("--kernels", nargs="+", choices=ORDER, default=ORDER)
    parser.add_argument("--precision", choices=DTYPES, default="bf16")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--go-on", action="store_true", help=argparse.SUPPRESS)  # after a restart
    options = parser.parse_args()
    require_gpu()
    deadline = time.monotonic() + options.seconds
    measured = known(options.out or RESULTS) if options.go_on else {}
    keep = partial(write_down, measured, dict(TILES), options.out)
    keys = [(kernel, options.precision, load) for kernel in options.kernels for load in TOKENS]
    try:
        measure_all(keys, measured, deadline, keep)
    except Broken:
        left_s = max(1.0, deadline - time.monotonic())
        restart("benchmarks.gpu.tune_tiles", "--go-on", "--seconds", f"{left_s:.0f}")


def known(folder: Path) -> Measured:
    """Reads what was measured before a restart."""
    found = json.loads((folder / f"{NAME}.json").read_text(encoding="utf-8"))["measured"]
    measured: Measured = {}
    for name, rows in found.items():
        kernel, precision, load = name.split("/")
        measured[kernel, precision, load] = {Tile(*sides): ms for *sides, ms in rows}
    return measured


def write_down(measured: Measured, before: dict[Key, Tile], out: Path | None) -> None:
    """Writes all times, and the table with the fastest tiles."""
    figures = {
        "/".join(key): [[*astuple(tile), ms] for tile, ms in times.items()]
        for key, times in measured.items()
    }
    columns = ["rows", "columns", "depth", "warps", "stages", "ms"]
    save(NAME, {"columns": columns, "measured": figures}, folder=out or RESULTS)
    facts, path = environment(), Path(triton_tiles.__file__)
    origin = (
        f"{len(measured)} entries measured on {facts['gpu']}, commit {facts['commit']}; "
        "the others chosen by hand"
    )
    best = {key: best for key, times in measured.items() if (best := fastest(times)) is not None}
    written = rewritten(path.read_text(encoding="utf-8"), before | best, origin)
    for place in (path, *([out / path.name] if out else [])):
        replace_text(place, written)


def measure_all(
    keys: Sequence[Key], measured: Measured, deadline: float, keep: Callable[[], None]
) -> None:
    """Measures the candidates of each entry that are not in `measured`; the present tile is first.

    Raises:
        Broken: a candidate broke the CUDA context; its reason is in `measured`.
    """
    for key in keys:
        present = TILES[key] = next(iter(measured.get(key, ())), TILES[key])
        tiles = list(candidates(key))
        if time.monotonic() > deadline or measured.get(key, {}).keys() >= set(tiles):
            continue
        times = measured.setdefault(key, {})
        left = [tile for tile in tiles if tile not in times]
        if isinstance(times.get(present), float):
            left.insert(0, present)  # after a restart: it says what the output is
        reasons = compile_all(key, left)
        for tile in left:
            if time.monotonic() > deadline:
                break
            times[tile] = UNFINISHED
            keep()
            TILES[key] = tile
            times[tile] = reasons.get(tile) or _timed(key)
            keep()
            if is_broken():
                raise Broken
        best = TILES[key] = fastest(times) or present
        ran = sum(isinstance(ms, float) for ms in times.values())
        print(
            f"{'/'.join(key)}: {best} {times.get(best)} ms; now {present} {times.get(present)}; "
            f"{ran} of {len(tiles)} ran",
            flush=True,
        )


_launch = JITFunction.run


def _compile_only(kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
    del warmup
    return _launch(kernel, *args, grid=grid, warmup=True, **options)


def compile_all(key: Key, tiles: Sequence[Tile]) -> dict[Tile, str]:
    """Compiles an entry's call with every tile at the same time; returns why some cannot be."""
    if triton_tiles.INTERPRETED:
        return {}
    jobs, reasons, present = {}, dict[Tile, str](), TILES[key]
    with (
        ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool,
        AsyncCompileMode(pool, ignore_errors=True) as mode,
        patch.object(JITFunction, "run", _compile_only),
    ):
        for tile in tiles:
            TILES[key], begun = tile, len(mode.raw_futures)
            try:
                _call(key)()
            except Exception as error:  # noqa: BLE001 (a compiler's have no common base)
                reasons[tile] = reason_of(error)
            jobs[tile] = mode.raw_futures[begun:]
    TILES[key] = present
    for tile, futures in jobs.items():
        for future in futures:
            if (error := future.exception()) is not None:
                reasons[tile] = reason_of(error)
    return reasons


def candidates(key: Key) -> Iterator[Tile]:
    """Returns the present tile, it with a stage fewer and more, and other sides and numbers of
    warps: about ten in all.
    """
    present = TILES[key]
    yield present
    yield from (
        replace(present, stages=stages)
        for stages in (present.stages - 1, present.stages + 1)
        if stages > 1
    )
    longest = 256 if key[0].startswith("ragged") else 128
    if key[0] == "gather":  # half of the experts' weights to read; more would not stay in registers
        yield from (replace(present, rows=256, columns=128, warps=warps) for warps in (8, 16))
    for rows, columns, warps in itertools.product((64, 128, 256), (64, 128, 256), (4, 8)):
        tile = replace(present, rows=rows, columns=columns, warps=warps)
        accumulators = rows * columns / (32 * warps)  # registers of a thread, of 255
        if tile != present and 32 <= accumulators <= 128 and max(rows, columns) <= longest:
            yield tile


def fastest(times: dict[Tile, float | str]) -> Tile | None:
    """Returns the fastest tile; None if no candidate could be timed."""
    timed = {tile: ms for tile, ms in times.items() if isinstance(ms, float)}
    return min(timed, key=timed.__getitem__, default=None)


def rewritten(source: str, table: dict[Key, Tile], origin: str) -> str:
    """Returns the module's text with another table."""
    head, rest = source.split("TILES: dict[tuple[str, str, str], Tile] = {\n")
    before, after = head.split("ORIGIN = ", 1)
    keys = [", ".join(f'"{part}"' for part in key) for key in table]
    lines = [
        f"    ({key}): Tile{astuple(tile)},\n"
        for key, tile in zip(keys, table.values(), strict=True)
    ]
    tail = rest[rest.index("}\n") :]
    head = f'{before}ORIGIN = "{origin.replace(chr(34), chr(39))}"\n{after.partition(chr(10))[2]}'
    return f"{head}TILES: dict[tuple[str, str, str], Tile] = {{\n{''.join(lines)}{tail}"


_expected: dict[Key, Tensor] = {}  # the output with the first tile


def _timed(key: Key) -> float | str:
    """Returns milliseconds of the call that uses this entry, or the reason for their absence."""
    try:
        call = _call(key)
        output = call().double()
        size = output.norm().item()  # waits for the GPU: what goes wrong there shows here
    except Exception as error:  # noqa: BLE001 (compiler's and driver's have no common base)
        return reason_of(error)
    off = ((output - _expected.setdefault(key, output)).norm() / size).item()
    if not off < TOLERANCE:
        return f"another output: off by {off:.1e} of its norm"
    return _graph_ms(call)


def _graph_ms(call: Callable[[], Tensor]) -> float:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    graph.replay()
    begin.record()
    for _ in range(REPLAYS):
        graph.replay()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / REPLAYS


def _call(key: Key) -> Callable[[], Tensor]:
    kernel, precision, load = key
    activation = {"gather_two": "swiglu", "gather_back_smooth": "gelu"}.get(kernel, "relu")
    routes, new, num_tokens = vars(_routes(load)), _drawn(DTYPES[precision]), TOKENS[load]
    if kernel == "ragged_small":
        w_EDO, x_UD = new(EXPERTS, ODD_WIDTH, ODD_HEAD), new(num_tokens, ODD_WIDTH)
        call = LinearCall(**routes, x_UD=x_UD, w_EDO=w_EDO, backend="triton", number=0)
        deferred = Deferred(call, new(num_tokens, ODD_HEAD), new(0))
        return lambda: KERNELS.linear_weight_gradients([deferred])[0]
    call = MLPCall(
        **routes,
        x_UD=new(num_tokens, WIDTH),
        w_up_EDW=new(EXPERTS, WIDTH, columns_of(HIDDEN, activation)),
        w_down_EFO=new(EXPERTS, HIDDEN, WIDTH),
        b_up_EW=None,
        b_down_EO=None,
        activation=activation,
        backend="triton",
        number=0,
    )
    if kernel in ("gather", "gather_two", "rows"):
        return lambda: KERNELS.mlp_forward(call)[0]
    grad_TO, saved = new(num_tokens, WIDTH), KERNELS.mlp_forward(call)[1]
    if kernel.startswith("gather_back"):
        return lambda: KERNELS.mlp_backward_rows(call, grad_TO, saved).x_UD
    deferred = Deferred(call, grad_TO, saved, new(*saved.shape))
    return lambda: KERNELS.mlp_weight_gradients([deferred])[0]


def _drawn(dtype: torch.dtype) -> Callable[..., Tensor]:
    generator = torch.Generator(device=DEVICE).manual_seed(0)
    return lambda *shape: torch.randn(shape, generator=generator, device=DEVICE, dtype=dtype)


def _routes(load: str) -> SortedRoutes:
    """Returns routes of a skewed router, whose fullest expert has about four times the mean."""
    generator, tokens = torch.Generator(device=DEVICE).manual_seed(1), TOKENS[load]
    skew = 0.5 * torch.randn(EXPERTS, generator=generator, device=DEVICE)
    gumbel = -torch.empty(tokens, EXPERTS, device=DEVICE).exponential_(generator=generator).log()
    experts = (skew + gumbel).topk(TOP_K).indices.flatten()
    weights = torch.rand(tokens * TOP_K, generator=generator, device=DEVICE)
    sorting = vars(sort_routes(experts, EXPERTS))
    return SortedRoutes(
        weights,
        **sorting,
        source_N=None,
        target_N=None,
        num_targets=tokens,
        per_source=TOP_K,
        per_target=TOP_K,
        per_expert=0,
    )


if __name__ == "__main__":
    main()
