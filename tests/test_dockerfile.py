"""The Dockerfile's promises, as far as reading can tell: no image can be built here."""

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def instructions() -> list[tuple[str, str]]:
    """Returns every instruction with its words, continued lines joined."""
    text = re.sub(r"\\\n\s*", "", (ROOT / "Dockerfile").read_text(encoding="utf-8"))
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    return [(line.split(" ", 1)[0], line.split(" ", 1)[1]) for line in lines]


def test_it_has_stages_runs_as_user_1000_and_pins_every_package() -> None:
    found = instructions()
    assert [name for name, _ in found].count("FROM") == 2
    last_stage = found[max(at for at, (name, _) in enumerate(found) if name == "FROM") :]
    users = [words for name, words in last_stage if name == "USER"]
    assert users == ["1000:1000"], "by number, so that Kubernetes can see that it is not root"
    after_user = [name for name, _ in last_stage[last_stage.index(("USER", "1000:1000")) :]]
    assert "RUN" not in after_user
    installs = [words for name, words in found if name == "RUN" and "pip install" in words]
    assert len(installs) == 2
    assert all("-c constraints.txt" in words for words in installs)
    assert not [words for name, words in found if name == "ADD" or "curl" in words]


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
