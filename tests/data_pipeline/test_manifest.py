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
from pydantic import ValidationError

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
    assert manifest.complete
    assert [segment.number for segment in manifest.segments("web")] == [0, 1]
    assert [one.name for one in manifest.of("train")] == [
        "web.train-00000.tok.arrow",
        "web.train-00002.tok.arrow",
        "web.train-00003.tok.arrow",
        "code.train-00001.tok.arrow",
    ]
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


def test_writing_the_same_again_changes_nothing(chain):
    before = {path.name: path.stat().st_ino for path in chain.iterdir()}
    write(chain, header(), *SEGMENTS, END)
    assert {path.name: path.stat().st_ino for path in chain.iterdir()} == before


def test_writing_something_else_is_refused(chain):
    with pytest.raises(PrepareError, match=r"manifest-000001.json exists with other content"):
        write(chain, header(), SEGMENTS[1])
    assert len(read_manifest(chain).sealed) == 3


def test_a_file_system_without_hard_links(tmp_path, monkeypatch):
    def refusing(source, target):
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", refusing)
    create_once(tmp_path / "a", b"first")
    create_once(tmp_path / "a", b"first")
    with pytest.raises(PrepareError, match="with other content"):
        create_once(tmp_path / "a", b"second")
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {"a": b"first"}


def test_a_manifest_of_absurd_size_is_refused_before_it_is_read(chain):
    with open(chain / manifest_name(1), "wb") as file:
        file.truncate(10**12)
    with pytest.raises(ShardError, match="more than 67108864 bytes, so it is no manifest"):
        read_manifest(chain)


def test_a_pipe_is_no_manifest(tmp_path):
    os.mkfifo(tmp_path / "manifest-000000.json")  # reading it would wait for a writer
    with pytest.raises(ShardError, match="is damaged"):
        read_manifest(tmp_path)


@pytest.mark.parametrize("end", [257, 10**9])
def test_the_end_of_a_document_is_an_id(end):
    values = header().tokenizer.model_dump() | {"end_of_document_id": end}
    with pytest.raises(ValidationError, match=f"end_of_document_id {end} is no id"):
        type(header().tokenizer).model_validate(values)


def test_no_manifest(tmp_path):
    with pytest.raises(
        ShardError, match=r"manifest-000000.json does not exist: this folder holds no prepared data"
    ):
        read_manifest(tmp_path)


def test_another_format_is_refused(tmp_path):
    write(tmp_path, header(format_version=99))
    with pytest.raises(
        ShardError, match="has format 99, but this version reads format 3: prepare the data"
    ):
        read_manifest(tmp_path)


@pytest.mark.parametrize("number", range(4))
def test_a_manifest_that_is_missing_before_others_is_damage(chain, number):
    (chain / manifest_name(number)).unlink()
    with pytest.raises(ShardError, match=f"{manifest_name(number)} is missing"):
        read_manifest(chain)


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


@pytest.mark.parametrize(
    "name",
    [
        "../web.train-00000.tok.arrow",
        "/etc/passwd",
        "web.train-00000.tok.arrow/../../x",
        "web.train-00000.tok.arrow\n",
        "web.validation-00000.tok.arrow",
        "code.train-00000.tok.arrow",
        "web.train-0.tok.arrow",
        "web.train-000000.tok.arrow",
        "",
    ],
)
def test_no_name_leaves_the_folder(chain, name):
    forge(chain, 1, shards=dumped(shard_entry("web", 0), name=name))
    with pytest.raises(
        ShardError, match=re.escape(f"lists {name!r}, which is not a name of a train")
    ):
        read_manifest(chain)


@pytest.mark.parametrize(
    ("file", "changes", "message"),
    [
        (0, {"kind": "segment"}, "unknown, missing or impossible"),
        (0, {"batch_tokens": 2**40}, "unknown, missing or impossible"),
        (0, {"sources": []}, "unknown, missing or impossible"),
        (1, {"kind": "header"}, "unknown, missing or impossible"),
        (1, {"kind": "tombstone"}, "unknown, missing or impossible.*'tombstone'"),
        (1, {"number": 1}, "segment 1 of source 'web', expected 0"),
        (1, {"source": "books"}, "unknown source 'books'"),
        (1, {"shards": []}, "unknown, missing or impossible"),
        (1, {"shards": dumped(shard_entry("web", 0), num_tokens=2**60)}, "unknown, missing or"),
        (1, {"shards": dumped(shard_entry("web", 0), num_bytes=-1)}, "unknown, missing or"),
        (1, {"shards": dumped(shard_entry("web", 0), surprise=1)}, "unknown, missing or"),
        (
            1,
            {"shards": dumped(shard_entry("web", 0), source="code")},
            "not a name of a train shard",
        ),
        (1, {"shards": dumped(shard_entry("web", 1), shard_entry("web", 1))}, "out of order"),
        (3, {"shards": dumped(shard_entry("web", 0))}, "out of order"),
    ],
)
def test_what_cannot_be_is_refused_whatever_the_hashes_say(chain, file, changes, message):
    forge(chain, file, **changes)
    with pytest.raises(ShardError, match=rf"(?s){manifest_name(file)} .*{message}"):
        read_manifest(chain)


def test_an_exception_leaves_the_old_file_and_nothing_else(tmp_path):
    (tmp_path / "a").write_bytes(b"old")

    def write_half():
        with atomic_write(tmp_path / "a") as file:
            file.write(b"new")
            raise InputError("elsewhere")

    with pytest.raises(InputError, match="elsewhere"):
        write_half()
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


@pytest.mark.parametrize("content", [b"", b"[]", b"{", b"3", b"null", b"[" * 10**6, b'{"a":\xff}'])
def test_what_is_no_manifest_is_refused(chain, content):
    (chain / manifest_name(1)).write_bytes(content)
    with pytest.raises(ShardError, match=r"manifest-000001.json is damaged"):
        read_manifest(chain)
