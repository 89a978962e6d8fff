"""Rows of both packings, with loss masks and document ids, compared with a slow reading."""

import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from made_folder import END, Document, MadeFolder, documents

from moebius.data_pipeline.atomic import read_record, write_record
from moebius.data_pipeline.errors import ShardError
from moebius.data_pipeline.read import packing
from moebius.data_pipeline.read import rows as reader_module
from moebius.data_pipeline.read.chunks import ChunkReader
from moebius.data_pipeline.read.rows import Prepared, RowReader, SplitReader

S = 16


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> MadeFolder:
    """Two sources, one with prompts; the first has two segments, one of three shards."""
    made = MadeFolder(
        tmp_path_factory.mktemp("made"), ("plain", "asked"), frozenset({"asked"}), batch_tokens=90
    )
    made.seal("plain", documents(0, 90), documents(5, 12), shards=3)
    made.seal("asked", documents(1, 70, prompts=True), documents(6, 9, prompts=True))
    made.seal("plain", [*documents(2, 40), Document((*range(200), END))], documents(7, 3))
    return made.complete()


SEGMENTS = [("plain", 0), ("plain", 1), ("asked", 0)]


def _reader(made: MadeFolder, **options: Any) -> tuple[Prepared, RowReader]:
    prepared = Prepared(made.folder, seq_len=S, **options)
    return prepared, RowReader(prepared, made.sources)


def _read(made: MadeFolder, source: str, segment: int, **options: Any) -> list[Any]:
    """Reads all rows of a segment in random order, and sorts them."""
    prepared, reader = _reader(made, **options)
    count = prepared.num_rows(source, segment)
    assert count == prepared.chunks(source, segment).num_rows
    order = np.random.default_rng(0).permutation(count)
    number = made.sources.index(source)
    found = reader.read(np.full(count, number), np.full(count, segment), order)
    back = np.argsort(order)
    parts = (found.tokens, found.loss_mask, found.document_ids)
    return [None if part is None else part[back] for part in parts]


@pytest.mark.parametrize("chunk_batches", [1, 2, 8])
@pytest.mark.parametrize(("source", "segment"), SEGMENTS)
def test_rows_that_are_cut_are_the_stream(folder, source, segment, chunk_batches):
    tokens, mask, ids = _read(
        folder, source, segment, document_ids=True, chunk_batches=chunk_batches
    )
    stream, learned = folder.stream(source, segment), folder.learned(source, segment)
    owner = folder.document_of(source, segment)
    assert tokens.dtype == np.int64
    assert ids.dtype == np.int32
    assert len(tokens) == (len(stream) - 1) // S
    for row in range(len(tokens)):
        span = slice(S * row, S * row + S + 1)
        assert tokens[row].tolist() == stream[span]
        assert mask[row].tolist() == learned[span][1:]
        assert ids[row].tolist() == [number - owner[S * row] for number in owner[span]]


@pytest.mark.parametrize("documents_per_chunk", [7, 1000])
@pytest.mark.parametrize(("source", "segment"), SEGMENTS)
def test_rows_of_fitted_documents_hold_them_whole(
    folder, tmp_path, monkeypatch, source, segment, documents_per_chunk
):
    monkeypatch.setattr(packing, "_PLAN_DOCUMENTS", documents_per_chunk)
    monkeypatch.setattr(packing, "_PLAN_ROWS", 1)
    made = folder.copied(tmp_path / "copy")
    tokens, mask, ids = _read(made, source, segment, packing="best_fit", document_ids=True)
    pieces = []
    for row in range(len(tokens)):
        padding = tokens[row][ids[row] < 0]
        assert set(padding.tolist()) <= {END}
        assert not mask[row][ids[row][1:] < 0].any()
        for number in dict.fromkeys(ids[row][ids[row] >= 0].tolist()):
            here = np.flatnonzero(ids[row] == number)
            assert np.array_equal(here, np.arange(here[0], here[-1] + 1))
            counted = [bool(mask[row][place - 1]) if place else None for place in here.tolist()]
            pieces.append((tokens[row][here].tolist(), counted))
    expected = [piece for one in folder.documents[source][segment] for piece in _pieces(one)]
    assert len(pieces) == len(expected)
    remaining = list(pieces)
    for wanted, counted in expected:
        match = next(one for one in remaining if one[0] == wanted and _agree(one[1], counted))
        remaining.remove(match)


def _pieces(document: Document):
    """Returns a cut document: tokens of each piece, and whether each counts as a target."""
    start = 0
    while True:
        tokens = document.tokens[start : start + S + 1]
        counted = [place >= document.prompt for place in range(start, start + len(tokens))]
        if start:
            counted[0] = False  # was the last target of the previous piece
        yield list(tokens), counted
        start += S
        if len(document.tokens) - start < 2:
            return


def _agree(found: list[bool | None], wanted: list[bool]) -> bool:
    """Ignores a row's first token, which is no target."""
    return all(one is None or one == other for one, other in zip(found, wanted, strict=True))


def test_where_a_segment_ends_no_chunk_is_decoded_again(folder, monkeypatch):
    """At the start of an epoch, the next segment may have a smaller number."""
    prepared = Prepared(folder.folder, seq_len=S, chunk_batches=4)
    tables = [prepared.chunks("plain", segment) for segment in (0, 1)]
    chunks = [len(table.row_starts) - 1 for table in tables]
    assert max(chunks) > min(chunks) > 1
    # caches as many as the larger segment has
    monkeypatch.setattr(reader_module, "_SPARE_CHUNKS", max(chunks) - tables[0].chunks_per_window)
    reads: list[int] = []
    read = ChunkReader.read
    monkeypatch.setattr(
        ChunkReader, "read", lambda reader, chunk: reads.append(chunk) or read(reader, chunk)
    )
    reader = RowReader(prepared, folder.sources)
    rng = np.random.default_rng(1)
    segments_rows = [
        (segment, rng.permutation(prepared.num_rows("plain", segment))) for segment in (1, 0, 1)
    ]
    segments = np.concatenate([np.full(len(rows), segment) for segment, rows in segments_rows])
    rows = np.concatenate([rows for _, rows in segments_rows])
    for first in range(0, len(rows), 40):
        part = rows[first : first + 40]
        reader.read(np.zeros(len(part), dtype=int), segments[first : first + 40], part)
    assert len(reads) == chunks[1] + chunks[0] + chunks[1]


# ---- validation and text of first segments


def test_a_split_is_the_first_segments_of_all_sources(folder):
    for split, kept in (("validation", folder.validation), ("train", folder.documents)):
        reader = SplitReader(folder.folder, split, seq_len=S, document_ids=True)
        expected = []
        for source in ("plain", "asked"):
            stream = [token for one in kept[source][0] for token in one.tokens]
            expected += [stream[S * row : S * row + S + 1] for row in range((len(stream) - 1) // S)]
        assert reader.num_rows == len(expected)
        rows = reader.read(np.arange(len(expected))[::-1])
        assert rows.tokens[::-1].tolist() == expected
        assert rows.loss_mask is not None
        assert rows.document_ids is not None
        assert reader.num_tokens == sum(
            len(one.tokens) for source in kept for one in kept[source][0]
        )


def test_a_folder_that_grows_can_be_validated_on_from_its_first_segments_on(tmp_path):
    made = MadeFolder(tmp_path / "d", ("a", "b"))
    reader = SplitReader(made.folder, "validation", seq_len=S)
    assert reader.num_rows == 0
    made.seal("a", documents(0, 20), documents(1, 20))
    reader = SplitReader(made.folder, "validation", seq_len=S)
    rows = reader.num_rows
    assert rows > 5
    made.seal("a", documents(2, 20), documents(3, 20))
    reader = SplitReader(made.folder, "validation", seq_len=S)
    assert reader.num_rows == rows


# ---- faults


def test_a_plan_that_does_not_fit_its_segment_is_told(folder, tmp_path):
    made = folder.copied(tmp_path / "copy")
    _read(made, "plain", 0, packing="best_fit")
    (path,) = made.folder.glob("pack-plain-000000-*.json")
    plan: Any = read_record(path)
    plan["chunks"][0][2] += 1
    write_record(path, plan)
    with pytest.raises(ShardError, match=r"segment 0 of source 'plain' does not fit it: delete"):
        _read(made, "plain", 0, packing="best_fit")


_WITHOUT_PANDAS = """
import sys
from moebius.data_pipeline.data_config import DataConfig
from moebius.data_pipeline.read.loader import Loader

data = DataConfig(directory=sys.argv[1], seq_len=4, packing="best_fit")
with Loader(data, global_batch=1, micro_batch=1) as loader:
    next(loader)
assert "numpy" in sys.modules
assert "pandas" not in sys.modules
"""


def test_reading_imports_no_pandas(folder):
    """It would delay the start of every rank by half a second."""
    command = [sys.executable, "-c", _WITHOUT_PANDAS, str(folder.folder)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stderr
