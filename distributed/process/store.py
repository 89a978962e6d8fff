"""Serves the rendezvous store on a single address.

torch's own TCPStore listens on all interfaces and lets anyone who reaches it read and write the keys
of a job. Here the store receives a socket that is already bound to the loopback or to one interface.
"""

import ipaddress
import socket
from datetime import timedelta

from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

LOOPBACK = "127.0.0.1"


def is_loopback(address: str) -> bool:
    """Returns whether an address is a loopback address; False for a name."""
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False


def loopback_interface() -> str | None:
    """Returns the name of the loopback interface, "lo" or "lo0", or None."""
    names = {name for _, name in socket.if_nameindex()}
    return next((name for name in ("lo", "lo0") if name in names), None)


def bind(host: str, port: int = 0) -> socket.socket:
    """Returns a TCP socket bound to one address of this machine, not yet listening.

    Args:
        host: an address or name of this machine.
        port: 0 selects a free one.

    Raises:
        OSError: the address is not this machine's, or the port is in use.
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
    """Returns a store whose server listens on `bound` and takes ownership of it.

    Args:
        bound: a socket from `bind`.
        timeout_s: timeout of every wait in this store.
        num_clients: expected clients, the server included.
        wait_for_clients: return only when all clients have connected.
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
