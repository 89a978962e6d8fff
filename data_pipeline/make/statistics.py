"""What the documents of an input split are like, counted where they are read.

A task counts with a `DocumentCounter` and returns plain `ScanStatistics`; the coordinator merges
them in the order of the splits, so that the result, examples included, is the same for any number of
workers. They go into the report and decide nothing.
"""

from collections import Counter
from dataclasses import dataclass, field

MAX_EXAMPLES = 3
MAX_EXAMPLE_CHARS = 160
NUM_LENGTHS = 34  # documents of up to 8 GiB


@dataclass(frozen=True)
class ScanStatistics:
    """Counts the documents of one or more input splits.

    It holds builtin values only: it pickles, and `dataclasses.asdict` of it is JSON.
    """

    num_documents: int = 0  # that were read, the dropped ones included
    num_text_bytes: int = 0  # UTF-8, of the same
    dropped: dict[str, int] = field(default_factory=dict)  # reason -> documents
    examples: dict[str, tuple[str, ...]] = field(default_factory=dict)  # reason -> beginnings
    # how many documents have 0, 1, 2-3, 4-7, ... UTF-8 bytes: place i is for a bit length of i
    lengths: tuple[int, ...] = (0,) * NUM_LENGTHS
    seconds: float = 0.0  # that it took; of all tasks together

    def merge(self, later: "ScanStatistics") -> "ScanStatistics":
        """Returns both together; of examples the first ones stay."""
        return ScanStatistics(
            num_documents=self.num_documents + later.num_documents,
            num_text_bytes=self.num_text_bytes + later.num_text_bytes,
            dropped=dict(Counter(self.dropped) + Counter(later.dropped)),
            examples={
                reason: (*self.examples.get(reason, ()), *later.examples.get(reason, ()))[
                    :MAX_EXAMPLES
                ]
                for reason in (self.examples | later.examples)
            },
            lengths=tuple(a + b for a, b in zip(self.lengths, later.lengths, strict=True)),
            seconds=self.seconds + later.seconds,
        )


class DocumentCounter:
    """Counts documents one by one; `statistics` may be asked at any time."""

    def __init__(self) -> None:
        self._num_text_bytes = 0
        self._dropped: Counter[str] = Counter()
        self._examples: dict[str, list[str]] = {}
        self._lengths = [0] * NUM_LENGTHS

    def read(self, num_bytes: int) -> None:
        """Counts a document that was read."""
        self._num_text_bytes += num_bytes
        self._lengths[min(num_bytes.bit_length(), NUM_LENGTHS - 1)] += 1

    def drop(self, reason: str, text: str, *, detail: str = "") -> None:
        """Counts a document that is left out.

        Args:
            reason: without anything of the document: reasons are few.
            text: its beginning is kept as an example.
            detail: stands before the example, for instance what the document was compared with.
        """
        self._dropped[reason] += 1
        kept = self._examples.setdefault(reason, [])
        if len(kept) < MAX_EXAMPLES:
            kept.append(_shortened(f"[{detail}] {text}" if detail else text))

    def statistics(self, *, seconds: float = 0.0) -> ScanStatistics:
        """Returns what was counted so far."""
        return ScanStatistics(
            num_documents=sum(self._lengths),
            num_text_bytes=self._num_text_bytes,
            dropped=dict(self._dropped),
            examples={reason: tuple(kept) for reason, kept in self._examples.items()},
            lengths=tuple(self._lengths),
            seconds=seconds,
        )


def _shortened(text: str) -> str:
    return text if len(text) <= MAX_EXAMPLE_CHARS else f"{text[: MAX_EXAMPLE_CHARS - 1]}…"
