"""Finding what a fault hits among the processes of a job on a simulated cluster, and hitting it."""

import os
import random
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil

from moebius.cluster import processes
from moebius.cluster.places.standing import StandingCluster
from moebius.distributed.checkpoint.files import list_checkpoints
from tests.chaos.plan import Planned

WAIT_S = 15.0  # for a victim: the job may be between two generations


@dataclass
class Target:
    """The job that is shot at."""

    cluster: StandingCluster
    run_dir: Path

    def __post_init__(self) -> None:
        self._damaged_step = -1

    def hit(self, planned: Planned) -> str:
        """Injects a fault; returns whom it has hit, or "" where nobody was there to be hit."""
        deadline = time.monotonic() + WAIT_S
        while not (told := self._try(planned)) and time.monotonic() < deadline:
            time.sleep(0.2)
        return told

    def _try(self, planned: Planned) -> str:
        if planned.kind == "node":
            return self._power_off(planned)
        if planned.kind == "checkpoint":
            return self._flip(planned)
        if planned.kind in ("rank", "stopped rank"):
            how = signal.SIGKILL if planned.kind == "rank" else signal.SIGSTOP
            return self._signal_rank(planned, how)
        found: Callable[[], list[int]] = {
            "agent": self._agents,
            "template": self._templates,
            "actor": lambda: self._called("ray::NodeAgent"),
            "supervisor": lambda: self._called("ray::Supervisor"),
            "tokeniser": lambda: self._called("ray::_call"),
            "preparer": lambda: self._called("moebius.cluster.preparer", anywhere=True),
        }[planned.kind]
        pids = found()
        if not pids:
            return ""
        pid = pids[planned.pick(len(pids))]
        return f"process {pid}" if processes.kill(pid) else ""

    def _signal_rank(self, planned: Planned, how: signal.Signals) -> str:
        marks = processes.find(str(self.run_dir))
        ranks = sorted(
            (int(environment[processes.RANK]), pid)
            for pid, environment in marks.items()
            if processes.RANK in environment
        )
        if not ranks:
            return ""
        rank, pid = ranks[planned.pick(len(ranks))]
        try:
            os.kill(pid, how)
        except ProcessLookupError:
            return ""
        return f"rank {rank}, process {pid}"

    def _agents(self) -> list[int]:
        marks = processes.find(str(self.run_dir))
        return [
            pid
            for pid, environment in marks.items()
            if processes.RANK not in environment and processes.TEMPLATE not in environment
        ]

    def _templates(self) -> list[int]:
        marks = processes.find(str(self.run_dir))
        return [pid for pid, environment in marks.items() if processes.TEMPLATE in environment]

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
        nodes = self.cluster.ask("status")["nodes"]
        living = [node["node"] for node in nodes if node["node"] and node["state"] == "alive"]
        if not living:
            return ""
        victim = living[planned.pick(len(living))]
        gone = self.cluster.ask("kill-node", node=victim)["processes"]
        time.sleep(2.0 + 6.0 * planned.draw)
        new = self.cluster.ask("add-node")["node"]
        return f"node {victim} with {gone} processes; node {new} has come"

    def _flip(self, planned: Planned) -> str:
        """Only where the one before is whole: a run whose checkpoints are all damaged is lost."""
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
