"""Writes a job as a manifest for KubeRay: a ConfigMap with its configuration, and a RayJob that runs it.

The RayJob starts a Ray cluster whose head runs `moebius submit … --address auto`, and ends it with the job.
The RayJob is not retried, because our supervisor restarts what fails. The configuration is a file and not on
the command line, which would pass through YAML, a pod's shell, Ray's job API and another shell. Names, paths
and values on the command line may contain only letters, digits and a few signs that need no quoting anywhere.

The fields are those of ray.io/v1 in KubeRay 1.6, and so are the operator's rules beyond the schema
(tests/cluster/places/rayjob_schema.py). No cluster has run it yet.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import PurePosixPath
from string import Template
from textwrap import indent
from typing import Any

from ...train.config.run_config import Config
from ..job import JobError

LEAST_RAY = (2, 52)  # the first version with tokens; the operator refuses older or missing versions
MAX_LABEL = 40  # KubeRay appends to a job's name, and Kubernetes allows 63

# No value has characters that YAML would need to escape; quotes keep it from reading numbers or booleans.
_MANIFEST = Template("""\
apiVersion: v1
kind: ConfigMap
metadata: {name: "$name-config", labels: {$labels}}
data:
  config.json: |
$config
---
apiVersion: ray.io/v1
kind: RayJob
metadata: {name: "$name", labels: {$labels$queue}}
spec:
  entrypoint: "moebius submit /etc/moebius/config.json --address auto --run-dir $run_dir"
  backoffLimit: 0
  suspend: $suspend
  shutdownAfterJobFinishes: true
  ttlSecondsAfterFinished: 600
  rayClusterSpec:
    rayVersion: "$ray_version"
    authOptions: {mode: token$secret}
    headGroupSpec:
      rayStartParams: {num-cpus: "0"}  # it holds the supervisor and no ranks
      template:
$head
    workerGroupSpecs:
      - groupName: ranks
        replicas: $num_nodes
        minReplicas: $num_nodes
        maxReplicas: $num_nodes
        rayStartParams: {}
        template:
$worker
""")
_POD = Template("""\
metadata: {labels: {$labels}}
spec:
  securityContext: {runAsUser: 1000, runAsGroup: 1000, fsGroup: 1000}  # the user of the image
  containers:
    - name: ray-$role
      image: "$image"
      resources: {requests: {$amounts}, limits: {$amounts}}
      securityContext:
        allowPrivilegeEscalation: false
        capabilities: {drop: [ALL]}
        runAsNonRoot: true
      volumeMounts:
        - {name: runs, mountPath: "$mount"}
        - {name: config, mountPath: /etc/moebius, readOnly: true}
        - {name: shared-memory, mountPath: /dev/shm}
  volumes:
    - {name: runs, persistentVolumeClaim: {claimName: "$claim"}}
    - {name: config, configMap: {name: "$name-config"}}
    - {name: shared-memory, emptyDir: {medium: Memory}}""")

_WORD = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.,:@/+%=-]*")
_PATH = re.compile(r"/[A-Za-z0-9_.,:@/+-]*")
_DNS_LABEL = re.compile(r"[a-z0-9]([a-z0-9-]*[a-z0-9])?")
_QUANTITY = re.compile(r"[1-9][0-9]*(Ki|Mi|Gi|Ti|K|M|G|T)?")


@dataclass(frozen=True)
class KubeRaySettings:
    """Holds what a Kubernetes cluster needs beyond the configuration."""

    image: str
    claim: str  # of a ReadWriteMany volume
    ray_version: str  # of the image
    mount: str = "/runs"  # of the volume; holds the run folder and the data
    run_dir: str | None = None  # None: below `mount`, named after the job
    cpus_per_rank: int = 4
    memory_per_node: str = "64Gi"
    token_secret: str | None = None  # None: the operator creates a token
    queue: str | None = None  # of Kueue, which admits the suspended job

    @classmethod
    def of(cls, values: Mapping[str, Any], *, run_dir: str | None = None) -> "KubeRaySettings":
        """Returns settings that were given by name.

        Raises:
            JobError: a setting is unknown, missing, or contains signs that would need quoting.
        """
        known = [field.name for field in fields(cls) if field.name != "run_dir"]
        if unknown := sorted(values.keys() - known):
            raise JobError(
                f"--with {unknown[0]!r}: not a key of --emit kuberay, which takes "
                f"{', '.join(known)}"
            )
        for name in ("image", "claim"):
            if not values.get(name):
                raise JobError(f"--emit kuberay needs --with {name}=…")
        settings = cls(**values, run_dir=run_dir)
        settings.check()
        return settings

    def check(self) -> None:
        """Raises JobError if a setting contains signs that would need quoting."""
        plain_word("image", self.image)
        _check_ray_version(self.ray_version)
        dns_label("claim", self.claim)
        plain_path("mount", self.mount)
        if not _QUANTITY.fullmatch(self.memory_per_node):
            raise JobError(
                f"memory_per_node {self.memory_per_node!r}: must be a number with a unit, such "
                "as 64Gi"
            )
        for what, name in (("token_secret", self.token_secret), ("queue", self.queue)):
            if name is not None:
                dns_label(what, name)


def kuberay_manifest(config: Config, settings: KubeRaySettings) -> str:
    """Returns a job's manifest as YAML with two documents.

    Raises:
        JobError: a name or a path contains signs that would need quoting.
    """
    settings.check()
    name, job = object_name(config.job.name), config.job
    run_dir = plain_path("--run-dir", settings.run_dir or f"{settings.mount}/{name}")
    saved = json.dumps(config.model_dump(mode="json"), indent=1)
    gpus = gpus_per_node(config)
    own = {
        "name": name,
        "labels": f'app.kubernetes.io/name: moebius, app.kubernetes.io/instance: "{name}"',
        "image": settings.image,
        "claim": settings.claim,
        "mount": settings.mount,
    }
    amounts = f'cpu: "{job.ranks_per_node * settings.cpus_per_rank}", memory: "{settings.memory_per_node}"'
    amounts += f', nvidia.com/gpu: "{gpus}"' if gpus else ""
    head = _POD.substitute(own, role="head", amounts='cpu: "2", memory: 8Gi')
    worker = _POD.substitute(own, role="worker", amounts=amounts)
    queue, secret = settings.queue, settings.token_secret
    return _MANIFEST.substitute(
        own,
        config=indent(saved, " " * 4),
        queue=f', kueue.x-k8s.io/queue-name: "{queue}"' if queue else "",
        suspend="true" if queue else "false",
        run_dir=run_dir,
        ray_version=settings.ray_version,
        secret=f', secretName: "{secret}"' if secret else "",
        num_nodes=job.num_nodes,
        head=indent(head, " " * 8),
        worker=indent(worker, " " * 10),
    )


def object_name(job_name: str) -> str:
    """Returns a job's name in KubeRay's form: "my_Run.2" becomes "my-run-2".

    Raises:
        JobError: the name does not fit. KubeRay names a Service after the job, so it must begin with a
            letter.
    """
    name = dns_label("job.name", job_name.lower().replace("_", "-").replace(".", "-"))
    if not name[0].isalpha():
        raise JobError(f"job.name {job_name!r}: must begin with a letter for KubeRay")
    return name


def gpus_per_node(config: Config) -> int:
    """Returns the GPUs per node: one per rank, or none with train.device=cpu."""
    return 0 if config.train.device == "cpu" else config.job.ranks_per_node


def _check_ray_version(version: str) -> None:
    match = re.fullmatch(r"(\d+)\.(\d+)\.\d+", version)
    if match is None or (int(match[1]), int(match[2])) < LEAST_RAY:
        least = ".".join(map(str, LEAST_RAY))
        raise JobError(
            f"ray_version {version!r}: must be the Ray version of the image, such as 2.60.0, and "
            f"at least {least}.0, the first with token authentication"
        )


def plain_word(what: str, value: str) -> str:
    """Returns a word that needs no quoting in a shell, YAML or sbatch, or raises JobError."""
    if not _WORD.fullmatch(value):
        raise JobError(f"{what} {value!r}: only letters, digits and _ . , : @ / + % = -")
    return value


def plain_path(what: str, value: str) -> str:
    """Returns an absolute path that needs no quoting and has no "..", or raises JobError."""
    if not _PATH.fullmatch(value) or ".." in PurePosixPath(value).parts:
        raise JobError(
            f"{what} {value!r}: must be an absolute path of letters, digits and _ . , : @ + -"
        )
    return value


def dns_label(what: str, value: str) -> str:
    """Returns a valid name of a Kubernetes object, or raises JobError."""
    if len(value) > MAX_LABEL or not _DNS_LABEL.fullmatch(value):
        raise JobError(
            f"{what} {value!r}: must be at most {MAX_LABEL} lower-case letters, digits and '-', "
            "and begin and end with a letter or digit"
        )
    return value
