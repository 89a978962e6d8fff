"""Configurations: recipes, TOML, overrides, and one clear error per mistake."""

import copy
import json
import math
import os
import re
import sys
from functools import reduce
from pathlib import Path
from typing import Any, cast

import pytest

from moebius.train.config.resolve import resolve
from moebius.train.config.run_config import Config, ConfigError
from moebius.train.config.suggestions import REMOVED, drop_removed
from moebius.train.recipes.smoke import RECIPES
from moebius.train.record.run_folder import check_same_run, open_run, place_data, settings_of


def make(*overrides: str, name: str = "smoke") -> Config:
    return resolve(name, overrides, RECIPES)


@pytest.mark.quick(20)
@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_survives_its_json_and_fits_its_world(name: str, tmp_path: Path) -> None:
    config = make(name=name)
    config.save(tmp_path / "config.json")
    assert Config.load(tmp_path / "config.json") == config
    config.check_world(config.world_size)


def mine() -> Config:
    return make("train.steps=11")


def test_a_recipe_may_be_a_function_of_ones_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "my_recipes", sys.modules[__name__])
    assert make("train.seed=5", name="my_recipes:mine").train.steps == 11
    file = tmp_path / "mine.toml"
    file.write_text('recipe = "my_recipes:mine"\n[train]\nseed = 6\n', encoding="utf-8")
    config = make(name=str(file))
    assert (config.train.steps, config.train.seed) == (11, 6)


def test_overrides_are_typed() -> None:
    config = make(
        "train.steps=7",
        "optim.learning_rate=3e-4",
        "prepare.input=['a.txt', 'b.txt']",
        "prepare.tokenizer=bytes",
        "prepare.vocab_size=257",
        "job.rehearse_failure_at_step=none",
        "job.name=x-1",
    )
    assert (config.train.steps, config.optim.learning_rate) == (7, 3e-4)
    assert config.prepare.input == ("a.txt", "b.txt")
    assert config.prepare.tokenizer == "bytes"
    assert config.job.rehearse_failure_at_step is None
    assert config.job.name == "x-1"


def test_sources_take_the_place_of_a_recipes_input_and_the_other_way_round(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text(
        'recipe = "smoke"\n[[prepare.sources]]\nname = "a"\ninput = ["a.txt"]\n', encoding="utf-8"
    )
    config = make(name=str(file))
    assert (config.prepare.input, [source.name for source in config.prepare.sources]) == ((), ["a"])
    assert make("prepare.input=['b.txt']", name=str(file)).prepare.sources == ()
    assert make("prepare.sources=[{name='a', input=['a.txt']}]").prepare.input == ()
    with pytest.raises(ConfigError, match="give one of the two"):
        make("prepare.sources=[{name='a', input=['a.txt']}]", "prepare.input=['b.txt']")


def test_a_toml_file_may_build_on_a_recipe(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text(
        'recipe = "smoke"\n[model.feed_forward]\nnum_experts = 32\n[train]\nsteps = 5\n',
        encoding="utf-8",
    )
    config = make("train.steps=6", name=str(file))
    assert config.model.experts is not None
    assert (config.model.experts.num_experts, config.train.steps, config.model.d_model) == (
        32,
        6,
        128,
    )


def test_an_existing_run_is_continued_only_with_its_own_settings(tmp_path: Path) -> None:
    config = place_data(make(), tmp_path)
    assert Path(config.data.directory).is_absolute()
    run_dir = tmp_path / "run"
    open_run(config, run_dir)
    open_run(
        place_data(make("train.steps=900", "mesh.ep=4", "mesh.dp_replicate=1"), tmp_path), run_dir
    )
    assert Config.load(run_dir / "config.json").train.steps == 900
    (run_dir / "checkpoints" / "step_00000080").mkdir(parents=True)
    with pytest.raises(
        ConfigError, match=r"(?s)holds another run.*model.d_model: the run has 128, now 64"
    ):
        open_run(place_data(make("model.d_model=64"), tmp_path), run_dir)
    inner = make("model.feed_forward.num_experts=4", f"prepare.input=['{'n' * 9_000}']")
    experts = r"model\.feed_forward\.num_experts: the run has \d+, now 4;"
    with pytest.raises(ConfigError, match=experts) as refused:
        open_run(place_data(inner, tmp_path), run_dir)
    assert len(str(refused.value)) < 1_000
    many = r"holds another run \((model\.[^;]+; ){9}[^;]+ and 1 more\); continue it"
    before = config.model_dump(mode="json")
    before["model"] |= dict.fromkeys(list(before["model"])[:11], -1)
    with pytest.raises(ConfigError, match=many):
        check_same_run(before, config, run_dir)
    other = tmp_path / "other"
    other.mkdir()
    (other / "thesis.txt").write_text("do not touch")
    with pytest.raises(ConfigError, match=r"is not empty and holds no run"):
        open_run(config, other)


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (
            {"weights": {"a": 0.999, "b": 0.001}},
            "data.weights gives no weight to c: name every source$",
        ),
        (
            {"stages": [{"at_tokens": 7, "weights": {"c": 1}}]},
            "stage at 7 tokens .* to a, b: .*with 0",
        ),
        ({"weights": {"a": 1, "b": 2, "c": 3}}, ""),
        ({"stages": [{"at_tokens": 7, "weights": {"a": 0, "b": 0, "c": 1}}]}, ""),
    ],
)
def test_once_weights_are_given_a_new_run_names_every_source(
    data: dict[str, Any], said: str, tmp_path: Path
) -> None:
    sources = [{"name": name, "input": [name]} for name in "abc"]
    config = Config.model_validate({"prepare": {"sources": sources}, "data": data})
    if said:
        with pytest.raises(ConfigError, match=said):
            open_run(config, tmp_path / "run")
    else:
        open_run(config, tmp_path / "run")


@pytest.mark.parametrize("record", ["", '{"kind": "eval", "step": 0}\n', '{"kind": "train", "st'])
def test_a_folder_in_which_no_step_was_made_takes_another_configuration(
    record: str, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    open_run(place_data(make(), tmp_path), run_dir)
    (run_dir / "metrics.jsonl").write_text(record, encoding="utf-8")
    other = place_data(make("model.d_model=64"), tmp_path)
    if "train" in record:
        with pytest.raises(ConfigError, match="holds another run"):
            open_run(other, run_dir)
    else:
        open_run(other, run_dir)
        assert Config.load(run_dir / "config.json") == other


def test_a_folder_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(
        ConfigError,
        match=r"the run folder cannot be written \(Not a directory\); choose another with --run-dir",
    ):
        open_run(make(), file / "run")


def test_raw_bytes_need_no_vocabulary_size() -> None:
    from moebius.data_pipeline.prepare_config import PrepareConfig

    prepare = PrepareConfig(tokenizer="bytes")
    assert prepare.num_token_ids == prepare.vocab_size == 257
    assert PrepareConfig.model_validate(prepare.model_dump()) == prepare


def test_the_example_files_can_be_run() -> None:
    examples = Path(__file__).parents[3] / "examples"
    files = set(examples.glob("*.toml")) - {
        examples / "compare.toml"
    }  # a comparison's, not a run's
    assert files
    for file in files:
        config = make(name=str(file))
        config.check_world(config.world_size)


def test_the_published_sizes_can_be_split_as_the_readme_says() -> None:
    splits = {}
    for name in RECIPES:
        if re.fullmatch(r"moeut_(\d+m|1b)", name):
            counts = RECIPES[name]().model.expert_counts().values()
            splits[name] = math.gcd(*counts)
    assert splits == {
        "moeut_44m": 1,
        "moeut_126m": 2,
        "moeut_244m": 1,
        "moeut_319m": 2,
        "moeut_728m": 1,
        "moeut_1b": 1,
    }
    counts = (
        make("model.feed_forward.num_experts=384", name="moeut_244m").model.expert_counts().values()
    )
    assert math.gcd(*counts) == 8


@pytest.mark.parametrize("name", ["config.json", "mine.toml"])
def test_only_a_regular_file_of_bounded_size_is_a_configuration(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    for make_it in (os.mkfifo, lambda path: path.symlink_to("/dev/zero"), Path.mkdir):
        make_it(path)
        with pytest.raises(ConfigError, match=f"{name}: cannot be read"):
            Config.load(path) if name == "config.json" else resolve(str(path), [], RECIPES)
        path.rmdir() if path.is_dir() else path.unlink()


def test_configurations_of_0_2_load_without_the_keys_that_are_gone(tmp_path: Path) -> None:
    config = resolve(
        "moeut",
        ["train.start_when=99", "prepare.sources=[{name='a', input=['embedded']}]"],
        RECIPES,
    )
    saved = config.model_dump(mode="json")
    for path, value in REMOVED.items():
        *sections, name = path.split(".")
        place = reduce(lambda found, key: found[key], sections, cast("Any", saved))
        if isinstance(place, list | dict):  # the number of tokens that start a run was a section
            (place[0] if isinstance(place, list) else place)[name] = value
    saved["train"]["start_when"] = {"segments": None, "tokens": 99}
    file = tmp_path / "config.json"
    file.write_text(json.dumps(saved))
    assert Config.load(file) == config
    saved["checkpoint"]["verify"] = False  # in a checkpoint, which nobody can edit
    meta = {"config": saved, "progress": {"step": 2}}
    check_same_run(settings_of(file, meta), config, file)
    saved["model"]["feed_forward"]["shared_sum"] = "mean"
    with pytest.raises(ConfigError, match=r"shared_sum: .*shared and routed outputs are added"):
        settings_of(file, meta)


def test_a_part_of_ones_own_has_keys_of_its_own() -> None:
    values = {"model": {"attention": {"kind": "mine:Attention", "expert_dropout": 0.0}}}
    before = copy.deepcopy(values)
    assert not [*drop_removed(values)]
    assert values == before
