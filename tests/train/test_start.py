"""Ranks that would run differently do not start, and each of them says why."""

import sys
from pathlib import Path

import pytest
from parts import make_config
from world import run_ranks

from moebius.distributed.process import agreement
from moebius.distributed.process.agreement import AgreementError
from moebius.distributed.process.process import start_process
from moebius.train import micro_batches
from moebius.train import run as run_module
from moebius.train.__main__ import main as rank_main
from moebius.train.config.run_config import Config, ConfigError, MeshConfig
from moebius.train.run import assemble, check_generation

CONFIG = make_config(model__vocab_size=8000, mesh__ep=2, kernels__backend="segments")


def assembled(run_dir: Path, difference: str) -> str:
    """Assembles a run in which rank 1 of 2 differs."""
    config = CONFIG
    with start_process("cpu", timeout_s=60) as process:
        if process.rank == 1:
            config = differ(config, difference)
        try:
            assemble(config, run_dir, process)
        except AgreementError as error:
            return str(error)
        return "assembled"


def differ(config: Config, difference: str) -> Config:
    if difference == "config":
        return config.model_copy(
            update={"mesh": MeshConfig(ep=1)}
        )  # its groups would wait for each other for ever
    if difference == "code":
        run_module.code_facts = lambda: (
            agreement.code_facts() | {"code model/moe.py": "0123456789abcdef"}
        )  # type: ignore[assignment]
    if difference == "machine":

        def cannot(*_args):
            raise ValueError("there is no C++ compiler")

        run_module.resolve_backend = cannot
    if difference == "loops":
        micro_batches.loops_of = lambda depth, mean, seed, step, sequence: mean + step % 2
    if difference == "model":
        built = run_module.build_model

        def another(model, *args, **options):
            return built(model.changed({"feed_forward.d_expert": 16}), *args, **options)

        run_module.build_model = another
    return config


@pytest.mark.quick(3)
@pytest.mark.parametrize(
    ("difference", "told"),
    [
        ("config", "config mesh.ep: 2 on rank 0; 1 on rank 1"),
        ("code", "0123456789abcdef on rank 1"),
        (
            "machine",
            "kernels.backend on the rank's machine: segments on rank 0; there is no C++ compiler "
            "on rank 1",
        ),
        ("loops", "loops of the first steps: 2 2 2"),
        ("model", "w_up: [4, 16, 8] float32 on rank 0; [4, 16, 16] float32 on rank 1"),
    ],
)
def test_a_rank_that_differs_ends_all_of_them_with_the_difference(
    difference: str, told: str, tmp_path: Path
) -> None:
    first, second = run_ranks(assembled, 2, tmp_path, difference)
    assert first == second
    assert told in first


def left_alone(run_dir: Path) -> str:
    """Rank 1 leaves the joined world; the other waits for it without a margin."""
    run_module._COMPARE_S = 0.1
    with start_process("cpu", timeout_s=60) as process:
        if process.rank == 1:
            return "elsewhere"
        with pytest.raises(AgreementError) as error:
            assemble(CONFIG, run_dir, process)
        return str(error.value)


def test_a_rank_that_does_not_come_to_compare_is_named(tmp_path: Path) -> None:
    first, _ = run_ranks(left_alone, 2, tmp_path)
    assert first.startswith("rank 1 of 2 did not come within 0.1 s to compare the run")


def test_a_folder_of_a_job_is_refused_to_ranks_that_it_has_not_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MOEBIUS_GENERATION", raising=False)
    assert check_generation(tmp_path) == 0
    (tmp_path / "generation").write_text("3")
    with pytest.raises(
        ConfigError, match=r"belongs to a job, and only its supervisor starts ranks; continue it"
    ):
        check_generation(tmp_path)
    monkeypatch.setenv("MOEBIUS_GENERATION", "3")
    assert check_generation(tmp_path) == 3


def test_a_rank_is_started_with_the_folder_of_its_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["train"])
    with pytest.raises(SystemExit, match=r"usage: python -m moebius.train RUN_DIR"):
        rank_main()


def test_ranks_that_agree_are_assembled(tmp_path: Path) -> None:
    assert run_ranks(assembled, 2, tmp_path, "nothing") == ["assembled"] * 2
