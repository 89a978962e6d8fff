"""Runs training steps on a GPU that is not there, for torch without CUDA (device.cpp)."""

import hashlib
import importlib.util
import os
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

_HERE = Path(__file__).parent
_SOURCE = _HERE / "device.cpp"


def reason_against() -> str | None:
    """Says why there can be no such device here; None where there can."""
    if "+cpu" not in version("torch"):
        return f"torch {version('torch')} is not built for CPUs alone"
    return None


def trace_steps(cases: str) -> str:
    """Runs traced_step.py with the device, in a process of its own, and returns what it printed.

    Raises:
        RuntimeError: it failed; with its last words.
    """
    done = subprocess.run(
        [sys.executable, str(_HERE / "traced_step.py")],
        input=cases,
        capture_output=True,
        text=True,
        env=os.environ | {"LD_PRELOAD": str(_library()), "OMP_NUM_THREADS": "1"},
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"traced_step.py ended with {done.returncode}:\n{done.stderr[-6000:]}")
    return done.stdout


def _library() -> Path:
    """Compiles the device once for a version of torch: two seconds."""
    spec = importlib.util.find_spec("torch")
    assert spec is not None
    assert spec.origin is not None
    torch_at = Path(spec.origin).parent
    made_of = _SOURCE.read_bytes() + f"{torch_at} {version('torch')}".encode()
    folder = Path(tempfile.gettempdir()) / f"moebius_traced_{os.getuid()}"
    path = folder / f"{hashlib.sha256(made_of).hexdigest()[:16]}.so"
    if path.exists():
        return path
    folder.mkdir(mode=0o700, exist_ok=True)
    built = path.with_suffix(f".{os.getpid()}")
    libraries = torch_at / "lib"
    subprocess.run(
        [
            *(os.environ.get("CXX", "g++"), "-std=c++20", "-shared", "-fPIC", str(_SOURCE)),
            *("-I", str(torch_at / "include"), "-L", str(libraries), "-lc10", "-ltorch_cpu"),
            *(f"-Wl,-rpath,{libraries}", "-o", str(built)),
        ],
        check=True,
    )
    os.replace(built, path)
    return path
