"""Serves the page, to whoever has its token.

The address that is printed holds the token. Who calls it gets a cookie and is sent on to the plain
address; who comes with neither is refused, whatever he asks for. So no other user of this machine,
and no page of the internet that is open in the same browser, can read a run.
"""

import hmac
import secrets
import socket
from collections.abc import Callable
from pathlib import Path

import flask
from werkzeug.serving import BaseWSGIServer, WSGIRequestHandler, make_server

from ..job import JobError
from .curves import Runs
from .page import make_page

_COOKIE = "moebius-dashboard"
_REFUSED = "403: open the address that `moebius dashboard` has printed; it holds the token.\n"


def serve(root: Path, *, host: str, port: int, say: Callable[[str], None]) -> None:
    """Serves the page until it is interrupted.

    Args:
        root: a run folder, or a folder of runs.
        host: the address that is listened on.
        port: the port; 0: any that is free.
        say: told the page's address, once it can be opened.

    Raises:
        JobError: there is no run, or the port cannot be had.
    """
    runs = Runs(root)
    if not root.is_dir() or not runs.names():
        raise JobError(f"there is no run in {root}: name a run folder, or a folder of runs")
    token = secrets.token_urlsafe(24)
    server = _open(runs, host, port, token)
    try:
        say(f"http://{f'[{host}]' if ':' in host else host}:{server.port}/?token={token}")
        server.serve_forever()
    finally:
        server.server_close()


def _open(runs: Runs, host: str, port: int, token: str) -> BaseWSGIServer:
    try:
        family = socket.getaddrinfo(host, port)[0][0]
        listening = socket.create_server((host, port), family=family)
    except (OSError, OverflowError) as error:
        raise JobError(
            f"the page cannot be served on {host}:{port}: {getattr(error, 'strerror', None) or error}. "
            "Take another port with --port, or --port 0 for any that is free"
        ) from None
    with listening:
        return make_server(
            host,
            listening.getsockname()[1],
            guarded(make_page(runs).server, token),
            threaded=True,
            request_handler=_Quiet,
            fd=listening.fileno(),  # which it duplicates
        )


def guarded(server: flask.Flask, token: str) -> flask.Flask:
    """Makes a server answer those alone who come with the token, or with the cookie it gave them."""

    @server.before_request
    def _let_in() -> flask.Response | None:
        request = flask.request
        given = request.args.get("token", "")
        if request.path == "/" and given:
            if not _equal(given, token):
                return flask.Response(_REFUSED, 403, mimetype="text/plain")
            answer = flask.redirect("/")
            assert isinstance(answer, flask.Response)
            # by port, for cookies are shared by all ports of a host
            answer.set_cookie(_cookie(), token, httponly=True, samesite="Strict")
            return answer
        if not _equal(request.cookies.get(_cookie(), ""), token):
            return flask.Response(_REFUSED, 403, mimetype="text/plain")
        return None

    @server.after_request
    def _keep_in(answer: flask.Response) -> flask.Response:
        answer.headers["Referrer-Policy"] = "no-referrer"
        answer.headers["X-Frame-Options"] = "DENY"
        answer.headers["X-Content-Type-Options"] = "nosniff"
        return answer

    return server


def _cookie() -> str:
    return f"{_COOKIE}-{flask.request.environ.get('SERVER_PORT', '')}"


def _equal(given: str, token: str) -> bool:
    return hmac.compare_digest(given.encode(), token.encode())


class _Quiet(WSGIRequestHandler):
    """Says nothing of requests: the page asks every two seconds."""

    def log_request(self, code: int | str = "-", size: int | str = "-") -> None:
        """Says nothing."""
