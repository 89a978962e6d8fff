"""A node's part of finding out which nodes reach each other (reach.py): it knocks at their doors."""

import socket
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

KNOCK_S = 4.0  # SYNs that are lost are sent again after 1 s and 3 s
_AT_ONCE = 32

Door = tuple[str, int]  # address and port where something of a node listens for the others


def knock(doors: Sequence[Door], *, timeout_s: float = KNOCK_S) -> list[int]:
    """Returns which of the doors nobody opens, by their place in the list."""

    def is_closed(door: Door) -> bool:
        address, port = door
        try:
            socket.create_connection((address, port), timeout=timeout_s).close()
        except OSError:
            return True
        return False

    with ThreadPoolExecutor(min(_AT_ONCE, max(1, len(doors)))) as pool:
        return [place for place, closed in enumerate(pool.map(is_closed, doors)) if closed]
