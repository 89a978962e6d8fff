"""Which checkpoints stay, here and in the second place, what says so, and what RUN@best means."""

import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from meshes import meshed, saver_in
from world import run_ranks

from moebius.data_pipeline import words
from moebius.data_pipeline.words import run_and_step
from moebius.distributed.checkpoint.checkpoint_folder import CheckpointConfig, CheckpointFolder
from moebius.distributed.checkpoint.format import find_checkpoint, list_checkpoints
from moebius.distributed.checkpoint.second_copy import SecondCopy

BEST: dict[str, Any] = {"keep_last": 1, "keep_best": "validation"}


def save_scores(run_dir: Path, keys: dict[str, Any], scores: list[tuple[int, Any]]) -> None:
    """Saves a checkpoint of every step with its score; None: nothing was measured."""
    config = CheckpointConfig(**keys)
    second = SecondCopy(config.copy_to, run_dir, config) if config.copy_to else None
    with meshed() as (process, mesh):
        saver = saver_in(run_dir / "checkpoints", process, mesh, second=second, **keys)
        for step, score in scores:
            meta: dict[str, Any] = {"config": {"checkpoint": config.model_dump(mode="json")}}
            if score is not None:
                meta["measured"] = {config.keep_best: score}
            saver.save(step, {"weight": torch.full((4,), float(step))}, {}, meta)
            saver.wait()
            saver.wait_for_copies(10)


def saved(run_dir: Path, keys: dict[str, Any], *scores: tuple[int, Any]) -> list[int]:
    """Returns the steps of a run's checkpoints after it has saved these, too."""
    run_dir.mkdir(exist_ok=True)
    run_ranks(save_scores, 1, run_dir, keys, list(scores))
    return [found.step for found in list_checkpoints(run_dir / "checkpoints")]


RULES: dict[str, tuple[dict[str, Any], list[tuple[int, Any]], list[int]]] = {
    "the earliest of equal ones": ({}, [(1, 3.0), (2, 2.0), (3, 2.0), (4, 5.0)], [2, 4]),
    "a better one takes its place": ({}, [(1, 3.0), (2, 4.0), (3, 2.5), (4, 5.0)], [3, 4]),
    "measured again after going back": ({}, [(1, 3.0), (2, 2.0), (3, 4.0), (2, 2.0)], [2, 3]),
    "one not measured is no best": ({}, [(1, None), (2, 3.0), (3, None), (4, None)], [2, 4]),
    "multiples": ({"keep_every": 2}, [(1, 1.0), (2, 2.0), (3, 3.0), (4, 4.0), (5, 5.0)], [1, 2, 4, 5]),
    "an accuracy": ({"keep_best": "piqa"}, [(1, 0.5), (2, 0.9), (3, 0.7)], [2, 3]),
}  # fmt: skip


@pytest.mark.parametrize("name", RULES)
def test_the_same_stay_here_and_in_the_second_place(name: str, tmp_path: Path) -> None:
    keys, scores, kept = RULES[name]
    keys = BEST | keys | {"copy_to": f"file://{tmp_path}/place"}
    assert saved(tmp_path / "run", keys, *scores) == kept
    assert [each.step for each in list_checkpoints(tmp_path / "place" / "run")] == kept


def test_a_damaged_score_is_none_and_what_cannot_be_read_costs_no_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, folder = tmp_path / "run", tmp_path / "run" / "checkpoints"
    assert saved(run, BEST, (1, 2.0), (2, 3.0)) == [1, 2]
    (folder / "step_00000001" / "meta.json").write_text("{")
    assert run_and_step(f"{run}@best") == (run, 2)
    delete_old = CheckpointFolder(folder, CheckpointConfig(**BEST), 1, None).delete_old
    with monkeypatch.context() as patched:
        patched.setattr(words, "json_object", Mock(side_effect=OSError("no answer")))
        delete_old(2)
    assert [found.step for found in list_checkpoints(folder)] == [1, 2]
    delete_old(2)
    assert [found.step for found in list_checkpoints(folder)] == [2]


def test_what_may_stay_is_copied_although_newer_ones_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, may_go_on, copy = tmp_path / "run", threading.Event(), SecondCopy._copy
    saved(run, BEST | {"keep_last": 9}, (1, 4.0), (2, 1.0), (3, 3.0), (4, 2.0))

    def slow(self: SecondCopy, checkpoint: Path) -> int:
        may_go_on.wait(10)
        return copy(self, checkpoint)

    monkeypatch.setattr(SecondCopy, "_copy", slow)
    second = SecondCopy(f"file://{tmp_path}/place", run, CheckpointConfig(**BEST))
    for found in list_checkpoints(run / "checkpoints"):
        second.copy_later(found.path)
    shutil.rmtree(run / "checkpoints" / "step_00000003")  # deleted before its turn
    may_go_on.set()
    second.wait(10)
    assert second.steps() == [4, 2]
    assert [record.error for record in second.poll()] == [None, None, None]


def test_ls_says_why_each_stays(
    tmp_path: Path, moebius: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    run, keys = tmp_path / "run", BEST | {"keep_every": 2}
    saved(run, keys, (1, 3.25), (2, 4.0), (3, 5.0))
    pruned = run / "checkpoints" / "step_00000003"
    shutil.copytree(pruned, tmp_path / pruned.name)
    saved(run, keys, (4, 6.0))
    shutil.move(tmp_path / pruned.name, pruned)
    _, *lines = moebius("ckpt", "ls", run).out.splitlines()
    assert [line.partition("complete")[2].strip() for line in lines] == [
        "; kept: best validation 3.25",
        "; kept: every 2",
        "; kept by nothing, will be pruned",
        "; kept: last, every 2",
    ]


def test_a_run_has_names_for_its_best_and_last(tmp_path: Path) -> None:
    run = tmp_path / "run"
    (run / "checkpoints").mkdir(parents=True)
    with pytest.raises(ValueError, match=r"run@last: a step follows the @.* checkpoints of none$"):
        run_and_step(f"{run}@last")
    saved(run, {}, (1, None))
    with pytest.raises(ValueError, match=r"which checkpoint.keep_best saves; .* of step 1$"):
        run_and_step(f"{run}@best")
    saved(run, BEST, (3, 1.0), (4, 2.0))
    assert find_checkpoint(Path(f"{run}@best")) == run / "checkpoints" / "step_00000003"
    assert find_checkpoint(Path(f"{run}@last")) == run / "checkpoints" / "step_00000004"
