"""Records the code that a job runs, and sends code to nodes that have another version.

`record_environment` writes environment.json: the time; moebius' version and commit (`changed`: the checkout
differs from it; null: unknown) and, for shipped code, the wheel's name and sha256; the versions of Python and
all packages; the host. It contains no environment variables and no command lines, so no secrets. Cost: about
20 ms, most of it for git.

`shipping` unpacks a wheel and puts its folder into this process's environment. `ray_session.connected` passes
the folder to Ray, which unpacks it once per node and puts it first on the path of every actor and task; their
children inherit the path. Ray could install the wheel itself, but would fetch its dependencies, torch among
them, once per node.
"""

import contextlib
import hashlib
import json
import os
import platform
import re
import socket
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil

from .. import __version__
from .job import JobError, write_atomically

ENVIRONMENT = "environment.json"
PACKAGE = __name__.partition(".")[0]
ROOT = Path(__file__).resolve().parents[1]
SHIPPED = "SHIPPED_MOEBIUS"  # a folder, or Ray's URI of its contents; not passed to ranks
_GIT_TIMEOUT_S = 10.0


@dataclass(frozen=True)
class Shipment:
    """Describes code that is sent to the nodes."""

    folder: Path  # of the package; its parent goes on the path
    wheel: str  # its file's name
    sha256: str  # of the wheel


# What runs here -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Code:
    """Identifies the code of this process."""

    version: str
    commit: str | None
    changed: bool | None  # None: not known

    def words(self) -> str | None:
        """Returns the commit for `status`, with "+changes" for a modified checkout."""
        return None if self.commit is None else self.commit + ("+changes" if self.changed else "")


def code_here() -> Code:
    """Returns the version and commit of this process's code."""
    top = _git("rev-parse", "--show-toplevel")
    if top is not None and Path(top).resolve() == ROOT:  # not a project that it is installed in
        changes = _git("status", "--porcelain", "--untracked-files=no")
        return Code(__version__, _git("rev-parse", "HEAD"), bool(changes))
    return Code(__version__, _installed_from(), None)


def record_environment(run_dir: Path, shipment: Shipment | None) -> dict[str, Any]:
    """Writes environment.json; returns its part for the journal."""
    code = code_here()
    shipped = {} if shipment is None else {"wheel": shipment.wheel, "sha256": shipment.sha256}
    own = {"version": code.version, "commit": code.commit, "changed": code.changed}
    record = {
        "time": time.time(),
        "moebius": own | shipped,
        "python": platform.python_version(),
        "packages": installed_packages(),
        "host": {
            "name": socket.gethostname(),
            "system": platform.platform(),
            "cpus": os.cpu_count(),
            "memory_bytes": psutil.virtual_memory().total,
        },
    }
    write_atomically(run_dir / ENVIRONMENT, json.dumps(record, indent=1))
    told = {"commit": code.words()}
    if shipment is not None:
        told |= {"shipped": shipment.wheel, "sha256": shipment.sha256}
    return told


def installed_packages() -> dict[str, str]:
    """Returns the version of every package on the path, by the names of their folders."""
    found: dict[str, str] = {}
    for folder in sys.path:
        for path in Path(folder or ".").glob("*.dist-info"):
            name, _, version = path.name.removesuffix(".dist-info").partition("-")
            found.setdefault(re.sub("[-_.]+", "-", name).lower(), version)
    return dict(sorted(found.items()))


def _git(*words: str) -> str | None:
    """Returns git's output about the checkout; None without git or a checkout."""
    try:
        done = subprocess.run(
            ["git", "-C", str(ROOT), *words],
            capture_output=True,
            text=True,
            timeout=_GIT_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _installed_from() -> str | None:
    """Returns the commit that pip installed from (PEP 610); None if unknown."""
    try:
        text = metadata.distribution(PACKAGE).read_text("direct_url.json")
    except metadata.PackageNotFoundError:
        return None
    return json.loads(text or "{}").get("vcs_info", {}).get("commit_id")


# What nodes receive -------------------------------------------------------------------------------


@contextlib.contextmanager
def shipping(wheel: Path) -> Iterator[Shipment]:
    """Makes connections inside the context run a wheel's code.

    Raises:
        JobError: the wheel cannot be read, or contains another package.
    """
    with tempfile.TemporaryDirectory(prefix="moebius-ship-") as folder:
        shipment = make_shipment(wheel, Path(folder))
        os.environ[SHIPPED] = str(shipment.folder)
        try:
            yield shipment
        finally:
            del os.environ[SHIPPED]


def runtime_env() -> dict[str, Any] | None:
    """Returns Ray's runtime environment for this process's connections; None ships nothing."""
    shipped = os.environ.get(SHIPPED)
    return {"py_modules": [shipped]} if shipped else None


def hand_on_shipment(ray: Any) -> None:
    """Passes the shipped code on to processes that this actor starts and that connect themselves."""
    modules = ray.get_runtime_context().runtime_env.get("py_modules")
    if modules:
        os.environ[SHIPPED] = modules[0]


def make_shipment(wheel: Path, into: Path) -> Shipment:
    """Unpacks a wheel into an empty folder, which must stay as long as the shipment is needed.

    Raises:
        JobError: the wheel cannot be read, or contains another package.
    """
    try:
        data = wheel.read_bytes()
        with zipfile.ZipFile(wheel) as file:
            file.extractall(into / "unpacked")
    except (OSError, zipfile.BadZipFile) as error:
        raise JobError(f"--ship {wheel}: cannot be read ({error})") from None
    folder = into / "unpacked" / PACKAGE
    if not (folder / "__init__.py").is_file():
        raise JobError(f"--ship {wheel}: contains no package {PACKAGE!r}")
    return Shipment(folder, wheel.name, hashlib.sha256(data).hexdigest())
