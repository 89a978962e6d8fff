"""What KubeRay takes for a RayJob, as a JSON schema and as the rules that its operator adds.

Written by us from facts that were read on 22 November 2026 in KubeRay's own sources for ray.io/v1
(`rayjob_types.go`, `raycluster_types.go` and the operator's `validation.go`, as of release 1.6; the
published CRD is made from the types): names of fields, their types, what is required, enumerations.
The pod template is Kubernetes' core/v1, whose schema the CRD repeats: of its thousands of fields
these are the ones that we write. A field that is not listed is refused, as `kubectl apply` does.
"""

import re
from typing import Any

from jsonschema import Draft202012Validator

Schema = dict[str, Any]

TEXT: Schema = {"type": "string"}
WORD: Schema = {"type": "string", "minLength": 1}
FLAG: Schema = {"type": "boolean"}
INT32: Schema = {"type": "integer", "minimum": -(2**31), "maximum": 2**31 - 1}
INT64: Schema = {"type": "integer"}
NUMBER: Schema = {"type": "number"}
TEXTS: Schema = {"type": "object", "additionalProperties": TEXT}
ANYTHING: Schema = {}  # of a field that we do not write
# resource.Quantity, an integer or a text of this form
QUANTITY: Schema = {
    "anyOf": [
        {"type": "integer"},
        {
            "type": "string",
            "pattern": r"^[+-]?([0-9]+(\.[0-9]*)?|\.[0-9]+)([KMGTPE]i|[numkMGTPE]|[eE][+-]?[0-9]+)?$",
        },
    ]
}


def listed(items: Schema, *, at_least: int = 0) -> Schema:
    return {"type": "array", "items": items, "minItems": at_least}


def one_of(*words: str) -> Schema:
    return {"enum": list(words)}


def fields(required: str = "", /, **properties: Schema) -> Schema:
    """An object with these fields and no others."""
    return {
        "type": "object",
        "properties": properties,
        "required": required.split(),
        "additionalProperties": False,
    }


# core/v1: what a pod of ours is made of ---------------------------------------------------------------

AMOUNTS: Schema = {"type": "object", "additionalProperties": QUANTITY}
CONTAINER = fields(
    "name",
    name=WORD,
    image=WORD,
    command=listed(TEXT),
    args=listed(TEXT),
    env=listed(fields("name", name=WORD, value=TEXT, valueFrom=ANYTHING)),
    resources=fields(requests=AMOUNTS, limits=AMOUNTS),
    securityContext=fields(
        allowPrivilegeEscalation=FLAG,
        capabilities=fields(add=listed(TEXT), drop=listed(TEXT)),
        privileged=FLAG,
        readOnlyRootFilesystem=FLAG,
        runAsGroup=INT64,
        runAsNonRoot=FLAG,
        runAsUser=INT64,
    ),
    volumeMounts=listed(
        fields("name mountPath", name=WORD, mountPath=WORD, readOnly=FLAG, subPath=TEXT)
    ),
)
VOLUME = fields(
    "name",
    name=WORD,
    persistentVolumeClaim=fields("claimName", claimName=WORD, readOnly=FLAG),
    configMap=fields(name=WORD, optional=FLAG),
    emptyDir=fields(medium=one_of("", "Memory"), sizeLimit=QUANTITY),
)
POD_TEMPLATE = fields(
    metadata=fields(labels=TEXTS, annotations=TEXTS),
    spec=fields(
        "containers",
        containers=listed(CONTAINER, at_least=1),
        nodeSelector=TEXTS,
        restartPolicy=one_of("Always", "OnFailure", "Never"),
        securityContext=fields(fsGroup=INT64, runAsGroup=INT64, runAsNonRoot=FLAG, runAsUser=INT64),
        tolerations=ANYTHING,
        volumes=listed(VOLUME),
    ),
)

# ray.io/v1 --------------------------------------------------------------------------------------------

HEAD_GROUP = fields(
    "template",
    enableIngress=FLAG,
    headService=ANYTHING,
    labels=TEXTS,
    rayStartParams=TEXTS,
    resources=TEXTS,
    serviceType=TEXT,
    template=POD_TEMPLATE,
)
WORKER_GROUP = fields(
    "groupName maxReplicas minReplicas template",
    groupName=WORD,
    idleTimeoutSeconds=INT32,
    labels=TEXTS,
    maxReplicas=INT32,
    minReplicas=INT32,
    numOfHosts=INT32,
    rayStartParams=TEXTS,
    replicas=INT32,
    resources=TEXTS,
    scaleStrategy=ANYTHING,
    suspend=FLAG,
    template=POD_TEMPLATE,
)
RAY_CLUSTER_SPEC = fields(
    "headGroupSpec",
    authOptions=fields(enableK8sTokenAuth=FLAG, mode=one_of("disabled", "token"), secretName=TEXT),
    autoscalerOptions=ANYTHING,
    enableInTreeAutoscaling=FLAG,
    gcsFaultToleranceOptions=ANYTHING,
    headGroupSpec=HEAD_GROUP,
    headServiceAnnotations=TEXTS,
    managedBy=one_of("ray.io/kuberay-operator", "kueue.x-k8s.io/multikueue"),
    rayVersion=TEXT,
    suspend=FLAG,
    upgradeStrategy=ANYTHING,
    workerGroupSpecs=listed(WORKER_GROUP),
)
RAY_JOB_SPEC = fields(
    activeDeadlineSeconds=INT32,
    backoffLimit=INT32,
    clusterSelector=TEXTS,
    deletionStrategy=ANYTHING,
    entrypoint=TEXT,
    entrypointNumCpus=NUMBER,
    entrypointNumGpus=NUMBER,
    entrypointResources=TEXT,
    jobId=TEXT,
    managedBy=one_of("ray.io/kuberay-operator", "kueue.x-k8s.io/multikueue"),
    metadata=TEXTS,
    rayClusterSpec=RAY_CLUSTER_SPEC,
    runtimeEnvYAML=TEXT,
    shutdownAfterJobFinishes=FLAG,
    submissionMode=one_of("K8sJobMode", "HTTPMode", "InteractiveMode", "SidecarMode"),
    submitterConfig=fields(backoffLimit=INT32),
    submitterPodTemplate=ANYTHING,
    suspend=FLAG,
    ttlSecondsAfterFinished=INT32,
)
METADATA = fields(
    "name",
    name={"type": "string", "pattern": "^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$", "maxLength": 253},
    namespace=WORD,
    labels={
        "type": "object",
        "propertyNames": {"pattern": r"^([a-z0-9.-]+/)?[A-Za-z0-9]([A-Za-z0-9_.-]*[A-Za-z0-9])?$"},
        "additionalProperties": {
            "type": "string",
            "pattern": "^([A-Za-z0-9]([A-Za-z0-9_.-]*[A-Za-z0-9])?)?$",
            "maxLength": 63,
        },
    },
    annotations=TEXTS,
)
RAY_JOB = fields(
    "apiVersion kind metadata spec",
    apiVersion={"const": "ray.io/v1"},
    kind={"const": "RayJob"},
    metadata=METADATA,
    spec=RAY_JOB_SPEC,
)
CONFIG_MAP = fields(
    "apiVersion kind metadata",
    apiVersion={"const": "v1"},
    kind={"const": "ConfigMap"},
    metadata=METADATA,
    data=TEXTS,
    immutable=FLAG,
)

_MAX_NAME = 47  # the cluster's name, which has six signs more and five behind, stays below 63
_LEAST_RAY_FOR_TOKENS = (2, 52, 0)


def schema_faults(document: Any, schema: Schema) -> list[str]:
    """What the schema refuses: where, and why."""
    Draft202012Validator.check_schema(schema)
    errors = sorted(Draft202012Validator(schema).iter_errors(document), key=lambda e: e.json_path)
    return [f"{error.json_path}: {error.message}" for error in errors]


def operator_faults(ray_job: dict[str, Any]) -> list[str]:
    """What the operator refuses although it fits the schema; the rules that can touch our fields."""
    spec, name = ray_job["spec"], ray_job["metadata"]["name"]
    cluster = spec.get("rayClusterSpec")
    found = []
    if len(name) > _MAX_NAME or not re.fullmatch("[a-z]([-a-z0-9]*[a-z0-9])?", name):
        found.append(f"name {name!r} is no DNS-1035 label of at most {_MAX_NAME} signs")
    if spec.get("suspend") and not spec.get("shutdownAfterJobFinishes"):
        found.append("suspend without shutdownAfterJobFinishes")
    if spec.get("ttlSecondsAfterFinished", 0) and not spec.get("shutdownAfterJobFinishes"):
        found.append("ttlSecondsAfterFinished without shutdownAfterJobFinishes")
    found += [
        f"{field} is below {least}"
        for field, least in (("backoffLimit", 0), ("ttlSecondsAfterFinished", 0))
        if spec.get(field, least) < least
    ]
    if cluster is None:
        return [*found, "no rayClusterSpec"]
    groups = [cluster["headGroupSpec"], *cluster.get("workerGroupSpecs", [])]
    counted = {"num-cpus", "num-gpus", "memory", "resources"}
    for group in groups:
        if group.get("resources") and counted & set(group.get("rayStartParams", {})):
            found.append("resources in two places")
        if "labels" in group.get("rayStartParams", {}):
            found.append("labels in rayStartParams")
    return found + _token_faults(cluster)


def _token_faults(cluster: dict[str, Any]) -> list[str]:
    options = cluster.get("authOptions")
    if options is None or options.get("mode", "token") != "token":
        return []
    version = cluster.get("rayVersion", "")
    match = re.match(r"(\d+)\.(\d+)\.(\d+)", version)
    if match is None:
        return [f"tokens need a rayVersion, got {version!r}"]
    if tuple(map(int, match.groups())) < _LEAST_RAY_FOR_TOKENS:
        return [f"tokens need Ray 2.52.0, got {version}"]
    return []
