"""How many programs of a kernel a multiprocessor runs at once, by what each of them needs of it.

Limits of a multiprocessor are NVIDIA's (CUDA C++ Programming Guide, "Technical specifications per
compute capability") and AMD's (CDNA 3 and 4 instruction set: 512 vector registers of a lane, four
SIMDs of eight waves). Registers are dealt out to whole warps in units of 256; of shared memory the
driver keeps 1 KiB of every block. A Blackwell program's accumulators lie in tensor memory, whose 512
columns are shared as well.

What the kernels need is compiled_kernels.json, which `python -m benchmarks.gpu.compile_table` writes:
nothing is compiled here.
"""

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path

_COMPILED = Path(__file__).with_name("compiled_kernels.json")


@dataclass(frozen=True)
class Multiprocessor:
    """What the programs share that run on one multiprocessor at once."""

    shared_bytes: int
    warps: int
    programs: int = 32
    registers: int = 64 * 1024
    kept_bytes: int = 1024  # of every block's shared memory, by the driver
    tensor_columns: int = 0  # of tensor memory; 0: there is none
    simds: int = 0  # of AMD's, each with its own registers; 0: one of NVIDIA's


MULTIPROCESSORS = {
    "sm_80": Multiprocessor(164 * 1024, 64),
    "sm_89": Multiprocessor(100 * 1024, 48, programs=24),
    "sm_90": Multiprocessor(228 * 1024, 64),
    "sm_100": Multiprocessor(228 * 1024, 64, tensor_columns=512),
    "sm_120": Multiprocessor(100 * 1024, 48, programs=24),
    "gfx942": Multiprocessor(64 * 1024, 32, registers=512, kept_bytes=0, simds=4),
    "gfx950": Multiprocessor(160 * 1024, 32, registers=512, kept_bytes=0, simds=4),
}


@dataclass(frozen=True)
class Needs:
    """What one program of a compiled kernel needs."""

    registers: int  # of a thread
    shared_bytes: int
    warps: int
    tensor_columns: int = 0


def programs_at_once(needs: Needs, target: str) -> int:
    """Returns how many programs run on one multiprocessor of that target; 0: not even one fits."""
    has = MULTIPROCESSORS[target]
    limits = [has.programs, has.warps // needs.warps, _by_registers(needs, has)]
    if needs.shared_bytes:
        limits.append(has.shared_bytes // (needs.shared_bytes + has.kept_bytes))
    if needs.tensor_columns:
        limits.append(has.tensor_columns // needs.tensor_columns)
    return min(limits)


def _by_registers(needs: Needs, has: Multiprocessor) -> int:
    if has.simds:  # every lane of a wave has its own; waves are dealt to the SIMDs one by one
        waves = min(8, has.registers // _up(max(needs.registers, 8), 8))
        return has.simds * waves // needs.warps
    of_warp = _up(32 * needs.registers, 256)
    return has.registers // max(of_warp, 256) // needs.warps


def _up(number: int, unit: int) -> int:
    return -(-number // unit) * unit


@cache
def compiled_programs(target: str) -> dict[str, int]:
    """Returns how many programs of every compiled kernel run at once, by `kernel_key`."""
    return json.loads(_COMPILED.read_text(encoding="utf-8"))["programs"].get(target, {})


def kernel_key(kernel: str, variant: str, entry: tuple[str, str, str], *, odd: bool = False) -> str:
    """Returns a compiled kernel's name.

    Args:
        kernel: the function.
        variant: its activation; "deep" (K2 whose inner width takes several steps), "added" (by
            atomics), "tf32"; several, or nothing.
        entry: its tile's, of the table in kernels/triton/tiles.py: kernel, precision, load.
        odd: some width is no multiple of 16 bytes, so that rows are copied in narrower pieces.
    """
    return " ".join((kernel, *variant.split(), *entry, *(["odd"] if odd else [])))


def block_key(kernel: str, rows: int, columns: int) -> str:
    """Returns the name of a compiled kernel whose tile is no entry of the table."""
    return f"{kernel} {rows}x{columns}"
