"""Describes the machine and the code behind figures; it accompanies every table."""

import os
import platform
import subprocess
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any

import moebius

_ROOT = Path(__file__).resolve().parents[3]
_GIT_TIMEOUT_S = 10.0


def environment() -> dict[str, Any]:
    """Returns processor, cores, memory, GPU, versions and the commit."""
    import psutil
    import torch

    facts: dict[str, Any] = {
        "cpu": cpu_name(),
        "cores": os.cpu_count(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "moebius": moebius.__version__,
        "versions": {name: version(name) for name in ("torch", "numpy")},
        "commit": commit(),
    }
    if torch.cuda.is_available():
        facts["gpu"] = torch.cuda.get_device_name(0)
    return facts


def in_words(facts: dict[str, Any]) -> str:
    """Returns the same on one line."""
    versions = ", ".join(f"{name} {number}" for name, number in facts["versions"].items())
    place = facts.get("gpu") or f"{facts['cpu']}, {facts['cores']} cores"
    return (
        f"{place}, {facts['memory_gib']} GiB; Python {facts['python']}, {versions}; "
        f"moebius {facts['moebius']}, commit {facts['commit']}"
    )


def cpu_name() -> str:
    """Returns the processor's name."""
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def commit() -> str:
    """Returns the commit of a checkout; "unknown" for an installation without history."""
    if not (_ROOT / ".git").exists():
        return "unknown"
    try:
        head = _git("rev-parse", "--short", "HEAD").strip()
        changes = _git("status", "--porcelain", "--", "*.py", "*.cpp", "*.toml")
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return head + (" with local changes" if changes else "")


def _git(*words: str) -> str:
    done = subprocess.run(
        ["git", *words],
        cwd=_ROOT,
        capture_output=True,
        text=True,
        check=True,
        timeout=_GIT_TIMEOUT_S,
    )
    return done.stdout
