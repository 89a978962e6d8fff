"""Tests the record of the code that a job runs."""

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from moebius import __version__
from moebius.cluster import launch as module
from moebius.cluster.job import Launch
from moebius.cluster.launch import Code, begin_job, code_here
from moebius.cluster.report.run_report import read_report


def test_a_job_s_code_and_software_are_in_its_folder_and_its_status(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "code_here", lambda: Code("1.2", "abcdef", True))
    begin_job(Launch(str(tmp_path)))
    written = json.loads((tmp_path / "environment.json").read_text())
    assert written["moebius"] == {"version": "1.2", "commit": "abcdef", "changed": True}
    assert written["packages"]["torch"].startswith("2.")
    assert written["host"]["memory_bytes"] > 0
    assert read_report(tmp_path).record()["commit"] == "abcdef+changes"


def git(folder: Path, *words: str) -> str:
    identity = ["-c", "user.name=a", "-c", "user.email=a@b"]
    done = subprocess.run(
        ["git", "-C", str(folder), *identity, *words], capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


@pytest.mark.skipif(shutil.which("git") is None, reason="there is no git")
def test_the_commit_is_the_checkouts_own(tmp_path, monkeypatch):
    git(tmp_path, "init", "-q")
    (tmp_path / "file").write_text("one")
    git(tmp_path, "add", "file")
    git(tmp_path, "commit", "-qm", "one")
    commit = git(tmp_path, "rev-parse", "HEAD")
    monkeypatch.setattr(module, "ROOT", tmp_path)
    assert code_here() == Code(__version__, commit, False)
    assert code_here().words() == commit
    (tmp_path / "file").write_text("two")
    assert code_here().words() == f"{commit}+changes"
    monkeypatch.setattr(module, "ROOT", tmp_path / "site-packages" / "moebius")
    (tmp_path / "site-packages" / "moebius").mkdir(parents=True)
    monkeypatch.setattr(module, "_installed_from", lambda: None)
    assert code_here().words() is None, "of another project, in which it is installed"
