"""The cache between scanning and tokenising changes only how often files are read."""

import os
from pathlib import Path

import pytest
from meddling import Meddling, files_of
from small_corpus import sentences, write_jsonl

from moebius.data_pipeline.errors import InputError
from moebius.data_pipeline.make import kept, tasks
from moebius.data_pipeline.make.prepare import prepare
from moebius.data_pipeline.make.units import plan_units
from moebius.data_pipeline.prepare_config import PrepareConfig


@pytest.fixture(autouse=True)
def _settled(monkeypatch):
    """Treats fresh files as settled, and skips fsync."""
    monkeypatch.setattr(kept, "_SETTLED_NS", -(10**18))
    monkeypatch.setattr(os, "fsync", lambda handle: None)


@pytest.fixture
def reads(monkeypatch) -> list[str]:
    """Collects the label of every split that is read."""
    read, labels = tasks.read_documents, []

    def counting(split, *arguments, **options):
        labels.append(split.local_label)
        return read(split, *arguments, **options)

    monkeypatch.setattr(tasks, "read_documents", counting)
    return labels


def _corpus(folder: Path) -> PrepareConfig:
    """Returns three files with some repeated documents."""
    texts = [sentences(0, 12), [*sentences(1, 9), " two  blanks ", *sentences(0, 3)], ["e\u0301 é"]]
    paths = [write_jsonl(folder / f"{n}.jsonl", some) for n, some in enumerate(texts)]
    return PrepareConfig(
        input=tuple(map(str, paths)),
        tokenizer="bytes",
        vocab_size=257,
        validation_fraction=0.2,
    )


def test_kept_documents_are_read_once_and_give_the_same_bytes(tmp_path, reads, monkeypatch):
    config = _corpus(tmp_path)
    prepare(config, tmp_path / "kept")
    assert len(reads) == len(set(reads)) == 3
    assert not kept._kept
    reads.clear()
    monkeypatch.setattr(kept, "_SETTLED_NS", 10**18)  # written just now
    prepare(config, tmp_path / "again")
    assert sorted(reads) == sorted(2 * list(set(reads)))
    assert files_of(tmp_path / "kept") == files_of(tmp_path / "again")


def test_no_more_is_kept_than_may_be(tmp_path, reads, monkeypatch):
    config = _corpus(tmp_path)
    prepare(config, tmp_path / "all")
    reads.clear()
    monkeypatch.setattr(kept, "MAX_KEPT_BYTES", 700)
    prepare(config, tmp_path / "some")
    assert 3 < len(reads) < 6  # the short last one is still cached
    assert files_of(tmp_path / "all") == files_of(tmp_path / "some")


def test_a_file_that_changes_after_it_was_scanned_is_noticed(tmp_path):
    config = _corpus(tmp_path)

    def meddle(function, item) -> None:
        if function.__name__ == "tokenise_unit":
            path = Path(item.unit.splits[0].url)
            path.write_text(path.read_text().replace("0", "9"))
            os.utime(path, (0, 0))  # the file system's clock may be coarse

    with pytest.raises(InputError, match="has changed while it was being prepared"):
        prepare(config, tmp_path / "d", pool=Meddling(meddle))
    assert not kept._kept


def test_hashes_that_another_process_has_found_count(tmp_path):
    """If a lost scan is repeated elsewhere after a change, the new content decides."""
    config = _corpus(tmp_path)
    task = tasks.UnitTask(config, tmp_path / "d", plan_units(config)[0])
    (tmp_path / "d" / "unfinished").mkdir(parents=True)
    for changed_by in (0, 1):
        task.unfinished("scan.npz").unlink(missing_ok=True)
        tasks.scan_unit(task)
        records = tasks.read_scan(task.directory, task.unit).records
        records["low"][0] += changed_by
        documents = kept.take(task.directory, task.unit, records)
        assert (documents is None) == bool(changed_by)
    assert kept.take(task.directory, task.unit, records) is None  # evicted by then
