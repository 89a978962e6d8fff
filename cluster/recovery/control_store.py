"""Notices in time that Ray's control store (the GCS on the head node) is gone.

Ray waits a minute for it and then ends every process of the cluster, the supervisor among them,
without asking. So that people learn why a job is LOST, the supervisor writes the reason into the
journal while it still can.
"""

import socket
import threading
import time
from pathlib import Path

from ..job import Journal

ASK_EVERY_S = 5.0
TOLD_AFTER_S = 10.0
_RAY_WAITS_S = 60  # RAY_gcs_rpc_server_reconnect_timeout_s


class ControlStoreWatch:
    """Asks every few seconds, in a thread, whether anything listens at the store's address."""

    def __init__(
        self,
        run_dir: Path,
        address: str,
        *,
        ask_every_s: float = ASK_EVERY_S,
        told_after_s: float = TOLD_AFTER_S,
    ):
        self._journal = Journal(run_dir)
        self._address = address
        self._ask_every_s, self._told_after_s = ask_every_s, told_after_s
        self._ended = threading.Event()
        threading.Thread(target=self._watch, name="control-store", daemon=True).start()

    def end(self) -> None:
        """Ends the watching."""
        self._ended.set()

    def _watch(self) -> None:
        heard_at, told = time.monotonic(), False
        while not self._ended.wait(self._ask_every_s):
            if listens(self._address):
                if told:
                    self._tell(f"the cluster's control store at {self._address} is back")
                heard_at, told = time.monotonic(), False
            elif not told and time.monotonic() - heard_at >= self._told_after_s:
                told = True
                self._tell(
                    f"the cluster's control store at {self._address} does not answer; Ray ends "
                    f"all its processes, this job's too, when it has waited {_RAY_WAITS_S} s. "
                    "Start the cluster again and `moebius resume` the job"
                )

    def _tell(self, words: str) -> None:
        entries = self._journal.entries()
        if entries and not entries[-1].state.is_final:
            last = entries[-1]
            self._journal.append(last.state, generation=last.generation, reason=words)


def listens(address: str) -> bool:
    """Returns whether something accepts connections at host:port."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=2.0).close()
    except OSError:
        return False
    return True
