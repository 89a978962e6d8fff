"""A Ray cluster whose nodes are pretended machines with addresses of their own: one that a person
starts with `ray start`, with a token, as docs/security.md asks.

On each worker `ray start --block` is started again whenever it ends, as systemd would.
"""

import contextlib
import json
import secrets
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from jobs import wait_for

from tests.network.nodes import Network, network

PORT = 6379
CPUS = 2
START_S = 240.0
# A cut of 10 s is survived without anybody's notice, as with Ray's own defaults, which wait 65 s: a
# node is dead when it has not answered 4 times within 4 s, with 1 s between. Shorter times would
# take nodes of a busy machine for dead. What cannot reach the head ends itself after 30 s, not 60.
SYSTEM_CONFIG = {
    "health_check_initial_delay_ms": 1000,
    "health_check_period_ms": 1000,
    "health_check_timeout_ms": 4000,
    "health_check_failure_threshold": 4,
    "gcs_rpc_server_reconnect_timeout_s": 30,
    "worker_niceness": 0,  # by default all others of a busy machine come first
    "enable_worker_prestart": False,
    "prestart_worker_first_driver": False,
}
_AGAIN = 'while :; do "$@"; sleep 1; done'
_MOEBIUS = "from moebius.cli.main import main; main()"
_AWAIT = """
import sys, time
from moebius.cluster.places.ray_session import connected
address, *wanted = sys.argv[1:]
with connected(address) as ray:
    while {node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]} != set(wanted):
        time.sleep(0.2)
"""


@dataclass(frozen=True)
class RayCluster:
    """A head, which has no CPUs for ranks, and workers."""

    net: Network
    environment: Mapping[str, str]

    @property
    def address(self) -> str:
        """Of the head, as a user gives it."""
        return f"{self.net.addresses[0]}:{PORT}"

    def moebius(
        self, *arguments: str, timeout_s: float = 180.0, node: int = 0
    ) -> subprocess.CompletedProcess[str]:
        """Executes a command of moebius on a node, the head if nothing is said."""
        command = [sys.executable, "-c", _MOEBIUS, *arguments]
        return self.net.run(node, *command, timeout_s=timeout_s, **self.environment)

    def await_nodes(self) -> None:
        """Returns when all nodes are there."""
        command = [sys.executable, "-c", _AWAIT, self.address, *self.net.addresses]
        told = self.net.run(0, *command, timeout_s=START_S, **self.environment)
        assert told.returncode == 0, told.stderr


@contextlib.contextmanager
def ray_cluster(number: int) -> Iterator[RayCluster]:
    """Starts a cluster of a head and `number` - 1 workers; nothing is left of it afterwards."""
    with network(number) as net:
        token = net.folder / "token"
        token.touch(mode=0o600)
        token.write_text(secrets.token_hex(32))
        environment = {
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN_PATH": str(token),
            "RAY_TMPDIR": str(net.own),
            "RAY_USAGE_STATS_ENABLED": "0",
        }
        cluster = RayCluster(net, environment)
        for node in range(number):
            _start_node(cluster, node)
        wait_for(lambda: _listens(cluster), timeout_s=START_S, what=f"Ray's head; see {net.folder}")
        cluster.await_nodes()
        yield cluster


def _start_node(cluster: RayCluster, node: int) -> None:
    ray = [str(Path(sys.executable).with_name("ray")), "start", "--block"]
    ray += [f"--node-ip-address={cluster.net.addresses[node]}"]
    if node == 0:
        ray += ["--head", f"--port={PORT}", "--num-cpus=0", "--include-dashboard=false"]
        ray += ["--system-config", json.dumps(SYSTEM_CONFIG)]
    else:
        ray += [f"--address={cluster.address}", f"--num-cpus={CPUS}"]
    ray += [f"--object-store-memory={80 << 20}"]
    command = ray if node == 0 else ["sh", "-c", _AGAIN, "again", *ray]
    log = cluster.net.folder / f"ray{node}.log"
    cluster.net.start(node, *command, log=log, environment=cluster.environment)


def _listens(cluster: RayCluster) -> bool:
    listening = cluster.net.run(0, "ss", "-Hltn", f"sport = {PORT}").stdout
    return bool(listening.strip())
