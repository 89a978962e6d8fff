"""A job as KubeRay's manifest.

The published CRD is in no package of PyPI, so it cannot be fetched by a test. What is checked is
the structure below, written down by hand from KubeRay's documented API (ray.io/v1, release 1.5, and
1.6 for `secretName`): every field's name and kind, and nothing that is not listed.
"""

import json
import re
from dataclasses import replace
from typing import Any

import pytest

from moebius.cluster.job import JobError
from moebius.cluster.places.kuberay import (
    KubeRaySettings,
    kuberay_manifest,
    kuberay_objects,
    object_name,
)
from moebius.train.config import Config, resolve
from moebius.train.recipes.smoke import RECIPES

yaml = pytest.importorskip("yaml")

AMOUNTS = {"cpu": str, "memory": str, "nvidia.com/gpu": str}
CONTAINER = {
    "name": str,
    "image": str,
    "resources": {"requests": AMOUNTS, "limits": AMOUNTS},
    "securityContext": {
        "allowPrivilegeEscalation": bool,
        "capabilities": {"drop": [str]},
        "runAsNonRoot": bool,
    },
    "volumeMounts": [{"name": str, "mountPath": str, "readOnly": bool}],
}
TEMPLATE = {
    "metadata": {"labels": {"*": str}},
    "spec": {
        "securityContext": {"runAsUser": int, "runAsGroup": int, "fsGroup": int},
        "containers": [CONTAINER],
        "volumes": [
            {
                "name": str,
                "persistentVolumeClaim": {"claimName": str},
                "configMap": {"name": str},
                "emptyDir": {"medium": str},
            }
        ],
    },
}
RAY_JOB = {
    "apiVersion": "ray.io/v1",
    "kind": "RayJob",
    "metadata": {"name": str, "labels": {"*": str}},
    "spec": {
        "entrypoint": str,
        "backoffLimit": int,
        "suspend": bool,
        "shutdownAfterJobFinishes": bool,
        "ttlSecondsAfterFinished": int,
        "rayClusterSpec": {
            "authOptions": {"mode": str, "secretName": str},
            "headGroupSpec": {"rayStartParams": {"*": str}, "template": TEMPLATE},
            "workerGroupSpecs": [
                {
                    "groupName": str,
                    "replicas": int,
                    "minReplicas": int,
                    "maxReplicas": int,
                    "rayStartParams": {"*": str},
                    "template": TEMPLATE,
                }
            ],
        },
    },
}
CONFIG_MAP = {
    "apiVersion": "v1",
    "kind": "ConfigMap",
    "metadata": {"name": str, "labels": {"*": str}},
    "data": {"config.json": str},
}
# Optional in the structures above; all else must be there.
OPTIONAL = {
    *("secretName", "readOnly", "nvidia.com/gpu"),
    *("persistentVolumeClaim", "configMap", "emptyDir"),
}


def faults(value: Any, shape: Any, where: str = "") -> list[str]:
    """What differs from the documented structure."""
    if isinstance(shape, type):
        fits = type(value) is shape
        return [] if fits else [f"{where}: {value!r} is no {shape.__name__}"]
    if isinstance(shape, str):
        return [] if value == shape else [f"{where}: {value!r} is not {shape!r}"]
    if isinstance(shape, list):
        if not isinstance(value, list) or not value:
            return [f"{where}: {value!r} is no list"]
        return [fault for item in value for fault in faults(item, shape[0], f"{where}[]")]
    if not isinstance(value, dict):
        return [f"{where}: {value!r} is no object"]
    if "*" in shape:
        return [
            fault for key in value for fault in faults(value[key], shape["*"], f"{where}.{key}")
        ]
    found = [f"{where}.{key}: unknown" for key in value.keys() - shape.keys()]
    found += [f"{where}.{key}: missing" for key in shape.keys() - value.keys() - OPTIONAL]
    for key in value.keys() & shape.keys():
        found += faults(value[key], shape[key], f"{where}.{key}")
    return found


def config(*overrides: str) -> Config:
    return resolve("smoke", overrides, RECIPES)


SETTINGS = KubeRaySettings(image="registry.example/moebius:0.1", claim="runs")


def documents(*overrides: str, settings: KubeRaySettings = SETTINGS) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(kuberay_manifest(config(*overrides), settings)))


@pytest.mark.parametrize(
    "settings",
    [SETTINGS, KubeRaySettings(image="m", claim="c", token_secret="mine", queue="q", mount="/a/b")],
)
def test_the_manifest_has_the_documented_structure(settings):
    config_map, ray_job = documents(settings=settings)
    assert faults(config_map, CONFIG_MAP) == []
    assert faults(ray_job, RAY_JOB) == []
    assert [config_map, ray_job] == kuberay_objects(config(), settings)


def test_the_structural_check_can_fail():
    _, ray_job = documents()
    spec = ray_job["spec"]
    spec["backofLimit"] = spec.pop("backoffLimit")
    spec["rayClusterSpec"]["headGroupSpec"]["rayStartParams"]["num-cpus"] = 0
    spec["rayClusterSpec"]["workerGroupSpecs"][0]["replicas"] = True
    assert sorted(faults(ray_job, RAY_JOB)) == [
        ".spec.backofLimit: unknown",
        ".spec.backoffLimit: missing",
        ".spec.rayClusterSpec.headGroupSpec.rayStartParams.num-cpus: 0 is no str",
        ".spec.rayClusterSpec.workerGroupSpecs[].replicas: True is no int",
    ]


def test_nodes_gpus_and_restarts_are_the_jobs():
    _, ray_job = documents("job.num_nodes=3", "job.ranks_per_node=8", "train.micro_batch=1",
                           "train.global_batch=48")  # fmt: skip
    spec = ray_job["spec"]
    workers = spec["rayClusterSpec"]["workerGroupSpecs"][0]
    assert (workers["replicas"], workers["minReplicas"], workers["maxReplicas"]) == (3, 3, 3)
    limits = workers["template"]["spec"]["containers"][0]["resources"]["limits"]
    assert limits == {"cpu": "32", "memory": "64Gi", "nvidia.com/gpu": "8"}
    assert (spec["backoffLimit"], spec["suspend"]) == (0, False)
    assert spec["rayClusterSpec"]["headGroupSpec"]["rayStartParams"] == {"num-cpus": "0"}


def test_a_job_on_processors_asks_for_no_gpus():
    _, ray_job = documents("train.device=cpu")
    assert "gpu" not in json.dumps(ray_job)


def test_a_queue_suspends_the_job_and_a_secret_is_named():
    settings = KubeRaySettings(image="m", claim="c", token_secret="mine", queue="team-a")
    _, ray_job = documents(settings=settings)
    assert ray_job["spec"]["suspend"] is True
    assert ray_job["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "team-a"
    auth = ray_job["spec"]["rayClusterSpec"]["authOptions"]
    assert auth == {"mode": "token", "secretName": "mine"}


HOSTILE = ["a; rm -rf ~", "$(id)", "`id`", "a\nb", "' \"", "--- {a: b}", "!!python/object:os", "*x"]


@pytest.mark.parametrize("text", HOSTILE)
def test_hostile_values_of_the_configuration_are_data_and_nothing_else(text):
    """Wherever they come from, they are in the ConfigMap's text only, and come back as they were."""
    override = f"data.input={json.dumps([text])}"
    config_map, ray_job = documents(override)
    assert json.loads(config_map["data"]["config.json"])["data"]["input"] == [text]
    assert re.fullmatch(r"[A-Za-z0-9_./ -]+", ray_job["spec"]["entrypoint"])
    assert documents()[1] == ray_job


@pytest.mark.parametrize("text", [*HOSTILE, "", "../up", "-x", "a b"])
@pytest.mark.parametrize(
    "field",
    ["image", "claim", "mount", "run_dir", "memory_per_node", "token_secret", "queue"],
)
def test_hostile_settings_are_refused(field, text):
    settings = replace(SETTINGS, **{field: text})
    if field == "run_dir" and text == "":
        return  # as if none were given
    with pytest.raises(JobError, match=f"^--{field.replace('_', '-')} "):
        kuberay_manifest(config(), settings)


def test_names_of_jobs_as_kubernetes_takes_them():
    assert object_name("My_Run.2") == "my-run-2"
    for wrong in ("x" * 41, "run-", "a..-"):
        with pytest.raises(JobError, match=r"job\.name"):
            object_name(wrong)
