"""The tasks of a preparation: pure functions of one unit each, which write files and return numbers.

    scan_unit       every document: hash, size, whether it is text, which rule drops it
    sample_unit     the head of a unit: what the tokenizer is trained on
    train_task      the tokenizer, from all samples
    tokenise_unit   the chosen documents: one shard per side

They run in any process, on any machine that sees the folder, in any order, twice if need be. Every
file appears whole or not at all (temporary name, rename), and says when it is there that its task has
been done. Shards are fsynced together before they are recorded. Files between two tasks are not: one
that a power failure has torn is noticed and made again. Between two tasks lie only the decisions of
the coordinator (`choose`).
"""

import hashlib
import json
import struct
import unicodedata
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import islice, zip_longest
from pathlib import Path
from typing import Any, TypeVar, cast

import numpy as np

from ..atomic import atomic_write, make_durable
from ..errors import InputError, ShardError
from ..growth import UNFINISHED
from ..manifest import SPLITS, ShardEntry, Split, index_name, shard_name
from ..prepare_config import PrepareConfig, SourceConfig
from ..read.token_store import verify_shard
from ..shards import MAX_DOCUMENT_BYTES, ShardWriter, TokenDocument, shard_metadata, shard_schema
from ..sources.documents import Document
from ..sources.formats import read_documents
from ..tokenizers.huggingface import train_bpe
from ..tokenizers.interface import token_dtype
from ..tokenizers.tokenizer import save_tokenizer, tokenizer_of
from .filters import DocumentRule, document_rules
from .kept import begin_keeping, keep, take
from .units import Unit

T = TypeVar("T")

TRAIN, VALIDATION, DUPLICATE = range(3)
"""The fate of a document, one byte: the first two name the side that it is written to. From
FIRST_REASON on it is the number of a reason of its unit's own list."""

FIRST_REASON = 3
SIDES: dict[int, Split] = {TRAIN: "train", VALIDATION: "validation"}
_DAMAGES = (
    *(zipfile.BadZipFile, zlib.error, ValueError, LookupError, TypeError),
    *(OSError, EOFError, NotImplementedError),
)
_MAX_REASONS = 2**8 - FIRST_REASON
_OTHER_REASONS = "other reasons"
_EMPTY = "empty"
_TOO_LONG = f"longer than {MAX_DOCUMENT_BYTES // 2**20} MiB"
_ENCODE_CHARS = 2**20  # text handed to the tokenizer at a time: bounds memory, hides the call
_RECORD = np.dtype([("high", "<u8"), ("low", "<u8"), ("num_bytes", "<u4"), ("fate", "u1")])


@dataclass(frozen=True)
class UnitTask:
    """Holds what a task needs to know to work on one unit.

    It pickles to a few kB.
    """

    config: PrepareConfig
    directory: Path
    unit: Unit
    sample_bytes: int = 0
    is_decided: bool = False  # for sampling: whether its documents' fates count
    num_buckets: int = 0  # of its source, if documents are shuffled
    spilled: tuple[Unit, ...] = ()  # of a bucket: the units whose documents it collects

    def unfinished(self, what: str) -> Path:
        """Returns the path of one of the unit's intermediate files."""
        return unfinished_file(self.directory, self.unit, what)

    @property
    def source(self) -> SourceConfig:
        """Returns the source that the unit is of."""
        sources = self.config.all_sources
        return next(source for source in sources if source.name == self.unit.source)


@dataclass(frozen=True)
class TrainTask:
    """Holds what the one task that trains the tokenizer needs to know."""

    directory: Path
    vocab_size: int
    units: tuple[Unit, ...]  # those that have a sample, in order


@dataclass(frozen=True)
class Sampled:
    """Says what a unit gave for the tokenizer's training."""

    num_documents: int  # that were read
    num_bytes: int  # of those that were taken
    dropped: dict[str, int]


@dataclass(frozen=True)
class Scanned:
    """Holds what is known about the documents of a unit after they were read once."""

    records: np.ndarray  # _RECORD [documents]
    reasons: tuple[str, ...]  # of the fates from FIRST_REASON on


def unfinished_file(directory: Path, unit: Unit, what: str) -> Path:
    """Returns the path of an intermediate file of a unit."""
    return directory / UNFINISHED / f"{unit.source}-{unit.number:05d}.{what}"


# ---- documents


def normalised(text: str) -> str:
    """Returns the text that is hashed and tokenised.

    It is Unicode NFC, with newlines as \\n and no blank space around it.
    """
    return _composed(text).strip()


def _composed(text: str) -> str:
    if "\r" in text:
        text = text.replace("\r\n", "\n").replace("\r", "\n")
    return unicodedata.normalize("NFC", text)


def _documents(task: UnitTask) -> Iterator[Document]:
    """Reads the documents of a unit, normalised."""
    source = task.source
    for split in task.unit.splits:
        for document in read_documents(split, source, encoding_faults=task.config.encoding_faults):
            yield normalised_document(document, has_prompt=source.has_loss_mask)


def normalised_document(document: Document, *, has_prompt: bool) -> Document:
    """Returns a document as it is tokenised."""
    if has_prompt:
        # Blank space around a prompt and its answer is between the two, and is meant.
        text, prompt = _composed(document.text), _composed(document.prompt)
    else:
        text, prompt = normalised(document.text), document.prompt
    if (text, prompt) == (document.text, document.prompt):
        return document
    return replace(document, text=text, prompt=prompt)


def _identity(document: Document) -> tuple[int, int, int]:
    """Returns the two halves of a document's hash, of prompt and text, and its size in bytes."""
    data = document.text.encode()
    size = len(data)
    if document.prompt:
        prompt = document.prompt.encode()
        data = b"%d %b%b" % (len(prompt), prompt, data)
        size += len(prompt)
    high, low = struct.unpack(">QQ", hashlib.blake2b(data, digest_size=16).digest())
    return high, low, size


def _judged(
    document: Document, rules: tuple[DocumentRule, ...]
) -> tuple[int, int, int, str | None]:
    """Returns hash, size, and why a document is dropped whatever the others are."""
    if document.fault:
        return 0, 0, 0, document.fault
    high, low, num_bytes = _identity(document)
    if not document.text.strip():
        return high, low, num_bytes, _EMPTY
    if num_bytes > MAX_DOCUMENT_BYTES:
        return high, low, num_bytes & 0xFFFFFFFF, _TOO_LONG
    whole = document.whole
    for rule in rules:
        if reason := rule(whole):
            return high, low, num_bytes, reason
    return high, low, num_bytes, None


@lru_cache(maxsize=1)
def _rules(config_json: str, work: Path) -> tuple[DocumentRule, ...]:
    return document_rules(PrepareConfig.model_validate_json(config_json), work)


def _rules_of(task: UnitTask) -> tuple[DocumentRule, ...]:
    """Returns this process's rules; they are made once."""
    return _rules(task.config.model_dump_json(), task.directory / UNFINISHED)


# ---- scan


@dataclass
class _Scan:
    """Collects what becomes of the documents of a unit."""

    records: list[tuple[int, int, int, int]] = field(default_factory=list)
    reasons: dict[str, int] = field(default_factory=dict)

    def add(self, document: Document, rules: tuple[DocumentRule, ...]) -> bool:
        """Adds the next document; returns whether no rule drops it."""
        high, low, num_bytes, reason = _judged(document, rules)
        fate = TRAIN if reason is None else self._number_of(reason)
        self.records.append((high, low, num_bytes, fate))
        return reason is None

    def _number_of(self, reason: str) -> int:
        if reason not in self.reasons and len(self.reasons) == _MAX_REASONS - 1:
            reason = _OTHER_REASONS
        return FIRST_REASON + self.reasons.setdefault(reason, len(self.reasons))


def scan_unit(task: UnitTask) -> None:
    """Reads every document of a unit and writes what is decided from: see `Scanned`."""
    path = task.unfinished("scan.npz")
    if path.exists():
        return
    rules, scan = _rules_of(task), _Scan()
    kept = begin_keeping(task.unit)
    for document in _documents(task):
        kept.add(document, stays=scan.add(document, rules))
    records = np.array(scan.records, dtype=_RECORD)
    reasons = json.dumps(list(scan.reasons)).encode()
    with atomic_write(path, durable=False) as file:  # a torn one is noticed, and made again
        np.savez(file, records=records, reasons=np.frombuffer(reasons, dtype=np.uint8))
    keep(task.directory, task.unit, kept, records)


def read_scan(directory: Path, unit: Unit) -> Scanned:
    """Reads what `scan_unit` has written.

    Raises:
        ShardError: it was damaged since.
    """
    path = unfinished_file(directory, unit, "scan.npz")
    try:
        with np.load(path, allow_pickle=False) as arrays:
            reasons = json.loads(arrays["reasons"].tobytes())
            return Scanned(arrays["records"], tuple(reasons))
    except _DAMAGES as error:  # of a zip file, which has a checksum of each part
        raise ShardError(f"{path} is damaged ({error})") from error


def save_fates(directory: Path, unit: Unit, fates: np.ndarray) -> None:
    """Writes what was decided about the documents of a unit: uint8 [documents].

    Every run decides for itself before its tasks read this.
    """
    path = unfinished_file(directory, unit, "fates.npy")
    with atomic_write(path, durable=False) as file:
        np.save(file, fates)


def _fates_of(task: UnitTask) -> list[int]:
    return np.load(task.unfinished("fates.npy"), allow_pickle=False).tolist()


# ---- tokenizer


def sample_unit(task: UnitTask) -> Sampled:
    """Writes the unit's share of the tokenizer's training text: the first documents that train.

    A document of small hash is held out. Others are held out by the coordinator's decision, which
    counts only where the task says that it was made: whether it is on disk already depends on when
    earlier runs were killed, and the sample must not.
    """
    path, rules = task.unfinished("sample.jsonl"), _rules_of(task)
    fates = _fates_of(task) if task.is_decided else []
    threshold = held_out_below(task.config) if task.unit.role == "both" else 0
    num_documents = num_bytes = 0
    dropped: dict[str, int] = {}
    with atomic_write(path) as file:
        for document, fate in zip_longest(_documents(task), fates):
            if document is None or num_bytes >= task.sample_bytes:
                break
            num_documents += 1
            high, _, size, reason = _judged(document, rules)
            if reason is not None:
                dropped[reason] = dropped.get(reason, 0) + 1
            elif high >= threshold and fate in (None, TRAIN):
                file.write(json.dumps(document.prompt + document.text).encode() + b"\n")
                num_bytes += size
    return Sampled(num_documents, num_bytes, dropped)


def held_out_below(config: PrepareConfig) -> int:
    """Returns the bound of the first half of a document's hash below which it is held out."""
    return int(config.validation_fraction * 2.0**64)


def train_task(task: TrainTask) -> None:
    """Trains the tokenizer on all samples in order, equal texts once, and writes it."""
    paths = [unfinished_file(task.directory, unit, "sample.jsonl") for unit in task.units]
    lines = dict.fromkeys(line for path in paths for line in _lines_of(path))
    tokenizer = train_bpe((json.loads(line) for line in lines), vocab_size=task.vocab_size)
    save_tokenizer(task.directory, tokenizer)


def _lines_of(path: Path) -> Iterator[bytes]:
    with open(path, "rb") as file:
        yield from file


# ---- shards


def tokenise_unit(task: UnitTask) -> tuple[ShardEntry, ...]:
    """Writes the shards of one unit, one per side that has documents.

    What a former run wrote is used if its checksums agree.

    Raises:
        InputError: the input is not what it was when it was scanned.
    """
    if (ready := ready_shards(task)) is not None:
        return ready
    with ExitStack() as files:
        writers = ShardPair(task, files)
        for side, document in token_documents(task):
            writers.add(side, document)
        shards = writers.close()
    save_shards(task, shards)
    return shards


def save_shards(task: UnitTask, shards: tuple[ShardEntry, ...]) -> None:
    """Brings the shards of a unit to disk, and records them, which says that they are whole."""
    make_durable([task.directory / name for one in shards for name in (one.name, one.index_name)])
    described = [shard.model_dump(mode="json") for shard in shards]
    write_record(task.unfinished("shards.json"), described, durable=False)


def recorded_shards(task: UnitTask) -> tuple[ShardEntry, ...] | None:
    """Returns the shards of a unit that were recorded; None: not yet."""
    found = read_record(task.unfinished("shards.json"))
    return None if found is None else tuple(map(ShardEntry.model_validate, found))


def ready_shards(task: UnitTask) -> tuple[ShardEntry, ...] | None:
    """Returns the shards of a unit that were recorded and are still whole; None: make them."""
    shards = recorded_shards(task)
    try:
        for shard in shards or ():
            verify_shard(task.directory, shard)
    except ShardError:  # lost or damaged since it was written: made anew from the input
        return None
    return shards


class ShardPair:
    """Writes the shards of a unit, and no file for a side without documents."""

    def __init__(self, task: UnitTask, files: ExitStack, *, label: str = ""):
        self._task, self._files = task, files
        self._label = label or task.unit.label
        self._metadata = shard_metadata(
            tokenizer_of(task.directory), label or task.unit.local_label
        )
        self._writers: dict[Split, ShardWriter] = {}

    def add(self, side: Split, document: TokenDocument) -> None:
        if side not in self._writers:
            path = self._task.directory / self._name(side)
            self._writers[side] = ShardWriter(
                self._files.enter_context(atomic_write(path, durable=False)),
                schema=schema_of(self._task, self._metadata),
                batch_tokens=self._task.config.batch_tokens,
            )
        self._writers[side].add(document)

    def close(self) -> tuple[ShardEntry, ...]:
        return tuple(self._close(side) for side in SPLITS if side in self._writers)

    def _name(self, side: Split) -> str:
        return shard_name(self._task.unit.source, side, self._task.unit.number)

    def _close(self, side: Split) -> ShardEntry:
        name = self._name(side)
        path = self._task.directory / index_name(name)
        with atomic_write(path, durable=False) as index_file:
            return self._writers[side].close(
                name=name,
                split=side,
                source=self._task.unit.source,
                label=self._label,
                index_file=index_file,
            )


def schema_of(task: UnitTask, metadata: dict[str, str] | None = None) -> Any:
    """Returns the columns of the shards of a unit."""
    return shard_schema(
        tokenizer_of(task.directory).vocab_size,
        metadata,
        has_loss_mask=task.source.has_loss_mask,
        has_record_id=bool(task.source.id_field),
    )


def token_documents(task: UnitTask) -> Iterator[tuple[Split, TokenDocument]]:
    """Yields the chosen documents of a unit as tokens, each with its side, in their order."""
    tokenizer = tokenizer_of(task.directory)
    end = np.array([tokenizer.end_of_document_id], dtype=token_dtype(tokenizer.vocab_size))
    for batch in in_batches(_chosen_documents(task), _num_chars, _ENCODE_CHARS):
        texts = [text for document, *_ in batch for text in (document.prompt, document.text)]
        encoded = tokenizer.encode_batch([text for text in texts if text])
        tokens = iter(encoded)
        for document, side, doc_id, num_bytes in batch:
            prompt = list(islice(tokens, int(bool(document.prompt))))
            yield (
                side,
                TokenDocument(
                    tokens=np.concatenate([*prompt, next(tokens), end]),
                    doc_id=doc_id,
                    num_text_bytes=num_bytes,
                    source=document.source,
                    source_row=document.row,
                    num_prompt_tokens=sum(map(len, prompt)),
                    record_id=document.record_id,
                ),
            )


_Chosen = tuple[Document, Split, bytes, int]


def _num_chars(chosen: _Chosen) -> int:
    return len(chosen[0].prompt) + len(chosen[0].text)


def _chosen_documents(task: UnitTask) -> Iterator[_Chosen]:
    """Yields the documents of a unit that stay, with side, hash and size; kept ones or read again."""
    records = read_scan(task.directory, task.unit).records
    fates = _fates_of(task)
    kept = take(task.directory, task.unit, records)
    documents = _documents(task) if kept is None else kept
    for document, record, fate in zip_longest(documents, records.tolist(), fates):
        if document is None or record is None:
            raise _changed(task)
        if fate in SIDES:
            high, low, num_bytes = cast("tuple[int, int, int]", record[:3])
            if document.fault or (kept is None and _identity(document) != (high, low, num_bytes)):
                raise _changed(task)
            yield document, SIDES[fate], struct.pack(">QQ", high, low), num_bytes


def _changed(task: UnitTask) -> InputError:
    return InputError(
        f"{task.unit.label} has changed while it was being prepared: delete the folder and prepare "
        "again, from files that nobody writes to and functions that give the same each time"
    )


def in_batches(items: Iterable[T], size_of: Callable[[T], int], least: int) -> Iterator[list[T]]:
    """Groups items into lists of at least a size; the last one may be smaller."""
    batch: list[T] = []
    size = 0
    for item in items:
        batch.append(item)
        size += size_of(item)
        if size >= least:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def write_record(path: Path, content: Any, *, durable: bool = True) -> None:
    """Writes a record, whole or not at all.

    Args:
        path: the file.
        content: what it says.
        durable: whether it must survive a power failure; else it may then count as never written.

    Raises:
        PrepareError: the folder cannot be written.
    """
    text = json.dumps(content)
    with atomic_write(path, durable=durable) as file:
        file.write(json.dumps({"sha256": _sha256(text), "content": content}).encode())


def read_record(path: Path) -> Any | None:
    """Returns the content of a record; None: there is none, or it is damaged.

    Raises:
        OSError: it cannot be read.
    """
    try:
        record = json.loads(path.read_bytes())
        content = record["content"]
        is_whole = record["sha256"] == _sha256(json.dumps(content))
    except (FileNotFoundError, ValueError, KeyError, TypeError, RecursionError):
        return None
    return content if is_whole else None


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
