"""Every figure has a source, and a file may change any."""

from dataclasses import fields
from pathlib import Path

import pytest

from moebius.planning.hardware import HARDWARE, Hardware, find_hardware


@pytest.mark.parametrize("name", HARDWARE)
def test_every_figure_has_a_source(name: str) -> None:
    found = find_hardware(name)
    figures = {entry.name for entry in fields(Hardware)} - {"name", "sources"}
    assert set(found.sources) == figures
    assert all(len(source) > 10 for source in found.sources.values())


def test_published_figures() -> None:
    assert HARDWARE["h200"].memory_bytes == 141e9
    assert HARDWARE["h100"].fast == 360e9
    assert HARDWARE["h100"].slow == 45e9
    assert HARDWARE["gb200_nvl72"].ranks_per_node == 72
    assert HARDWARE["b200"].peak("bfloat16") == 2.25e15


def test_a_file_changes_figures_and_their_sources(tmp_path: Path) -> None:
    file = tmp_path / "ours.toml"
    file.write_text('base = "h200"\nslow_bandwidth = 25e9\nranks_per_node = 4\n')
    ours = find_hardware(str(file))
    assert (ours.name, ours.slow_bandwidth, ours.ranks_per_node, ours.fast) == (
        "ours",
        25e9,
        4,
        HARDWARE["h200"].fast,
    )
    assert ours.sources["slow_bandwidth"] == str(file)
    assert ours.sources["peak_bf16"] == HARDWARE["h200"].sources["peak_bf16"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('base = "h300"', "base = 'h300' is unknown; choose h100"),
        ('base = "h100"\nspeed = 1', "speed is no figure of a machine; known: ranks_per_node"),
        ('base = "h100"\nslow_bandwidth = 0', "slow_bandwidth = 0: a number above 0 is needed"),
        (
            'base = "h100"\nranks_per_node = 7.5',
            "ranks_per_node = 7.5: a whole number above 0 is needed",
        ),
        ("base = ", "is not valid TOML"),
    ],
)
def test_a_wrong_file_is_explained(tmp_path: Path, content: str, message: str) -> None:
    file = tmp_path / "wrong.toml"
    file.write_text(content)
    with pytest.raises(ValueError, match=message):
        find_hardware(str(file))


def test_unknown_names_are_answered_with_the_known() -> None:
    with pytest.raises(
        ValueError, match=r"there is no hardware 'h2000': choose h100, h200, b200, gb200_nvl72"
    ):
        find_hardware("h2000")
    with pytest.raises(ValueError, match="cannot be read"):
        find_hardware("missing.toml")
