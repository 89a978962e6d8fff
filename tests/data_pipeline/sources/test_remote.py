"""Remote input is read in parts and retried if a connection fails; persistent failure is one clear error."""

import gzip
import json
import re
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from small_corpus import planned, read_texts

from moebius.data_pipeline import retries
from moebius.data_pipeline.errors import InputError
from moebius.data_pipeline.sources.remote import RemoteFile

TEXTS = [f"text number {number} of a file" for number in range(60)]
LINES = "".join(json.dumps({"text": text}) + "\n" for text in TEXTS).encode()


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    """Retries without waiting."""
    monkeypatch.setattr(retries, "WAITS_S", (0.0, 0.0, 0.0))


# ---- a server


class _Server(ThreadingHTTPServer):
    """Serves `files`; each GET takes one of `faults` first: a status, or "cut" in the middle."""

    files: dict[str, bytes]
    faults: deque[int | str]
    gives_ranges: bool
    requests: list[str]


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self._respond(with_body=False)

    def do_GET(self) -> None:
        self._respond(with_body=True)

    def _respond(self, *, with_body: bool) -> None:
        self.server.requests.append(f"{self.command} {self.headers.get('Range', '')}")
        content = self.server.files.get(self.path)
        fault = self.server.faults.popleft() if with_body and self.server.faults else None
        if content is None or isinstance(fault, int):
            self._send(fault if isinstance(fault, int) else 404, b"", len(b""), {}, with_body)
            return
        status, extra = 200, {}
        part = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        if part and self.server.gives_ranges:
            start, stop = int(part[1]), min(int(part[2]) + 1, len(content))
            extra = {"Content-Range": f"bytes {start}-{stop - 1}/{len(content)}"}
            content, status = content[start:stop], 206
        sent = content[: len(content) // 2] if fault == "cut" else content
        self._send(status, sent, len(content), extra, with_body)

    def _send(
        self, status: int, body: bytes, length: int, extra: dict[str, str], with_body: bool
    ) -> None:
        self.send_response(status)
        for name, value in ({"Content-Length": str(length)} | extra).items():
            self.send_header(name, value)
        self.end_headers()
        if with_body:
            self.wfile.write(body)
        self.close_connection = len(body) != length


@contextmanager
def _serving(files: dict[str, bytes], *, gives_ranges: bool) -> Iterator[tuple[_Server, str]]:
    server = _Server(("127.0.0.1", 0), _Handler)
    server.files, server.faults, server.requests = files, deque(), []
    server.gives_ranges = gives_ranges
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield server, f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@pytest.fixture(scope="module")
def parquet() -> bytes:
    sink = pa.BufferOutputStream()
    pq.write_table(pa.table({"text": TEXTS}), sink, row_group_size=20)
    return sink.getvalue().to_pybytes()


@pytest.fixture
def site(parquet):
    """The address of a server with a file of each kind."""
    pytest.importorskip("aiohttp", reason="the extra `remote`")
    files = {"/a.jsonl": LINES, "/a.jsonl.gz": gzip.compress(LINES), "/a.parquet": parquet}
    with _serving(files, gives_ranges=True) as found:
        yield found


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.parquet"])
def test_http(site, name):
    server, address = site
    assert read_texts(f"{address}/{name}", split_bytes=1000) == TEXTS
    if name == "a.jsonl":
        ranges = {request for request in server.requests if "bytes=" in request}
        assert len(ranges) == 3, "each split is read alone"


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.parquet"])
@pytest.mark.parametrize("fault", [503, 429, "cut"])
def test_a_failure_that_passes_is_not_noticed(site, name, fault):
    server, address = site
    (read,) = planned(f"{address}/{name}")
    server.faults.extend([fault] * 3)
    assert [one.text for one in read()] == TEXTS
    assert not server.faults, "they did happen"


@pytest.mark.parametrize(
    ("fault", "message", "num_tries"),
    [
        (503, r"\(ClientResponseError: 503.*; tried 4 times\): check the name", 4),
        ("cut", r"\(.*; tried 4 times\): check the name", 4),
        (403, r"\(ClientResponseError: 403", 1),  # will not pass, so it is not tried again
    ],
)
def test_a_failure_that_stays_is_one_clear_error(site, fault, message, num_tries):
    server, address = site
    (read,) = planned(f"{address}/a.jsonl")
    server.faults.extend([fault] * 99)
    with pytest.raises(InputError, match=f"^.*a.jsonl cannot be read {message}.*$"):
        read()
    assert len(server.faults) == 99 - num_tries


def test_what_is_not_there_is_told_from_a_server_that_is_not(site):
    _, address = site
    with pytest.raises(InputError, match=r"/b.jsonl' does not exist: check the name"):
        read_texts(f"{address}/b.jsonl")
    with pytest.raises(InputError, match=r"cannot be listed \(.*127.0.0.1.*; tried 4 times\)"):
        read_texts("http://127.0.0.1:1/a.jsonl")


def test_a_server_without_ranges_is_read_from_the_beginning():
    pytest.importorskip("aiohttp", reason="the extra `remote`")
    line = json.dumps({"text": "x" * 300_000}).encode() + b"\n"
    files = {"/a.jsonl": line * 40}  # more than the 5 MiB of one request
    with _serving(files, gives_ranges=False) as (server, address):
        (read,) = planned(f"{address}/a.jsonl")
        server.faults.append("cut")
        assert [len(one.text) for one in read()] == [300_000] * 40


# ---- other file systems


def test_memory_and_globs_of_it():
    memory = fsspec.filesystem("memory")
    for name in ("b", "a"):
        memory.pipe(f"/test_remote/{name}.jsonl", LINES)
    assert read_texts("memory://test_remote/*.jsonl") == TEXTS * 2
    assert read_texts("memory://test_remote", split_bytes=300) == TEXTS * 2


class _Breaking:
    """Fails or truncates every second read of a file."""

    def __init__(self, content: bytes, how: str):
        self.content, self.how, self.place, self.reads = content, how, 0, 0

    def open(self, path: str, mode: str) -> "_Breaking":
        return self

    def read(self, size: int) -> bytes:
        self.reads += 1
        if self.reads % 2 == 0:
            if self.how == "raises":
                raise ConnectionResetError(104, "Connection reset by peer")
            return b""
        found = self.content[self.place : self.place + min(size, 100)]
        self.place += len(found)
        return found

    def seek(self, place: int) -> None:
        self.place = place

    def tell(self) -> int:
        return self.place

    def close(self) -> None:
        pass


@pytest.mark.parametrize("how", ["raises", "ends"])
def test_a_read_goes_on_where_it_stood(how):
    content = bytes(range(256)) * 4
    file = RemoteFile(_Breaking(content, how), "a", len(content))
    assert file.read(70) == content[:70]
    file.seek(-94, 2)
    assert file.read() == content[-94:]
    assert file.read(1) == b""
    file.seek(5)
    assert (file.tell(), file.read(10)) == (5, content[5:15])
    with pytest.raises(ConnectionError):
        file.read(500)  # always truncated


def test_nothing_of_ours_is_taken_for_a_connection():
    assert not retries.is_of_connection(KeyError("x"))
    assert not retries.is_passing(FileNotFoundError(2, "No such file"))
    assert not retries.is_passing(PermissionError(13, "Permission denied"))
    assert retries.is_passing(TimeoutError())

    calls = []

    def fails():
        calls.append(1)
        raise KeyError("ours")

    with pytest.raises(KeyError):
        retries.patiently(fails)
    assert len(calls) == 1


# ---- S3


@pytest.fixture(scope="module")
def bucket(parquet):
    """Returns a bucket's name on a local S3-compatible server, and a function to stop the server."""
    server_module = pytest.importorskip("moto.moto_server.threaded_moto_server")
    boto3 = pytest.importorskip("boto3")
    pytest.importorskip("s3fs", reason="the extra `remote`")
    server = server_module.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ACCESS_KEY_ID", "anyone")
        patch.setenv("AWS_SECRET_ACCESS_KEY", "anything")
        patch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        patch.setenv("AWS_ENDPOINT_URL", f"http://{host}:{port}")
        client = boto3.client("s3")
        client.create_bucket(Bucket="texts")
        for name, content in (("a.jsonl", LINES), ("b.parquet", parquet)):
            client.put_object(Bucket="texts", Key=f"deep/er/{name}", Body=content)
        yield server
    server.stop()
    fsspec.get_filesystem_class("s3").clear_instance_cache()


@pytest.mark.slow
def test_s3(bucket):
    assert read_texts("s3://texts/deep/er/a.jsonl", split_bytes=700) == TEXTS
    assert read_texts("s3://texts/deep/*/*.parquet", split_bytes=100) == TEXTS
    assert read_texts("s3://texts/deep") == TEXTS * 2
    with pytest.raises(InputError, match=r"'s3://texts/deep/c.jsonl' does not exist: check the na"):
        read_texts("s3://texts/deep/c.jsonl")
    with pytest.raises(InputError, match=r"'s3://other/a.jsonl' does not exist: check the name"):
        read_texts("s3://other/a.jsonl")


@pytest.mark.slow
def test_an_s3_server_that_is_gone(bucket, monkeypatch):
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")  # botocore's own retries
    monkeypatch.setattr("s3fs.core.S3FileSystem.retries", 1)
    fsspec.get_filesystem_class("s3").clear_instance_cache()
    (read,) = planned("s3://texts/deep/er/a.jsonl")
    bucket.stop()
    with pytest.raises(InputError, match=r"cannot be read \(.*EndpointConn.*; tried 4 times\)"):
        read()
    with pytest.raises(InputError, match=r"cannot be listed \(.*EndpointConn.*; tried 4 times\)"):
        read_texts("s3://texts/other")
