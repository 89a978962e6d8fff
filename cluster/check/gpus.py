"""What `moebius doctor --gpu` finds of this machine's GPUs: their kernels
(train/gpu_check.py), and an all-to-all over NCCL.
"""

import torch

from ...train.gpu_check import TOLERANCE, check_kernels
from .doctor import run_exchange
from .findings import Finding
from .probe import NodeFault, Probe


def look_at_gpus() -> list[Finding]:
    """Returns what is found of the GPUs that this process sees.

    Raises:
        ValueError: it sees none.
    """
    if not torch.cuda.is_available():
        raise ValueError(
            "--gpu: torch sees no GPU here (torch "
            f"{torch.__version__}, built for CUDA {torch.version.cuda}): install a torch that is "
            "built for it, or look at nvidia-smi; `moebius doctor` checks the rest"
        )
    device = torch.device("cuda", torch.cuda.current_device())
    checks = [check_kernels(device, dtype) for dtype in TOLERANCE]
    findings = [
        Finding(check.name, "ok" if check.is_ok else "fail", check.found, check.advice)
        for check in checks
    ]
    return [*findings, _look_at_nccl()]


def _look_at_nccl() -> Finding:
    """Sends numbers between all GPUs of this machine over NCCL."""
    world, here = torch.cuda.device_count(), "127.0.0.1"
    try:
        measured = run_exchange({here: Probe(here)}, world, backend="nccl")
    except NodeFault as error:
        return Finding("NCCL", "fail", str(error), "set NCCL_DEBUG=INFO and see what it says")
    if not measured["sound"]:
        found = f"{world} GPUs got wrong numbers"
        return Finding("NCCL", "fail", found, "see `nvidia-smi topo -m`")
    if not measured["rows"]:
        return Finding("NCCL", "ok", "one GPU: there is no other to send to")
    largest = measured["rows"][-1]
    microseconds = f"{largest['seconds'] * 1e6:,.0f} µs"
    found = f"all-to-all of {world} GPUs: {largest['bytes'] >> 20} MiB in {microseconds}"
    return Finding("NCCL", "ok", f"{found}, every number right")
