"""`moebius analyze` from a run folder: reads the stream of an evaluation, refuses bad input."""

import json
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

import moebius
from moebius_science.analysis.analyse import analyse
from moebius_science.analyze_command import main
from moebius_science.pictures import write


def test_the_stream_is_that_of_an_evaluation(trained: Path) -> None:
    seen: list[tuple[int, int]] = []
    found = analyse(trained, num_tokens=100, on_rows=lambda more, total: seen.append((more, total)))
    assert (found.num_rows, found.num_tokens, found.step) == (7, 112, 2)
    assert {total for _, total in seen} == {7}
    assert sum(more for more, _ in seen) == 7
    loss = moebius.evaluate(trained, max_rows=7).result.loss
    assert found.loss == pytest.approx(loss, rel=1e-6)
    counts: Counter[int] = Counter()
    for rows in moebius.load(trained).rows(max_rows=7):
        counts.update(rows.tokens_BS[: rows.num_rows].flatten().tolist())
    assert {n: c for n, c in enumerate(found.item_counts_V.tolist()) if c} == dict(counts)
    [(first, _)] = counts.most_common(1)
    assert (found.items[0].token_id, found.items[0].text) == (first, chr(first))
    for each in found.of_kind("feed_forward"):
        assert each.usage.counts_RE.sum(1).tolist() == [2 * 112] * each.bank.num_repeats


def test_the_command_writes_pictures_and_figures(
    trained: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(write, "PICTURES", write.PICTURES[6:7])  # one will do
    out = tmp_path / "deep" / "er"
    assert main([str(trained), "--tokens", "20", "--out", str(out), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["step"], found["tokens"], found["seed"]) == (2, 32, 3)
    assert [Path(picture["parquet"]).name for picture in found["pictures"]] == [
        "update_magnitude.parquet"
    ]
    assert {bank["kind"] for bank in found["banks"]} == {"feed_forward", "value", "output"}
    assert main([str(trained), "--tokens", "20"]) == 0
    assert "1 picture of 32 tokens" in capsys.readouterr().out
    assert (trained / "analysis" / "step_00000002" / "update_magnitude.png").exists()


def test_items_that_are_named(trained: Path) -> None:
    found = analyse(trained, num_tokens=20, item_texts=["e", "t"])
    assert [item.token_id for item in found.items] == [ord("e"), ord("t")]
    for each in found.of_kind("feed_forward"):
        assert each.slices is not None
        routes = 2 * found.item_counts_V[[ord("e"), ord("t")]]
        assert each.slices.counts_KRE.sum(2).tolist() == [
            [count] * each.bank.num_repeats for count in routes.tolist()
        ]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nowhere"], "there is no such folder"),
        (["run", "--step", "77"], "no checkpoint of step 77"),
        (["run", "--tokens", "0"], "--tokens 0"),
        (["run", "--item", "e", "--item", "the"], "--item 'the' is 3 tokens"),
        (["run", "--out", "file/below"], "is a file"),
    ],
)
def test_a_request_that_cannot_be_met_is_an_error(
    trained: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    words: list[str],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=message):
        main([str(trained) if word == "run" else word for word in words])
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [("directory", "gone", "gone"), ("seq_len", 10**6, "split 'validation'")],
)
def test_data_that_cannot_be_read_are_an_error(
    trained: Path, tmp_path: Path, key: str, value: Any, message: str
) -> None:
    shutil.copytree(trained, tmp_path / "run")
    settings = json.loads((tmp_path / "run" / "config.json").read_text())
    settings["data"][key] = value
    (tmp_path / "run" / "config.json").write_text(json.dumps(settings))
    with pytest.raises(ValueError, match=message):
        analyse(tmp_path / "run", num_tokens=10)


def test_a_split_of_padding_alone_is_an_error(
    trained: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(moebius.LoadedModel, "rows", lambda *_, **__: iter(()))
    with pytest.raises(ValueError, match="no token of the split 'validation' counts"):
        analyse(trained, num_tokens=10)
