"""Which documents are in a step of a run, and in which steps a document comes.

Forward: step -> samples -> rows (`samples`, a pure function of the sample's number) -> stretches of
an era's stream (`layout`) -> documents (`document_index`). Backward the same way: a document's
tokens lie in known rows of its era, and the order of each epoch is inverted, window by window, so
nothing is searched. Both are as the run has it: rows that stand in for damaged ones are those that
its `skipped/` names.

Cost: milliseconds per row and epoch. Fitted rows need the plans of the eras before, which are made
if no run has made them yet.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .data_config import DataConfig
from .document_index import DocumentIndex, DocumentRecord
from .errors import DataError
from .read.corruption import SkipList, open_fetcher
from .read.order import RowRefs
from .read.rows import Rows
from .read.samples import OrderedSamples
from .read.skipped_samples import NOTHING, LeftOut


@dataclass(frozen=True)
class SampleRow:
    """Names the row that a sample of a run is."""

    sample: int
    step: int | None  # from 1 on; None: the run leaves the sample out
    source: str
    epoch: int
    era: int
    row: int
    replaces: int | None  # the damaged row for which it stands; None: it is the order's own


@dataclass(frozen=True)
class RowPart:
    """Says which of a document's tokens are in a row."""

    document: DocumentRecord
    first: int  # token of the document
    num_tokens: int

    @property
    def is_whole(self) -> bool:
        """Returns whether the whole document is in the row."""
        return self.num_tokens == self.document.num_tokens

    def as_json(self) -> dict[str, Any]:
        """Returns it as values of JSON."""
        return {"first": self.first, "num_tokens": self.num_tokens} | self.document.as_json()


@dataclass(frozen=True)
class EpochSightings:
    """Says when a document comes in one epoch of its source: steps and samples, ascending."""

    epoch: int
    samples: tuple[int, ...]
    steps: tuple[int, ...]


@dataclass(frozen=True)
class Sightings:
    """Says when a document comes in a run, as far as that is decided."""

    document: DocumentRecord
    rows: tuple[int, ...]  # of its era, that hold some of its tokens
    epochs: tuple[EpochSightings, ...]  # of those in which it comes before the run's end
    epochs_left_out: int  # later ones that were not asked for
    # where it never comes in the run: the first after its end, or one that it left out
    next_sample: int | None
    is_final: bool  # the folder is complete, or what is to come cannot matter


class RunOrder:
    """Answers which documents a run reads when. Use it as a context manager, or call `close`.

    Args:
        data: the run's data.
        global_batch: samples of a step.
        num_steps: of the whole run.
        skip_folder: where the run wrote down which damaged rows it passed over.
        left_out: samples that no step of the run takes.

    Raises:
        DataError: the folder cannot be read as the configuration says.
    """

    def __init__(
        self,
        data: DataConfig,
        *,
        global_batch: int,
        num_steps: int,
        skip_folder: Path | None,
        left_out: LeftOut = NOTHING,
    ):
        self.global_batch, self.num_steps = global_batch, num_steps
        self.left_out = left_out
        self._skipped = SkipList(skip_folder, most_batches=data.max_skipped_batches, read_only=True)
        self.samples = OrderedSamples(data, open_fetcher(data, self._skipped))
        prepared = self.samples.prepared
        self.documents = DocumentIndex(data.directory, lambda: prepared.manifest, "train")

    @property
    def num_samples(self) -> int:
        """Returns the samples of the whole run, with those that it leaves out on the way."""
        return self.left_out.step_at(self.num_steps, self.global_batch).stop

    def samples_of_step(self, step: int) -> range:
        """Returns the samples of a step, which count from 0 on; steps count from 1 on.

        Raises:
            DataError: the run has no such step.
        """
        if not 1 <= step <= self.num_steps:
            raise DataError(
                f"step {step} is none of the run's {self.num_steps:,} (train.steps), which count "
                "from 1"
            )
        return self.left_out.step_at(step, self.global_batch)

    def rows_of(self, samples: range) -> list[SampleRow]:
        """Returns the rows of samples in a row.

        Raises:
            DataError: the run has no such sample, or it is not decided yet.
        """
        planned = self._planned(samples)
        return self._named(samples, planned, self.samples.with_recorded(planned, self._skipped))

    def read(self, samples: range) -> tuple[list[SampleRow], Rows]:
        """Returns the rows of samples in a row, and what is in them.

        Raises:
            DataError: as `rows_of`; or a record batch is damaged, and not to be passed over.
        """
        planned = self._planned(samples)
        refs, rows = self.samples.read(samples.start, planned, self._skipped)
        return self._named(samples, planned, refs), rows

    def parts_of(self, row: SampleRow) -> list[RowPart]:
        """Returns the documents of a row, in its order."""
        layout = self.samples.prepared.layout(row.source, row.era)
        return [
            part
            for begin, end in layout.spans_of(row.row)
            for part in parts_between(self.documents, row.source, row.era, begin, end)
        ]

    def sightings(self, document: DocumentRecord, *, most_epochs: int) -> Sightings:
        """Returns when a document comes, in so many epochs of its source at most."""
        rows = self.samples.prepared.layout(document.source, document.era).rows_of(
            document.first_token, document.end_token
        )
        epochs, is_final = self._num_epochs(document)
        wanted = range(min(epochs, most_epochs))
        found = [self._sightings_of(document, rows, epoch) for epoch in wanted]
        comes = tuple(one for one in found if one.samples)
        return Sightings(
            document,
            tuple(rows),
            comes,
            epochs - len(wanted),
            None if comes or not rows else self._first_sample(document, rows),
            is_final,
        )

    def close(self) -> None:
        """Closes the files."""
        self.samples.close()
        self.documents.close()

    def __enter__(self) -> "RunOrder":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _planned(self, samples: range) -> RowRefs:
        """Returns the rows that the order alone has for samples."""
        if not 0 <= samples.start < samples.stop <= self.num_samples:
            raise DataError(
                f"samples {samples.start} to {samples.stop - 1} are not all of the run's "
                f"{self.num_samples:,} ({self.num_steps:,} steps of {self.global_batch}"
                f"{self._left_out_words()}), which count from 0"
            )
        if missing := self.samples.prepare(samples.start, len(samples)):
            raise DataError(
                f"samples {samples.start} to {samples.stop - 1} are not decided yet: {missing}. "
                "Ask again when the preparation has come so far"
            )
        return self.samples.refs_at(samples.start, len(samples))

    def _left_out_words(self) -> str:
        count = self.left_out.num_samples
        return f", and {count:,} that it left out" if count else ""

    def _named(self, samples: range, planned: RowRefs, refs: RowRefs) -> list[SampleRow]:
        names = self.samples.mixture.names
        columns = (refs.sources, refs.epochs, refs.eras, refs.rows, planned.rows)
        lists = zip(samples, *(column.tolist() for column in columns), strict=True)
        return [
            SampleRow(
                sample,
                self._step_of(sample),
                names[source],
                epoch,
                era,
                row,
                replaces=None if row == due else due,
            )
            for sample, source, epoch, era, row, due in lists
        ]

    def _step_of(self, sample: int) -> int | None:
        return self.left_out.step_of(sample, self.global_batch)

    def _num_epochs(self, document: DocumentRecord) -> tuple[int, bool]:
        """Returns in how many epochs of its source a run looks, and whether that may still change."""
        mixture = self.samples.mixture
        number = mixture.names.index(document.source)
        needed = int(mixture.rows_before(self.num_samples)[number])
        rows = self.samples.count_eras(document.source, rows=needed, eras=document.era + 1)
        known = sum(rows.era_rows)
        if needed <= known or not rows.complete:
            return 1, needed <= known
        epochs = -(-needed // known)
        return (min(epochs, rows.max_epochs) if rows.max_epochs else epochs), True

    def _sightings_of(
        self, document: DocumentRecord, rows: list[int], epoch: int
    ) -> EpochSightings:
        source, era = document.source, document.era
        samples = [
            self.samples.order.sample_of(source, epoch, era, row)
            for row in rows
            if (source, epoch, era, row) not in self._skipped.rows
        ]
        samples += [
            one.sample
            for one in self._skipped.rows.values()
            if (one.source, one.epoch, one.era) == (source, epoch, era) and one.replaced_by in rows
        ]
        steps_of = {
            sample: step
            for sample in sorted(one for one in samples if one is not None)
            if sample < self.num_samples and (step := self._step_of(sample)) is not None
        }
        steps = dict.fromkeys(steps_of.values())
        return EpochSightings(epoch, tuple(steps_of), tuple(steps))

    def _first_sample(self, document: DocumentRecord, rows: list[int]) -> int | None:
        """Returns when a longer run, or one that leaves nothing out, would read a document first."""
        order = self.samples.order
        samples = [order.sample_of(document.source, 0, document.era, row) for row in rows]
        return min((sample for sample in samples if sample is not None), default=None)


def parts_between(
    documents: DocumentIndex, source: str, era: int, begin: int, end: int
) -> Iterator[RowPart]:
    """Yields the documents of a stretch of an era's stream, each as far as it lies there."""
    for document in documents.between(source, era, begin, end):
        first = max(begin, document.first_token)
        last = min(end, document.end_token)
        yield RowPart(document, first - document.first_token, last - first)
