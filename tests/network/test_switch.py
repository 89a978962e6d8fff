"""The pretended network itself: what is kept back, lost or cut, and that nothing of it is left."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from jobs import wait_for

from tests.network.nodes import ROOT, Network

PORT = 5000
RECEIVE = """
import socket, sys
receiver = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
receiver.setsockopt(socket.SOL_SOCKET, 33, 16 << 20)  # SO_RCVBUFFORCE: nothing is lost here
receiver.bind(("", int(sys.argv[1])))
print("bound", flush=True)
told = []
while (datagram := receiver.recv(2000)) != b"end":
    told.append(datagram.decode())
print(*told, flush=True)
"""
SEND = """
import socket, sys
address, port, *words = sys.argv[1:]
sender = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
for word in words:
    sender.sendto(word.encode(), (address, int(port)))
"""
HOLD = """
import subprocess, sys, time
from tests.network.nodes import network
with network(2) as machines:
    sleeper = subprocess.Popen(machines.command(1, "sleep", "1000"))
    print(machines.folder, *machines.pids, sleeper.pid, flush=True)
    time.sleep(1000)
"""


class Receiver:
    """Collects the datagrams that reach a machine until one says "end"."""

    def __init__(self, net: Network, node: int, port: int = PORT) -> None:
        self.net, self.node, self.port = net, node, port
        self._process = listen(net, node, RECEIVE, port)

    def send(self, source: int, *words: str) -> None:
        address = self.net.addresses[self.node]
        sent = self.net.run(source, *python(SEND), address, str(self.port), *words)
        assert sent.returncode == 0, sent.stderr

    def end(self) -> list[str]:
        """Returns what has come; the wires must be whole again."""
        self.send((self.node + 1) % 3, "end")
        told, _ = self._process.communicate(timeout=60)
        return told.split()


def python(program: str) -> list[str]:
    return [sys.executable, "-S", "-c", program]


def listen(net: Network, node: int, program: str, port: int) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        net.command(node, *python(program), str(port)), stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "bound\n"
    return process


def test_a_machine_has_a_name_an_address_processes_and_memory_of_its_own(net, tmp_path):
    look = "hostname; ls /dev/shm; ls -d /proc/[0-9]* | wc -l; ip -brief address"
    net.run(1, "touch", "/dev/shm/mine")
    told = net.run(2, "sh", "-c", look).stdout.split()
    assert told[0] == "node2"
    assert int(told[1]) < 10, "not the processes of this machine"
    assert "10.77.0.3/24" in told
    assert net.run(1, "ls", "/dev/shm").stdout == "mine\n"
    net.run(1, "touch", str(tmp_path / "shared"))
    assert (tmp_path / "shared").exists(), "the file system is everybody's"


def test_a_machine_that_is_cut_off_hears_nobody_until_it_is_healed(net):
    first, second = Receiver(net, 1), Receiver(net, 2)
    net.cut(1)
    first.send(0, "lost")
    second.send(1, "lost-too")
    second.send(0, "heard")
    wait_for(lambda: net.wire(0, 1)["refused"] and net.wire(1, 2)["refused"], what="the datagrams")
    net.heal(1)
    first.send(0, "again")
    assert first.end() == ["again"]
    assert second.end() == ["heard"]


@pytest.mark.usefixtures("net")
def test_of_a_test_that_was_killed_nothing_is_left():
    with subprocess.Popen(
        [sys.executable, "-c", HOLD],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        stdout=subprocess.PIPE,
        text=True,
    ) as holder:
        assert holder.stdout is not None
        folder, *pids = holder.stdout.readline().split()
        assert all(psutil.pid_exists(int(pid)) for pid in pids)
        os.kill(holder.pid, signal.SIGKILL)
    wait_for(lambda: not any(psutil.pid_exists(int(pid)) for pid in pids), what="their end")
    assert Path(folder).exists()
    from tests.network.nodes import network

    with network(1):
        assert not Path(folder).exists(), "the next one sweeps the folder"
