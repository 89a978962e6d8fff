"""Tests the Slurm script: with bash and shellcheck, and with stand-ins for Slurm and Ray."""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from jobs import wait_for

from moebius.cluster.job import JobError
from moebius.cluster.places.slurm import SlurmSettings, slurm_script
from moebius.train.config.resolve import resolve
from moebius.train.config.run_config import Config
from moebius.train.recipes.smoke import RECIPES

pytestmark = pytest.mark.skipif(not shutil.which("bash"), reason="there is no bash here")

HOSTILE = "a; touch pwned $(touch pwned) `touch pwned` 'q' \"d\" \\ END_OF_THE_CONFIGURATION"


def config(*overrides: str) -> Config:
    return resolve("smoke", ["job.num_nodes=2", *overrides], RECIPES)


def check(script: str) -> None:
    subprocess.run(["bash", "-n"], input=script, text=True, check=True, capture_output=True)
    shellcheck = shutil.which(
        "shellcheck", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    )
    if shellcheck is not None:
        command = [
            shellcheck,
            "--shell=bash",
            "--severity=style",
            "--exclude=SC1091,SC2016,SC2329",
            "-",
        ]
        found = subprocess.run(command, input=script, text=True, capture_output=True, check=False)
        assert found.returncode == 0, found.stdout


@pytest.mark.parametrize(
    "settings",
    [
        SlurmSettings("/runs/a"),
        SlurmSettings(f"/runs/{HOSTILE}", venv=f"/opt/{HOSTILE}"),
        SlurmSettings("/runs/a", options={"partition": "gpu", "time": "1-00:00:00"}),
    ],
)
def test_bash_and_shellcheck_have_nothing_to_say(settings):
    check(slurm_script(config(), settings))


def directives(script: str) -> dict[str, str]:
    lines = [line for line in script.splitlines() if line.startswith("#SBATCH --")]
    return dict(line.removeprefix("#SBATCH --").split("=", 1) for line in lines)


def test_what_slurm_is_asked_for():
    script = slurm_script(
        config("job.ranks_per_node=4", "job.name=mine", "train.micro_batch=1", "train.device=auto"),
        SlurmSettings("/runs/a", cpus_per_rank=6, options={"partition": "gpu", "output": "o.log"}),
    )
    assert directives(script) == {
        "job-name": "mine",
        "nodes": "2",
        "ntasks-per-node": "1",
        "cpus-per-task": "24",
        "gpus-per-node": "4",
        "output": "o.log",
        "open-mode": "append",
        "signal": "B:TERM@300",
        "partition": "gpu",
    }
    assert "gpus-per-node" not in directives(
        slurm_script(config("train.device=cpu"), SlurmSettings("/runs/a"))
    )


@pytest.mark.parametrize(
    ("key", "value"),
    [("", "gpu"), ("partition", ""), ("partition", "a b"), ("partition", "$(id)"),
     ("time", "1;id"), ("a\nb", "c"), ("nodes", "9"), ("job-name", "x"),
     ("partition", "a\n#SBATCH --uid=0")],
)  # fmt: skip
def test_options_of_sbatch_that_are_refused(key, value):
    with pytest.raises(JobError, match="sbatch"):
        SlurmSettings.of({key: value}, run_dir="/runs/a")


def test_paths_that_cannot_be_printed_are_refused():
    with pytest.raises(JobError, match="--run-dir"):
        slurm_script(config(), SlurmSettings("/runs/a\n#SBATCH --uid=0"))


# The command on two "nodes". As Slurm does, it asks the tasks to end when it is told to, and kills
# all that they have started and that is still there after a while (KillWait).
SRUN = """
import os, signal, subprocess, sys, time

def living():
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            state = open(f"/proc/{pid}/stat").read().rpartition(")")[2].split()[0]
            if os.getsid(int(pid)) in sessions and state != "Z":
                found.append(int(pid))
        except OSError:
            pass  # it has ended meanwhile
    return found

def end(*_):
    for task in tasks:
        task.terminate()
    deadline = time.monotonic() + 10
    while living() and time.monotonic() < deadline:
        [task.poll() for task in tasks]
        time.sleep(0.05)
    while left := living():
        for pid in left:
            os.kill(pid, signal.SIGKILL)
    sys.exit(143)

tasks, sessions = [], []
signal.signal(signal.SIGTERM, end)
for node in "01":
    environment = os.environ | {"SLURM_NODEID": node}
    command = ["bash", "-c", sys.argv[1]]
    tasks.append(subprocess.Popen(command, env=environment, start_new_session=True))
    sessions.append(tasks[-1].pid)
for task in tasks:
    task.wait()
"""

STAND_INS = {
    "scontrol": "printf 'node-a\\nnode-b\\n'",
    "srun": 'exec python "$STATE/srun.py" "${@: -1}"',
    "ray": 'case $1 in\n  health-check) test -e "$STATE/head";;\n'
    '  start) echo "$RAY_AUTH_MODE ${#RAY_AUTH_TOKEN} $*" >> "$STATE/ray"\n'
    '    case $2 in --head) touch "$STATE/head";; esac\n    exec sleep 30;;\nesac',
    "moebius": 'printf "%s\\n" "$@" > "$STATE/arguments.part"\ncp "$2" "$STATE/config.json"\n'
    "trap 'echo stopped > \"$STATE/stopped\"; exit 0' TERM\n"
    'mv "$STATE/arguments.part" "$STATE/arguments"\n'
    'for _ in $(seq "${MOEBIUS_TICKS:-1}"); do sleep 0.1; done\nexit 7',
}


def start(
    tmp_path: Path,
    script: str,
    *,
    without: tuple[str, ...] = (),
    scontrol: str = STAND_INS["scontrol"],
    **environment: str,
) -> subprocess.Popen[str]:
    commands, state = tmp_path / "bin", tmp_path / "state"
    commands.mkdir()
    state.mkdir()
    (state / "srun.py").write_text(SRUN)
    bodies = STAND_INS | {"scontrol": scontrol}
    for name, body in bodies.items():
        if name in without:
            continue
        (commands / name).write_text(f"#!/bin/bash\n{body}\n")
        (commands / name).chmod(0o755)
    own = {
        "PATH": f"{commands}:{Path(sys.executable).parent}:{os.environ['PATH']}",
        "STATE": str(state),
        "TMPDIR": str(state),
        "SLURM_JOB_ID": "1234567",
        "SLURM_JOB_NODELIST": "node-[a-b]",
        "SLURM_CPUS_PER_TASK": "8",
    }
    return subprocess.Popen(
        ["bash", "-c", script],
        cwd=tmp_path,
        env=os.environ | own | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def test_the_script_runs_the_job_on_ray_and_ends_ray(tmp_path):
    asked = config(f"prepare.input={json.dumps([HOSTILE])}")
    running = start(tmp_path, slurm_script(asked, SlurmSettings(f"/runs/{HOSTILE}")))
    said, _ = running.communicate(timeout=120)
    assert running.returncode == 7, said
    state = tmp_path / "state"
    port = 20000 + 1234567 % 12000
    submit, _, *rest = (state / "arguments").read_text().splitlines()
    assert submit == "submit"
    assert rest == ["--address", f"node-a:{port}", "--run-dir", f"/runs/{HOSTILE}"]
    assert json.loads((state / "config.json").read_text()) == asked.model_dump(mode="json")
    started = sorted((state / "ray").read_text().splitlines(), key=lambda line: "--head" in line)
    assert [line.split()[:3] for line in started] == [["token", "64", "start"]] * 2
    assert f"--address=node-a:{port} --block" in started[0]
    assert f"--head --port={port}" in started[1]
    assert not list(tmp_path.rglob("pwned"))
    assert not [path for path in state.iterdir() if path.is_dir()], "the scratch folder is gone"
    wait_for(lambda: not processes_of(tmp_path), what="Ray to be gone")


def processes_of(tmp_path: Path) -> list[int]:
    """Returns live processes of a script and its children, by their environment."""
    import psutil

    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("STATE") == str(tmp_path / "state"):
                found.append(process.pid)
        except (OSError, psutil.Error):
            continue
    return found


def test_slurms_warning_stops_the_job_with_a_checkpoint(tmp_path):
    script = slurm_script(config(), SlurmSettings("/runs/a"))
    running = start(tmp_path, script, MOEBIUS_TICKS="200")
    wait_for((tmp_path / "state" / "arguments").exists, what="the job")
    running.send_signal(signal.SIGTERM)  # to the script alone, as Slurm does
    said, _ = running.communicate(timeout=120)
    assert running.returncode == 0, said
    assert (tmp_path / "state" / "stopped").exists()


LOOK = """
import sys, time
from moebius.cluster.places.ray_session import connected
with connected(sys.argv[1]) as ray:
    while len([node for node in ray.nodes() if node["Alive"]]) < 2:
        time.sleep(0.2)
    print("both nodes", ray.cluster_resources()["CPU"])
"""


@pytest.mark.nightly
def test_the_script_starts_real_ray_with_a_token(tmp_path):
    """Only Slurm and the job are stand-ins; Ray runs two nodes on this machine."""
    pytest.importorskip("ray")
    script = slurm_script(config("train.device=cpu"), SlurmSettings("/runs/a"))
    (tmp_path / "look.py").write_text(LOOK)
    running = start(
        tmp_path,
        script.replace("moebius submit", f"python {tmp_path}/look.py $MOEBIUS_HEAD; : "),
        without=("ray",),
        scontrol="echo 127.0.0.1",
        PYTHONPATH=os.pathsep.join(sys.path),
    )
    said, _ = running.communicate(timeout=120)
    assert "both nodes 16.0" in said, said
    assert running.returncode == 0, said
    wait_for(lambda: not processes_of(tmp_path), what="Ray to be gone")
