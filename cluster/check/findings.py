"""What is found out about a machine, and whether that is good enough: pure judgements."""

from dataclasses import asdict, dataclass
from typing import Any, Literal

Verdict = Literal["ok", "warn", "fail"]

LEAST_FREE_BYTES = 1 << 30  # of the run folder's disk: less will not hold a checkpoint of much
GOOD_FREE_BYTES = 20 << 30
SLOW_FSYNC_S = 0.05  # the journal waits for one at every state, a checkpoint for some per file
BAD_FSYNC_S = 1.0
GOOD_SHARED_MEMORY_BYTES = 1 << 30


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at."""

    check: str
    verdict: Verdict
    found: str  # with the figures
    advice: str = ""  # where it is not ok

    def record(self) -> dict[str, Any]:
        """Returns the finding as plain values of JSON."""
        return asdict(self)


def exit_code(findings: list[Finding]) -> int:
    """Returns 1 if anything fails, else 0."""
    return int(any(each.verdict == "fail" for each in findings))


def judge_disk(free_bytes: int, folder: str) -> Finding:
    """Judges the space that is left on the disk of the run folder."""
    found = f"{free_bytes / 2**30:,.1f} GiB free at {folder}"
    if free_bytes < LEAST_FREE_BYTES:
        return Finding("disk space", "fail", found, "free some, or choose another run folder")
    if free_bytes < GOOD_FREE_BYTES:
        return Finding(
            "disk space", "warn", found, "compare it with checkpoint.keep_last + 1 checkpoints"
        )
    return Finding("disk space", "ok", found)


def judge_fsync(seconds: float, folder: str) -> Finding:
    """Judges how long the disk takes to keep 4 KiB (the median of some tries)."""
    found = f"{seconds * 1000:.1f} ms at {folder}"
    advice = "the journal and checkpoints wait for it: choose a faster disk for the run folder"
    if seconds > BAD_FSYNC_S:
        return Finding("fsync", "fail", found, advice)
    return (
        Finding("fsync", "warn", found, advice)
        if seconds > SLOW_FSYNC_S
        else Finding("fsync", "ok", found)
    )


def judge_shared_memory(free_bytes: int | None) -> Finding:
    """Judges /dev/shm; None: this system has none."""
    if free_bytes is None:
        return Finding("shared memory", "ok", "no /dev/shm here; nothing of ours needs it")
    found = f"{free_bytes / 2**30:,.1f} GiB free in /dev/shm"
    if free_bytes < GOOD_SHARED_MEMORY_BYTES:
        return Finding(
            "shared memory", "warn", found, "NCCL and Ray want more: docker run --shm-size=8g"
        )
    return Finding("shared memory", "ok", found)


def judge_gpus(devices: list[dict[str, Any]], problem: str) -> Finding:
    """Judges the GPUs that torch sees.

    Args:
        devices: name, free and total bytes of each.
        problem: what an arithmetic test on one said; empty: all gave the right number.
    """
    if problem:
        return Finding(
            "GPUs", "fail", problem, "see nvidia-smi, and the kernel's log for Xid errors"
        )
    if not devices:
        return Finding("GPUs", "warn", "torch sees none: ranks will compute on the CPU")
    names = ", ".join(sorted({str(each["name"]) for each in devices}))
    free = min(each["free_bytes"] / each["total_bytes"] for each in devices)
    found = f"{len(devices)} × {names}; at least {free:.0%} of the memory free"
    if free < 0.9:
        return Finding("GPUs", "warn", found, "another process uses one: see nvidia-smi")
    if len({each["total_bytes"] for each in devices}) > 1:
        return Finding("GPUs", "warn", found, "they are unlike; the slowest sets the pace")
    return Finding("GPUs", "ok", found)


def judge_versions(missing: list[str], versions: dict[str, str]) -> Finding:
    """Judges what is installed; `missing`: what some command needs and cannot be imported."""
    found = ", ".join(f"{name} {version}" for name, version in versions.items())
    if missing:
        advice = f"`moebius submit` and `cluster` need {', '.join(missing)}"
        return Finding("versions", "warn", found, advice)
    return Finding("versions", "ok", found)


def judge_links(alpha_s: float, beta_s_per_byte: float, *, world: int, sound: bool) -> Finding:
    """Judges an all-to-all among processes of this machine."""
    if not sound:
        return Finding(
            "all-to-all", "fail", f"{world} processes got wrong numbers", "memory or CPU is faulty"
        )
    rate = 1 / beta_s_per_byte / 1e9 if beta_s_per_byte else float("inf")
    found = f"{world} processes: α {alpha_s * 1e6:,.0f} µs, 1/β {rate:,.2f} GB/s"
    slow = alpha_s > 5e-3 or rate < 0.1
    advice = "slower than a loopback should be: is the machine busy?"
    return (
        Finding("all-to-all", "warn", found, advice) if slow else Finding("all-to-all", "ok", found)
    )
