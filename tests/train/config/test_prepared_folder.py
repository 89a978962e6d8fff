"""A run takes its preparation settings from a prepared folder."""

from collections.abc import Callable
from pathlib import Path

import pytest
from meddling import NothingToRun
from small_corpus import sentences, write_jsonl

from moebius.data_pipeline.errors import InputError, PrepareError
from moebius.data_pipeline.make.prepare import prepare
from moebius.data_pipeline.manifest import manifest_name, read_manifest
from moebius.data_pipeline.prepare_config import PrepareConfig
from moebius.data_pipeline.sources.formats import plan_splits
from moebius.train.config.resolve import resolve
from moebius.train.config.run_config import Config, ConfigError
from moebius.train.recipes.smoke import RECIPES


@pytest.fixture(autouse=True)
def texts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Writes two text files into the working folder."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "texts").mkdir()
    for name in "ab":
        write_jsonl(tmp_path / f"texts/{name}.jsonl", sentences(ord(name), 8))


def resolved(*overrides: str, name: str = "own_text") -> Config:
    return resolve(name, ["data.directory=shards", *overrides], RECIPES)


def check_is_of(config: Config, folder: str) -> None:
    """Checks that a run has nothing to prepare, and room for every token."""
    manifest = prepare(config.prepare, folder, pool=NothingToRun(), if_changed="ignore")
    assert config.model.vocab_size >= manifest.header.tokenizer.vocab_size


@pytest.mark.parametrize(
    ("made", "vocab_size"),
    [
        ({"input": ["texts/*.jsonl"], "tokenizer": "bytes", "text_field": "text"}, 8000),
        ({"input": ["texts/*.jsonl"], "vocab_size": 9000}, 9000),
        ({"input": ["texts"], "validation_input": ["texts/b.jsonl"], "tokenizer": "given"}, 8000),
        (
            {
                "sources": [
                    {"name": "web", "input": ["texts/a.jsonl"], "licence": "CC0-1.0"},
                    {"name": "books", "input": ["texts/b.jsonl"], "id_field": "source"},
                ],
                "tokenizer": "bytes",
            },
            8000,
        ),
    ],
)
def test_the_folder_alone_is_enough(made: dict, vocab_size: int) -> None:
    if made.get("tokenizer") == "given":
        prepare(PrepareConfig(input=("texts",), vocab_size=300), "words")
        made = made | {"tokenizer": "words/tokenizer.json"}
    prepare(PrepareConfig.model_validate(made), "shards")
    config = resolved()
    check_is_of(config, "shards")
    assert config.model.vocab_size == vocab_size
    assert [one.licence for one in config.prepare.all_sources] == [
        one.licence for one in read_manifest("shards").sources
    ]


def test_what_is_said_goes_before_what_the_folder_knows(tmp_path: Path) -> None:
    prepare(PrepareConfig(input=("texts",), tokenizer="bytes"), "shards")
    (tmp_path / "mine.toml").write_text(
        'recipe = "own_text"\n[data]\ndirectory = "shards"\n[model]\nvocab_size = 300\n'
        '[prepare]\ninput = ["texts"]\nsegment_tokens = 1000\n'
    )
    config = resolve("mine.toml", (), RECIPES)
    assert config.model.vocab_size == 300
    with pytest.raises(PrepareError, match=r"in another way \(segment_tokens: there \d+, asked"):
        prepare(config.prepare, "shards")
    check_is_of(resolve("mine.toml", ["prepare.segment_tokens=268435456"], RECIPES), "shards")
    with pytest.raises(
        PrepareError, match=r"\(text.input: there \['texts'\], asked for \['no'\]\)"
    ):
        prepare(resolved("prepare.input=['no']").prepare, "shards")


@pytest.mark.parametrize("given", ["texts/*.jsonl", "ABSOLUTE/texts/*.jsonl"])
def test_a_folder_that_was_moved_as_a_whole_is_trained_on(given: str, tmp_path: Path) -> None:
    given = given.replace("ABSOLUTE", str(tmp_path / "one"))
    (tmp_path / "one").mkdir()
    (tmp_path / "texts").rename(tmp_path / "one/texts")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path / "one")
        prepare(PrepareConfig(input=(given,), tokenizer="bytes"), "shards")
    (tmp_path / "one").rename(tmp_path / "two")
    config = resolve("own_text", [f"data.directory={tmp_path}/two/shards"], RECIPES)
    check_is_of(config, config.data.directory)


def test_a_damaged_folder_is_one_clear_error() -> None:
    prepare(PrepareConfig(input=("texts",), tokenizer="bytes"), "shards")
    Path("shards", manifest_name(0)).write_text("{")
    with pytest.raises(ConfigError, match=r"data\.directory: .*manifest-000000\.json is damaged"):
        resolved()


def _file_in_the_way() -> None:
    Path("shards").write_text("some text")


def _folder_of_text() -> None:
    Path("shards").mkdir()
    Path("shards/a.txt").write_text("some text")


def _mistyped() -> None:
    prepare(PrepareConfig(input=("texts",), tokenizer="bytes"), "shard")


def _begun() -> None:
    Path("shards/unfinished").mkdir(parents=True)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: None, "does not exist: name a folder"),
        (_mistyped, r"does not exist \(prepared there: shard\): name a folder"),
        (lambda: Path("shards").mkdir(), "is empty"),
        (_folder_of_text, "holds 'a.txt' and no prepared data"),
        (_file_in_the_way, "is a file, not a prepared folder.*write prepare.input=shards"),
        (_begun, "has no finished data yet"),
    ],
)
@pytest.mark.parametrize("name", ["own_text", "smoke", "given.toml", "saved.toml", "config.json"])
def test_a_folder_without_data_never_becomes_other_text(
    name: str, make: Callable[[], object], message: str, tmp_path: Path
) -> None:
    (tmp_path / "given.toml").write_text('recipe = "own_text"\n[data]\nseed = 1\n')
    (tmp_path / "saved.toml").write_text('recipe = "smoke"\n[prepare]\ninput = ["embedded"]\n')
    stored = Config(prepare=PrepareConfig(input=("texts/a.jsonl",)))  # of a run
    recipes = {**RECIPES, "config.json": lambda: stored}
    make()

    def of(*words: str) -> PrepareConfig:
        return resolve(name, ["data.directory=shards", *words], recipes).prepare

    with pytest.raises(ConfigError, match=f"data.directory='shards' {message}"):
        of("data.override_position=true")
    if not Path("shards").is_file():
        assert of("prepare.input=texts").input == ("texts",)
        assert of("prepare.input=embedded").input == ("embedded",)


def test_a_file_that_names_folder_and_text_means_both(tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text(
        '\ufeffrecipe = "own_text"\n[data]\ndirectory = "new"\n[prepare]\ninput = "embedded"\n'
    )
    assert resolve("mine.toml", (), RECIPES).prepare.input == ("embedded",)


def test_own_text_without_text_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = resolve("own_text", (), RECIPES)
    plan_splits(config.prepare)  # the folder texts/
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    with pytest.raises(InputError, match=r"no text is named.*prepare.input=FILES.*data.directory="):
        prepare(config.prepare, "shards")
    assert not list(Path().iterdir())
