"""`moebius submit --emit`, and configurations that are a run's config.json."""

import json
from pathlib import Path

import pytest

from moebius.cli.configurations import resolve_config
from moebius.cli.main import main
from moebius.train.config.resolve import resolve
from moebius.train.config.run_config import ConfigError
from moebius.train.recipes.smoke import RECIPES


def answer(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[object, str]:
    with pytest.raises(SystemExit) as ended:
        main(["submit", "smoke", *words])
    printed = capsys.readouterr()
    return ended.value.code, printed.out + printed.err


def test_a_manifest_and_a_script_are_written(tmp_path: Path, capsys, monkeypatch):
    yaml = pytest.importorskip("yaml")
    monkeypatch.chdir(tmp_path)
    words = ["--emit", "kuberay", "--image", "m:1", "--claim", "runs"]
    assert answer(capsys, *words, "job.name=mine", "--output", "job.yaml") == (0, "")
    config_map, ray_job = yaml.safe_load_all(Path("job.yaml").read_text())
    data = json.loads(config_map["data"]["config.json"])["data"]
    assert data["directory"].startswith("/runs/data/")
    assert ray_job["spec"]["entrypoint"].endswith("--run-dir /runs/mine")
    words = ["--emit", "slurm", "--run-dir", "runs/mine", "--sbatch", "time=1:00"]
    code, said = answer(capsys, *words)
    assert code == 0
    assert said.startswith("#!/bin/bash\n#SBATCH --job-name=smoke\n")
    assert f"run_dir={tmp_path}/runs/mine\n" in said
    assert "#SBATCH --time=1:00\n" in said
    assert list(tmp_path.iterdir()) == [tmp_path / "job.yaml"], "nothing was started or prepared"


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--emit", "kuberay", "--claim", "runs"], "--emit kuberay needs --image"),
        (["--emit", "kuberay", "--image", "m"], "--emit kuberay needs --claim"),
        (["--emit", "slurm"], "--emit slurm needs --run-dir"),
        (["--emit", "slurm", "--run-dir", "a", "--detach"], "--emit starts nothing"),
        (["--emit", "slurm", "--run-dir", "a", "--cpus-per-rank", "0"], "at least 1"),
        (["--emit", "slurm", "--run-dir", "a", "--sbatch", "nodes=4"], "comes from the config"),
        (["--emit", "slurm", "--run-dir", "a", "job.name=$(id)"], "job.name"),
        (["--emit", "slurm", "--run-dir", "a", "job.name=a; rm -rf ~"], "job.name"),
        (["--emit", "slurm", "--run-dir", "a", "job.name=a\nb"], "job.name"),
    ],
)
def test_what_is_missing_or_refused(words, told, capsys):
    code, said = answer(capsys, *words)
    assert code == 2
    assert told in " ".join(said.split())


def test_a_runs_configuration_is_a_configuration(tmp_path):
    config = resolve("smoke", ["train.steps=7"], RECIPES)
    config.save(tmp_path / "config.json")
    path = str(tmp_path / "config.json")
    assert resolve_config(path, []) == config
    assert resolve_config(path, ["train.steps=9"]).train.steps == 9
    for text, told in (
        ("{", "is damaged, and no configuration"),
        ("[" * 99999, "is damaged, and no configuration"),
        ('{"a": 1}', "a: unk"),
    ):
        Path(path).write_text(text)
        with pytest.raises(ConfigError, match=told):
            resolve_config(path, [])
    with pytest.raises(ConfigError, match="cannot be read"):
        resolve_config(str(tmp_path / "none.json"), [])
