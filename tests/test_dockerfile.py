"""The Dockerfile's promises, as far as reading can tell: no image can be built here."""

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def test_it_has_stages_runs_as_user_1000_and_pins_every_package() -> None:
    text = re.sub(r"\\\n\s*", "", (ROOT / "Dockerfile").read_text(encoding="utf-8"))
    *_, last = stages = re.split(r"^FROM ", text, flags=re.MULTILINE)
    assert len(stages[1:]) == 2
    assert re.findall(r"^USER (.*)$", last, re.MULTILINE) == ["1000:1000"], "Kubernetes reads it"
    assert "\nRUN" not in last.partition("\nUSER")[2]
    installs = re.findall(r"^RUN .*pip install.*$", text, re.MULTILINE)
    assert len(installs) == 2
    assert all("-c constraints.txt" in words for words in installs)
    assert not re.findall(r"^ADD|curl", text, re.MULTILINE)


def test_it_installs_extras_that_exist_and_the_job_server() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    (named,) = re.findall(r'"\.\[([a-z,_]+)\]"', (ROOT / "Dockerfile").read_text(encoding="utf-8"))
    assert set(named.split(",")) <= project["optional-dependencies"].keys()
    assert "dashboard" in named.split(",")


def test_the_packages_sources_are_not_left_out_of_the_build() -> None:
    """A package folder in .dockerignore would be missing from the image."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    rooms = {
        name.split(".")[1] for name in settings["tool"]["setuptools"]["packages"] if "." in name
    }
    lines = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    ignored = {line for line in lines if line and not line.startswith("#")}
    assert not ignored & (rooms | {"pyproject.toml", "constraints.txt", "README.md", "LICENSE"})
