"""A local Hugging Face hub with enough of its HTTP interface for its own client library.

Repositories are named as in URLs: "owner/name" is a model (or tokenizer), "datasets/owner/name" a
data set. Every revision is the same commit.
"""

import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import PurePosixPath
from urllib.parse import parse_qs, unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"
Repositories = dict[str, dict[str, bytes]]  # repository -> path -> content


class _Handler(BaseHTTPRequestHandler):
    repositories: Repositories
    requests: list[str]
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: object) -> None:
        self.requests.append(f"{self.command} {self.path}")

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path).strip("/")
        if match := re.fullmatch(r"api/(?:models/)?((?:datasets/)?[^/]+/[^/]+)(.*)", path):
            answer, place = self._api, match[2].strip("/")
        elif match := re.fullmatch(r"(.+?)/resolve/[^/]+/(.+)", path):
            answer, place = self._file, match[2]
        else:
            return self._missing("RepoNotFound")
        files = self.repositories.get(match[1])
        return self._missing("RepoNotFound") if files is None else answer(match[1], files, place)

    do_HEAD = do_POST = do_GET

    def _api(self, repository: str, files: dict[str, bytes], place: str) -> None:
        what, _, where = place.partition("/")
        if what == "paths-info":
            body = self.rfile.read(int(self.headers["Content-Length"])).decode()
            is_json = "json" in self.headers.get("Content-Type", "")
            asked = json.loads(body)["paths"] if is_json else parse_qs(body).get("paths", [])
            asked = [asked] if isinstance(asked, str) else asked
            return self._json([one for one in _entries(files) if one["path"] in asked])
        if what == "tree":
            folder = where.partition("/")[2]
            recursive = "recursive=true" in urlsplit(self.path).query.lower()
            return self._json(_listing(files, folder, recursive))
        siblings = [{"rfilename": name} for name in files]
        name = repository.removeprefix("datasets/")
        return self._json({"id": name, "sha": COMMIT, "siblings": siblings, "private": False})

    def _file(self, _: str, files: dict[str, bytes], name: str) -> None:
        if name not in files:
            return self._missing("EntryNotFound")
        content, status, extra = files[name], 200, {}
        if match := re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", "")):
            start, stop = int(match[1]), int(match[2] or len(content) - 1)
            extra = {"Content-Range": f"bytes {start}-{stop}/{len(content)}"}
            content, status = content[start : stop + 1], 206
        etag = f'"{hashlib.sha256(files[name]).hexdigest()}"'
        return self._answer(status, content, {"ETag": etag, "X-Repo-Commit": COMMIT} | extra)

    def _json(self, value: object) -> None:
        self._answer(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def _missing(self, code: str) -> None:
        self._answer(404, b"{}", {"X-Error-Code": code, "X-Error-Message": "not there"})

    def _answer(self, status: int, content: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in ({"Content-Length": str(len(content))} | headers).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)


def _entries(files: dict[str, bytes]) -> list[dict[str, object]]:
    """Returns the files and their folders."""
    folders = {str(folder) for path in files for folder in PurePosixPath(path).parents} - {"."}
    found = [{"type": "directory", "path": each, "oid": "0", "size": 0} for each in folders]
    for path, content in files.items():
        oid = hashlib.sha1(content).hexdigest()
        found.append({"type": "file", "path": path, "oid": oid, "size": len(content)})
    return sorted(found, key=lambda one: str(one["path"]))


def _listing(files: dict[str, bytes], folder: str, recursive: bool) -> list[dict[str, object]]:
    prefix = f"{folder}/" if folder else ""
    below = [one for one in _entries(files) if str(one["path"]).startswith(prefix)]
    return [one for one in below if recursive or "/" not in str(one["path"])[len(prefix) :]]


@contextmanager
def serve_hub(repositories: Repositories) -> Iterator[tuple[str, list[str]]]:
    """Serves the repositories; yields the endpoint and the requests so far."""
    requests: list[str] = []
    handler = type("Handler", (_Handler,), {"repositories": repositories, "requests": requests})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}", requests
        finally:
            server.shutdown()
            thread.join()
