"""A run that starts from another run's weights: the same bits on every layout, and its own settings."""

import shutil
from pathlib import Path
from typing import Any

import pytest
from parts import make_config
from small_corpus import shards_of_words
from small_model import MODEL
from starts import LAYOUTS, loaded, on, refusal
from trained import by_step, column, different, lines, newest_state, run_training
from world import run_ranks

from moebius.data_pipeline.make.prepare import prepare
from moebius.data_pipeline.prepare_config import PrepareConfig
from moebius.distributed.checkpoint.format import CheckpointError, latest, read_meta
from moebius.distributed.checkpoint.source import SOURCE, Source, read_source
from moebius.train import loop
from moebius.train.config.run_config import Config, ConfigError
from moebius.train.families.start import start_from
from moebius.train.record.run_folder import check_data, open_run

OWN_SETTINGS = {"train__steps": 2, "optim__learning_rate": 1e-4, "train__seed": 7}


def config_of(data: Path, **changes: Any) -> Config:
    return make_config(data, model=MODEL, **({"checkpoint__every": 2} | changes))


def trained_in(run_dir: Path, config: Config) -> Path:
    """Returns the folder of a run on two ranks."""
    open_run(config, run_dir)
    run_ranks(run_training, 2, config, run_dir)
    return run_dir


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, data: Path) -> Path:
    """Returns the folder of a run of four steps, with checkpoints of steps 2 and 4."""
    config = config_of(data, mesh={"ep": 2}, train__eval_every=4)
    return trained_in(tmp_path_factory.mktemp("source") / "run", config)


def weights_of(run_dir: Path) -> dict[str, Any]:
    return {key: value for key, value in newest_state(run_dir).items() if key.startswith("model.")}


def opened(given: Path | str, config: Config, run_dir: Path) -> Config:
    """Opens the folder of a run with this configuration that starts from a source."""
    file = run_dir.with_name(f"{run_dir.name}.json")
    config.save(file)
    start = start_from(str(given), str(file))
    open_run(start.config, run_dir, start.source)
    return start.config


# The same bits -----------------------------------------------------------------------------------


@pytest.mark.quick(1)
@pytest.mark.parametrize(("world", "mesh"), LAYOUTS, ids=str)
def test_every_layout_starts_from_the_same_bits(
    world: int, mesh: dict, trained: Path, data: Path, tmp_path: Path
) -> None:
    config = config_of(data, mesh=mesh, **OWN_SETTINGS)
    found = loaded(world, opened(trained, config, tmp_path / "run"), tmp_path / "run")
    assert different(found, weights_of(trained)) == []


@pytest.mark.slow
def test_weights_take_the_precision_of_the_run(trained: Path, data: Path, tmp_path: Path) -> None:
    config = config_of(data, mesh={"ep": 2}, train__precision="bfloat16_only")
    found = loaded(2, opened(trained, config, tmp_path / "run"), tmp_path / "run")
    halved = {name: value.bfloat16() for name, value in weights_of(trained).items()}
    assert different(found, halved) == []


@pytest.mark.slow
def test_a_run_has_its_own_rate_and_steps_and_begins_where_the_source_ended(
    trained: Path, data: Path, tmp_path: Path
) -> None:
    config = config_of(data, mesh={"ep": 2}, train__eval_every=4, **OWN_SETTINGS)
    config = opened(trained / "checkpoints" / "step_00000004", config, tmp_path / "run")
    assert config.model == MODEL
    run_ranks(run_training, 2, config, tmp_path / "run")
    steps = by_step(tmp_path / "run")
    assert [*steps] == [1, 2]
    assert steps[1]["learning_rate"] < 1e-4 < by_step(trained)[1]["learning_rate"]
    assert lines(tmp_path / "run", "start")[0]["resumed_from_step"] is None
    source = read_source(tmp_path / "run")
    assert source is not None
    assert (source.step, Path(source.path).name) == (4, "step_00000004")
    found, ended = (by_step(run, "eval") for run in (tmp_path / "run", trained))
    assert found[0]["loss"] == pytest.approx(ended[4]["loss"], abs=1e-6)
    assert abs(ended[0]["loss"] - ended[4]["loss"]) > 1e-2


# Refused by all ranks, which have changed nothing ------------------------------------------------


@pytest.mark.slow
def test_a_source_that_is_gone_damaged_or_another_is_refused(
    trained: Path, data: Path, tmp_path: Path
) -> None:
    source, run_dir = shutil.copytree(trained, tmp_path / "copy"), tmp_path / "run"
    config = opened(source, config_of(data, mesh={"ep": 2}), run_dir)
    checkpoint = source / "checkpoints" / "step_00000004"
    assert "rank 1 sees another file than rank 0" in refusal(config, run_dir, on_rank=1)
    file = checkpoint / "__1_0.distcp"
    file.write_bytes(file.read_bytes()[:-9] + b"123456789")
    assert "__1_0.distcp" in refusal(config, run_dir)
    shutil.rmtree(checkpoint)
    assert "is not there: restore it, or start again with --from" in refusal(config, run_dir)
    with pytest.raises(CheckpointError, match="is not there: restore it"):  # before ranks start
        check_data(config, run_dir, is_whole=True)
    shutil.copytree(source / "checkpoints" / "step_00000002", checkpoint)
    assert "has changed since this run was started with it" in refusal(config, run_dir)
    (run_dir / SOURCE).write_text("{}")
    assert "is damaged" in refusal(config, run_dir)


# Run folders -------------------------------------------------------------------------------------


def test_a_run_with_steps_keeps_its_source_and_a_new_one_takes_another(
    trained: Path, data: Path, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    config = config_of(data)
    at_steps = [trained / "checkpoints" / f"step_0000000{step}" for step in (2, 4)]
    sources: list[Source | None] = [start_from(str(at)).source for at in (trained, at_steps[0])]
    for source in (*sources, None, sources[0]):  # no step was made yet
        open_run(config, run_dir, source)
        assert read_source(run_dir) == source
    (run_dir / "checkpoints" / "step_00000002").mkdir(parents=True)
    for source in (None, sources[0], start_from(str(at_steps[1])).source):
        open_run(config, run_dir, source)
        assert read_source(run_dir) == sources[0]
    with pytest.raises(
        ConfigError, match=r"starts from .*run, step 4 \(.*, not one that starts from .*02, step 2"
    ):
        open_run(config, run_dir, sources[1])
    branch = start_from(f"{trained}@step_00000002", None, ["train.steps=9"]).source
    with pytest.raises(ConfigError, match=r"not one that branches from .*run@2, step 2 \(digest "):
        open_run(config, run_dir, branch)
    with pytest.raises(ConfigError, match=r"starts from drawn weights, not one that starts from"):
        open_run(config_of(data, mesh={"ep": 2}), trained, sources[0])


# Branches ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trunk(tmp_path_factory: pytest.TempPathFactory, data: Path) -> Path:
    """Returns the folder of a run of 12 steps of Muon at a constant rate, with checkpoints of steps 6
    and 12.
    """
    config = config_of(
        data,
        mesh={"ep": 2, "rebalance_every": 2},
        train={"steps": 12, "skip_spikes": 8, "eval_every": 12},
        optim={"kind": "muon", "schedule": "constant", "learning_rate": 3e-3},
        checkpoint__every=6,
    )
    return trained_in(tmp_path_factory.mktemp("trunk") / "run", config)


def branched(trunk: Path, run_dir: Path, *overrides: str) -> Config:
    start = start_from(f"{trunk}@6", None, overrides)
    open_run(start.config, run_dir, start.source)
    return start.config


def meta_of(run_dir: Path) -> dict[str, Any]:
    """Returns what the newest checkpoint knows beside tensors and the configuration."""
    path = latest(run_dir / "checkpoints")
    assert path is not None
    return read_meta(path).meta | {"config": None}


@pytest.mark.slow
def test_a_branch_with_its_trunks_rates_has_its_trunks_bits(trunk: Path, tmp_path: Path) -> None:
    config = branched(trunk, tmp_path / "run")
    run_ranks(run_training, 2, config, tmp_path / "run")
    assert different(newest_state(tmp_path / "run"), newest_state(trunk)) == []
    assert meta_of(tmp_path / "run") == meta_of(trunk)
    assert [*by_step(tmp_path / "run")] == [7, 8, 9, 10, 11, 12]
    assert [*by_step(tmp_path / "run", "eval")] == [12]
    for name in ("loss", "learning_rate", "digest", "tokens"):
        assert column(tmp_path / "run", name) == column(trunk, name)[6:]
    assert lines(tmp_path / "run", "start")[0]["resumed_from_step"] == 6


class Killed(Exception):
    pass


def killed_after_the_first_step(config: Config, run_dir: Path) -> None:
    def kill(run: Any, result: Any) -> None:
        raise Killed

    loop.HOOKS = (kill,)
    with pytest.raises(Killed):
        run_training(config, run_dir)


@pytest.mark.slow
def test_a_killed_branch_decays_over_its_trunks_samples_from_the_same_bits(
    trunk: Path, tmp_path: Path
) -> None:
    for name in ("whole", "killed"):
        decay = ("optim.schedule=wsd", "optim.decay_steps=7", "train.steps=13")
        config = branched(trunk, tmp_path / name, *decay)
    run_ranks(killed_after_the_first_step, 2, config, tmp_path / "killed")
    for name in ("whole", "killed"):
        run_ranks(run_training, 2, config, tmp_path / name)
    whole, killed = (newest_state(tmp_path / name) for name in ("whole", "killed"))
    assert different(whole, killed) == []
    assert column(tmp_path / "whole") == column(tmp_path / "killed")
    assert column(tmp_path / "whole", "digest")[:6] == column(trunk, "digest")[6:]
    assert column(tmp_path / "whole")[0] == column(trunk)[6]
    rates = [3e-3 * (1 - (done / 7) ** 0.5) for done in range(7)]
    assert column(tmp_path / "whole", "learning_rate") == pytest.approx(rates)


@pytest.mark.quick(1)
@pytest.mark.parametrize(("world", "mesh"), [LAYOUTS[at] for at in (0, 2, 4, 6)], ids=str)
def test_a_branch_restores_all_of_its_trunks_state_on_every_layout(
    world: int, mesh: dict[str, Any], trunk: Path, tmp_path: Path
) -> None:
    config = branched(trunk, tmp_path / "run", *on({"rebalance_every": 0, "ep": 1} | mesh))
    found, at_6 = loaded(world, config, tmp_path / "run"), "checkpoints/step_00000006"
    shutil.copytree(trunk / at_6, tmp_path / "at" / at_6)
    assert different(found, newest_state(tmp_path / "at")) == []
    meta, expected = meta_of(tmp_path / "run"), meta_of(tmp_path / "at")
    assert meta == {key: expected[key] for key in meta}


@pytest.mark.slow
def test_a_branch_that_changes_more_than_its_rates_is_refused(
    trunk: Path, data: Path, tmp_path: Path
) -> None:
    def refused_start(*overrides: str, **options: Any) -> str:
        with pytest.raises(ConfigError) as refused:
            start_from(f"{trunk}@6", None, overrides, **options)
        return str(refused.value)

    weights = f"--from {trunk}/checkpoints/step_00000006"
    words = refused_start("train.seed=9", "optim.kind=my:one", "model.norm=pre", "optim.beta2=0.9")
    assert words == (
        f"--from {trunk}@6: a branch goes on with its trunk's model, data and optimizer, and here "
        "differ model.norm: the run has 'peri', now 'pre'; optim.kind: the run has 'muon', now "
        "'my:one'; train.seed: the run has 0, now 9; leave them as they are there, or start a new "
        f"run from the weights alone: {weights}"
    )
    assert "prepare.input: the run has" in refused_start("prepare.input=a.txt")
    assert "optim.muon.routers: the run has False, now True" in refused_start(
        "optim.muon.routers=true"
    )
    assert "goes on after step 6: set, for example, train.steps=12" in refused_start(
        "train.steps=6"
    )
    assert f"alone: {weights} --draw-anew head*" in refused_start(draw_anew=["head*"])
    config = branched(trunk, tmp_path / "run")
    seeded = config.model_copy(update={"train": config.train.model_copy(update={"seed": 9})})
    assert "train.seed: the run has 0, now 9" in refusal(seeded, tmp_path / "run")


# What fits ---------------------------------------------------------------------------------------


def started(given: Path | str, *overrides: str, draw_anew: tuple[str, ...] = ()) -> Any:
    return start_from(str(given), None, overrides, draw_anew=draw_anew)


def test_keys_that_change_no_parameter_are_free(trained: Path) -> None:
    free = ("model.num_layers=6", "model.feed_forward.router.balance=0.5", "model.norm=pre")
    start = started(trained, *free, "train.steps=9")
    assert start.config.model.num_layers == 6
    assert (start.source.drawn, start.source.ignored, start.notes) == ((), (), ())


@pytest.mark.slow
def test_other_parameters_are_drawn_only_if_asked(
    trained: Path, data: Path, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=r"embedding is \[257, 24\] there and \[300, 24\] here"):
        started(trained, "model.vocab_size=300")
    with pytest.raises(ConfigError, match=r"it lacks group.0.attention.head_gate"):
        started(trained, "model.attention.num_experts=1", "model.attention.top_k=1")
    with pytest.raises(ConfigError, match=r"--draw-anew heat\.\*: the model has no such parameter"):
        started(trained, draw_anew=("heat.*",))
    start = started(trained, "model.head_bias=false", draw_anew=("*.router.weight",))
    assert start.source.ignored == ("head.bias",)
    assert start.source.drawn == tuple(f"group.{n}.feed_forward.router.weight" for n in (0, 1))
    assert "; drawn anew: group.0.feed_forward.router.weight, " in start.source.words()
    config = start.config.model_copy(update={"mesh": config_of(data, mesh={"ep": 2}).mesh})
    open_run(config, tmp_path / "run", start.source)
    found = loaded(2, config, tmp_path / "run")
    changed = [f"model.{name}" for name in start.source.drawn]
    assert sorted(different(found, weights_of(trained))) == sorted(["model.head.bias", *changed])


def test_a_recipe_gives_everything_but_the_model(trained: Path) -> None:
    start = start_from(str(trained), "smoke", ["train.steps=3"])
    assert start.config.model == MODEL
    assert start.config.data.seq_len == 128
    assert start.notes == (f"the model is that of {trained}, and the one of smoke is not used",)
    assert start.config.prepare.tokenizer == "bytes"


# The tokenizer -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def of_words(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns the folder of a run whose data has a trained tokenizer."""
    folder = tmp_path_factory.mktemp("words")
    shards_of_words(folder, 60)
    texts = PrepareConfig(input=(f"{folder}/text.jsonl",), vocab_size=300, validation_fraction=0.2)
    prepare(texts, folder / "data")
    model = MODEL.changed({"vocab_size": 300})
    config = make_config(folder / "data", model=model, prepare=texts, checkpoint__every=4)
    open_run(config, folder / "run")
    run_ranks(run_training, 1, config, folder / "run")
    return folder / "run"


@pytest.mark.slow
def test_other_text_takes_the_tokenizer_of_the_source(of_words: Path, tmp_path: Path) -> None:
    given, data = str(of_words), str(of_words.parent / "data")
    text = f"prepare.input={tmp_path}/*.txt"
    start = start_from(given, "own_text", [text])
    assert start.config.prepare.tokenizer == data
    assert start.config.prepare.vocab_size == 300
    # without a recipe, too, and in a branch
    for at, more in (("", ()), ("@4", ("data.override_position=true", "train.steps=9"))):
        own = start_from(f"{given}{at}", None, [text, *more]).config
        found = (own.data.directory, own.prepare.tokenizer, own.prepare.vocab_size)
        assert found == ("", data, 300)
    with pytest.raises(ConfigError, match="know the ids of another tokenizer"):
        start_from(given, "own_text", [text, "prepare.tokenizer=bytes", "prepare.vocab_size=257"])
    anew = [text, "prepare.tokenizer=bytes", "prepare.vocab_size=257"]
    start = start_from(given, "own_text", anew, draw_anew=["embedding"])
    assert start.source.tokenizer is None
    same = start_from(given, None, ["train.steps=9"]).config
    assert (same.data.directory, same.prepare.tokenizer) == (data, "bpe")
