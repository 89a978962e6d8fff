"""F19: units that crash are tried three times and left out, and nothing else changes; failures that
are no text's fault end the preparation.
"""

import gzip
import io
import json
import os
from collections import Counter
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from meddling import Meddling, StoppedError, files_of
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
from moebius.data_pipeline.manifest import (
    DatasetManifest,
    QuarantinedSplit,
    manifest_name,
    read_manifest,
)
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


def _counting() -> tuple[Meddling, Counter[int]]:
    """Returns a pool, and how often it scans each unit."""
    scans: Counter[int] = Counter()

    def count(function, item) -> None:
        if function.__name__ == "scan_unit":
            scans[item.unit.number] += 1

    return Meddling(count), scans


def _lost(manifest: DatasetManifest) -> tuple[QuarantinedSplit, ...]:
    assert manifest.completion is not None
    return manifest.completion.quarantined


def _repair(config: PrepareConfig) -> None:
    """Takes the poison out; the file keeps its size."""
    bad = Path(config.input[BAD])
    bad.write_text(bad.read_text().replace("POISON", "HARMLE"))


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
    (pool, scans), news = _counting(), []
    manifest = prepare(config, tmp_path / "d", pool=pool, on_progress=lambda p: news.append(p.news))
    (lost,) = _lost(manifest)
    assert (lost.source, lost.error) == ("text", said)
    assert "2.jsonl" in lost.input
    assert scans == {0: 1, 1: 1, 2: ATTEMPTS, 3: 1, 4: 1}
    assert [one for one in news if one] == [f"{lost.input} is left out: {said}"]
    account = (tmp_path / "d" / QUARANTINED / "text-00002.txt").read_text()
    assert "was left out in stage 'scan'" in account
    assert "in keep_what_does_no_harm" in account  # the traceback, down to its origin
    _check_all_but_the_poison(config, tmp_path / "d", tmp_path / "tombstone")


@pytest.mark.fault("F19")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("poison", "error", "account"),
    [
        ("SEGMENTATION", "it killed its process each time", "SIGSEGV"),
        ("PANIC", "PanicError: panicked at 3:4", "in keep_what_does_no_harm"),
    ],
)
def test_a_crash_of_the_process_is_quarantined_after_three_tries(tmp_path, poison, error, account):
    config = _corpus(tmp_path, poison, everywhere=True)
    with LocalPool(2) as pool:
        (lost,) = _lost(prepare(config, tmp_path / "d", pool=pool))
    assert lost.error == error
    assert account in (tmp_path / "d" / QUARANTINED / "text-00002.txt").read_text()
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
    assert len(_lost(read_manifest(tmp_path / "one"))) == 1


def _stop_at_news(progress) -> None:
    if progress.news:
        raise StoppedError


def test_what_was_given_up_stays_given_up_after_an_interruption(tmp_path):
    """The decision is repeated although the file has been repaired, and the bytes are the same."""
    config = _corpus(tmp_path, "VALUE")
    prepare(config, tmp_path / "through")
    with pytest.raises(StoppedError):
        prepare(config, tmp_path / "d", on_progress=_stop_at_news)
    _repair(config)
    pool, scans = _counting()
    prepare(config, tmp_path / "d", pool=pool)
    assert BAD not in scans
    assert _files_but_the_record(tmp_path / "d") == _files_but_the_record(tmp_path / "through")


@pytest.mark.fault("F19")
def test_a_unit_that_fails_when_it_is_tokenised_leaves_the_order_as_it_was(tmp_path):
    """Its documents count, and still make later ones repeats; it has no shards."""
    config = _corpus(tmp_path, "nothing")

    def crash(function, item) -> None:
        if function.__name__ == "tokenise_unit" and item.unit.number == BAD:
            raise WorkerDiedError("its process crashed (SIGSEGV)")

    manifest = prepare(config, tmp_path / "d", pool=Meddling(crash))
    whole = prepare(config, tmp_path / "whole")
    assert [one.error for one in _lost(manifest)] == ["it killed its process each time"]
    assert list(manifest.shards) == [shard for shard in whole.shards if shard.number != BAD]
    assert not list((tmp_path / "d").glob(f"*-{BAD:05d}.*"))


# ---- what no text is to blame for


def test_what_no_text_is_to_blame_for_ends_the_preparation(tmp_path):
    config = _corpus(tmp_path, "FULL")
    pool, scans = _counting()
    message = r"2\.jsonl.* failed 3 times in stage 'scan': .*No space left on device.*fix that"
    with pytest.raises(PrepareError, match=message):
        prepare(config, tmp_path / "d", pool=pool)
    assert scans[BAD] == ATTEMPTS
    assert not (tmp_path / "d" / QUARANTINED).exists()
    _repair(config)
    prepare(config, tmp_path / "d")
    prepare(config, tmp_path / "undisturbed")
    found, expected = tmp_path / "d", tmp_path / "undisturbed"
    assert _files_but_the_record(found) == _files_but_the_record(expected)


def test_ctrl_c_is_no_failure(tmp_path):
    config = _corpus(tmp_path, "CTRLC")
    pool, scans = _counting()
    with pytest.raises(KeyboardInterrupt):
        prepare(config, tmp_path / "d", pool=pool)
    assert scans[BAD] == 1
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


@pytest.mark.parametrize(
    ("error", "given_up_by"),
    [
        (WorkerDiedError("its process crashed (SIGSEGV)"), {"auto", "quarantine"}),
        (KeyError("x"), {"auto", "quarantine"}),
        (OSError("x"), {"auto", "quarantine"}),
        (WorkerKilledError("x"), {"quarantine"}),
        (MemoryError(), {"quarantine"}),
        (ImportError("x"), set()),
        (OSError(5, "x"), set()),
    ],
)
def test_what_each_policy_does_with_what_fails_three_times(error, given_up_by):
    """Either gives the unit up, or ends the preparation."""
    policies: tuple[OnPoison, ...] = ("auto", "fail", "quarantine")
    for policy in policies:
        failures = Failures(policy)
        assert [failures.try_again("one", error) for _ in range(ATTEMPTS)] == [True, True, False]
        assert failures.try_again("another", error), "each task has its own tries"
        if policy in given_up_by:
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
    whole, bad = _packed(suffix, sentences(9, 200)), tmp_path / f"bad.{suffix}"
    bad.write_bytes({"cut": whole[:-20], "garbage": b"\x01\xff" * 200, "empty": b""}[damage])
    good = write_jsonl(tmp_path / "good.jsonl", sentences(1, 12))
    names = (str(good), str(bad))
    config = PrepareConfig(input=names, tokenizer="bytes", validation_fraction=0.2)
    if (damage, suffix[:5]) != ("empty", "jsonl"):  # which is a file without lines
        for policy in ("auto", "fail"):
            with pytest.raises(InputError, match=rf"bad\.{suffix}"):
                prepare(config, tmp_path / policy, on_poison=policy)
        (lost,) = _lost(prepare(config, tmp_path / "d", on_poison="quarantine"))
        assert lost.input.count("bad.") == 1
    bad.write_bytes(whole)
    assert not _lost(prepare(config, tmp_path / "repaired", on_poison="quarantine"))


def test_what_was_repaired_before_anything_was_sealed_is_read(tmp_path):
    """Also where the repair leaves the size of the file."""
    config = _corpus(tmp_path, "VALUE").model_copy(update={"segment_tokens": 10**6})
    with pytest.raises(StoppedError):
        prepare(config, tmp_path / "d", on_progress=_stop_at_news)
    _repair(config)
    assert not _lost(prepare(config, tmp_path / "d"))


@pytest.mark.parametrize(
    ("tokenizer", "stage", "shuffle"),
    [
        ("bytes", "scan", False),
        ("bytes", "tokenise", True),
        ("bpe", "scan", True),
        ("bpe", "tokenise", False),
    ],
)
def test_a_folder_of_which_nothing_is_left_can_be_used_again(tmp_path, tokenizer, stage, shuffle):
    config = _corpus(tmp_path, "harmless", tokenizer=tokenizer)
    config = config.model_copy(update={"shuffle_documents": shuffle})
    said = r"nothing of source 'text' .*5 of its input splits|no text to train.*ZeroDiv"
    with pytest.MonkeyPatch.context() as patch:
        name = "_judged" if stage == "scan" else "_num_chars"
        patch.setattr(tasks, name, lambda *_: 1 / 0)
        for _ in range(2):  # the second call tries everything again
            with pytest.raises(PrepareError, match=said):
                prepare(config, tmp_path / "d")
            assert not list((tmp_path / "d").glob("manifest-*")), "nothing that a reader refuses"
    assert not _lost(prepare(config, tmp_path / "d"))
