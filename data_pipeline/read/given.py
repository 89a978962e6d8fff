"""Rows that a Python program gives: `moebius.fit(config, run_dir, data=dataset)`.

A map-style dataset is one source of one segment, so its order, positions and passes are those of
prepared data. It stays in the process that called `fit`. Ranks, which are processes of their own, ask
for rows through a Unix socket, so any dataset will do, it is in memory once, and nothing is pickled.

`data.dataset` holds its number of rows and a digest of 64 of them, and so identifies it in the run's
configuration, before the ranks start and on every rank.

Cost: one thread makes the rows of all ranks, ahead of their steps; 20 µs for one of a list or a
memory-mapped file.
"""

import hashlib
import json
import os
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Client, Listener
from typing import Any

import numpy as np

from ...plugins import a_kind
from ..data_config import DataConfig
from ..errors import DataError, NothingToReadError
from .chunks import TokenRows
from .corruption import BatchFetcher
from .mixture import SourceMixture, WeightStage
from .order import ORDER_VERSION, ChunkTable, RowRefs, SampleOrder, SourceRows
from .samples import OrderedSamples

ADDRESS = "MOEBIUS_DATASET"
"""Environment variable of a run's processes: the socket that answers with rows."""

_SPLITS = ("train", "validation")
_SOURCE = "dataset"
_SAMPLED = 64  # rows in a digest
_CHUNK_ROWS = 1024
_WINDOW_CHUNKS = 32  # a window of the shuffle has 32,768 rows


@dataclass(frozen=True)
class GivenRows:
    """Reads one split of a given dataset."""

    num_rows: int
    num_tokens: int  # that they predict
    fetch: Callable[[list[int]], np.ndarray]  # n indices to int64 [n, S + 1]

    def read(self, rows: np.ndarray) -> TokenRows:
        """Reads rows by their numbers, int64 [n].

        Raises:
            DataError: one is no row of token ids; names its index.
        """
        return TokenRows(self.fetch(rows.tolist()), learned=None, document_ids=None)


@contextmanager
def giving(data: DataConfig, dataset: object, *, vocab_size: int) -> Iterator[DataConfig]:
    """Answers a run's processes with the rows of a dataset, and yields the section `data` of the run.

    Args:
        data: of the run.
        dataset: a map-style dataset of rows, or a tuple of two, (train, validation); None: the run
            reads what `data` names.
        vocab_size: of the model.

    Raises:
        DataError: it is no such dataset, or one of the sampled rows is bad.
    """
    if dataset is None:
        yield data
        return
    pair = dataset if isinstance(dataset, tuple) else (dataset,)
    if len(pair) not in (1, 2):
        raise DataError(f"data is a tuple of {len(pair)}: give a dataset, or (train, validation)")
    rows = dict[str, GivenRows]()
    for split, each, name in zip(_SPLITS, pair, _SPLITS if pair[1:] else ("data",), strict=False):
        size = _length_of(each, name)
        fetch = partial(_rows, each, name, data.seq_len, vocab_size)
        rows[split] = GivenRows(size, size * data.seq_len, fetch)
    named = data.model_copy(update={"dataset": digest_of(rows), "directory": ""})
    with _listener() as listener:
        os.environ[ADDRESS] = address = str(listener.address)
        threading.Thread(target=_serve, args=(listener, rows), daemon=True).start()
        try:
            yield named
        finally:
            os.environ.pop(ADDRESS, None)
            rows.clear()
            with suppress(OSError):  # the socket is gone
                Client(address, family="AF_UNIX").close()  # wakes the thread, which ends


def _listener() -> Listener:
    """Returns a socket in a folder of mode 0700, which as many ranks as 1,024 may ask at once."""
    if ADDRESS in os.environ:
        raise DataError("this program gives rows to a run already: wait until that fit has ended")
    try:
        return Listener(family="AF_UNIX", backlog=1024)
    except OSError as error:  # of a path of over 107 bytes
        raise DataError(
            f"a socket cannot be made in the temporary folder ({error}): set TMPDIR to a shorter path"
        ) from None


def given_rows(data: DataConfig) -> dict[str, GivenRows]:
    """Returns the rows of a run by split, in any of its processes.

    Raises:
        DataError: no program gives them.
    """
    if not (address := os.environ.get(ADDRESS)):
        raise DataError(
            f"data.dataset={data.dataset!r}: a Python program gives this run its rows; continue it "
            "there: moebius.fit(moebius.load_config(run_dir), run_dir, data=dataset)"
        )
    sizes = map(int, re.findall(r"(\d+) rows", data.dataset))
    return {
        split: GivenRows(size, size * data.seq_len, partial(_ask, address, split))
        for split, size in zip(_SPLITS, sizes, strict=False)
    }


def digest_of(rows: Mapping[str, GivenRows]) -> str:
    """Returns `data.dataset`: the number of rows and a digest of 64 of them, by split.

    Raises:
        DataError: one of them is no row of token ids.
    """
    words = []
    for split, each in rows.items():
        last, steps = each.num_rows - 1, _SAMPLED - 1
        sampled = each.fetch(sorted({at * last // steps for at in range(_SAMPLED)}))
        digest = hashlib.blake2b(sampled.tobytes(), digest_size=8).hexdigest()
        words.append(f"{split}: {each.num_rows} rows, {digest}")
    return "; ".join(words)


def given_split(data: DataConfig, split: str) -> GivenRows | None:
    """Returns the rows of a split of a given dataset; None: the run reads a prepared folder.

    Raises:
        NothingToReadError: there are none for validation.
    """
    if not data.dataset:
        return None
    if (rows := given_rows(data).get(split)) is None:
        raise NothingToReadError(
            "no validation rows: fit(config, run_dir, data=(train, validation))"
        )
    return rows


def open_samples(data: DataConfig, fetch: BatchFetcher) -> OrderedSamples:
    """Returns the ordered samples of a given dataset, or of the prepared folder.

    Raises:
        DataError: the data cannot be read as configured.
    """
    return GivenSamples(data) if data.dataset else OrderedSamples(data, fetch)


class GivenSamples(OrderedSamples):
    """Orders the rows of a given dataset like those of prepared data with one segment."""

    def __init__(self, data: DataConfig):
        self._data, self._rows = data, given_rows(data)["train"]
        self._counted = {}
        self.mixture = SourceMixture([_SOURCE], [WeightStage(0, {_SOURCE: 1.0})], seed=data.seed)
        starts = np.append(np.arange(0, self._rows.num_rows, _CHUNK_ROWS), self._rows.num_rows)
        self.order = SampleOrder(
            self.mixture,
            {_SOURCE: self._source_rows(_SOURCE)},
            lambda source, segment: ChunkTable(starts, _WINDOW_CHUNKS),
            seed=data.seed,
        )

    @property
    def is_complete(self) -> bool:
        """Returns true: a dataset does not grow."""
        return True

    def read(self, refs: RowRefs) -> TokenRows:
        """Reads rows by their names.

        Raises:
            DataError: one is no row of token ids.
        """
        return self._rows.read(refs.rows)

    def num_rows(self) -> int:
        """Returns the number of rows."""
        return self._rows.num_rows

    def _num_tokens(self, name: str) -> int:
        return self._rows.num_tokens

    def _source_rows(self, name: str) -> SourceRows:
        return SourceRows((self._rows.num_rows,), complete=True)

    def _content_of(self, source: int, segment: int) -> int:
        return int.from_bytes(hashlib.sha256(self._data.dataset.encode()).digest()[:8], "big")

    def _spec(self, reached: Mapping[str, tuple[int, bool]]) -> dict[str, Any]:
        kept = self._data.model_dump(include={"seed", "seq_len", "dataset"})
        return {"order_version": ORDER_VERSION, **kept}


# Rows ----------------------------------------------------------------------------------------------


def _length_of(dataset: Any, name: str) -> int:
    """Returns a dataset's number of rows; raises DataError if it has no index."""
    kinds = [kind.__name__ for kind in type(dataset).__mro__]
    has_index = all(hasattr(dataset, method) for method in ("__len__", "__getitem__"))
    if "IterableDataset" in kinds or not has_index:  # torch's, or that of `datasets`
        raise DataError(
            f"{name} is {a_kind(dataset)}, which has no position to resume from: give a map-style "
            "dataset (__len__ and __getitem__), such as a list or a numpy.memmap of rows, or prepare "
            "the text of the stream with `moebius prepare`"
        )
    if not (length := len(dataset)):
        raise DataError(f"{name} has no rows: give at least one")
    return length


def _rows(dataset: Any, name: str, seq_len: int, vocab_size: int, rows: list[int]) -> np.ndarray:
    found = (_row(dataset, index, f"{name}[{index}]", seq_len, vocab_size) for index in rows)
    return np.stack([*found])


def _row(dataset: Any, index: int, where: str, seq_len: int, vocab_size: int) -> np.ndarray:
    """Returns an item as int64 [S + 1]; raises DataError if it is no row of token ids."""
    try:
        item = dataset[index]
        row = np.asarray(item)
    except Exception as error:
        raise DataError(f"{where} raises {type(error).__name__}: {error}") from error
    if row.ndim != 1 or row.dtype.kind not in "iu":
        raise DataError(
            f"{where} is {a_kind(item)} of shape {row.shape} and dtype {row.dtype}: each item must be "
            f"one sequence of {seq_len + 1} token ids (data.seq_len + 1), whole numbers; its targets "
            "follow from it, and a loss mask needs `moebius prepare`"
        )
    if len(row) != seq_len + 1:
        raise DataError(
            f"{where} has {len(row)} token ids, not {seq_len + 1} (data.seq_len + 1): cut the rows to "
            f"this length, or set data.seq_len={len(row) - 1}"
        )
    least, most = int(row.min()), int(row.max())
    if least < 0 or most >= vocab_size:
        raise DataError(
            f"{where} has the token id {least if least < 0 else most}: ids must lie between 0 and "
            f"{vocab_size - 1} (model.vocab_size={vocab_size})"
        )
    return row.astype(np.int64)


# Between processes ---------------------------------------------------------------------------------


def _serve(listener: Listener, given: Mapping[str, GivenRows]) -> None:
    """Answers one question after the other, while there are rows: with them, or with what is wrong."""
    while given:
        with suppress(EOFError, OSError), listener.accept() as asked:  # of a rank that was killed
            split, rows = json.loads(asked.recv_bytes())
            wrong, answer = "", b""
            try:
                answer = given[split].fetch(rows).tobytes()
            except Exception as error:  # noqa: BLE001 (raised where the rows are wanted)
                wrong = str(error) or repr(error)
            asked.send_bytes(wrong.encode())
            asked.send_bytes(answer)


def _ask(address: str, split: str, rows: list[int]) -> np.ndarray:
    """Asks the process that called `fit` for rows: int64 [n, S + 1]."""
    try:
        with Client(address, family="AF_UNIX") as program:
            program.send_bytes(json.dumps([split, rows]).encode())
            if wrong := program.recv_bytes():
                raise DataError(wrong.decode())
            answer = np.frombuffer(bytearray(program.recv_bytes()), np.int64)
            return answer.reshape(len(rows), -1)
    except (EOFError, OSError) as error:
        raise DataError(f"the program that gives this run its rows has ended: {error}") from error
