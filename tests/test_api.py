"""What `import moebius` offers: a recipe, its model, a run, the trained model."""

import gzip
import inspect
import json
import math
import re
import shutil
import subprocess
import sys
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from jobs import curve, standing_cluster
from meshes import meshed, model_on
from tiny_job import write_paragraphs

import moebius
from moebius import api
from moebius.cli.main import main
from moebius.cluster.job import JobError, JobStatus, RootCause, State, submitted_to
from moebius.cluster.report import run_records
from moebius.distributed.checkpoint.source import read_source
from moebius.evaluation.perplexity import measure
from moebius.train.config.resolve import resolve
from moebius.train.config.run_config import Config, ConfigError
from moebius.train.recipes.smoke import RECIPES

TINY = dict(
    model=dict(
        vocab_size=257, d_model=16, num_layers=4, layers_per_group=2,
        attention=dict(num_heads=2, d_head=8, num_experts=2),
        feed_forward=dict(num_experts=4, d_expert=8, router__top_k=2),
    ),
    data=dict(seq_len=16),
    prepare=dict(tokenizer="bytes", vocab_size=257, validation_fraction=0.2),
    train=dict(steps=2, global_batch=2, micro_batch=1, eval_rows=4),
    mesh=dict(ep=1, dp_replicate=None),
    job=dict(num_nodes=1, ranks_per_node=1, rehearse_failure_at_step=None, start_timeout_s=60),
)  # fmt: skip


class Trained(NamedTuple):
    """A run of two steps."""

    config: Config
    run_dir: Path
    status: JobStatus


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    folder = tmp_path_factory.mktemp("api")
    text = write_paragraphs(folder, paragraphs=40)
    config = moebius.recipe("smoke", **TINY, prepare__input=[text], checkpoint__every=1)
    return Trained(config, folder / "run", moebius.fit(config, folder / "run", show=False))


def test_overrides_are_single_values_in_either_form() -> None:
    words = [
        "train.steps=7",
        "model.feed_forward.router.top_k=2",
        "prepare.input=['a.txt', 'none']",
    ]
    texts = ["a.txt", "none"]
    nested = moebius.recipe(
        "smoke",
        train={"steps": 7},
        model={"feed_forward": {"router": {"top_k": 2}}},
        prepare={"input": texts},
    )
    flat = moebius.recipe(
        "smoke", train__steps=7, model__feed_forward__router__top_k=2, prepare__input=texts
    )
    assert nested == flat == resolve("smoke", words, RECIPES)
    assert moebius.recipe("smoke") == RECIPES["smoke"]()
    config = moebius.recipe("smoke", mesh__dp_replicate=None, optim__learning_rate=1e-5)
    assert (config.mesh.dp_replicate, config.optim.learning_rate) == (None, 1e-5)


def test_a_built_model_is_the_one_that_training_starts_from() -> None:
    config = moebius.recipe("smoke", **TINY)
    built = moebius.build(config)
    with meshed() as (_, mesh):
        started = model_on(mesh, config.model, seed=config.train.seed)
    for (name, own), other in zip(built.named_parameters(), started.parameters(), strict=True):
        assert torch.equal(own, other), name


def test_a_run_from_python(trained: Trained, tmp_path: Path) -> None:
    config, run_dir, status = trained
    assert (status.state, status.step) == (State.SUCCEEDED, 2)
    assert list(run_dir.parent.glob("data/*/manifest-000000.json")), "the data lie beside the run"
    assert moebius.load_config(run_dir, "train.steps=9").train.steps == 9
    with pytest.raises(ConfigError, match="holds another run"):
        moebius.fit(config.model_copy(update={"optim": RECIPES["dense"]().optim}), run_dir)
    with pytest.raises(ConfigError, match=r"did you mean train\.steps"):
        moebius.load_config(run_dir, "train.stepz=9")
    with pytest.raises(ConfigError, match="is not a run folder"):
        moebius.resume(tmp_path)


@pytest.mark.slow
def test_steps_and_evaluations_are_told_while_a_run_trains(
    trained: Trained, tmp_path: Path
) -> None:
    """A function that returns True ends the run, and so does one that raises."""
    [data] = (trained.run_dir.parent / "data").iterdir()
    words = ["train.steps=100_000", "train.eval_every=2", f"data.directory={data}"]
    config = moebius.recipe("smoke", *words, **TINY, train__log_every=1)
    told: list[dict[str, object]] = []

    def stop_early(record: dict[str, object]) -> bool:
        told.append(record)
        return record["kind"] == "eval" and record["step"] != 0

    run_dir = tmp_path / "run"
    status = moebius.fit(config, run_dir, show=False, on_record=stop_early)
    assert status.state is moebius.status(run_dir).state is State.STOPPED
    assert moebius.stop(run_dir).step == status.step
    own = [line for line in moebius.history(run_dir).records() if line["kind"] in ("train", "eval")]
    assert told == own
    first = [(line["kind"], line["step"]) for line in told[:3]]
    assert first == [("eval", 0), ("train", 1), ("train", 2)]


@pytest.mark.slow
def test_a_run_is_submitted_to_a_cluster_and_resumed_there_from_python(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    text = write_paragraphs(tmp_path, paragraphs=40)
    config = moebius.recipe("smoke", f"prepare.input={text}", **TINY)
    with standing_cluster(tmp_path, 1, cpus=4):
        done = moebius.submit(config, run_dir, address="simulated", show=False)
        assert (done.state, done.step) == (State.SUCCEEDED, 2)
        with pytest.raises(JobError, match="finished at step 2"):
            moebius.resume(run_dir, show=False)
        done = moebius.resume(run_dir, "train.steps=4", show=False)
        assert (done.state, done.step) == (State.SUCCEEDED, 4)
    assert submitted_to(run_dir) == "simulated"
    with pytest.raises(JobError, match="no simulated cluster is up"):
        moebius.resume(run_dir, "train.steps=6", show=False)


@pytest.mark.slow
def test_a_run_is_resumed_and_traced_from_python(trained: Trained, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    shutil.copytree(trained.run_dir, run_dir)
    again: list[object] = []

    def fail(record: dict[str, object]) -> None:
        again.append(record["step"])
        raise RuntimeError("enough")

    with pytest.raises(RuntimeError, match="enough"):
        moebius.resume(run_dir, "train.steps=100_000", show=False, on_record=fail)
    assert again == [3]
    last = moebius.status(run_dir).step
    assert last is not None
    traced = [f"train.steps={last + 2}", f"train.profile={{0 = [{last + 2}]}}"]
    assert moebius.resume(run_dir, *traced, show=False).state is State.SUCCEEDED
    (trace,) = (run_dir / "profile").iterdir()
    assert trace.name == f"step{last + 2:06}-rank0.json.gz"
    with gzip.open(trace) as file:
        names = {event.get("name") for event in json.load(file)["traceEvents"]}
    assert {"aten::mm", "Optimizer.step#AdamW.step"} <= names
    with pytest.raises(ConfigError, match="names rank 1, but the ranks are 0 to 0"):
        moebius.resume(run_dir, "train.profile={1 = [1]}")


@pytest.mark.parametrize(
    ("answer", "ends"),
    [
        (True, True), (np.True_, True), (torch.tensor(True), True), (np.array([1]), True), (1, True),
        (False, False), (np.False_, False), (torch.tensor(False), False), (None, False), (0.0, False),
        (np.array([True, False]), None), (torch.ones(2), None),
    ],
)  # fmt: skip
def test_the_truth_of_an_answer_ends_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answer: object, ends: bool | None
) -> None:
    asked: list[Path] = []
    monkeypatch.setattr(run_records, "request_stop", asked.append)
    with nullcontext() if ends is not None else pytest.raises(TypeError, match=r"\.all\(\) or"):
        with run_records.telling(tmp_path, lambda _record: answer):
            (tmp_path / "metrics.jsonl").write_text('{"kind": "train", "step": 1, "loss": 1.0}\n')
    assert asked == ([tmp_path] if ends in (True, None) else [])


def test_a_configuration_is_derived_from_another() -> None:
    config = moebius.recipe("dense")
    other = moebius.recipe(config, "train.steps=20", optim__learning_rate=1e-4)
    assert (other.train.steps, other.optim.learning_rate) == (20, 1e-4)
    assert other.model == config.model
    train = config.train.model_copy(update={"steps": 20})
    assert config.model_copy(update={"train": train}).train.steps == 20


@pytest.mark.parametrize(
    ("section", "update", "message"),
    [
        ("", {"d_modell": 5}, "d_modell: unknown key"),
        ("", {"model": {"d_model": 5}}, r'moebius\.recipe\(config, "model\.KEY=VALUE"\)'),
        ("model", {"d_modell": 5}, r"model\.d_modell: unknown key; did you mean d_model\?"),
        ("train", {"steps": -5}, r"train\.steps: must be an integer > 0"),
        ("prepare", {"vocab_size": 99_999}, "make them equal"),
    ],
)
def test_a_copy_of_a_configuration_is_checked(
    section: str, update: dict[str, Any], message: str
) -> None:
    config = moebius.recipe("smoke")
    if section:
        update = {section: getattr(config, section).model_copy(update=update)}
    with pytest.raises(ConfigError, match=message):
        config.model_copy(update=update)


def test_a_history_is_a_table(trained: Trained, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("pandas")
    history = moebius.history(trained.run_dir)
    assert len(history.frame()) == len(history.records())
    assert history.frame("train")["step"].tolist() == [1, 2]
    assert history.frame("train")["loss"].iloc[-1] == trained.status.loss
    assert "perplexity" in history.frame("eval")
    assert history.frame("spike").empty, "a kind that this run has not had"
    with pytest.raises(ValueError, match=r"kind 'validation': records have the kinds .*\beval\b"):
        history.frame("validation")
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(ImportError, match="pip install pandas"):
        history.frame()


@pytest.mark.slow
def test_a_checkpoint_is_exported_as_the_command_does(trained: Trained, tmp_path: Path) -> None:
    """`moebius.export` is this function, also once the package of that name has been imported."""
    pytest.importorskip("safetensors")
    assert "step 2" in moebius.export(trained.run_dir, tmp_path / "out", dtype="bf16")
    assert (tmp_path / "out" / "model.safetensors.index.json").exists()
    for first in ("moebius.export.safetensors, moebius.api", "moebius; moebius.export"):
        code = (
            f"import {first}; import moebius.export.safetensors; moebius.export('nothere', 'out')"
        )
        ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        assert "there is no such folder" in ended.stderr


def test_a_trained_model_writes_and_scores_as_the_command_does(
    trained: Trained, capfd: pytest.CaptureFixture[str]
) -> None:
    hook = sys.excepthook
    loaded = moebius.load(str(trained.run_dir))
    assert sys.excepthook is hook, "an error of this process would begin with [rank0]"
    assert loaded.step == 2
    assert loaded.config.model == trained.config.model
    wish = ["--tokens", "5", "--temperature", "0.5", "--seed", "3"]
    written = loaded.generate("one ", num_tokens=5, temperature=0.5, seed=3)
    scored = str(loaded.score("one two"))
    for words, said in ((["--prompt", "one ", *wish], written), (["--score", "one two"], scored)):
        with pytest.raises(SystemExit):
            main(["eval", str(trained.run_dir), *words])
        assert capfd.readouterr().out == f"{said}\n"
    tokens = loaded.tokenizer.encode("one")
    assert loaded.tokenizer.decode(tokens) == loaded.tokenizer.decode(tokens.tolist()) == "one"
    assert loaded.logits(tokens[None]).shape == (1, len(tokens), loaded.tokenizer.vocab_size)


def test_a_checkpoint_is_loaded_by_its_folder_and_at_other_depths(
    trained: Trained, tmp_path: Path
) -> None:
    run_dir = trained.run_dir
    checkpoint = run_dir / "checkpoints" / "step_00000002"
    deeper = moebius.load(run_dir, depth_steps=6)
    assert deeper.config.model.num_layers == 6
    loaded = moebius.load(run_dir).model.state_dict()
    for other in (moebius.load(checkpoint), deeper):
        assert all(torch.equal(own, loaded[name]) for name, own in other.model.named_parameters())
    assert Path(moebius.load(run_dir)) == checkpoint
    assert moebius.load(deeper).config == deeper.config  # also where a path is
    with pytest.raises(ValueError, match="has no averaged weights, which a run keeps with"):
        moebius.evaluate(moebius.load(run_dir), weights="average")
    for folder in (tmp_path, checkpoint.parent):
        with pytest.raises(ValueError, match="has no checkpoint"):
            moebius.load(folder)
    with pytest.raises(ValueError, match="no checkpoint of step 7"):
        moebius.load(run_dir, step=7)
    with pytest.raises(ConfigError, match="3 depth steps must be a multiple of the group of 2"):
        moebius.load(run_dir, depth_steps=3)


@pytest.mark.slow
def test_every_name_of_a_checkpoint_is_taken_everywhere(
    trained: Trained,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """RUN@STEP, its folder, a copy outside of the run, a link to it, and a run whose name has an @."""
    monkeypatch.chdir(tmp_path)
    folder = Path("runs/my@2/checkpoints/step_00000001")
    shutil.copytree(trained.run_dir, folder.parents[1])
    shutil.copytree(folder, "copied")
    Path("linked").symlink_to(folder)
    names = ["runs/my@2@1", "runs/my@2@step_00000001", folder, "copied", "linked"]
    loss = moebius.evaluate("runs/my@2", step=1, max_rows=4).result.loss
    digest = moebius.start_from("runs/my@2@1", "train.steps=4").source.digest
    for name in names:
        found = moebius.evaluate(name, max_rows=4)
        assert (found.step, found.result.loss) == (1, loss)
        assert moebius.start_from(moebius.load(name)).source.digest == digest
    for name in names[2:4]:
        assert "step 1" in moebius.export(name, f"exported_{Path(name).name}", layout="safetensors")
    for words, name in zip((["eval"], ["ckpt", "ls"], ["ckpt", "verify"]), names[1:4], strict=True):
        with pytest.raises(SystemExit, match="0"):
            main([*words, str(name)])
        assert "step_00000002" not in capfd.readouterr().out
    for name in names[:3]:
        assert moebius.load_config(name) == moebius.load_config("runs/my@2")
        assert moebius.history(name).run_dir == Path("runs/my@2")
        for words in (["data", "peek", name], ["status", name], ["simulate", name, "--ep=2"]):
            with pytest.raises(SystemExit, match="0"):
                main([*map(str, words)])
    for wrong, told in (
        ("runs/my@2@7", "no checkpoint of step 7; it has those of 1, 2"),
        ("runs/my@2@best", "the run has checkpoints of step 1, step 2"),
        ("gpt2", r"hf://org/gpt2"),
        ("Qwen/Qwen3-0.6B", r"hf://Qwen/Qwen3-0\.6B"),
    ):
        for call in (moebius.load, moebius.evaluate, moebius.start_from):
            with pytest.raises(ValueError, match=told):
                call(wrong)
    with pytest.raises(ValueError, match="two steps"):
        moebius.load("runs/my@2@1", step=2)
    with pytest.raises(JobError, match="names a checkpoint of the run"):
        moebius.stop("runs/my@2@1")


@pytest.mark.parametrize(
    "wrong",
    [None, 3, "", "x" * 5000, b"runs", ["a", "b"], [999], {}, Path("nowhere"), torch.zeros(2)],
    ids=lambda wrong: f"{wrong!r:.10}",
)  # fmt: skip
def test_a_wrong_argument_is_told_in_words(
    wrong: Any, trained: Trained, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Every public function, every argument: never an error from somewhere inside."""
    monkeypatch.chdir(tmp_path)
    run, nowhere = trained.run_dir, "/dev/null/x"
    loaded = moebius.load(run)
    tiny = moebius.recipe("smoke", **TINY)
    asked = [
        *(getattr(moebius, name) for name in ("recipe", "start_from", "size_of", "build", "load")),
        *(getattr(moebius, name) for name in ("evaluate", "load_config", "status", "stop")),
        *(loaded.logits, loaded.trace, loaded.tokenizer.encode, loaded.tokenizer.decode),
        *(moebius.history, moebius.RunHistory, moebius.Config.load, moebius.find_runs),
        *(lambda given, f=f: f(given, nowhere) for f in (moebius.prepare, moebius.fit)),
        *(lambda given, f=f: f(given, nowhere) for f in (moebius.submit, moebius.export)),
        lambda given: moebius.recipe("smoke", given),
        lambda given: moebius.load("smoke", given),  # type: ignore[call-arg]
        *(lambda given, f=f: f(tiny, nowhere, show=given) for f in (moebius.fit, moebius.submit)),
        lambda given: moebius.recipe("smoke", train=given),
        lambda given: moebius.recipe("smoke", train__steps=given),
        lambda given: moebius.start_from(run, given),
        lambda given: moebius.start_from(run, draw_anew=given),
        lambda given: moebius.start_from(run, family=given),
        lambda given: moebius.load(run, step=given),
        lambda given: moebius.load(run, depth_steps=given),
        lambda given: moebius.evaluate(run, split=given),
        lambda given: moebius.evaluate(run, max_rows=given),
        lambda given: moebius.score_tasks(given, ["piqa"], "."),
        lambda given: moebius.score_tasks(run, given, "."),
        lambda given: moebius.score_tasks(run, ["piqa"], given),
        lambda given: moebius.fit(tiny, nowhere, on_record=given),
        lambda given: moebius.fit(tiny, nowhere, data=given),
        lambda given: moebius.save(given, nowhere),
        lambda given: moebius.save(loaded, given),
        lambda given: moebius.submit(tiny, nowhere, address=given),
        lambda given: moebius.resume(given, show=False),
        lambda given: moebius.export(run, nowhere, layout=given),
        lambda given: moebius.export(run, nowhere, dtype=given),
        lambda given: moebius.history(run).frame(given),
        lambda given: loaded.generate(given, num_tokens=1),
        lambda given: loaded.generate("a", num_tokens=given),
        lambda given: loaded.generate("a", num_tokens=1, temperature=given),
        lambda given: loaded.generate("a", num_tokens=1, seed=given),
        lambda given: loaded.score(given),
        lambda given: loaded.score("ab", draws=given),
        lambda given: list(loaded.rows(split=given)),
    ]  # fmt: skip
    refused = 0
    for call in asked:
        try:
            call(wrong)
        except (TypeError, ValueError, JobError):
            refused += 1
    assert refused > len(asked) // 2


def test_what_a_wrong_argument_means_is_taken_or_said(trained: Trained) -> None:
    run = trained.run_dir
    assert moebius.recipe("smoke", ["train.steps=7", "train.seed=1"]).train.seed == 1
    assert moebius.size_of("smoke") == moebius.size_of(moebius.recipe("smoke"))
    assert moebius.start_from(run, "train.steps=7").config.train.steps == 7
    assert moebius.evaluate(trained.status, max_rows=1).step == 2
    loaded = moebius.load(run)
    for call, told in (
        (lambda: moebius.fit("smokee", "x"), "did you mean smoke"),
        (
            lambda: moebius.fit({}, "x"),  # type: ignore[arg-type]
            r'fit: config must be .* for example moebius.recipe\("smoke"',
        ),
        (lambda: moebius.fit(loaded, "x"), "is a checkpoint, not a recipe; --from"),
        (lambda: loaded.generate(["a", "b"]), "Once upon a time.*; call it once for each"),  # type: ignore[arg-type]
        (lambda: loaded.tokenizer.decode([999]), "whole numbers below 257"),
    ):
        with pytest.raises((TypeError, ValueError), match=told):
            call()


def test_a_run_is_evaluated_as_the_command_does(trained: Trained) -> None:
    found = moebius.evaluate(trained.run_dir, max_rows=4)
    assert (found.step, found.result.loss) == (2, measure(trained.run_dir, max_rows=4).result.loss)
    loaded = moebius.load(trained.run_dir)
    traces = [loaded.trace(rows) for rows in loaded.rows(max_rows=4)]
    nats = sum(each.loss_sum for each in traces)
    assert nats / sum(each.num_targets for each in traces) == pytest.approx(found.result.loss)
    tokens = traces[0].rows.tokens_BS
    alone = loaded.trace(torch.cat([tokens, tokens[:, :1]], dim=1))
    assert torch.equal(alone.hidden_LBSD, traces[0].hidden_LBSD)


@pytest.mark.slow
def test_a_run_on_rows_of_python_is_killed_and_continued(tmp_path: Path) -> None:
    """The ranks ask this process for rows, and see the same after a kill."""
    rows = np.random.default_rng(5).integers(0, 257, (60, 17)).tolist()
    words = ["mesh.ep=2", "job.ranks_per_node=2", "train.steps=5", "checkpoint.every=2"]
    given = {"data": (rows[:50], rows[50:]), "show": False}
    config = moebius.recipe("smoke", "train.log_every=1", words, **TINY)
    whole, run = tmp_path / "whole", tmp_path / "run"
    moebius.fit(config, whole, **given)
    status = moebius.fit(moebius.recipe(config, "job.rehearse_failure_at_step=4"), run, **given)
    assert (status.state, status.restarts) == (State.SUCCEEDED, 1)
    assert curve(run) == curve(whole)
    for refused in (moebius.resume, moebius.evaluate):
        with pytest.raises(ValueError, match=r"moebius.fit\(moebius.load_config"):
            refused(run)
    config = moebius.load_config(run, "train.steps=6")
    with pytest.raises(ConfigError, match=r"data.dataset: the run has 'train: 50 rows"):
        moebius.fit(config, run, data=rows)
    assert moebius.fit(config, run, **given).step == 6
    assert moebius.history(run).frame("eval")["tokens"].tolist() == [4 * 16] * 3
    assert moebius.load(run).generate("one", num_tokens=3).startswith("one")


def change(loaded: moebius.LoadedModel) -> moebius.LoadedModel:
    with torch.no_grad():
        loaded.model.embedding.mul_(0.5)
    return loaded


@pytest.mark.slow
def test_a_changed_model_goes_on(trained: Trained, tmp_path: Path) -> None:
    """It is saved, measured, exported and trained on with the weights that it has now."""
    before = moebius.evaluate(trained.run_dir, max_rows=4).result.loss
    loaded = moebius.load(trained.run_dir)
    assert moebius.evaluate(loaded, max_rows=4).result.loss == before
    saved = moebius.save(change(loaded), tmp_path / "saved")
    again = moebius.load(saved)
    tokens = torch.arange(12)[None]
    assert torch.equal(again.logits(tokens), loaded.logits(tokens))
    assert (again.step, again.config) == (2, loaded.config)
    source = read_source(saved)
    assert source is not None
    assert source.digest == moebius.start_from(trained.run_dir).source.digest
    losses = [moebius.evaluate(each, max_rows=4).result.loss for each in (loaded, saved)]
    assert losses[0] == losses[1] != before
    for name, each in (("a", loaded), ("b", saved)):
        moebius.export(each, tmp_path / name, layout="safetensors")
    a, b = ((tmp_path / name / "model.safetensors").read_bytes() for name in "ab")
    assert a == b
    one = ["train.steps=1", "train.eval_rows=4"]
    starts = [moebius.start_from(each, *one) for each in (loaded, saved, trained.run_dir)]
    for name, start in zip("cde", starts, strict=True):
        moebius.fit(start, tmp_path / name, show=False)
    c, d, e = (moebius.load(tmp_path / name).model.embedding for name in "cde")
    assert torch.equal(c, d)
    assert not torch.equal(c, e)
    assert moebius.history(tmp_path / "c").frame("eval")["loss"].iloc[0] == losses[0]
    with pytest.raises(
        ConfigError, match=r"holds a run that starts from .*, not one that starts from"
    ):
        moebius.fit(moebius.start_from(change(loaded), *one), tmp_path / "c")


def test_a_model_of_other_shapes_is_not_saved(trained: Trained, tmp_path: Path) -> None:
    loaded = moebius.load(trained.run_dir)
    loaded.model.embedding = torch.nn.Parameter(torch.zeros(300, 16))
    loaded.model.more = torch.nn.Linear(2, 2)
    for call in (
        lambda: moebius.save(loaded, tmp_path / "out"),
        lambda: moebius.start_from(loaded),
    ):
        with pytest.raises(ConfigError, match=r"embedding is \(300, 16\), not \(257, 16\)"):
            call()
    with pytest.raises(ValueError, match="exists already"):
        moebius.save(moebius.load(trained.run_dir), tmp_path)
    assert not (tmp_path / "out").exists()


def test_a_model_of_pairs_is_not_asked_about_text(trained: Trained) -> None:
    loaded = moebius.load(trained.run_dir)
    data = loaded.config.data.model_copy(update={"targets": "paired"})
    paired = replace(loaded, config=loaded.config.model_copy(update={"data": data}))
    for ask in (paired.generate, paired.score):
        with pytest.raises(ConfigError, match="pairs of inputs and labels"):
            ask("one two")


def test_a_configuration_is_counted_and_its_data_prepared(trained: Trained, tmp_path: Path) -> None:
    config = trained.config
    size = moebius.size_of(config)
    parameters = moebius.build(config).parameters()
    assert size.parameters.total == sum(each.numel() for each in parameters)
    assert size.tokens == 2 * 2 * 16
    assert size.training_flops == 3 * size.flops.forward * size.tokens
    prepared = moebius.prepare(config, tmp_path)
    assert list(Path(prepared.data.directory).glob("manifest-*.json"))
    assert moebius.prepare(prepared).data.directory == prepared.data.directory


@pytest.mark.slow
def test_the_examples_of_the_documentation_run(tmp_path: Path) -> None:
    """Runs the examples of the site's page on Python, in order, in an empty folder."""
    texts = (
        api.__doc__,
        moebius.LoadedModel.__doc__,
        *map(inspect.getdoc, (moebius.save, moebius.fit)),
    )
    shown = [re.split("\n\n(?:It sits|Args)", text or "")[0] for text in texts]
    examples = ["\n".join(re.findall(r"^    ( *\w.*)$", text, re.MULTILINE)) for text in shown]
    np.zeros((200, 129), np.uint16).tofile(tmp_path / "tokens.bin")
    assert all(f"moebius.{name}(" in examples[0] for name in ("fit", "resume", "export"))
    assert "trained.tokenizer.encode" in examples[1]
    assert all(f"moebius.{name}(" in examples[-2 + at] for at, name in enumerate(("save", "fit")))
    program = "\n".join(["import moebius, torch, numpy as np", *examples])
    program = program.replace('"smoke", ', '"smoke", "train.steps=4", ')
    program = program.replace("train.steps=200", "train.steps=5")
    command = [sys.executable, "-c", program]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=280)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "SUCCEEDED" in ended.stdout
    assert "Once upon a time" in ended.stdout


def test_a_run_that_fails_raises_its_root_cause(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cause = RootCause("rank 0: out of memory")
    failed = JobStatus(tmp_path, State.FAILED, reason="gave up", root_cause=cause)
    monkeypatch.setattr("moebius.api.train_here", lambda *_, **__: failed)
    with pytest.raises(moebius.TrainingFailed, match="gave up: rank 0: out of memory") as raised:
        moebius.fit(moebius.recipe("smoke", **TINY), tmp_path / "run")
    assert raised.value.status is failed


def test_a_run_tells_its_history(trained: Trained, tmp_path: Path) -> None:
    run_dir = trained.run_dir
    assert moebius.find_runs(run_dir.parent) == moebius.find_runs(run_dir) == [run_dir]
    history = moebius.history(run_dir)
    steps = {line["step"]: line["loss"] for line in history.records() if line["kind"] == "train"}
    assert steps == curve(run_dir)
    assert [line["step"] for line in history.new_records() if line["kind"] == "train"] == [1, 2]
    assert [entry["state"] for entry in history.new_states()][-1] == "SUCCEEDED"
    assert not [*history.new_records(), *history.new_states()], "only what is new"
    (tmp_path / "config.json").write_text("{}")
    assert moebius.history(tmp_path).records() == [], "a run that has not begun"


def test_a_history_is_read_without_torch() -> None:
    code = "import sys, moebius; moebius.RunHistory, moebius.stop; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_history_has_the_last_record_of_every_step(tmp_path: Path) -> None:
    lines = [
        {"kind": "train", "step": 1, "time": 1.0, "loss": 3.0},
        {"kind": "train", "step": 2, "time": 2.0, "loss": 2.0},
        {"kind": "start", "step": 1, "time": 3.0, "generation": 2},
        {"kind": "train", "step": 2, "time": 4.0, "loss": "nan"},
    ]
    text = "".join(json.dumps(line) + "\n" for line in lines) + '{"kind": "tra'
    (tmp_path / "metrics.jsonl").write_text(text, encoding="utf-8")
    records = moebius.history(tmp_path).records()
    assert [line["time"] for line in records] == [1.0, 3.0, 4.0]
    assert math.isnan(records[-1]["loss"])
    assert len(list(moebius.history(tmp_path).new_records())) == 4


def test_the_package_lists_its_names() -> None:
    assert set(moebius.__all__) <= set(dir(moebius))
    assert all(getattr(moebius, name).__doc__ for name in moebius.__all__ if name != "__version__")
