"""Compiles every Triton kernel for seven kinds of GPUs and writes what each program needs:

    nice python -m benchmarks.gpu.compile_table [--processes 2] [--targets sm_89 …] [--render]

Registers, shared memory, what is spilled and how many programs run on a multiprocessor at once, by
kernel and tile: into results/compile_table.json; from it docs/compiled_kernels.md, and
planning/compiled_kernels.json, by which the roofline model counts waves. No GPU is needed; some
six minutes of two cores. `--targets` compiles for these alone and keeps what was written of the
others; `--render` writes the two from the results that are there.

Launches are those that the calls of compiling.py make; a line says the most that any launch of one
kernel, variant and tile needs.
"""

import argparse
import json
import multiprocessing
from collections.abc import Iterator
from typing import Any

import triton.language as tl
from torch import Tensor

from benchmarks.gpu.compiling import (
    CHIPS,
    PRODUCTS,
    Launch,
    calls,
    compiled,
    kind_of,
    recorded,
    resources,
    row_calls,
    tensorfloat_calls,
)
from benchmarks.report import RESULTS, ROOT, save
from moebius.kernels.triton import tiles as triton_tiles
from moebius.planning.occupancy import Needs, block_key, kernel_key, programs_at_once

PAGE = ROOT / "docs" / "compiled_kernels.md"
PLANNED = ROOT / "planning" / "compiled_kernels.json"
OWN_TILES = (  # by their modules, not by the table
    "route",
    "row_gradient",
    "weight_gradient",
    "_add_norm",
    "_add_norm_backward",
)
GPUS = {
    "sm_80": "A100, A30",
    "sm_89": "L4, L40, RTX 4000; A10, A40, RTX 3000 (8.6)",
    "sm_90": "H100, H200, GH200",
    "sm_100": "B200, GB200; B300 (10.3)",
    "sm_120": "RTX 5000, RTX PRO 6000",
    "gfx942": "MI300X, MI325X",
    "gfx950": "MI350X, MI355X",
}
HEAD = """# What the kernels need: registers, shared memory, programs

Written by `python -m benchmarks.gpu.compile_table` from
[its results](../benchmarks/results/compile_table.json): every Triton kernel of the expert layers,
the routers and the norms ([kernels.md](kernels.md)), compiled ahead of time{origin}. **Nothing here was run**: the compiler says
it all.

A line stands for every launch of a kernel with one tile and variant, with and without biases and
gates, and says the most that any of them needs. Variants: the activation; deep, K2 whose
inner width takes several steps; added, by atomics; tf32, else products in float32 are exact; odd, where
some width is no multiple of 16 bytes. The tile is rows × columns ×
depth, before it is shrunk to what there is, and its entry that of the table of tiles: kernel,
precision, load. Registers are those of a thread; spilled, bytes of a thread. Programs: how many run on
a multiprocessor at once, by registers, warps and shared memory
([`planning/occupancy.py`](../planning/occupancy.py)); `moebius plan` counts waves by them.
"""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument(
        "--targets", nargs="+", choices=triton_tiles.TARGETS, default=triton_tiles.TARGETS
    )
    parser.add_argument("--render", action="store_true", help="from the results that are there")
    options = parser.parse_args()
    if not options.render:
        with multiprocessing.Pool(options.processes) as pool:
            found = pool.map(lines_of, options.targets, chunksize=1)
        lines = dict(zip(options.targets, found, strict=True))
        if len(lines) < len(triton_tiles.TARGETS):
            lines = read_results()["targets"] | lines
        print(save("compile_table", {"targets": lines}))
    results = read_results()
    PAGE.write_text(page(results), encoding="utf-8")
    PLANNED.write_text(planned(results), encoding="utf-8")


def read_results() -> dict[str, Any]:
    return json.loads((RESULTS / "compile_table.json").read_text(encoding="utf-8"))


# Compiling ----------------------------------------------------------------------------------------


def lines_of(target: str) -> list[dict[str, Any]]:
    """Compiles all launches for one target; a line for every kernel, variant, tile, kind of widths."""
    lines: dict[str, dict[str, Any]] = {}
    for entry, launch in launches(target):
        needs = needs_of(launch, target)
        line: dict[str, Any] = {"kernel": launch[0].fn.__name__}
        if entry:
            line |= {"variant": variant_of(launch), "odd": is_odd(launch), "entry": list(entry)}
            line["tile"] = tile_of(target, entry)
        elif line["kernel"] in OWN_TILES:
            line["block"] = [launch[2][name] for name in ("ROWS", "COLUMNS", "num_warps")]
        line = lines.setdefault(key_of(line), line)
        for what, value in needs.items():
            line[what] = (min if what == "programs" else max)(line.get(what, value), value)
    return [lines[key] for key in sorted(lines)]


def key_of(line: dict[str, Any]) -> str:
    if "block" in line:
        return block_key(line["kernel"], *line["block"][:2])
    if "entry" not in line:
        return line["kernel"]
    return kernel_key(line["kernel"], line["variant"], tuple(line["entry"]), odd=line["odd"])


def variant_of(launch: Launch) -> str:
    kernel, _, constants = launch
    is_deep = kernel.fn.__name__ == "rows_product" and constants["K"] > constants["DEPTH"]
    words = {
        constants.get("ACT") or "": True,
        "deep": is_deep,
        "added": constants.get("ADD"),
        "tf32": constants["PRECISION"] == "tf32",
    }
    return " ".join(word for word, applies in words.items() if word and applies)


def is_odd(launch: Launch) -> bool:
    """Whether some width is no multiple of 16 bytes."""
    _, args, constants = launch
    elements = [arg.element_size() for arg in args if isinstance(arg, Tensor) and arg.dim() > 1]
    size = 2 if constants.get("DTYPE") is tl.bfloat16 else min(elements, default=4)
    widths = (constants[name] for name in ("D", "F", "K", "OUT", "M") if name in constants)
    return any(width * size % 16 for width in widths)


def launches(target: str) -> Iterator[tuple[tuple[str, str, str] | None, Launch]]:
    """Every launch once, with the entry of the tiles' table that it takes."""
    seen: set[tuple] = set()
    with_tf32 = () if target in triton_tiles.WITHOUT_TF32 else tensorfloat_calls()
    for call in (*(call for call, _ in calls()), *with_tf32, *row_calls()):
        with recorded(target) as noted:
            call()
        for last, launch in zip(noted.entries, noted.launches, strict=True):
            entry = last if launch[0].fn.__name__ in PRODUCTS else None
            if (kind := (entry, *kind_of(launch))) not in seen:
                seen.add(kind)
                yield entry, launch


def needs_of(launch: Launch, target: str) -> dict[str, int]:
    result = compiled((*launch[:2], dict(launch[2])), target)
    registers, stack = resources(result.asm, CHIPS[target])
    made = result.metadata
    columns = getattr(made, "tmem_size", None) or 0
    needs = Needs(registers, made.shared, made.num_warps, columns)
    return {
        "registers": registers,
        "shared_bytes": made.shared,
        "spilled_bytes": stack,
        "programs": programs_at_once(needs, target),
    }


def tile_of(target: str, entry: tuple[str, str, str]) -> list[int]:
    tile = triton_tiles.tile_of(target, entry)
    return [tile.rows, tile.columns, tile.depth, tile.warps, tile.stages]


# Writing ------------------------------------------------------------------------------------------


def planned(results: dict[str, Any]) -> str:
    """What the planner reads: the programs of NVIDIA's products."""
    programs = {
        target: {key_of(line): line["programs"] for line in lines if line["kernel"] in PRODUCTS}
        for target, lines in results["targets"].items()
        if target.startswith("sm_")
    }
    about = "written by python -m benchmarks.gpu.compile_table"
    return json.dumps({"about": about, "programs": programs}, indent=1) + "\n"


def page(results: dict[str, Any]) -> str:
    made = results["environment"]
    lines = [HEAD.format(origin=f" by triton {made['versions']['triton']}")]
    for target, found in results["targets"].items():
        lines += [f"## {target}: {GPUS[target]}", ""]
        lines += ["| kernel | entry | tile | registers | shared KiB | spilled | programs |"]
        lines += ["|---|---|---|---|---|---|---|"]
        lines += [_row(line) for line in found]
        lines.append("")
    return "\n".join(lines)


def _row(line: dict[str, Any]) -> str:
    name, entry, tile = f"`{line['kernel']}`", "", ""
    if "entry" in line:
        rows, columns, depth, warps, stages = line["tile"]
        name = " ".join(filter(None, (name, line["variant"], "odd" if line["odd"] else "")))
        entry = " ".join(line["entry"])
        tile = f"{rows} × {columns} × {depth}, {warps} warps, {stages} stages"
    elif "block" in line:
        rows, columns, warps = line["block"]
        tile = f"{rows} × {columns}, {warps} warps"
    cells = [name, entry, tile, line["registers"]]
    cells += [f"{line['shared_bytes'] / 1024:g}", line["spilled_bytes"], line["programs"]]
    return "| " + " | ".join(map(str, cells)) + " |"


if __name__ == "__main__":
    main()
