"""How far a preparation has come, for whoever shows it."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from .units import Unit


@dataclass(frozen=True)
class SourceProgress:
    """Reports how far one source is.

    `done` counts units whose shards are there; `num_bytes` is about the text that they hold. The
    time that is left is told from this process's own work; None: it has done none yet.
    """

    name: str
    done: int
    total: int
    num_bytes: int
    total_bytes: int
    tokens: int
    segments: int
    quarantined: int
    tokens_per_s: float | None = None
    eta_s: float | None = None


@dataclass(frozen=True)
class PrepareProgress:
    """Reports how far a preparation is.

    Its stages: "waiting for another process", "reading", "training the tokenizer", "tokenising",
    and with `shuffle_documents` "shuffling". `tokens_per_s` and `eta_s` are of this process's own
    work: what an earlier one left is not counted. None: not known yet.
    """

    stage: str
    sources: tuple[SourceProgress, ...] = ()
    tokens_per_s: float | None = None
    eta_s: float | None = None
    news: str = ""  # what has happened that people should know of

    @property
    def done(self) -> int:
        """Returns the units of all sources that are done."""
        return sum(source.done for source in self.sources)

    @property
    def total(self) -> int:
        """Returns the units of all sources."""
        return sum(source.total for source in self.sources)

    @property
    def tokens(self) -> int:
        """Returns the tokens that are ready, ends of documents included."""
        return sum(source.tokens for source in self.sources)


@dataclass
class _Count:
    total: int = 0
    total_bytes: int = 0
    done: int = 0
    num_bytes: int = 0
    tokens: int = 0
    segments: int = 0
    quarantined: int = 0
    own_bytes: int = 0  # of units that this process's tasks have made
    own_tokens: int = 0


@dataclass
class Meter:
    """Counts what is done, and how fast."""

    units: Sequence[Unit]
    _counts: dict[str, _Count] = field(default_factory=dict)
    _began: float | None = None

    def __post_init__(self) -> None:
        for unit in self.units:
            count = self._counts.setdefault(unit.source, _Count())
            count.total += 1
            count.total_bytes += unit.num_bytes

    def begin_tokenising(self) -> None:
        """Starts the clock of the speed, at the first call."""
        if self._began is None:
            self._began = time.monotonic()

    def unit_done(self, unit: Unit, tokens: int, *, is_own: bool = True) -> None:
        """Counts a unit whose shards are there; `is_own`: made by this process's tasks."""
        count = self._counts[unit.source]
        count.done += 1
        count.num_bytes += unit.num_bytes
        count.tokens += tokens
        if is_own:
            count.own_bytes += unit.num_bytes
            count.own_tokens += tokens

    def unit_quarantined(self, unit: Unit) -> None:
        """Counts a unit that is given up."""
        self._counts[unit.source].quarantined += 1
        self.unit_done(unit, 0, is_own=False)

    def segment_sealed(self, source: str) -> None:
        """Counts a segment."""
        self._counts[source].segments += 1

    def progress(self, stage: str, *, news: str = "") -> PrepareProgress:
        """Returns the state of things."""
        elapsed = max(time.monotonic() - self._began, 1e-6) if self._began is not None else None
        sources = tuple(_of_source(name, count, elapsed) for name, count in self._counts.items())
        own_bytes = sum(count.own_bytes for count in self._counts.values())
        if elapsed is None or not own_bytes:
            return PrepareProgress(stage, sources, news=news)
        left = sum(source.total_bytes - source.num_bytes for source in sources)
        own_tokens = sum(count.own_tokens for count in self._counts.values())
        return PrepareProgress(
            stage, sources, own_tokens / elapsed, left * elapsed / own_bytes, news
        )


def _of_source(name: str, count: _Count, elapsed: float | None) -> SourceProgress:
    progress = SourceProgress(
        name=name,
        done=count.done,
        total=count.total,
        num_bytes=count.num_bytes,
        total_bytes=count.total_bytes,
        tokens=count.tokens,
        segments=count.segments,
        quarantined=count.quarantined,
    )
    if elapsed is None or not count.own_bytes:
        return progress
    left = count.total_bytes - count.num_bytes
    return replace(
        progress,
        tokens_per_s=count.own_tokens / elapsed,
        eta_s=left * elapsed / count.own_bytes,
    )
