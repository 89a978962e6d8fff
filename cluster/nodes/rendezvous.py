"""Provides the store at which one generation's agents and ranks meet, closed to everyone else.

A TCPStore has no authentication, so its server always listens on the loopback only. If all nodes are on this
machine, agents and ranks connect to it directly. Otherwise:

    ranks, agent ── loopback ── StoreRelay ══ cluster ══ StoreGate ── loopback ── TCPStore
    of another node                          authenticated                      on node 0

The gate listens on node 0's address in the cluster. Both sides first prove that they know the generation's
secret (HMAC-SHA256 over fresh random numbers of both sides, all of fixed size); a peer that cannot is
disconnected before it reaches the store. Afterwards every frame carries a number and a tag under a key of
this connection and direction, so frames cannot be inserted, dropped, repeated or changed. Nothing is
encrypted. The supervisor draws a secret per generation and sends it to the agents through Ray's authenticated
calls; ranks never have it.

Cost, both ends on one busy machine with 2 cores: 0.1-0.2 ms more per operation of another node's ranks, and
about 15 MB/s for large values; nothing per training step.
"""

import asyncio
import contextlib
import hmac
import logging
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from torch.distributed import PrefixStore, TCPStore  # pyright: ignore[reportPrivateImportUsage]
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousStoreInfo,
)

from ...distributed.process.store import LOOPBACK, bind, is_loopback, serve_store

logger = logging.getLogger(__name__)

HANDSHAKE_S = 5.0  # for a peer to prove itself
MAX_STRANGERS = 256  # unproven connections at a time; more wait in line
MAX_FRAME_BYTES = 64 << 10
_RETRY_S = 0.2  # between two attempts to reach a gate that is not up yet
_NONCE_BYTES = _TAG_BYTES = 32
_LENGTH = struct.Struct(">I")


class NotAuthentic(ConnectionError):
    """Says that the other side does not know the secret, or that a frame was changed."""


@dataclass(frozen=True)
class Meeting:
    """Describes where one generation's agents meet, as one node sees it."""

    name: str  # of the job and generation; prefixes the agents' keys
    node_rank: int
    num_nodes: int
    address: str  # of node 0, for the other nodes
    port: int
    secret: str  # needed with several machines
    timeout_s: float

    @property
    def is_on_one_machine(self) -> bool:
        """Returns whether no other machine needs to reach the store."""
        return self.num_nodes == 1 or is_loopback(self.address)


class NodeRendezvous(RendezvousHandler):
    """Gives torchrun's agent its rank and the store."""

    def __init__(self, meeting: Meeting) -> None:
        self._meeting = meeting
        self._store: TCPStore | None = None
        self._front: StoreGate | StoreRelay | None = None

    @property
    def use_agent_store(self) -> bool:
        """Tells ranks to connect to the agents' store as clients."""
        return True

    def get_backend(self) -> str:
        """Returns a name for torch's logs."""
        return "moebius"

    def get_run_id(self) -> str:
        """Returns the name of this generation."""
        return self._meeting.name

    def next_rendezvous(self) -> RendezvousInfo:
        """Returns the store once all agents have arrived.

        Raises:
            ConnectionError: node 0 does not answer, or does not know the secret.
            OSError: the port is taken.
        """
        meeting = self._meeting
        if self._store is None:
            self._store = self._serve() if meeting.node_rank == 0 else self._join()
        return RendezvousInfo(
            PrefixStore(meeting.name, self._store),
            meeting.node_rank,
            meeting.num_nodes,
            RendezvousStoreInfo(self._store.host, self._store.port),
        )

    def is_closed(self) -> bool:
        """Returns False: a generation has exactly one rendezvous."""
        return False

    def set_closed(self) -> None:
        """Does nothing: the supervisor ends generations."""

    def num_nodes_waiting(self) -> int:
        """Returns 0: the nodes are fixed, and none join later."""
        return 0

    def shutdown(self) -> bool:
        """Closes this node's gate or relay."""
        if self._front is not None:
            self._front.close()
        return True

    def _serve(self) -> TCPStore:
        meeting = self._meeting
        if meeting.is_on_one_machine:
            host = meeting.address if is_loopback(meeting.address) else LOOPBACK
            bound = bind(host, meeting.port)
        else:
            bound = bind(LOOPBACK)
            store_port = bound.getsockname()[1]
            self._front = StoreGate(
                bind(meeting.address, meeting.port), store_port=store_port, secret=meeting.secret
            )
        return serve_store(
            bound, timeout_s=meeting.timeout_s, num_clients=meeting.num_nodes, wait_for_clients=True
        )

    def _join(self) -> TCPStore:
        meeting = self._meeting
        host, port = meeting.address, meeting.port
        if not meeting.is_on_one_machine:
            relay = StoreRelay(host, port, secret=meeting.secret)
            self._front = relay
            relay.await_gate(timeout_s=meeting.timeout_s)
            host, port = LOOPBACK, relay.port
        return TCPStore(host, port, meeting.num_nodes, timeout=timedelta(seconds=meeting.timeout_s))


class StoreGate:
    """Connects peers that prove to know the secret to the store on the loopback."""

    def __init__(self, bound: socket.socket, *, store_port: int, secret: str) -> None:
        """Starts to listen.

        Args:
            bound: the socket at this machine's address in the cluster.
            store_port: of the store on this machine's loopback.
        """
        self._store_port, self._secret = store_port, _key(secret)
        self._loop = _Loop("store-gate")
        self._strangers = asyncio.Semaphore(MAX_STRANGERS)
        self._loop.serve(bound, self._admit)

    def close(self) -> None:
        """Stops listening and closes every connection; a second call does nothing."""
        self._loop.stop()

    async def _admit(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        async with self._strangers:
            try:
                keys = await _prove(reader, writer, self._secret, is_gate=True)
            except (OSError, EOFError) as error:
                peer = writer.get_extra_info("peername")
                logger.warning("refused a connection from %s to the store: %r", peer, error)
                return
        store = await asyncio.open_connection(LOOPBACK, self._store_port)
        await _join_streams((reader, writer), store, keys)


class StoreRelay:
    """Stands in for the store on another node's loopback, and forwards to the gate."""

    def __init__(self, address: str, port: int, *, secret: str) -> None:
        """Starts to listen on `self.port`.

        Args:
            address: of the gate.
            port: of the gate.
        """
        self._gate, self._secret = (address, port), _key(secret)
        bound = bind(LOOPBACK)
        self.port: int = bound.getsockname()[1]
        self._loop = _Loop("store-relay")
        self._loop.serve(bound, self._forward)

    def close(self) -> None:
        """Stops listening and closes every connection; a second call does nothing."""
        self._loop.stop()

    def await_gate(self, *, timeout_s: float) -> None:
        """Returns once the gate, which may not be up yet, has proved itself.

        Raises:
            NotAuthentic: the peer does not know the secret.
            ConnectionError: no peer answers within `timeout_s`.
        """
        deadline = time.monotonic() + timeout_s
        host, port = self._gate
        while True:
            try:
                return self._loop.run(self._try_gate())
            except NotAuthentic:
                raise
            except (OSError, EOFError) as error:
                if time.monotonic() > deadline:
                    raise ConnectionError(
                        f"node 0 did not open its store at {host}:{port} within {timeout_s:g} s "
                        f"({error!r})"
                    ) from None
                time.sleep(_RETRY_S)

    async def _try_gate(self) -> None:
        _, writer, _ = await self._connect()
        writer.close()

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter, "_Keys"]:
        reader, writer = await asyncio.open_connection(*self._gate)
        try:
            return reader, writer, await _prove(reader, writer, self._secret, is_gate=False)
        except BaseException:
            writer.close()
            raise

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        gate_reader, gate_writer, keys = await self._connect()
        await _join_streams((gate_reader, gate_writer), (reader, writer), keys)


# Proof and frames ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Keys:
    """Keys of one connection, one per direction, as one side uses them."""

    to_send: bytes
    to_receive: bytes


async def _prove(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, secret: bytes, *, is_gate: bool
) -> _Keys:
    """Proves the secret on both sides; the gate proves itself last, after checking its peer.

    Raises:
        NotAuthentic: the other side does not know the secret.
        TimeoutError: it did not prove itself within HANDSHAKE_S.
    """
    own = secrets.token_bytes(_NONCE_BYTES)
    async with asyncio.timeout(HANDSHAKE_S):
        writer.write(own)
        other = await reader.readexactly(_NONCE_BYTES)
        nonces = own + other if is_gate else other + own
        proof = {side: _tag(secret, b"proof of the " + side, nonces) for side in (b"gate", b"node")}
        if not is_gate:
            writer.write(proof[b"node"])
        said = await reader.readexactly(_TAG_BYTES)
        if not hmac.compare_digest(said, proof[b"node" if is_gate else b"gate"]):
            raise NotAuthentic("the other side does not know this generation's secret")
        if is_gate:
            writer.write(proof[b"gate"])
    from_gate, from_node = (
        _tag(secret, b"key from the " + side, nonces) for side in (b"gate", b"node")
    )
    return _Keys(from_gate, from_node) if is_gate else _Keys(from_node, from_gate)


Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


async def _join_streams(framed: Streams, plain: Streams, keys: _Keys) -> None:
    """Copies bytes both ways between a framed and a plain connection until one of them ends."""
    outward = asyncio.ensure_future(_seal(plain[0], framed[1], keys.to_send))
    inward = asyncio.ensure_future(_unseal(framed[0], plain[1], keys.to_receive))
    try:
        await asyncio.wait((outward, inward), return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in (outward, inward):
            task.cancel()
        for ended in await asyncio.gather(outward, inward, return_exceptions=True):
            if isinstance(ended, NotAuthentic):
                logger.error("a connection to the store was cut: %s", ended)
        for writer in (framed[1], plain[1]):
            writer.close()


async def _seal(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, key: bytes) -> None:
    number = 0
    while data := await reader.read(MAX_FRAME_BYTES):
        writer.write(_LENGTH.pack(len(data)) + _frame_tag(key, number, data) + data)
        await writer.drain()
        number += 1


async def _unseal(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, key: bytes) -> None:
    number = 0
    while True:
        (length,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
        if length > MAX_FRAME_BYTES:
            raise NotAuthentic(f"the other side announced a frame of {length} bytes")
        tag = await reader.readexactly(_TAG_BYTES)
        data = await reader.readexactly(length)
        if not hmac.compare_digest(tag, _frame_tag(key, number, data)):
            raise NotAuthentic("a frame was modified in transit")
        writer.write(data)
        await writer.drain()
        number += 1


def _frame_tag(key: bytes, number: int, data: bytes) -> bytes:
    return _tag(key, struct.pack(">QI", number, len(data)), data)


def _tag(key: bytes, *parts: bytes) -> bytes:
    return hmac.digest(key, b"".join(parts), "sha256")


def _key(secret: str) -> bytes:
    if len(secret) < 2 * _NONCE_BYTES:
        raise ValueError(
            f"the secret of a generation has {len(secret)} characters; "
            f"a job on several machines needs {2 * _NONCE_BYTES} random ones"
        )
    return secret.encode()


class _Loop:
    """Runs an event loop in its own thread, because torch's store blocks the calling thread."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._thread.start()
        self._server: asyncio.Server | None = None

    def run(self, act: Coroutine[Any, Any, None]) -> None:
        """Runs `act` in the loop and returns when it is done."""
        asyncio.run_coroutine_threadsafe(act, self._loop).result()

    def serve(
        self,
        bound: socket.socket,
        handle: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Coroutine[Any, Any, None]],
    ) -> None:
        """Listens on `bound`; a failed connection is closed, and the others continue."""

        async def handle_and_close(
            reader: asyncio.StreamReader, writer: asyncio.StreamWriter
        ) -> None:
            with contextlib.closing(writer):
                try:
                    await handle(reader, writer)
                except (OSError, EOFError) as error:
                    logger.warning("a connection to the store ended: %r", error)

        async def start() -> None:
            self._server = await asyncio.start_server(handle_and_close, sock=bound)

        self.run(start())

    def stop(self) -> None:
        """Ends the loop with all its connections; a second call does nothing."""
        if self._loop.is_closed():
            return
        self.run(self._end_all())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _end_all(self) -> None:
        if self._server is not None:
            self._server.close()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
