"""That `make test-all` gives failed tests a second chance, alone, and says so."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[1]

SOMETIMES = """
from pathlib import Path
import pytest

def test_sometimes():
    first = not Path("ran").exists()
    Path("ran").touch()
    assert not first

@pytest.mark.parametrize("number", range(6))
def test_of_many(number):
    assert Path("many").exists() is False

def test_never():
    assert not Path("never").exists()
"""


def program(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY), "PYTEST_ADDOPTS": "-p no:xdist"}
    command = [sys.executable, "-m", *arguments]
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, check=False
    )


@pytest.mark.parametrize(
    ("broken", "first", "again"), [((), 1, 0), (("never",), 1, 1), (("many",), 1, 1)]
)
def test_what_passes_alone_is_named_and_what_fails_again_or_often_stays_red(
    tmp_path, broken, first, again
):
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    (tmp_path / "test_it.py").write_text(SOMETIMES)
    for name in broken:
        (tmp_path / name).touch()
    assert program(tmp_path, "pytest", "-q").returncode == first
    second = program(tmp_path, "tests.run_again", "-q")
    assert second.returncode == again, second.stdout
    flaky = "FLAKY: test_it.py::test_sometimes failed beside others, and passed alone"
    assert (flaky in second.stdout) == (broken != ("many",))
