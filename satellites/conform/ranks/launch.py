"""Forks the ranks of one world after the other, and reports which of them raised, died or hang.

    python -m moebius_conform.ranks.launch LIMIT_S [MODULE…]    (started by processes.py)

Jobs arrive on stdin, outcomes leave on stdout. The process imports torch and the given modules
once, so that a rank costs a fork. Nothing outlives it: ranks end with it (through a pipe that
nobody writes to), it ends when its stdin is closed, and run.py ends its whole session.
"""

import importlib
import json
import os
import select
import shutil
import signal
import sys
import threading
import time
import traceback
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch.distributed.tensor  # noqa: F401 - every rank needs it: imported before the fork

from ..contract import ContractError
from .job import Job
from .rank import serve

POLL_S = 0.02
AFTERMATH_S = 1.0  # time for other ranks to report after the first failure
CONTRACT = "contract"  # outcome of a rank whose layer does not fit its description


@dataclass(frozen=True)
class Outcome:
    """Describes how a world ended. `how`: "done", "raised", "died", "hangs" or "contract"."""

    how: str
    rank: int = 0
    stage: str = ""
    scene: str | None = None
    text: str = ""
    others: tuple[tuple[int, str], ...] = ()  # what the other ranks were doing

    def line(self) -> str:
        """Returns it as a line of JSON."""
        return json.dumps(asdict(self))


@dataclass
class _Rank:
    number: int
    pid: int
    folder: Path
    status: int | None = None

    def events(self) -> list[dict[str, Any]]:
        """Returns what this rank has begun, oldest first."""
        path = self.folder / f"events-{self.number}.jsonl"
        if not path.exists():
            return []
        lines = path.read_text().splitlines(keepends=True)
        return [json.loads(line) for line in lines if line.endswith("\n")]

    def reap(self) -> None:
        if self.status is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.status = status

    def kill(self) -> None:
        if self.status is None:
            os.kill(self.pid, signal.SIGKILL)
            _, self.status = os.waitpid(self.pid, 0)


def main() -> None:
    """Serves jobs until stdin is closed."""
    limit_s = float(sys.argv[1])
    for module in sys.argv[2:]:
        importlib.import_module(module)
    alive_read, alive_write = os.pipe()
    job: Job | None = None
    for line in iter(sys.stdin.readline, ""):
        job = Job.parse(line)
        ranks = [_fork(job, rank, (alive_read, alive_write)) for rank in range(job.world_size)]
        try:
            outcome = _supervise(ranks, limit_s)
        finally:
            for rank in ranks:
                rank.kill()
        if outcome is None:
            break
        print(outcome.line(), flush=True)
    if job is not None:  # stdin is closed: who would have removed its files is dead
        shutil.rmtree(Path(job.folder).parent, ignore_errors=True)


def _fork(job: Job, rank: int, alive: tuple[int, int]) -> _Rank:
    sys.stdout.flush()
    pid = os.fork()
    if pid:
        return _Rank(rank, pid, Path(job.folder))
    code = 1
    try:
        os.close(alive[1])
        threading.Thread(target=_end_with_parent, args=(alive[0],), daemon=True).start()
        _redirect(Path(job.folder) / f"log-{rank}.txt")
        serve(job, rank)
        code = 0
    except BaseException as error:  # noqa: BLE001 - whatever ends a rank is the report's business
        how = CONTRACT if isinstance(error, ContractError) else "raised"
        text = str(error) if how == CONTRACT else traceback.format_exc()
        path = Path(job.folder) / f"error-{rank}.json"
        path.with_suffix(".part").write_text(json.dumps({"how": how, "text": text}))
        path.with_suffix(".part").rename(path)
    finally:
        sys.stdout.flush()
        os._exit(code)


def _end_with_parent(alive: int) -> None:
    os.read(alive, 1)
    os._exit(1)


def _redirect(log: Path) -> None:
    """Sends the output of a rank and its libraries to a file, and closes the jobs' stdin."""
    opened = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(opened, 1)
    os.dup2(opened, 2)


# Supervision --------------------------------------------------------------------------------------


def _supervise(ranks: list[_Rank], limit_s: float) -> Outcome | None:
    """Waits until all ranks are done, one has failed, or none has made progress.

    Returns:
        How they ended; None if stdin was closed meanwhile.
    """
    seen, since = -1, time.monotonic()
    failed_at: float | None = None
    while True:
        for rank in ranks:
            rank.reap()
        if all(rank.status == 0 for rank in ranks):
            return Outcome("done")
        if failed_at is None and any(rank.status for rank in ranks):
            failed_at = time.monotonic()
        over = failed_at is not None and time.monotonic() > failed_at + AFTERMATH_S
        if over or all(rank.status is not None for rank in ranks):
            return _failure(ranks)
        begun = sum(_size(rank) for rank in ranks)
        if begun != seen:
            seen, since = begun, time.monotonic()
        if time.monotonic() > since + limit_s:
            return _hang(ranks, limit_s)
        if select.select([sys.stdin], [], [], POLL_S)[0]:
            return None  # nobody sends a second job before the first is done: it is closed


def _size(rank: _Rank) -> int:
    path = rank.folder / f"events-{rank.number}.jsonl"
    return path.stat().st_size if path.exists() else 0


def _failure(ranks: list[_Rank]) -> Outcome:
    """Returns the first rank that reported a cause, not one that only lost its connection to it."""
    failed = [rank for rank in ranks if rank.status]
    said = {rank.number: _error(rank) for rank in failed}
    cause = min(failed, key=lambda rank: _is_consequence(said[rank.number]))
    error = said[cause.number]
    how, text = ("died", _death(cause)) if error is None else (error["how"], error["text"])
    return _outcome(how, cause, ranks, text)


def _is_consequence(error: dict[str, str] | None) -> int:
    if error is None:
        return 0  # killed by a signal, or exited: the rest follows from it
    lost = ("Connection closed by peer", "Connection reset by peer", "Broken pipe")
    return 2 if any(words in error["text"] for words in lost) else 1


def _error(rank: _Rank) -> dict[str, str] | None:
    path = rank.folder / f"error-{rank.number}.json"
    return json.loads(path.read_text()) if path.exists() else None


def _death(rank: _Rank) -> str:
    assert rank.status is not None
    if os.WIFSIGNALED(rank.status):
        how = f"signal {signal.Signals(os.WTERMSIG(rank.status)).name}"
    else:
        how = f"exit code {os.WEXITSTATUS(rank.status)}"
    log = rank.folder / f"log-{rank.number}.txt"
    tail = log.read_text(errors="replace")[-1500:].strip() if log.exists() else ""
    return f"the process ended with {how} without an error message{': ' + tail if tail else ''}"


def _hang(ranks: list[_Rank], limit_s: float) -> Outcome:
    """Returns the rank outside any collective or behind all others, with everybody's stacks."""
    running = [rank for rank in ranks if rank.status is None]
    stacks = {rank.number: _stacks(rank) for rank in running}
    behind = min(
        running, key=lambda rank: (_in_collective(stacks[rank.number]), len(rank.events()))
    )
    where = next((line for line in stacks[behind.number].splitlines() if "File" in line), "")
    words = "\n".join(f"rank {number} is at\n{stack}" for number, stack in stacks.items())
    text = f"no progress for {limit_s:g} s; it is at {where.strip()}\n{words}"
    return _outcome("hangs", behind, ranks, text)


def _in_collective(stack: str) -> bool:
    innermost = next((line for line in stack.splitlines() if "File" in line), "")
    return "/torch/distributed/" in innermost


def _stacks(rank: _Rank) -> str:
    path = rank.folder / f"stacks-{rank.number}.txt"
    if not path.exists():
        return "(not started yet)"
    os.kill(rank.pid, signal.SIGUSR1)
    deadline = time.monotonic() + 5
    while not path.read_text().count("File") and time.monotonic() < deadline:
        time.sleep(POLL_S)
    time.sleep(POLL_S)  # one more line every moment, and nothing says which is the last
    return "\n".join(path.read_text().splitlines()[:16])


def _outcome(how: str, cause: _Rank, ranks: list[_Rank], text: str) -> Outcome:
    events = cause.events()
    scene = next((event["scene"] for event in reversed(events) if "scene" in event), None)
    others = tuple((rank.number, _doing(rank)) for rank in ranks if rank.number != cause.number)
    return Outcome(how, cause.number, _stage(events), scene, text, others)


def _doing(rank: _Rank) -> str:
    return "done" if rank.status == 0 else _stage(rank.events())


def _stage(events: list[dict[str, Any]]) -> str:
    names = {"scene": "forward", "played": "after a scene"}
    stage = events[-1]["stage"] if events else "start"
    return names.get(stage, stage)


if __name__ == "__main__":
    main()
