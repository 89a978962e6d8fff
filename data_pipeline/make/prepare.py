"""Prepares text as a folder of token shards that can be trained on while it grows.

1. plan      divides the input into units of work, in one order for all stages (`units`)
2. scan      finds hash, size and faults of every document of a unit (`tasks.scan_unit`)
3. choose    drops repeats and holds out validation documents, in order (`choose`)
4. sample    takes the heads of units of all sources, to train the tokenizer
5. tokenise  writes one shard per side of a unit, as soon as it is chosen
6. commit    seals segments as they fill, in order, for readers (`commit`)

Stages 2, 4 and 5 are tasks of a `TaskPool` and run anywhere, in any order, tokenising before scanning.
Stages 3 and 6 are quick and run here. With `shuffle_documents`, tokenised documents are spilled, and a
second pass collects them into shards (`shuffle`).

The output depends only on the input and the configuration: any number of workers, interruptions (also
kill -9) and retries give the same bytes. Unfinished work lies in `unfinished/`, where the next call
continues.

A task that fails for the user's mistake ends the preparation with that error. A unit that kills its
process, or fails otherwise, is tried three times and then quarantined: it is left out, and the last
manifest records it (`pools`).

Cost: reading takes 10 ms/MB/core, twice unless the process still has the documents (`kept`); tokenising
takes nearly all the time.
"""

import logging
import os
import traceback
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from ..errors import DataError, InputError, PrepareError, ShardError
from ..manifest import (
    UNFINISHED,
    DatasetManifest,
    QuarantinedSplit,
    ShardEntry,
    is_prepared,
    read_manifest,
)
from ..prepare_config import PrepareConfig
from ..sources.embedded import EMBEDDED
from ..sources.records import FAULTS
from ..words import some_of
from .choose import Chooser
from .commit import Committer
from .filters import set_up_rules
from .kept import forget
from .pools import ATTEMPTS, Failures, OnPoison, SerialPool, TaskPool, ended, reason
from .shuffle import gather_bucket, shuffled_buckets, spill_unit
from .tasks import (
    SIDES,
    Scanned,
    UnitTask,
    read_scan,
    recorded_shards,
    sample_unit,
    save_fates,
    scan_unit,
    tokenise_unit,
    train_task,
    unfinished_file,
)
from .unfinished import (
    QUARANTINED,
    Quarantined,
    QuarantineStage,
    begin,
    claimed,
    clear,
    compare_files,
    finished,
    forget_quarantined,
    named_as_in,
    read_quarantined,
    record_files,
    temporary_files,
    write_quarantined,
)
from .units import Meter, PrepareProgress, Unit, plan_units
from .vocabulary import Vocabulary

logger = logging.getLogger(__name__)

_MAX_REASON_CHARS = 2000
IfChanged = Literal["refuse", "tell", "ignore"]
_Stage = Literal["sample", "train", "gather", "tokenise", "scan"]


def prepare(
    config: PrepareConfig,
    directory: str | Path,
    *,
    pool: TaskPool | None = None,
    on_progress: Callable[[PrepareProgress], None] | None = None,
    on_poison: OnPoison = "auto",
    if_changed: IfChanged = "refuse",
) -> DatasetManifest:
    """Prepares the data of `config` in `directory`, and returns its manifest.

    Prepares nothing if the folder is complete and its files are as they were; continues an interrupted
    preparation; waits for another process that prepares the same folder.

    Args:
        config: the section `prepare`.
        directory: the folder for the shards, visible to every worker.
        pool: runs the tasks; by default, and always for the embedded corpus alone, they run one after
            another in this process.
        on_progress: called after every task.
        on_poison: the policy for units that cannot be prepared.
        if_changed: what to do if the folder is complete and its files have changed since; "ignore"
            needs no input.

    Raises:
        InputError: input cannot be read.
        PrepareError: the folder holds other data or cannot be written.
    """
    folder = Path(directory).absolute()
    config = named_as_in(folder, config)
    show = on_progress or _log_news

    def tell(news: str) -> None:
        show(PrepareProgress("reading", news=news))

    if any(source.input == (EMBEDDED,) for source in config.all_sources):
        tell("the text is Python's own documentation (embedded); prepare.input names yours")
    manifest = finished(config, folder)
    if manifest is None:
        # before writing anything: most mistakes are in the names of the input
        units = plan_units(config, tell, lenient=on_poison == "quarantine")
        if pool is None or _needs_no_pool(units):
            pool = SerialPool()
        with claimed(folder, on_wait=lambda: show(PrepareProgress("waiting for another process"))):
            manifest = finished(config, folder)  # another process may have been faster
            if manifest is None:
                if news := begin(config, folder, units):
                    tell(news)
                set_up_rules(config, folder / UNFINISHED)
                work = _Preparation(config, folder, units, pool, show, on_poison)
                try:
                    work.run()
                except DataError:
                    if not is_prepared(folder):  # nothing is sealed, so corrections count
                        forget_quarantined(folder)
                    raise
                finally:
                    forget(folder)  # the cache of a pool in this process
                manifest = read_manifest(folder)
            clear(folder)
        return manifest
    if if_changed != "ignore":
        try:
            compare_files(config, folder, tell)
        except PrepareError as error:
            if if_changed == "refuse":
                raise
            tell(f"the run goes on with its data as it is, although {error}")
    if os.access(folder, os.W_OK) and (
        (folder / UNFINISHED).exists() or any(temporary_files(folder))
    ):
        with claimed(folder, on_wait=lambda: None):
            clear(folder)
    return manifest


def _log_news(progress: PrepareProgress) -> None:
    """Logs news that a user must see even without a progress display."""
    if progress.news:
        logger.warning("%s", progress.news)


def _needs_no_pool(units: Sequence[Unit]) -> bool:
    """Returns whether the input is only the embedded corpus, which every process reads whole (3 s)."""
    return all(split.kind == EMBEDDED for unit in units for split in unit.splits)


def look_ahead(config: PrepareConfig, directory: str | Path) -> DatasetManifest | None:
    """Returns the manifest of complete data; None if a preparation is needed and can begin.

    Raises:
        InputError: some input does not exist.
        PrepareError: the folder holds other data.
    """
    folder = Path(directory).absolute()
    manifest = finished(named_as_in(folder, config), folder)
    if manifest is None:
        plan_units(config)
    return manifest


class _Preparation:
    """Runs one preparation: tracks tasks that are ready, running and done."""

    def __init__(
        self,
        config: PrepareConfig,
        folder: Path,
        units: Sequence[Unit],
        pool: TaskPool,
        show: Callable[[PrepareProgress], None],
        on_poison: OnPoison,
    ):
        self._config, self._folder, self._units, self._pool = config, folder, units, pool
        self._show, self._failures = show, Failures(on_poison)
        self._chooser = Chooser(config)
        self._vocabulary = Vocabulary(config, folder, units)
        self._meter = Meter(units)
        self._buckets = shuffled_buckets(units, config) if config.shuffle_documents else ()
        self._to_commit = deque(enumerate(self._buckets or units))
        self._committer = Committer(
            config,
            folder,
            num_units=dict(Counter(unit.source for _, unit in self._to_commit)),
            on_segment=self._meter.segment_sealed,
        )
        # by priority
        self._ready: dict[_Stage, deque[int]] = {
            stage: deque() for stage in ("train", "sample", "gather", "tokenise", "scan")
        }
        self._out: dict[int, tuple[_Stage, int]] = {}
        self._scanned: set[int] = set()
        self._num_chosen = self._num_made = 0
        self._last_units = {unit.source: index for index, unit in enumerate(units)}
        self._spilled: list[int] = []
        self._shards: dict[int, tuple[ShardEntry, ...]] = {}  # made but not committed
        self._quarantined: dict[int, Quarantined] = {}

    # ---- the loop

    def run(self) -> None:
        """Runs everything that is left to do."""
        self._recall()
        self._choose_in_order()
        self._commit_in_order()
        self._tell()
        self._hand_out()
        while self._to_commit:
            assert self._out, "work is left, but no task is running"
            number, outcome = self._pool.wait()
            stage, index = self._out.pop(number)
            if isinstance(outcome, BaseException):
                self._failed(stage, index, outcome)
            else:
                self._done(stage, index, outcome)
            self._choose_in_order()
            self._hand_out()  # first, so that no worker waits for the manifests' fsync
            self._commit_in_order()
            self._tell()
        for source in self._last_units:
            if not self._committer.num_train_tokens(source):
                raise self._nothing_left(source)
        quarantined = [entry.split for _, entry in sorted(self._quarantined.items())]
        record_files(self._folder)
        self._committer.complete(self._chooser.counts, quarantined, self._units)

    def _recall(self) -> None:
        """Finds what an earlier run has done, and what to do first."""
        if not is_prepared(self._folder):  # nothing is sealed, so repaired units are read again
            forget_quarantined(self._folder)
        for index, unit in enumerate(self._units):
            if (entry := read_quarantined(self._folder, unit)) is not None:
                self._quarantined[index] = entry
                self._meter.unit_done(unit, 0, is_own=False)
            # decided again before it is read; may be torn
            unfinished_file(self._folder, unit, "fates.npy").unlink(missing_ok=True)
            if unfinished_file(self._folder, unit, "scan.npz").exists():
                self._scanned.add(index)
            elif entry is None:
                self._ready["scan"].append(index)
        self._ready["sample"].extend(self._vocabulary.units_to_begin_with)
        sealed = read_manifest(self._folder).shards if is_prepared(self._folder) else ()
        self._sealed = {shard.name for shard in sealed}

    def _hand_out(self) -> None:
        capacity = self._pool.capacity
        while len(self._out) < capacity:
            task = self._next()
            if task is None:
                return
            self._out[self._pool.submit(*self._task(*task))] = task

    def _next(self) -> tuple[_Stage, int] | None:
        for stage, ready in self._ready.items():
            if ready and (stage != "tokenise" or self._vocabulary.is_ready):
                return stage, ready.popleft()
        return None

    def _task(self, stage: _Stage, index: int) -> tuple[Callable[[Any], object], object]:
        """Returns a task's function and item."""
        if stage == "train":
            return train_task, self._vocabulary.task
        if stage == "gather":
            bucket = self._buckets[index]
            spilled = [self._units[one] for one in sorted(self._spilled)]
            of_source = tuple(unit for unit in spilled if unit.source == bucket.source)
            return gather_bucket, replace(self._unit_task(bucket), spilled=of_source)
        task = self._unit_task(self._units[index])
        if stage == "sample":
            is_decided = self._vocabulary.waits_for(index)
            share = self._vocabulary.shares[index]
            return sample_unit, replace(task, sample_bytes=share, is_decided=is_decided)
        if stage == "scan":
            return scan_unit, task
        self._meter.begin_tokenising()
        return spill_unit if self._buckets else tokenise_unit, task

    def _unit_task(self, unit: Unit) -> UnitTask:
        return UnitTask(
            self._config,
            self._folder,
            unit,
            num_buckets=sum(bucket.source == unit.source for bucket in self._buckets),
        )

    def _tell(self) -> None:
        stages = {stage for stage, _ in self._out.values()} | {
            stage for stage, ready in self._ready.items() if ready
        }
        if self._buckets and self._num_made == len(self._units):
            stage = "shuffling"
        elif self._vocabulary.is_ready:
            stage = "tokenising"
        else:
            stage = "training the tokenizer" if "train" in stages else "reading"
        self._show(self._meter.progress(stage))

    # ---- results

    def _done(self, stage: _Stage, index: int, result: Any) -> None:
        if stage == "scan":
            self._scanned.add(index)
        elif stage == "sample":
            self._sampled(index, result)
        elif stage == "train":
            self._vocabulary.is_ready = True
        elif stage == "gather":
            self._shards[index] = result
        elif self._buckets:
            self._spilled.append(index)
            self._made(index, num_tokens=result)
        else:
            self._shards[index] = result
            self._made(index, num_tokens=sum(shard.num_tokens for shard in result))

    def _sampled(self, index: int, num_bytes: int | None, failure: str = "") -> None:
        try:
            if self._vocabulary.take(index, num_bytes):
                self._ready["train"].append(0)
        except InputError:
            if not failure:
                raise
            message = f"there is no text to train the tokenizer on, since input failed: {failure}"
            raise PrepareError(message) from None

    def _made(self, index: int, *, num_tokens: int, is_own: bool = True) -> None:
        """Counts a unit that needs no further tokenising."""
        self._num_made += 1
        if index not in self._quarantined:
            self._meter.unit_done(self._units[index], num_tokens, is_own=is_own)
        if self._buckets and self._num_made == len(self._units):
            self._ready["gather"].extend(range(len(self._buckets)))

    def _failed(self, stage: _Stage, index: int, error: BaseException) -> None:
        if self._failures.try_again((stage, index), error):
            self._ready[stage].appendleft(index)
            return
        if stage in ("train", "gather"):  # here no unit can be left out
            raise ended(self._name(stage, index), stage, error)
        self._failures.check_is_poison(self._name(stage, index), stage, error)
        if stage == "sample":  # scanning it will fail, too, and decides
            name = self._name(stage, index)
            self._sampled(index, None, f"{name} ({reason(error)}, {ATTEMPTS} times)")
        else:
            self._quarantine("scan" if stage == "scan" else "tokenise", index, error)

    def _name(self, stage: _Stage, index: int) -> str:
        if stage == "train":
            return "the tokenizer"
        if stage == "gather":
            return f"bucket {self._buckets[index].number} of source {self._buckets[index].source!r}"
        return self._units[index].label

    def _quarantine(self, stage: QuarantineStage, index: int, error: BaseException) -> None:
        unit = self._units[index]
        split = QuarantinedSplit(
            source=unit.source, input=unit.label, error=reason(error)[:_MAX_REASON_CHARS]
        )
        self._quarantined[index] = entry = Quarantined(stage, split)
        account = "".join(traceback.format_exception(error))
        write_quarantined(self._folder, unit, entry, account)
        self._meter.unit_done(unit, 0, is_own=False)
        news = f"{unit.label} is left out: {reason(error)}"
        self._show(self._meter.progress("quarantine", news=news))
        if stage == "tokenise":
            self._made(index, num_tokens=0)

    # ---- in order

    def _choose_in_order(self) -> None:
        while self._num_chosen < len(self._units):
            index = self._num_chosen
            entry = self._quarantined.get(index)
            if entry is not None and entry.stage == "scan":
                self._made(index, num_tokens=0)
            elif index not in self._scanned:
                return
            elif (scanned := self._scan_of(index)) is None:
                self._scanned.discard(index)
                self._ready["scan"].append(index)
                return
            else:
                self._choose(index, scanned, is_quarantined=entry is not None)
            self._num_chosen += 1
            if self._vocabulary.waits_for(index):
                if entry is None:
                    self._ready["sample"].append(index)
                else:
                    self._sampled(index, None, f"{entry.split.input} ({entry.split.error})")
            self._check_source(index)

    def _scan_of(self, index: int) -> Scanned | None:
        """Returns a unit's scan; None if it is damaged and must be repeated."""
        unit = self._units[index]
        try:
            return read_scan(self._folder, unit)
        except ShardError:
            unfinished_file(self._folder, unit, "scan.npz").unlink(missing_ok=True)
            return None

    def _choose(self, index: int, scanned: Scanned, *, is_quarantined: bool) -> None:
        unit = self._units[index]
        fates = self._chooser.choose(unit, scanned)
        self._check_faults(unit)
        save_fates(self._folder, unit, fates)
        has_documents = bool(np.isin(fates, list(SIDES)).any())
        if is_quarantined:
            self._made(index, num_tokens=0)
        elif self._buckets:  # shards are made of buckets, not of this unit
            if has_documents:
                self._ready["tokenise"].append(index)
            else:
                self._made(index, num_tokens=0)
        elif not has_documents:
            self._shards[index] = ()
            self._made(index, num_tokens=0)
        elif (sealed := self._sealed_shards(unit)) is not None:
            self._shards[index] = sealed
            num_tokens = sum(shard.num_tokens for shard in sealed)
            self._made(index, num_tokens=num_tokens, is_own=False)
        else:
            self._ready["tokenise"].append(index)

    def _check_faults(self, unit: Unit) -> None:
        """Checks that not too many documents are dropped for faults, if their number is limited."""
        limit = self._config.encoding_faults
        dropped = sum((counts.dropped for counts in self._chooser.counts.values()), Counter[str]())
        found = {reason: dropped[reason] for reason in FAULTS if dropped[reason]}
        if isinstance(limit, int) and sum(found.values()) > limit:
            words = some_of(f"{count:,} {reason}" for reason, count in found.items())
            raise InputError(
                f"{sum(found.values()):,} faulty documents ({words}), the last in {unit.label}, are "
                f"more than prepare.encoding_faults={limit}: repair the input, or raise the limit"
            )

    def _sealed_shards(self, unit: Unit) -> tuple[ShardEntry, ...] | None:
        """Returns a unit's shards if an earlier run sealed all of them."""
        recorded = recorded_shards(UnitTask(self._config, self._folder, unit))
        names = {shard.name for shard in recorded or ()}
        return recorded if names <= self._sealed else None

    def _check_source(self, index: int) -> None:
        """Checks that a source has training documents, once its last unit is chosen."""
        source = self._units[index].source
        if self._last_units[source] != index:
            return
        counts = self._chooser.counts[source]
        if counts.chosen["train"]:
            return
        config = next(one for one in self._config.all_sources if one.name == source)
        if any(one.split.source == source for one in self._quarantined.values()):
            raise self._nothing_left(source)
        names = some_of(config.input)
        reasons = some_of(f"{count} {reason}" for reason, count in counts.dropped.most_common())
        reasons = reasons if counts.dropped else "none dropped"
        if not counts.chosen["validation"]:
            raise InputError(
                f"input {names} is empty: {counts.dropped.total()} documents were read ({reasons}); "
                "give files with text"
            )
        raise InputError(
            f"input {names}: all documents went to validation "
            f"({counts.chosen['validation']} there; {reasons}): lower "
            f"prepare.validation_fraction={self._config.validation_fraction}, or give input that is not in "
            "validation_input"
        )

    def _nothing_left(self, source: str) -> PrepareError:
        """Returns the error for a source in quarantine, whose units the next call tries again."""
        lost = [one.split for one in self._quarantined.values() if one.split.source == source]
        forget_quarantined(self._folder, source)
        return PrepareError(
            f"nothing of source {source!r} could be prepared: {len(lost)} of its input splits are in "
            f"quarantine, for example {lost[0].input} ({lost[0].error}). Correct that, see "
            f"{self._folder / QUARANTINED}, and run the same command again"
        )

    def _commit_in_order(self) -> None:
        while self._to_commit:
            position, unit = self._to_commit[0]
            if position in self._shards:
                shards = self._shards.pop(position)
            elif (
                not self._buckets and position in self._quarantined and position < self._num_chosen
            ):
                shards = ()
            else:
                return
            self._committer.commit(unit.source, shards)
            self._to_commit.popleft()
