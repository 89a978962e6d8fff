"""Measures an all-to-all among processes of this machine, and checks what arrives.

    python -m moebius.cluster.check.links STORE_FILE RANK WORLD BACKEND

The rows are those of benchmarks/gloo_table.py, for one operation and some sizes, so the planner
reads them (`moebius plan --measured`). Cost: some seconds, most of them imports.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

SIZES = (4 << 10, 32 << 10, 256 << 10, 2 << 20)  # bytes of the whole tensor on one rank
_CALLS = 12
_TIMEOUT_S = 120.0


def measure_links(world: int, *, backend: str = "gloo") -> tuple[list[dict[str, Any]], bool]:
    """Returns the measured rows, and whether all numbers arrived as they were sent.

    Args:
        backend: "gloo"; or "nccl", a GPU for each process.

    Raises:
        RuntimeError: a process failed; with its last words.
    """
    with tempfile.TemporaryDirectory(prefix="moebius-doctor-") as folder:
        processes = [_start(Path(folder) / "store", rank, world, backend) for rank in range(world)]
        try:
            answers = [process.communicate(timeout=_TIMEOUT_S) for process in processes]
        finally:
            for process in processes:
                process.kill()
                process.wait()
    for process, (_, said) in zip(processes, answers, strict=True):
        if process.returncode != 0:
            words = (said.strip().splitlines() or ["no word"])[-1]
            raise RuntimeError(f"the all-to-all test failed: {words}")
    found = json.loads(answers[0][0])
    return found["rows"], found["sound"]


def _start(store: Path, rank: int, world: int, backend: str) -> subprocess.Popen[str]:
    package = Path(__file__).resolve().parents[3]
    paths = [str(package), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, "-m", __name__, str(store), str(rank), str(world), backend],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    )


def main() -> None:
    """Measures as one rank; rank 0 prints the rows."""
    import torch
    import torch.distributed as dist

    from ..nodes.processes import bind_to_parent

    bind_to_parent()
    store, rank, world, backend = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
    if sys.platform == "linux":
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    device = torch.device("cuda", rank) if backend == "nccl" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=world)
    rows, sound = _measure(rank, world, device)
    if rank == 0:
        print(json.dumps({"rows": rows, "sound": sound}))
    dist.destroy_process_group()


def _measure(rank: int, world: int, device: "torch.device") -> tuple[list[dict[str, Any]], bool]:
    import torch
    import torch.distributed as dist

    rows, sound = [], torch.ones(1, device=device)
    for size in SIZES:
        share = size // 4 // world
        sent = torch.full((share * world,), float(rank), device=device)
        received = torch.empty_like(sent)
        times = []
        for _ in range(_CALLS):
            dist.barrier()
            started_s = time.perf_counter()
            dist.all_to_all_single(received, sent)
            if device.type == "cuda":
                torch.cuda.synchronize()
            times.append(time.perf_counter() - started_s)
        expected = torch.arange(world, dtype=torch.float32).repeat_interleave(share)
        sound *= float(torch.equal(received.cpu(), expected))
        slowest = torch.tensor(sorted(times[2:]), dtype=torch.float64)  # after connections are made
        slowest = slowest.to(device)
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        seconds = slowest[len(slowest) // 2].item()
        rows.append({"op": "all_to_all", "world": world, "bytes": size, "seconds": seconds})
    dist.all_reduce(sound, dist.ReduceOp.MIN)
    return rows, bool(sound.item())


if __name__ == "__main__":
    main()
