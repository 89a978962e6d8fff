"""The tasks of a preparation: pure functions of one unit that write files and return numbers.

    scan_unit       finds each document's hash, size and fault, and the rule that drops it
    sample_unit     writes the head of a unit, to train the tokenizer
    train_task      trains the tokenizer on all samples
    tokenise_unit   writes the chosen documents, one shard per side

They run in any process that sees the folder, in any order, and may be repeated. Files appear atomically
(temporary name, rename), and mark their task as done. Shards are fsynced together before they are
recorded. Intermediate files are not: if a power failure tears one, it is detected and made again. Tasks
depend on each other only through the coordinator's decisions (`choose`).
"""

import hashlib
import json
import struct
import unicodedata
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import islice, zip_longest
from pathlib import Path
from typing import Any, TypeVar, cast

import numpy as np

from ..atomic import atomic_write, make_durable, read_record, write_record
from ..data_config import MAX_DOCUMENT_BYTES
from ..errors import InputError, ShardError
from ..manifest import SPLITS, UNFINISHED, ShardEntry, Split, index_name, shard_name
from ..prepare_config import TOKENS, PrepareConfig, SourceConfig
from ..read.token_store import shard_schema, token_dtype, verify_shard
from ..shards import ShardWriter, TokenDocument, shard_metadata
from ..sources.documents import Document
from ..sources.formats import read_documents
from ..tokenizers.chat_template import ChatTemplate, chat_of
from ..tokenizers.huggingface import train_bpe
from ..tokenizers.interface import Tokenizer
from ..tokenizers.tokenizer import save_tokenizer, tokenizer_of
from .filters import DocumentRule, document_rules
from .kept import begin_keeping, keep, take
from .units import Unit

T = TypeVar("T")

TRAIN, VALIDATION, DUPLICATE = range(3)
"""The fate of a document, one byte. Values from FIRST_REASON on number the unit's drop reasons."""

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
_ENCODE_CHARS = 2**20  # text per tokenizer call: bounds memory, amortises the call
_RECORD = np.dtype([("high", "<u8"), ("low", "<u8"), ("num_bytes", "<u4"), ("fate", "u1")])


@dataclass(frozen=True)
class UnitTask:
    """Holds the arguments of a task on one unit; pickles to a few kB."""

    config: PrepareConfig
    directory: Path
    unit: Unit
    sample_bytes: int = 0
    is_decided: bool = False  # for sampling: whether to use its documents' fates
    num_buckets: int = 0  # of its source, if documents are shuffled
    spilled: tuple[Unit, ...] = ()  # for a bucket: the units whose documents it collects

    def unfinished(self, what: str) -> Path:
        """Returns the path of one of the unit's intermediate files."""
        return unfinished_file(self.directory, self.unit, what)

    @property
    def source(self) -> SourceConfig:
        """Returns the configuration of the unit's source."""
        sources = self.config.all_sources
        return next(source for source in sources if source.name == self.unit.source)


@dataclass(frozen=True)
class TrainTask:
    """Holds the arguments of the task that trains the tokenizer."""

    directory: Path
    vocab_size: int
    units: tuple[Unit, ...]  # those with a sample, in order


@dataclass(frozen=True)
class Scanned:
    """Holds the records of a unit's documents after its scan."""

    records: np.ndarray  # _RECORD [documents]
    reasons: tuple[str, ...]  # of the fates from FIRST_REASON on


def unfinished_file(directory: Path, unit: Unit, what: str) -> Path:
    """Returns the path of an intermediate file of a unit."""
    return directory / UNFINISHED / f"{unit.source}-{unit.number:05d}.{what}"


# ---- documents


def normalised(text: str) -> str:
    """Returns a text in Unicode NFC, with \\n as newline and no surrounding blanks."""
    return _composed(text).strip()


def _composed(text: str) -> str:
    if "\r" in text:
        text = text.replace("\r\n", "\n").replace("\r", "\n")
    return unicodedata.normalize("NFC", text)


def _documents(task: UnitTask) -> Iterator[Document]:
    """Yields the normalised documents of a unit."""
    source, faults = task.source, task.config.encoding_faults
    for split in task.unit.splits:
        tokenizer = tokenizer_of(task.directory) if split.kind == TOKENS else None
        for document in read_documents(split, source, encoding_faults=faults, tokenizer=tokenizer):
            yield normalised_document(document, has_prompt=source.has_loss_mask)


def normalised_document(document: Document, *, has_prompt: bool) -> Document:
    """Returns a document as it is hashed and tokenised."""
    if has_prompt:
        # blanks between a prompt and its answer are intended
        text, prompt = _composed(document.text), _composed(document.prompt)
    else:
        text, prompt = normalised(document.text), document.prompt
    if (text, prompt) == (document.text, document.prompt):
        return document
    return replace(document, text=text, prompt=prompt)


def _identity(document: Document) -> tuple[int, int, int]:
    """Returns the two halves of the hash of a document's prompt and text, and its size in bytes."""
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
    """Returns a document's hash and size, and the reason to drop it, independent of others."""
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
    """Returns this process's rules, which are cached."""
    return _rules(task.config.model_dump_json(), task.directory / UNFINISHED)


# ---- scan


@dataclass
class _Scan:
    """Collects the records of a unit's documents."""

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
    """Reads every document of a unit and writes a `Scanned`."""
    path = task.unfinished("scan.npz")
    if path.exists():
        return
    rules, scan = _rules_of(task), _Scan()
    kept = begin_keeping(task.unit)
    for document in _documents(task):
        kept.add(document, stays=scan.add(document, rules))
    records = np.array(scan.records, dtype=_RECORD)
    reasons = json.dumps(list(scan.reasons)).encode()
    with atomic_write(path, durable=False) as file:  # a torn file is detected and made again
        np.savez(file, records=records, reasons=np.frombuffer(reasons, dtype=np.uint8))
    keep(task.directory, task.unit, kept, records)


def read_scan(directory: Path, unit: Unit) -> Scanned:
    """Reads the result of `scan_unit`.

    Raises:
        ShardError: the file is damaged.
    """
    path = unfinished_file(directory, unit, "scan.npz")
    try:
        with np.load(path, allow_pickle=False) as arrays:
            reasons = json.loads(arrays["reasons"].tobytes())
            return Scanned(arrays["records"], tuple(reasons))
    except _DAMAGES as error:  # the zip file has a checksum per part
        raise ShardError(f"{path} is damaged ({error})") from error


def save_fates(directory: Path, unit: Unit, fates: np.ndarray) -> None:
    """Writes the fates of a unit's documents, uint8 [documents]; every run decides them again."""
    path = unfinished_file(directory, unit, "fates.npy")
    with atomic_write(path, durable=False) as file:
        np.save(file, fates)


def _fates_of(task: UnitTask) -> list[int]:
    return np.load(task.unfinished("fates.npy"), allow_pickle=False).tolist()


# ---- tokenizer


def sample_unit(task: UnitTask) -> int:
    """Writes a unit's share of the tokenizer's sample, its first training documents; returns its bytes.

    Documents with small hashes are held out. The coordinator may hold out others; the task says whether
    to use its decision, because the files on disk depend on when earlier runs were killed.
    """
    path, rules = task.unfinished("sample.jsonl"), _rules_of(task)
    fates = _fates_of(task) if task.is_decided else []
    threshold = held_out_below(task.config) if task.unit.role == "both" else 0
    num_bytes = 0
    with atomic_write(path) as file:
        for document, fate in zip_longest(_documents(task), fates):
            if document is None or num_bytes >= task.sample_bytes:
                break
            high, _, size, reason = _judged(document, rules)
            if reason is None and high >= threshold and fate in (None, TRAIN):
                file.write(json.dumps(document.prompt + document.text).encode() + b"\n")
                num_bytes += size
    return num_bytes


def held_out_below(config: PrepareConfig) -> int:
    """Returns the bound on the first half of a hash below which a document is held out."""
    return int(config.validation_fraction * 2.0**64)


def train_task(task: TrainTask) -> None:
    """Trains the tokenizer on the distinct texts of all samples in order, and writes it."""
    paths = [unfinished_file(task.directory, unit, "sample.jsonl") for unit in task.units]
    lines = dict.fromkeys(line for path in paths for line in _lines_of(path))
    tokenizer = train_bpe((json.loads(line) for line in lines), vocab_size=task.vocab_size)
    save_tokenizer(task.directory, tokenizer)


def _lines_of(path: Path) -> Iterator[bytes]:
    with open(path, "rb") as file:
        yield from file


# ---- shards


def tokenise_unit(task: UnitTask) -> tuple[ShardEntry, ...]:
    """Writes a unit's shards, one per side with documents; reuses intact ones of an earlier run.

    Raises:
        InputError: the input has changed since the scan.
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
    """Fsyncs the shards of a unit, then records them as complete."""
    make_durable([task.directory / name for one in shards for name in (one.name, one.index_name)])
    described = [shard.model_dump(mode="json") for shard in shards]
    write_record(task.unfinished("shards.json"), described, durable=False)


def recorded_shards(task: UnitTask) -> tuple[ShardEntry, ...] | None:
    """Returns the recorded shards of a unit; None if there is no record."""
    found = read_record(task.unfinished("shards.json"))
    return None if found is None else tuple(map(ShardEntry.model_validate, found))


def ready_shards(task: UnitTask) -> tuple[ShardEntry, ...] | None:
    """Returns the recorded shards of a unit; None if any is missing or damaged."""
    shards = recorded_shards(task)
    try:
        for shard in shards or ():
            verify_shard(task.directory, shard)
    except ShardError:
        return None
    return shards


class ShardPair:
    """Writes the shards of a unit; a side without documents gets no file."""

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
    """Returns the schema of a unit's shards."""
    return shard_schema(
        tokenizer_of(task.directory).vocab_size,
        metadata,
        has_loss_mask=task.source.has_loss_mask,
        has_record_id=bool(task.source.id_field),
    )


def token_documents(task: UnitTask) -> Iterator[tuple[Split, TokenDocument]]:
    """Yields the chosen documents of a unit as tokens, in order, each with its side."""
    tokenizer = tokenizer_of(task.directory)
    end = np.array([tokenizer.end_of_document_id], dtype=token_dtype(tokenizer.vocab_size))
    chat = chat_of(task.directory, tokenizer) if task.source.has_loss_mask else None
    for batch in in_batches(_chosen_documents(task), _num_chars, _ENCODE_CHARS):
        documents = [document for document, *_ in batch]
        both = encoded(tokenizer, chat, documents)
        for (document, side, doc_id, num_bytes), (prompt, text) in zip(batch, both, strict=True):
            yield (
                side,
                TokenDocument(
                    tokens=np.concatenate([*prompt, text, end]),
                    doc_id=doc_id,
                    num_text_bytes=num_bytes,
                    source=document.source,
                    source_row=document.row,
                    num_prompt_tokens=sum(map(len, prompt)),
                    record_id=document.record_id,
                ),
            )


def encoded(
    tokenizer: Tokenizer, chat: ChatTemplate | None, documents: Sequence[Document]
) -> Iterator[tuple[list[np.ndarray], np.ndarray]]:
    """Yields each document's prompt, if it has one, and its text as ids."""
    if chat is not None:
        pairs = ((document.prompt, document.text) for document in documents)
        yield from (([prompt], answer) for prompt, answer in chat.encode_batch(pairs))
        return
    plain = [document for document in documents if document.tokens is None]
    texts = [text for document in plain for text in (document.prompt, document.text)]
    tokens = iter(tokenizer.encode_batch([text for text in texts if text]))
    for document in documents:
        prompt = list(islice(tokens, int(bool(document.prompt))))
        yield prompt, next(tokens) if document.tokens is None else document.tokens


_Chosen = tuple[Document, Split, bytes, int]


def _num_chars(chosen: _Chosen) -> int:
    return len(chosen[0].prompt) + len(chosen[0].text)


def _chosen_documents(task: UnitTask) -> Iterator[_Chosen]:
    """Yields a unit's chosen documents with side, hash and size, cached or read again."""
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
        "again, from files that nothing writes to and functions that always give the same records"
    )


def in_batches(items: Iterable[T], size_of: Callable[[T], int], least: int) -> Iterator[list[T]]:
    """Groups items into lists of at least `least` in total size, except the last."""
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
