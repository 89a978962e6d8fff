"""Decompressing takes no more memory than a line may have."""

import bz2
import gzip
import lzma
import tracemalloc
from pathlib import Path

import pytest
import zstandard
from small_corpus import documents_by_split, read_texts

from moebius.data_pipeline.errors import InputError
from moebius.data_pipeline.sources import lines
from moebius.data_pipeline.sources.compression import CHUNK_BYTES, unpacked_chunks

MIB = 2**20


def _bomb(suffix: str, num_mib: int, content: bytes = b" ") -> bytes:
    """Returns many MiB of one byte, a few kB as .zst."""
    if suffix == "gz":
        return gzip.compress(content * (num_mib * MIB), compresslevel=1)
    compressor = zstandard.ZstdCompressor().compressobj()
    parts = [compressor.compress(content * MIB) for _ in range(num_mib)]
    return b"".join([*parts, compressor.flush()])


@pytest.mark.parametrize(("suffix", "num_mib"), [("gz", 32), ("zst", 192)])
@pytest.mark.parametrize("content", [b" ", b"\n"])
def test_a_bomb_is_unpacked_in_small_pieces(tmp_path, suffix, num_mib, content):
    path = tmp_path / f"a.txt.{suffix}"
    path.write_bytes(_bomb(suffix, num_mib, content))
    assert path.stat().st_size < num_mib * MIB / 200
    tracemalloc.start()
    with open(path, "rb") as file:
        sizes = [len(chunk) for chunk in unpacked_chunks(file, str(path))]
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert sum(sizes) == num_mib * MIB
    assert max(sizes) <= CHUNK_BYTES
    assert peak < 150 * MIB


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.txt.zst", "a.txt"])
def test_a_line_without_end_is_an_error_that_names_the_limit(tmp_path, monkeypatch, name):
    monkeypatch.setattr(lines, "MAX_LINE_BYTES", 3 * MIB)
    is_packed = not name.endswith("txt")
    content = _bomb(name.rpartition(".")[2], 8) if is_packed else b" " * (8 * MIB)
    (tmp_path / name).write_bytes(content)
    said = f"a line has more than 3,145,728 {'unpacked ' * is_packed}bytes, the limit"
    with pytest.raises(InputError, match=said):
        documents_by_split(tmp_path / name)


def test_a_line_of_the_limit_is_read(tmp_path, monkeypatch):
    monkeypatch.setattr(lines, "MAX_LINE_BYTES", 3 * MIB)
    (tmp_path / "a.txt").write_bytes(b"x" * (3 * MIB) + b"\nshort\n")
    assert sum(map(len, read_texts(tmp_path / "a.txt"))) == 3 * MIB + 7


def _unpacked(path: Path) -> bytes:
    with open(path, "rb") as file:
        return b"".join(unpacked_chunks(file, str(path)))


def _zstd(window_log: int, content: bytes = b"a text") -> bytes:
    """Returns a frame of a stream, which states its window, as `zstd --long` does from a pipe."""
    options = zstandard.ZstdCompressionParameters(window_log=window_log)
    stream = zstandard.ZstdCompressor(compression_params=options).compressobj()
    return stream.compress(content) + stream.flush()


@pytest.mark.parametrize("window_log", [27, 28, 31])
def test_a_long_window_is_read(tmp_path, window_log):
    path = tmp_path / "a.txt.zst"
    path.write_bytes(_zstd(window_log))
    assert _unpacked(path) == b"a text"


def test_padding_after_a_member_is_no_damage(tmp_path):
    for name, packed in (
        ("a.gz", gzip.compress(b"one", mtime=0)),
        ("a.zst", zstandard.compress(b"one")),
        ("a.xz", lzma.compress(b"one")),
        ("a.bz2", bz2.compress(b"one")),
    ):
        path = tmp_path / name
        path.write_bytes(packed + bytes(100_000) + packed + bytes(512))
        assert _unpacked(path) == b"oneone"
        path.write_bytes(bytes(512))
        with pytest.raises(InputError, match=r"its name is wrong, or it is damaged"):
            _unpacked(path)


def test_what_is_no_damage_is_said_as_what_it_is(tmp_path):
    dictionary = zstandard.train_dictionary(2000, [b"hello world %d " % n * 9 for n in range(999)])
    raw = zstandard.ZstdCompressionDict(
        b"hello world " * 9, dict_type=zstandard.DICT_TYPE_RAWCONTENT
    )
    packed = zstandard.compress(b"a text " * 99)
    too_wide = bytearray(_zstd(31))
    too_wide[5] += 8  # the window's exponent, in the frame's second field
    for content, message in (
        (
            zstandard.ZstdCompressor(dict_data=dictionary).compress(b"hello world 3 " * 9),
            "unpack it with the dictionary that it needs: zstd -d -D DICTIONARY",
        ),
        (
            zstandard.ZstdCompressor(dict_data=raw).compress(b"hello world " * 9),
            "damaged; fetch it again .if it is whole, it was compressed with a dictionary",
        ),
        (bytes(too_wide), "its window exceeds 2 GiB: compress it again without --long"),
        (b"plain text", "its name is wrong, or it is damaged: look at it with `file`"),
        (packed[:9] + b"\xff" + packed[10:], "is not valid zstd .*it is damaged; fetch it again"),
        (packed + b"rubbish", "is not valid zstd .*it is damaged"),
    ):
        path = tmp_path / "a.zst"
        path.write_bytes(content)
        with pytest.raises(InputError, match=message):
            _unpacked(path)
