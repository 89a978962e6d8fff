"""The protocol under random pauses at each step, and under a thread sanitizer."""

import shutil
import subprocess
from pathlib import Path

import pytest

SOURCE = Path(__file__).with_name("stress.cpp")
pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="there is no g++")


def build(folder: Path, *flags: str, source: Path = SOURCE) -> Path:
    program = folder / "stress"
    subprocess.run(
        [
            *("g++", "-O1", "-g", "-std=c++17", "-DMOEBIUS_BETWEEN_STEPS", "-pthread"),
            *(*flags, "-o", str(program), str(source)),
        ],
        check=True,
    )
    return program


def run(program: Path, *arguments: int) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(program), *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )


@pytest.mark.slow
def test_ten_thousand_drawn_exchanges_are_right_whenever_a_rank_pauses(tmp_path: Path) -> None:
    program = build(tmp_path)
    for ranks, passes, seed in ((2, 1000, 1), (4, 1500, 2), (8, 400, 3)):  # of four exchanges each
        ended = run(program, ranks, passes, seed, 0)
        assert (ended.returncode, ended.stderr) == (0, "")


@pytest.mark.slow
def test_nobody_reads_what_is_still_written(tmp_path: Path) -> None:
    """And the sanitizer can see it: with one ordering taken away it complains."""
    program = build(tmp_path, "-fsanitize=thread")
    ended = run(program, 3, 300, 4, 1)
    assert (ended.returncode, ended.stderr) == (0, "")
    tree = tmp_path / "tree"
    library, stress = (
        Path("distributed/symmetric/exchange.cpp"),
        Path("tests/distributed/symmetric"),
    )
    root = SOURCE.parents[3]
    (tree / library).parent.mkdir(parents=True)
    (tree / stress).mkdir(parents=True)
    shutil.copy(SOURCE, tree / stress)
    text, strong = (root / library).read_text(), "unread.fetch_sub(1, std::memory_order_release)"
    assert text.count(strong) == 1
    (tree / library).write_text(text.replace(strong, strong.replace("release", "relaxed")))
    broken = build(tmp_path, "-fsanitize=thread", source=tree / stress / SOURCE.name)
    assert "data race" in run(broken, 3, 300, 4, 1).stderr
