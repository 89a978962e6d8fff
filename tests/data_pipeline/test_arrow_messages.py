"""A message decodes to what was written, or is refused before memory is allocated."""

import random
import struct
import tracemalloc

import numpy as np
import pyarrow as pa
import pytest
import zstandard

from moebius.data_pipeline.arrow_messages import EncodedBuffers, decode_batch

SCHEMA = pa.schema([("tokens", pa.list_(pa.uint16())), ("source", pa.string())])


def batch_of(num_tokens: int) -> pa.RecordBatch:
    tokens = np.random.default_rng(0).integers(0, 300, num_tokens).astype(np.uint16)
    offsets = pa.array([0, num_tokens // 3, num_tokens], type=pa.int32())
    columns = [pa.ListArray.from_arrays(offsets, pa.array(tokens)), pa.array(["a", "b"])]
    return pa.RecordBatch.from_arrays(columns, schema=SCHEMA)


def message_of(batch: pa.RecordBatch, codec: str | None = "zstd") -> bytes:
    options = pa.ipc.IpcWriteOptions(compression=codec)
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema, options=options) as writer:
        writer.write_batch(batch)
    stream = pa.BufferReader(sink.getvalue())
    pa.ipc.read_message(stream)  # the schema
    begin = stream.tell()
    pa.ipc.read_message(stream)
    return sink.getvalue().to_pybytes()[begin : stream.tell()]


@pytest.mark.parametrize("codec", ["zstd", "lz4", None])
@pytest.mark.parametrize("num_tokens", [2, 1000, 100_000])
def test_what_was_written_comes_back(codec, num_tokens):
    batch = batch_of(num_tokens)
    message = message_of(batch, codec)
    assert decode_batch(message, SCHEMA, max_bytes=2 * num_tokens + 1000).equals(batch)


@pytest.mark.parametrize("codec", ["zstd", "lz4", None])
def test_one_byte_more_than_allowed_is_refused(codec):
    batch = batch_of(30_000)
    message = message_of(batch, codec)
    needed = sum(buffer.size for column in batch.columns for buffer in column.buffers() if buffer)
    # Arrow pads uncompressed buffers; stated sizes are never too small
    with pytest.raises(ValueError, match=r"its buffers ask for \d+ bytes, at most 60010 are"):
        decode_batch(message, SCHEMA, max_bytes=60_010)
    assert needed > 60_010


def test_a_zstd_bomb_is_refused_before_memory_is_taken():
    """4 GiB of zeros in 2 MB, truthfully stated, are refused."""
    message = bytearray(message_of(batch_of(2**20)))
    bomb = _bomb(2**32)
    begin = _tokens_buffer(message)
    size = 8 + len(bomb)
    assert size < len(message) - begin
    message[begin : begin + size] = struct.pack("<q", 2**32) + bomb
    tracemalloc.start()
    before = pa.total_allocated_bytes()
    with pytest.raises(ValueError, match=r"its buffers ask for 4294\d+ bytes, at most"):
        decode_batch(bytes(message), SCHEMA, max_bytes=2**22)
    assert pa.total_allocated_bytes() == before
    assert tracemalloc.get_traced_memory()[1] < 2**24
    tracemalloc.stop()


def _tokens_buffer(message: bytearray) -> int:
    """Returns the offset of the compressed tokens, which begin with their size."""
    body = len(message) - pa.ipc.read_message(bytes(message)).body.size
    return message.index(struct.pack("<q", 2 * 2**20), body)


def _bomb(num_bytes: int) -> bytes:
    compressor = zstandard.ZstdCompressor(level=1).compressobj()
    zeros = bytes(2**24)
    parts = [compressor.compress(zeros) for _ in range(num_bytes // len(zeros))]
    return b"".join([*parts, compressor.flush()])


def test_a_bomb_that_hides_its_size_does_not_go_off():
    """The frame holds 64 MiB, but the message states 2: zstd gets only the stated memory."""
    message = bytearray(message_of(batch_of(2**20)))
    begin = _tokens_buffer(message) + 8
    bomb = _bomb(2**26)
    message[begin : begin + len(bomb)] = bomb
    before = pa.total_allocated_bytes()
    with pytest.raises(ValueError, match=r"no record batch.*[Zz]std|ZSTD"):
        decode_batch(bytes(message), SCHEMA, max_bytes=2**22)
    assert pa.total_allocated_bytes() - before < 2**22


@pytest.mark.parametrize("codec", ["zstd", None])
def test_any_bytes_give_a_batch_or_one_kind_of_error(codec):
    """Without a checksum wrong values are possible, but no crash or other error."""
    intact = message_of(batch_of(200), codec)
    rng = random.Random(0)
    refused = 0
    for case in range(3000):
        damaged = bytearray(intact)
        for _ in range(rng.choice([1, 1, 2, 8])):
            damaged[rng.randrange(len(damaged))] = rng.choice([0, 1, 127, 128, 255, case % 256])
        if case % 5 == 0:
            del damaged[rng.randrange(len(damaged)) :]
        try:
            found = decode_batch(bytes(damaged), SCHEMA, max_bytes=3000)
            assert sum(len(row) for row in found["tokens"].to_pylist() if row) <= 1500
        except ValueError:
            refused += 1
    assert refused > 500


def test_a_schema_message_is_no_record_batch():
    message = SCHEMA.serialize().to_pybytes()
    with pytest.raises(ValueError, match="it is no record batch"):
        decode_batch(message, SCHEMA, max_bytes=2**20)


# ---- single buffers, into memory that is there already


def test_no_damaged_buffer_is_written_beyond_its_array():
    """Any bytes give values or a ValueError."""
    intact = message_of(batch_of(3000))
    rng, refused = random.Random(1), 0
    for _ in range(500):
        damaged = bytearray(intact)
        for _ in range(rng.choice([1, 2, 8])):
            damaged[rng.randrange(len(damaged))] = rng.randrange(256)
        memory = np.full(3000 + 64, 7, dtype=np.uint16)
        try:
            EncodedBuffers(bytes(damaged)).decode_into(3, memory[:3000])
        except ValueError:
            refused += 1
        assert (memory[3000:] == 7).all()
    assert refused > 50
