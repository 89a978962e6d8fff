"""Describes what KubeRay accepts as a RayJob, as a JSON schema of the fields that we write.

It follows KubeRay's sources for ray.io/v1 (`rayjob_types.go`, `raycluster_types.go` and the operator's
`validation.go`, release 1.6, read on 22 November 2026) and Kubernetes' core/v1. Like `kubectl apply`, it
refuses unknown fields.
"""

from typing import Any

from jsonschema import Draft202012Validator

Schema = dict[str, Any]

TEXT: Schema = {"type": "string"}
WORD: Schema = {"type": "string", "minLength": 1}
FLAG: Schema = {"type": "boolean"}
INT32: Schema = {"type": "integer", "minimum": -(2**31), "maximum": 2**31 - 1}
COUNT: Schema = {"type": "integer", "minimum": 0, "maximum": 2**31 - 1}
TEXTS: Schema = {"type": "object", "additionalProperties": TEXT}
QUANTITY: Schema = {
    "type": "string",
    "pattern": r"^[+-]?([0-9]+(\.[0-9]*)?|\.[0-9]+)([KMGTPE]i|[numkMGTPE]|[eE][+-]?[0-9]+)?$",
}
AMOUNTS: Schema = {"type": "object", "additionalProperties": QUANTITY}


def listed(items: Schema) -> Schema:
    return {"type": "array", "items": items, "minItems": 1}


def fields(required: str = "", /, **properties: Schema) -> Schema:
    """Returns the schema of an object with these fields only."""
    return {
        "type": "object",
        "properties": properties,
        "required": required.split(),
        "additionalProperties": False,
    }


CONTAINER = fields(
    "name",
    name=WORD,
    image=WORD,
    resources=fields(requests=AMOUNTS, limits=AMOUNTS),
    securityContext=fields(
        allowPrivilegeEscalation=FLAG, capabilities=fields(drop=listed(TEXT)), runAsNonRoot=FLAG
    ),
    volumeMounts=listed(fields("name mountPath", name=WORD, mountPath=WORD, readOnly=FLAG)),
)
VOLUME = fields(
    "name",
    name=WORD,
    persistentVolumeClaim=fields("claimName", claimName=WORD),
    configMap=fields(name=WORD),
    emptyDir=fields(medium={"enum": ["", "Memory"]}),
)
POD_TEMPLATE = fields(
    metadata=fields(labels=TEXTS),
    spec=fields(
        "containers",
        containers=listed(CONTAINER),
        securityContext=fields(runAsUser=INT32, runAsGroup=INT32, fsGroup=INT32),
        volumes=listed(VOLUME),
    ),
)
RAY_CLUSTER_SPEC = fields(
    "headGroupSpec authOptions rayVersion",  # the operator: no tokens without a version
    rayVersion={"type": "string", "pattern": r"^\d+\.\d+\.\d+"},
    authOptions=fields(mode={"enum": ["disabled", "token"]}, secretName=TEXT),
    headGroupSpec=fields("template", rayStartParams=TEXTS, template=POD_TEMPLATE),
    workerGroupSpecs=listed(
        fields(
            "groupName maxReplicas minReplicas template",
            groupName=WORD,
            replicas=COUNT,
            minReplicas=COUNT,
            maxReplicas=COUNT,
            rayStartParams=TEXTS,
            template=POD_TEMPLATE,
        )
    ),
)
METADATA = fields(
    "name",
    # 47: KubeRay adds up to eleven characters to derived names, which must stay below 63
    name={"type": "string", "pattern": "^[a-z]([-a-z0-9]*[a-z0-9])?$", "maxLength": 47},
    labels={
        "type": "object",
        "propertyNames": {"pattern": r"^([a-z0-9.-]+/)?[A-Za-z0-9]([A-Za-z0-9_.-]*[A-Za-z0-9])?$"},
        "additionalProperties": {
            "type": "string",
            "pattern": "^([A-Za-z0-9]([A-Za-z0-9_.-]*[A-Za-z0-9])?)?$",
            "maxLength": 63,
        },
    },
)
RAY_JOB = fields(
    "apiVersion kind metadata spec",
    apiVersion={"const": "ray.io/v1"},
    kind={"const": "RayJob"},
    metadata=METADATA,
    spec=fields(
        "rayClusterSpec",
        entrypoint=TEXT,
        backoffLimit=COUNT,
        suspend=FLAG,
        # the operator requires this for a suspended job and for a time to live
        shutdownAfterJobFinishes={"const": True},
        ttlSecondsAfterFinished=COUNT,
        rayClusterSpec=RAY_CLUSTER_SPEC,
    ),
)
CONFIG_MAP = fields(
    "apiVersion kind metadata",
    apiVersion={"const": "v1"},
    kind={"const": "ConfigMap"},
    metadata=METADATA,
    data=TEXTS,
)


def schema_faults(document: Any, schema: Schema) -> list[str]:
    """Returns what the schema refuses: where, and why."""
    errors = sorted(Draft202012Validator(schema).iter_errors(document), key=lambda e: e.json_path)
    return [f"{error.json_path}: {error.message}" for error in errors]
