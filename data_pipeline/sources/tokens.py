"""Reads ready token files, ids that another program has written, with the input `tokens:FILE`.

    .bin beside .idx     Megatron-LM: a document is one of the index's documents
    .bin with a header   llm.c: a stream of uint16 or uint32
    .bin                 nanoGPT: a stream without a header, uint16 if the vocabulary fits, else uint32
    .npy                 one axis: a stream; two axes: a document is a row
    folder, .arrow       Hugging Face `datasets`: a document is a row of `input_ids` (`columns`)

The tokenizer's end-of-document id ends a document in all of them. Each document is decoded, which gives
it the hash, the size and the side of its text: the same text gives the same shards, whether it comes as
text or as ids. Files are read and checked a block at a time.

Sources: megatron/core/datasets/indexed_dataset.py of NVIDIA/Megatron-LM, dev/data/data_common.py of
karpathy/llm.c, data/openwebtext/prepare.py of karpathy/nanoGPT. Saved datasets are Arrow files, which
pyarrow reads as it reads others; importing `datasets` takes a second and adds nothing.
"""

import os
import re
import struct
from collections.abc import Iterable, Iterator
from functools import lru_cache
from glob import has_magic
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from ..data_config import MAX_DOCUMENT_BYTES
from ..errors import InputError
from ..prepare_config import TOKENS
from ..read.token_store import token_dtype
from ..tokenizers.interface import Tokenizer
from ..words import some_of
from .columns import record_batch_ranges, token_rows
from .documents import Document, InputSplit, SplitRange, byte_ranges, even_ranges
from .files import FoundFile, find_files, opened
from .records import RecordRules

_COUNTED = re.compile(r"(.*-)\d{5}-of-(\d{5})\.arrow")  # as `datasets` names its files
_MAX_DOCUMENT_IDS = MAX_DOCUMENT_BYTES // 4
_ARROW = ".arrow"
_SUFFIXES = (".bin", ".npy", _ARROW)
_BLOCK_IDS = 2**18
_ALIGNED = 8  # bytes, so that a range begins with an id of any width
_LLM_C = {20240520: (1, np.dtype("<u2")), 20240801: (7, np.dtype("<u4"))}  # by magic: version, ids
_LLM_C_BYTES = 1024
_MEGATRON = b"MMIDIDX\0\0"
_MEGATRON_HEAD = struct.Struct("<9sQBQQ")  # magic, version, dtype, sequences, bounds of documents
_MEGATRON_DTYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}


class _Layout(NamedTuple):
    """Says where the ids of a file lie: in one stream, or in records."""

    dtype: np.dtype
    num_bytes: int  # of the ids
    offset: int = 0  # of the first one, in bytes
    edges: range | np.ndarray | None = None  # of records: the first id of each, and the end


# ---- files


def token_files(name: str) -> list[FoundFile]:
    """Returns the files of a name after `tokens:`.

    Raises:
        InputError: there is none, its name does not say what it is, or a folder holds several inputs.
    """
    if not name:  # which would be the working folder
        raise InputError(f"{TOKENS} names no file: write {TOKENS}FILE (--tokens FILE)")
    found, _ = find_files(name, _is_named)
    wrong = [file.url for file in found if not _is_named(file.url)]
    if wrong or not found:
        raise InputError(
            f"{(wrong or [name])[0]} is not named as a token file ({some_of(_SUFFIXES)}), nor is a "
            "file in it: rename it, or prepare its text with --input"
        )
    folders = sorted({os.path.dirname(file.url) for file in found})
    if len(folders) > 1 and not has_magic(name):
        raise InputError(
            f"{name} holds token files in {len(folders)} folders: name one, such as {TOKENS}{folders[-1]}"
        )
    if not has_magic(name) and not _is_named(name):
        _refuse_missing(found)
    return found


def _refuse_missing(found: list[FoundFile]) -> None:
    """Refuses a folder that lacks one of the files of `save_to_disk`, which count themselves."""
    names = [os.path.basename(file.url) for file in found]
    for name in names:
        match = _COUNTED.fullmatch(name)
        wanted = (
            [f"{match[1]}{n:05}-of-{match[2]}{_ARROW}" for n in range(int(match[2]))]
            if match
            else []
        )
        if missing := {*wanted} - {*names}:
            raise InputError(
                f"{os.path.dirname(found[0].url)} lacks {some_of(sorted(missing))}: copy the folder again"
            )


def _is_named(url: str) -> bool:
    # `datasets` computes cache-*.arrow beside the files of save_to_disk
    return url.lower().endswith(_SUFFIXES) and not os.path.basename(url).startswith("cache-")


def token_ranges(url: str, size: int, split_bytes: int) -> Iterator[SplitRange]:
    """Yields the ranges of a token file: of bytes (a stream), records, or Arrow's batches.

    Raises:
        InputError: its header or its size is wrong.
    """
    if not size:
        raise InputError(f"{url} is empty: leave it out, or write its ids again")
    if url.lower().endswith(_ARROW):
        yield from record_batch_ranges(url, size, split_bytes)
        return
    layout = _layout(url, size)
    if layout.edges is None:
        step = max(_ALIGNED, split_bytes // _ALIGNED * _ALIGNED)
        yield from byte_ranges(url, layout.num_bytes, step)
    else:
        yield from even_ranges(len(layout.edges) - 1, layout.num_bytes, split_bytes)


def read_token_file(split: InputSplit, rules: RecordRules) -> Iterator[Document]:
    """Reads the documents of a split: their ids, and the text that these decode to.

    Raises:
        InputError: an id is not in the vocabulary, or the file is damaged.
    """
    tokenizer = rules.tokenizer
    assert tokenizer is not None, "who reads token files has a tokenizer"
    for row, tokens in enumerate(_documents(split, tokenizer)):
        yield Document(tokenizer.decode(tokens), split.file_name, row, tokens=tokens)


# ---- documents


def _documents(split: InputSplit, tokenizer: Tokenizer) -> Iterator[np.ndarray]:
    if split.url.lower().endswith(_ARROW):
        for row, ids in enumerate(token_rows(split)):
            yield from _cut([ids], tokenizer, f"{split.label}, row {row:,}")
        return
    layout = _layout(split.url, split.size, tokenizer)
    if layout.edges is None:
        yield from _of_stream(layout, split, tokenizer)
        return
    for first, last in pairwise(map(int, layout.edges[split.start : split.stop + 1])):
        yield from _cut(_blocks(split.url, layout, first, last), tokenizer, split.url, first)


def _blocks(url: str, layout: _Layout, first: int, last: int) -> Iterator[np.ndarray]:
    """Yields ids [first, last) of a file, some at a time."""
    for start in range(first, last, _BLOCK_IDS):
        place = layout.offset + start * layout.dtype.itemsize
        yield np.fromfile(url, layout.dtype, min(_BLOCK_IDS, last - start), offset=place)


def _of_stream(layout: _Layout, split: InputSplit, tokenizer: Tokenizer) -> Iterator[np.ndarray]:
    """Yields the documents that begin in a byte range of a stream.

    Some programs write the end of a document in front of each; none lies before the first.
    """
    width = layout.dtype.itemsize
    first, last = split.start // width, -(-split.stop // width)
    place = max(0, first - 1)  # a document that begins at `first` follows an end
    blocks = _blocks(split.url, layout, place, layout.num_bytes // width)
    for document in _cut(blocks, tokenizer, split.url, place):
        if place >= last:
            return
        if place >= first and (place or len(document)):
            yield document
        place += len(document) + 1


def _cut(
    blocks: Iterable[np.ndarray], tokenizer: Tokenizer, where: str, number: int = 0
) -> Iterator[np.ndarray]:
    """Yields the documents in ids from `number` on, without the ends that cut them apart."""
    end, size = tokenizer.end_of_document_id, 0
    pending: list[np.ndarray] = []
    for found in blocks:
        wrong = (found < 0) | (found >= tokenizer.vocab_size)
        if wrong.any():
            index = int(np.argmax(wrong))
            raise InputError(
                f"{where}: id {number + index:,} is {found[index]}, but the tokenizer has the ids 0 to "
                f"{tokenizer.vocab_size - 1}: use the tokenizer that made the file, or save ids of "
                "another width as .npy"
            )
        number += len(found)
        block = found.astype(token_dtype(tokenizer.vocab_size))
        *whole, rest = np.split(block, np.flatnonzero(block == end) + 1)
        for piece in whole:
            yield np.concatenate([*pending, piece[:-1]])
            pending, size = [], 0
        pending.append(rest)
        size += len(rest)
        if size > _MAX_DOCUMENT_IDS:
            raise InputError(
                f"{where} has {size:,} ids without the end of a document, id {end}: name the token "
                "between its documents as prepare.end_of_document, or save rows of ids, "
                "ids.reshape(-1, 4096), as .npy"
            )
    if size:
        yield np.concatenate(pending)


# ---- layouts


def _layout(url: str, size: int, tokenizer: Tokenizer | None = None) -> _Layout:
    """Finds a file's ids by its name and its first bytes; without a tokenizer, to plan it."""
    if "://" in url:
        raise InputError(f"{url} is not on this machine: download it, and name the local file")
    with opened(url, size) as file:
        head = file.read(_LLM_C_BYTES)
    if url.lower().endswith(".npy"):
        return _npy(url, size)
    if os.path.exists(index := f"{url[:-4]}.idx"):
        return _megatron(index, size, os.stat(index).st_mtime_ns)
    magic, version, count = struct.unpack("<3i", head[:12].ljust(12, b"\0"))
    if magic in _LLM_C:
        wanted, dtype = _LLM_C[magic]
        if (version, _LLM_C_BYTES + count * dtype.itemsize) != (wanted, size):
            raise InputError(
                f"{url} of {size:,} bytes has llm.c's header, version {version}, of {count:,} ids of "
                f"{dtype}: it must be version {wanted} and whole; copy it again"
            )
        return _Layout(dtype, size - _LLM_C_BYTES, _LLM_C_BYTES)
    dtype = token_dtype(tokenizer.vocab_size if tokenizer else 1).newbyteorder("<")
    ids = np.frombuffer(head[: len(head) // 8 * 8], dtype)
    is_wider = tokenizer is not None and len(ids) > 3 and ids.any() and not ids[1::2].any()
    if is_wider or size % dtype.itemsize:
        why = "every second one is 0" if is_wider else f"{size:,} bytes are no whole number of them"
        raise InputError(
            f"{url} would hold ids of {dtype.itemsize} bytes, but {why}: copy it again, or save ids of "
            'another width with their type: numpy.save("FILE.npy", numpy.fromfile("FILE", "uint32"))'
        )
    return _Layout(dtype, size)


def _npy(url: str, size: int) -> _Layout:
    try:
        array = np.lib.format.open_memmap(url, mode="r")
    except Exception as error:  # whatever a stranger's header makes NumPy raise
        raise InputError(
            f"{url} is no whole .npy file ({error!s:.200}): write it again with numpy.save"
        ) from error
    is_whole = array.size and array.offset + array.nbytes == size and array.flags.c_contiguous
    if array.dtype.kind not in "iu" or array.ndim not in (1, 2) or not is_whole:
        raise InputError(
            f"{url} has {size:,} bytes for {array.dtype} of shape {array.shape}: save whole numbers in C order, with "
            "one axis (a stream) or two (rows)"
        )
    rows = range(0, array.size + 1, array.shape[1]) if array.ndim == 2 else None
    return _Layout(array.dtype, array.nbytes, array.offset, rows)


@lru_cache(maxsize=1)
def _megatron(index: str, size: int, changed_ns: int) -> _Layout:
    """Reads the index beside a file of ids, once per process: 8 bytes of memory per document.

    While it is read, each of its sequences takes 60 bytes.
    """
    with opened(index) as file:
        head = file.read(_MEGATRON_HEAD.size).ljust(_MEGATRON_HEAD.size, b"\0")
        data = file.read()
    magic, version, code, count, num_bounds = _MEGATRON_HEAD.unpack(head)
    is_index = (magic, version) == (_MEGATRON, 1) and code in _MEGATRON_DTYPES
    if is_index and count and num_bounds and len(data) == 12 * count + 8 * num_bounds:
        dtype = np.dtype(_MEGATRON_DTYPES[code])
        sizes = np.frombuffer(data, "<i4", count) * np.int64(dtype.itemsize)
        edges = np.append(np.frombuffer(data, "<i8", count, 4 * count), size)
        bounds = np.frombuffer(data, "<i8", num_bounds, 12 * count)
        is_tiled = edges[0] == 0 and sizes.min() >= 0 and np.array_equal(np.diff(edges), sizes)
        is_sorted = np.array_equal(bounds, np.sort(bounds))
        if is_tiled and is_sorted and bounds[0] == 0 and bounds[-1] == count:
            return _Layout(dtype, size, edges=edges[bounds] // dtype.itemsize)
    raise InputError(
        f"{index}, version {version} with dtype {code}, does not fit the {size:,} bytes of its .bin: "
        "copy both again, or remove it to read its .bin as a stream"
    )
