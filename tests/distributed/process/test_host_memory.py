"""Freed memory is kept: the buffer of every step costs its page faults once."""

import platform
import resource
import subprocess
import sys

import pytest

PROGRAM = """
import resource, sys, torch
from moebius.distributed.process.process import keep_freed_memory

torch.set_num_threads(1)
if sys.argv[1] == "keep":
    assert keep_freed_memory()
for step in range(20):
    if step == 10:  # the first times the heap still grows, for aligned blocks leave small pieces between them
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    buffer = torch.ones(16, 2**20)  # 64 MiB
    del buffer
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""

RANDOM_SIZES = """
import random, torch
from moebius.distributed.process.process import keep_freed_memory

def resident(what):
    return next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith(what))

assert keep_freed_memory()
draw, live, most, before = random.Random(3), [], 0, resident("VmRSS")
for _ in range(600):
    while sum(map(len, live)) > 2**28 or (live and draw.random() < 0.45):
        live.pop(draw.randrange(len(live)))
    live.append(torch.ones(int(2 ** draw.uniform(10, 26)), dtype=torch.uint8))
    most = max(most, sum(map(len, live)))
print((resident("VmHWM") - before) / most)
"""


needs_glibc = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="mallopt is glibc's")


def output_of(program: str, *arguments: str) -> str:
    return subprocess.run(
        [sys.executable, "-c", program, *arguments], capture_output=True, text=True, check=True
    ).stdout


@pytest.mark.slow
@needs_glibc
def test_freed_memory_is_not_asked_for_again() -> None:
    faults = {way: int(output_of(PROGRAM, way)) for way in ("keep", "leave")}
    pages = 2**26 // resource.getpagesize()
    assert faults["leave"] >= 10 * pages / 512  # at least one per huge page and step
    assert faults["keep"] < faults["leave"] / 20


@pytest.mark.slow
@needs_glibc
def test_blocks_of_random_sizes_leave_no_more_than_half_between_them() -> None:
    assert 0.9 < float(output_of(RANDOM_SIZES)) < 2
