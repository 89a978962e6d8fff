"""A network of pretended machines: a switch, and a namespace for each machine that hangs on it.

    unshare --net python -m tests.network.switch FOLDER COUNT SEED     (nodes.py starts it)

Each machine has namespaces of its own for network, mounts, processes and host name, and one TAP
device with the address 10.77.0.(number + 1). The other end of each TAP is in this process, which
carries Ethernet frames between them. On the way it may keep a frame back, lose it by a seeded draw,
or let nothing pass: what `tc netem` does, on kernels that have no netem. A TAP hands over and takes
whole frames with their checksums, so there is no offload to be turned off.

It is told what to do by lines of JSON on its standard input and answers on its standard output.
When its input ends it ends, and when it ends, whatever the way, the kernel takes everything with it:
the machines' first processes are bound to it, a machine's processes die with its first, a namespace
goes with its last process, and a TAP with the descriptor that holds it. There is nothing to sweep.

Cost on one core: 15 µs for each frame; a frame arrives at most 1 ms after it is due.
"""

import fcntl
import heapq
import itertools
import json
import os
import random
import select
import struct
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from moebius.cluster.nodes.processes import bind_to_parent

INIT = Path(__file__).with_name("first_process.py")
PRIVATE = "own"  # below the folder: a file system of its own in each machine
READY_S = 20.0
_TUNSETIFF, _IFF_TAP_NO_PI = 0x400454CA, 0x1002
_MAX_FRAME = 65536
_FRAMES_AT_ONCE = 64  # of one port, before the others have their turn


def address_of(number: int) -> str:
    """Returns the address of a machine."""
    return f"10.77.0.{number + 1}"


def _hardware_address(number: int) -> bytes:
    return bytes((2, 0, 10, 77, 0, number + 1))


def _spelled(number: int) -> str:
    return _hardware_address(number).hex(":")


@dataclass
class Wire:
    """One direction between two machines: what becomes of its frames, and what has become of them."""

    draw: random.Random
    delay_s: float = 0.0
    loss: float = 0.0  # of each frame, independently
    is_cut: bool = False
    carried: int = 0
    lost: int = 0
    refused: int = 0  # because it was cut

    def takes(self) -> bool:
        """Whether the next frame gets through."""
        if self.is_cut:
            self.refused += 1
            return False
        if self.loss and self.draw.random() < self.loss:
            self.lost += 1
            return False
        self.carried += 1
        return True


@dataclass
class Wires:
    """All wires of a network."""

    count: int  # of machines
    seed: int = 0
    by_pair: dict[tuple[int, int], Wire] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Makes all wires new, counters and draws too."""
        for pair in itertools.permutations(range(self.count), 2):
            self.by_pair[pair] = Wire(random.Random(f"{self.seed} {pair}"))

    def set(self, nodes: Sequence[int], **values: float | bool) -> None:
        """Changes wires in both directions.

        Args:
            nodes: two machines: the wires between them; one: all that it has; none: all.
            values: fields of Wire.
        """
        for pair, wire in self.by_pair.items():
            if set(nodes) <= set(pair):
                for name, value in values.items():
                    setattr(wire, name, value)

    def describe(self) -> list[dict[str, Any]]:
        """Returns the counters of each wire."""
        return [
            {"from": pair[0], "to": pair[1]}
            | {name: getattr(wire, name) for name in ("carried", "lost", "refused")}
            for pair, wire in self.by_pair.items()
        ]


class Switch:
    """Carries frames between the machines' TAPs, as the wires let them."""

    def __init__(self, taps: Sequence[int], wires: Wires) -> None:
        self._taps, self._wires = taps, wires
        self._port_of = {_hardware_address(port): port for port in range(len(taps))}
        self._due: list[tuple[float, int, int, bytes]] = []
        self._count = itertools.count()  # frames that are due at once keep their order

    def serve(self, control: int) -> None:
        """Carries frames and answers requests until `control` ends."""
        epoll = select.epoll()
        for descriptor in (*self._taps, control):
            epoll.register(descriptor, select.EPOLLIN)
        ports = {tap: port for port, tap in enumerate(self._taps)}
        requests = _Lines(control)
        while True:
            ready = {descriptor for descriptor, _ in epoll.poll(self._wait_s())}
            for descriptor in ready & ports.keys():
                self._take_in(ports[descriptor])
            self._send_due()
            if control in ready:
                for line in requests.read():
                    print(json.dumps(self._answer(json.loads(line))), flush=True)
                if requests.has_ended:
                    return

    def _wait_s(self) -> float | None:
        return max(0.0, self._due[0][0] - time.monotonic()) if self._due else None

    def _take_in(self, port: int) -> None:
        for _ in range(_FRAMES_AT_ONCE):
            try:
                frame = os.read(self._taps[port], _MAX_FRAME)
            except BlockingIOError:
                return
            now_s = time.monotonic()
            for to in self._goals(port, frame[:6]):
                wire = self._wires.by_pair[port, to]
                if wire.takes():
                    item = (now_s + wire.delay_s, next(self._count), to, frame)
                    heapq.heappush(self._due, item)

    def _goals(self, port: int, hardware_address: bytes) -> Iterator[int]:
        known = self._port_of.get(hardware_address)
        if known is not None:
            yield from (known,) if known != port else ()
        elif hardware_address[0] & 1:  # of a group: all others
            yield from (to for to in range(len(self._taps)) if to != port)

    def _send_due(self) -> None:
        now_s = time.monotonic()
        while self._due and self._due[0][0] <= now_s:
            _, _, port, frame = heapq.heappop(self._due)
            try:
                os.write(self._taps[port], frame)
            except (BlockingIOError, OSError):  # the machine's queue is full, or it is down
                continue

    def _answer(self, request: Mapping[str, Any]) -> dict[str, Any]:
        match request["do"]:
            case "set":
                self._wires.set(request["nodes"], **request["values"])
            case "reset":
                self._wires.reset()
            case "wires":
                return {"wires": self._wires.describe()}
        return {}


class _Lines:
    """Reads whole lines from a descriptor that must not be waited for."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor, self._rest = descriptor, b""
        self.has_ended = False

    def read(self) -> list[bytes]:
        read = os.read(self._descriptor, _MAX_FRAME)
        self.has_ended = not read
        *lines, self._rest = (self._rest + read).split(b"\n")
        return lines


# Machines -----------------------------------------------------------------------------------------


class Machine:
    """The namespaces of one machine, held by its first process."""

    def __init__(self, number: int, count: int, folder: Path) -> None:
        """Starts machine `number` of `count` and connects it to the TAP `self.tap`."""
        self.tap = _open_tap(f"n{number}")
        command = ["unshare", "--net", "--mount", "--pid", "--uts", "--fork", "--kill-child"]
        command += ["--mount-proc", sys.executable, "-S", str(INIT)]
        self._holder = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            preexec_fn=bind_to_parent,
        )
        assert self._holder.stdout is not None
        if not self._holder.stdout.readline():
            raise OSError(f"the namespaces of machine {number} were refused")
        self.pid = self._first_process()
        _execute("ip", "link", "set", f"n{number}", "netns", str(self.pid))
        enter = ["nsenter", "--target", str(self.pid), "--net", "--mount", "--uts"]
        _execute(*enter, "sh", "-ec", _setup(number, count, folder))

    def _first_process(self) -> int:
        """The first process inside calls itself 1; here it is the only child of the holder."""
        held = Path(f"/proc/{self._holder.pid}/task/{self._holder.pid}/children")
        return int(held.read_text().split()[0])


def _setup(number: int, count: int, folder: Path) -> str:
    """Returns what a new machine does once: its network, its name, and file systems of its own.

    It knows the others' names and hardware addresses, so nothing needs to be asked.
    """
    tap = f"n{number}"
    others = [each for each in range(count) if each != number]
    hosts = folder / f"hosts{number}"
    # as Debian does it: the own name is on the loopback, which is the wrong place to listen
    names = {"127.0.0.1": "localhost", "127.0.1.1": f"node{number}"}
    names |= {address_of(each): f"node{each}" for each in others}
    hosts.write_text("".join(f"{address} {name}\n" for address, name in names.items()))
    neighbours = "\n".join(
        f"ip neighbour add {address_of(each)} lladdr {_spelled(each)} dev {tap} nud permanent"
        for each in others
    )
    return f"""
        hostname node{number}
        if [ -e /proc/sys/net/ipv6 ]; then echo 1 > /proc/sys/net/ipv6/conf/all/disable_ipv6; fi
        ip link set lo up
        ip link set {tap} address {_spelled(number)} txqueuelen 10000 up
        ip address add {address_of(number)}/24 dev {tap}
        {neighbours}
        mount -t tmpfs tmpfs /dev/shm
        mount -t tmpfs -o mode=700 tmpfs {folder / PRIVATE}
        mount --bind {hosts} /etc/hosts
    """


def _open_tap(name: str) -> int:
    descriptor = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    fcntl.ioctl(descriptor, _TUNSETIFF, struct.pack("16sH22x", name.encode(), _IFF_TAP_NO_PI))
    return descriptor


def _execute(*command: str) -> None:
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if done.returncode:
        raise OSError(f"{' '.join(command)}: {done.stderr.strip()}")


def main(folder: Path, count: int, seed: int) -> None:
    """Makes the machines, says the ids of their first processes, and carries their frames."""
    bind_to_parent()
    (folder / PRIVATE).mkdir()
    try:
        machines = [Machine(each, count, folder) for each in range(count)]
    except OSError as error:
        print(json.dumps({"error": str(error)}), flush=True)
        return
    print(json.dumps({"pids": [machine.pid for machine in machines]}), flush=True)
    Switch([machine.tap for machine in machines], Wires(count, seed)).serve(sys.stdin.fileno())


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
