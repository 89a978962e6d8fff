"""Reads the sources of this repository and what they import, for the tests of the house."""

import ast
import functools
import os
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

PACKAGE = "moebius"
Sources = dict[str, str]  # path relative to the root, with slashes -> text
# Distributions of their own in this repository. The core imports none of them, and is complete without.
SATELLITES = {"conform", "science", "dashboard"}  # in satellites/
BESIDE_THE_PACKAGE = {"tests", "benchmarks", "examples", "docs", ".ci", "satellites"}


@dataclass(frozen=True)
class Import:
    """Describes one imported name, made absolute."""

    importer: str  # dotted name of the module that imports
    target: str  # "moebius.model.moe.Sent": the attribute or submodule included
    is_relative: bool
    where: str  # "train/loop.py:19"

    @property
    def top(self) -> str:
        return self.target.split(".")[0]

    @property
    def target_room(self) -> str | None:
        """Returns the room that is entered; None if the target is not of the package."""
        return self.target.split(".")[1] if self.target.startswith(f"{PACKAGE}.") else None


def tracked_files(root: Path) -> list[str]:
    """Lists the files that git tracks; without a repository, those that are neither hidden nor made."""
    if (root / ".git").exists():
        listed = subprocess.run(
            ["git", "ls-files", "-z"], cwd=root, check=True, capture_output=True, text=True
        )
        return [path for path in listed.stdout.split("\0") if path and (root / path).is_file()]
    found = []
    for folder, subfolders, files in os.walk(root):
        subfolders[:] = [name for name in subfolders if name == ".ci" or not _is_made(name)]
        found += [(Path(folder) / name).relative_to(root).as_posix() for name in files]
    return sorted(found)


def _is_made(folder: str) -> bool:
    return (
        folder.startswith(".")
        or folder in ("__pycache__", "build", "dist", "runs")
        or folder.endswith(".egg-info")
    )


def read_sources(root: Path) -> Sources:
    """Reads all tracked text files."""
    sources = {}
    for path in tracked_files(root):
        try:
            sources[path] = (root / path).read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue  # a picture or recorded data
    return sources


def python(sources: Sources) -> Sources:
    """Returns the Python files."""
    return {path: text for path, text in sources.items() if path.endswith(".py")}


def package(sources: Sources) -> Sources:
    """Returns the modules of the package: those in its rooms, and those at the root."""
    return {
        path: text
        for path, text in python(sources).items()
        if path.split("/")[0] not in BESIDE_THE_PACKAGE
    }


def module_name(path: str) -> str:
    """Returns moebius.train.loop for train/loop.py, moebius.kernels for kernels/__init__.py."""
    parts = PurePosixPath(path).with_suffix("").parts
    return ".".join([PACKAGE, *(parts[:-1] if parts[-1] == "__init__" else parts)])


def room_of(path: str) -> str:
    """Returns model for model/moe.py, conform for satellites/conform/run.py, and __init__ for __init__.py."""
    return path.removeprefix("satellites/").split("/")[0].removesuffix(".py")


@functools.cache
def imports_of(path: str, text: str) -> tuple[Import, ...]:
    """Returns every import of a file, and `import_module("…")` with a literal name."""
    return tuple(_imports_of(path, text))


def _imports_of(path: str, text: str) -> Iterator[Import]:
    name = module_name(path)
    for node in ast.walk(ast.parse(text, path)):
        where = f"{path}:{getattr(node, 'lineno', 0)}"
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(name, alias.name, False, where)
        elif isinstance(node, ast.ImportFrom):
            origin = _origin(path, node)
            for alias in node.names:
                yield Import(
                    name, f"{origin}.{alias.name}" if origin else alias.name, node.level > 0, where
                )
        elif isinstance(node, ast.Call) and (target := _imported_by_call(node)):
            yield Import(name, target, False, where)


def _origin(path: str, node: ast.ImportFrom) -> str:
    """Returns the absolute name of what stands between `from` and `import`."""
    if node.level == 0:
        return node.module or ""
    containing = [PACKAGE, *PurePosixPath(path).parts[:-1]]
    kept = containing[: len(containing) - node.level + 1]
    return ".".join([*kept, *([node.module] if node.module else [])])


def _imported_by_call(node: ast.Call) -> str | None:
    called = getattr(node.func, "attr", None) or getattr(node.func, "id", None)
    first = node.args[0] if node.args else None
    if called in ("import_module", "__import__") and isinstance(first, ast.Constant):
        return str(first.value)
    return None


def package_imports(sources: Sources) -> Iterator[tuple[str, Import]]:
    """Yields every import of the package, with the path of the file that it stands in."""
    for path, text in package(sources).items():
        for found in imports_of(path, text):
            yield path, found


def module_of(target: str, modules: set[str]) -> str | None:
    """Returns the longest known module that a dotted name begins with.

    A package's own __init__ is returned only if nothing below it fits.
    """
    parts = target.split(".")
    names = (".".join(parts[:length]) for length in range(len(parts), 1, -1))
    return next((name for name in names if name in modules), None)


def pulled_in(start: str, sources: Sources) -> set[str]:
    """Returns the paths of the modules that one imports, directly or not, wherever the import stands."""
    paths = {module_name(path): path for path in package(sources)}
    seen: set[str] = set()
    waiting = [start]
    while waiting:
        path = waiting.pop()
        if path not in seen:
            seen.add(path)
            for found in imports_of(path, sources[path]):
                names = {found.target, found.target.rpartition(".")[0]} - {PACKAGE}
                waiting += [paths[name] for name in names & paths.keys()]
    return seen
