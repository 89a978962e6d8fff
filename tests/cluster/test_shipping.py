"""Tests the code that a job runs: recorded, and shipped."""

import hashlib
import json
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from small_corpus import sentences

from moebius import __version__
from moebius.cluster import shipped_code as record
from moebius.cluster.job import JobError, Launch, read_status
from moebius.cluster.launch import begin_job
from moebius.cluster.report.run_report import read_report
from moebius.cluster.shipped_code import (
    ROOT,
    Code,
    code_here,
    make_shipment,
    runtime_env,
    shipping,
)


def a_wheel(folder: Path, *, package: str = "moebius") -> Path:
    path = folder / "moebius-9.9-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as file:
        file.writestr(f"{package}/__init__.py", "__version__ = '9.9'\n")
        file.writestr("moebius-9.9.dist-info/METADATA", "Name: moebius\n")
    return path


def test_a_wheel_is_unpacked_and_its_hash_known(tmp_path):
    path = a_wheel(tmp_path)
    shipment = make_shipment(path, tmp_path / "into")
    assert "9.9" in (shipment.folder / "__init__.py").read_text()
    assert shipment.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()
    assert shipment.wheel == path.name


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda folder: folder / "nowhere.whl", r"cannot be read .*No such file"),
        (lambda folder: Path(__file__), "cannot be read"),
        (lambda folder: a_wheel(folder, package="other"), "contains no package 'moebius'"),
    ],
)
def test_what_is_no_wheel_of_ours_is_refused(tmp_path, make, said):
    with pytest.raises(JobError, match=said):
        make_shipment(make(tmp_path), tmp_path / "into")


def test_connections_get_it_while_it_is_shipped_and_not_later(tmp_path):
    assert runtime_env() is None
    with shipping(a_wheel(tmp_path)) as shipment:
        assert runtime_env() == {"py_modules": [str(shipment.folder)]}
    assert runtime_env() is None
    assert not shipment.folder.exists()


# What is recorded ---------------------------------------------------------------------------------


def test_a_job_s_code_and_software_are_in_its_folder_and_its_status(tmp_path, monkeypatch):
    monkeypatch.setattr(record, "code_here", lambda: Code("1.2", "abcdef", True))
    shipment = make_shipment(a_wheel(tmp_path), tmp_path / "into")
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    begin_job(Launch(str(run_dir)), shipment=shipment)
    written = json.loads((run_dir / "environment.json").read_text())
    assert written["moebius"] == {
        "version": "1.2",
        "commit": "abcdef",
        "changed": True,
        "wheel": shipment.wheel,
        "sha256": shipment.sha256,
    }
    assert written["packages"]["torch"].startswith("2.")
    assert written["host"]["memory_bytes"] > 0
    assert read_report(run_dir).record()["commit"] == "abcdef+changes"
    assert read_status(run_dir).run_dir == run_dir


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
    monkeypatch.setattr(record, "ROOT", tmp_path)
    assert code_here() == Code(__version__, commit, False)
    assert code_here().words() == commit
    (tmp_path / "file").write_text("two")
    assert code_here().words() == f"{commit}+changes"
    monkeypatch.setattr(record, "ROOT", tmp_path / "site-packages" / "moebius")
    (tmp_path / "site-packages" / "moebius").mkdir(parents=True)
    monkeypatch.setattr(record, "_installed_from", lambda: None)
    assert code_here().words() is None, "of another project, in which it is installed"


# On a cluster -------------------------------------------------------------------------------------

OTHER = f"{__version__}+brought"


@pytest.fixture(scope="module")
def brought(tmp_path_factory) -> Path:
    """Builds a wheel of this checkout's files with another version."""
    shipped = tmp_path_factory.mktemp("wheel") / "moebius-9.9-py3-none-any.whl"
    with zipfile.ZipFile(shipped, "w") as wheel:
        for name in git(ROOT, "ls-files", "*.py", "*.cpp", "*.json", "*.toml").splitlines():
            data = (ROOT / name).read_text()
            if name == "__init__.py":
                assert f'"{__version__}"' in data
                data = data.replace(f'"{__version__}"', f'"{OTHER}"')
            wheel.writestr(f"moebius/{name}", data)
    return shipped


@pytest.mark.slow
@pytest.mark.parametrize("warm", ["true", "false"])
def test_ranks_run_the_code_that_was_brought_along(tmp_path, brought, warm):
    """As forks of a template and as programs, on two nodes; the command runs its own code."""
    pytest.importorskip("ray")
    (tmp_path / "text.txt").write_text("\n".join(sentences(1, count=400)))
    changes = [
        *("job.num_nodes=2", "job.ranks_per_node=1", f"job.warm_start={warm}", "train.steps=2"),
        *(
            "train.device=cpu",
            "prepare.tokenizer=bytes",
            "prepare.vocab_size=257",
            "data.seq_len=32",
        ),
        *("model.vocab_size=257", "train.threads=1", "job.rehearse_failure_at_step=none"),
        *("mesh.ep=2", "mesh.dp_replicate=1", "train.global_batch=4", "train.micro_batch=2"),
        *("model.d_model=32", "model.attention.d_head=8", "model.feed_forward.d_expert=16"),
        *("model.feed_forward.num_experts=8", "model.feed_forward.router.top_k=2"),
        *(f"prepare.input=['{tmp_path}/text.txt']", f"data.directory={tmp_path}/data"),
    ]
    program = "from moebius.cli.main import main; main()"
    run_dir = tmp_path / "run"
    options = ["--run-dir", str(run_dir), "--ship", str(brought)]
    ended = subprocess.run(
        [sys.executable, "-c", program, "submit", "smoke", *changes, *options],
        cwd=tmp_path,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    [started] = [line for line in lines if line["kind"] == "start"]
    assert started["version"] == OTHER
    agents = [path.read_text() for path in run_dir.glob("logs/g001/node*/agent.log")]
    assert len(agents) == 2
    assert not any("is no fork" in text for text in agents)
    written = json.loads((run_dir / "environment.json").read_text())
    assert written["moebius"]["version"] == __version__
    assert written["moebius"]["sha256"] == hashlib.sha256(brought.read_bytes()).hexdigest()
