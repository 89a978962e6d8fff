"""Writes a benchmark's figures with hardware, versions, commit and command."""

import functools
import json
import os
import platform
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import psutil

from moebius import __version__

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
LIBRARIES = ("torch", "numpy", "pyarrow", "ray", "triton", "transformers")
_ABOUT = ("environment", "measured", "note")  # of a file with parts, beside these


@functools.cache
def environment() -> dict[str, Any]:
    """Returns the machine and the software of a measurement, looked up once.

    Figures are written as they come, and a GPU after a fault answers nothing.
    """
    facts: dict[str, Any] = {
        "cpu": cpu_name(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "moebius": __version__,
        "versions": {library: _version(library) for library in LIBRARIES},
        "commit": commit(),
        "command": _command(),
    }
    return facts | _gpu()


def _gpu() -> dict[str, str]:
    """Returns the GPU, its driver and CUDA; nothing where torch sees none."""
    import torch  # late: the processes of a pool import a benchmark too, and are timed

    from moebius.cluster.check.probe import gpus_here

    if not torch.cuda.is_available():
        return {}
    driver, _ = gpus_here()
    return {
        "gpu": torch.cuda.get_device_name(0),
        "driver": driver,
        "cuda": str(torch.version.cuda),
    }


def cpu_name() -> str:
    """Returns the processor's name."""
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def commit() -> str:
    """Returns the commit of the sources. For a copy without history MOEBIUS_COMMIT names it."""
    if not (ROOT / ".git").exists():
        named = os.environ.get("MOEBIUS_COMMIT", "").strip()
        return f"{named} (by MOEBIUS_COMMIT, no .git here)" if named else "unknown"
    try:
        head = _git("rev-parse", "--short", "HEAD").strip()
        changed = _git("status", "--porcelain", "--", "*.py", "*.cpp", "*.toml")
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return head + (" with local changes" if changed else "")


def _git(*words: str) -> str:
    command = ["git", *words]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=10)
    return done.stdout


def _version(library: str) -> str | None:
    """Returns the version of a library; None if it is not installed."""
    try:
        return version(library)
    except PackageNotFoundError:
        return None


def save(name: str, figures: dict[str, Any], *, folder: Path = RESULTS) -> Path:
    """Writes FOLDER/NAME.json: the environment and the figures."""
    return write_json(folder / f"{name}.json", {"environment": environment(), **figures})


def write_json(path: Path, values: Any) -> Path:
    """Writes values as a whole file."""
    return replace_text(path, json.dumps(values, indent=2) + "\n")


def replace_text(path: Path, text: str) -> Path:
    """Writes a whole file at once: a process that is killed meanwhile leaves the former one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(f"{path.name}.new")
    new.write_text(text, encoding="utf-8")
    os.replace(new, path)
    return path


def save_parts(
    name: str,
    parts: Mapping[str, Any],
    others: Mapping[str, Any],
    *,
    under: str = "",
    folder: Path = RESULTS,
) -> Path:
    """Updates parts of FOLDER/NAME.json and leaves the others.

    `measured` records machine, commit, command and time of every part. Parts older than this record
    get the whole file's.

    Args:
        name: of the file.
        parts: the measured parts by name.
        others: further entries, which replace earlier ones.
        under: the entry that holds the parts; "": the file itself.
        folder: the file's folder.
    """
    path = folder / f"{name}.json"
    before = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    now = environment() | {"date": datetime.now(UTC).strftime("%Y-%m-%d")}
    known = before.get(under, {}) if under else before
    kept = {key: value for key, value in known.items() if under or key not in (*_ABOUT, *others)}
    unsigned = dict.fromkeys(kept, before.get("environment", {}))
    measured = unsigned | before.get("measured", {}) | dict.fromkeys(parts, now)
    about = {key: before[key] for key in _ABOUT if key in before}
    merged = kept | dict(parts)
    figures = {under: merged} if under else merged
    return write_json(path, about | {"environment": now, "measured": measured, **others, **figures})


def _command() -> str:
    """Returns how this program was started, without its path: `python -m benchmarks.data --rounds
    7`.
    """
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    # of a package, `python -m PACKAGE` runs PACKAGE.__main__
    module = spec.name.removesuffix(".__main__") if spec else None
    program = ["-m", module] if module else [Path(sys.argv[0]).name]
    return " ".join(["python", *program, *sys.argv[1:]])
