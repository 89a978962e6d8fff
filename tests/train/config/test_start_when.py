"""When ranks start while data is still being prepared.

tests/cluster/test_train_while_tokenising.py trains that way.
"""

import pytest
from made_folder import MadeFolder, documents
from pydantic import ValidationError

from moebius.data_pipeline.manifest import read_manifest
from moebius.train.config.resolve import resolve
from moebius.train.config.run_config import ConfigError
from moebius.train.config.start_when import StartWhen
from moebius.train.recipes.smoke import RECIPES


@pytest.mark.parametrize(
    ("written", "tokens"),
    [(7, 7), ("50M", 50_000_000), ("2.5B", 2_500_000_000), ("1_000", 1000), ("3 k", 3000)],
)
def test_tokens_are_written_as_people_write_them(written, tokens):
    assert StartWhen(tokens=written).tokens == tokens


@pytest.mark.parametrize("written", ["", "M", "50X", "-3", "1.5", 0, -1, "0"])
def test_what_is_no_number_of_tokens_is_told(written):
    with pytest.raises(ValidationError):
        StartWhen(tokens=written)


def test_it_is_a_section_of_the_configuration():
    for override in ("train.start_when={segments=2}", "train.start_when.segments=2"):
        assert resolve("smoke", [override], RECIPES).train.start_when == StartWhen(segments=2)
    both = resolve("smoke", ["train.start_when.segments=2", "train.start_when.tokens=50M"], RECIPES)
    assert str(both.train.start_when) == "2 segments and 50,000,000 tokens"
    assert resolve("smoke", ["train.start_when=none"], RECIPES).train.start_when is None
    with pytest.raises(ConfigError, match=r"did you mean train.start_when.segments\?"):
        resolve("smoke", ["train.start_when={segment=2}"], RECIPES)
    with pytest.raises(ConfigError, match="give segments, tokens or both"):
        resolve("smoke", ["train.start_when={}"], RECIPES)


def test_ranks_begin_with_a_segment_of_every_source_and_what_was_asked_for(tmp_path):
    made = MadeFolder(tmp_path, ("a", "b"))
    asked = [
        StartWhen(segments=1),
        StartWhen(segments=3),
        StartWhen(tokens=500),
        StartWhen(segments=9),
    ]

    def met() -> list[bool]:
        manifest = read_manifest(tmp_path)
        return [one.is_met(manifest) for one in asked]

    assert met() == [False] * 4
    made.seal("a", documents(0, 20))
    made.seal("a", documents(1, 20))
    assert read_manifest(tmp_path).num_tokens("train") > 500
    assert met() == [False] * 4, "nothing of b"
    made.seal("b", documents(2, 2))
    assert met() == [True, True, True, False]
    assert not StartWhen(segments=3, tokens=10**6).is_met(read_manifest(tmp_path))
    made.complete()
    assert met() == [True] * 4
