"""A decoded chunk as a file that lies in memory alone, to be mapped by other processes.

On Linux it is a memfd, elsewhere an unlinked temporary file. Neither has a name: when the last
process that has it open or mapped ends, however it ends, its memory is free. So a kill -9 leaves
nothing behind, and no limit of /dev/shm (64 MiB in many containers) applies; cgroups count it as
memory. A memfd is sealed once it is written: no rank can change what another one reads, or cut it
short under its mapping.
"""

import fcntl
import mmap
import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..read.chunks import ChunkSize, LoadedChunk
from ..read.packing import ChunkPieces
from .protocol import Here, LostBatch, Part, ProtocolError

_ALIGN = 64
_DTYPES = {
    "tokens": {"uint16", "uint32"},
    "counts": {"bool"},
    "documents": {"int32"},
    "starts": {"int64"},
    "lengths": {"int64"},
    "row_starts": {"int64"},
    "continued": {"bool"},
    "damaged": {"bool"},
}


@dataclass(frozen=True)
class SharedChunk:
    """Is an open file with the arrays of a chunk, and what a rank must know to read it."""

    file: int
    num_bytes: int
    width: int
    parts: tuple[Part, ...]
    lost: tuple[LostBatch, ...]

    def as_message(self, number: int) -> Here:
        """Returns what is sent with the file; `number` is what a rank calls it."""
        return Here(
            number=number,
            num_bytes=self.num_bytes,
            width=self.width,
            parts=self.parts,
            lost=self.lost,
        )


def write_chunk(chunk: LoadedChunk, lost: Sequence[LostBatch] = ()) -> SharedChunk:
    """Writes a decoded chunk into a new file in memory.

    Raises:
        OSError: there is no memory for it.
    """
    arrays = {
        "tokens": chunk.flat_tokens,
        "counts": chunk.flat_counts,
        "documents": chunk.flat_documents,
        "starts": chunk.pieces.starts,
        "lengths": chunk.pieces.lengths,
        "row_starts": chunk.pieces.row_starts,
        "continued": chunk.continued,
        "damaged": chunk.damaged,
    }
    parts, end = [], 0
    for name, array in arrays.items():
        if array is not None:
            parts.append(Part(name=name, dtype=str(array.dtype), offset=end, count=len(array)))
            end += -(-array.nbytes // _ALIGN) * _ALIGN
    file = _new_file(end)
    try:
        for part in parts:
            _write(file, arrays[part.name], part.offset)
        _seal(file)
    except BaseException:
        os.close(file)
        raise
    return SharedChunk(file, end, chunk.width, tuple(parts), tuple(lost))


def most_bytes(size: ChunkSize, *, token_bytes: int, counts: bool, documents: bool) -> int:
    """Returns the most that a chunk of such a size takes, before it is decoded."""
    per_token = token_bytes + counts + 4 * documents
    per_piece = 8 + 8 + 1  # starts, lengths, continued
    per_row = 8 + 1  # row_starts, damaged
    arrays = size.tokens * per_token + size.pieces * per_piece + (size.rows + 1) * per_row
    return arrays + len(_DTYPES) * _ALIGN


def map_chunk(here: Here, file: int) -> tuple[LoadedChunk, mmap.mmap]:
    """Maps the chunk that a message describes; the file may be closed afterwards.

    Raises:
        ProtocolError: the file does not hold what the message says.
    """
    if here.num_bytes == 0 or os.fstat(file).st_size != here.num_bytes:
        raise ProtocolError(f"a file of {os.fstat(file).st_size} bytes, not {here.num_bytes}")
    mapping = mmap.mmap(file, here.num_bytes, prot=mmap.PROT_READ)
    arrays = {part.name: _array(mapping, part) for part in here.parts}
    chunk = _chunk_of(arrays, here)
    return chunk, mapping


def _chunk_of(arrays: dict[str, np.ndarray], here: Here) -> LoadedChunk:
    """Returns the chunk that arrays are of, if they fit each other."""
    if missing := {"tokens", "starts", "lengths", "row_starts"} - arrays.keys():
        raise ProtocolError(f"a chunk without {', '.join(sorted(missing))}")
    tokens = arrays["tokens"]
    pieces = ChunkPieces(arrays["starts"], arrays["lengths"], arrays["row_starts"])
    if pieces.num_rows < 1 or not pieces.fit(num_tokens=len(tokens), width=here.width):
        raise ProtocolError(f"rows of {here.width} that are no pieces of {len(tokens)} tokens")
    lengths = {
        "counts": len(tokens),
        "documents": len(tokens),
        "continued": len(pieces.starts),
        "damaged": pieces.num_rows,
    }
    for name, expected in lengths.items():
        if name in arrays and len(arrays[name]) != expected:
            raise ProtocolError(f"{len(arrays[name])} {name}, not {expected}")
    return LoadedChunk(
        width=here.width,
        pieces=pieces,
        flat_tokens=tokens,
        flat_counts=arrays.get("counts"),
        flat_documents=arrays.get("documents"),
        continued=arrays.get("continued"),
        damaged=arrays.get("damaged"),
        lost_batches=tuple(one.batch for one in here.lost),
    )


def _array(mapping: mmap.mmap, part: Part) -> np.ndarray:
    is_known = part.dtype in _DTYPES.get(part.name, ())
    dtype = np.dtype(part.dtype if is_known else bool)
    fits = part.offset % _ALIGN == 0 and part.offset + part.count * dtype.itemsize <= len(mapping)
    if not is_known or not fits:
        raise ProtocolError(f"an array that cannot be: {part}")
    return np.frombuffer(mapping, dtype=dtype, count=part.count, offset=part.offset)


def _new_file(num_bytes: int) -> int:
    if hasattr(os, "memfd_create"):
        file = os.memfd_create("moebius-chunk", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    else:
        with tempfile.TemporaryFile(prefix="moebius-chunk-") as unlinked:
            file = os.dup(unlinked.fileno())
    try:
        os.truncate(file, num_bytes)
    except OSError:
        os.close(file)
        raise
    return file


def _write(file: int, array: np.ndarray | None, offset: int) -> None:
    assert array is not None
    left = np.ascontiguousarray(array).view(np.uint8).data
    while left:
        written = os.pwrite(file, left, offset)
        left, offset = left[written:], offset + written


def _seal(file: int) -> None:
    if hasattr(fcntl, "F_ADD_SEALS"):
        seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SEAL
        fcntl.fcntl(file, fcntl.F_ADD_SEALS, seals)
