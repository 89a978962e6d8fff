"""The lock of a folder, its recorded plan, and the leftovers of an interrupted run."""

import errno
import re
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from moebius.data_pipeline.atomic import read_record, write_record
from moebius.data_pipeline.errors import PrepareError
from moebius.data_pipeline.make.tasks import UNFINISHED
from moebius.data_pipeline.make.unfinished import (
    LOCK,
    QUARANTINED,
    Quarantined,
    begin,
    claimed,
    clear,
    read_quarantined,
    write_quarantined,
)
from moebius.data_pipeline.make.units import Unit
from moebius.data_pipeline.manifest import (
    QuarantinedSplit,
    index_name,
    manifest_name,
    shard_name,
)
from moebius.data_pipeline.prepare_config import PrepareConfig
from moebius.data_pipeline.sources.documents import InputSplit

CONFIG = PrepareConfig(input=("/a.txt",), tokenizer="bytes", vocab_size=257)
UNIT = Unit("text", 3, (InputSplit("text", "/a.txt", ".txt", 0, 9, 9, "both", 9),))


def nobody_waits() -> None:
    raise AssertionError("nobody has the folder")


def test_one_at_a_time_has_a_folder_and_each_waiter_is_told_once(tmp_path):
    """Five threads take turns; each deletes the lock and all unfinished work as it leaves."""
    folder, inside, most, told = tmp_path / "d", [], [], []

    def work(number: int) -> None:
        with claimed(folder, on_wait=lambda: told.append(number)):
            inside.append(number)
            most.append(len(inside))
            (folder / UNFINISHED / "work").write_text(str(number))
            assert (folder / UNFINISHED / "work").read_text() == str(number)
            inside.remove(number)
            clear(folder)  # with the lock: the next thread may enter from here on

    with claimed(folder, on_wait=nobody_waits):
        threads = [threading.Thread(target=work, args=(number,)) for number in range(5)]
        for thread in threads:
            thread.start()
        while len(told) < 5:
            time.sleep(0.001)
        assert not most
        clear(folder)
    for thread in threads:
        thread.join()
    assert most == [1] * 5
    assert sorted(told) == [0, 1, 2, 3, 4]


def test_a_folder_that_another_clears_away_just_now_is_made_again(tmp_path, monkeypatch):
    """mkdir finds the folder, which is gone when mkdir checks that it is a folder."""
    mkdir, cleared = Path.mkdir, []

    def cleared_meanwhile(path: Path, *args: Any, **options: Any) -> None:
        if path == tmp_path / "d" / UNFINISHED and not cleared:
            cleared.append(path)
            raise FileExistsError(errno.EEXIST, "File exists", str(path))
        mkdir(path, *args, **options)

    monkeypatch.setattr(Path, "mkdir", cleared_meanwhile)
    with claimed(tmp_path / "d", on_wait=nobody_waits):
        assert cleared
        assert (tmp_path / "d" / UNFINISHED / LOCK).exists()


def test_a_folder_in_which_another_begins_just_now_is_not_somebody_elses(tmp_path, monkeypatch):
    """Between two checks, the other process creates its folder of unfinished work."""
    exists = Path.exists

    def begun_meanwhile(path: Path) -> bool:
        found = exists(path)
        if path == tmp_path / UNFINISHED and not found:
            path.mkdir()
            (tmp_path / "tokenizer.json").write_text("{}")
        return found

    monkeypatch.setattr(Path, "exists", begun_meanwhile)
    with claimed(tmp_path, on_wait=nobody_waits):
        assert (tmp_path / UNFINISHED).is_dir()


def _other_plans(folder: Path) -> Iterator[tuple[PrepareConfig, list[Unit], str]]:
    """Yields what does not continue the plan of CONFIG and UNIT in a folder, and how that is said."""
    other = CONFIG.model_copy(update={"validation_fraction": 0.5})
    yield other, [UNIT], r"validation_fraction: there .*, asked for 0\.5"
    yield CONFIG, [UNIT, Unit("text", 4, UNIT.splits)], "whose input files have changed since"
    plan = folder / UNFINISHED / "plan.json"
    older = read_record(plan)
    assert older is not None
    write_record(plan, older | {"spec_hash": "0"})
    yield CONFIG, [UNIT], "another format"
    plan.write_bytes(plan.read_bytes()[:-9])
    yield CONFIG, [UNIT], "whose plan is damaged"


def test_another_configuration_or_other_input_may_not_go_on(tmp_path):
    (tmp_path / UNFINISHED).mkdir()
    begin(CONFIG, tmp_path, [UNIT])
    (tmp_path / manifest_name(0)).write_text("sealed")
    for config, units, message in _other_plans(tmp_path):
        with pytest.raises(PrepareError, match=message):
            begin(config, tmp_path, units)


def test_what_has_sealed_nothing_is_started_over(tmp_path):
    (tmp_path / UNFINISHED).mkdir()
    (tmp_path / "note.txt").write_text("mine")
    assert begin(CONFIG, tmp_path, [UNIT]) == ""
    for config, units, message in _other_plans(tmp_path):
        for name in ("text.train-00002.tok.arrow", "tokenizer.json", f"{UNFINISHED}/text.scan.npz"):
            (tmp_path / name).write_text("of the other")
        (tmp_path / QUARANTINED).mkdir()
        said = begin(config, tmp_path, units)
        assert re.search(message + ".*had sealed nothing and is started over", said)
        assert sorted(one.name for one in tmp_path.iterdir()) == ["note.txt", UNFINISHED]
        assert begin(config, tmp_path, units) == "", "its plan is recorded"
        begin(CONFIG, tmp_path, [UNIT])


def test_a_record_that_was_damaged_was_never_written(tmp_path):
    path = tmp_path / "record.json"
    assert read_record(path) is None
    content = {"places": [0, 1, 3], "text": "Zürich", "none": None}
    write_record(path, content)
    assert read_record(path) == content
    intact = path.read_bytes()
    for place in range(len(intact)):
        damaged = bytearray(intact)
        damaged[place] ^= 1
        path.write_bytes(damaged)
        assert read_record(path) is None, place
    for other in (b"", b"[]", b"3", b"null", b"{}", b"[" * 10**5, b"\xff", intact[:-1]):
        path.write_bytes(other)
        assert read_record(path) is None


def test_what_is_given_up_leaves_no_shard_and_says_why(tmp_path):
    (tmp_path / UNFINISHED).mkdir()
    names = [shard_name("text", side, 3) for side in ("train", "validation")]
    for name in [*names, *map(index_name, names), "text.train-00002.tok.arrow"]:
        (tmp_path / name).write_text("half of it")
    split = QuarantinedSplit(source="text", input=UNIT.label, error="KeyError: 'x'")
    assert read_quarantined(tmp_path, UNIT) is None
    write_quarantined(tmp_path, UNIT, Quarantined("scan", split), "Traceback \ud800 …")
    assert read_quarantined(tmp_path, UNIT) == Quarantined("scan", split)
    assert read_quarantined(tmp_path, Unit("text", 2, UNIT.splits)) is None
    account = (tmp_path / QUARANTINED / "text-00003.txt").read_text()
    assert account.startswith("/a.txt[0:9] was left out in stage 'scan'\n\nTraceback \\ud800")
    assert [path.name for path in tmp_path.glob("*.arrow")] == ["text.train-00002.tok.arrow"]
