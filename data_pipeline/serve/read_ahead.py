"""Which chunks the ranks of a node will want next, in the order of the run.

It goes from step to step as the ranks do, over the node's slice of each, and stops two windows of
the order ahead of the slowest rank, at a segment that is not sealed yet, or where its caller has no
room. Not for several threads at once: it shares the order with whoever reads.
"""

from collections import OrderedDict
from collections.abc import Callable

from ..errors import DataError, ShardError
from ..read.packing import WINDOW_BATCHES
from ..read.samples import OrderedSamples
from .cache import ChunkKey
from .protocol import ServerJob
from .shared_memory import most_bytes

_MOST_SAMPLES = 2**16  # ahead: where rows are short, ordering them costs more than decoding them
_LEAST_STEPS = 4

Touch = Callable[[ChunkKey, int], bool]
"""Notes that a chunk will be used at a sample, and says whether it is there."""


class ReadAhead:
    """Knows the chunks that will be wanted.

    Attributes:
        position: the step up to which they are known, by its first sample.
    """

    def __init__(self, samples: OrderedSamples, job: ServerJob):
        self.position = job.start_sample
        self._samples = samples
        self._step = job.global_batch
        per_rank = job.global_batch // job.num_ranks
        self._first, self._count = job.first_rank * per_rank, job.ranks_here * per_rank
        tokens = 2 * WINDOW_BATCHES * samples.prepared.manifest.batch_tokens
        windows = tokens * len(samples.mixture.names) // job.data.seq_len
        self._most_samples = max(_LEAST_STEPS * self._step, min(windows, _MOST_SAMPLES))
        self._missing: OrderedDict[ChunkKey, None] = OrderedDict()

    def next(self, reached: int, touch: Touch) -> ChunkKey | None:
        """Returns the first chunk that is to be read ahead, until it is dropped; None: none is.

        Args:
            reached: the sample that the slowest rank has reached.
            touch: is told about every use of a chunk.
        """
        if reached > self.position:  # the ranks were faster: what they have passed is not read
            self.position = reached - (reached - self.position) % self._step
            self._missing.clear()
        while True:
            while self._missing:
                key = next(iter(self._missing))
                if not touch(key, self.position):
                    return key
                self.drop(key)
            if not self._advance(reached, touch):
                return None

    def drop(self, key: ChunkKey) -> None:
        """Forgets a chunk that is there now, or that is not to be read ahead."""
        self._missing.pop(key, None)

    def most_bytes(self, key: ChunkKey) -> int:
        """Returns the most bytes that a chunk takes once it is decoded.

        Raises:
            ShardError: there is no such chunk.
        """
        source, segment, number = key
        prepared = self._samples.prepared
        while segment >= len(prepared.manifest.segments(source)) and self._samples.grow():
            pass
        num_chunks = len(prepared.chunks(source, segment).row_starts) - 1
        if number >= num_chunks:
            raise ShardError(f"segment {segment} of source {source!r} has no chunk {number}")
        return most_bytes(
            prepared.layout(source, segment).most_of(number),
            token_bytes=prepared.token_bytes,
            counts=prepared.wanted.counts,
            documents=prepared.wanted.documents,
        )

    def _advance(self, reached: int, touch: Touch) -> bool:
        """Looks at one more step; False: it is too far away, not there yet, or never will be."""
        if self.position + self._step > reached + self._most_samples:
            return False
        try:
            if self._samples.prepare(self.position, self._step):
                return False
        except DataError:  # the sources are used up: the ranks end with that
            return False
        for key in self._samples.chunks_at(self.position + self._first, self._count):
            if not touch(key, self.position):
                self._missing[key] = None
        self.position += self._step
        return True
