"""What is no message, or not the one that may come now, ends its connection and nothing else."""

import contextlib
import io
import json
import os
import socket
import stat
import struct
from pathlib import Path

import numpy as np
import pytest
from made_folder import MadeFolder, documents
from served_ranks import close, job_of, open_ranks, read, seen, serving, take

from moebius.data_pipeline.serve import protocol
from moebius.data_pipeline.serve import server as server_module
from moebius.data_pipeline.serve.protocol import (
    Hello,
    Here,
    Part,
    ProtocolError,
    Refused,
    Waiting,
    config_sha256,
    receive_reply,
    receive_request,
    send,
)
from moebius.data_pipeline.serve.shared_memory import map_chunk


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> MadeFolder:
    folder = MadeFolder(tmp_path_factory.mktemp("made"))
    return folder.seal("text", documents(0, 40)).complete()


@pytest.fixture
def ends():
    """A pair of connected sockets."""
    one, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    with one, other:
        other.settimeout(20)
        yield one, other


def framed(text: bytes) -> bytes:
    return struct.pack("<I", len(text)) + text


HOSTILE = {
    "an endless length": struct.pack("<I", 2**32 - 1) + b"x" * 100,
    "a length of nothing": struct.pack("<I", 0),
    "no JSON": framed(b"\x80\x04\x95garbage"),
    "not an object": framed(b"[1, 2]"),
    "another kind": framed(b'{"kind": "eval"}'),
    "more than belongs there": framed(b'{"kind": "progress", "sample": 8, "more": 1}'),
    "a path for a source": framed(
        b'{"kind": "want", "source": "../x", "segment": 0, "chunk": 0, "released": []}'
    ),
    "a negative segment": framed(
        b'{"kind": "want", "source": "text", "segment": -1, "chunk": 0, "released": []}'
    ),
    "a number as text": framed(b'{"kind": "progress", "sample": "8", "released": []}'),
    "too many numbers": framed(
        json.dumps({"kind": "progress", "sample": 8, "released": [1] * 501}).encode()
    ),
}


@pytest.mark.parametrize("what", HOSTILE)
def test_what_is_no_request_is_refused_before_memory_is_taken(ends, what):
    ends[0].sendall(HOSTILE[what])
    with pytest.raises(ProtocolError):
        receive_request(ends[1])


@pytest.mark.parametrize("cut", [0, 3, 7])
def test_who_hangs_up_in_the_middle_has_hung_up(ends, cut):
    ends[0].sendall(framed(b'{"kind": "progress", "sample": 8}')[:cut])
    ends[0].close()
    assert receive_request(ends[1]) is None


def test_a_reply_with_a_file_that_does_not_belong_there_is_refused_and_the_file_closed(ends):
    send(ends[0], Waiting(reason="no hurry"), [ends[0].fileno()])
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(ProtocolError, match="a message 'waiting' with 1 files"):
        receive_reply(ends[1])
    assert len(os.listdir("/proc/self/fd")) == before


def _part(name: str, dtype: str, offset: int, count: int) -> Part:
    return Part.model_validate({"name": name, "dtype": dtype, "offset": offset, "count": count})


# Two rows of five tokens: one of two pieces, and one that shares a token with it.
ARRAYS = {
    0: np.arange(9, dtype=np.uint16),
    64: np.array([0, 3, 4]),
    128: np.array([3, 2, 5]),
    192: np.array([0, 2, 3]),
}
PARTS = {
    "tokens": _part("tokens", "uint16", 0, 9),
    "starts": _part("starts", "int64", 64, 3),
    "lengths": _part("lengths", "int64", 128, 3),
    "row_starts": _part("row_starts", "int64", 192, 3),
}
HERE = Here(number=0, num_bytes=256, width=5, parts=tuple(PARTS.values()))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_bytes": 64}, "a file of 256 bytes, not 64"),
        ({"num_bytes": 0}, "a file of 256 bytes, not 0"),
        ({"width": 4}, "rows of 4 that are no pieces of 9 tokens"),
        (
            {"parts": [_part("damaged", "bool", 0, 9)]},
            "without lengths, row_starts, starts, tokens",
        ),
        ({"tokens": _part("tokens", "uint16", 0, 8)}, "rows of 5 that are no pieces of 8 tokens"),
        ({"tokens": _part("tokens", "uint16", 192, 33)}, "cannot be"),
        ({"tokens": _part("tokens", "uint16", 1, 9)}, "cannot be"),
        ({"tokens": _part("tokens", "bool", 0, 9)}, "cannot be"),
        ({"starts": _part("starts", "int64", 192, 4)}, "no pieces"),  # one more than lengths
        ({"starts": _part("starts", "int64", 128, 3)}, "no pieces"),  # behind the last token
        ({"lengths": _part("lengths", "int64", 64, 3)}, "no pieces"),  # one of no token
        ({"row_starts": _part("row_starts", "int64", 64, 3)}, "no pieces"),  # 0, 3, 4
        ({"row_starts": _part("row_starts", "int64", 192, 1)}, "no pieces"),  # no row
        ({"counts": _part("counts", "bool", 64, 8)}, "8 counts, not 9"),
        ({"damaged": _part("damaged", "bool", 64, 3)}, "3 damaged, not 2"),
        ({"continued": _part("continued", "bool", 64, 4)}, "4 continued, not 3"),
    ],
)
def test_a_chunk_that_cannot_be_is_not_mapped(tmp_path, change, message):
    path = tmp_path / "file"
    content = bytearray(256)
    for offset, array in ARRAYS.items():
        content[offset : offset + array.nbytes] = array.tobytes()
    path.write_bytes(content)
    parts = {name: value for name, value in change.items() if isinstance(value, Part)}
    if parts:
        change = {"parts": tuple((PARTS | parts).values())}
    with open(path, "rb") as file:
        chunk, _ = map_chunk(HERE, file.fileno())
        assert chunk.pieces.num_rows == 2
        assert chunk.flat_tokens.tolist() == list(range(9))
        with pytest.raises(ProtocolError, match=message):
            map_chunk(HERE.model_copy(update=change), file.fileno())


def test_strangers_and_rubbish_disturb_nobody(made, monkeypatch):
    monkeypatch.setattr(server_module, "_HELLO_S", 0.2)
    data = made.config()
    expected = read(data, 2, 10, None)
    with serving(job_of(data, 2)) as (_, handle):
        silent = [_connected(handle.address) for _ in range(3)]
        for rubbish in HOSTILE.values():
            with _connected(handle.address) as stranger:
                stranger.sendall(rubbish)
                stranger.settimeout(20)
                with contextlib.suppress(ConnectionResetError):  # with unread bytes behind it
                    assert stranger.recv(1) == b""
        for hello, reason in (
            (Hello(rank=0, data="0" * 64), "other data"),
            (Hello(rank=2, data=config_sha256(data)), "rank 2 is not awaited"),
            (Hello(rank=0, data=config_sha256(data), version=0), "speaks version 0"),
        ):
            assert reason in _answer_to(handle.address, hello)
        loaders = open_ranks(data, 2, handle)
        try:
            assert seen(take(loaders, 10)) == expected
            assert not any(loader.lost_server for loader in loaders)
        finally:
            close(loaders)
            for one in silent:
                one.close()


def test_a_rank_that_sends_rubbish_loses_the_server_and_no_other_does(made):
    data = made.config()
    expected = read(data, 2, 10, None)
    with serving(job_of(data, 2)) as (_, handle):
        loaders = open_ranks(data, 2, handle, prefetch=1)
        try:
            found = take(loaders, 2)
            assert loaders[0]._served is not None
            loaders[0]._served._connection.sendall(HOSTILE["no JSON"])
            found += take(loaders, 8)
            assert seen(found) == expected
            assert not loaders[1].lost_server
        finally:
            close(loaders)


def test_no_other_user_can_connect_and_at_last_nobody_can(made, monkeypatch):
    from moebius.data_pipeline.serve import start

    monkeypatch.setattr(start.subprocess, "Popen", _NoProcess)
    handle = start.start_server(job_of(made.config(), 1))
    assert stat.S_IMODE(handle.address.parent.stat().st_mode) == 0o700
    assert stat.S_IMODE(handle.address.stat().st_mode) == 0o600
    with pytest.raises(ConnectionRefusedError):
        _connected(handle.address)
    handle.close()
    assert not handle.address.parent.exists()
    monkeypatch.setattr(start.tempfile, "gettempdir", lambda: str(_long_folder(made.folder)))
    short = start._private_folder()
    assert short.parent == Path("/tmp")
    short.rmdir()


def _long_folder(folder: Path) -> Path:
    found = folder / ("x" * 100)
    found.mkdir(exist_ok=True)
    return found


class _NoProcess:
    """Takes what the server's process would be told."""

    def __init__(self, *_: object, **__: object):
        self.stdin = io.StringIO()

    def wait(self, timeout: float) -> int:
        return 0


def _connected(address: Path) -> socket.socket:
    found = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        found.connect(str(address))
    except OSError:
        found.close()
        raise
    return found


def _answer_to(address: Path, hello: Hello) -> str:
    with _connected(address) as stranger:
        send(stranger, hello)
        received = receive_reply(stranger)
        assert received is not None
        assert isinstance(received[0], Refused)
        return received[0].reason


def test_texts_are_cut_to_what_a_message_may_hold():
    assert protocol.cut("short") == "short"
    assert len(protocol.cut("x" * 10**6)) == len(Waiting(reason=protocol.cut("x" * 10**6)).reason)
