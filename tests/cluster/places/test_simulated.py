"""Tests the simulated cluster: it starts as asked, is protected, and leaves nothing behind."""

import json
import os
import shutil
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from jobs import wait_for

from moebius.cluster.job import JobError
from moebius.cluster.nodes import processes
from moebius.cluster.places.ray_session import connected
from moebius.cluster.places.simulated import await_address, simulated_cluster

pytest.importorskip("ray")

USER = """
import json, os, signal, sys, time
# a shell that starts the tests in the background lets them ignore it
signal.signal(signal.SIGINT, signal.default_int_handler)
from moebius.cluster.places.simulated import simulated_cluster
def use(cluster):
    import ray
    nodes = sorted((node["NodeManagerAddress"], node["Resources"]["CPU"]) for node in ray.nodes())
    @ray.remote
    def task(): return os.getpid()
    ray.get(task.remote())
    mode = os.stat(os.environ["RAY_AUTH_TOKEN_PATH"]).st_mode
    print(json.dumps({"nodes": nodes, "directory": str(cluster.directory), "host": cluster.host_pid, "mode": mode,
                      "address": cluster.address, "auth": os.environ["RAY_AUTH_MODE"]}), flush=True)
    time.sleep(100)

before = dict(os.environ)
try:
    with simulated_cluster(2, cpus_per_node=3) as cluster:
        use(cluster)
except KeyboardInterrupt:
    pass
assert dict(os.environ) == before, "the environment is as it was"
print("left", flush=True)
"""


def start_user(tmp_path: Path) -> tuple[subprocess.Popen[str], dict]:
    environment = os.environ | {"HOME": str(tmp_path), "RAY_ADDRESS": "10.255.255.1:1"}
    user = subprocess.Popen(
        [sys.executable, "-c", USER],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        start_new_session=True,
    )
    assert user.stdout is not None
    line = user.stdout.readline()
    if not line:
        raise AssertionError(user.communicate()[1])
    return user, json.loads(line)


@pytest.mark.slow
@pytest.mark.parametrize(
    "end", [signal.SIGINT, pytest.param(signal.SIGKILL, marks=pytest.mark.slow)]
)
def test_nothing_is_left_however_its_user_ends(tmp_path, end):
    user, told = start_user(tmp_path)
    everything = [told["host"], *processes.descendants(told["host"])]
    assert len(everything) > 8
    os.kill(user.pid, end)
    output, errors = user.communicate(timeout=100)
    wait_for(
        lambda: not [pid for pid in everything if Path(f"/proc/{pid}/exe").exists()],
        what="the cluster to be gone",
    )
    wait_for(lambda: not Path(told["directory"]).exists(), what="its directory to be gone")
    assert told["nodes"] == [["127.0.0.2", 3.0], ["127.0.0.3", 3.0]]
    assert (told["auth"], stat.S_IMODE(told["mode"])) == ("token", 0o600)
    assert list(tmp_path.iterdir()) == [], "nothing is written into the user's home"
    if end == signal.SIGINT:
        assert output == "left\n", errors


def test_a_cluster_that_does_not_come_up_is_an_error_with_rays_words():
    said = r"the simulated cluster could not be started; Ray's last output:\n[\s\S]*must be nonnegative"
    with pytest.raises(JobError, match=said):
        with simulated_cluster(1, cpus_per_node=-1):
            pass


HOST = """
import subprocess, sys, time
from moebius.cluster.places import host
def give_up(plan):
    print("started", file=sys.stderr, flush=True)
    subprocess.Popen(sys.argv[2:])
    time.sleep(0.2)
    raise Exception("The current node timed out during startup.")
host.PretendedNodes = give_up
host.serve(host.HostPlan(sys.argv[1], 1, [()]))
"""


@pytest.mark.parametrize(
    ("lives_s", "tries", "told"),
    [
        (
            "100",
            2,
            r"too busy or short of memory: enter .* or `moebius train`, which needs no Ray$",
        ),
        ("0", 1, r"could not be started; Ray's last output:\nTraceback[\s\S]*timed out"),
    ],
)
def test_nodes_that_are_slow_are_started_once_more_and_then_told_in_a_sentence(
    tmp_path, lives_s, tries, told
):
    """Unlike those whose server has crashed, about which Ray is silent, too."""
    (raylet := tmp_path / "raylet").symlink_to(shutil.which("sleep") or "")
    command = [sys.executable, "-c", HOST, str(tmp_path / "cluster"), str(raylet), lives_s]
    with (
        open(tmp_path / "log", "w") as log,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True) as host,
        pytest.raises(JobError, match=told),
    ):
        await_address(host, tmp_path)
    assert (tmp_path / "log").read_text().count("started\n") == tries


@pytest.mark.parametrize(
    ("address", "told"),
    [
        ("127.0.0.1:1", r"no Ray cluster answers at 127\.0\.0\.1:1 \(.*refused"),
        ("ray://host:10001", "must be host:port"),
        ("nonsense", "must be host:port"),
        ("head:ray", "must be host:port"),
    ],
)
def test_an_address_where_nobody_answers_is_found_out_at_once(address, told):
    with pytest.raises(JobError, match=told), connected(address):
        pass


STRANGER = """
import os, sys
from moebius.cluster.job import JobError
from moebius.cluster.places.ray_session import connected
try:
    with connected(sys.argv[1]):
        print("connected")
except JobError as error:
    print(error)
"""


@pytest.mark.fault("F27")
@pytest.mark.slow
@pytest.mark.parametrize(
    "credentials",
    [
        {},  # this process's own
        {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "0" * 64},
        {"RAY_AUTH_MODE": "disabled"},
    ],
    ids=["the token", "another token", "no token"],
)
def test_who_has_the_token_is_let_in_and_a_stranger_told_what_to_set(
    tmp_path, cluster, credentials
):
    hidden = ("RAY_AUTH",) if credentials else ()
    environment = {key: value for key, value in os.environ.items() if not key.startswith(hidden)}
    stranger = subprocess.run(
        [sys.executable, "-c", STRANGER, cluster.address],
        env=environment | credentials | {"HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    if not credentials:
        assert stranger.stdout == "connected\n", stranger.stderr
        return
    for told in (
        f"the Ray cluster at {cluster.address} refused our credentials",
        f"RAY_AUTH_MODE is {credentials['RAY_AUTH_MODE']}",
        "RAY_AUTH_TOKEN_PATH",
    ):
        assert told in stranger.stdout, stranger.stderr
