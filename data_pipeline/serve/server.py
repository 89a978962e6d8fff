"""The data server of one node: reads ahead in the order of the run, and hands out decoded chunks.

1. One thread reads: a chunk that a rank waits for first, else the next one that the run's order
   will want, as far as the account of bytes allows (`cache`). CRCs are checked and the policy for
   damage is followed exactly as a rank would (`corruption`): what is lost is told to the ranks,
   which decide and write down for themselves.
2. One thread per rank answers it, and every half second says what it is waiting for.
3. The main thread admits ranks, and watches over the parent. When the parent has ended or the last
   rank has hung up, the process ends; its memory goes with it.

Costs one process of about 100 MiB besides the chunks, and 0.5 s of processor time to start.
"""

import logging
import os
import select
import shutil
import socket
import struct
import sys
import threading
import time
import traceback
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path

from ..errors import DataError, ShardError
from ..read.corruption import SkipList, open_fetcher
from ..read.samples import OrderedSamples
from .cache import ChunkCache, ChunkKey, Entry
from .protocol import (
    VERSION,
    Failed,
    Hello,
    LostBatch,
    NoRoom,
    Progress,
    ProtocolError,
    Refused,
    Request,
    ServerJob,
    Waiting,
    Want,
    cut,
    receive_request,
    send,
)
from .read_ahead import ReadAhead
from .shared_memory import SharedChunk, write_chunk

logger = logging.getLogger(__name__)

SAY_EVERY_S = 0.5
"""How often a rank that waits is told what for."""

_SEND_S = 30  # a rank that takes no message for so long is given up
_HELLO_S = 10.0  # so long may take who has connected to say who it is
_POLL_S = 0.5  # how often a folder that grows is looked at, and the parent
_STRANGERS = 8  # connections that may be open beside those of the ranks


class _Demand:
    """Is what ranks wait for: one chunk, and its outcome once it is known."""

    def __init__(self) -> None:
        self.clients: set[int] = set()
        self.outcome: Entry | NoRoom | Failed | None = None


class DataServer:
    """Serves the ranks of one node through connections to a listening socket.

    Args:
        job: whom it serves what.
        listener: a listening Unix socket.
        folder: the socket's folder, removed once all ranks are connected or the server ends.
    """

    def __init__(self, job: ServerJob, listener: socket.socket, folder: Path):
        self._job, self._listener, self._folder = job, listener, folder
        self._skipped = SkipList(most_batches=sys.maxsize)  # each rank counts for itself
        self._fetch = open_fetcher(job.data, self._skipped)
        self._samples = OrderedSamples(job.data, self._fetch)
        self._ahead = ReadAhead(self._samples, job)
        self._changed = threading.Condition()  # guards all that follows
        self.cache = ChunkCache(job.data.server_bytes)
        self._demands: OrderedDict[ChunkKey, _Demand] = OrderedDict()
        ranks = range(job.first_rank, job.first_rank + job.ranks_here)
        self._positions = dict.fromkeys(ranks, job.start_sample)
        self._connected: set[int] = set()  # ranks that ever were
        self._clients: dict[int, socket.socket] = {}
        self._num_clients = 0
        self.decoded = self.served = self.no_room = 0  # chunks, since the start
        self._doing = ""
        self._closing = False

    def serve(self, parent: "Parent | None" = None) -> None:
        """Serves until the last rank has hung up, the parent has ended, or `stop` is called."""
        reader = threading.Thread(target=self._read, name="data-server-reader", daemon=True)
        reader.start()
        try:
            self._admit_ranks(parent)
        finally:
            self.stop()
            self._remove_socket()
            reader.join(timeout=_POLL_S)
            if not reader.is_alive():
                self._samples.close()
            with self._changed:
                self.cache.close()

    def stop(self) -> None:
        """Ends the server; ranks see that it hangs up."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
            clients = list(self._clients.values())
        for connection in clients:
            _hang_up(connection)

    # Ranks come and go ----------------------------------------------------------------------------

    def _admit_ranks(self, parent: "Parent | None") -> None:
        watched: list[int] = [self._listener.fileno()]
        if parent is not None:
            watched.append(parent.lifeline)
        let_go = False
        while not self._is_done(let_go):
            for ready in select.select(watched, [], [], _POLL_S)[0]:
                if parent is not None and ready == parent.lifeline:
                    let_go = True  # the parent has closed its loader, or has ended
                    watched.remove(ready)
                else:
                    self._admit(self._listener.accept()[0])
            if parent is not None and os.getppid() != parent.pid:
                return
            if self._all_came() and self._listener.fileno() in watched:
                watched.remove(self._listener.fileno())
                self._remove_socket()

    def _all_came(self) -> bool:
        with self._changed:
            return len(self._connected) == self._job.ranks_here

    def _is_done(self, let_go: bool) -> bool:
        with self._changed:
            return self._closing or (not self._clients and (let_go or self._all_came()))

    def _remove_socket(self) -> None:
        self._listener.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _admit(self, connection: socket.socket) -> None:
        with self._changed:
            if len(self._clients) >= self._job.ranks_here + _STRANGERS:
                connection.close()
                return
            client = self._num_clients
            self._num_clients += 1
            self._clients[client] = connection
        name = f"data-server-{client}"
        threading.Thread(target=self._answer, args=(client,), name=name, daemon=True).start()

    def _answer(self, client: int) -> None:
        """Runs in a thread per connection: answers it until it hangs up."""
        connection, rank = self._clients[client], None
        try:
            rank = self._meet(connection)
            while (request := receive_request(connection)) is not None:
                self._handle(request, client, rank)
        except ProtocolError as error:
            logger.warning("data server: rank %s is cut off: %s", rank, error)
        except OSError as error:
            logger.debug("data server: rank %s: %s", rank, error)
        finally:
            with self._changed:
                self.cache.release_all(client)
                del self._clients[client]
                if rank is not None:  # who is gone holds nobody up
                    del self._positions[rank]
                self._changed.notify_all()
            connection.close()

    def _meet(self, connection: socket.socket) -> int:
        """Returns which rank it is."""
        connection.settimeout(_HELLO_S)
        hello = receive_request(connection)
        if not isinstance(hello, Hello):
            raise ProtocolError("it does not say who it is")
        with self._changed:
            refusal = self._why_refused(hello)
            if not refusal:
                self._connected.add(hello.rank)
        if refusal:
            send(connection, Refused(reason=refusal))
            raise ProtocolError(refusal)
        connection.settimeout(None)
        limit = struct.pack("ll", _SEND_S, 0)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
        return hello.rank

    def _why_refused(self, hello: Hello) -> str:
        if hello.version != VERSION:
            return f"it speaks version {hello.version} of the protocol, the server {VERSION}"
        if hello.data != self._job.data_sha256:
            return "it is configured for other data than the server"
        if hello.rank not in self._positions or hello.rank in self._connected:
            return f"rank {hello.rank} is not awaited"
        return ""

    def _handle(self, request: Request, client: int, rank: int) -> None:
        if isinstance(request, Hello):
            raise ProtocolError("it says who it is twice")
        with self._changed:
            for number in request.released:
                self.cache.release(number, client)
            if isinstance(request, Progress):
                self._positions[rank] = request.sample
            self._changed.notify_all()
        if isinstance(request, Want):
            self._give(client, (request.source, request.segment, request.chunk))

    def _give(self, client: int, key: ChunkKey) -> None:
        """Sends a chunk, or why there is none; until then again and again why not yet."""
        connection, demand = self._clients[client], self._demand(client, key)
        while (outcome := self._wait_for(demand)) is None:
            send(connection, Waiting(reason=cut(self._reason())))
        if isinstance(outcome, Entry):
            send(connection, outcome.shared.as_message(outcome.number), [outcome.shared.file])
        else:
            send(connection, outcome)

    def _demand(self, client: int, key: ChunkKey) -> _Demand:
        """Returns what becomes of a client's wish; a chunk that is there is held for it."""
        with self._changed:
            entry = self.cache.get(key)
            if entry is None:
                demand = self._demands.setdefault(key, _Demand())
                demand.clients.add(client)
                self._changed.notify_all()
            else:
                demand = _Demand()
                demand.outcome = entry
                self.cache.hold(entry, client)
                self.served += 1
            return demand

    def _wait_for(self, demand: _Demand) -> Entry | NoRoom | Failed | None:
        """Waits a while for an outcome; None: there is none yet."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._closing or demand.outcome is not None, timeout=SAY_EVERY_S
            )
            if self._closing:
                raise ConnectionAbortedError("the data server ends")
            return demand.outcome

    def _reason(self) -> str:
        return f"the data server is {self._fetch.doing or self._doing or 'about to read'}"

    # Reading --------------------------------------------------------------------------------------

    def _read(self) -> None:
        """Runs in the thread that reads: what is awaited first, then ahead, until closed."""
        try:
            while not self._closing:
                with self._changed:
                    key = next(iter(self._demands), None)
                if key is not None:
                    self._settle(key)
                elif not self._read_ahead():
                    with self._changed:
                        self._changed.wait(timeout=_POLL_S)
        except BaseException:  # noqa: BLE001 (ranks must not wait for a server that cannot read)
            if not self._closing:
                logger.error("data server: it ends: %s", traceback.format_exc())
            self.stop()

    def _settle(self, key: ChunkKey) -> None:
        """Reads what is awaited, and tells everybody who waits for it."""
        outcome = self._read_awaited(key)
        with self._changed:
            demand = self._demands.pop(key)
            if isinstance(outcome, SharedChunk):
                outcome = self.cache.put(key, outcome, self._ahead.position)
                self.decoded += 1
            if isinstance(outcome, Entry):
                for client in demand.clients & self._clients.keys():
                    self.cache.hold(outcome, client)
                    self.served += 1
            if isinstance(outcome, NoRoom):
                self.no_room += len(demand.clients)
            demand.outcome = outcome
            self._changed.notify_all()

    def _read_awaited(self, key: ChunkKey) -> SharedChunk | Entry | NoRoom | Failed:
        with self._changed:
            if (entry := self.cache.get(key)) is not None:  # read ahead meanwhile
                return entry
        try:
            most = self._ahead.most_bytes(key)
            if not self._make_room(most, awaited=True):
                return NoRoom(reason=self._why_no_room(most))
            return self._decode(key)
        except DataError as error:
            kind = "ShardError" if isinstance(error, ShardError) else "DataError"
            return Failed(error=kind, message=cut(str(error)))
        except OSError as error:
            return NoRoom(reason=cut(f"there is no memory for the chunk ({error.strerror})"))

    def _why_no_room(self, most: int) -> str:
        with self._changed:
            return (
                f"a chunk of {most} bytes does not fit beside the {self.cache.used_bytes} bytes that "
                f"are in use, of data.server_bytes={self.cache.max_bytes}"
            )

    def _read_ahead(self) -> bool:
        """Reads one more chunk of those to come; False: none is known, or there is no room."""
        key = self._ahead.next(self._position(), self._touch)
        if key is None:
            return False
        try:
            if not self._make_room(self._ahead.most_bytes(key), awaited=False):
                return False
            shared = self._decode(key)
        except (DataError, OSError) as error:  # who needs it will ask, and is told
            logger.debug("data server: reading ahead: %s", error)
            self._ahead.drop(key)
            return True
        with self._changed:
            self.cache.put(key, shared, self._ahead.position)
            self.decoded += 1
        self._ahead.drop(key)
        return True

    def _decode(self, key: ChunkKey) -> SharedChunk:
        source, segment, number = key
        self._doing = f"reading chunk {number} of segment {segment} of source {source!r}"
        try:
            chunk = self._samples.prepared.read_chunk(*key)
            lost = [
                LostBatch(batch=one, error=cut(self._skipped.batches[source, segment, one].error))
                for one in chunk.lost_batches
            ]
            return write_chunk(chunk, lost)
        finally:
            self._doing = ""

    def _make_room(self, num_bytes: int, *, awaited: bool) -> bool:
        with self._changed:
            return self.cache.make_room(num_bytes, before=self._first_position(), awaited=awaited)

    def _position(self) -> int:
        with self._changed:
            return self._first_position()

    def _first_position(self) -> int:
        """Returns the sample that the slowest rank has reached."""
        return min(self._positions.values(), default=self._job.start_sample)

    def _touch(self, key: ChunkKey, sample: int) -> bool:
        """Notes that a chunk will be used at a sample; False: it is not there."""
        with self._changed:
            entry = self.cache.get(key)
            if entry is not None:
                entry.last_use = max(entry.last_use, sample)
            return entry is not None


def _hang_up(connection: socket.socket) -> None:
    try:
        connection.shutdown(socket.SHUT_RDWR)
    except OSError:
        logger.debug("data server: a connection was closed already")


@dataclass(frozen=True)
class Parent:
    """Is who started the server."""

    pid: int
    lifeline: int  # a pipe whose other end the parent holds


def main() -> None:
    """Runs the server that `start.start_server` started: its job comes through standard input."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    listener_file, parent_pid, job = sys.stdin.readline().split(" ", 2)
    listener = socket.socket(fileno=int(listener_file))
    folder = Path(listener.getsockname()).parent
    try:
        server = DataServer(ServerJob.model_validate_json(job), listener, folder)
    except DataError as error:  # the ranks find it as well, and end the run with it
        logger.error("data server: %s", error)
        shutil.rmtree(folder, ignore_errors=True)
        sys.exit(1)
    server.serve(Parent(int(parent_pid), sys.stdin.fileno()))
    logger.info(
        "data server: %d chunks decoded, handed out %d times, %d times no room; "
        "at most %.1f of %.1f MiB in use; %.1f s of processor time",
        server.decoded,
        server.served,
        server.no_room,
        server.cache.most_bytes / 2**20,
        server.cache.max_bytes / 2**20,
        time.process_time(),
    )
    sys.stderr.flush()
    os._exit(0)  # threads that are stuck in a read are left behind
