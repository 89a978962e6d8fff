"""Serves the page to visitors with its token.

The printed address contains the token. A visitor with the token gets a cookie and is redirected to
the plain address; a visitor with neither is refused. Therefore no other user of this machine, and
no other web page open in the same browser, can read a run.
"""

import hmac
import logging
import secrets
import socket
from collections.abc import Callable
from pathlib import Path

import flask
from werkzeug.serving import BaseWSGIServer, make_server

from .curves import Runs
from .page import make_page

_COOKIE = "moebius-dashboard"
_REFUSED = "403: open the address that `moebius dashboard` printed; it contains the token.\n"


def serve(root: Path, *, host: str, port: int, say: Callable[[str], None]) -> None:
    """Serves the page until interrupted.

    Args:
        root: a run folder, or a folder of runs.
        host: the address to listen on.
        port: the port; 0: any free port.
        say: called with the page's address once it is reachable.

    Raises:
        ValueError: there is no run, or the port is not available.
    """
    runs = Runs(root)
    if not root.is_dir() or not runs.names():
        raise ValueError(f"there is no run in {root}: pass a run folder, or a folder of runs")
    logging.getLogger("werkzeug").setLevel(logging.ERROR)  # the page sends a request every 2 s
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
        raise ValueError(
            f"cannot serve the page on {host}:{port}: {getattr(error, 'strerror', None) or error}. "
            "Choose another --port, or --port 0 for any free one"
        ) from None
    with listening:
        return make_server(
            host,
            listening.getsockname()[1],
            guarded(make_page(runs).server, token),
            threaded=True,
            fd=listening.fileno(),  # duplicated by the server
        )


def guarded(server: flask.Flask, token: str) -> flask.Flask:
    """Makes a server answer only requests with the token or its cookie."""

    @server.before_request
    def _let_in() -> flask.Response | None:
        request = flask.request
        given = request.args.get("token", "")
        if request.path == "/" and given:
            if not _equal(given, token):
                return flask.Response(_REFUSED, 403, mimetype="text/plain")
            answer = flask.redirect("/")
            assert isinstance(answer, flask.Response)
            # by port, because all ports of a host share cookies
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
