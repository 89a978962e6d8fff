"""W&B, for real and offline: what it has put on the disk for its server."""

import json
import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fake_sink import facts_of, line_of_loads

from moebius.train.metrics.records import Record
from moebius.train.sinks.wandb import WandB


class FakeRun:
    """What of W&B's run is used."""

    def __init__(self) -> None:
        self.rows: list[dict[str, float]] = []
        self.config: dict[str, Any] = {}
        self.metrics: list[tuple[str, str | None]] = []
        self.exit_code: int | None = None

    def update(self, config: dict[str, Any], *, allow_val_change: bool) -> None:
        assert allow_val_change
        self.config |= config

    def define_metric(self, name: str, *, step_metric: str | None = None) -> None:
        self.metrics.append((name, step_metric))

    def log(self, row: dict[str, float]) -> None:
        self.rows.append(row)

    def finish(self, *, exit_code: int) -> None:
        self.exit_code = exit_code


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[tuple[FakeRun, dict[str, Any]]]:
    """The runs that were opened, in order, and with what."""
    found: list[tuple[FakeRun, dict[str, Any]]] = []

    def init(**settings: Any) -> SimpleNamespace:
        run = FakeRun()
        found.append((run, settings))
        return SimpleNamespace(
            config=run, define_metric=run.define_metric, log=run.log, finish=run.finish
        )

    fake = SimpleNamespace(init=init, Settings=lambda **settings: settings, teardown=lambda: None)
    monkeypatch.setitem(sys.modules, "wandb", fake)
    monkeypatch.delenv("WANDB_PROJECT", raising=False)
    return found


def test_a_run_that_goes_on_is_the_same_run_and_repeats_no_step(
    tmp_path: Path, opened: list[tuple[FakeRun, dict[str, Any]]]
) -> None:
    sink = WandB(facts_of(tmp_path))
    sink.write([line_of_loads(1), line_of_loads(2), line_of_loads(3)])
    sink.write([Record("eval", 3, 0.0, {"loss": 1.25})])
    sink.close("failed")
    sink = WandB(facts_of(tmp_path, project="mine"))
    sink.write([Record("start", 1, 0.0, {"generation": 2})])
    sink.write([line_of_loads(2), line_of_loads(3), line_of_loads(4)])
    sink.close("finished")
    (first, asked), (second, again) = opened
    assert (asked["project"], again["project"]) == ("moebius", "mine")
    assert (
        asked["id"]
        == again["id"]
        == json.loads((tmp_path / "sinks" / "wandb.json").read_text())["ids"]["run"]
    )
    assert asked["resume"] == "allow"
    assert asked["settings"]["console"] == "off"
    assert [row["step"] for row in first.rows] == [1, 2, 3, 3]
    assert first.rows[-1] == {"loss/validation": 1.25, "step": 3}
    assert second.rows[0] == {"run/generation": 2.0, "step": 1}
    assert [row["step"] for row in second.rows] == [1, 4]
    assert ("*", "step") in first.metrics
    assert (first.exit_code, second.exit_code) == (1, 0)
    assert first.config["train"]["steps"] == 9


def stored_records(data: bytes) -> Iterator[bytes]:
    """What is in a .wandb file: LevelDB's log format, behind seven bytes that say which version.

    Blocks of 32 KiB; a record is a checksum, a length, whether it goes on, and so many bytes.
    """
    place, record = 7, b""
    while place + 7 <= len(data):
        if 32768 - place % 32768 < 7:  # too little room for another header
            place += 32768 - place % 32768
            continue
        _, length, kind = struct.unpack_from("<IHB", data, place)
        record += data[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield record
            record = b""


@pytest.mark.slow
def test_the_rows_are_on_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    from wandb.proto import wandb_internal_pb2

    stored: Any = wandb_internal_pb2

    for name, value in {"MODE": "offline", "API_KEY": "a" * 40, "CACHE_DIR": str(tmp_path)}.items():
        monkeypatch.setenv(f"WANDB_{name}", value)
    for steps, state in (((1, 2, 3), "failed"), ((2, 3, 4), "finished")):
        sink = WandB(facts_of(tmp_path))
        sink.write([line_of_loads(step) for step in steps])
        sink.close(state)
    found: list[int] = []
    for file in sorted(tmp_path.glob("wandb/offline-run-*/*.wandb")):
        for data in stored_records(file.read_bytes()):
            for item in stored.Record.FromString(data).history.item:
                if [item.key, *item.nested_key][-1] == "step":
                    found.append(json.loads(item.value_json))
        assert b"a" * 40 not in file.read_bytes()
    assert found == [1, 2, 3, 4]
