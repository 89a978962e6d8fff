"""Runs tests with the oldest and the newest versions that pyproject.toml allows, so that its ranges are true.

    python .ci/versions.py triton                       every kernel's front end with both Tritons (`make range`)
    python .ci/versions.py oldest|newest PYTHON WORDS…  pytest WORDS in an environment of its own (`make oldest`)

`triton` puts each Triton before the installed one: 450 MB to download, then half a minute. Environments
are made in build/versions/ and kept; torch's wheel for Linux brings CUDA, so each takes 6 GB. `oldest`
fails if a lower bound cannot be installed beside the other lower bounds.
"""

import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).resolve().parents[1]
BUILD = ROOT / "build" / "versions"
PIP = ["-m", "pip", "--quiet", "--disable-pip-version-check", "--no-input"]
UV = ["-m", "uv", "pip"]  # pip has no way to ask for the lowest versions
FRONT_ENDS = "tests/kernels/triton/test_compiles.py::test_the_front_end_takes_every_kernel"
RESOLUTIONS = {"oldest": "lowest-direct", "newest": "highest"}


def main() -> None:
    match sys.argv[1:]:
        case ["triton"]:
            test_tritons()
        case ["oldest" | "newest" as which, python, *words]:
            test_environment(which, python, words)
        case _:
            raise SystemExit(__doc__)


def test_tritons() -> None:
    [triton] = [each for each in claims() if each.name == "triton"]
    for which, wanted in (("oldest", f"triton=={lowest(triton)}"), ("newest", str(triton))):
        folder = BUILD / f"triton-{which}"
        wanted = wanted.partition(";")[0]
        run(sys.executable, *PIP, "install", "--no-deps", "--upgrade", "--target", folder, wanted)
        show = "import triton; print(triton.__version__, triton.__file__)"
        run(sys.executable, "-c", show, path=folder)
        run(sys.executable, "-m", "pytest", "-q", "-m", "", FRONT_ENDS, path=folder)


def test_environment(which: str, python_of_venv: str, words: list[str]) -> None:
    """Makes the environment of the oldest or the newest versions, and calls pytest in it."""
    environment = BUILD / f"{which}-{Path(python_of_venv).name}"
    python = environment / "bin" / "python"
    run(python_of_venv, "-m", "venv", environment)
    run(python, *PIP, "install", "uv")
    wanted = ["--upgrade", "--resolution", RESOLUTIONS[which], "--editable", ".[test]"]
    run(python, *UV, "install", "--quiet", "--python", python, *wanted)
    if which == "oldest":
        check_claims(python)
    run(python, "-m", "pytest", *words)


def check_claims(python: Path) -> None:
    """Raises SystemExit unless a Python has the lower bounds of pyproject.toml installed."""
    listing = [python, *UV, "list", "--format", "json", "--python", python]
    listed = json.loads(subprocess.check_output(listing, text=True))
    installed = {each["name"]: each["version"] for each in listed}
    wrong = {
        f"{claim}: the oldest that installs beside the other oldest versions is {found}"
        for claim in claims()
        if (found := installed.get(canonicalize_name(claim.name)))
        and Version(found) != lowest(claim)
    }
    if wrong:
        raise SystemExit("raise these lower bounds of pyproject.toml:\n" + "\n".join(sorted(wrong)))


def claims() -> list[Requirement]:
    """Returns every dependency of pyproject.toml, those of extras included."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lists = [project["dependencies"], *project["optional-dependencies"].values()]
    found = [Requirement(each) for names in lists for each in names]
    return [each for each in found if each.name != project["name"]]


def lowest(claim: Requirement) -> Version:
    """Returns the lower bound of a dependency."""
    [bound] = [each.version for each in claim.specifier if each.operator == ">="]
    return Version(bound)


def run(*words: object, path: Path | None = None) -> None:
    """Runs a program in the root; with `path`, its packages hide installed ones."""
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    if path is not None:
        environment["PYTHONPATH"] = str(path)
    environment["OMP_NUM_THREADS"] = "1"
    line = [str(word) for word in words]
    print("$", " ".join(line), flush=True)
    if code := subprocess.run(line, cwd=ROOT, env=environment, check=False).returncode:
        raise SystemExit(code)


if __name__ == "__main__":
    main()
