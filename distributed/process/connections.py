"""Breaks off the collectives of a process from another thread, also those that wait for ranks that
live.

A rank that dies takes its own connections along: who waits for it hears at once. Who waits for a
living rank in a group without the dead one hears nothing, for that rank never comes: it has left
its step. Gloo's `abort` and `shutdown` leave such a wait alone (torch 2.13). What ends it is what a
dead peer does: a closed connection. So the TCP connections that appear while a group is made are
noted here, and `break_off` shuts them down; every collective on them, pending or to come, raises.

The files of a process are read from /proc, so elsewhere than on Linux nothing is noted. Cost: 0.1 ms
for each group that is made.
"""

import contextlib
import os
import socket
import sys
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

_OPEN_FILES = Path("/proc/self/fd")
_noted: set[tuple[int, str]] = set()  # number and identity: numbers are given out again


class Breakable(Protocol):
    """What ranks wait for each other in without a connection: shared memory."""

    def break_off(self) -> None:
        """Lets whoever waits, now or later, raise. From any thread."""
        ...


_waited_in: "weakref.WeakSet[Breakable]" = weakref.WeakSet()


def note_wait(place: Breakable) -> None:
    """Notes what `break_off` has to break as well, as long as it exists."""
    _waited_in.add(place)


@contextlib.contextmanager
def noting_connections() -> Iterator[None]:
    """Notes which connections are there after the block and were not before.

    A connection that another thread opens meanwhile is taken for one of the groups'.
    """
    before = _sockets()
    yield
    _noted.update(_sockets() - before)


def break_off() -> int:
    """Shuts down all connections that were noted; returns how many were open.

    From any thread; the groups can only be left after it.
    """
    open_now = _sockets()
    broken = sum(_shut_down(number) for number, identity in _noted & open_now)
    _noted.clear()
    for place in list(_waited_in):
        place.break_off()
    return broken


def forget_connections() -> None:
    """Forgets what was noted: the groups are left."""
    _noted.clear()
    _waited_in.clear()


def _sockets() -> set[tuple[int, str]]:
    """Returns the sockets of this process: the number of each, and what tells it from later ones."""
    if sys.platform != "linux":
        return set()
    found = set()
    for entry in _OPEN_FILES.iterdir():
        with contextlib.suppress(OSError):  # closed meanwhile
            if (identity := str(entry.readlink())).startswith("socket:"):
                found.add((int(entry.name), identity))
    return found


def _shut_down(number: int) -> bool:
    """Shuts a TCP connection down for both sides; returns whether it was one."""
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(number)) as connection:
        if connection.family in (socket.AF_INET, socket.AF_INET6):
            connection.getpeername()  # one that listens has none
            connection.shutdown(socket.SHUT_RDWR)
            return True
    return False
