"""The manifest notices any damage to itself, and files appear whole or not at all."""

import errno
import json
import os
import shutil

import pytest

from moebius.data_pipeline.errors import InputError, PrepareError, ShardError
from moebius.data_pipeline.manifest import (
    MANIFEST_FILE,
    atomic_write,
    read_manifest,
    write_manifest,
)


@pytest.fixture
def folder(prepared, tmp_path):
    shutil.copy(prepared / MANIFEST_FILE, tmp_path)
    return tmp_path


def test_written_and_read_again(prepared, tmp_path):
    write_manifest(tmp_path, read_manifest(prepared))
    assert read_manifest(tmp_path) == read_manifest(prepared)
    assert (tmp_path / MANIFEST_FILE).read_bytes() == (prepared / MANIFEST_FILE).read_bytes()


def test_any_flipped_bit_is_found(folder):
    path = folder / MANIFEST_FILE
    intact = path.read_bytes()
    for position in range(0, len(intact), 7):
        path.write_bytes(
            intact[:position]
            + bytes([intact[position] ^ (1 << position % 8)])
            + intact[position + 1 :]
        )
        with pytest.raises(ShardError, match="damaged"):
            read_manifest(folder)


@pytest.mark.parametrize("content", [b"", b"[]", b"{", b"3", b"null"])
def test_what_is_no_manifest_is_refused(folder, content):
    (folder / MANIFEST_FILE).write_bytes(content)
    with pytest.raises(ShardError, match=r"manifest.json is damaged"):
        read_manifest(folder)


def test_no_manifest(tmp_path):
    with pytest.raises(
        ShardError, match=r"manifest.json does not exist: this folder holds no prepared data"
    ):
        read_manifest(tmp_path)


def test_another_format_is_refused(folder):
    write_manifest(folder, read_manifest(folder).model_copy(update={"format_version": 99}))
    with pytest.raises(ShardError, match="has format 99, this version reads 1"):
        read_manifest(folder)


def test_it_names_no_time_and_no_host(prepared):
    body = json.loads((prepared / MANIFEST_FILE).read_bytes())["manifest"]
    assert set(body) == {
        "format_version",
        "spec_hash",
        "spec",
        "inputs",
        "tokenizer",
        "tokenizer_sha256",
        "vocab_size",
        "end_of_document_id",
        "batch_tokens",
        "shards",
        "dropped",
    }


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
