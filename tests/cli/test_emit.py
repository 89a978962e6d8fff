"""Tests `moebius submit --emit`, and config.json as a configuration."""

import json
from pathlib import Path

import pytest

from moebius.cli.arguments import resolve_config
from moebius.train.config.resolve import resolve
from moebius.train.config.run_config import ConfigError
from moebius.train.recipes.smoke import RECIPES


def test_a_manifest_and_a_script_are_written(tmp_path: Path, moebius, monkeypatch):
    yaml = pytest.importorskip("yaml")
    monkeypatch.chdir(tmp_path)
    words = ["submit", "smoke", "--emit", "kuberay", "--with", "image=m:1", "claim=runs"]
    manifest = moebius(*words, "job.name=mine")
    assert manifest.code == 0
    config_map, ray_job = yaml.safe_load_all(manifest.out)
    data = json.loads(config_map["data"]["config.json"])["data"]
    assert data["directory"].startswith("/runs/data/")
    assert ray_job["spec"]["entrypoint"].endswith("--run-dir /runs/mine")
    words = ["submit", "smoke", "--emit", "slurm", "--run-dir", "runs/mine", "--with", "time=1:00"]
    script = moebius(*words)
    assert script.code == 0
    assert script.out.startswith("#!/bin/bash\n#SBATCH --job-name=smoke\n")
    assert f"run_dir={tmp_path}/runs/mine\n" in script.out
    assert "#SBATCH --time=1:00\n" in script.out
    assert list(tmp_path.iterdir()) == [], "nothing was started or prepared"


SLURM = ("slurm", "--run-dir", "a")


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["kuberay", "--with", "claim=runs"], "needs --with image"),
        (["kuberay", "--with", "image=m"], "needs --with claim"),
        (
            ["kuberay", "--with", "image=m", "claim=r", "colour=red"],
            "'colour': not a key of --emit kuberay",
        ),
        (["kuberay", "--with", "image"], "write KEY=VALUE"),
        (["slurm"], "--emit slurm needs --run-dir"),
        ([*SLURM, "--detach"], "--emit starts nothing"),
        ([*SLURM, "--with", "cpus_per_rank=0"], "at least 1"),
        ([*SLURM, "--with", "nodes=4"], "comes from the config"),
        ([*SLURM, "job.name=$(id)"], "job.name"),
        ([*SLURM, "job.name=a; rm -rf ~"], "job.name"),
        ([*SLURM, "job.name=a\nb"], "job.name"),
    ],
)
def test_what_is_missing_or_refused(words, told, moebius):
    done = moebius("submit", "smoke", "--emit", *words)
    assert done.code == 2
    assert told in done.text


def test_a_runs_configuration_is_a_configuration(tmp_path):
    config = resolve("smoke", ["train.steps=7"], RECIPES)
    config.save(tmp_path / "config.json")
    path = str(tmp_path / "config.json")
    assert resolve_config(path, []) == config
    assert resolve_config(path, ["train.steps=9"]).train.steps == 9
    for text, told in (
        ("{", "is damaged .*: restore it"),
        ("[" * 99999, "is damaged .*: restore it"),
        ('{"a": 1}', "a: unk"),
    ):
        Path(path).write_text(text)
        with pytest.raises(ConfigError, match=told):
            resolve_config(path, [])
    with pytest.raises(ConfigError, match="cannot be read"):
        resolve_config(str(tmp_path / "none.json"), [])
