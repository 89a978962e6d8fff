"""What was freed is kept: a buffer of every step costs its page faults once."""

import platform
import resource
import subprocess
import sys

import pytest

PROGRAM = """
import resource, sys, torch
from moebius.distributed.host_memory import keep_freed_memory

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


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="mallopt is glibc's")
def test_freed_memory_is_not_asked_for_again() -> None:
    faults = {
        way: int(
            subprocess.run([sys.executable, "-c", PROGRAM, way], capture_output=True, text=True, check=True).stdout
        )
        for way in ("keep", "leave")
    }
    pages = 2**26 // resource.getpagesize()
    assert faults["leave"] >= 10 * pages / 512  # at least one per huge page and step
    assert faults["keep"] < faults["leave"] / 20
