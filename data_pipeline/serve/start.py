"""Starts the data server of a node, as a child of the node's first rank.

A child of a rank, not of the agent: so it is there under plain torchrun as well, and it never
outlives what it serves. When the first rank ends, however it ends, the pipe to the server's standard
input closes, and the server ends; when the server ends, every rank notices at its next chunk and
reads by itself (`client`). It is not started again before the job's next generation: whatever
killed it once may do so again, and nothing is lost but processor time.

The socket lies in a folder of its own (mode 0700) among the temporary files: run folders may lie on
network file systems, which know no sockets, and their paths may be too long for one. Folder and
socket are removed as soon as all ranks of the node are connected.
"""

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from ..data_config import DataConfig
from ..errors import DataError
from ..manifest import read_manifest
from ..read.corruption import SkipList
from ..read.packing import WINDOW_BATCHES
from .client import ServedChunks
from .protocol import ServerJob

_MAX_PATH_BYTES = 100  # a socket's path may have 107, on macOS 103
_END_S = 2.0
_LEAST_RANKS = 4  # two cost about the same processor time with it and without it
_WINDOWS = 2
# Of a rank: whoever looks for a rank's process by them must not find the server.
_OF_A_RANK = ("RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK")


@dataclass(frozen=True)
class ServerHandle:
    """Says where a data server is; on the rank that started it, it is also its process."""

    address: Path
    process: subprocess.Popen[str] | None = None

    def connect(self, data: DataConfig, *, rank: int, skipped: SkipList) -> ServedChunks:
        """Connects a rank; once, for the server awaits each rank of the node once."""
        return ServedChunks(self.address, data, rank=rank, skipped=skipped)

    def close(self) -> None:
        """Lets the server end, once the node's other ranks have hung up as well."""
        if self.process is None or self.process.stdin is None:
            return
        self.process.stdin.close()
        # where others still read, it ends with them, or with this process
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(_END_S)
        shutil.rmtree(self.address.parent, ignore_errors=True)


def wants_server(data: DataConfig, ranks_here: int) -> bool:
    """Returns whether a node with so many ranks gets a data server.

    With data.server="auto" it does where it has at least four ranks, and the folder is still growing
    or holds more than two windows of the order (16 Mi tokens at the usual sizes): what is smaller
    every rank decodes once, in some ten milliseconds, and keeps.

    Raises:
        ShardError: the folder cannot be read.
    """
    if data.server != "auto":
        return data.server == "on"
    if ranks_here < _LEAST_RANKS:
        return False
    manifest = read_manifest(data.directory)
    tokens = manifest.num_tokens("train")
    return not manifest.complete or tokens > _WINDOWS * WINDOW_BATCHES * manifest.batch_tokens


def start_server(job: ServerJob) -> ServerHandle:
    """Starts a data server as a child of this process.

    Raises:
        DataError: it cannot be started.
    """
    try:
        folder = _private_folder()
        try:
            return _start_in(folder, job)
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise
    except OSError as error:
        raise DataError(
            f"the data server cannot be started ({error}): set data.server='off' to do without it"
        ) from error


def _start_in(folder: Path, job: ServerJob) -> ServerHandle:
    address = folder / "socket"
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(str(address))
        address.chmod(0o600)
        listener.listen(job.ranks_here + 8)
        process = subprocess.Popen(
            [sys.executable, "-m", __name__.rpartition(".")[0]],
            stdin=subprocess.PIPE,
            text=True,
            pass_fds=(listener.fileno(),),
            env={name: value for name, value in os.environ.items() if name not in _OF_A_RANK},
            start_new_session=True,  # Ctrl-C is for the command line
        )
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has ended, which the ranks will notice
            process.stdin.write(f"{listener.fileno()} {os.getpid()} {job.model_dump_json()}\n")
            process.stdin.flush()
    return ServerHandle(address, process)


def _private_folder() -> Path:
    """Creates a folder for a socket, of mode 0700."""
    for place in (tempfile.gettempdir(), "/tmp"):
        folder = Path(tempfile.mkdtemp(prefix="moebius-data-", dir=place))
        if len(os.fsencode(folder / "socket")) <= _MAX_PATH_BYTES:
            return folder
        folder.rmdir()
    raise OSError(f"the path of {tempfile.gettempdir()} is too long for a socket")
