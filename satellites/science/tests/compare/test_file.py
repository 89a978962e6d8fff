"""The file of a comparison, and the errors for invalid ones."""

from pathlib import Path

import pytest
from compared import TINY, write_comparison

from moebius_science.compare.file import CompareError, read_file


def test_an_arm_is_a_recipe_and_sections(tmp_path: Path):
    file = read_file(write_comparison(tmp_path))
    assert file.arms["moeut"].recipe == "moeut"
    assert file.arms["moeut"].changes() == {}
    assert file.common.changes()["model"]["attention"] == {"num_heads": 2, "d_head": 8}


@pytest.mark.parametrize(
    ("before", "after", "words"),
    [
        ("steps = 6", "stpes = 6", "stpes: unknown key; did you mean steps?"),
        ('recipe = "moeut"\nlabel', 'recipe = "moeut"\nlable', "arms.moeut.lable: unknown key; did you mean label?"),
        ('baseline = "moeut"', 'baseline = "dense"', "baseline='dense' is not one of the arms: moeut, single"),
        ("seeds = [0, 1, 2]", "seeds = [0, 0]", "seeds=[0, 0]: give each seed once"),
        ("seeds = [0, 1, 2]", "seeds = []", "seeds: "),
        ("steps = 6", "steps = 0", "steps: "),
        ("steps = 6", 'steps = 6\nmatch = "speed"', "match: "),
        ("steps = 6", 'steps = 6\ntasks = ["piqa"]', "need task_data"),
        ("[arms.single]", '[arms."a/b"]', "arm name 'a/b'"),
        ("steps = 6", "steps = = 6", "is not valid TOML"),
        ('recipe = "moeut_g1"', "", "arms.single.recipe: Field required"),
    ],
)  # fmt: skip
def test_what_cannot_be_used_is_named(tmp_path: Path, before: str, after: str, words: str):
    assert before in TINY
    with pytest.raises(CompareError, match=r"tiny\.toml") as error:
        read_file(write_comparison(tmp_path, TINY.replace(before, after, 1)))
    assert words in str(error.value)


def test_a_missing_file(tmp_path: Path):
    with pytest.raises(CompareError, match="cannot be read"):
        read_file(tmp_path / "nothing.toml")
