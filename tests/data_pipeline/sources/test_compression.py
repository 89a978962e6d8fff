"""Decompressing takes no more memory than a line may have."""

import gzip
import tracemalloc

import pytest
import zstandard
from small_corpus import documents_by_split

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


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.jsonl.zst", "a.txt.zst", "a.jsonl", "a.txt"])
def test_a_line_without_end_is_an_error_that_names_the_limit(tmp_path, monkeypatch, name):
    monkeypatch.setattr(lines, "MAX_LINE_BYTES", 3 * MIB)
    path = tmp_path / name
    suffix = name.rpartition(".")[2]
    path.write_bytes(_bomb(suffix, 8) if suffix in ("gz", "zst") else b" " * (8 * MIB))
    beyond = "unpacked " if suffix in ("gz", "zst") else ""
    with pytest.raises(
        InputError, match=f"a line has more than 3,145,728 {beyond}bytes, the limit"
    ):
        documents_by_split(path)


def test_a_line_of_the_limit_is_read(tmp_path, monkeypatch):
    monkeypatch.setattr(lines, "MAX_LINE_BYTES", 3 * MIB)
    (tmp_path / "a.txt").write_bytes(b"x" * (3 * MIB) + b"\nshort\n")
    (split,) = documents_by_split(tmp_path / "a.txt")
    found = "".join(one.text for one in split)
    assert len(found) == 3 * MIB + 7
