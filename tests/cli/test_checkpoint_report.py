"""Tests `moebius ckpt ls` and `verify` on a run of two checkpoints."""

import re
import shutil
from pathlib import Path

import pytest
import torch
from damage import flip
from meshes import meshed, saver_in
from world import run_ranks

from moebius.cli.data import checkpoint_report
from moebius.cli.main import main
from moebius.distributed.checkpoint.format import Checkpoint, list_checkpoints
from moebius.distributed.dispatch.expert_map import ExpertMap
from moebius.distributed.local_shard import block_shard

BANK = "group.0.feed_forward.sparse"
EXPERT_MAP = ExpertMap((3, 3), (5, 4, 3, 2, 1, 0))
META = {
    "progress": {"step": 0},
    "experts": {BANK: {"homes": EXPERT_MAP.as_dict(), "load": [1] * 6}},
}


def state() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        f"model.{BANK}.experts.w_up": torch.randn(6, 4, 5, generator=generator),
        "model.head.weight": torch.randn(9, 4, generator=generator),
        "model.final_norm.weight": torch.randn(4, generator=generator),
    }


def save_run(run_dir: Path) -> None:
    with meshed() as (process, mesh):
        name, *_ = tensors = state()
        shards = {name: block_shard((6, 4, 5), 0, 0, 6, ranks_per_copy=1, has_experts=True)}
        saver = saver_in(run_dir / "checkpoints", process, mesh, generation=0)
        for step in (5, 10):
            saver.save(step, tensors, shards, META)
        saver.wait()


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("saved") / "run"
    run_ranks(save_run, 1, run_dir)
    return run_dir


@pytest.fixture
def run_dir(saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("COLUMNS", "500")
    return Path(shutil.copytree(saved, tmp_path / "run"))


def run(capfd: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, list[str], str]:
    """Returns the exit code, the lines of the output, and the errors without line breaks."""
    with pytest.raises(SystemExit) as ended:
        main(["ckpt", *arguments])
    out, err = capfd.readouterr()
    assert "Traceback" not in err
    return int(ended.value.code or 0), out.splitlines(), re.sub(r"\s+", " ", err)


def checkpoint(run_dir: Path, step: int) -> Path:
    return run_dir / "checkpoints" / f"step_{step:08d}"


@pytest.mark.slow
def test_a_line_per_checkpoint(run_dir: Path, capfd: pytest.CaptureFixture[str]) -> None:
    code, [header, first, second], _ = run(capfd, "ls", str(run_dir))
    assert code == 0
    assert header.split() == [
        "step",
        "written",
        "MiB",
        "ranks",
        "ep",
        "shard",
        "replicate",
        "state",
    ]
    for step, line in {5: first, 10: second}.items():
        assert re.fullmatch(
            rf"\s*{step}  20\d\d-\d\d-\d\d \d\d:\d\d:\d\d  0\.0 +1 +1 +1 +1  complete\s*", line
        ), line
    assert run(capfd, "ls", str(checkpoint(run_dir, 10)))[1] == [header, second]


def test_what_is_not_whole_is_shown_as_such(
    run_dir: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (checkpoint(run_dir, 5) / "__0_0.distcp").write_bytes(b"half")
    (checkpoint(run_dir, 10) / "manifest.json").unlink()
    (run_dir / "checkpoints" / "step_00000015.g0.tmp").mkdir()
    code, [_, first, second, third], _ = run(capfd, "ls", str(run_dir))
    assert code == 0
    assert re.search(r"__0_0\.distcp has 4 bytes instead of \d+", first)
    assert "is not a complete checkpoint: cannot read manifest.json" in second
    assert "step_00000015.g0.tmp: being written, or abandoned" in third


def test_a_checkpoint_under_the_name_of_another_step_is_shown_as_such(
    run_dir: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    checkpoint(run_dir, 10).rename(checkpoint(run_dir, 11))
    code, [_, first, second], _ = run(capfd, "ls", str(run_dir))
    assert code == 0
    assert first.rstrip().endswith("complete")
    assert re.match(r"\s*10 .*is called step_00000011, not step_00000010: was it renamed\?", second)


def test_verify_reads_all_of_a_run(run_dir: Path, capfd: pytest.CaptureFixture[str]) -> None:
    code, lines, _ = run(capfd, "verify", str(run_dir))
    words = "3 tensors, 1 of them by experts, each expert once"
    assert (code, lines) == (
        0,
        [f"step_00000005: intact ({words})", f"step_00000010: intact ({words})"],
    )
    assert run(capfd, "verify", str(run_dir), "--step", "5")[1] == lines[:1]
    assert run(capfd, "verify", str(checkpoint(run_dir, 10)))[1] == lines[1:]


def test_what_the_run_deletes_meanwhile_is_passed_over(
    run_dir: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = checkpoint(run_dir, 1)
    monkeypatch.setattr(
        checkpoint_report,
        "list_checkpoints",
        lambda folder: [Checkpoint(1, gone), *list_checkpoints(folder)],
    )
    code, lines, _ = run(capfd, "ls", str(run_dir))
    assert (code, [line.split()[0] for line in lines[1:]]) == (0, ["5", "10"])
    code, lines, _ = run(capfd, "verify", str(run_dir))
    assert (code, [line.split(":")[0] for line in lines]) == (0, ["step_00000005", "step_00000010"])


@pytest.mark.parametrize("when", ["before its size is asked", "while it is read"])
@pytest.mark.parametrize("asked", ["by its step", "by its path", "as all of a run"])
def test_what_is_deleted_before_it_was_verified_is_not_called_intact(
    when: str,
    asked: str,
    run_dir: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    at = "_size_of" if when == "before its size is asked" else "open_verified"
    then = getattr(checkpoint_report, at)

    def too_late(path: Path, *rest: object) -> object:
        shutil.rmtree(path)
        return then(path, *rest)

    monkeypatch.setattr(checkpoint_report, at, too_late)
    own = checkpoint(run_dir, 10)
    words = {
        "by its step": [str(run_dir), "--step", "10"],
        "by its path": [str(own)],
        "as all of a run": [str(run_dir)],
    }
    code, lines, err = run(capfd, "verify", *words[asked])
    assert (code, lines) == (2, [])
    assert f"{own} was deleted meanwhile; nothing was verified" in err


def test_verify_tells_all_that_is_wrong(run_dir: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Of a checkpoint with a damaged index, and of the next one."""
    flip(checkpoint(run_dir, 5) / "__0_0.distcp")
    flip(checkpoint(run_dir, 5) / "index.json")
    (checkpoint(run_dir, 10) / ".metadata").unlink()
    code, lines, said = run(capfd, "verify", str(run_dir))
    assert code == 2
    assert lines == ["step_00000005: DAMAGED", "step_00000010: DAMAGED"]
    assert "__0_0.distcp does not match its checksum" in said
    assert "index.json does not match its checksum" in said
    assert ".metadata is missing" in said
    flip(checkpoint(run_dir, 5) / "index.json")
    code, lines, said = run(capfd, "verify", str(run_dir), "--step", "5")
    assert code == 2
    assert (
        "__0_0.distcp does not match its checksum: bytes have changed (it holds experts 0-5 of model."
        in said
    )
