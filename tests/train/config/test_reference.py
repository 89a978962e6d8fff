"""The configuration reference says what a run accepts."""

import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pydantic import TypeAdapter

from moebius.cli.main import main
from moebius.train.config.keys import known_keys
from moebius.train.config.reference import changes, commented, keys
from moebius.train.config.resolve import resolve
from moebius.train.config.run_config import Config
from moebius.train.config.validation import validated
from moebius.train.recipes.smoke import RECIPES

KEYS = {key.path: key for key in keys()}


def value_of(example: str) -> object:
    """Returns an override's value as a command line reads it."""
    text = example.partition("=")[2]
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def test_every_key_has_a_type_a_meaning_and_an_example_that_it_accepts() -> None:
    fields = dict(reversed(list(known_keys(Config))))  # of a kind: all kinds
    for path, key in KEYS.items():
        assert key.type, path
        assert key.meaning, path
        assert key.example.startswith(f"{path}="), path
        annotation: Any = fields[path].annotation
        TypeAdapter(annotation).validate_python(value_of(key.example))


def test_the_reference_and_a_run_know_the_same_keys() -> None:
    sections = {path.rpartition(".")[0] for path, _ in known_keys(Config)}
    assert KEYS.keys() - {path for path, _ in known_keys(Config)} == set()
    assert {path for path, _ in known_keys(Config)} - KEYS.keys() <= sections


@pytest.mark.parametrize(
    ("path", "type_", "default", "kinds"),
    [
        ("train.steps", "integer > 0", "1000", []),
        ("train.eval_batch", "integer > 0 or none", "none", []),
        ("mesh.dp_shard", "integer ≥ 1 or none", "none", []),
        ("prepare.sources.name", "text", "required", []),
        ("train.sinks", "list of tensorboard, wandb, mlflow", '["tensorboard"]', []),
        ("model.feed_forward.router.jitter", "number from 0, below 1", "0.0", ["token_choice"]),
    ],
)
def test_a_key_says_what_it_accepts(path: str, type_: str, default: str, kinds: list[str]) -> None:
    key = KEYS[path]
    assert (key.type, key.default_text, key.kinds) == (type_, default, kinds)


@pytest.mark.quick(20)
@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
def test_a_commented_file_is_the_configuration_it_was_written_from(
    recipe: Callable[[], Config],
) -> None:
    config = recipe()
    text = commented(config)
    assert validated(Config, tomllib.loads(text), origin="the file") == config
    assert "# Optimizer steps of the whole run. (integer > 0; default: 1000)" in text


def test_the_differences_lead_from_the_defaults_to_the_recipe() -> None:
    smoke = RECIPES["smoke"]()
    found = {path: value for path, value, _ in changes(smoke)}
    assert found["train.steps"] == smoke.train.steps
    assert "train.global_batch" not in found
    values = Config().model_dump(mode="json")
    for path, value in found.items():
        *sections, name = path.split(".")
        place = values
        for section in sections:
            place = place[section]
        place[name] = value
    assert validated(Config, values, origin="defaults") == smoke


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        ([], ["optim", "the optimizer and the schedule"]),
        (["job.limits"], ["job.limits.phase_s", "3600"]),
        (["optim.learning_rate"], ["optim.learning_rate=0.00025", "number > 0"]),
        (["smoke", "--diff"], ["job.num_nodes", "2"]),
        (
            ["smoke", "prepare.decontaminate.evaluation_sets=x.jsonl", "--diff"],
            ["x.jsonl", "required"],
        ),
    ],
)
def test_the_command_shows(
    words: list[str], shown: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["config", *words])
    assert not ended.value.code
    printed = capsys.readouterr().out
    assert all(word in printed for word in shown), printed


def test_a_written_recipe_is_a_file_that_trains(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    with pytest.raises(SystemExit):
        main(["config", "smoke", "train.steps=7"])
    file = tmp_path / "mine.toml"
    file.write_text(capsys.readouterr().out, encoding="utf-8")
    assert resolve(str(file), (), RECIPES) == resolve("smoke", ["train.steps=7"], RECIPES)
