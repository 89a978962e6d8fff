"""What is made of what, in which order: a pure function of the configuration and the input's sizes.

The unit of work is a `Unit`: an input split, or where a source has many small files several of
them in a row. A unit becomes at most one shard per side. Units of all sources stand in one order:
first those that are for validation, so that what is in both is validated on and not trained on;
then all others, the sources interleaved by the fraction of each that is done, so that whoever reads
along finds all of them growing alike.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction

from ..prepare_config import PrepareConfig
from ..sources.documents import InputSplit, Role
from ..sources.splits import plan_splits

MAX_SPLITS_APART = 256
"""A source of more input splits has its small ones bundled: a file of one page costs as much as one
of a thousand to start, write and remember."""

MAX_SAMPLED_UNITS = 1024


@dataclass(frozen=True)
class Unit:
    """Names the part of one source that one task reads and one shard per side is made of."""

    source: str
    number: int  # among the source's units, and in the names of its shards
    splits: tuple[InputSplit, ...]

    @property
    def role(self) -> Role:
        """Returns the side that its documents are for."""
        return self.splits[0].role

    @property
    def num_bytes(self) -> int:
        """Returns about how much text it holds."""
        return sum(split.num_bytes for split in self.splits)

    @property
    def label(self) -> str:
        """Returns URL and range, for messages and the manifest."""
        return self._label(self.splits[0].label, self.splits[-1].label)

    @property
    def local_label(self) -> str:
        """Returns file name and range: the same wherever the file lies."""
        return self._label(self.splits[0].local_label, self.splits[-1].local_label)

    def _label(self, first: str, last: str) -> str:
        if len(self.splits) == 1:
            return first
        return f"{first} to {last} ({len(self.splits)} files)"


def plan_units(config: PrepareConfig) -> tuple[Unit, ...]:
    """Lists all units in the order in which they are decided about and committed.

    Raises:
        InputError: some input is not there.
    """
    splits = plan_splits(config)
    units = [
        unit
        for source in config.all_sources
        for unit in _units([one for one in splits if one.source == source.name], config.split_bytes)
    ]
    validation = [unit for unit in units if unit.role == "validation"]
    return (*validation, *interleaved(unit for unit in units if unit.role != "validation"))


def sample_shares(units: Sequence[Unit], sample_bytes: int) -> dict[int, int]:
    """Says how much text of which unit the tokenizer is trained on: position in `units` -> bytes.

    The shares are as equal as the sizes allow, over at most MAX_SAMPLED_UNITS units.
    """
    usable = [index for index, unit in enumerate(units) if unit.role != "validation"]
    count = min(len(usable), MAX_SAMPLED_UNITS)
    chosen = [usable[position * len(usable) // count] for position in range(count)]
    shares: dict[int, int] = {}
    left = sample_bytes
    by_size = sorted(chosen, key=lambda index: (units[index].num_bytes, index))
    for done, index in enumerate(by_size):  # what a small one cannot give, the larger ones do
        fair = -(-left // (count - done))
        # sizes are estimates: the largest are asked for more than they are thought to have
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
    """Sorts units by the fraction of their source that lies before their middle."""
    by_source: dict[str, list[Unit]] = {}
    for unit in units:
        by_source.setdefault(unit.source, []).append(unit)
    keyed: list[tuple[Fraction, int, Unit]] = []
    for rank, of_source in enumerate(by_source.values()):
        sizes = [unit.num_bytes + 1 for unit in of_source]  # an empty file has its place, too
        total, before = sum(sizes), 0
        for unit, size in zip(of_source, sizes, strict=True):
            keyed.append((Fraction(2 * before + size, 2 * total), rank, unit))
            before += size
    keyed.sort(key=lambda entry: entry[:2])
    return tuple(unit for _, _, unit in keyed)
