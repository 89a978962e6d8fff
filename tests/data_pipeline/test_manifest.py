"""The chain of manifests detects any damage to itself, and files appear atomically."""

import errno
import hashlib
import json
import os
import random
import re
from pathlib import Path
from typing import Any

import pytest
from made_folder import header_of, shard_entry, source_entry

from moebius.data_pipeline import manifest as manifests
from moebius.data_pipeline.atomic import atomic_write
from moebius.data_pipeline.errors import InputError, PrepareError, ShardError
from moebius.data_pipeline.make.commit import ManifestWriter, create_once
from moebius.data_pipeline.manifest import (
    Completion,
    Header,
    Segment,
    ShardEntry,
    follow,
    manifest_name,
    read_manifest,
)


def header(**changes: Any) -> Header:
    sources = [source_entry(name) for name in ("web", "code")]
    return header_of(sources, **({"batch_tokens": 64, "segment_tokens": 200} | changes))


SEGMENTS = (
    Segment(
        source="web", number=0, shards=(shard_entry("web", 0), shard_entry("web", 0, "validation"))
    ),
    Segment(source="code", number=0, shards=(shard_entry("code", 1),)),
    Segment(source="web", number=1, shards=(shard_entry("web", 2), shard_entry("web", 3))),
)
END = Completion(
    num_documents={"web": {"train": 9}},
    num_tokens={"web": {"train": 305}},
    dropped={"web": {"empty": 2, "duplicate": 1}, "code": {"empty": 5}},
    quarantined=(),
    inputs={"web.txt": 7},
)


def write(folder: Path, *bodies: Header | Segment | Completion) -> Path:
    writer = ManifestWriter(folder)
    for body in bodies:
        writer.append(body)
    return folder


@pytest.fixture
def chain(tmp_path) -> Path:
    return write(tmp_path, header(), *SEGMENTS, END)


def test_what_was_written_is_read_again(chain):
    manifest = read_manifest(chain)
    assert manifest.header == header()
    assert [one.shards for one in manifest.sealed] == [one.shards for one in SEGMENTS]
    assert manifest.completion == END
    assert [segment.number for segment in manifest.segments("web")] == [0, 1]
    names = [f"web.train-0000{number}.tok.arrow" for number in (0, 2, 3)]
    assert [one.name for one in manifest.of("train")] == [*names, "code.train-00001.tok.arrow"]
    assert manifest.num_tokens("train") == 100 + 102 + 103 + 101
    assert manifest.segments("web")[1].num_tokens("train") == 205
    with pytest.raises(ShardError, match=r"no source 'books'; its sources are web, code"):
        manifest.segments("books")


def test_a_growing_chain_is_followed_without_reading_again_what_is_known(tmp_path, monkeypatch):
    writer = ManifestWriter(tmp_path)
    writer.append(header())
    known = read_manifest(tmp_path)
    assert not known.complete
    assert known.segments("web") == ()
    assert follow(tmp_path, known) is known
    read, opened = manifests._read, []

    def noting(path: Path) -> bytes | None:
        if (data := read(path)) is not None:
            opened.append(path.name)
        return data

    monkeypatch.setattr(manifests, "_read", noting)
    for body in (*SEGMENTS, END):
        writer.append(body)
        known = follow(tmp_path, known)
    assert opened == [manifest_name(number) for number in range(1, 5)]
    assert known == read_manifest(tmp_path)
    assert known.complete


def test_writing_the_same_again_changes_nothing_and_something_else_is_refused(chain):
    before = {path.name: path.stat().st_ino for path in chain.iterdir()}
    write(chain, header(), *SEGMENTS, END)
    with pytest.raises(PrepareError, match=r"manifest-000001.json exists with other content"):
        write(chain, header(), SEGMENTS[1])
    assert {path.name: path.stat().st_ino for path in chain.iterdir()} == before


def test_a_file_system_without_hard_links(tmp_path, monkeypatch):
    def refusing(source, target):
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", refusing)
    create_once(tmp_path / "a", b"first")
    create_once(tmp_path / "a", b"first")
    with pytest.raises(PrepareError, match="with other content"):
        create_once(tmp_path / "a", b"second")
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {"a": b"first"}


@pytest.mark.parametrize("number", range(4))
def test_a_manifest_that_is_missing_before_others_is_damage(chain, number):
    (chain / manifest_name(number)).unlink()
    with pytest.raises(ShardError, match=f"{manifest_name(number)} is missing"):
        read_manifest(chain)


def _huge(path: Path) -> None:
    path.touch()
    os.truncate(path, 10**12)


@pytest.mark.parametrize(
    ("put", "message"),
    [
        (lambda path: None, "does not exist: this folder holds no prepared data"),
        (_huge, r"cannot be read \(Larger than 67,108,864 bytes\)"),
        (os.mkfifo, "does not exist"),  # reading it would wait for a writer
        (
            lambda path: write(path.parent, header(format_version=99)),
            "has format 99, but .*format 3",
        ),
        *(
            (lambda path, text=text: path.write_bytes(text), "is damaged")
            for text in (b"", b"[]", b"3", b"null", b"[" * 10**6, b'{"a":\xff}')
        ),
    ],
)
def test_what_is_no_manifest_is_refused(tmp_path, put, message):
    put(tmp_path / manifest_name(0))
    with pytest.raises(ShardError, match=f"manifest-000000.json {message}"):
        read_manifest(tmp_path)


def test_a_manifest_that_is_written_while_the_chain_is_read_is_no_gap(chain, monkeypatch):
    hidden, read = chain / manifest_name(2), manifests._read

    def late(path: Path) -> bytes | None:
        if path == hidden and late_reads.append(path) is None and len(late_reads) == 1:
            return None
        return read(path)

    late_reads: list[Path] = []
    monkeypatch.setattr(manifests, "_read", late)
    assert read_manifest(chain).complete


def test_a_manifest_of_another_folder_is_refused(chain, tmp_path):
    other = tmp_path / "other"
    other.mkdir()
    write(other, header(segment_tokens=300), *SEGMENTS)
    (chain / manifest_name(2)).write_bytes((other / manifest_name(2)).read_bytes())
    with pytest.raises(ShardError, match=r"000002.json does not continue the manifest before it"):
        read_manifest(chain)


def forge(folder: Path, file: int, **changes: Any) -> None:
    """Changes a manifest and all hashes that would reveal it."""
    parent = ""
    for position in range(5):
        path = folder / manifest_name(position)
        body = json.loads(path.read_bytes())["manifest"] | {"parent": parent}
        if position == file:
            body |= changes
        parent = hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
        path.write_text(json.dumps({"manifest": body, "sha256": parent}, indent=1))


def dumped(*shards: ShardEntry, **changes: Any) -> list[dict[str, Any]]:
    return [one.model_dump(mode="json") | changes for one in shards]


def web(**changes: Any) -> dict[str, Any]:
    """Returns a segment's only shard, changed."""
    return {"shards": dumped(shard_entry("web", 0), **changes)}


OF_RULE, UNKNOWN = "which is not a name of a train", "unknown, missing or impossible"
NAMES = (
    *("../web.train-00000.tok.arrow", "/etc/passwd", "web.train-00000.tok.arrow/../../x"),
    *("web.train-00000.tok.arrow\n", "web.validation-00000.tok.arrow", ""),
    *("code.train-00000.tok.arrow", "web.train-0.tok.arrow", "web.train-000000.tok.arrow"),
)


@pytest.mark.parametrize(
    ("file", "changes", "message"),
    [
        (0, {"kind": "segment"}, UNKNOWN),
        (0, {"batch_tokens": 2**40}, UNKNOWN),
        (0, {"sources": []}, UNKNOWN),
        (
            0,
            {"tokenizer": header().tokenizer.model_dump() | {"end_of_document_id": 257}},
            "end_of_document_id 257 is no id",
        ),
        (1, {"kind": "tombstone"}, f"{UNKNOWN}.*'tombstone'"),
        (1, {"number": 1}, "segment 1 of source 'web', expected 0"),
        (1, {"source": "books"}, "unknown source 'books'"),
        (1, {"shards": []}, UNKNOWN),
        (1, web(num_tokens=2**60), UNKNOWN),
        (1, web(num_bytes=-1), UNKNOWN),
        (1, web(surprise=1), UNKNOWN),
        (1, web(source="code"), OF_RULE),
        *((1, web(name=name), f"lists {re.escape(repr(name))}, {OF_RULE}") for name in NAMES),
        (1, {"shards": dumped(shard_entry("web", 1), shard_entry("web", 1))}, "out of order"),
        (3, web(), "out of order"),
    ],
)
def test_what_cannot_be_is_refused_whatever_the_hashes_say(chain, file, changes, message):
    """No name leaves the folder, for example."""
    forge(chain, file, **changes)
    with pytest.raises(ShardError, match=rf"(?s){manifest_name(file)} .*{message}"):
        read_manifest(chain)


def test_an_exception_leaves_the_old_file_and_nothing_else(tmp_path):
    (tmp_path / "a").write_bytes(b"old")
    with pytest.raises(InputError, match="elsewhere"), atomic_write(tmp_path / "a"):
        raise InputError("elsewhere")
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {"a": b"old"}


@pytest.mark.parametrize(
    ("number", "message"),
    [
        (errno.ENOSPC, "No space left on device.*free some space.*continues where it stopped"),
        (errno.EDQUOT, "quota"),
        (errno.EACCES, "Permission denied.*write permission"),
        (errno.EROFS, "read-only"),
        (errno.EIO, "nothing half-written is left"),
    ],
)
def test_what_the_system_says_becomes_advice(tmp_path, monkeypatch, number, message):
    def failing(handle):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fsync", failing)
    with pytest.raises(PrepareError, match=rf"(?s)cannot write .*a \(.*{message}"):
        with atomic_write(tmp_path / "a") as file:
            file.write(b"new")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("number", range(5))
def test_any_flipped_bit_is_found(chain, number):
    path = chain / manifest_name(number)
    intact = path.read_bytes()
    rng = random.Random(number)
    for position in sorted(rng.sample(range(len(intact)), 120)):
        flipped = intact[position] ^ (1 << rng.randrange(8))
        path.write_bytes(intact[:position] + bytes([flipped]) + intact[position + 1 :])
        with pytest.raises(ShardError, match=rf"{manifest_name(number)} is damaged"):
            read_manifest(chain)
