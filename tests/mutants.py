"""Breaks the code on purpose, one place at a time, and checks that tests notice.

    python tests/mutants.py [--only WORD] [--list]

A mutant is a plausible mistake: a lost reduction, swapped splits, an unstable sort. Each is made in
a copy of the tracked files, where its tests must fail; before that they must pass in the unchanged
copy. Exits with 1 if a mutant survives, with 2 if one no longer fits the code or tests cannot run.
Each takes half a minute to three. `tests/test_mutants.py` keeps their list, mutants.txt, up to date:
name, file, the text (`- `) that becomes another (`+ `), and the tests (`? `) that must notice it.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
TESTS_FAILED, NO_TESTS = 1, 5  # pytest's exit codes; others mean that nothing was tried


@dataclass(frozen=True)
class Mutant:
    """Describes a change in one place, and the tests that must notice it."""

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]


def read_mutants() -> list[Mutant]:
    found = []
    for block in Path(__file__).with_suffix(".txt").read_text(encoding="utf-8").split("\n\n"):
        name, file, *lines = block.splitlines()
        old, new, tests = ([line[2:] for line in lines if line[0] == mark] for mark in "-+?")
        found.append(Mutant(name, file, "\n".join(old), "\n".join(new), tuple(tests)))
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", default="", help="mutants with this word in their name")
    parser.add_argument("--list", action="store_true", help="print their names and end")
    options = parser.parse_args()
    chosen = [mutant for mutant in read_mutants() if options.only in mutant.name]
    if not chosen:
        parser.error(f"no mutant has {options.only!r} in its name")
    if options.list:
        print(*(mutant.name for mutant in chosen), sep="\n")
        return
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        raise SystemExit(try_all(chosen, copy_to(Path(folder) / "moebius")))


def try_all(mutants: list[Mutant], copy: Path) -> int:
    """Tries mutants and returns the exit code."""
    if misfits := [problem for mutant in mutants if (problem := misfit(mutant, copy))]:
        print("\n".join(misfits))
        return 2
    code = run_tests(sorted({test for mutant in mutants for test in mutant.tests}), copy)
    if code != 0:
        print(f"the tests do not pass without a mutant (exit code {code})")
        return 2
    worst = 0
    for mutant in mutants:
        started, file = time.monotonic(), copy / mutant.file
        whole = file.read_text(encoding="utf-8")
        file.write_text(whole.replace(mutant.old, mutant.new), encoding="utf-8")
        code = run_tests(mutant.tests, copy, "-x", may_fail=True)
        file.write_text(whole, encoding="utf-8")
        verdict = {TESTS_FAILED: "killed", 0: "SURVIVED"}.get(
            code, f"tests cannot be run (exit code {code})"
        )
        worst = max(worst, {TESTS_FAILED: 0, 0: 1}.get(code, 2))
        print(f"{verdict:<9} {mutant.name}  ({time.monotonic() - started:.0f} s)", flush=True)
    print(f"{len(mutants)} mutants: " + ("all killed" if worst == 0 else "see above"))
    return worst


def misfit(mutant: Mutant, root: Path) -> str | None:
    """Returns why the mutant cannot be made, if so."""
    count = (root / mutant.file).read_text(encoding="utf-8").count(mutant.old)
    if count == 1:
        return None
    return f"{mutant.name}: {mutant.old!r} is {count} times in {mutant.file}, not once"


def copy_to(copy: Path) -> Path:
    """Copies the tracked files, and links the satellites beside them as packages."""
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True
    ).stdout
    for name in filter(None, listed.decode().split("\0")):
        if (ROOT / name).is_file():
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, copy / name)
    for satellite in copy.glob("satellites/*/pyproject.toml"):
        folder = satellite.parent
        (copy.parent / f"moebius_{folder.name}").symlink_to(folder)
    return copy


def run_tests(tests: Sequence[str], copy: Path, *options: str, may_fail: bool = False) -> int:
    """Returns pytest's exit code, with the copy as the package `moebius`."""
    command = [sys.executable, "-B", "-m", "pytest", "-q", "-rs", "-p", "no:cacheprovider"]
    command += ["-m", "", *options, *tests]  # slow ones too
    # the satellites' tests import helpers of theirs
    paths = os.pathsep.join(map(str, [copy.parent, *copy.glob("satellites/*/tests")]))
    recorded = {"MOEBIUS_SHARED": str(ROOT.parent / "shared")}  # which does not lie beside the copy
    environment = recorded | os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command,
        cwd=copy,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    code, summary = done.returncode, done.stdout.rstrip().rpartition("\n")[2]
    if code == 0 and " skipped" in summary and " passed" not in summary:
        code = NO_TESTS
    if code not in (0, TESTS_FAILED) or (code and not may_fail):
        print(done.stdout[-3000:], done.stderr[-2000:])
    return code


if __name__ == "__main__":
    main()
