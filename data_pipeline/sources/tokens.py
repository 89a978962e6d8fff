"""Reads ready token files, ids that another program has written, with the input `tokens:FILE`.

    .bin beside .idx     Megatron-LM: a document is one of the index's documents
    .bin with a header   llm.c: a stream of uint16 or uint32
    .bin                 nanoGPT: a stream without a header, uint16 if the vocabulary fits, else uint32
    .npy                 one axis: a stream; two axes: a document is a row
    folder, .arrow       Hugging Face `datasets`: a document is a row of `input_ids` (`columns`)

The tokenizer's end-of-document id ends a document in all of them. Each document is decoded, which gives
it the hash, the size and the side of its text: the same text gives the same shards, whether it comes as
text or as ids. Files are memory-mapped and checked a block at a time.

Sources: megatron/core/datasets/indexed_dataset.py of NVIDIA/Megatron-LM, dev/data/data_common.py of
karpathy/llm.c, data/openwebtext/prepare.py of karpathy/nanoGPT. Saved datasets are Arrow files, which
pyarrow reads as it reads others; importing `datasets` takes a second and adds nothing.
"""

import os
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from ..data_config import MAX_DOCUMENT_BYTES
from ..errors import InputError
from ..files import json_object
from ..prepare_config import TOKENS
from ..read.token_store import token_dtype
from ..tokenizers.interface import Tokenizer
from ..words import some_of
from .columns import token_row_ranges, token_rows
from .documents import Document, InputSplit, SplitRange, byte_ranges
from .files import FoundFile, content_of, find_files, opened
from .records import RecordRules

WIDTHS = ("uint16", "uint32", "int32", "int64")
"""What may follow `?dtype=`, for a stream without a header, whatever its name."""

MAX_DOCUMENT_IDS = MAX_DOCUMENT_BYTES // 4

_SUFFIXES = (".bin", ".npy", ".arrow")
_BLOCK_IDS = 2**18
_ALIGNED = 8  # bytes, so that a range begins with an id of any width
_LLM_C = {20240520: (1, "<u2"), 20240801: (7, "<u4")}  # magic: version, ids
_LLM_C_BYTES = 1024
_MEGATRON = b"MMIDIDX\0\0"
_MEGATRON_HEAD = struct.Struct("<9sQBQQ")  # magic, version, dtype, sequences, bounds of documents
_MEGATRON_DTYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}


@dataclass(frozen=True)
class _Ids:
    """Holds the memory-mapped ids of a file, in records, or in one stream."""

    flat: np.ndarray  # [ids]
    num_records: int = 0
    records: Callable[[int, int], list[tuple[int, int]]] | None = None  # the ids of some


# ---- files


def token_files(name: str) -> Iterator[tuple[FoundFile, str]]:
    """Yields the files of a name after `tokens:`, each with the width that `?dtype=` gives.

    Raises:
        InputError: there is none, or its name does not say what it is.
    """
    name, is_given, given = name.partition("?dtype=")
    if is_given and given not in WIDTHS:
        raise InputError(f"{TOKENS}{name}: dtype must be one of {some_of(WIDTHS)}, not {given!r}")
    if not name:  # which would be the working folder
        raise InputError(f"{TOKENS} names no file: write {TOKENS}FILE (--tokens FILE)")
    if name.endswith(".idx"):
        name = name.removesuffix(".idx") + ".bin"
    saved = [] if _is_named(name) else _saved_files(name)
    for pattern in saved or [name]:
        found, _ = find_files(pattern, _is_named)
        if not found:
            raise InputError(
                f"input {pattern!r} is a folder without token files ({some_of(_SUFFIXES)}): name the "
                "files of ids, or prepare text with --input"
            )
        for file in found:
            if file.url.endswith(".idx"):  # part of the file beside it
                continue
            if not given and not _is_named(file.url):
                raise InputError(
                    f"{file.url} is not named as a token file ({some_of(_SUFFIXES)}): write "
                    f"{TOKENS}{file.url}?dtype=uint16 if it holds ids without a header"
                )
            yield file, given


def _is_named(url: str) -> bool:
    return url.lower().endswith(_SUFFIXES)


def _saved_files(folder: str) -> list[str]:
    """Returns the files that `Dataset.save_to_disk` wrote, in order; none in another folder."""
    if content_of(f"{folder}/dataset_dict.json") is not None:
        raise InputError(f"{folder} holds several splits: name one, such as {TOKENS}{folder}/train")
    where = f"{folder}/state.json"
    if (content := content_of(where)) is None:
        return []
    try:
        names = [str(one["filename"]) for one in json_object(content, where)["_data_files"]]
    except (ValueError, LookupError, TypeError) as error:
        raise InputError(
            f"{where} lists no files ({error!r:.200}): save the dataset again"
        ) from error
    if not all(name.endswith(".arrow") and "/" not in name for name in names):
        raise InputError(f"{where} lists files elsewhere, {some_of(names)}: save the dataset again")
    return [f"{folder}/{name}" for name in names]


def token_ranges(url: str, size: int, split_bytes: int, *, given: str = "") -> Iterator[SplitRange]:
    """Yields the ranges of a token file: of bytes (a stream), records, or Arrow's batches.

    Raises:
        InputError: its header or its size is wrong.
    """
    if not size:
        raise InputError(f"{url} is empty: leave it out, or write its ids again")
    if _is_saved(url, given):
        yield from token_row_ranges(url, size, split_bytes)
        return
    ids = _opened(url, size, given)
    if ids.records is None:
        step = max(_ALIGNED, split_bytes // _ALIGNED * _ALIGNED)
        yield from byte_ranges(url, ids.flat.nbytes, step)
        return
    parts = min(ids.num_records, -(-ids.flat.nbytes // split_bytes))
    bounds = [ids.num_records * part // parts for part in range(parts + 1)]
    for start, stop in pairwise(bounds):
        yield SplitRange(start, stop, ids.flat.nbytes // parts)


def read_token_file(
    split: InputSplit, rules: RecordRules, *, given: str = ""
) -> Iterator[Document]:
    """Reads the documents of a split: their ids, and the text that these decode to.

    Raises:
        InputError: an id is not in the vocabulary, or the file is damaged.
    """
    tokenizer = rules.tokenizer
    if tokenizer is None:
        raise InputError(f"{split.url} holds ids, not text: only `moebius prepare` reads them")
    for row, tokens in enumerate(_documents(split, tokenizer, given)):
        yield Document(tokenizer.decode(tokens), split.file_name, row, tokens=tokens)


def _documents(split: InputSplit, tokenizer: Tokenizer, given: str) -> Iterator[np.ndarray]:
    if _is_saved(split.url, given):
        for row, values in enumerate(token_rows(split)):
            yield from _cut(values, 0, len(values), tokenizer, f"{split.label}, row {row:,}")
        return
    ids = _opened(split.url, split.size, given, tokenizer)
    if ids.records is None:
        yield from _of_stream(ids.flat, split, tokenizer)
        return
    for first, last in ids.records(split.start, split.stop):
        yield from _cut(ids.flat, first, last, tokenizer, split.url)


def _is_saved(url: str, given: str) -> bool:
    return not given and url.lower().endswith(".arrow")


def _of_stream(flat: np.ndarray, split: InputSplit, tokenizer: Tokenizer) -> Iterator[np.ndarray]:
    """Yields the documents that begin in a byte range of a stream.

    Some programs write the end of a document in front of each; none lies before the first.
    """
    first, last = split.start // flat.itemsize, -(-split.stop // flat.itemsize)
    place = max(0, first - 1)  # a document that begins at `first` follows an end
    for document in _cut(flat, place, len(flat), tokenizer, split.url):
        if place >= last:
            return
        if place >= first and (place or len(document)):
            yield document
        place += len(document) + 1


def _cut(
    flat: np.ndarray, first: int, last: int, tokenizer: Tokenizer, where: str
) -> Iterator[np.ndarray]:
    """Yields ids [first, last), cut at each end of a document, which is left out."""
    end, size = tokenizer.end_of_document_id, 0
    pending: list[np.ndarray] = []
    for start in range(first, last, _BLOCK_IDS):
        block = flat[start : min(last, start + _BLOCK_IDS)]
        _check(block, start, tokenizer.vocab_size, where)
        block = block.astype(token_dtype(tokenizer.vocab_size))
        *whole, rest = np.split(block, np.flatnonzero(block == end) + 1)
        for piece in whole:
            yield np.concatenate([*pending, piece[:-1]])
            pending, size = [], 0
        pending.append(rest)
        size += len(rest)
        if size > MAX_DOCUMENT_IDS:
            raise InputError(
                f"{where} has {size:,} ids without the end of a document, id {end}: name the token "
                "between its documents as prepare.end_of_document, or save rows of ids, "
                "ids.reshape(-1, 4096), as .npy"
            )
    if size:
        yield np.concatenate(pending)


def _check(ids: np.ndarray, start: int, vocab_size: int, where: str) -> None:
    wrong = (ids < 0) | (ids >= vocab_size)
    if wrong.any():
        index = int(np.argmax(wrong))
        raise InputError(
            f"{where}: id {start + index:,} is {ids[index]}, but the tokenizer has the ids 0 to "
            f"{vocab_size - 1}: name the tokenizer that made the file (--tokenizer), or the width "
            f"of a file without a header ({TOKENS}FILE?dtype=TYPE: {some_of(WIDTHS)})"
        )


# ---- formats


def _opened(url: str, size: int, given: str, tokenizer: Tokenizer | None = None) -> _Ids:
    """Maps the ids of a file, by its name and its first bytes; without a tokenizer, to plan it."""
    if "://" in url:
        raise InputError(
            f"{url} cannot be mapped into memory: download it, and name the local file"
        )
    with opened(url, size) as file:
        head = file.read(_LLM_C_BYTES)
    path, suffix = f"{url[:-4]}.idx", url[-4:].lower()
    magic, version, count = struct.unpack("<3i", head[:12].ljust(12, b"\0"))
    if given and (suffix in (".npy", "rrow") or os.path.exists(path) or magic in _LLM_C):
        raise InputError(
            f"{url} has a header, which says how wide its ids are: leave ?dtype={given} out"
        )
    if suffix == ".npy":
        return _npy(url, size)
    if os.path.exists(path):
        index = _MegatronIndex(path, size)
        return _Ids(np.memmap(url, index.dtype, "r"), index.num_documents, index.documents)
    is_header = not given and len(head) == _LLM_C_BYTES and not any(head[16:])
    if magic in _LLM_C or is_header:
        return _llm_c(url, size, magic, version, count)
    return _headerless(url, size, given, tokenizer)


def _headerless(url: str, size: int, given: str, tokenizer: Tokenizer | None) -> _Ids:
    """Maps ids of the given width, or of that which the vocabulary needs."""
    width = token_dtype(tokenizer.vocab_size if tokenizer else 1)
    dtype = np.dtype(given or width).newbyteorder("<")
    why = f"{size:,} bytes are no whole number of them" if size % dtype.itemsize else ""
    if not why:
        flat = np.memmap(url, dtype, "r")
        head = flat[:_BLOCK_IDS]
        is_wider = len(head) > 3 and head.any() and not head[1::2].any()
        if given or tokenizer is None or not is_wider:
            return _Ids(flat)
        why = "every second one is 0"
    raise InputError(
        f"{url} would hold ids of {dtype.itemsize} bytes, but {why}: copy it again, or name their "
        f"width, {TOKENS}{url}?dtype=TYPE ({some_of(WIDTHS)})"
    )


def _llm_c(url: str, size: int, magic: int, version: int, count: int) -> _Ids:
    wanted, dtype = _LLM_C.get(magic, (None, "<u2"))
    num_bytes = max(0, size - _LLM_C_BYTES)
    if version != wanted or count * np.dtype(dtype).itemsize != num_bytes or not count:
        named = f", or write {TOKENS}{url}?dtype=uint16 if it has no header"
        instead = "" if magic in _LLM_C else named
        raise InputError(
            f"{url} has a header (magic {magic}, version {version}, {count:,} ids) and {num_bytes:,} "
            "bytes of ids: llm.c writes magic 20240520, version 1 and uint16, or 20240801, 7 and "
            "uint32; copy it again" + instead
        )
    return _Ids(np.memmap(url, dtype, "r", _LLM_C_BYTES, (count,)))


def _npy(url: str, size: int) -> _Ids:
    try:
        array = np.lib.format.open_memmap(url, mode="r")
    except Exception as error:  # whatever a stranger's header makes NumPy raise
        raise InputError(
            f"{url} is no whole .npy file ({error!s:.200}): write it again with numpy.save"
        ) from error
    is_whole = array.size and array.offset + array.nbytes == size and array.flags.c_contiguous
    if array.dtype.kind not in "iu" or array.ndim not in (1, 2) or not is_whole:
        raise InputError(
            f"{url} has {size:,} bytes for {array.dtype} of shape {array.shape}: save whole numbers "
            "in C order, with one axis (a stream) or two (rows)"
        )
    if array.ndim == 1:
        return _Ids(array)
    num_rows, width = array.shape

    def rows(start: int, stop: int) -> list[tuple[int, int]]:
        return [(row * width, (row + 1) * width) for row in range(start, stop)]

    return _Ids(array.reshape(-1), num_rows, rows)


class _MegatronIndex:
    """Maps the index beside a file of ids: its sequences, and the documents that they are part of."""

    def __init__(self, path: str, size: int):
        """Opens an index; `size` is that of the file of ids.

        Raises:
            InputError: it is another index, or does not fit the file of ids.
        """
        self._path, self._size = path, size
        with opened(path) as file:
            head = file.read(_MEGATRON_HEAD.size).ljust(_MEGATRON_HEAD.size, b"\0")
            num_bytes = file.seek(0, 2)
        magic, version, code, count, num_bounds = _MEGATRON_HEAD.unpack(head)
        if magic != _MEGATRON or version != 1 or code not in _MEGATRON_DTYPES:
            raise InputError(
                f"{path} begins with {magic!r}, version {version}, dtype {code}, not {_MEGATRON!r}, 1 "
                f"and a dtype of whole numbers ({some_of(_MEGATRON_DTYPES)}): write it again with "
                "Megatron-LM, or remove it to read its .bin as a stream"
            )
        excess = num_bytes - _MEGATRON_HEAD.size - 12 * count - 8 * num_bounds
        if excess == count > 0:
            raise InputError(f"{path} has a mode per sequence: multimodal data is not read")
        self._check(not excess and count > 0 and num_bounds > 1, f"it has {num_bytes:,} bytes")
        self.dtype, self.num_documents = np.dtype(_MEGATRON_DTYPES[code]), num_bounds - 1
        self._lengths = self._array("<i4", 0, count)
        self._offsets = self._array("<i8", 4 * count, count)
        self._bounds = self._array("<i8", 12 * count, num_bounds)
        self.documents(num_bounds - 2, num_bounds - 1)  # the last one ends with the file

    def documents(self, start: int, stop: int) -> list[tuple[int, int]]:
        """Returns the ids of documents [start, stop), the first one and that after the last.

        Raises:
            InputError: their sequences do not lie one after another in the file of ids.
        """
        what = f"documents {start:,} to {stop:,} lie elsewhere"
        bounds, count = self._bounds[start : stop + 1], len(self._lengths)
        self._check(stop <= self.num_documents, what)
        first, last = int(bounds[0]), int(bounds[-1])
        self._check(0 <= first <= last <= count and not (np.diff(bounds) < 0).any(), what)
        self._check(last == count or stop < self.num_documents, what)
        after = self._offsets[last] if last < count else self._size
        edges = np.append(self._offsets[first:last], after)
        sizes = self._lengths[first:last].astype(np.int64) * self.dtype.itemsize
        is_inside = 0 <= edges[0] <= edges[-1] <= self._size and (sizes >= 0).all()
        is_inside = is_inside and edges[0] % self.dtype.itemsize == 0
        self._check(is_inside and (np.diff(edges) == sizes).all(), what)
        self._check(start or first == edges[0] == 0, what)
        return list(pairwise((edges[bounds - first] // self.dtype.itemsize).tolist()))

    def _array(self, kind: str, at: int, count: int) -> np.ndarray:
        return np.memmap(self._path, kind, "r", _MEGATRON_HEAD.size + at, (count,))

    def _check(self, fits: object, otherwise: str) -> None:
        if not fits:
            raise InputError(
                f"{self._path} does not fit the {self._size:,} bytes of its .bin: {otherwise}; copy "
                "both files again"
            )
