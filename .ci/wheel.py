"""Builds the wheels of the core and its satellites, installs them in an empty environment, and uses them.

    python .ci/wheel.py            (`make wheel` installs `build` first)

1. Build every wheel from a copy of the tracked files, so that no leftover of an earlier build slips in.
2. Compare their contents: every tracked source of each package, and no test.
3. Install the core alone, with the extra `cluster`, under constraints.txt. Import every module of it, then
   again without Ray, which only cluster/ may need. Show every command's help, and train four steps.
4. Install the satellites beside it. Import every module of theirs: conform without the core. Show the help
   of each command that they add.

Any failure ends it with an exit code other than 0. Takes about 3 minutes, most of it the installation.
"""

import functools
import json
import os
import subprocess
import sys
import tempfile
import time
import tomllib
import venv
import zipfile
from collections.abc import Iterable, Sequence
from pathlib import Path, PurePosixPath

ROOT = Path(__file__).resolve().parents[1]
BESIDE_THE_CORE = ("tests", "benchmarks", "examples", "docs", ".ci", "satellites")
COMMANDS = {"prepare", "train", "submit", "status", "logs", "stop", "eval", "plan", "ckpt"}
SOURCES = (".py", ".cpp", ".css")
# Modules that say so when what they need is missing (tests/kernels/triton/test_interpreted.py).
TRITON = "moebius.kernels.triton."
TRANSFORMERS = "_moebius"  # ends of modules of export/hf/, which go out with a model
# The parts of moebius[lm-eval] whose command names the missing extra; and a plugin of pytest.
WITH_EXTRAS = ("moebius.evaluation.lm_eval_model", "moebius_conform.plugin")
ONE_RANK = ["job.num_nodes=1", "job.ranks_per_node=1", "mesh.ep=1", "mesh.dp_replicate=1"]
STEPS = 4

IMPORT_ALL = """
import importlib, sys
without, *names = sys.argv[1:]
for library in filter(None, without.split(",")):
    sys.modules[library] = None  # makes its import fail as a missing one does
for name in names:
    importlib.import_module(name)
    origin = sys.modules[name.partition(".")[0]].__file__
    assert "site-packages" in origin, f"the wheel was not used: {origin}"
"""
LIST_COMMANDS = """
import argparse, json
from moebius.cli.main import build_parser
def paths(parser, before=()):
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, below in action.choices.items():
                yield [*before, name]
                yield from paths(below, (*before, name))
print(json.dumps(list(paths(build_parser()))))
"""


class Environment:
    """Runs programs of a new virtual environment, in a folder without sources."""

    def __init__(self, temporary: Path) -> None:
        self._bin = temporary / "environment" / "bin"
        self.folder = temporary / "elsewhere"
        self.folder.mkdir()
        venv.create(self._bin.parent, with_pip=True)

    def install(self, *requirements: str) -> None:
        """Installs wheels under constraints.txt, and checks that nothing is missing."""
        pip = ["-m", "pip", "--quiet", "--disable-pip-version-check"]
        self.python(*pip, "install", "-c", str(ROOT / "constraints.txt"), *requirements)
        self.python(*pip, "check")

    def python(self, *words: str) -> str:
        """Returns what Python prints."""
        return run([str(self._bin / "python"), *words], self.folder)

    def moebius(self, *words: str) -> str:
        """Returns what a command prints."""
        say(" ".join(["moebius", *words]))
        return run([str(self._bin / "moebius"), *words], self.folder)

    def show_help(self, *command: str) -> None:
        """Checks that a command has a help text."""
        shown = self.moebius(*command, "--help")
        if not shown.startswith("usage: moebius"):
            raise SystemExit(f"moebius {' '.join(command)} --help shows no usage:\n{shown}")

    def import_all(self, modules: Iterable[str], *, without: str = "") -> None:
        """Imports modules where one library is missing, except those that need what is not installed."""
        wanted = [name for name in modules if not _needs_more(name)]
        say(f"importing {len(wanted)} modules" + (f" without {without}" if without else ""))
        self.python("-c", IMPORT_ALL, without, *wanted)


def _needs_more(module: str) -> bool:
    of_triton = module.startswith(TRITON) and module != f"{TRITON}available"
    return of_triton or module.endswith(TRANSFORMERS) or module in WITH_EXTRAS


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="moebius-wheel-") as folder:
        temporary = Path(folder)
        copy_tracked(temporary / "source")
        wheels = {name: build_wheel(temporary, name) for name in ["", *satellites()]}
        modules = {name: check_contents(wheel, name) for name, wheel in wheels.items()}
        environment = Environment(temporary)
        say("installing the core alone, with the extra `cluster`")
        environment.install(f"{wheels.pop('')}[cluster]")
        check_core(environment, modules.pop(""))
        say(f"installing {', '.join(wheels)} beside it")
        environment.install(*map(str, wheels.values()))
        for name, own in modules.items():
            environment.import_all(own, without="moebius" if name == "conform" else "")
        for command in added_commands():
            environment.show_help(command)
    say("the wheels are sound")


def check_core(environment: Environment, modules: list[str]) -> None:
    """Imports, asks and trains with the core alone."""
    environment.import_all(modules)
    environment.import_all(
        (name for name in modules if not name.startswith("moebius.cluster.")), without="ray"
    )
    commands: list[list[str]] = json.loads(environment.python("-c", LIST_COMMANDS))
    if missing := COMMANDS - {command[0] for command in commands}:
        raise SystemExit(f"the command line lacks {sorted(missing)}")
    for command in [[], *commands]:
        environment.show_help(*command)
    run_dir = environment.folder / "run"
    environment.moebius(
        "train", "smoke", f"train.steps={STEPS}", *ONE_RANK, "--run-dir", str(run_dir)
    )
    result = json.loads((run_dir / "result.json").read_text())
    if (result["state"], result["step"]) != ("finished", STEPS):
        raise SystemExit(f"the run ended as {result}")


@functools.cache
def satellites() -> list[str]:
    """Returns the folders with a distribution of their own."""
    tracked = map(PurePosixPath, tracked_files())
    return [path.parts[1] for path in tracked if path.match("satellites/*/pyproject.toml")]


def added_commands() -> list[str]:
    """Returns the commands that the satellites add."""
    commands: list[str] = []
    for name in satellites():
        project = tomllib.loads((ROOT / "satellites" / name / "pyproject.toml").read_text())[
            "project"
        ]
        commands += project.get("entry-points", {}).get("moebius.commands", {})
    return commands


def copy_tracked(source: Path) -> None:
    for path in tracked_files():
        (source / path).parent.mkdir(parents=True, exist_ok=True)
        (source / path).write_bytes((ROOT / path).read_bytes())


def build_wheel(temporary: Path, name: str) -> Path:
    """Builds the wheel of a satellite, or of the core where there is no name."""
    say(f"building the wheel of {name or 'the core'}")
    built = temporary / "built" / (name or "core")
    constraint = {"PIP_CONSTRAINT": str(ROOT / "constraints.txt")}  # for setuptools in the build
    build = [sys.executable, "-m", "build", "--wheel", "--outdir", str(built)]
    source = temporary / "source" / (f"satellites/{name}" if name else "")
    run([*build, str(source)], temporary, extra=constraint)
    (wheel,) = built.glob("*.whl")
    return wheel


def check_contents(wheel: Path, name: str) -> list[str]:
    """Returns the dotted names of a wheel's modules; SystemExit unless it holds the tracked sources."""
    held = {path for path in zipfile.ZipFile(wheel).namelist() if path.endswith(SOURCES)}
    wanted = {_place_in_wheel(path, name) for path in tracked_files() if path.endswith(SOURCES)} - {
        None
    }
    if held != wanted:
        lacks, extra = sorted(wanted - held), sorted(held - wanted)
        raise SystemExit(f"{wheel.name} lacks {lacks} and has too much: {extra}")
    say(f"{wheel.name} holds all {len(held)} sources, {wheel.stat().st_size / 1024:.0f} KiB")
    modules = (path.removesuffix(".py") for path in held if path.endswith(".py"))
    return sorted(path.removesuffix("/__init__").replace("/", ".") for path in modules)


def _place_in_wheel(path: str, name: str) -> str | None:
    """Returns where a wheel holds a tracked file; None if it does not."""
    if name:
        inside = path.removeprefix(f"satellites/{name}/")
        in_it = inside != path and not inside.startswith("tests/")
        return f"moebius_{name}/{inside}" if in_it else None
    is_aside = path.split("/")[0] in BESIDE_THE_CORE
    return None if is_aside else f"moebius/{path}"


@functools.cache
def tracked_files() -> list[str]:
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout
    return [path for path in listed.split("\0") if path and (ROOT / path).is_file()]


def run(line: Sequence[str], folder: Path, *, extra: dict[str, str] | None = None) -> str:
    """Runs a program and returns what it printed.

    Raises SystemExit with all of it if the program fails or takes 15 minutes.
    """
    hidden = ("PYTHONPATH", "VIRTUAL_ENV")
    environment = {key: value for key, value in os.environ.items() if key not in hidden}
    done = subprocess.run(
        line,
        cwd=folder,
        env=environment | (extra or {}),
        stdin=subprocess.DEVNULL,
        timeout=900,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    if done.returncode:
        raise SystemExit(f"{done.stdout}\nexit code {done.returncode} of: {' '.join(line)}")
    return done.stdout


def say(what: str) -> None:
    print(f"[{time.strftime('%H:%M:%S')}] {what}", flush=True)


if __name__ == "__main__":
    main()
