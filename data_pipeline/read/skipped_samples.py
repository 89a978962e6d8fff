"""The samples of each step of a run that skips ranges of samples.

After a loss spike, a run returns to a checkpoint and skips the samples read since (train/spikes/). Its
steps take the remaining samples in order, so a step's samples are a pure function of the skipped
ranges.
"""

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class SkippedSamples:
    """Holds the ranges of samples that a run skips: ascending and disjoint."""

    ranges: tuple[range, ...] = ()

    @classmethod
    def of(cls, ranges: Iterable[range]) -> "SkippedSamples":
        """Returns the union of ranges in any order."""
        merged: list[range] = []
        for stretch in sorted(filter(None, ranges), key=lambda one: one.start):
            if merged and stretch.start <= merged[-1].stop:
                last = merged.pop()
                stretch = range(last.start, max(last.stop, stretch.stop))
            merged.append(stretch)
        return cls(tuple(merged))

    def next_step(self, sample: int, count: int) -> int:
        """Returns where the next step begins: at `sample`, or after the ranges it would overlap.

        Args:
            sample: the end of the previous step.
            count: consecutive samples of a step, none of which may be skipped.
        """
        for stretch in self.ranges:
            if sample < stretch.stop and stretch.start < sample + count:
                sample = stretch.stop
        return sample

    def step_at(self, step: int, count: int) -> range:
        """Returns the samples of a step.

        Args:
            step: counted from 1.
            count: samples of each step.
        """
        start = 0
        for stretch in self.ranges:
            steps_before = (stretch.start - start) // count
            if step <= steps_before:
                break
            step -= steps_before
            start = stretch.stop
        first = start + (step - 1) * count
        return range(first, first + count)


NOTHING = SkippedSamples()
