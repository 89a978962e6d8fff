"""Builds the wheel, installs it in an empty environment, and uses it from another folder.

    python .ci/wheel.py            (`make wheel` installs `build` first)

1. build: from a copy of the tracked files alone, so that no leftover of an earlier build can slip
   in;
2. contents: every tracked source of the package, and no test;
3. install: in a new virtual environment, with the extra `cluster`, under constraints.txt;
4. import every module of the wheel but Triton's kernels and what extras are for, then again
   without Ray: only cluster/ may need it;
5. every command's --help, and a training run of four steps.

Any failure ends it with an exit code other than 0. Takes about 3 minutes, most of it the
installation.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
import venv
import zipfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BESIDE_THE_PACKAGE = ("tests/", "benchmarks/", "examples/", "docs/", ".ci/")
COMMANDS = {"prepare", "train", "submit", "status", "logs", "stop", "eval", "layout", "ckpt"}
SOURCES = (".py", ".cpp")
# these need it, and say so (tests/kernels/triton/test_interpreted.py)
TRITON = "moebius.kernels.triton."
TRANSFORMERS = "_moebius"  # ends of modules of export/hf/, which go out with a model
# the parts of moebius[web] and moebius[lm-eval] whose commands name the extra that is missing; and
# a plugin of pytest
WITH_EXTRAS = ("moebius.evaluation.lm_eval_model",)
ONE_RANK = ["job.num_nodes=1", "job.ranks_per_node=1", "mesh.ep=1", "mesh.dp_replicate=1"]
STEPS = 4

IMPORT_ALL = """
import importlib, sys
without, *names = sys.argv[1:]
for library in filter(None, without.split(",")):
    sys.modules[library] = None  # makes its import fail as a missing one does
for name in names:
    importlib.import_module(name)
origin = sys.modules["moebius"].__file__
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


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="moebius-wheel-") as folder:
        temporary = Path(folder)
        wheel = build_wheel(temporary)
        modules = check_contents(wheel)
        environment = install(wheel, temporary / "environment")
        elsewhere = temporary / "elsewhere"
        elsewhere.mkdir()
        check_imports(environment, modules, elsewhere)
        check_commands(environment, elsewhere)
        check_training(environment, elsewhere)
    say("the wheel is sound")


def build_wheel(temporary: Path) -> Path:
    say("building the wheel")
    source, built = temporary / "source", temporary / "built"
    for path in tracked_files():
        (source / path).parent.mkdir(parents=True, exist_ok=True)
        (source / path).write_bytes((ROOT / path).read_bytes())
    constraint = {
        "PIP_CONSTRAINT": str(ROOT / "constraints.txt")
    }  # for setuptools in the build's own environment
    run(
        [sys.executable, "-m", "build", "--wheel", "--outdir", str(built), str(source)],
        temporary,
        extra=constraint,
    )
    (wheel,) = built.glob("*.whl")
    return wheel


def check_contents(wheel: Path) -> list[str]:
    """The dotted names of the wheel's modules. Raises SystemExit unless they are the tracked ones."""
    held = {name for name in zipfile.ZipFile(wheel).namelist() if name.endswith(SOURCES)}
    tracked = [
        path
        for path in tracked_files()
        if path.endswith(SOURCES) and not path.startswith(BESIDE_THE_PACKAGE)
    ]
    wanted = {f"moebius/{path}" for path in tracked}
    if held != wanted:
        raise SystemExit(
            f"{wheel.name} lacks {sorted(wanted - held)} and has too much: {sorted(held - wanted)}"
        )
    say(f"{wheel.name} holds all {len(held)} sources, {wheel.stat().st_size / 1024:.0f} KiB")
    modules = (name.removesuffix(".py") for name in held if name.endswith(".py"))
    return sorted(name.removesuffix("/__init__").replace("/", ".") for name in modules)


def install(wheel: Path, environment: Path) -> Path:
    say("installing it with the extra `cluster` into an empty environment")
    venv.create(environment, with_pip=True)
    pip = [
        str(environment / "bin" / "python"),
        "-m",
        "pip",
        "--quiet",
        "--disable-pip-version-check",
    ]
    run([*pip, "install", "-c", str(ROOT / "constraints.txt"), f"{wheel}[cluster]"], environment)
    run([*pip, "check"], environment)
    return environment


def check_imports(environment: Path, modules: list[str], elsewhere: Path) -> None:
    say(
        f"importing {len(modules)} modules but those of Triton's kernels and of extras, and again "
        "those outside cluster/ without Ray"
    )
    python = str(environment / "bin" / "python")
    modules = [
        name
        for name in modules
        if (not name.startswith(TRITON) or name == f"{TRITON}available")
        and not name.endswith(TRANSFORMERS)
        and name not in WITH_EXTRAS
    ]
    run([python, "-c", IMPORT_ALL, "", *modules], elsewhere)
    without_ray = [name for name in modules if not name.startswith("moebius.cluster.")]
    run([python, "-c", IMPORT_ALL, "ray", *without_ray], elsewhere)


def check_commands(environment: Path, elsewhere: Path) -> None:
    listed = run([str(environment / "bin" / "python"), "-c", LIST_COMMANDS], elsewhere)
    commands: list[list[str]] = json.loads(listed)
    if missing := COMMANDS - {command[0] for command in commands}:
        raise SystemExit(f"the command line lacks {sorted(missing)}")
    for command in [[], *commands]:
        line = ["moebius", *command, "--help"]
        say(" ".join(line))
        shown = run([str(environment / "bin" / "moebius"), *line[1:]], elsewhere)
        if not shown.startswith("usage: moebius"):
            raise SystemExit(f"{' '.join(line)} shows no usage:\n{shown}")


def check_training(environment: Path, elsewhere: Path) -> None:
    run_dir = elsewhere / "run"
    line = ["train", "smoke", f"train.steps={STEPS}", *ONE_RANK, "--run-dir", str(run_dir)]
    say(" ".join(["moebius", *line]))
    run([str(environment / "bin" / "moebius"), *line], elsewhere)
    result = json.loads((run_dir / "result.json").read_text())
    if (result["state"], result["step"]) != ("finished", STEPS):
        raise SystemExit(f"the run ended as {result}")


def tracked_files() -> list[str]:
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout
    return [path for path in listed.split("\0") if path and (ROOT / path).is_file()]


def run(line: Sequence[str], folder: Path, *, extra: dict[str, str] | None = None) -> str:
    """Runs a command and returns what it printed; SystemExit with all of it where it fails or takes
    15 minutes.
    """
    environment = {
        key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "VIRTUAL_ENV")
    }
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
