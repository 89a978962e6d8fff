"""The rendezvous store's server, on one address alone.

torch's own TCPStore listens on all interfaces and answers anybody: whoever reaches it may read and
write what the ranks of a job tell each other while they start. Here its socket is bound before the
store gets it, so it is there on the loopback or on one interface, and nowhere else.
"""

import ipaddress
import socket
from datetime import timedelta

from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

LOOPBACK = "127.0.0.1"


def is_loopback(address: str) -> bool:
    """Whether an address is reachable from its own machine alone; False for a name."""
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False


def loopback_interface() -> str | None:
    """Returns the name of the loopback's interface, "lo" or "lo0"; None where there is none."""
    names = {name for _, name in socket.if_nameindex()}
    return next((name for name in ("lo", "lo0") if name in names), None)


def bind(host: str, port: int = 0) -> socket.socket:
    """Returns a TCP socket that is bound to one address of this machine, and does not listen yet.

    Args:
        host: an address or a name of this machine.
        port: 0 takes any that is free.

    Raises:
        OSError: the address is not this machine's, or the port is taken.
    """
    family, kind, _, _, address = socket.getaddrinfo(
        host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    bound = socket.socket(family, kind)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
    except OSError:
        bound.close()
        raise
    return bound


def serve_store(
    bound: socket.socket,
    *,
    timeout_s: float,
    num_clients: int | None = None,
    wait_for_clients: bool = False,
) -> TCPStore:
    """Returns a store whose server listens on `bound`, which is the store's own from now on.

    Args:
        timeout_s: of every wait in this store.
        num_clients: the server included; with `wait_for_clients` returns when so many have come.
    """
    host, port = bound.getsockname()[:2]
    return TCPStore(
        host,
        port,
        num_clients,
        is_master=True,
        timeout=timedelta(seconds=timeout_s),
        wait_for_workers=wait_for_clients,
        master_listen_fd=bound.detach(),
    )
