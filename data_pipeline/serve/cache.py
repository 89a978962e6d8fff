"""The decoded chunks of a data server, who holds them, and the account of their bytes.

A chunk counts for as long as the server keeps its file or a rank maps it, so `used_bytes` is what
the chunks take of the node's memory, and it never exceeds `max_bytes`. Room is made out of chunks
that no rank maps:

1. first those whose last known use lies before every rank's position;
2. where a rank waits, then those whose use is furthest away.

What is read ahead stops at 7/8 of the bytes, so that what a rank waits for mostly finds room at
once. Where all is mapped by ranks there is none, and the rank is told so and reads by itself: a
server that let it wait instead might wait for a rank that waits for this one in a collective.
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass, field

from .shared_memory import SharedChunk

ChunkKey = tuple[str, int, int]
"""Source, segment, chunk."""

_MAX_FILES = 512  # chunks: each is an open file of the server


@dataclass
class Entry:
    """Is a decoded chunk, and which clients map it, how often."""

    number: int
    key: ChunkKey
    shared: SharedChunk
    last_use: int  # first sample of the last step that is known to use it
    holders: dict[int, int] = field(default_factory=dict)


class ChunkCache:
    """Keeps decoded chunks within a number of bytes. Not for several threads at once."""

    def __init__(self, max_bytes: int, *, max_files: int = _MAX_FILES):
        self.max_bytes, self._max_files = max_bytes, max_files
        self.used_bytes = self.most_bytes = 0
        self._entries: dict[ChunkKey, Entry] = {}
        self._by_number: dict[int, Entry] = {}
        self._next_number = 0

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, key: ChunkKey) -> Entry | None:
        """Returns a chunk that is there."""
        return self._entries.get(key)

    def make_room(self, num_bytes: int, *, before: int, awaited: bool) -> bool:
        """Drops chunks that are not mapped until so many bytes fit; False: they do not.

        Args:
            num_bytes: what is to fit.
            before: every rank has read the samples before this one.
            awaited: whether a rank waits for it; else nothing is dropped that is still to be used,
                and an eighth of the bytes is left free.
        """
        most = self.max_bytes if awaited else self.max_bytes * 7 // 8
        for entry in list(self._droppable(before, awaited)):
            if self._fits(num_bytes, most):
                break
            self._drop(entry)
        return self._fits(num_bytes, most)

    def put(self, key: ChunkKey, shared: SharedChunk, last_use: int) -> Entry:
        """Takes a chunk, for which there must be room."""
        entry = Entry(self._next_number, key, shared, last_use)
        self._next_number += 1
        self._entries[key] = self._by_number[entry.number] = entry
        self.used_bytes += shared.num_bytes
        self.most_bytes = max(self.most_bytes, self.used_bytes)
        return entry

    def hold(self, entry: Entry, client: int) -> None:
        """Notes that a client maps a chunk."""
        entry.holders[client] = entry.holders.get(client, 0) + 1

    def release(self, number: int, client: int) -> None:
        """Notes that a client no longer maps a chunk; what it does not hold is passed over."""
        entry = self._by_number.get(number)
        if entry is None or client not in entry.holders:
            return
        entry.holders[client] -= 1
        if not entry.holders[client]:
            del entry.holders[client]

    def release_all(self, client: int) -> None:
        """Notes that a client is gone, and all its mappings with it."""
        for entry in self._entries.values():
            entry.holders.pop(client, None)

    def close(self) -> None:
        """Closes all files; what ranks have mapped stays theirs."""
        for entry in list(self._entries.values()):
            self._drop(entry)

    def _fits(self, num_bytes: int, most: int) -> bool:
        return self.used_bytes + num_bytes <= most and len(self._entries) < self._max_files

    def _droppable(self, before: int, awaited: bool) -> Iterator[Entry]:
        free = [entry for entry in self._entries.values() if not entry.holders]
        passed = [entry for entry in free if entry.last_use < before]
        yield from sorted(passed, key=lambda entry: entry.last_use)
        if awaited:
            later = [entry for entry in free if entry.last_use >= before]
            yield from sorted(later, key=lambda entry: -entry.last_use)

    def _drop(self, entry: Entry) -> None:
        del self._entries[entry.key], self._by_number[entry.number]
        self.used_bytes -= entry.shared.num_bytes
        os.close(entry.shared.file)
