"""Writes a job as an sbatch script for Slurm: Ray on all nodes of the allocation, the job on the first.

The script contains the configuration in a quoted here-document, which no shell interprets. #SBATCH lines have
no quoting, so their values must be plain words; paths are quoted by shlex. A requeued script submits the same
run folder, so it continues from the newest checkpoint.

It has not run under Slurm: bash and shellcheck check it, and tests run it with stand-ins for srun and
scontrol.
"""

import json
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from string import Template
from typing import Any

from ...plugins import nearest
from ...train.config.run_config import Config
from ..job import JobError
from .kuberay import gpus_per_node, plain_word

END_OF_CONFIG = "END_OF_THE_CONFIGURATION"
WARNED_S = 300  # before the time limit, the job is asked to stop with a checkpoint

_OURS = ("job-name", "nodes", "ntasks-per-node", "cpus-per-task", "gpus-per-node")

# sbatch's options with a value; sbatch itself would refuse others only when the script is submitted.
_OPTIONS = """
account acctg-freq array batch bb bbf begin chdir cluster-constraint clusters comment constraint
container container-id core-spec cores-per-socket cpu-freq cpus-per-gpu deadline delay-boot
dependency distribution error exclude exclusive export export-file extra extra-node-info
get-user-env gid gpu-bind gpu-freq gpus gpus-per-socket gpus-per-task gres gres-flags hint input
kill-on-invalid-dep licenses mail-type mail-user mcs-label mem mem-bind mem-per-cpu mem-per-gpu
mincpus network nice nodefile nodelist ntasks ntasks-per-core ntasks-per-gpu ntasks-per-socket
open-mode output partition power prefer priority profile propagate qos reservation resv-ports
segment signal sockets-per-node switches thread-spec threads-per-core time time-min tmp tres-bind
tres-per-task uid wait-all-nodes wckey
"""

_SCRIPT = Template("""\
#!/bin/bash
$directives
set -euo pipefail
umask 077
$activate
run_dir=$run_dir
nodes=$num_nodes

# A token of this job's own: whoever does not have it is refused by Ray. srun passes the
# environment on; files on the nodes hold nothing.
export RAY_AUTH_MODE=token
RAY_AUTH_TOKEN=$$(python -c 'import secrets; print(secrets.token_hex(32))')
export RAY_AUTH_TOKEN
unset RAY_AUTH_TOKEN_PATH RAY_ADDRESS
export RAY_USAGE_STATS_ENABLED=0

head=$$(scontrol show hostnames "$$SLURM_JOB_NODELIST" | sed -n 1p)
port=$$((20000 + SLURM_JOB_ID % 12000))
export MOEBIUS_HEAD="$$head:$$port" MOEBIUS_PORT="$$port"
scratch=$$(mktemp -d)
# Ours alone, and short: socket paths must stay under 108 characters.
RAY_SESSION=$$(mktemp -d /tmp/ray-XXXXXX)
export RAY_SESSION
config="$$scratch/config.json"
cat > "$$config" <<'$end'
$config
$end

# Ray on every node: the head on the first one, where this script runs.
# shellcheck disable=SC2016 # what is quoted is for the nodes
srun --nodes="$$nodes" --ntasks="$$nodes" --ntasks-per-node=1 \\
    --cpus-per-task="$$SLURM_CPUS_PER_TASK" bash -c '
    common=(--block --disable-usage-stats --num-cpus="$$SLURM_CPUS_PER_TASK" --num-gpus=$gpus)
    if [ "$$SLURM_NODEID" -eq 0 ]; then
        exec ray start --head --port="$$MOEBIUS_PORT" --include-dashboard=false \\
            --temp-dir="$$RAY_SESSION" "$${common[@]}"
    fi
    for _ in $$(seq 60); do
        ray health-check --address "$$MOEBIUS_HEAD" && break
        sleep 1
    done
    exec ray start --address="$$MOEBIUS_HEAD" "$${common[@]}"
' &
ray=$$!
end_ray() { kill "$$ray" 2> /dev/null || true; wait "$$ray" || true; rm -rf "$$scratch" "$$RAY_SESSION"; }
trap end_ray EXIT

for _ in $$(seq 120); do
    ray health-check --address "$$MOEBIUS_HEAD" && break
    kill -0 "$$ray" # Ray has ended: so do we
    sleep 1
done

# A warning means a stop at a step boundary, with a checkpoint; even one that comes just now.
job='' warned=''
trap 'if [ -n "$$job" ]; then kill -TERM "$$job"; else warned=1; fi' TERM INT
moebius submit "$$config" --address "$$MOEBIUS_HEAD" --run-dir "$$run_dir" &
job=$$!
if [ -n "$$warned" ]; then kill -TERM "$$job"; fi
code=0
wait "$$job" || code=$$?
while kill -0 "$$job" 2> /dev/null; do
    code=0
    wait "$$job" || code=$$?
done
exit "$$code"
""")


@dataclass(frozen=True)
class SlurmSettings:
    """Holds what Slurm needs beyond the configuration."""

    run_dir: str  # absolute, on a file system that all nodes see
    cpus_per_rank: int = 4
    venv: str | None = None  # a virtual environment on every node
    options: Mapping[str, str] = field(default_factory=dict)  # of sbatch: partition, time, account

    @classmethod
    def of(cls, values: Mapping[str, Any], *, run_dir: str) -> "SlurmSettings":
        """Returns settings that were given by name; unknown names are options of sbatch.

        Raises:
            JobError: a name is no option, a value would need quoting, or the configuration sets it.
        """
        own = {key: values[key] for key in ("cpus_per_rank", "venv") if key in values}
        options = {key: value for key, value in values.items() if key not in own}
        for key, value in options.items():
            if key in _OURS:
                raise JobError(f"sbatch's {key} comes from the configuration (job.…)")
            if key not in (known := _OPTIONS.split()):
                hint = nearest(key, known) or "; give for example partition=gpu"
                raise JobError(f"--with {key}: {key!r} is not an sbatch option{hint}")
            plain_word(f"sbatch's {key}", value)
        return cls(run_dir, options=options, **own)


def slurm_script(config: Config, settings: SlurmSettings) -> str:
    """Returns a job's sbatch script.

    Raises:
        JobError: a value would need quoting.
    """
    text = json.dumps(config.model_dump(mode="json"), indent=1)
    assert END_OF_CONFIG not in text.splitlines(), "lines of JSON begin with a sign"
    venv = settings.venv
    return _SCRIPT.substitute(
        directives="\n".join(_directives(config, settings)),
        activate=f"source {_quoted('venv', f'{venv}/bin/activate')}" if venv else "",
        run_dir=_quoted("--run-dir", settings.run_dir),
        num_nodes=config.job.num_nodes,
        gpus=gpus_per_node(config),
        config=text,
        end=END_OF_CONFIG,
    )


def _directives(config: Config, settings: SlurmSettings) -> list[str]:
    job = config.job
    ours = {
        "job-name": plain_word("job.name", job.name),
        "nodes": str(job.num_nodes),
        "ntasks-per-node": "1",
        "cpus-per-task": str(job.ranks_per_node * settings.cpus_per_rank),
    }
    if gpus := gpus_per_node(config):
        ours |= {"gpus-per-node": str(gpus)}
    usual = {"output": "%x-%j.log", "open-mode": "append", "signal": f"B:TERM@{WARNED_S}"}
    directives = ours | usual | dict(settings.options)
    return [f"#SBATCH --{key}={value}" for key, value in directives.items()]


def _quoted(what: str, path: str) -> str:
    if not path.isprintable():
        raise JobError(f"{what} {path!r}: contains unprintable characters")
    return shlex.quote(path)
