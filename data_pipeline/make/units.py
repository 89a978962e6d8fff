"""The units of work: their plan, their order, and the progress through them.

The plan is a pure function of the configuration and the input's sizes. A `Unit` is an input split, or
several consecutive ones if a source has many small files, and becomes at most one shard per side. Units
of all sources share one order. Validation comes first, so that text in both is not trained on. The
others are interleaved by their position within their source, so that all sources grow alike. `Meter`
counts finished units for progress displays.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

from ...plugins import PYTHON, import_own, named_function
from ..prepare_config import PrepareConfig
from ..sources.documents import InputSplit, Role
from ..sources.formats import plan_splits

MAX_SPLITS_APART = 256
"""Sources with more input splits have small ones bundled, because each unit has fixed costs."""

MAX_SAMPLED_UNITS = 1024


@dataclass(frozen=True)
class Unit:
    """Names the part of a source that one task reads and that becomes one shard per side."""

    source: str
    number: int  # among the source's units, and in the names of its shards
    splits: tuple[InputSplit, ...]

    @property
    def role(self) -> Role:
        """Returns the side of its documents."""
        return self.splits[0].role

    @property
    def num_bytes(self) -> int:
        """Returns the estimated bytes of its text."""
        return sum(split.num_bytes for split in self.splits)

    @property
    def label(self) -> str:
        """Returns URL and range, for messages and the manifest."""
        return self._label(self.splits[0].label, self.splits[-1].label)

    @property
    def local_label(self) -> str:
        """Returns file name and range, independent of the file's folder."""
        return self._label(self.splits[0].local_label, self.splits[-1].local_label)

    def _label(self, first: str, last: str) -> str:
        if len(self.splits) == 1:
            return first
        return f"{first} to {last} ({len(self.splits)} files)"


def plan_units(
    config: PrepareConfig,
    tell: Callable[[str], None] = lambda news: None,
    *,
    lenient: bool = False,
) -> tuple[Unit, ...]:
    """Lists all units in the order of decisions and commits; for the rest see `plan_splits`.

    Imports the user's functions here, before processes of a pool or of a cluster do.

    Raises:
        InputError: some input does not exist.
        PluginError: a function cannot be imported.
    """
    for name in config.filters:
        import_own(name, where="prepare.filters", wants="a function of a document's text")
    if config.tokenizer.startswith(PYTHON):
        named_function(config.tokenizer, where="prepare.tokenizer", wants="a function of words")
    splits = plan_splits(config, tell, lenient=lenient)
    units = [
        unit
        for source in config.all_sources
        for unit in _units([one for one in splits if one.source == source.name], config.split_bytes)
    ]
    validation = [unit for unit in units if unit.role == "validation"]
    return (*validation, *interleaved(unit for unit in units if unit.role != "validation"))


def sample_shares(units: Sequence[Unit], sample_bytes: int) -> dict[int, int]:
    """Returns how many bytes of each unit to sample for the tokenizer, by its index in `units`.

    Shares are as equal as sizes allow, over at most MAX_SAMPLED_UNITS units.
    """
    usable = [index for index, unit in enumerate(units) if unit.role != "validation"]
    count = min(len(usable), MAX_SAMPLED_UNITS)
    chosen = [usable[position * len(usable) // count] for position in range(count)]
    shares: dict[int, int] = {}
    left = sample_bytes
    by_size = sorted(chosen, key=lambda index: (units[index].num_bytes, index))
    for done, index in enumerate(by_size):  # larger units make up for smaller ones
        fair = -(-left // (count - done))
        # sizes are estimates, so the largest units may be asked for more than theirs
        is_last = units[by_size[-1]].num_bytes == units[index].num_bytes
        shares[index] = max(1, fair if is_last else min(fair, units[index].num_bytes))
        left = max(0, left - shares[index])
    return shares


def _units(splits: Sequence[InputSplit], split_bytes: int) -> Iterator[Unit]:
    for number, bundle in enumerate(_bundles(splits, split_bytes)):
        yield Unit(bundle[0].source, number, bundle)


def _bundles(splits: Sequence[InputSplit], split_bytes: int) -> Iterator[tuple[InputSplit, ...]]:
    if len(splits) <= MAX_SPLITS_APART:
        yield from ((split,) for split in splits)
        return
    bundle: list[InputSplit] = []
    size = 0
    for split in splits:
        if bundle and (split.role != bundle[0].role or size + split.num_bytes > split_bytes):
            yield tuple(bundle)
            bundle, size = [], 0
        bundle.append(split)
        size += split.num_bytes
    yield tuple(bundle)


def interleaved(units: Iterable[Unit]) -> tuple[Unit, ...]:
    """Sorts units by the position of their middle within their source."""
    by_source: dict[str, list[Unit]] = {}
    for unit in units:
        by_source.setdefault(unit.source, []).append(unit)
    keyed: list[tuple[Fraction, int, Unit]] = []
    for rank, of_source in enumerate(by_source.values()):
        sizes = [unit.num_bytes + 1 for unit in of_source]  # empty files have a position, too
        total, before = sum(sizes), 0
        for unit, size in zip(of_source, sizes, strict=True):
            keyed.append((Fraction(2 * before + size, 2 * total), rank, unit))
            before += size
    keyed.sort(key=lambda entry: entry[:2])
    return tuple(unit for _, _, unit in keyed)


@dataclass
class SourceProgress:
    """Reports the progress of one source.

    `done` counts units with finished shards, `num_bytes` the estimated bytes of their text. The
    remaining time is measured on this process's own work; None if it has done none yet.
    """

    name: str
    done: int = 0
    total: int = 0
    num_bytes: int = 0
    total_bytes: int = 0
    tokens: int = 0
    segments: int = 0
    eta_s: float | None = None


@dataclass(frozen=True)
class PrepareProgress:
    """Reports the progress of a preparation.

    Its stages are "waiting for another process", "reading", "training the tokenizer", "tokenising",
    and with `shuffle_documents` "shuffling". `tokens_per_s` and `eta_s` count only this process's own
    work; None if not known yet.
    """

    stage: str
    sources: tuple[SourceProgress, ...] = ()
    tokens_per_s: float | None = None
    eta_s: float | None = None
    news: str = ""  # an event to show to the user

    @property
    def done(self) -> int:
        """Returns the number of finished units of all sources."""
        return sum(source.done for source in self.sources)

    @property
    def total(self) -> int:
        """Returns the number of units of all sources."""
        return sum(source.total for source in self.sources)

    @property
    def tokens(self) -> int:
        """Returns the number of finished tokens, ends of documents included."""
        return sum(source.tokens for source in self.sources)


class Meter:
    """Counts finished units, and measures the speed."""

    def __init__(self, units: Sequence[Unit]):
        self._counts: dict[str, SourceProgress] = {}
        self._own_bytes: Counter[str] = Counter()  # of units that this process's tasks have made
        self._own_tokens: Counter[str] = Counter()
        self._began: float | None = None
        for unit in units:
            count = self._counts.setdefault(unit.source, SourceProgress(unit.source))
            count.total += 1
            count.total_bytes += unit.num_bytes

    def begin_tokenising(self) -> None:
        """Starts the clock at the first call."""
        if self._began is None:
            self._began = time.monotonic()

    def unit_done(self, unit: Unit, tokens: int, *, is_own: bool = True) -> None:
        """Counts a unit with finished shards; `is_own` if this process's tasks made them."""
        count = self._counts[unit.source]
        count.done += 1
        count.num_bytes += unit.num_bytes
        count.tokens += tokens
        if is_own:
            self._own_bytes[unit.source] += unit.num_bytes
            self._own_tokens[unit.source] += tokens

    def segment_sealed(self, source: str) -> None:
        """Counts a sealed segment of a source."""
        self._counts[source].segments += 1

    def progress(self, stage: str, *, news: str = "") -> PrepareProgress:
        """Returns the current progress of all sources."""
        sources = tuple(
            replace(count, eta_s=self._speed(name)[1]) for name, count in self._counts.items()
        )
        return PrepareProgress(stage, sources, *self._speed(*self._counts), news)

    def _speed(self, *sources: str) -> tuple[float | None, float | None]:
        """Returns tokens per second and remaining seconds for some sources, if known."""
        own_bytes = sum(self._own_bytes[source] for source in sources)
        if self._began is None or not own_bytes:
            return None, None
        elapsed = max(time.monotonic() - self._began, 1e-6)
        counts = [self._counts[source] for source in sources]
        left = sum(count.total_bytes - count.num_bytes for count in counts)
        own_tokens = sum(self._own_tokens[source] for source in sources)
        return own_tokens / elapsed, left * elapsed / own_bytes
