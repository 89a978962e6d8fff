"""Retries for transient connection failures.

fsspec's file systems raise their client libraries' errors: those of aiohttp, botocore, httpx and
others, some OSErrors, some not, some wrapped in a FileNotFoundError. This module classifies them
without importing the libraries, by HTTP status or else by class name.
"""

import errno
import time
from collections.abc import Callable, Iterator
from typing import TypeVar

T = TypeVar("T")

WAITS_S = (0.5, 2.0, 8.0)
"""Seconds between tries."""

_LIBRARIES = {
    *("aiohttp", "aiobotocore", "botocore", "s3fs", "gcsfs", "google", "adlfs", "azure"),
    *("httpx", "httpx2", "httpcore", "httpcore2", "requests", "urllib3", "huggingface_hub"),
    *("paramiko", "fsspec"),
}
# the libraries' base classes for connections that fail, time out or end too early
_PASSING = {
    *("ClientConnectionError", "ClientPayloadError"),  # aiohttp
    *("HTTPClientError", "ConnectionError", "IncompleteReadError", "ResponseStreamingError"),
    *("TransportError", "ProtocolError", "ChunkedEncodingError", "Timeout"),
}
_PASSING_ERRNOS = {
    *(errno.ECONNRESET, errno.ECONNREFUSED, errno.ECONNABORTED, errno.EPIPE, errno.ETIMEDOUT),
    *(errno.ENETUNREACH, errno.EHOSTUNREACH, errno.ENETDOWN, errno.EBUSY, errno.EIO),
}
_TOO_MANY, _TOO_SLOW, _TOO_EARLY, _SERVER_ERRORS = 429, 408, 425, 500


def patiently(action: Callable[[], T]) -> T:
    """Calls `action` until it succeeds; retries only transient failures, up to three times.

    Raises:
        Exception: the last error of `action`.
    """
    for wait_s in WAITS_S:
        try:
            return action()
        except Exception as error:
            if not is_passing(error):
                raise
        time.sleep(wait_s)
    return action()


def is_of_connection(error: BaseException) -> bool:
    """Returns whether an error is about reaching or reading a file, not a bug of ours."""
    modules = {kind.__module__.partition(".")[0] for kind in type(error).__mro__}
    return isinstance(error, OSError) or not modules.isdisjoint(_LIBRARIES)


def is_passing(error: BaseException) -> bool:
    """Returns whether an error is transient: the same request may succeed later."""
    causes = list(_causes(error))
    for cause in reversed(causes):  # the root cause knows best
        if (status := _status(cause)) is not None:
            return status in (_TOO_MANY, _TOO_SLOW, _TOO_EARLY) or status >= _SERVER_ERRORS
    return any(map(_passes, causes))


def explain(error: BaseException) -> str:
    """Describes in one line why a file could not be read, and how often it was tried."""
    causes = list(_causes(error)) if is_passing(error) else [error]
    first = next((cause for cause in causes if _passes(cause)), causes[-1])
    reason = getattr(first, "strerror", None) or " ".join(str(first).split())
    if not isinstance(first, OSError) or not reason:
        reason = f"{type(first).__name__}{': ' if reason else ''}{reason}"
    return f"{reason}; tried {len(WAITS_S) + 1} times" if is_passing(error) else reason


def _causes(error: BaseException) -> Iterator[BaseException]:
    cause: BaseException | None = error
    while cause is not None:
        yield cause
        cause = cause.__cause__


def _passes(error: BaseException) -> bool:
    """Returns whether an error itself denotes a failed connection."""
    if isinstance(error, ConnectionError | TimeoutError):
        return True
    if isinstance(error, OSError) and error.errno in _PASSING_ERRNOS:
        return True
    names = {kind.__name__ for kind in type(error).__mro__}
    return is_of_connection(error) and not names.isdisjoint(_PASSING)


def _status(error: BaseException) -> int | None:
    """Returns the HTTP status of a library's error, if it has one."""
    status = getattr(error, "status", None)  # aiohttp
    response = getattr(error, "response", None)
    if isinstance(response, dict):  # botocore
        status = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
    elif response is not None:  # httpx, requests, huggingface_hub
        status = getattr(response, "status_code", None)
    return status if isinstance(status, int) else None
