"""Which code and software a job is submitted with: environment.json in its run folder.

* `time`: of the submission
* `moebius`: `version`, `commit` (null: not known), `changed` (whether the checkout differs from the
  commit; null: not known), and of shipped code `wheel` and `sha256`
* `python`, `packages`: versions of everything that is installed where the job was submitted
* `host`: `name`, `system`, `cpus`, `memory_bytes`

Nothing of it is a secret: no environment variables, no command lines. Cost: some 20 ms, of which
git takes most.
"""

import json
import os
import platform
import re
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil

from ... import __version__
from ..job import write_atomically
from .wheel import PACKAGE, ROOT, Shipment

ENVIRONMENT = "environment.json"
_GIT_TIMEOUT_S = 10.0


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
    """Writes environment.json; returns what the journal says of it."""
    code = code_here()
    moebius: dict[str, Any] = {
        "version": code.version,
        "commit": code.commit,
        "changed": code.changed,
    }
    told = {"commit": code.words()}
    if shipment is not None:
        shipped = {"wheel": shipment.wheel, "sha256": shipment.sha256}
        moebius |= shipped
        told |= {"shipped": shipped["wheel"], "sha256": shipped["sha256"]}
    record = {
        "time": time.time(),
        "moebius": moebius,
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
    return told


def installed_packages() -> dict[str, str]:
    """Returns the version of every package on the path, by the names of their folders: that is quick."""
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
