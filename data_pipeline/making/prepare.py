"""Text to a folder of token shards: pure functions of one input split each, and the order they are
run in.

1. plan      input files -> input splits, in the order that decides between equal documents
             (`reading.plan_splits`)
2. read      per split: the hash and size of every document (`hash_documents`)
3. choose    once: exact duplicates out (the first in split order stays), train or validation by
             document hash (`choose_documents`)
4. sample    per split: the text that BPE is trained on, from train documents only
             (`collect_sample`)
5. train     once: the tokenizer (`train_tokenizer`)
6. tokenise  per split: one shard per side, train and validation (`tokenise_split`)
7. commit    the manifest lists the shards in split order; only now the folder is valid

Steps 2, 4, 5 and 6 go through a `TaskRunner`: the work of one item in any process, on any machine
that sees the folder, in any order, twice if need be. Tasks read and write the folder; only numbers
travel. Every file appears whole or not at all (temporary name, fsync, rename) and depends on its
split alone, so the bytes are the same for any number of workers and after any interruption. What is
unfinished lies in `unfinished/` and is picked up by the next run.

Cost: text is read two or three times at 100 MB/s/core; tokenising takes nearly all the time.
"""

import fcntl
import hashlib
import json
import shutil
import struct
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from itertools import zip_longest
from pathlib import Path
from typing import IO, Any, Literal, Protocol, TypeVar, cast

import numpy as np

from ..config import DataConfig, SourceConfig
from ..errors import InputError, PrepareError, ShardError
from ..manifest import (
    MAX_ERA_SHARDS,
    TEMPORARY,
    Completion,
    DatasetManifest,
    Era,
    Header,
    ManifestWriter,
    ShardEntry,
    SourceEntry,
    Split,
    TokenizerEntry,
    atomic_write,
    explained_write_errors,
    index_name,
    is_prepared,
    read_manifest,
    shard_name,
)
from ..reading import EMBEDDED, Document, InputSplit, plan_splits, read_documents
from ..shards import ShardWriter, TokenDocument, shard_metadata, shard_schema, verify_shard
from ..tokenizers.bpe import train_bpe
from ..tokenizers.hub import open_tokenizer
from ..tokenizers.interface import Tokenizer, main_file, token_dtype
from ..tokenizers.raw_bytes import BytesTokenizer
from ..tokenizers.tokenizer import has_tokenizer, load_tokenizer, save_tokenizer

T = TypeVar("T")
R = TypeVar("R")

UNFINISHED = "unfinished"
_ENCODE_CHARS = 2**20  # text handed to the tokenizer at a time: bounds memory, hides the call

# The fate of a document, one byte each. The first two name the side that it is written to.
_TRAIN, _VALIDATION, _DUPLICATE, _EMPTY, _BROKEN = range(5)
_SIDES: dict[int, Split] = {_TRAIN: "train", _VALIDATION: "validation"}
_REASONS = {_DUPLICATE: "duplicate", _EMPTY: "empty", _BROKEN: "not Unicode (lone surrogates)"}
_RECORD = np.dtype(
    [("high", "<u8"), ("low", "<u8"), ("num_bytes", "<u4"), ("fate", "u1"), ("in_sample", "?")]
)


class TaskRunner(Protocol):
    """Runs a function on many items, anywhere.

    Yields (index of the item, result), in any order, each once.
    """

    def __call__(
        self, function: Callable[[T], R], items: Sequence[T], /
    ) -> Iterator[tuple[int, R]]: ...


def run_serially(function: Callable[[T], R], items: Sequence[T], /) -> Iterator[tuple[int, R]]:
    """Runs the items one after another in this process."""
    for index, item in enumerate(items):
        yield index, function(item)


@dataclass(frozen=True)
class PrepareProgress:
    """Reports that one task of a stage has ended.

    `tokens` counts what is tokenised so far, in the last stage.
    """

    stage: str
    done: int
    total: int
    tokens: int = 0


@dataclass(frozen=True)
class SplitTask:
    """Holds what a task needs to know to work on input split number `index`.

    It pickles to a few hundred bytes.
    """

    config: DataConfig
    directory: Path
    index: int
    split: InputSplit

    def unfinished(self, what: str) -> Path:
        """Returns the path of one of the split's intermediate files."""
        return _unfinished(self.directory, self.index, what)

    def documents(self) -> Iterator[Document]:
        """Reads the split's documents."""
        source = self.source
        return read_documents(
            self.split, text_field=source.text_field, source_field=source.source_field
        )

    @property
    def source(self) -> SourceConfig:
        """Returns the source that the split is of."""
        return next(
            source for source in self.config.all_sources if source.name == self.split.source
        )


@dataclass(frozen=True)
class TokenizerTask:
    """Holds what the one task that trains the tokenizer needs to know."""

    directory: Path
    vocab_size: int
    num_splits: int


def prepare(
    config: DataConfig,
    directory: str | Path,
    *,
    run: TaskRunner = run_serially,
    on_progress: Callable[[PrepareProgress], None] | None = None,
) -> DatasetManifest:
    """Makes `directory` hold the tokens of `config`, and returns its manifest.

    Returns at once where they are there already; continues where an earlier run was stopped.

    Raises:
        InputError: input that cannot be read.
        PrepareError: a folder that holds something else or cannot be written.
    """
    folder = Path(directory).absolute()
    _refuse_what_is_not_made_yet(config)
    manifest = _finished(config, folder)
    if manifest is None:
        # before anything is written: most mistakes are in the names of the input
        splits = plan_splits(config)
        with _claimed(folder):
            manifest = _finished(config, folder)  # somebody else may have been faster
            if manifest is None:
                _begin(config, folder, splits)
                tasks = [
                    SplitTask(config, folder, index, split) for index, split in enumerate(splits)
                ]
                manifest = _prepare(config, tasks, run, on_progress or (lambda progress: None))
    shutil.rmtree(folder / UNFINISHED, ignore_errors=True)
    return manifest


def _refuse_what_is_not_made_yet(config: DataConfig) -> None:
    asked = {
        "encoding_faults='drop'": config.encoding_faults == "drop",
        "shuffle_documents": config.shuffle_documents,
        "a source's prompt_field": any(source.prompt_field for source in config.all_sources),
        "a source's id_field": any(source.id_field for source in config.all_sources),
    }
    if wishes := [wish for wish, is_asked in asked.items() if is_asked]:
        raise PrepareError(f"this version cannot prepare with {', '.join(wishes)}: leave it out")


def _prepare(
    config: DataConfig,
    tasks: list[SplitTask],
    run: TaskRunner,
    on_progress: Callable[[PrepareProgress], None],
) -> DatasetManifest:
    folder = tasks[0].directory
    _run_stage("read", run, hash_documents, tasks, on_progress)
    dropped = choose_documents(config, tasks)
    if config.tokenizer == "bytes":
        save_tokenizer(folder, BytesTokenizer())
    elif config.loads_tokenizer and not has_tokenizer(folder):
        save_tokenizer(folder, _loaded_tokenizer(config))
    elif not has_tokenizer(folder):
        _run_stage("sample", run, collect_sample, tasks, on_progress)
        _run_stage(
            "train tokenizer",
            run,
            train_tokenizer,
            [TokenizerTask(folder, config.vocab_size, len(tasks))],
            on_progress,
        )
    shards = _run_stage("tokenise", run, tokenise_split, tasks, on_progress)
    _write_manifests(config, tasks, shards, dropped)
    return read_manifest(folder)


def _write_manifests(
    config: DataConfig,
    tasks: list[SplitTask],
    shards: list[tuple[ShardEntry, ...]],
    dropped: dict[str, dict[str, int]],
) -> None:
    writer = ManifestWriter(tasks[0].directory)
    writer.append(_header(config, tasks))
    for source in config.all_sources:
        of_source = [
            found
            for task, found in zip(tasks, shards, strict=True)
            if task.split.source == source.name
        ]
        for number, era in enumerate(_eras(of_source, config.era_tokens)):
            writer.append(Era(source=source.name, number=number, shards=era))
    everything = [shard for of_split in shards for shard in of_split]
    writer.append(
        Completion(
            num_documents=_totals(config, everything, "num_documents"),
            num_tokens=_totals(config, everything, "num_tokens"),
            dropped=dropped,
            quarantined=(),
            inputs={task.split.url: task.split.size for task in tasks},
        )
    )


def _header(config: DataConfig, tasks: list[SplitTask]) -> Header:
    tokenizer = load_tokenizer(tasks[0].directory)
    splits = Counter(task.split.source for task in tasks)
    return Header(
        spec_hash=config.spec_hash,
        spec=config.spec,
        tokenizer=TokenizerEntry(
            kind=config.tokenizer,
            file=main_file(tokenizer),
            sha256=tokenizer.sha256,
            vocab_size=tokenizer.vocab_size,
            end_of_document_id=tokenizer.end_of_document_id,
        ),
        batch_tokens=config.batch_tokens,
        era_tokens=config.era_tokens,
        sources=tuple(
            SourceEntry(
                name=source.name,
                licence=source.licence,
                weight=source.weight,
                num_splits=splits[source.name],
                has_loss_mask=source.has_loss_mask,
                has_record_id=bool(source.id_field),
            )
            for source in config.all_sources
        ),
    )


def _eras(
    of_splits: Iterable[tuple[ShardEntry, ...]], era_tokens: int
) -> Iterator[tuple[ShardEntry, ...]]:
    """Closes an era once it has `era_tokens` train tokens, and at the end of its source."""
    era: list[ShardEntry] = []
    for shards in of_splits:
        era.extend(shards)
        tokens = sum(shard.num_tokens for shard in era if shard.split == "train")
        if tokens >= era_tokens or len(era) >= MAX_ERA_SHARDS:
            yield tuple(era)
            era = []
    if era:
        yield tuple(era)


def _totals(
    config: DataConfig,
    shards: list[ShardEntry],
    count: Literal["num_documents", "num_tokens"],
) -> dict[str, dict[Split, int]]:
    totals: dict[str, dict[Split, int]] = {
        source.name: {"train": 0, "validation": 0} for source in config.all_sources
    }
    for shard in shards:
        totals[shard.source][shard.split] += getattr(shard, count)
    return totals


def _run_stage(
    stage: str,
    run: TaskRunner,
    function: Callable[[T], R],
    items: Sequence[T],
    on_progress: Callable[[PrepareProgress], None],
) -> list[R]:
    """Returns a stage's results in the order of the items, whatever order they came in."""
    results: dict[int, R] = {}
    tokens = 0
    on_progress(PrepareProgress(stage, 0, len(items)))
    for index, result in run(function, items):
        results[index] = result
        if stage == "tokenise":
            tokens += sum(shard.num_tokens for shard in cast("tuple[ShardEntry, ...]", result))
        on_progress(PrepareProgress(stage, len(results), len(items), tokens))
    assert sorted(results) == list(range(len(items))), f"the runner lost results of stage {stage!r}"
    return [results[index] for index in range(len(items))]


# ---- the folder


def _finished(config: DataConfig, folder: Path) -> DatasetManifest | None:
    """Returns the manifest of a folder that is complete and of this configuration and input."""
    if not is_prepared(folder):
        return None
    manifest = read_manifest(folder)
    if manifest.spec_hash != config.spec_hash:
        raise PrepareError(
            f"{folder} holds data prepared in another way "
            f"({_difference(manifest.spec, config.spec)}): "
            "choose another folder, or delete this one"
        )
    if not manifest.complete:
        return None
    for url, size in manifest.inputs.items():
        if "://" in url or url == EMBEDDED or not Path(url).exists():
            continue
        if (size_now := Path(url).stat().st_size) != size:
            raise PrepareError(
                f"{folder} was prepared from {url} when it had {size} bytes; it has {size_now} "
                "now: choose another folder, or delete this one"
            )
    return manifest


def _difference(found: dict[str, Any], asked: dict[str, Any]) -> str:
    found, asked = _flat(found), _flat(asked)
    keys = [key for key in sorted({*found, *asked}) if found.get(key) != asked.get(key)]
    return (
        "; ".join(f"{key}: there {found.get(key)!r}, asked for {asked.get(key)!r}" for key in keys)
        or "older format"
    )


def _flat(spec: dict[str, Any]) -> dict[str, Any]:
    """Returns a spec with the fields of every source under the source's name."""
    flat = dict(spec)
    sources = flat.pop("sources", [])
    flat["sources"] = [source["name"] for source in sources]
    for source in sources:
        flat |= {f"{source['name']}.{key}": value for key, value in source.items()}
    return flat


@contextmanager
def _claimed(folder: Path) -> Iterator[None]:
    """Locks the folder: one process at a time prepares into it.

    The lock is the process's own: it ends with it, however it ends.
    """
    work = folder / UNFINISHED
    with explained_write_errors(folder):
        if not work.exists() and folder.exists() and any(folder.iterdir()):
            raise PrepareError(
                f"{folder} is not empty and holds no prepared data: choose a new or an empty folder"
            )
        work.mkdir(parents=True, exist_ok=True)
        lock = open(work / "lock", "wb")  # noqa: SIM115 (closed by the `with` below)
    with lock:
        with explained_write_errors(folder):
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise PrepareError(
                    f"another process is preparing into {folder}: wait until it has ended"
                ) from error
        yield


def _begin(config: DataConfig, folder: Path, splits: tuple[InputSplit, ...]) -> None:
    """Records what is being made, or checks that an interrupted run was making the same.

    Removes the temporary files of that run.
    """
    plan = {
        "spec_hash": config.spec_hash,
        "spec": config.spec,
        "splits": [asdict(split) for split in splits],
    }
    path = folder / UNFINISHED / "plan.json"
    with explained_write_errors(folder):
        for debris in [*folder.glob(f"*{TEMPORARY}*"), *path.parent.glob(f"*{TEMPORARY}*")]:
            debris.unlink(missing_ok=True)
    if not path.exists():
        with atomic_write(path) as file:
            file.write(json.dumps(plan).encode())
        return
    found = json.loads(path.read_bytes())
    if found["spec_hash"] != plan["spec_hash"]:
        raise PrepareError(
            f"{folder} holds an unfinished preparation of something else "
            f"({_difference(found['spec'], plan['spec'])}): choose another folder, or delete this "
            "one"
        )
    if found["splits"] != plan["splits"]:
        raise PrepareError(
            f"{folder} holds an unfinished preparation, and its input files have changed since: "
            "delete the folder and prepare again, from files that nobody writes to"
        )


def _unfinished(directory: Path, index: int, what: str) -> Path:
    return directory / UNFINISHED / f"{index:05d}.{what}"


def _save_records(path: Path, records: np.ndarray) -> None:
    with atomic_write(path) as file:
        np.save(file, records)


# ---- reading and choosing


def hash_documents(task: SplitTask) -> None:
    """Writes one record per document of the split: hash, size, and whether it is text at all."""
    path = task.unfinished("read.npy")
    if not path.exists():
        records = [_record(normalised(document.text)) for document in task.documents()]
        _save_records(path, np.array(records, dtype=_RECORD))


def normalised(text: str) -> str:
    """Returns the text that is hashed and tokenised.

    It is Unicode NFC, with newlines as \\n and no blank space around it.
    """
    return unicodedata.normalize("NFC", text.replace("\r\n", "\n").replace("\r", "\n")).strip()


def _record(text: str) -> tuple[int, int, int, int, bool]:
    try:
        data = text.encode()
    except UnicodeEncodeError:  # JSON can spell half a surrogate pair; there is no such text
        return 0, 0, 0, _BROKEN, False
    high, low = struct.unpack(">QQ", hashlib.blake2b(data, digest_size=16).digest())
    return high, low, len(data), _TRAIN if data else _EMPTY, False


def choose_documents(config: DataConfig, tasks: Sequence[SplitTask]) -> dict[str, dict[str, int]]:
    """Decides the fate of every document from all hashes, and writes it per split.

    Needs all hashes in memory: about 60 bytes per document.

    Returns:
        How many documents of each source are dropped, by reason.
    """
    per_split = [np.load(task.unfinished("read.npy"), allow_pickle=False) for task in tasks]
    records = np.concatenate(per_split)
    fates = records["fate"]
    fates[_later_duplicates(records)] = _DUPLICATE
    alive = fates == _TRAIN
    roles = np.repeat([task.split.role for task in tasks], [len(found) for found in per_split])
    fates[alive & (roles == "validation")] = _VALIDATION
    fates[_held_out(records, alive & (roles == "both"), config.validation_fraction)] = _VALIDATION
    _check_something_is_left(config, records)
    records["in_sample"] = _sampled(records, config.tokenizer_sample_bytes)
    ends = np.cumsum([len(found) for found in per_split])
    dropped: dict[str, Counter[str]] = {source.name: Counter() for source in config.all_sources}
    for task, chosen in zip(tasks, np.split(records, ends[:-1]), strict=True):
        _save_records(task.unfinished("chosen.npy"), chosen)
        fates_of_split = chosen["fate"].tolist()
        dropped[task.split.source].update(
            _REASONS[fate] for fate in fates_of_split if fate in _REASONS
        )
    return {source: dict(sorted(counts.items())) for source, counts in dropped.items()}


def _later_duplicates(records: np.ndarray) -> np.ndarray:
    """Returns the documents that occurred before, as indices, in the order of the records."""
    alive = np.flatnonzero(records["fate"] == _TRAIN)
    # stable: the first stays first
    order = alive[np.lexsort((records["low"][alive], records["high"][alive]))]
    high, low = records["high"][order], records["low"][order]
    return order[1:][(high[1:] == high[:-1]) & (low[1:] == low[:-1])]


def _held_out(records: np.ndarray, candidates: np.ndarray, fraction: float) -> np.ndarray:
    """Returns a mask of the validation documents among the candidates.

    Those are the ones of small hash, and at least one of several.
    """
    if fraction == 0.0 or not candidates.any():
        return np.zeros_like(candidates)
    held_out = candidates & (records["high"] < fraction * 2.0**64)
    if not held_out.any() and candidates.sum() > 1:  # a corpus of a few documents
        indices = np.flatnonzero(candidates)
        held_out[indices[np.argmin(records["high"][indices])]] = True
    return held_out


def _check_something_is_left(config: DataConfig, records: np.ndarray) -> None:
    fates = Counter(records["fate"].tolist())
    if fates[_TRAIN]:
        return
    names = ", ".join(name for source in config.all_sources for name in source.input)
    counts = [f"{fates[fate]} {reason}" for fate, reason in _REASONS.items() if fates[fate]]
    dropped = ", ".join(counts) or "none dropped"
    if fates[_VALIDATION]:
        raise InputError(
            f"input {names}: all documents went to validation ({fates[_VALIDATION]} there; "
            f"{dropped}): lower "
            f"validation_fraction={config.validation_fraction}, or take from input what is in "
            "validation_input"
        )
    raise InputError(
        f"input {names} is empty: {len(records)} documents were read ({dropped}); give files with "
        "text"
    )


def _sampled(records: np.ndarray, sample_bytes: int) -> np.ndarray:
    """Returns a mask of train documents with about `sample_bytes` of text.

    They are spread over all splits by their hash.
    """
    train = np.flatnonzero(records["fate"] == _TRAIN)
    order = train[np.argsort(records["low"][train], kind="stable")]
    before = np.cumsum(records["num_bytes"][order], dtype=np.int64) - records["num_bytes"][order]
    mask = np.zeros(len(records), dtype=bool)
    mask[order[before < sample_bytes]] = True
    return mask


def _chosen_documents(task: SplitTask) -> Iterator[tuple[Document, np.void]]:
    """Reads the documents of a split again, normalised, each with its record.

    Raises:
        InputError: they are others now.
    """
    chosen = np.load(task.unfinished("chosen.npy"), allow_pickle=False)
    for document, record in zip_longest(task.documents(), chosen):
        text = normalised(document.text) if document else ""
        if document is None or record is None or _record(text)[:3] != record.item()[:3]:
            raise InputError(
                f"{task.split.label} has changed while it was being prepared: "
                "delete the folder and prepare again, from files that nobody writes to"
            )
        yield replace(document, text=text), record


# ---- tokenizer


def collect_sample(task: SplitTask) -> None:
    """Writes the split's share of the tokenizer's training text."""
    path = task.unfinished("sample.jsonl")
    if not path.exists():
        with atomic_write(path) as file:
            for document, record in _chosen_documents(task):
                if record["in_sample"]:
                    file.write(json.dumps(document.text).encode() + b"\n")


def _loaded_tokenizer(config: DataConfig) -> Tokenizer:
    """Opens the tokenizer that the configuration names.

    Raises:
        InputError: it has more ids than the configuration has room for, or cannot be opened.
    """
    tokenizer = open_tokenizer(config.tokenizer, end_of_document=config.end_of_document)
    if tokenizer.vocab_size > config.vocab_size:
        raise InputError(
            f"tokenizer {config.tokenizer!r} has {tokenizer.vocab_size} ids, more than "
            f"data.vocab_size={config.vocab_size}: set data.vocab_size={tokenizer.vocab_size} (and "
            "model.vocab_size at least as high)"
        )
    return tokenizer


def train_tokenizer(task: TokenizerTask) -> None:
    """Trains the tokenizer on the sample in split order, and writes tokenizer.json."""
    paths = [_unfinished(task.directory, index, "sample.jsonl") for index in range(task.num_splits)]
    texts = (json.loads(line) for path in paths for line in _lines_of(path))
    save_tokenizer(task.directory, train_bpe(texts, vocab_size=task.vocab_size))


def _lines_of(path: Path) -> Iterator[bytes]:
    with open(path, "rb") as file:
        yield from file


# ---- shards


def tokenise_split(task: SplitTask) -> tuple[ShardEntry, ...]:
    """Writes the shards of one split, one per side.

    What a former run wrote is used if its checksums agree.
    """
    if (ready := _ready_shards(task)) is not None:
        return ready
    tokenizer = load_tokenizer(task.directory)
    sides: tuple[Split, ...] = (
        ("train", "validation") if task.split.role == "both" else (task.split.role,)
    )
    with ExitStack() as files:
        writers: dict[Split, ShardWriter] = {
            side: _writer(task, tokenizer, files.enter_context(atomic_write(_path(task, side))))
            for side in sides
        }
        for side, document in _token_documents(task, tokenizer):
            writers[side].add(document)
        shards = tuple(_close(task, side, writer) for side, writer in writers.items())
    with atomic_write(task.unfinished("shards.json")) as file:
        file.write(json.dumps([shard.model_dump(mode="json") for shard in shards]).encode())
    return shards


def _ready_shards(task: SplitTask) -> tuple[ShardEntry, ...] | None:
    path = task.unfinished("shards.json")
    if not path.exists():
        return None
    shards = tuple(ShardEntry.model_validate(shard) for shard in json.loads(path.read_bytes()))
    try:
        for shard in shards:
            verify_shard(task.directory, shard)
    except ShardError:  # lost or damaged since it was written: made anew from the input
        return None
    return shards


def _path(task: SplitTask, side: Split) -> Path:
    return task.directory / shard_name(task.split.source, side, task.split.number)


def _writer(task: SplitTask, tokenizer: Tokenizer, file: IO[bytes]) -> ShardWriter:
    schema = shard_schema(tokenizer.vocab_size, shard_metadata(tokenizer, task.split.local_label))
    return ShardWriter(file, schema=schema, batch_tokens=task.config.batch_tokens)


def _close(task: SplitTask, side: Split, writer: ShardWriter) -> ShardEntry:
    name = _path(task, side).name
    with atomic_write(task.directory / index_name(name)) as index_file:
        return writer.close(
            name=name,
            split=side,
            source=task.split.source,
            label=task.split.label,
            index_file=index_file,
        )


def _token_documents(
    task: SplitTask, tokenizer: Tokenizer
) -> Iterator[tuple[Split, TokenDocument]]:
    end = np.array([tokenizer.end_of_document_id], dtype=token_dtype(tokenizer.vocab_size))
    for batch in _by_size(pair for pair in _chosen_documents(task) if pair[1]["fate"] in _SIDES):
        encoded = tokenizer.encode_batch([document.text for document, _ in batch])
        for (document, record), tokens in zip(batch, encoded, strict=True):
            doc_id = struct.pack(">QQ", record["high"], record["low"])
            with_end = np.concatenate([tokens, end])
            num_bytes = int(record["num_bytes"])
            yield (
                _SIDES[record["fate"]],
                TokenDocument(with_end, doc_id, num_bytes, document.source, document.row),
            )


def _by_size(pairs: Iterable[tuple[Document, np.void]]) -> Iterator[list[tuple[Document, np.void]]]:
    batch: list[tuple[Document, np.void]] = []
    size = 0
    for pair in pairs:
        batch.append(pair)
        size += len(pair[0].text)
        if size >= _ENCODE_CHARS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch
