"""`moebius analyze` from a run folder: the stream is that of an evaluation, bad input is refused."""

import contextlib
import json
import shutil
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from small_corpus import shards_of_words
from small_model import TINY

from moebius.cli.main import main
from moebius.data_pipeline.data_config import DataConfig
from moebius.data_pipeline.prepare_config import PrepareConfig
from moebius.data_pipeline.read.rows import SplitReader
from moebius.evaluation.report import measure
from moebius.train.config.run_config import Config, TrainConfig
from moebius.train.loop import train
from moebius_science.analysis import analyse as counting
from moebius_science.analysis import write as report
from moebius_science.analysis.analyse import analyse

SEQ_LEN = 16


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with prepared data and a run of two steps."""
    place = tmp_path_factory.mktemp("analyze")
    shards = shards_of_words(place, 40)
    config = Config(
        model=TINY,
        data=DataConfig(seq_len=SEQ_LEN, directory=str(shards)),
        prepare=PrepareConfig(tokenizer="bytes"),
        train=TrainConfig(steps=2, global_batch=4, micro_batch=4, device="cpu", seed=3),
    )
    run_dir = place / "run"
    run_dir.mkdir()
    config.save(run_dir / "config.json")
    assert train(config, run_dir) == "finished"
    return place


def ask(capfd: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as ended:
        main(["analyze", *arguments])
    said = capfd.readouterr()
    code = ended.value.code
    assert isinstance(code, int)
    return code, said.out, said.err


def test_the_stream_is_that_of_an_evaluation(trained: Path) -> None:
    seen: list[tuple[int, int]] = []
    found = analyse(
        trained / "run", num_tokens=100, on_rows=lambda more, total: seen.append((more, total))
    )
    assert (found.num_rows, found.num_tokens, found.step) == (7, 112, 2)
    assert [total for _, total in seen] == [7, 7, 7]
    assert sum(more for more, _ in seen) == 7
    assert found.loss == pytest.approx(measure(trained / "run", max_rows=7).result.loss, rel=1e-6)
    with SplitReader(trained / "shards", "validation", seq_len=SEQ_LEN) as reader:
        rows = reader.read(np.arange(7) * reader.num_rows // 7).tokens[:, :-1]
    counts = Counter(rows.flatten().tolist())
    first, *_ = counts.most_common()
    assert (found.items[0].token_id, found.items[0].text) == (first[0], chr(first[0]))
    assert {n: c for n, c in enumerate(found.item_counts_V.tolist()) if c} == dict(counts)
    for each in found.of_kind("feed_forward"):
        assert each.usage.counts_RE.sum(1).tolist() == [2 * 112] * each.bank.num_repeats


def test_the_command_writes_a_page_and_figures(
    trained: Path,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(report, "PICTURES", report.PICTURES[6:7])  # one will do
    run, out = str(trained / "run"), tmp_path / "deep" / "er"
    code, said, _ = ask(capfd, run, "--tokens", "20", "--out", str(out), "--json")
    found = json.loads(said)
    assert code == 0
    assert (found["step"], found["tokens"], found["seed"]) == (2, 32, 3)
    assert Path(found["page"]).read_text().count("data:image/png") == 1
    assert [Path(picture["parquet"]).name for picture in found["pictures"]] == [
        "update_magnitude.parquet"
    ]
    assert {bank["kind"] for bank in found["banks"]} == {"feed_forward", "value", "output"}
    code, said, _ = ask(capfd, run, "--tokens", "20")
    assert code == 0
    page = trained / "run" / "analysis" / "step_00000002" / report.PAGE
    assert "1 picture of 32 tokens" in said.replace("\n", " ")
    assert page.exists()


def test_items_that_are_named(trained: Path) -> None:
    found = analyse(trained / "run", num_tokens=20, item_texts=["e", "t"])
    assert [item.token_id for item in found.items] == [ord("e"), ord("t")]
    for each in found.of_kind("feed_forward"):
        assert each.slices is not None
        routes = 2 * found.item_counts_V[[ord("e"), ord("t")]]
        assert each.slices.counts_KRE.sum(2).tolist() == [
            [count] * each.bank.num_repeats for count in routes.tolist()
        ]


def test_what_cannot_be_analysed_is_refused(
    trained: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run = str(trained / "run")
    file = tmp_path / "file"
    file.write_text("")
    without = tmp_path / "without"
    without.mkdir()
    shutil.copy(trained / "run" / "config.json", without)
    cases = [
        ((str(tmp_path),), "is not a run folder"),
        ((str(tmp_path / "nowhere"),), "is not a run folder"),
        ((str(without),), "has no checkpoint"),
        ((run, "--step", "77"), "has no checkpoint at step 77"),
        ((run, "--tokens", "0"), "--tokens 0: nothing would be counted"),
        ((run, "--tokens", "-3"), "--tokens -3: nothing would be counted"),
        ((run, "--tokens", "some"), "'some' is neither a number nor `all`"),
        ((run, "--item", "e", "--item", "the"), "--item 'the' is 3 tokens ('t', 'h', 'e')"),
        ((run, "--out", str(file)), f"{file} is a file, and the pictures need a folder"),
        ((run, "--out", str(file / "below")), f"{file} is a file, and the pictures need"),
    ]
    for arguments, message in cases:
        code, _, said = ask(capfd, *arguments)
        assert code == 2, arguments
        assert message in said, (arguments, said)
    assert {path.name for path in tmp_path.iterdir()} == {"file", "without"}


def test_data_that_have_gone(
    trained: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    moved = tmp_path / "run"
    shutil.copytree(trained / "run", moved)
    settings = json.loads((moved / "config.json").read_text())
    settings["data"]["directory"] = str(tmp_path / "gone")
    (moved / "config.json").write_text(json.dumps(settings))
    code, _, said = ask(capfd, str(moved))
    assert code == 2
    assert str(tmp_path / "gone") in said


def test_a_split_that_is_too_short(
    trained: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    moved = tmp_path / "run"
    shutil.copytree(trained / "run", moved)
    settings = json.loads((moved / "config.json").read_text())
    settings["data"]["seq_len"] = 10**6
    (moved / "config.json").write_text(json.dumps(settings))
    code, _, said = ask(capfd, str(moved))
    assert code == 2
    assert "split 'validation'" in said
    assert "fewer than the 1000001 of one row" in said


def test_several_processes_are_refused(trained: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    @contextlib.contextmanager
    def two_ranks(_device: str) -> Iterator[SimpleNamespace]:
        yield SimpleNamespace(world_size=2)

    monkeypatch.setattr(counting, "start_process", two_ranks)
    with pytest.raises(ValueError, match="runs in one process, and 2 were started"):
        analyse(trained / "run", num_tokens=10)


def test_a_split_of_padding_alone(trained: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(counting, "analysed_passes", lambda *_, **__: iter(()))
    with pytest.raises(ValueError, match="no token of the split 'validation' counts"):
        analyse(trained / "run", num_tokens=10)
