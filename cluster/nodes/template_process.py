"""Controls a node's template (template.py): starts it, orders agents, receives their exit codes.

If forking is impossible (no Linux, a library with threads, an import that initialises a device), agents start
as programs, and their logs say why.
"""

import contextlib
import json
import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

from ..job import Launch, python_module
from . import processes

# a template that stands still for so long, instead of killing an agent, is killed
KILL_TIMEOUT_S = 10.0
_LOOK_S = 0.05

# OpenBLAS starts its threads when numpy is loaded; nothing here multiplies with numpy
_ONE_THREAD = {"OPENBLAS_NUM_THREADS": "1"}


class AgentProcess(Protocol):
    """Declares the methods of an agent's process that a node calls; subprocess.Popen has them."""

    def poll(self) -> int | None: ...
    def kill(self) -> None: ...
    def wait(self) -> int: ...


class Template:
    """Holds a template process and the agents that were ordered from it."""

    def __init__(self, launch: Launch, environment: Mapping[str, str], log: Path) -> None:
        """Starts the process; returns before it is ready.

        Args:
            launch: of its agents and ranks.
            environment: of agents and ranks, without their marks.
            log: for output of the imports.
        """
        self.refusal: str | None = None  # why it cannot fork, or how it ended
        self._exit_code: int | None = None  # 0: it refused
        self._agents: dict[int, OrderedAgent] = {}
        self._lock = threading.Lock()
        self._channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._kind = COMMAND if launch.command else TRAINING
        self._log = log
        started = threading.Event()
        # The kernel's parent-death signal follows the thread that forked.
        threading.Thread(
            target=self._hold,
            args=(theirs, dict(environment), started),
            name="template",
            daemon=True,
        ).start()
        started.wait()

    @property
    def has_not_ended(self) -> bool:
        """Returns whether the process is alive or has refused to fork."""
        return self._exit_code is None or self._exit_code == 0

    def order(
        self, log_dir: Path, generation: int, secret: str, *, otherwise: Callable[[], AgentProcess]
    ) -> "OrderedAgent":
        """Orders an agent; returns before the agent exists.

        Args:
            otherwise: starts the agent as a program if the template does not fork.
        """
        with self._lock:
            number = len(self._agents)
            agent = OrderedAgent(lambda: self._kill(number), otherwise)
            self._agents[number] = agent
            refusal = self.refusal
        if refusal is not None:
            agent.was_refused()
            return agent
        hear, tell = os.pipe()
        try:
            os.write(tell, secret.encode() + b"\n")
            order = json.dumps(asdict(Order(number, str(log_dir), generation)))
            socket.send_fds(self._channel, [order.encode()], [hear])
        except OSError:
            agent.was_refused()  # it has just ended
        finally:
            os.close(hear)
            os.close(tell)
        return agent

    def end(self) -> None:
        """Ends the template and its agents."""
        with contextlib.suppress(OSError):
            self._channel.shutdown(socket.SHUT_RDWR)
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def _kill(self, number: int) -> None:
        """Kills an agent, or takes its order back from a template that still imports."""
        agent, still_since, ran = self._agents[number], time.monotonic(), self._schedule()
        with contextlib.suppress(OSError):
            tell(self._channel, kill=number)
        while not agent.ended.wait(_LOOK_S):
            if (runs := self._schedule()) != ran:
                if agent.pid is None:  # the next generation needs what it imports
                    return agent.has_ended(-signal.SIGKILL)
                still_since, ran = time.monotonic(), runs
            elif time.monotonic() - still_since > KILL_TIMEOUT_S:
                return self.end()

    def _schedule(self) -> str:
        """Returns how long the process ran and waited for a CPU; a stuck one does neither."""
        assert self._process is not None
        with contextlib.suppress(OSError):
            return Path(f"/proc/{self._process.pid}/schedstat").read_text(encoding="ascii")
        return ""

    def _hold(
        self, theirs: socket.socket, environment: dict[str, str], started: threading.Event
    ) -> None:
        """Starts the process and receives its messages until it ends."""
        self._process: subprocess.Popen[bytes] | None = None
        try:
            self._process = self._start(theirs, environment)
        except OSError as error:
            self.refusal = f"the template cannot be started: {error}"
        finally:
            theirs.close()
            started.set()
        if self._process is None:
            return
        while message := self._hear():
            self._take(message)
        self._channel.close()
        code = self._process.wait()
        with self._lock:
            self._exit_code = code
            self.refusal = self.refusal or f"the template ended with exit code {code}"
            agents = list(self._agents.values())
        for agent in agents:
            agent.template_has_ended(code)

    def _start(self, theirs: socket.socket, environment: dict[str, str]) -> subprocess.Popen[bytes]:
        self._log.parent.mkdir(parents=True, exist_ok=True)
        command = python_module(f"{__package__}.template", str(theirs.fileno()), self._kind)
        with open(self._log, "ab") as log:
            return subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=_ONE_THREAD | environment,
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # Ctrl-C must reach only the command line
            )

    def _hear(self) -> dict[str, Any] | None:
        try:
            data = self._channel.recv(MAX_MESSAGE_BYTES)
        except OSError:
            return None
        return json.loads(data) if data else None

    def _take(self, message: dict[str, Any]) -> None:
        if "started" in message:
            self._agents[message["started"]].pid = message["pid"]
        elif "ended" in message:
            self._agents[message["ended"]].has_ended(message["code"])
        elif "refused" in message:
            with self._lock:
                self.refusal = message["refused"]


class OrderedAgent:
    """Holds an agent that was ordered from a template."""

    def __init__(self, kill: Callable[[], None], otherwise: Callable[[], AgentProcess]) -> None:
        """Takes functions that kill the fork, or start a program instead of it."""
        self.pid: int | None = None  # of the fork, once it exists
        self.ended = threading.Event()
        self._code: int | None = None
        self._kill, self._otherwise = kill, otherwise
        self._killed = False
        self._program: AgentProcess | None = None
        self._lock = threading.Lock()

    def poll(self) -> int | None:
        """Returns the exit code; None while it runs or has not started."""
        return self._code if self._program is None else self._program.poll()

    def kill(self) -> None:
        """Kills the agent, if it is still alive."""
        with self._lock:
            self._killed = True
            program = self._program
        if program is not None:
            program.kill()
        elif not self.ended.is_set():
            self._kill()

    def wait(self) -> int:
        """Waits for its end and returns the exit code."""
        if self._program is not None:
            return self._program.wait()
        self.ended.wait()
        assert self._code is not None
        return self._code

    def has_ended(self, code: int) -> None:
        """Records the exit code of an ended child."""
        self._code = code
        self.ended.set()

    def was_refused(self) -> None:
        """Starts the agent as a program, because the template will not fork it."""
        with self._lock:
            if self._killed:
                self.has_ended(-signal.SIGKILL)
            elif self._program is None:
                self._program = self._otherwise()

    def template_has_ended(self, code: int) -> None:
        """Handles the end of the template, which a forked agent shares."""
        if self.ended.is_set():
            return
        if self.pid is None:
            self.was_refused()
        else:
            self.has_ended(code)


def start_program(
    log_dir: Path, environment: Mapping[str, str], secret: str, *, why: str | None = None
) -> subprocess.Popen[bytes]:
    """Starts an agent as a program, from a thread that lives as long as the agent.

    The kernel's parent-death signal follows the thread that forked, and an actor's threads come and go.

    Args:
        log_dir: of the node in the generation.
        secret: of the generation, passed through a pipe.
        why: reason, for the agent's log, why no template forked it.
    """
    started: list[subprocess.Popen[bytes] | OSError] = []
    ready = threading.Event()

    def hold() -> None:
        try:
            child = _popen(log_dir, environment, why)
        except OSError as error:
            started.append(error)
            ready.set()
            return
        _tell_secret(child, secret)
        started.append(child)
        ready.set()
        child.wait()

    threading.Thread(target=hold, name="agent", daemon=True).start()
    ready.wait()
    if isinstance(started[0], OSError):
        raise started[0]
    return started[0]


def _popen(
    log_dir: Path, environment: Mapping[str, str], why: str | None
) -> subprocess.Popen[bytes]:
    with open(log_dir / "agent.log", "ab") as log:
        if why is not None:
            log.write(f"this agent is no fork of a template: {why}\n".encode())
            log.flush()
        return subprocess.Popen(
            python_module(f"{processes.__package__}.agent", str(log_dir)),
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=log,
            env=dict(environment),
            # Ctrl-C in a terminal must reach only the command line, which sets the stop flag
            start_new_session=True,
        )


def _tell_secret(child: subprocess.Popen[bytes], secret: str) -> None:
    """Passes the secret through a pipe: others can read files, and ranks inherit the environment."""
    assert child.stdin is not None
    with contextlib.suppress(BrokenPipeError), child.stdin as pipe:  # poll() reports why it ended
        pipe.write(secret.encode() + b"\n")


TRAINING = "training"  # the forks run the training loop
COMMAND = "command"  # the forks run the user's command
MAX_MESSAGE_BYTES = 64 << 10


@dataclass(frozen=True)
class Order:
    """Asks the template for an agent; the pipe with the generation's secret comes with it."""

    number: int  # counts this template's orders
    log_dir: str
    generation: int


def tell(channel: socket.socket, **message: object) -> None:
    """Sends any other message: one JSON object of the keyword arguments."""
    channel.send(json.dumps(message).encode())
