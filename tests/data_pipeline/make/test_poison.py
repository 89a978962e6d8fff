"""F19: units that crash are tried three times and left out, and nothing else changes; failures that
are no text's fault end the preparation.
"""

import gzip
import io
import json
import os
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from meddling import StoppedError, files_of
from poison import keep_what_does_no_harm
from small_corpus import sentences, write_jsonl
from steps import seen, steps_of

from moebius.data_pipeline.data_config import DataConfig
from moebius.data_pipeline.errors import InputError, PrepareError
from moebius.data_pipeline.make import tasks
from moebius.data_pipeline.make.pools import (
    ATTEMPTS,
    Failures,
    LocalPool,
    OnPoison,
    SerialPool,
    WorkerDiedError,
    WorkerKilledError,
)
from moebius.data_pipeline.make.prepare import prepare
from moebius.data_pipeline.make.unfinished import QUARANTINED
from moebius.data_pipeline.manifest import manifest_name, read_manifest
from moebius.data_pipeline.prepare_config import PrepareConfig

BAD = 2  # the file with the poison


@pytest.fixture(autouse=True)
def _harm(monkeypatch):
    """Makes poisonous documents take effect when this process normalises them."""
    monkeypatch.setattr(os, "fsync", lambda handle: None)  # tests need no fsync
    normalised = tasks.normalised
    monkeypatch.setattr(
        tasks, "normalised", lambda text: keep_what_does_no_harm(text) or normalised(text)
    )


def _corpus(
    folder: Path, poison: str, *, tokenizer: str = "bytes", everywhere: bool = False
) -> PrepareConfig:
    """Five files, one with a poisonous document in its middle, in several segments.

    With `everywhere`, the poison acts in other processes, too.
    """
    texts = [sentences(seed, 12) for seed in range(5)]
    texts[BAD][6] = f"a POISON {poison} text"
    paths = [write_jsonl(folder / f"{n}.jsonl", some) for n, some in enumerate(texts)]
    return PrepareConfig(
        input=tuple(map(str, paths)),
        tokenizer=tokenizer,
        vocab_size=257 if tokenizer == "bytes" else 300,
        batch_tokens=300,
        segment_tokens=4000 if tokenizer == "bytes" else 1000,
        validation_fraction=0.2,
        filters=("poison:keep_what_does_no_harm",) if everywhere else (),
    )


class Counting(SerialPool):
    """Counts the scans of each unit."""

    def __init__(self) -> None:
        super().__init__()
        self.scans: dict[int, int] = {}

    def submit(self, function, item, /):
        if function.__name__ == "scan_unit":
            self.scans[item.unit.number] = self.scans.get(item.unit.number, 0) + 1
        return super().submit(function, item)


def _files_but_the_record(folder: Path) -> dict[str, bytes]:
    """Leaves out files.json, which tells that the bad file was written to meanwhile."""
    return {name: data for name, data in files_of(folder).items() if name != "files.json"}


def _check_all_but_the_poison(config: PrepareConfig, folder: Path, elsewhere: Path) -> None:
    """Compares with a preparation in which the bad file is empty."""
    assert (folder / QUARANTINED / f"text-{BAD:05d}.txt").exists()
    Path(config.input[BAD]).write_text("")
    prepare(config, elsewhere)
    found, expected = _files_but_the_record(folder), _files_but_the_record(elsewhere)
    last = max(name for name in expected if name.startswith("manifest-"))
    assert last > manifest_name(3)
    ends = [json.loads(files.pop(last))["manifest"] for files in (found, expected)]
    assert found == expected
    for totals in ("num_documents", "num_tokens"):
        assert ends[0][totals] == ends[1][totals]
    one, other = (DataConfig(directory=str(place), seq_len=16) for place in (folder, elsewhere))
    assert seen(steps_of(one, 30)) == seen(steps_of(other, 30))


# ---- what crashes


def test_an_exception_of_no_known_kind_is_quarantined_after_three_tries(tmp_path):
    config, said = _corpus(tmp_path, "VALUE"), "ValueError: the detector is at its wits' end"
    pool, news = Counting(), []
    manifest = prepare(config, tmp_path / "d", pool=pool, on_progress=lambda p: news.append(p.news))
    assert manifest.completion is not None
    (lost,) = manifest.completion.quarantined
    assert (lost.source, lost.error) == ("text", said)
    assert "2.jsonl" in lost.input
    assert pool.scans == {0: 1, 1: 1, 2: ATTEMPTS, 3: 1, 4: 1}
    assert [one for one in news if one] == [f"{lost.input} is left out: {said}"]
    account = (tmp_path / "d" / QUARANTINED / "text-00002.txt").read_text()
    assert "was left out in stage 'scan'" in account
    assert "in keep_what_does_no_harm" in account  # the traceback, down to its origin
    _check_all_but_the_poison(config, tmp_path / "d", tmp_path / "tombstone")


@pytest.mark.fault("F19")
@pytest.mark.slow
@pytest.mark.parametrize("poison", ["EXIT", "SEGMENTATION", "PANIC"])
def test_a_crash_of_the_process_is_quarantined_after_three_tries(tmp_path, poison):
    config = _corpus(tmp_path, poison, everywhere=True)
    with LocalPool(2) as pool:
        manifest = prepare(config, tmp_path / "d", pool=pool)
    assert manifest.completion is not None
    (lost,) = manifest.completion.quarantined
    died = "it killed its process each time"
    assert (
        lost.error
        == {
            "EXIT": died,
            "SEGMENTATION": died,
            "PANIC": "PanicError: panicked at 3:4",
        }[poison]
    )
    account = (tmp_path / "d" / QUARANTINED / "text-00002.txt").read_text()
    assert {"EXIT": "exit code 3", "SEGMENTATION": "SIGSEGV", "PANIC": "in keep_what_does_no_harm"}[
        poison
    ] in account
    _check_all_but_the_poison(config, tmp_path / "d", tmp_path / "tombstone")


def test_a_quarantined_unit_leaves_a_trained_tokenizer_and_every_pool_alike(tmp_path):
    config = _corpus(tmp_path, "VALUE", tokenizer="bpe")

    class Backwards(SerialPool):
        capacity = 4

        def wait(self):
            self._waiting.rotate(1)
            return super().wait()

    prepare(config, tmp_path / "one")
    prepare(config, tmp_path / "other", pool=Backwards())
    assert files_of(tmp_path / "one") == files_of(tmp_path / "other")
    completion = read_manifest(tmp_path / "one").completion
    assert completion is not None
    assert len(completion.quarantined) == 1


def test_what_was_given_up_stays_given_up_after_an_interruption(tmp_path):
    """The decision is repeated although the file has been repaired, and the bytes are the same."""
    config = _corpus(tmp_path, "VALUE")
    prepare(config, tmp_path / "through")

    def stop(progress) -> None:
        if progress.news:
            raise StoppedError

    with pytest.raises(StoppedError):
        prepare(config, tmp_path / "d", on_progress=stop)
    bad = Path(config.input[BAD])
    bad.write_text(bad.read_text().replace("POISON", "HARMLE"))
    pool = Counting()
    prepare(config, tmp_path / "d", pool=pool)
    assert BAD not in pool.scans
    assert _files_but_the_record(tmp_path / "d") == _files_but_the_record(tmp_path / "through")


@pytest.mark.fault("F19")
def test_a_unit_that_fails_when_it_is_tokenised_leaves_the_order_as_it_was(tmp_path, monkeypatch):
    """Its documents count, and still make later ones repeats; it has no shards."""
    config = _corpus(tmp_path, "nothing")

    class Failing(SerialPool):
        def submit(self, function, item, /):
            if function.__name__ == "tokenise_unit" and item.unit.number == BAD:
                return super().submit(_crash, item)
            return super().submit(function, item)

    manifest = prepare(config, tmp_path / "d", pool=Failing())
    whole = prepare(config, tmp_path / "whole")
    assert manifest.completion is not None
    assert [one.error for one in manifest.completion.quarantined] == [
        "it killed its process each time"
    ]
    expected = [shard for shard in whole.shards if shard.number != BAD]
    assert list(manifest.shards) == expected
    assert not list((tmp_path / "d").glob(f"*-{BAD:05d}.*"))


def _crash(item: object) -> None:
    raise WorkerDiedError("its process crashed (SIGSEGV)")


def test_a_source_of_which_nothing_is_left_is_told(tmp_path):
    config = _corpus(tmp_path, "VALUE").model_copy(update={"input": (str(tmp_path / "2.jsonl"),)})
    with pytest.raises(PrepareError, match=r"nothing of source 'text' could be .*wits' end"):
        prepare(config, tmp_path / "d")


# ---- what no text is to blame for


def test_what_no_text_is_to_blame_for_ends_the_preparation(tmp_path):
    config = _corpus(tmp_path, "FULL")
    pool = Counting()
    with pytest.raises(PrepareError) as caught:
        prepare(config, tmp_path / "d", pool=pool)
    message = str(caught.value)
    assert message.count("2.jsonl") == 1
    assert "failed 3 times in stage 'scan'" in message
    assert "No space left on device" in message
    assert "fix that" in message
    assert pool.scans[BAD] == ATTEMPTS
    assert not (tmp_path / "d" / QUARANTINED).exists()
    harmless = Path(config.input[BAD]).read_text().replace("POISON", "HARMLE")
    Path(config.input[BAD]).write_text(harmless)  # the same size, but harmless
    prepare(config, tmp_path / "d")
    prepare(config, tmp_path / "undisturbed")
    found, expected = tmp_path / "d", tmp_path / "undisturbed"
    assert _files_but_the_record(found) == _files_but_the_record(expected)


def test_ctrl_c_is_no_failure(tmp_path):
    config = _corpus(tmp_path, "CTRLC")
    pool = Counting()
    with pytest.raises(KeyboardInterrupt):
        prepare(config, tmp_path / "d", pool=pool)
    assert pool.scans[BAD] == 1
    assert not (tmp_path / "d" / QUARANTINED).exists()


@pytest.mark.slow
def test_a_worker_that_is_killed_three_times_ends_the_preparation_by_default(tmp_path):
    """The system kills it for its memory, whether or not a document is the reason."""
    config = _corpus(tmp_path, "KILL", everywhere=True)
    with LocalPool(2) as pool, pytest.raises(PrepareError, match=r"was killed .*fewer workers"):
        prepare(config, tmp_path / "d", pool=pool)
    with LocalPool(2) as pool:
        prepare(config, tmp_path / "d", pool=pool, on_poison="quarantine")
    _check_all_but_the_poison(config, tmp_path / "d", tmp_path / "tombstone")


# ---- the policies


def _crashed() -> BaseException:
    return WorkerDiedError("its process crashed (SIGSEGV)")


@pytest.mark.parametrize(
    ("error", "outcomes"),
    [
        (_crashed(), {"auto": "given up", "fail": "ended", "quarantine": "given up"}),
        (KeyError("x"), {"auto": "given up", "fail": "ended", "quarantine": "given up"}),
        (WorkerKilledError("x"), {"auto": "ended", "fail": "ended", "quarantine": "given up"}),
        (MemoryError(), {"auto": "ended", "fail": "ended", "quarantine": "given up"}),
        (ImportError("x"), {"auto": "ended", "fail": "ended", "quarantine": "ended"}),
        (OSError(5, "x"), {"auto": "ended", "fail": "ended", "quarantine": "ended"}),
        (OSError("x"), {"auto": "given up", "fail": "ended", "quarantine": "given up"}),
    ],
)
def test_what_each_policy_does_with_what_fails_three_times(error, outcomes):
    policies: tuple[OnPoison, ...] = ("auto", "fail", "quarantine")
    for policy in policies:
        failures = Failures(policy)
        assert [failures.try_again("one", error) for _ in range(ATTEMPTS)] == [True, True, False]
        assert failures.try_again("another", error), "each task has its own tries"
        if outcomes[policy] == "given up":
            failures.check_is_poison("a.txt", "scan", error)
            continue
        with pytest.raises(PrepareError, match=r"a\.txt failed 3 times") as raised:
            failures.check_is_poison("a.txt", "scan", error)
        assert raised.value.__cause__ is error


def test_what_the_user_can_mend_is_raised_at_once_or_given_up_at_once():
    mistake = InputError("a.jsonl[0:9], record 3: no field 'text'")
    for policy in ("auto", "fail"):
        with pytest.raises(InputError, match="no field"):
            Failures(policy).try_again("one", mistake)
    failures = Failures("quarantine")
    assert not failures.try_again("one", mistake)
    failures.check_is_poison("a.jsonl", "scan", mistake)
    with pytest.raises(PrepareError, match="no room"):
        failures.try_again("one", PrepareError("no room"))  # not a text's fault


def test_input_that_is_not_utf8_is_left_out_on_demand(tmp_path):
    config = _corpus(tmp_path, "nothing")
    bad = Path(config.input[BAD])
    bad.write_bytes(bad.read_bytes().replace(b"POISON", b"POIS\xffN"))
    manifest = prepare(config, tmp_path / "d", on_poison="quarantine")
    assert manifest.completion is not None
    (lost,) = manifest.completion.quarantined
    assert "UTF-8" in lost.error
    _check_all_but_the_poison(config, tmp_path / "d", tmp_path / "tombstone")


def _packed(suffix: str, texts: list[str]) -> bytes:
    """Returns a file's bytes, by its suffix."""
    table, file = pa.table({"text": texts}), io.BytesIO()
    if suffix == "parquet":
        pq.write_table(table, file)
    elif suffix == "arrow":
        with pa.ipc.new_file(file, table.schema) as writer:
            writer.write(table)
    else:
        lines = "".join(json.dumps({"text": text}) + "\n" for text in texts).encode()
        pack = gzip.compress if suffix == "jsonl.gz" else zstandard.compress
        file.write(pack(lines))
    return file.getvalue()


@pytest.mark.parametrize("suffix", ["parquet", "arrow", "jsonl.gz", "jsonl.zst"])
@pytest.mark.parametrize("damage", ["cut", "garbage", "empty"])
def test_a_file_that_cannot_be_opened_is_left_out_on_demand(suffix, damage, tmp_path):
    whole = _packed(suffix, sentences(9, 200))
    damaged = {"cut": whole[:-20], "garbage": b"\x01\xff" * 200, "empty": b""}[damage]
    (tmp_path / f"bad.{suffix}").write_bytes(damaged)
    good = write_jsonl(tmp_path / "good.jsonl", sentences(1, 12))
    names = (str(good), str(tmp_path / f"bad.{suffix}"))
    config = PrepareConfig(input=names, tokenizer="bytes", validation_fraction=0.2)
    if (damage, suffix[:5]) != ("empty", "jsonl"):  # which is a file without lines
        for policy in ("auto", "fail"):
            with pytest.raises(InputError, match=rf"bad\.{suffix}"):
                prepare(config, tmp_path / policy, on_poison=policy)
        completion = prepare(config, tmp_path / "d", on_poison="quarantine").completion
        assert completion is not None
        assert [lost.input.count("bad.") for lost in completion.quarantined] == [1]
    (tmp_path / f"bad.{suffix}").write_bytes(whole)
    completion = prepare(config, tmp_path / "repaired", on_poison="quarantine").completion
    assert completion is not None
    assert not completion.quarantined


def test_what_was_repaired_before_anything_was_sealed_is_read(tmp_path):
    """Also where the repair leaves the size of the file."""
    config = _corpus(tmp_path, "VALUE").model_copy(update={"segment_tokens": 10**6})
    told = []

    def stop(progress) -> None:
        told.append(progress.news)
        if "left out" in progress.news:
            raise StoppedError

    with pytest.raises(StoppedError):
        prepare(config, tmp_path / "d", on_progress=stop)
    bad = Path(config.input[BAD])
    bad.write_text(bad.read_text().replace("POISON", "HARMLE"))
    completion = prepare(config, tmp_path / "d").completion
    assert completion is not None
    assert completion is not None
    assert not completion.quarantined


@pytest.mark.parametrize("tokenizer", ["bytes", "bpe"])
@pytest.mark.parametrize("stage", ["scan", "tokenise"])
@pytest.mark.parametrize("shuffle", [False, True])
def test_a_folder_of_which_nothing_is_left_can_be_used_again(tmp_path, tokenizer, stage, shuffle):
    config = _corpus(tmp_path, "harmless", tokenizer=tokenizer)
    config = config.model_copy(update={"shuffle_documents": shuffle})
    with pytest.MonkeyPatch.context() as patch:
        name = "_judged" if stage == "scan" else "_num_chars"
        patch.setattr(tasks, name, lambda *_: 1 / 0)
        for _ in range(2):  # the second call tries everything again
            with pytest.raises(
                PrepareError, match=r"5 of its input splits|no text to train.*ZeroDiv"
            ):
                prepare(config, tmp_path / "d")
            assert not list((tmp_path / "d").glob("manifest-*")), "nothing that a reader refuses"
    completion = prepare(config, tmp_path / "d").completion
    assert completion is not None
    assert completion is not None
    assert not completion.quarantined
