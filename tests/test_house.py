"""The rules of the house (docs/architecture.md), read off the sources: floors, rooms, names,
packaging.

Every rule is a function from sources (path -> text) to violations, each one line `path:line: what
and why`. It must find none in the tree, and must find the fault that `FAULTS` plants in a made-up
tree: a rule that cannot fail proves nothing.
"""

import ast
import graphlib
import json
import re
import subprocess
import sys
import tomllib
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath
from typing import Any, get_args

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from pydantic import BaseModel
from source_tree import (
    PACKAGE,
    SATELLITES,
    Sources,
    imports_of,
    module_name,
    module_of,
    package,
    package_imports,
    pulled_in,
    python,
    read_sources,
    room_of,
)

from moebius.train.config.run_config import Config

ROOT = Path(__file__).resolve().parents[1]
Rule = Callable[[Sources], list[str]]

# Who may import whom, top floor first. Also under TYPE_CHECKING and inside functions.
MAY_IMPORT = {
    "cli": {
        *("cluster", "export", "evaluation", "train", "distributed", "planning"),
        *("model", "kernels", "data_pipeline"),
    },
    "cluster": {"evaluation", "train", "data_pipeline"},
    "planning": {"train", "distributed", "model", "kernels", "data_pipeline"},
    "export": {"evaluation", "train", "distributed", "model", "data_pipeline"},
    "evaluation": {"train", "distributed", "model", "kernels", "data_pipeline"},
    "train": {"distributed", "model", "kernels", "data_pipeline"},
    "distributed": {"model", "kernels"},
    "model": {"kernels"},
    "kernels": set(),
    "data_pipeline": set(),
}
# Three modules lie in no room. api.py holds what the package offers to Python, on the top floor beside the
# command line. __init__.py hands on its names and those that read run folders (cluster/report/), when they
# are used, and may import nothing else. plugins.py lies below all rooms.
ROOT_MODULES = {
    "__init__": {"api", "cluster"},
    "api": {
        *("cluster", "data_pipeline", "distributed", "evaluation", "export", "model", "train"),
    },
    "plugins": set(),
}
BELOW_ALL_ROOMS = "plugins"
# Single modules that a room may import beside them.
MAY_IMPORT_MODULE = {
    "cluster": (f"{PACKAGE}.distributed.process.store",),
}
NOTHING_OF_OURS = {room for room, allowed in MAY_IMPORT.items() if not allowed}
# What only one room of the package may import.
HELD_BY = {
    "ray": "cluster",
    "triton": "kernels",
    "megablocks": "kernels",
    "pyarrow": "data_pipeline",
}
EMPTY_NAMES = {"util", "utils", "helper", "helpers", "manager", "managers"}

# The patterns must not match themselves: this file is one of the sources.
MACHINE_PATH = re.compile(
    r"(?<![\w.~/-])(?:/(?:[r]oot|[h]ome|[w]ork|[U]sers|[m]nt)/|[A-Z]:\\\\?[U]sers)"
)
UNFINISHED = re.compile(r"\b(?:[T]ODO|[F]IXME|[X]XX)\b")


@pytest.fixture(scope="module")
def sources() -> Sources:
    found = read_sources(ROOT)
    assert f"{PACKAGE}" in found["pyproject.toml"]
    assert len(found) > 50, "the sources were not found"
    return found


# The rules ----------------------------------------------------------------------------------------------------------


def imports_go_down(sources: Sources) -> list[str]:
    """The floors; `__version__` of the root belongs to no room and may be read from floor 1
    upwards.
    """
    violations = []
    for path, found in package_imports(sources):
        room, target = room_of(path), found.target_room
        if target is None or target in (room, BELOW_ALL_ROOMS):
            continue
        if target == "__version__" and room not in NOTHING_OF_OURS:
            continue
        modules = MAY_IMPORT_MODULE.get(room, ())
        if any(f"{found.target}.".startswith(f"{module}.") for module in modules):
            continue
        allowed = (MAY_IMPORT | ROOT_MODULES).get(room, set())
        if target not in allowed:
            words = ", ".join(sorted(allowed)) or "nothing of ours"
            violations.append(
                f"{found.where}: {room} imports {found.target}; it may import {words}"
            )
    return violations


def heavy_libraries_stay_in_their_room(sources: Sources) -> list[str]:
    return [
        f"{found.where}: {found.top} is imported in {HELD_BY[found.top]}/ only"
        for path, found in package_imports(sources)
        if found.top in HELD_BY and room_of(path) != HELD_BY[found.top]
    ]


def the_core_knows_no_satellite(sources: Sources) -> list[str]:
    """Commands of a satellite come in through entry points, so none is imported by its name."""
    names = {f"{PACKAGE}_{name}" for name in SATELLITES}
    return [
        f"{found.where}: the core imports {found.target}, which may not be installed"
        for _, found in package_imports(sources)
        if found.top in names | SATELLITES or found.target_room in SATELLITES | {"satellites"}
    ]


def satellites_use_the_public_surface(sources: Sources) -> list[str]:
    """A satellite and its tests import names of `moebius.__all__` and nothing below; conform/ none."""
    offered = {PACKAGE, *(f"{PACKAGE}.{name}" for name in _offered(sources["__init__.py"]))}
    return [
        f"{found.where}: {room_of(path)} imports {found.target}; mend the public surface instead"
        for path, text in python(sources).items()
        if room_of(path) in SATELLITES
        for found in imports_of(path, text)
        if found.top == PACKAGE and not found.is_relative
        if room_of(path) == "conform" or found.target not in offered
    ]


def _offered(text: str) -> list[str]:
    """Returns the names of `__all__`."""
    for node in ast.parse(text).body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "__all__":
            return ast.literal_eval(node.value)
    return []


def imports_make_no_circle(sources: Sources) -> list[str]:
    """Neither between rooms nor between modules."""
    modules = {module_name(path) for path in package(sources)}
    between_modules: dict[str, set[str]] = {}
    between_rooms: dict[str, set[str]] = {}
    for path, found in package_imports(sources):
        if (target := module_of(found.target, modules)) and target != found.importer:
            between_modules.setdefault(found.importer, set()).add(target)
        if found.target_room in MAY_IMPORT and found.target_room != room_of(path):
            between_rooms.setdefault(room_of(path), set()).add(found.target_room)
    graphs = {"rooms": between_rooms, "modules": between_modules}
    return [
        f"{kind} import each other: {circle}"
        for kind, graph in graphs.items()
        if (circle := _circle(graph))
    ]


def _circle(graph: dict[str, set[str]]) -> str | None:
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        return " <- ".join(error.args[1])
    return None


def imports_are_relative_inside_and_absolute_outside(sources: Sources) -> list[str]:
    violations = []
    for path, text in python(sources).items():
        inside = path in package(sources)
        for found in imports_of(path, text):
            if found.top in MAY_IMPORT and not found.is_relative:
                violations.append(
                    f"{found.where}: {found.target} is no top-level module; it is "
                    f"{PACKAGE}.{found.target}"
                )
            elif inside and found.top == PACKAGE and not found.is_relative:
                violations.append(
                    f"{found.where}: {found.target} must be imported relatively inside the package"
                )
            elif not inside and found.is_relative and room_of(path) not in SATELLITES:
                violations.append(
                    f"{found.where}: only the package imports relatively; write {PACKAGE}.…"
                )
    return violations


def folders_are_two_levels_deep(sources: Sources) -> list[str]:
    """Every module lies in a known room or in a folder of one; each folder is a package; tests and
    examples are none.
    """
    violations = []
    for path in package(sources):
        at_the_root = "/" not in path and room_of(path) in ROOT_MODULES
        if not at_the_root and (path.count("/") not in (1, 2) or room_of(path) not in MAY_IMPORT):
            violations.append(
                f"{path}: a module lies in one of the rooms {', '.join(MAY_IMPORT)}, two levels "
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
    present = {module_name(path) for path in package(sources) if path.endswith("__init__.py")}
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
PULLED_IN = {"train/loop.py": 139}  # files
CORE_LINES = 63_500


def folders_are_small(sources: Sources) -> list[str]:
    """A folder holds as many modules as a reader takes in at once."""
    folders = (PurePosixPath(path) for path in package(sources))
    count = Counter(path.parent for path in folders if path.name != "__init__.py")
    return [
        f"{folder}: {number} modules; a folder holds {FOLDER_MODULES}, so group them"
        for folder, number in count.items()
        if number > FOLDER_MODULES
    ]


def the_loop_is_short_and_imports_little(sources: Sources) -> list[str]:
    violations = []
    for path, most in FILE_LINES.items():
        if (lines := sources.get(path, "").count("\n")) > most:
            violations.append(f"{path}: {lines} lines; it has at most {most}")
    for path, most in PULLED_IN.items():
        if path in sources and (files := len(pulled_in(path, sources))) > most:
            violations.append(f"{path}: pulls in {files} files; at most {most}")
    return violations


def the_core_is_small(sources: Sources) -> list[str]:
    lines = sum(text.count("\n") for text in package(sources).values())
    return [f"the core has {lines} lines; at most {CORE_LINES}"] if lines > CORE_LINES else []


RULES: list[Rule] = [
    imports_go_down,
    heavy_libraries_stay_in_their_room,
    the_core_knows_no_satellite,
    satellites_use_the_public_surface,
    imports_make_no_circle,
    imports_are_relative_inside_and_absolute_outside,
    folders_are_two_levels_deep,
    packages_are_listed,
    names_say_something,
    dependencies_are_pinned,
    sources_are_finished_and_portable,
    folders_are_small,
    the_loop_is_short_and_imports_little,
    the_core_is_small,
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
    (imports_go_down, {"model/a.py": "from ..distributed.mesh import Mesh"}, r"a.py:1: model imports .*distributed.mesh.Mesh"),
    (imports_go_down, {"model/a.py": "from .. import distributed"}, r"model imports moebius.distributed"),
    (imports_go_down, {"model/a.py": "from .. import kernels, train as t"}, r"model imports moebius.train"),
    (imports_go_down, {"kernels/a.py": "from .. import __version__"}, r"it may import nothing of ours"),
    (imports_go_down, {"kernels/a.py": "def f():\n    from ..model import moe"}, r"a.py:2: kernels imports moebius.model.moe"),
    (imports_go_down, {"model/a.py": "if TYPE_CHECKING:\n    import moebius.train.loop"}, r"a.py:2: model imports moebius.train"),
    (imports_go_down, {"cluster/a.py": "from ..model.moe import Sent"}, r"cluster imports moebius.model"),
    (imports_go_down, {"train/a.py": "import_module('moebius.cluster.job')"}, r"train imports moebius.cluster"),
    (imports_go_down, {"evaluation/a.py": "from ..cli import main"}, r"evaluation imports moebius.cli.main"),
    (imports_go_down, {"distributed/a/b.py": "from ...planning import planner"}, r"distributed imports moebius.planning"),
    (imports_go_down, {"planning/a.py": "from ..cluster import job"}, r"planning imports moebius.cluster"),
    (imports_go_down, {"__init__.py": "from .model import moe"}, r"__init__ imports moebius.model.moe"),
    (imports_go_down, {"__init__.py": "from .cli import main"}, r"it may import api, cluster"),
    (imports_go_down, {"cli/a.py": "from ..api import load"}, r"cli imports moebius.api.load"),
    (imports_go_down, {"api.py": "from .cli import main"}, r"api imports moebius.cli.main"),
    (heavy_libraries_stay_in_their_room, {"train/a.py": "def f():\n    import ray.util"}, r"a.py:2: ray is imported in cluster/"),
    (heavy_libraries_stay_in_their_room, {"cli/main.py": "__import__('ray')"}, r"cli/main.py:1: ray"),
    (heavy_libraries_stay_in_their_room, {"model/a.py": "from triton import jit"}, r"triton is imported in kernels/"),
    (heavy_libraries_stay_in_their_room, {"model/a.py": "import megablocks.ops"}, r"megablocks is imported in kernels/"),
    (heavy_libraries_stay_in_their_room, {"train/a.py": "import pyarrow as pa"}, r"pyarrow is imported in data_pipeline/"),
    (the_core_knows_no_satellite, {"cli/a.py": "def f():\n    import moebius_science"}, r"the core imports moebius_science"),
    (the_core_knows_no_satellite, {"train/a.py": "from ..satellites import science"}, r"imports moebius.satellites.science"),
    (satellites_use_the_public_surface, {"satellites/dashboard/a.py": "from moebius.train import loop"}, r"dashboard imports"),
    (satellites_use_the_public_surface, {"satellites/dashboard/tests/a.py": "from moebius import train"}, r"dashboard imports"),
    (satellites_use_the_public_surface, {"satellites/conform/a.py": "import moebius"}, r"conform imports moebius"),
    (imports_make_no_circle, {"model/routing.py": "from .moe import Sent"}, r"modules import each other: .*model.routing"),
    (imports_make_no_circle, {"model/routing.py": "def f():\n    from . import moe"}, r"modules import each other"),
    (imports_make_no_circle, {
        "model/a.py": "from ..kernels import b", "kernels/b.py": "", "kernels/c.py": "from ..model import routing",
    }, r"rooms import each other: .*kernels"),
    (imports_are_relative_inside_and_absolute_outside, {"model/a.py": "import moebius.kernels"}, r"must be imported relatively"),
    (imports_are_relative_inside_and_absolute_outside, {"cli/main.py": "from train import loop"}, r"it is moebius.train.loop"),
    (imports_are_relative_inside_and_absolute_outside, {"tests/a.py": "from kernels import ops"}, r"it is moebius.kernels"),
    (imports_are_relative_inside_and_absolute_outside, {"tests/a.py": "from .golden import case"}, r"only the package"),
    (folders_are_two_levels_deep, {"model/deep/er/a.py": ""}, r"model/deep/er/a.py: a module lies in"),
    (folders_are_two_levels_deep, {"attic/a.py": "", "attic/__init__.py": ""}, r"attic/a.py: a module lies in"),
    (folders_are_two_levels_deep, {"setup.py": ""}, r"setup.py: a module lies in"),
    (folders_are_two_levels_deep, {"kernels/a.py": ""}, r"kernels/a.py: its folder kernels/ has no __init__.py"),
    (folders_are_two_levels_deep, {"model/deep/a.py": ""}, r"model/deep/a.py: its folder model/deep/ has no"),
    (folders_are_two_levels_deep, {"tests/model/__init__.py": ""}, r"tests and examples are no packages"),
    (packages_are_listed, {"kernels/__init__.py": ""}, r"packages lacks moebius.kernels"),
    (packages_are_listed, {"pyproject.toml": PYPROJECT.replace(".model", ".attic")}, r"names moebius.attic"),
    (names_say_something, {"model/utils.py": ""}, r"model/utils.py: 'utils'"),
    (names_say_something, {"tests/helpers/a.py": ""}, r"'helpers'"),
    (names_say_something, {"tests/test_manager.py": ""}, r"'test_manager'"),
    (dependencies_are_pinned, {"constraints.txt": "setuptools==80\ntorch==2.13\n"}, r"ray>=2.50 is not pinned"),
    (dependencies_are_pinned, {"constraints.txt": "setuptools==80\ntorch==2.9\nray==2.60"}, r"torch==2.9 is outside"),
    (dependencies_are_pinned, {"constraints.txt": "setuptools==80\ntorch>=2.13\nray==2.60"}, r"is not name==version"),
    (dependencies_are_pinned, {"satellites/science/pyproject.toml": PYPROJECT.replace("ray>", "six>")}, r"six>.* not pinned"),
    (folders_are_small, {f"model/f{n}.py": "" for n in range(FOLDER_MODULES)}, r"model: 14 modules"),
    (the_loop_is_short_and_imports_little, {"train/loop.py": "\n" * 201}, r"train/loop.py: 201 lines"),
    (the_loop_is_short_and_imports_little, {"train/run.py": "\n" * 301}, r"train/run.py: 301 lines"),
    (the_loop_is_short_and_imports_little, {
        "train/loop.py": "from ..model import f0", **{f"model/f{n}.py": f"from . import f{n + 1}" for n in range(139)},
    }, r"pulls in 14\d files"),
    (the_core_is_small, {"model/a.py": "\n" * CORE_LINES}, r"the core has 63\d+ lines"),
    (sources_are_finished_and_portable, {"docs/a.md": "in " + "/".join(["", "home", "me"])}, r"docs/a.md:1: a path of one"),
    (sources_are_finished_and_portable, {"model/a.py": "# " + "TO" + "DO"}, r"model/a.py:1: plans belong to issues"),
]
# fmt: on


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_a_sound_tree_passes(rule: Rule) -> None:
    assert rule(SOUND) == []


@pytest.mark.parametrize(("rule", "fault", "message"), FAULTS)
def test_a_fault_is_found(rule: Rule, fault: Sources, message: str) -> None:
    violations = rule(SOUND | fault)
    assert any(re.search(message, line) for line in violations), violations


def test_every_rule_is_seen_to_fail() -> None:
    assert {rule for rule, _, _ in FAULTS} == set(RULES)


def test_without_git_the_same_modules_are_found(tmp_path: Path, sources: Sources) -> None:
    for path, text in sources.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text, encoding="utf-8")
    for made in (".venv/lib/a.py", "build/lib/b.py", "__pycache__/c.py", "moebius.egg-info/d.py"):
        (tmp_path / made).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / made).write_text("import ray")
    assert python(read_sources(tmp_path)).keys() == python(sources).keys()


# The wheel ----------------------------------------------------------------------------------------------------------

# What setuptools would put into the wheel, without building one: its own command, asked for its
# list.
ASK_SETUPTOOLS = """
import json
from setuptools.dist import Distribution
project = Distribution({"script_name": "setup.py"})
project.parse_config_files()
build = project.get_command_obj("build_py")
build.ensure_finalized()
print(json.dumps([path for _, _, path in build.find_all_modules()]))
"""


def modules_of_the_wheel(root: Path) -> set[str]:
    asked = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", ASK_SETUPTOOLS],
        cwd=root,
        check=True,
        capture_output=True,
        text=True,
    )
    return {PurePosixPath(path).as_posix() for path in json.loads(asked.stdout)}


def test_the_wheel_holds_every_tracked_module(sources: Sources) -> None:
    assert package(sources).keys() - modules_of_the_wheel(ROOT) == set()


def test_a_module_that_the_wheel_lacks_is_found(tmp_path: Path) -> None:
    for path, text in (SOUND | {"kernels/__init__.py": "", "kernels/functional.py": ""}).items():
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).write_text(text)
    settings = (
        '[project]\nname = "moebius"\nversion = "0"\n' + PYPROJECT.partition("[project]\n")[2]
    )
    (tmp_path / "pyproject.toml").write_text(settings + 'package-dir = { moebius = "." }\n')
    held = modules_of_the_wheel(tmp_path)
    assert held == {"__init__.py", "model/__init__.py", "model/moe.py", "model/routing.py"}


@pytest.mark.parametrize("room", ["kernels", "data_pipeline"])
def test_a_room_refuses_to_be_a_top_level_package(room: str) -> None:
    tried = subprocess.run(
        [sys.executable, "-c", f"import {room}"], cwd=ROOT, capture_output=True, text=True
    )
    assert tried.returncode == 1
    assert f"ImportError: import moebius.{room}: the repository root is the package" in tried.stderr


@pytest.mark.parametrize("room", ["kernels", "data_pipeline"])
def test_the_same_room_opens_as_part_of_the_package(room: str) -> None:
    subprocess.run([sys.executable, "-c", f"import moebius.{room}"], cwd=ROOT, check=True)


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
    assert len(keys) <= 161
