"""Every hardware figure has a source, and a file can change any figure."""

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
        ('base = "h100"\nspeed = 1', "unknown figure speed; known: ranks_per_node"),
        ('base = "h100"\nslow_bandwidth = 0', "slow_bandwidth = 0 must be a number above 0"),
        ('base = "h100"\nranks_per_node = 7.5', "= 7.5 must be a whole number above 0"),
        ("base = ", "is not valid TOML"),
        (None, "cannot be read"),
    ],
)
def test_a_wrong_file_is_explained(tmp_path: Path, content: str | None, message: str) -> None:
    file = tmp_path / "wrong.toml"
    if content is not None:
        file.write_text(content)
    with pytest.raises(ValueError, match=message):
        find_hardware(str(file))
