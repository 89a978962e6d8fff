"""Finds the victim of a fault among the processes of a job on a simulated cluster, and hits it."""

import os
import random
import resource
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil

from moebius.cluster.job import JobError, Journal
from moebius.cluster.nodes import processes
from moebius.cluster.places.standing import StandingCluster
from moebius.distributed.checkpoint.format import list_checkpoints
from tests.chaos.plan import Planned
from tests.jobs import agent_pids, rank_pids, template_pids

WAIT_S = 15.0  # for a victim: the job may be between two generations
LARGEST_FILE = 1 << 20  # bytes, where a disk is full: logs go on, checkpoints do not
JOIN_S = 300.0  # for a new node: without it the job waits for ever
FULL_S = 60.0  # at most: until the next checkpoint


@dataclass
class Target:
    """Refers to the job under fire."""

    cluster: StandingCluster
    run_dir: Path

    def __post_init__(self) -> None:
        self._damaged_step = -1

    def hit(self, planned: Planned) -> str:
        """Injects a fault; returns its victim, or "" if there was none."""
        deadline = time.monotonic() + WAIT_S
        while not (told := self._try(planned)) and time.monotonic() < deadline:
            time.sleep(0.2)
        return told

    def _try(self, planned: Planned) -> str:
        special = {
            "node": self._power_off,
            "raylet": self._kill_raylet,
            "checkpoint": self._flip,
            "full disk": self._fill_disk,
        }
        if planned.kind in special:
            return special[planned.kind](planned)
        if planned.kind in ("rank", "stopped rank"):
            how = signal.SIGKILL if planned.kind == "rank" else signal.SIGSTOP
            return self._signal_rank(planned, how)
        found: Callable[[], list[int]] = {
            "agent": lambda: list(agent_pids(self.run_dir)),
            "template": lambda: template_pids(self.run_dir),
            "actor": lambda: self._called("ray::NodeAgent"),
            "supervisor": lambda: self._called("ray::Supervisor"),
            "tokeniser": lambda: self._called("ray::_call"),
            "preparer": lambda: self._called("moebius.cluster.prepare_data", anywhere=True),
        }[planned.kind]
        pids = found()
        if not pids:
            return ""
        pid = pids[planned.pick(len(pids))]
        return f"process {pid}" if processes.kill(pid) else ""

    def _signal_rank(self, planned: Planned, how: signal.Signals) -> str:
        ranks = sorted(rank_pids(self.run_dir).items())
        if not ranks:
            return ""
        rank, pid = ranks[planned.pick(len(ranks))]
        try:
            os.kill(pid, how)
        except ProcessLookupError:
            return ""
        return f"rank {rank}, process {pid}"

    def _called(self, words: str, *, anywhere: bool = False) -> list[int]:
        found = []
        for pid in processes.descendants(self.cluster.host_pid):
            try:
                line = " ".join(psutil.Process(pid).cmdline())
            except psutil.Error:
                continue
            if line.startswith(words) or (anywhere and words in line):
                found.append(pid)
        return found

    def _power_off(self, planned: Planned) -> str:
        living = self._living_nodes()
        if not living:
            return ""
        victim, _ = living[planned.pick(len(living))]
        gone = self.cluster.ask("kill-node", node=victim)["processes"]
        return f"node {victim} with {gone} processes; {self._replacement(planned)}"

    def _kill_raylet(self, planned: Planned) -> str:
        """Kills only the raylet: the job's processes must notice that their node is lost."""
        living = self._living_nodes()
        if not living:
            return ""
        victim, address = living[planned.pick(len(living))]
        words = f"--node_ip_address={address} "
        raylets = [pid for pid in self._called(words, anywhere=True) if _is_raylet(pid)]
        if len(raylets) != 1 or not processes.kill(raylets[0]):
            return ""
        return f"node {victim}, process {raylets[0]}; {self._replacement(planned)}"

    def _living_nodes(self) -> list[tuple[int, str]]:
        """Returns number and address of all nodes except the head."""
        nodes = self.cluster.ask("status")["nodes"]
        alive = [node for node in nodes if node["node"] and node["state"] == "alive"]
        return [(node["node"], node["address"]) for node in alive]

    def _replacement(self, planned: Planned) -> str:
        """Adds a node after some seconds, like a cloud."""
        time.sleep(2.0 + 6.0 * planned.draw)
        deadline = time.monotonic() + JOIN_S
        while True:
            try:
                return f"node {self.cluster.ask('add-node')['node']} has come"
            except JobError:  # Ray gives a node 30 s to start, on a busy machine too
                if time.monotonic() > deadline:
                    raise

    def _fill_disk(self, planned: Planned) -> str:
        """Limits a rank other than 0 to small files until the journal reports a failed checkpoint."""
        ranks = sorted(rank_pids(self.run_dir).items())[1:]
        if not ranks:
            return ""
        rank, pid = ranks[planned.pick(len(ranks))]
        told = len(self._failed_saves())
        try:
            process = psutil.Process(pid)
            process.rlimit(psutil.RLIMIT_FSIZE, (LARGEST_FILE, resource.RLIM_INFINITY))
            deadline = time.monotonic() + FULL_S
            while len(self._failed_saves()) == told and time.monotonic() < deadline:
                time.sleep(0.2)
            unlimited = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
            process.rlimit(psutil.RLIMIT_FSIZE, unlimited)
        except psutil.Error:
            return ""
        failed = self._failed_saves()[told:]
        return f"rank {rank}, process {pid}: {failed[0]}" if failed else ""

    def _failed_saves(self) -> list[str]:
        entries = Journal(self.run_dir).entries()
        return [entry.reason for entry in entries if "File too large" in entry.reason]

    def _flip(self, planned: Planned) -> str:
        """Flips a byte only if the previous checkpoint is whole: a run without any is lost."""
        found = list_checkpoints(self.run_dir / "checkpoints")
        whole = [one for one in found if one.step != self._damaged_step]
        if len(whole) < 2 or whole[-1].step != found[-1].step:
            return ""
        files = sorted(whole[-1].path.glob("*.distcp"))
        rng = random.Random(planned.draw)
        file = rng.choice(files)
        at = rng.randrange(file.stat().st_size)
        with open(file, "r+b") as opened:
            opened.seek(at)
            byte = opened.read(1)
            opened.seek(at)
            opened.write(bytes([byte[0] ^ 1 << rng.randrange(8)]))
        self._damaged_step = whole[-1].step
        rank = self._signal_rank(planned, signal.SIGKILL) or "no rank was there"
        return f"step {whole[-1].step}, {file.name}, byte {at:,}; {rank}"


def _is_raylet(pid: int) -> bool:
    try:
        return psutil.Process(pid).name() == "raylet"
    except psutil.Error:
        return False
