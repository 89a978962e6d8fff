"""Tests the start of a job: what is refused before it, what it says, and the record of its code."""

import contextlib
import io
import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from bytes_run import prepare_bytes, train_bytes
from rich.console import Console
from tiny_job import write_paragraphs

from moebius import __version__
from moebius.cluster import launch as module
from moebius.cluster.job import JOURNAL, Launch, begin_submission
from moebius.cluster.launch import (
    Code,
    begin_run,
    code_here,
    launch_here,
    opened_folder,
    record_code,
    refusals,
)
from moebius.cluster.report.run_report import read_report
from moebius.cluster.supervise.job_supervisor import supervise
from moebius.data_pipeline.make.prepare import prepare
from moebius.data_pipeline.manifest import read_manifest
from moebius.data_pipeline.prepare_config import PrepareConfig
from moebius.data_pipeline.read.corruption import open_fetcher
from moebius.data_pipeline.read.samples import OrderedSamples
from moebius.train.config.resolve import resolve
from moebius.train.config.run_config import Config
from moebius.train.families.start import start_from
from moebius.train.record.run_folder import if_changed, passes_note, place_data, stored_config
from tests.cluster.pretended import PretendedNode, makes_steps, with_result


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    """Returns the run folder of a run of two steps."""
    folder = tmp_path_factory.mktemp("launch")
    return train_bytes(prepare_bytes(folder), folder / "run")


@pytest.fixture
def run_dir(trained, tmp_path) -> Path:
    return Path(shutil.copytree(trained, tmp_path / "run"))


def changed(run_dir: Path, **changes: dict) -> Config:
    """Returns the configuration of the run of this folder with changed values."""
    values = stored_config(run_dir).model_dump(mode="json")
    for section, values_there in changes.items():
        values[section] |= values_there
    return Config.model_validate(values)


def start(run_dir: Path, **changes: dict) -> str:
    """Starts the run of this folder with changed values, without any rank; returns what it says."""
    config, said = changed(run_dir, **changes), io.StringIO()
    console = Console(file=said, width=400)
    try:
        refusals(config, run_dir)
        with opened_folder(config, run_dir):
            begin_run(config, launch_here(config, run_dir), console)
    except ValueError as error:
        return f"{said.getvalue()}refused: {error}"
    return said.getvalue()


def test_a_run_says_where_it_continues_once_nothing_is_left_to_refuse_it(run_dir, tmp_path):
    of_bpe = {"directory": str(prepare_bytes(tmp_path, tokenizer="bpe"))}
    text = str(write_paragraphs(tmp_path, paragraphs=40))
    prepare(PrepareConfig(input=(text,), tokenizer="bytes", vocab_size=257), tmp_path / "other")
    refused: dict[str, dict[str, dict]] = {
        "holds another run": {"optim": {"learning_rate": 1.0}},
        "was prepared with another tokenizer": {
            "data": of_bpe | {"override_position": True},
            "prepare": {"tokenizer": "bpe"},
        },
        "data or their order differ": {"data": {"directory": str(tmp_path / "other")}},
        "they are used up before sample": {
            "data": {"max_epochs": {"text": 1}, "override_position": True},
            "train": {"steps": 10_000},
        },
    }
    for told, changes in refused.items():
        said = start(run_dir, **{"train": {"steps": 9}, **changes})
        assert told in said
        assert "continues" not in said.partition("refused: ")[0]
        assert not (run_dir / JOURNAL).exists()
    said = start(run_dir, train={"steps": 9})
    assert re.match(r"9 steps over [\d,]+ tokens are 0\.\d+ passes\n", said)
    assert said.endswith("continues from the checkpoint of step 2, to step 9\n")


def stored_as(run_dir: Path, **changes: dict) -> None:
    changed(run_dir, **changes).save(run_dir / "config.json")


@pytest.mark.parametrize("change", [{}, {"steps": 1}])
def test_a_run_without_a_step_to_make_is_refused(run_dir, change):
    said = start(run_dir, train=change)
    assert f"finished at step 2, and train.steps is {change.get('steps', 2)}; to continue" in said
    assert "train.steps=4" in said
    assert not (run_dir / JOURNAL).exists()


def test_a_run_that_was_killed_after_its_last_checkpoint_may_end(run_dir):
    (run_dir / "result.json").unlink()
    assert "continues from the checkpoint of step 2, to step 2\n" in start(run_dir)


LINEAR = {
    "schedule": "linear",
    "warmup_steps": 0,
    "decay_steps": "auto",
    "final_fraction": 0.0,
    "learning_rate": 1e-3,
}


@pytest.mark.parametrize(
    ("optim", "change", "told"),
    [
        ({}, {}, "0.000778 at step 3, 0.000111 at step 9; before: 0.0005 at step 2"),
        (
            {"decay_steps": 2},
            {},
            "refused: {}: the decay ended at step 2, so all steps from 3 to 9",
        ),
        ({"decay_steps": 0.1}, {}, "from 3 to 9 have the rate 0; "),
        ({"decay_steps": 5}, {}, "0.0006 at step 3, 0 at step 9; before: 0.0008 at step 2"),
        (
            {"decay_steps": 2, "schedule": "cosine", "final_fraction": 0.5},
            {},
            "have the rate 0.0005; ",
        ),
        ({"schedule": "constant", "final_fraction": 0.1}, {}, "0.001 at step 3, 0.001 at step 9;"),
        (
            {},
            {"decay_steps": 1},
            "refused: {}: the decay ended at step 1, so all steps from 3 to 9",
        ),
    ],
)
def test_a_continued_run_is_told_its_rates_and_what_to_type_if_they_have_ended(
    run_dir, optim, change, told
):
    stored_as(run_dir, optim=LINEAR | optim)
    said = start(run_dir, train={"steps": 9}, optim=change)
    assert told.format(run_dir) in said
    has_ended = "the decay ended" in said
    assert (run_dir / JOURNAL).exists() == ("refused" not in said)
    assert has_ended == ("the rate 0" in said) == ("optim.decay_steps=auto" in said)
    if has_ended:  # the advice is taken
        (run_dir / JOURNAL).unlink(missing_ok=True)
        said = start(run_dir, train={"steps": 9}, optim={"decay_steps": "auto"})
        assert "learning rate: 0.0" in said
        assert "the decay ended" not in said


def test_a_run_whose_own_decay_had_ended_goes_on_as_it_was_planned(run_dir):
    stored_as(run_dir, train={"steps": 9}, optim=LINEAR | {"decay_steps": 2})
    said = start(run_dir)
    assert "from 3 to 9 have the rate 0; " in said
    assert "continues from the checkpoint of step 2" in said


def test_a_new_run_and_muons_matrices_are_told_their_rates(run_dir):
    shutil.rmtree(run_dir / "checkpoints")
    (run_dir / "metrics.jsonl").unlink()
    muon = {"kind": "muon", "muon": {"learning_rate": 3e-3}, "learning_rate": 1e-3}
    said = start(run_dir, optim=LINEAR | muon)
    assert "rate: 0.001 at step 1, 0.0005 at step 2; Muon's matrices have 3 times this rate" in said


def test_a_branch_is_told_its_trunks_rates_beside_its_own(run_dir, tmp_path):
    stored_as(run_dir, optim=LINEAR)
    branch = start_from(f"{run_dir}@2", None, ["train.steps=9", "optim.schedule=constant"])
    said = io.StringIO()
    console = Console(file=said, width=400)
    refusals(branch.config, tmp_path / "branch", branch.source)
    with opened_folder(branch.config, tmp_path / "branch", branch.source):
        begin_run(branch.config, launch_here(branch.config, tmp_path / "branch"), console)
    assert "0.003 at step 9; before: 0.002 at step 2\n" in said.getvalue()


def test_a_run_that_lost_its_configuration_goes_on_with_that_of_its_checkpoint(run_dir, tmp_path):
    (run_dir / "config.json").unlink()
    assert "holds another run (optim.learning_rate" in start(run_dir, optim={"learning_rate": 1.0})
    said = start(run_dir, train={"steps": 9})
    assert "config.json is missing; the newest checkpoint has the run's configuration" in said
    assert "continues from the checkpoint of step 2, to step 9" in said
    launch = launch_here(changed(run_dir, train={"steps": 9}), run_dir)
    supervise(
        launch,
        PretendedNode(
            run_dir, [makes_steps(3, 9, then=with_result('{"state": "finished", "step": 9}'))]
        ),
    )
    assert Config.load(run_dir / "config.json").train.steps == 9


def test_a_run_of_many_passes_is_advised_against(run_dir, tmp_path):
    config = Config.load(run_dir / "config.json")
    many = config.model_copy(update={"train": config.train.model_copy(update={"steps": 3000})})
    tokens = read_manifest(config.data.directory).num_tokens("train")
    passes = f"{3000 * 4 * 64 / tokens:,.0f} passes: after some four, repeated text adds ever less"
    assert f"3,000 steps over {tokens:,} tokens are {passes}" in passes_note(many)
    assert not passes_note(place_data(Config(), tmp_path))


@pytest.mark.parametrize("packing", ["concat", "best_fit"])
def test_epochs_are_counted_in_prepared_data_and_a_new_length_is_told(run_dir, packing):
    data = {"packing": packing, "override_position": True}
    said = start(
        run_dir, data=data, train={"epochs": 2}, optim={"decay_steps": None, "warmup_steps": 0}
    )
    config = Config.load(run_dir / "config.next.json")
    samples = OrderedSamples(config.data, open_fetcher(config.data))
    rows = samples.num_rows()
    assert not samples.prepare(0, rows + 1)
    assert samples.order.refs_at(0, rows + 1).epochs.tolist() == [0] * rows + [1]
    assert config.train.epochs == 2
    assert config.train.steps == 2 * rows // config.train.global_batch
    assert f"at step {config.train.steps:,}; before: " in said


def test_text_that_a_user_names_must_be_that_of_its_folder(run_dir, tmp_path):
    """But a run that has begun goes on, and one whose text nobody names again needs none."""
    shards, text = prepare_bytes(tmp_path), tmp_path / "text.jsonl"
    words = ["prepare.tokenizer=bytes", "prepare.validation_fraction=0.2", "data.directory="]
    recipe = {"recipe": lambda: Config.load(run_dir / "config.json")}
    named = resolve("recipe", [*words, f"prepare.input=['{text}']"], recipe)
    placed = place_data(resolve("recipe", words, recipe), tmp_path)  # where only its text is known
    stored = Config.model_validate(placed.model_dump())
    assert placed == stored
    for config, folder, expected in (
        (named, tmp_path / "new", "refuse"),
        (placed, tmp_path / "new", "refuse"),
        (named, run_dir, "tell"),
        (stored, tmp_path / "new", "ignore"),
    ):
        assert if_changed(config, folder) == expected
    with open(text, "a") as file:
        file.write('{"text": "one more line"}\n')
    said: list[str] = []
    prepare(named.prepare, shards, if_changed="tell", on_progress=lambda one: said.append(one.news))
    assert [news for news in said if news.startswith("the run goes on with its data as it is")]


def test_a_start_that_is_refused_leaves_no_new_folder(run_dir, tmp_path):
    config = changed(run_dir, train={"steps": 9})
    new, kept = tmp_path / "new" / "mine", set(run_dir.rglob("*"))
    for folder in (new, run_dir):
        with contextlib.suppress(KeyboardInterrupt), opened_folder(config, folder):
            assert (folder / "config.json").is_file()
            raise KeyboardInterrupt
    assert not new.parent.exists()
    assert set(run_dir.rglob("*")) == kept


def test_a_job_s_code_and_software_are_in_its_folder_and_its_status(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "code_here", lambda: Code("1.2", "abcdef", True))
    begin_submission(Launch(str(tmp_path)), commit=record_code(tmp_path).words())
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
