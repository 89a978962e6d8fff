"""Ray's own job API runs our entry point: `ray job submit -- moebius submit … --address auto`.

Needs Ray's job server, which is in the extra `dashboard` and not in `test`: skipped without it.
"""

import os
import secrets
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from jobs import FAKE_RANK, wait_for

from moebius.cluster.job import State, read_status
from moebius.cluster.nodes import processes
from moebius.cluster.places.simulated import new_directory

RAY = [sys.executable, "-c", "import sys; from ray.scripts.scripts import main; sys.exit(main())"]
ENTRY = """
import sys
from pathlib import Path
from moebius.cluster.submit import submit
from moebius.train.config.resolve import resolve
from moebius.train.recipes.smoke import RECIPES
words = ["job.num_nodes=1", "job.ranks_per_node=1", "mesh.ep=1", "mesh.dp_replicate=1", "train.device=cpu",
         "prepare.tokenizer=bytes", "prepare.vocab_size=257", "model.vocab_size=257", "train.steps=5",
         "prepare.input=['" + sys.argv[2] + "']",
         "data.directory=" + sys.argv[3], "job.rehearse_failure_at_step=none", "checkpoint.every=5"]
config = resolve("smoke", words, RECIPES)
command = (sys.executable, sys.argv[4], sys.argv[1], "plain=1", "steps=5")
sys.exit(submit(config, Path(sys.argv[1]), address="auto", command=command).exit_code)
"""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def run_ray(environment: dict[str, str], *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*RAY, *words], env=environment, capture_output=True, text=True, timeout=120, check=False
    )


@pytest.mark.slow
def test_a_job_through_rays_job_api(tmp_path: Path) -> None:
    pytest.importorskip("ray")
    pytest.importorskip("aiohttp_cors", reason="the job server needs moebius[dashboard]")
    directory, port, jobs = new_directory(), free_port(), free_port()
    environment = os.environ | {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
        "RAY_TMPDIR": str(directory),
        "RAY_USAGE_STATS_ENABLED": "0",
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    start = ["start", "--head", "--block", f"--port={port}", "--num-cpus=2"]
    start += ["--node-ip-address=127.0.0.2", "--dashboard-host=127.0.0.1"]
    start += [f"--dashboard-port={jobs}", f"--temp-dir={directory}"]
    with open(tmp_path / "head.log", "w") as log:
        head = subprocess.Popen([*RAY, *start], env=environment, stdout=log, stderr=log)
    at = ["--address", f"http://127.0.0.1:{jobs}"]
    try:
        wait_for(
            lambda: run_ray(environment, "job", "list", *at).returncode == 0, what="the job server"
        )
        (tmp_path / "entry.py").write_text(ENTRY)
        (tmp_path / "text.txt").write_text("the band closes upon itself\n" * 2000)
        words = [
            sys.executable,
            *(str(tmp_path / name) for name in ("entry.py", "run", "text.txt")),
        ]
        words += [str(tmp_path / "data"), str(FAKE_RANK)]
        submit = ["job", "submit", *at, "--submission-id", "night", "--", *words]
        said = run_ray(environment, *submit)
        if "RemoteDisconnected" in said.stderr:  # the job server is young: it took nothing up
            said = run_ray(environment, *submit)
        assert said.returncode == 0, said.stdout + said.stderr + (tmp_path / "head.log").read_text()
        assert "SUCCEEDED: finished at step 5" in said.stdout
        assert read_status(tmp_path / "run").state is State.SUCCEEDED
        assert "night" in run_ray(environment, "job", "list", *at).stdout
        stranger = environment | {"RAY_AUTH_TOKEN": "0" * 64}
        assert run_ray(stranger, "job", "list", *at).returncode != 0
    finally:
        processes.end([*processes.descendants(head.pid), head.pid])
        head.wait()
        shutil.rmtree(directory, ignore_errors=True)
