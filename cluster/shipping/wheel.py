"""The code that is brought along: a wheel, unpacked.

A wheel is built from the checkout that runs this command, or given, or made of the package as it is
installed. Building needs no network: pip takes setuptools as it is installed here. What is built is
a copy of what the wheel needs, so the checkout stays as it is.

Ray takes wheels itself (`py_modules`), but installs them with all that they depend on, into a folder
per node: torch again, from the network. So the wheel is unpacked here, and Ray gets the folder.
"""

import hashlib
import os
import shutil
import subprocess
import sys
import tomllib
import zipfile
from dataclasses import dataclass
from pathlib import Path

from ..job import JobError

PACKAGE = __name__.partition(".")[0]
ROOT = Path(__file__).resolve().parents[2]
_BUILD_TIMEOUT_S = 300.0
# The same sources give the same bytes: the earliest date that a zip file knows.
_SAME_BYTES = {"SOURCE_DATE_EPOCH": "315532800"}
_BESIDE = ("pyproject.toml", "README.md", "LICENSE")


@dataclass(frozen=True)
class Shipment:
    """Says what code is brought along."""

    folder: Path  # of the package, to be put on the path by its parent
    wheel: str  # its file's name
    sha256: str  # of the wheel


def make_shipment(wheel: Path | None, into: Path) -> Shipment:
    """Returns the code that a job is to run, unpacked below `into`.

    Args:
        wheel: that is given; None: it is built.
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
        raise JobError(f"--wheel {wheel}: cannot be read ({error})") from None
    folder = into / "unpacked" / PACKAGE
    if not (folder / "__init__.py").is_file():
        raise JobError(f"--wheel {wheel}: there is no package {PACKAGE!r} in it")
    return Shipment(folder, wheel.name, hashlib.sha256(data).hexdigest())


def build_wheel(into: Path) -> Path:
    """Builds the wheel of the code that runs here, without network and isolation; returns its file.

    Raises:
        JobError: this is no checkout, or the build fails; with its last words.
    """
    if not (ROOT / "pyproject.toml").is_file():
        raise JobError(
            f"{ROOT} is an installed package, no checkout, and no wheel can be built from it: give "
            "the one that it was installed from (--wheel FILE)"
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
            "the wheel cannot be built here (it needs pip and setuptools; or give --wheel FILE): "
            + " ".join(said)
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
