"""Checks that a node has what ranks need: the job's run folder and the requested devices.

The supervisor writes a file with a random name and content into the run folder, and every node reads it. This
finds missing mounts and local folders of the same name. Devices are counted through CUDA's driver in a
separate process: 0.1 s, no torch.
"""

import contextlib
import secrets
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

APPEARS_WITHIN_S = 5.0  # how long a network file system may hide a new file
_COUNT_TIMEOUT_S = 60.0  # with eight GPUs, the driver may take seconds to initialise

# Asks the driver, which obeys CUDA_VISIBLE_DEVICES like torch.
_COUNT_GPUS = """
import ctypes
try:
    cuda = ctypes.CDLL("libcuda.so.1")
except OSError:
    raise SystemExit("there is no CUDA driver (libcuda.so.1)")
count = ctypes.c_int(0)
if code := cuda.cuInit(0) or cuda.cuDeviceGetCount(ctypes.byref(count)):
    raise SystemExit(f"CUDA's driver reports error {code}")
print(count.value)
"""


@dataclass(frozen=True)
class NodeCheck:
    """Holds what a node must find."""

    token_file: str
    token: str
    gpus: int = 0  # at least

    def faults(self) -> str:
        """Returns what this machine lacks, or "" if nothing."""
        return self._folder_fault() or self._device_fault()

    def _folder_fault(self) -> str:
        """Waits briefly for the file; otherwise returns what is there instead."""
        path = Path(self.token_file)
        deadline = time.monotonic() + APPEARS_WITHIN_S
        while True:
            try:
                if path.read_text(encoding="utf-8") == self.token:
                    return ""
                why = "a file of the same name has other contents"
            except OSError as error:
                why = error.strerror or str(error)
            if time.monotonic() > deadline:
                break
            time.sleep(0.1)
        state = "is a different folder there" if path.parent.is_dir() else "does not exist there"
        return (
            f"{socket.gethostname()} does not see the run folder: {path.parent} {state} ({why}); "
            "choose a folder that every node sees under the same path"
        )

    def _device_fault(self) -> str:
        if self.gpus == 0 or Path("/dev/kfd").exists():  # AMD's driver: the rank will report it
            return ""
        count, why = count_gpus()
        if count >= self.gpus:
            return ""
        return (
            f"{socket.gethostname()} has {count} GPUs{why}, but train.device=cuda needs "
            f"{self.gpus}, one per rank: lower job.ranks_per_node, or set train.device to auto "
            "or cpu"
        )


def count_gpus() -> tuple[int, str]:
    """Returns how many GPUs CUDA's driver shows to a new process, and why if there is none."""
    try:
        done = subprocess.run(
            [sys.executable, "-c", _COUNT_GPUS],
            capture_output=True,
            text=True,
            timeout=_COUNT_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return 0, f" (CUDA's driver did not answer within {_COUNT_TIMEOUT_S:.0f} s)"
    if done.returncode:
        return 0, f" ({done.stderr.strip().splitlines()[-1]})"
    return int(done.stdout), ""


@contextlib.contextmanager
def token_in(run_dir: Path, *, gpus: int) -> Iterator[NodeCheck]:
    """Keeps a random file in the run folder; yields the check for the nodes."""
    check = NodeCheck(
        token_file=str(run_dir / f".seen-by-nodes-{secrets.token_hex(8)}"),
        token=secrets.token_hex(16),
        gpus=gpus,
    )
    path = Path(check.token_file)
    path.write_text(check.token, encoding="utf-8")
    try:
        yield check
    finally:
        path.unlink(missing_ok=True)
