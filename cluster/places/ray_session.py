"""Connects this process to a Ray cluster, with one clear error for each way in which that can fail.

Ray itself would answer with a minute of silence or a page of C++ log lines, so every case below is checked
first.
"""

import contextlib
import importlib
import importlib.util
import ipaddress
import logging
import os
import socket
from collections.abc import Iterator, Sequence
from typing import Any

from ..job import JobError

NAMESPACE = "moebius"
REACH_TIMEOUT_S = 5.0
_NEUTRAL_FOLDER = "/"  # holds no Python module
ALLOW_UNAUTHENTICATED = "MOEBIUS_ALLOW_UNAUTHENTICATED"  # --allow-unauthenticated sets it
# Ray sets these when it connects and never unsets them; `breakpoint()` would still ask Ray's debugger.
_SET_BY_RAY = ("PYTHONBREAKPOINT", "RAY_CLIENT_MODE")


def require_ray() -> None:
    """Raises JobError with the line that installs Ray when it is missing."""
    if importlib.util.find_spec("ray") is None:
        raise JobError("this needs Ray, which is not installed: pip install 'moebius[cluster]'")


@contextlib.contextmanager
def connected(address: str) -> Iterator[Any]:
    """Connects this process to the cluster at `address`; yields the module `ray`.

    `address` is "auto", or host:port of the cluster's head. Token authentication is Ray's:
    RAY_AUTH_MODE=token with RAY_AUTH_TOKEN, RAY_AUTH_TOKEN_PATH or ~/.ray/auth_token.

    Raises:
        JobError: Ray is missing, no head answers, this machine is not a node of the cluster, or the token is
            wrong.
    """
    require_ray()
    _check_reachable(address)
    import ray

    _check_credentials(address)
    with environment_kept(_SET_BY_RAY):
        _connect(ray, address)
        try:
            yield ray
        finally:
            ray.shutdown()


def _connect(ray: Any, address: str) -> None:
    try:
        # Ray puts the working folder first on the path of its workers, where it shadows Python's modules
        with contextlib.chdir(_NEUTRAL_FOLDER):
            ray.init(
                address=address,
                namespace=NAMESPACE,
                log_to_driver=False,  # ranks log into the run folder, not through Ray
                logging_level=logging.ERROR,
                configure_logging=True,
            )
    except Exception as error:  # Ray raises half a dozen types; all mean that it cannot connect
        raise JobError(
            f"cannot connect to the Ray cluster at {address} ({type(error).__name__}: {error}). "
            "Submit from one of its nodes, or give another --address"
        ) from error


@contextlib.contextmanager
def environment_kept(names: Sequence[str]) -> Iterator[None]:
    """Restores environment variables at the end."""
    before = {name: os.environ[name] for name in names if name in os.environ}
    try:
        yield
    finally:
        for name in names:
            os.environ.pop(name, None)
        os.environ.update(before)


def _refused(address: str, said: str | None) -> str:
    mode = os.environ.get("RAY_AUTH_MODE", "not set")
    return (
        f"the Ray cluster at {address} refused our credentials (RAY_AUTH_MODE is {mode}): set "
        "RAY_AUTH_MODE=token, and RAY_AUTH_TOKEN_PATH to the file with the cluster's token. Ray "
        f"said: {said}"
    )


def _check_reachable(address: str) -> None:
    if address == "auto":
        return
    host, colon, port = address.rpartition(":")
    if not colon or not port.isdigit() or "/" in address:
        raise JobError(
            f"address {address!r}: must be host:port of the cluster's head, as `ray start "
            "--head` prints it, or auto"
        )
    try:
        socket.create_connection((host, int(port)), timeout=REACH_TIMEOUT_S).close()
    except OSError as error:
        raise JobError(
            f"no Ray cluster answers at {address} ({error}): start one with `ray start --head`, "
            "or name another (`moebius submit` without --address simulates one on this machine)"
        ) from None


def _check_credentials(address: str) -> None:
    """Asks the head for the cluster's id; Ray's own client would repeat a refused request for 20 s.

    Ray reads the mode and the token once per process, so they are read again for a second cluster.
    """
    raylet: Any = importlib.import_module("ray._raylet")
    raylet.Config.initialize("")
    loader = raylet.AuthenticationTokenLoader.instance()
    loader.reset_cache()
    if address == "auto":
        return
    header = tuple(
        (key.lower(), value) for key, value in loader.get_token_for_http_header().items()
    )
    error = _ask_for_cluster_id(address, header)
    if error is not None and error[0] in ("UNAUTHENTICATED", "PERMISSION_DENIED"):
        raise JobError(_refused(address, error[1]))


def refuse_unauthenticated(address: str) -> None:
    """Refuses a network cluster without a token: whoever reaches it can run code in the job.

    A cluster has a token if it refuses requests without one. Loopback addresses are allowed.

    Raises:
        JobError: the cluster needs no token, and ALLOW_UNAUTHENTICATED is not set.
    """
    require_ray()
    _check_reachable(address)
    host = address.rpartition(":")[0].strip("[]")
    if os.environ.get(ALLOW_UNAUTHENTICATED) == "1" or _is_loopback(host):
        return
    if _ask_for_cluster_id(address, ()) is None:
        raise JobError(
            f"the Ray cluster at {address} asks for no token, so anyone who reaches it can run "
            "code in this job and read its data: start Ray with RAY_AUTH_MODE=token on every "
            "node, or accept this with --allow-unauthenticated"
        )


def refuse_unnamed(address: str) -> None:
    """Refuses a network cluster that only a run's journal names: Ray runs its code in this process.

    Raises:
        JobError: says how the user names it.
    """
    own = ("auto", "simulated", os.environ.get("RAY_ADDRESS"))
    if address not in own and not _is_loopback(address.rpartition(":")[0].strip("[]")):
        raise JobError(
            f"the run's journal says that it was submitted to {address}: to go there, name the cluster "
            f"yourself with --address {address} or RAY_ADDRESS"
        )


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _ask_for_cluster_id(
    address: str, header: tuple[tuple[str, str], ...]
) -> tuple[str, str | None] | None:
    """Returns code and message of the error with which a cluster's head answers; None if it accepts."""
    import grpc  # comes with tensorboard

    with grpc.insecure_channel(address, options=[("grpc.enable_http_proxy", 0)]) as channel:
        ask = channel.unary_unary("/ray.rpc.NodeInfoGcsService/GetClusterId")
        try:
            ask(b"", timeout=REACH_TIMEOUT_S, metadata=header)
        except grpc.RpcError as error:
            return error.code().name, error.details()  # type: ignore[attr-defined]
    return None


def nodes_of(group: Any) -> set[str]:
    """Returns the nodes that a placement group has reserved, even if no actor runs there yet."""
    import ray

    told: dict[str, Any] = ray.util.placement_group_table(group) if group else {}
    return set(told["bundles_to_node_id"].values()) if told.get("state") == "CREATED" else set()
