"""Tests the files that users copy for Slurm and KubeRay: their commands are ours, and the script works."""

import os
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from jobs import wait_for

from moebius.cli.arguments import resolve_config
from moebius.cli.main import parse
from moebius.train.config.run_config import Config

ROOT = Path(__file__).parents[3]

# On two "nodes". As Slurm does, `srun` ends its tasks when it is told to end.
STAND_INS = {
    "scontrol": "printf 'node-a\\nnode-b\\n'",
    "srun": "trap 'kill $(jobs -p); wait' TERM\n"
    'for node in 0 1; do SLURM_NODEID=$node bash -c "${@: -1}" & done; wait',
    "ray": 'case $1 in health-check) test -e "$STATE/head";;\n'
    '  start) echo "$RAY_AUTH_MODE ${#RAY_AUTH_TOKEN} $*" >> "$STATE/started"\n'
    '    case $2 in --head) touch "$STATE/head";; esac; exec sleep 30;; esac',
    "moebius": 'echo "$@" > "$STATE/words.part"; mv "$STATE/words.part" "$STATE/words"\n'
    "trap 'exit 75' TERM; while true; do sleep 0.1; done",
}


def configuration(words: list[str]) -> Config:
    """Returns what a command asks for, read by our own parser."""
    options = parse(words)
    config = resolve_config(options.name, options.overrides)
    config.check_world(config.world_size)
    return config


def start(tmp_path: Path, stand_ins: dict[str, str]) -> subprocess.Popen[str]:
    """Starts the script as Slurm would, with stand-ins for commands."""
    for folder in ("bin", "venv/bin"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "venv" / "bin" / "activate").touch()
    for name, body in stand_ins.items():
        (tmp_path / "bin" / name).write_text(f"#!/bin/bash\n{body}\n")
        (tmp_path / "bin" / name).chmod(0o755)
    own = {
        "PATH": f"{tmp_path / 'bin'}:{Path(sys.executable).parent}:{os.environ['PATH']}",
        "STATE": str(tmp_path),
        "SLURM_JOB_ID": "1234567",
        "SLURM_JOB_NODELIST": "node-[a-b]",
        "SLURM_NNODES": "2",
        "SLURM_CPUS_PER_TASK": "8",
    }
    script = (ROOT / "examples" / "slurm.sbatch").read_text().replace("/shared", str(tmp_path))
    return subprocess.Popen(
        ["bash", "-c", script],
        env=os.environ | own,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def await_end(tmp_path: Path, running: subprocess.Popen[str]) -> str:
    """Returns the script's output, once nothing that it started is left."""
    said, _ = running.communicate(timeout=120)
    wait_for(lambda: not processes_of(tmp_path), what="Ray to be gone")
    return said


def processes_of(tmp_path: Path) -> list[int]:
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("STATE") == str(tmp_path):
                found.append(process.pid)
        except (OSError, psutil.Error):
            continue
    return found


@pytest.mark.skipif(not shutil.which("bash"), reason="there is no bash here")
def test_the_script_runs_the_job_on_ray_and_passes_slurms_warning_on(tmp_path):
    running = start(tmp_path, STAND_INS)
    wait_for((tmp_path / "words").exists, what="the job")
    running.send_signal(signal.SIGTERM)  # to the script alone, as Slurm does
    said = await_end(tmp_path, running)
    assert running.returncode == 75, said
    head = f"node-a:{20000 + 1234567 % 12000}"
    worker, first = sorted((tmp_path / "started").read_text().splitlines(), key=len)
    assert worker.startswith(f"token 64 start --address={head} --block")
    assert first.startswith(f"token 64 start --head --port={head.partition(':')[2]}")
    words = (tmp_path / "words").read_text().split()
    assert words[-4:] == ["--address", head, "--run-dir", "runs/night"]
    job = configuration(words).job
    assert (job.num_nodes, job.ranks_per_node) == (2, 8)


LOOK = """
import sys, time
from moebius.cluster.places.ray_session import connected
with connected(sys.argv[sys.argv.index("--address") + 1]) as ray:
    while len([node for node in ray.nodes() if node["Alive"]]) < 2:
        time.sleep(0.2)
    print("both nodes", ray.cluster_resources()["CPU"])
"""


@pytest.mark.nightly
def test_the_script_starts_real_ray_with_a_token(tmp_path, monkeypatch):
    """Only Slurm and the job are stand-ins; Ray runs two nodes on this machine."""
    pytest.importorskip("ray")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    (tmp_path / "look.py").write_text(LOOK)
    own = {"scontrol": "echo 127.0.0.1", "moebius": 'exec python "$STATE/look.py" "$@"'}
    running = start(tmp_path, {"srun": STAND_INS["srun"]} | own)
    said = await_end(tmp_path, running)
    assert "both nodes 16.0" in said, said
    assert running.returncode == 0, said


def test_the_manifest_fits_its_own_command_and_the_image():
    yaml = pytest.importorskip("yaml")
    spec = yaml.safe_load((ROOT / "examples" / "kuberay.yaml").read_text())["spec"]
    program, *words = shlex.split(spec["entrypoint"])
    assert program == "moebius"
    job = configuration(words).job
    cluster = spec["rayClusterSpec"]
    [ranks] = cluster["workerGroupSpecs"]
    sizes = {ranks[key] for key in ("replicas", "minReplicas", "maxReplicas")}
    assert sizes == {job.num_nodes}
    [container] = ranks["template"]["spec"]["containers"]
    assert int(container["resources"]["limits"]["nvidia.com/gpu"]) == job.ranks_per_node
    pins = (ROOT / "constraints.txt").read_text().splitlines()
    assert f"ray=={cluster['rayVersion']}" in pins
    assert cluster["authOptions"] == {"mode": "token"}
    assert spec["backoffLimit"] == 0
