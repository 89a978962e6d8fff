"""The rules of the house (docs/architecture.md): floors, rooms, names, packaging, sizes.

Which room may import which is a contract of import-linter (pyproject.toml). Every other rule is a function
from sources (path -> text) to violations, each one line `path:line: what and why`. Each must find none in
the tree, and must find the faults of one table in a made-up tree: a rule that cannot fail proves nothing.
"""

import ast
import graphlib
import os
import re
import subprocess
import sys
import tomllib
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath
from typing import Any, get_args

import grimp
import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from pydantic import BaseModel

import moebius
from moebius.train.config.run_config import Config

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = "moebius"
ROOMS = {
    *("cli", "cluster", "planning", "export", "evaluation", "train"),
    *("distributed", "model", "kernels", "data_pipeline"),
}
ROOT_MODULES = {"__init__", "api", "plugins"}
# Distributions of their own in this repository. The core imports none of them, and is complete without.
SATELLITES = {"conform", "science", "dashboard"}  # in satellites/
BESIDE_THE_PACKAGE = {"tests", "benchmarks", "examples", "docs", ".ci", "satellites"}
EMPTY_NAMES = {"util", "utils", "helper", "helpers", "manager", "managers"}

# The patterns must not match themselves: this file is one of the sources.
MACHINE_PATH = re.compile(
    r"(?<![\w.~/-])(?:/(?:[r]oot|[h]ome|[w]ork|[U]sers|[m]nt)/|[A-Z]:\\\\?[U]sers)"
)
UNFINISHED = re.compile(r"\b(?:[T]ODO|[F]IXME|[X]XX)\b")
PRIVATE = re.compile(
    r"\bray\._private\.\w+|\btorch\._C\.[\w.]+|\btorch(?:\.\w+)+\._\w+"
    r"|from torch[\w.]*\._[\w.]+|from ray\._private[\w.]*|_ZN\w+|_StorageInfo"
)

Sources = dict[str, str]  # path relative to the root, with slashes -> text
Rule = Callable[[Sources], list[str]]


def read_sources(root: Path) -> Sources:
    """Reads all text files that git tracks."""
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=root, check=True, capture_output=True, text=True
    )
    sources = {}
    for path in listed.stdout.split("\0"):
        if (root / path).is_file():
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


def room_of(path: str) -> str:
    """Returns model for model/moe.py, conform for satellites/conform/run.py, and api for api.py."""
    return path.removeprefix("satellites/").split("/")[0].removesuffix(".py")


def imports_of(path: str, text: str) -> Iterator[tuple[str, str, bool]]:
    """Yields every import of a file: where it stands, its target as it is written, and if it is relative."""
    for node in ast.walk(ast.parse(text, path)):
        if isinstance(node, ast.Import):
            yield from ((f"{path}:{node.lineno}", alias.name, False) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                target = ".".join(filter(None, (node.module, alias.name)))
                yield f"{path}:{node.lineno}", target, node.level > 0


@pytest.fixture(scope="module")
def sources() -> Sources:
    found = read_sources(ROOT)
    assert f"{PACKAGE}" in found["pyproject.toml"]
    assert len(found) > 50, "the sources were not found"
    return found


# Contracts ------------------------------------------------------------------------------------------


def lint_imports(folder: Path) -> str:
    """Checks the contracts of pyproject.toml in the package that lies in a folder."""
    run = "from importlinter.cli import lint_imports_command as run; run()"
    words = ["--no-cache", "--no-logo", str(ROOT / "pyproject.toml")]
    checked = subprocess.run(
        [sys.executable, "-c", run, *words],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(folder), "COLUMNS": "400"},
        capture_output=True,
        text=True,
    )
    return checked.stdout + checked.stderr


def test_the_tree_keeps_the_contracts(tmp_path: Path) -> None:
    (tmp_path / PACKAGE).symlink_to(ROOT)
    said = lint_imports(tmp_path)
    assert re.search(r"Contracts: \d+ kept, 0 broken", said), said


BREACHES = {
    "model/a.py": ("from ..distributed.mesh import Mesh", "model.a -> moebius.distributed"),
    "kernels/a.py": ("def f():\n    from ..model import moe", "kernels.a -> moebius.model"),
    "model/b.py": ("if TYPE_CHECKING:\n    from ..train import run", "model.b -> moebius.train"),
    "model/c.py": ("from ..data_pipeline import read", "model.c -> moebius.data_pipeline"),
    "evaluation/a.py": ("from ..cli import main", "evaluation.a -> moebius.cli"),
    "planning/a.py": ("from ..cluster import job", "planning.a -> moebius.cluster"),
    "planning/b.py": ("from ..evaluation import text", "planning.b -> moebius.evaluation"),
    "cluster/a.py": ("from ..model import moe", "cluster.a -> moebius.model"),
    "plugins.py": ("from .kernels import ops", "plugins -> moebius.kernels"),
    "api.py": ("from .cli import main", "api -> moebius.cli"),
    "__init__.py": ("from .train import run", "moebius -> moebius.train.run"),
    "train/a.py": ("def f():\n    import ray.util", "train.a -> ray"),
    "model/d.py": ("from triton import jit", "model.d -> triton"),
    "train/b.py": ("import megablocks.ops", "train.b -> megablocks"),
    "cli/a.py": ("import pyarrow as pa", "cli.a -> pyarrow"),
    "export/a.py": ("import moebius_science", "export.a -> moebius_science"),
    "attic/a.py": ("", "moebius.attic"),
}


def test_every_breach_is_found_and_every_contract_is_seen_to_fail(tmp_path: Path) -> None:
    modules = (
        *("cli/main", "cluster/job", "planning/a", "export/a", "evaluation/text", "train/run"),
        *("distributed/mesh", "distributed/process/store", "model/moe", "kernels/ops"),
        *(
            "data_pipeline/read",
            "data_pipeline/files",
            "data_pipeline/words",
            "api",
            "plugins",
            "benchmarks/a",
        ),
    )
    tree = dict.fromkeys((f"{module}.py" for module in modules), "")
    tree |= {path: text for path, (text, _) in BREACHES.items()}
    tree["cluster/b.py"] = "from ..distributed.process import store\n"  # these are allowed
    tree["distributed/b.py"] = "from ..data_pipeline import files, words\n"
    tree["train/__main__.py"] = "from ..evaluation import while_training\n"
    tree["evaluation/while_training.py"] = ""
    for path, text in tree.items():
        file = tmp_path / PACKAGE / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
        for parent in file.relative_to(tmp_path).parents[:-1]:
            (tmp_path / parent / "__init__.py").touch()
    said = lint_imports(tmp_path)
    assert [words for _, words in BREACHES.values() if words not in said] == [], said
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    for contract in settings["tool"]["importlinter"]["contracts"]:
        assert re.search(f"{re.escape(contract['name'])} BROKEN", said)
    assert "cluster.b" not in said
    assert "distributed.b" not in said


# Graphs ---------------------------------------------------------------------------------------------

PULLED_IN = {"moebius.train.loop": 150}  # modules, wherever the import stands


def circle_in(graph: grimp.ImportGraph) -> str | None:
    """Returns modules that import each other."""
    edges = {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}
    try:
        graphlib.TopologicalSorter(edges).prepare()
    except graphlib.CycleError as error:
        return " <- ".join(error.args[1])
    return None


def test_modules_make_no_circle_and_the_loop_pulls_in_little() -> None:
    assert Path(moebius.__file__).resolve().parent == ROOT
    graph = grimp.build_graph(PACKAGE, cache_dir=None)
    for importer in graph.find_modules_that_directly_import(PACKAGE):  # `__version__` of the root
        graph.remove_import(importer=importer, imported=PACKAGE)
    assert circle_in(graph) is None
    for module, most in PULLED_IN.items():
        assert len(graph.find_upstream_modules(module)) < most


def test_a_circle_is_found() -> None:
    graph = grimp.ImportGraph()
    graph.add_import(importer="a", imported="b")
    graph.add_import(importer="b", imported="a")
    assert circle_in(graph) is not None


# Rules ----------------------------------------------------------------------------------------------


def heavy_libraries_are_not_imported_by_call(sources: Sources) -> list[str]:
    """import-linter does not see `import_module("ray")`."""
    held = {
        "ray": "cluster",
        "triton": "kernels",
        "megablocks": "kernels",
        "pyarrow": "data_pipeline",
    }
    pattern = re.compile(rf"(?:import_module|__import__)\(['\"]({'|'.join(held)})\b")
    return [
        f"{path}: {name} is imported in {held[name]}/ only"
        for path, text in package(sources).items()
        for name in pattern.findall(text)
        if room_of(path) != held[name]
    ]


def satellites_use_the_public_surface(sources: Sources) -> list[str]:
    """A satellite and its tests import names of `moebius.__all__` and nothing below; conform/ none."""
    names = re.search(r"^__all__ = (\[.*?\])", sources["__init__.py"], re.MULTILINE | re.DOTALL)
    offered = {
        PACKAGE,
        *(f"{PACKAGE}.{name}" for name in ast.literal_eval(names[1] if names else "[]")),
    }
    return [
        f"{where}: {room_of(path)} imports {target}; mend the public surface instead"
        for path, text in python(sources).items()
        if room_of(path) in SATELLITES
        for where, target, is_relative in imports_of(path, text)
        if target.split(".")[0] == PACKAGE and not is_relative
        if room_of(path) == "conform" or target not in offered
    ]


def imports_are_relative_inside_and_absolute_outside(sources: Sources) -> list[str]:
    violations = []
    for path, text in python(sources).items():
        inside = path in package(sources)
        for where, target, is_relative in imports_of(path, text):
            top = target.split(".")[0]
            if top in ROOMS and not is_relative:
                violations.append(
                    f"{where}: {target} is no top-level module; it is {PACKAGE}.{target}"
                )
            elif inside and top == PACKAGE and not is_relative:
                violations.append(
                    f"{where}: {target} must be imported relatively inside the package"
                )
            elif not inside and is_relative and room_of(path) not in SATELLITES:
                violations.append(
                    f"{where}: only the package imports relatively; write {PACKAGE}.…"
                )
    return violations


def folders_are_two_levels_deep(sources: Sources) -> list[str]:
    """Every module lies in a known room or in a folder of one; each folder is a package; tests and
    examples are none.
    """
    violations = []
    for path in package(sources):
        at_the_root = "/" not in path and room_of(path) in ROOT_MODULES
        if not at_the_root and (path.count("/") not in (1, 2) or room_of(path) not in ROOMS):
            violations.append(
                f"{path}: a module lies in one of the rooms {', '.join(sorted(ROOMS))}, two levels "
                "deep at most"
            )
        for folder in PurePosixPath(path).parents:
            if folder.name and f"{folder}/__init__.py" not in sources:
                violations.append(
                    f"{path}: its folder {folder}/ has no __init__.py, so no wheel would hold it"
                )
    no_packages = ("tests/", "examples/", "docs/")
    packages = [
        path
        for path in python(sources)
        if path.endswith("__init__.py") and path.startswith(no_packages)
    ]
    return violations + [f"{path}: tests and examples are no packages" for path in packages]


def packages_are_listed(sources: Sources) -> list[str]:
    """pyproject.toml names every folder of the package, and no other."""
    listed = set(tomllib.loads(sources["pyproject.toml"])["tool"]["setuptools"]["packages"])
    folders = {path.rpartition("/")[0] for path in package(sources) if path.endswith("__init__.py")}
    present = {".".join([PACKAGE, *folder.split("/")]) if folder else PACKAGE for folder in folders}
    return [f"pyproject.toml: packages lacks {name}" for name in sorted(present - listed)] + [
        f"pyproject.toml: packages names {name}, which does not exist"
        for name in sorted(listed - present)
    ]


def names_say_something(sources: Sources) -> list[str]:
    return [
        f"{path}: {part!r} says nothing about what is in it"
        for path in sources
        for part in PurePosixPath(path).with_suffix("").parts
        if part.removeprefix("test_") in EMPTY_NAMES
    ]


def dependencies_are_pinned(sources: Sources) -> list[str]:
    """Each requirement of a pyproject.toml has one version in constraints.txt, and that version
    satisfies it.
    """
    violations, pins = [], {}
    for number, line in enumerate(sources["constraints.txt"].splitlines(), 1):
        name, equals, version = line.partition("==")
        if not equals or not re.fullmatch(r"[\w.!+-]+", version):
            violations.append(f"constraints.txt:{number}: {line!r} is not name==version")
        pins[canonicalize_name(name)] = version
    for path, text in _requirements(sources):
        requirement = Requirement(text)
        pin = pins.get(canonicalize_name(requirement.name))
        if requirement.name == PACKAGE:
            continue
        if pin is None:
            violations.append(f"{path}: {text} is not pinned in constraints.txt")
        elif not requirement.specifier.contains(pin, prereleases=True):
            violations.append(
                f"constraints.txt: {requirement.name}=={pin} is outside {requirement.specifier}"
            )
    return violations


def _requirements(sources: Sources) -> Iterator[tuple[str, str]]:
    """Yields the path of a pyproject.toml and one of its requirements: the core's, the satellites'."""
    for path in sources:
        if PurePosixPath(path).name == "pyproject.toml":
            settings = tomllib.loads(sources[path])
            project = settings["project"]
            extras = project.get("optional-dependencies", {}).values()
            groups = (settings["build-system"]["requires"], project["dependencies"], *extras)
            yield from ((path, text) for group in groups for text in group)


def sources_are_finished_and_portable(sources: Sources) -> list[str]:
    """No path of one machine, no note to oneself."""
    violations = []
    for path, text in sources.items():
        for number, line in enumerate(text.splitlines(), 1):
            if MACHINE_PATH.search(line):
                violations.append(f"{path}:{number}: a path of one machine: {line.strip()}")
            if UNFINISHED.search(line):
                violations.append(f"{path}:{number}: plans belong to issues: {line.strip()}")
    return violations


# Sizes. Each is a ratchet: it may be lowered, and is raised only with a reason that a reader accepts.

FOLDER_MODULES = 12  # __init__.py not counted
FILE_LINES = {"train/loop.py": 200, "train/run.py": 300}
CORE_LINES = 72_250
BRANCHES = 8  # of a forward pass
TOP_FOLDERS, TOP_MODULES = 15, 3
PRIVATE_NAMES = 6  # of torch and Ray


def folders_are_small(sources: Sources) -> list[str]:
    """A folder holds as many modules as a reader takes in at once."""
    folders = (PurePosixPath(path) for path in package(sources))
    count = Counter(path.parent for path in folders if path.name != "__init__.py")
    return [
        f"{folder}: {number} modules; a folder holds {FOLDER_MODULES}, so group them"
        for folder, number in count.items()
        if number > FOLDER_MODULES
    ]


def the_loop_is_short(sources: Sources) -> list[str]:
    return [
        f"{path}: {lines} lines; it has at most {most}"
        for path, most in FILE_LINES.items()
        if (lines := sources.get(path, "").count("\n")) > most
    ]


def the_core_is_small(sources: Sources) -> list[str]:
    lines = sum(text.count("\n") for text in package(sources).values())
    return [f"the core has {lines} lines; at most {CORE_LINES}"] if lines > CORE_LINES else []


def the_top_is_small(sources: Sources) -> list[str]:
    folders = {path.split("/")[0] for path in sources if "/" in path and not path.startswith(".")}
    modules = [path for path in python(sources) if "/" not in path]
    violations = []
    if len(folders) > TOP_FOLDERS:
        violations.append(f"{len(folders)} folders at the top; at most {TOP_FOLDERS}")
    if len(modules) > TOP_MODULES:
        violations.append(f"{len(modules)} modules at the top: {modules}; at most {TOP_MODULES}")
    return violations


def private_names_of_others_are_few(sources: Sources) -> list[str]:
    """A release of torch or Ray may change them without notice."""
    native = {path: text for path, text in sources.items() if path.endswith((".cpp", ".h", ".cu"))}
    texts = package(sources) | native
    names = {name for text in texts.values() for name in PRIVATE.findall(text)}
    most = f"{len(names)} private names of other libraries; at most {PRIVATE_NAMES}"
    return [f"{most}: {', '.join(sorted(names))}"] if len(names) > PRIVATE_NAMES else []


def classes_have_a_name_of_their_own(sources: Sources) -> list[str]:
    """An exported model's code (export/hf/*_moebius.py) has the names of the classes it repeats."""
    found: dict[str, list[str]] = {}
    for path, text in package(sources).items():
        if not path.endswith("_moebius.py"):
            for node in ast.walk(ast.parse(text)):
                if isinstance(node, ast.ClassDef):
                    found.setdefault(node.name, []).append(path)
    return [f"{name}: {', '.join(paths)}" for name, paths in found.items() if len(paths) > 1]


def forward_passes_have_few_branches(sources: Sources) -> list[str]:
    branches = (ast.If, ast.IfExp, ast.For, ast.While, ast.BoolOp, ast.comprehension)
    return [
        f"{path}:{node.lineno}: {node.name} has {count} branches; at most {BRANCHES}"
        for path, text in package(sources).items()
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.FunctionDef) and node.name in ("forward", "__call__")
        if (count := sum(isinstance(part, branches) for part in ast.walk(node))) > BRANCHES
    ]


RULES: list[Rule] = [
    heavy_libraries_are_not_imported_by_call,
    satellites_use_the_public_surface,
    imports_are_relative_inside_and_absolute_outside,
    folders_are_two_levels_deep,
    packages_are_listed,
    names_say_something,
    dependencies_are_pinned,
    sources_are_finished_and_portable,
    folders_are_small,
    the_loop_is_short,
    the_core_is_small,
    the_top_is_small,
    private_names_of_others_are_few,
    classes_have_a_name_of_their_own,
    forward_passes_have_few_branches,
]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_the_tree_keeps(rule: Rule, sources: Sources) -> None:
    violations = rule(sources)
    assert not violations, "\n" + "\n".join(violations)


# The rules can fail -------------------------------------------------------------------------------------------------

PYPROJECT = """
[build-system]
requires = ["setuptools>=77"]
[project]
dependencies = ["torch>=2.11,<3"]
optional-dependencies = { cluster = ["ray>=2.50"], test = ["moebius[cluster]"] }
[tool.setuptools]
packages = ["moebius", "moebius.model"]
"""
SOUND: Sources = {
    "pyproject.toml": PYPROJECT,
    "constraints.txt": "setuptools==80.0\ntorch==2.13.0\nray==2.60.0\n",
    "__init__.py": "",
    "model/__init__.py": "",
    "model/moe.py": "from . import routing\nfrom .routing import Routes\nfrom .. import __version__\n",
    "model/routing.py": "import torch\n",
    "tests/test_moe.py": "import moebius.model.moe\nfrom golden import case\n",
}
# fmt: off
FAULTS: list[tuple[Rule, Sources, str]] = [
    (classes_have_a_name_of_their_own, {"model/a.py": "class Key: ...", "kernels/b.py": "class Key: ..."}, r"^Key: "),
    (forward_passes_have_few_branches, {"model/a.py": "def forward(x):\n" + "    if x: x = 1\n" * 9}, r"a.py:1: forward has 9"),
    (heavy_libraries_are_not_imported_by_call, {"cli/main.py": "import_module('ray')"}, r"cli/main.py: ray is imported"),
    (satellites_use_the_public_surface, {"satellites/dashboard/a.py": "from moebius.train import loop"}, r"dashboard imports"),
    (satellites_use_the_public_surface, {"satellites/conform/a.py": "import moebius"}, r"conform imports moebius"),
    (imports_are_relative_inside_and_absolute_outside, {"model/a.py": "import moebius.kernels"}, r"must be imported relatively"),
    (imports_are_relative_inside_and_absolute_outside, {"cli/main.py": "from train import loop"}, r"it is moebius.train.loop"),
    (imports_are_relative_inside_and_absolute_outside, {"tests/a.py": "from .golden import case"}, r"only the package"),
    (folders_are_two_levels_deep, {"model/deep/er/a.py": ""}, r"model/deep/er/a.py: a module lies in"),
    (folders_are_two_levels_deep, {"kernels/a.py": ""}, r"kernels/a.py: its folder kernels/ has no __init__.py"),
    (folders_are_two_levels_deep, {"tests/model/__init__.py": ""}, r"tests and examples are no packages"),
    (packages_are_listed, {"kernels/__init__.py": ""}, r"packages lacks moebius.kernels"),
    (packages_are_listed, {"pyproject.toml": PYPROJECT.replace(".model", ".attic")}, r"names moebius.attic"),
    (names_say_something, {"model/utils.py": ""}, r"model/utils.py: 'utils'"),
    (dependencies_are_pinned, {"constraints.txt": "setuptools==80\ntorch==2.13\n"}, r"ray>=2.50 is not pinned"),
    (dependencies_are_pinned, {"constraints.txt": "setuptools==80\ntorch==2.9\nray==2.60"}, r"torch==2.9 is outside"),
    (folders_are_small, {f"model/f{n}.py": "" for n in range(FOLDER_MODULES)}, r"model: 14 modules"),
    (the_loop_is_short, {"train/loop.py": "\n" * 201}, r"train/loop.py: 201 lines"),
    (the_top_is_small, {f"folder{n}/a.md": "" for n in range(TOP_FOLDERS)}, r"17 folders at the top"),
    (the_top_is_small, {f"{name}.py": "" for name in "abc"}, r"4 modules at the top"),
    (private_names_of_others_are_few, {
        "model/a.py": "".join(f"torch._C.name{n}\n" for n in range(PRIVATE_NAMES + 1)),
    }, r"7 private names of other libraries; at most 6: torch._C.name0"),
    (the_core_is_small, {"model/a.py": "\n" * CORE_LINES}, r"the core has \d+ lines"),
    (sources_are_finished_and_portable, {"docs/a.md": "in " + "/".join(["", "home", "me"])}, r"docs/a.md:1: a path of one"),
    (sources_are_finished_and_portable, {"model/a.py": "# " + "TO" + "DO"}, r"model/a.py:1: plans belong to issues"),
]
# fmt: on


def test_every_rule_accepts_a_sound_tree_and_finds_the_planted_faults() -> None:
    assert {rule for rule, _, _ in FAULTS} == set(RULES)
    for rule, fault, message in FAULTS:
        assert rule(SOUND) == []
        violations = rule(SOUND | fault)
        assert any(re.search(message, line) for line in violations), (message, violations)


@pytest.mark.parametrize("room", ["kernels", "data_pipeline"])
def test_a_room_opens_only_as_part_of_the_package(room: str) -> None:
    subprocess.run([sys.executable, "-c", f"import moebius.{room}"], cwd=ROOT, check=True)
    tried = subprocess.run(
        [sys.executable, "-c", f"import {room}"], cwd=ROOT, capture_output=True, text=True
    )
    assert tried.returncode == 1
    assert f"ImportError: import moebius.{room}: the repository root is the package" in tried.stderr


# The configuration --------------------------------------------------------------------------------------------------


def keys_of(section: type[BaseModel], path: str = "") -> set[str]:
    """Returns the dotted keys of a section; of one that comes in kinds, those of every kind."""
    keys = set()
    for name, field in section.model_fields.items():
        below = list(sections_in(field.annotation))
        keys |= {f"{path}{name}"} if not below else set()
        for inner in below:
            keys |= keys_of(inner, f"{path}{name}.")
    return keys


def sections_in(annotation: Any) -> Iterator[type[BaseModel]]:
    """Yields the configurations that an annotation allows."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for argument in get_args(annotation):
        yield from sections_in(argument)


def test_the_configuration_has_few_keys() -> None:
    """Keys of routers aside, which each router adds for itself."""
    keys = keys_of(Config)
    assert {"model.attention.positions.kind", "train.steps", "prepare.tokenizer"} <= keys
    assert len(keys) <= 208
