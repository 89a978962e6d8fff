"""Stretches of a run's samples that no step of it takes: which samples a step has, and the way back.

A run that has gone back to an earlier checkpoint leaves out what it read since (train/spikes/). Its
steps take the samples that are left, in their order, so everything stays a pure function of the
stretches: the loader skips them, whatever the number of ranks, and `moebius data order` counts as
the loader does.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class LeftOut:
    """The stretches of samples that a run passes over: ascending, and apart from each other."""

    stretches: tuple[range, ...] = ()

    @classmethod
    def of(cls, stretches: Iterable[range]) -> "LeftOut":
        """Returns the union of stretches in any order."""
        merged: list[range] = []
        for stretch in sorted(filter(None, stretches), key=lambda one: one.start):
            if merged and stretch.start <= merged[-1].stop:
                last = merged.pop()
                stretch = range(last.start, max(last.stop, stretch.stop))
            merged.append(stretch)
        return cls(tuple(merged))

    @property
    def num_samples(self) -> int:
        """Returns how many samples are left out."""
        return sum(map(len, self.stretches))

    def next_step(self, sample: int, count: int) -> int:
        """Returns where the step begins that a run makes at a position: there, or further on.

        Args:
            sample: the position, which is the end of the step before.
            count: samples of a step; it takes neighbours, and none that is left out.
        """
        for stretch in self.stretches:
            if sample < stretch.stop and stretch.start < sample + count:
                sample = stretch.stop
        return sample

    def step_at(self, step: int, count: int) -> range:
        """Returns the samples of a step.

        Args:
            step: counted from 1.
            count: samples of each step.
        """
        before = step - 1
        for piece in self._pieces():
            steps = before + 1 if piece.stop is None else (piece.stop - piece.start) // count
            if before < steps:
                first = piece.start + before * count
                return range(first, first + count)
            before -= steps
        raise AssertionError("the last piece has no end")

    def step_of(self, sample: int, count: int) -> int | None:
        """Returns the step that takes a sample, counted from 1; None: it is left out."""
        done = 0
        for piece in self._pieces():
            if sample < piece.start:
                return None
            steps = (sample - piece.start) // count
            if piece.stop is None or steps < (piece.stop - piece.start) // count:
                return done + steps + 1
            done += (piece.stop - piece.start) // count
        return None

    def _pieces(self) -> "Iterator[_Piece]":
        """Yields what lies between the stretches, in order."""
        start = 0
        for stretch in self.stretches:
            yield _Piece(start, stretch.start)
            start = stretch.stop
        yield _Piece(start, None)


@dataclass(frozen=True)
class _Piece:
    """Samples in a row that are not left out."""

    start: int
    stop: int | None  # None: there is no end


NOTHING = LeftOut()
