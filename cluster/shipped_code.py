"""Which code a job runs: it is recorded in the run folder, and sent to nodes that have another.

`record_environment` writes environment.json: the time, moebius' version and commit (`changed`:
whether the checkout differs from it; null: not known) and, of shipped code, the wheel's name and
sha256; the versions of Python and of all packages; the host. Nothing of it is a secret: no
environment variables, no command lines. Cost: some 20 ms, most of them git's.

`shipping` unpacks a wheel (a given one, or one built from this checkout without network) and names
its folder in this process's environment. `ray_session.connected` hands the folder to Ray, which
unpacks it once per node and puts it first on the path of every actor and task; whatever they start
inherits the path. Ray could take the wheel itself, but would install all that it depends on, torch
among it, from the network, once per node.
"""

import contextlib
import hashlib
import json
import os
import platform
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import tomllib
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
SHIPPED = "SHIPPED_MOEBIUS"  # a folder, or Ray's name for what it holds; not handed to ranks
_GIT_TIMEOUT_S = 10.0
_BUILD_TIMEOUT_S = 300.0
# The same sources give the same bytes: the earliest date that a zip file knows.
_SAME_BYTES = {"SOURCE_DATE_EPOCH": "315532800"}
_BESIDE = ("pyproject.toml", "README.md", "LICENSE")


@dataclass(frozen=True)
class Shipment:
    """Says what code is sent along."""

    folder: Path  # of the package, to be put on the path by its parent
    wheel: str  # its file's name
    sha256: str  # of the wheel


# What runs here -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Code:
    """Says which code runs here."""

    version: str
    commit: str | None
    changed: bool | None  # None: not known

    def words(self) -> str | None:
        """Returns the commit as `status` shows it: with "+changes" where the checkout differs."""
        return None if self.commit is None else self.commit + ("+changes" if self.changed else "")


def code_here() -> Code:
    """Returns the version and commit of the code of this process."""
    top = _git("rev-parse", "--show-toplevel")
    if top is not None and Path(top).resolve() == ROOT:  # not of a project that it is installed in
        changes = _git("status", "--porcelain", "--untracked-files=no")
        return Code(__version__, _git("rev-parse", "HEAD"), bool(changes))
    return Code(__version__, _installed_from(), None)


def record_environment(run_dir: Path, shipment: Shipment | None) -> dict[str, Any]:
    """Writes environment.json; returns what the journal records of it."""
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
    """Returns the version of every package on the path, read off the names of their folders."""
    found: dict[str, str] = {}
    for folder in sys.path:
        for path in Path(folder or ".").glob("*.dist-info"):
            name, _, version = path.name.removesuffix(".dist-info").partition("-")
            found.setdefault(re.sub("[-_.]+", "-", name).lower(), version)
    return dict(sorted(found.items()))


def _git(*words: str) -> str | None:
    """Returns what git says of the checkout; None where there is no git, or no checkout."""
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
    """Returns the commit that pip installed from (PEP 610), if it was one."""
    try:
        text = metadata.distribution(PACKAGE).read_text("direct_url.json")
    except metadata.PackageNotFoundError:
        return None
    return json.loads(text or "{}").get("vcs_info", {}).get("commit_id")


# What nodes are given -----------------------------------------------------------------------------


@contextlib.contextmanager
def shipping(wheel: Path | None) -> Iterator[Shipment]:
    """Makes clusters that are connected to while inside run a wheel's code; None: this checkout's.

    Raises:
        JobError: there is no such wheel, or it cannot be built.
    """
    with tempfile.TemporaryDirectory(prefix="moebius-ship-") as folder:
        shipment = make_shipment(wheel, Path(folder))
        os.environ[SHIPPED] = str(shipment.folder)
        try:
            yield shipment
        finally:
            del os.environ[SHIPPED]


def runtime_env() -> dict[str, Any] | None:
    """Returns Ray's runtime environment for a connection of this process; None ships nothing."""
    shipped = os.environ.get(SHIPPED)
    return {"py_modules": [shipped]} if shipped else None


def hand_on_shipment(ray: Any) -> None:
    """Lets processes that this actor starts, and that connect themselves, use the same code."""
    modules = ray.get_runtime_context().runtime_env.get("py_modules")
    if modules:
        os.environ[SHIPPED] = modules[0]


def make_shipment(wheel: Path | None, into: Path) -> Shipment:
    """Returns the code that a job is to run, unpacked below `into`.

    Args:
        wheel: None: it is built.
        into: an empty folder that stays as long as the shipment is needed.

    Raises:
        JobError: the wheel cannot be read, is none of ours, or cannot be built.
    """
    wheel = wheel or build_wheel(into / "wheel")
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


def build_wheel(into: Path) -> Path:
    """Builds the wheel of the code that runs here, without network and isolation; returns its file.

    It is built from a copy, so the checkout stays as it is.

    Raises:
        JobError: this is no checkout, or the build fails; with its last words.
    """
    if not (ROOT / "pyproject.toml").is_file():
        raise JobError(
            f"{ROOT} is an installed package, not a checkout, so no wheel can be built from it: "
            "pass the wheel that it was installed from (--ship FILE)"
        )
    into.mkdir(parents=True)
    source = into / "source"
    copy_sources(source)
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation"]
    options = ["--no-index", "--disable-pip-version-check", "-q", "-w", str(into), str(source)]
    try:
        done = subprocess.run(
            command + options,
            capture_output=True,
            text=True,
            timeout=_BUILD_TIMEOUT_S,
            check=False,
            env=os.environ | _SAME_BYTES,
        )
    except subprocess.TimeoutExpired:
        raise JobError(f"the wheel was not built within {_BUILD_TIMEOUT_S:.0f} s") from None
    built = sorted(into.glob("*.whl"))
    if done.returncode or not built:
        said = (done.stderr or done.stdout).strip().splitlines()[-3:]
        raise JobError(
            "the wheel cannot be built here (this needs pip and setuptools; or pass --ship "
            "FILE): " + " ".join(said)
        )
    return built[0]


def copy_sources(into: Path) -> None:
    """Copies what the wheel is built of: the packages that pyproject.toml names, and their data."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    setuptools = project["tool"]["setuptools"]
    data = setuptools.get("package-data", {})
    into.mkdir(parents=True)
    for name in _BESIDE:
        if (ROOT / name).is_file():
            shutil.copy(ROOT / name, into / name)
    for package in setuptools["packages"]:
        below = Path(*package.split(".")[1:])
        (into / below).mkdir(parents=True, exist_ok=True)
        for pattern in ("*.py", *data.get(package, [])):
            for file in (ROOT / below).glob(pattern):
                shutil.copy(file, into / below / file.name)
