"""Tests the KubeRay manifest against KubeRay's own schema and rules (rayjob_schema.py)."""

import json
import re
from dataclasses import replace
from typing import Any

import pytest

from moebius.cluster.job import JobError
from moebius.cluster.places.kuberay import (
    KubeRaySettings,
    kuberay_manifest,
    object_name,
)
from moebius.train.config.resolve import resolve
from moebius.train.config.run_config import Config
from moebius.train.recipes.smoke import RECIPES
from tests.cluster.places.rayjob_schema import CONFIG_MAP, RAY_JOB, schema_faults

yaml = pytest.importorskip("yaml")


def config(*overrides: str) -> Config:
    return resolve("smoke", overrides, RECIPES)


SETTINGS = KubeRaySettings(image="registry.example/moebius:0.1", claim="runs", ray_version="2.60.0")


def documents(*overrides: str, settings: KubeRaySettings = SETTINGS) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(kuberay_manifest(config(*overrides), settings)))


@pytest.mark.parametrize(
    "settings",
    [SETTINGS, replace(SETTINGS, token_secret="mine", queue="q", mount="/a/b", run_dir="/a/b/c")],
)
@pytest.mark.parametrize("overrides", [(), ("train.device=cpu",)])
def test_the_manifest_is_what_kuberay_takes(settings, overrides):
    config_map, ray_job = documents(*overrides, settings=settings)
    assert schema_faults(config_map, CONFIG_MAP) == []
    assert schema_faults(ray_job, RAY_JOB) == []


@pytest.mark.parametrize("version", ["", "2.51.1", "2.60", "latest", "2.60.0; x"])
def test_a_version_of_ray_without_tokens_is_refused(version):
    with pytest.raises(JobError, match=r"^ray_version .* at least 2\.52\.0"):
        kuberay_manifest(config(), replace(SETTINGS, ray_version=version))


def test_nodes_gpus_and_restarts_are_the_jobs():
    _, ray_job = documents("job.num_nodes=3", "job.ranks_per_node=8", "train.micro_batch=1",
                           "train.global_batch=48", "train.device=auto")  # fmt: skip
    spec = ray_job["spec"]
    workers = spec["rayClusterSpec"]["workerGroupSpecs"][0]
    assert (workers["replicas"], workers["minReplicas"], workers["maxReplicas"]) == (3, 3, 3)
    limits = workers["template"]["spec"]["containers"][0]["resources"]["limits"]
    assert limits == {"cpu": "32", "memory": "64Gi", "nvidia.com/gpu": "8"}
    assert (spec["backoffLimit"], spec["suspend"]) == (0, False)
    assert spec["rayClusterSpec"]["headGroupSpec"]["rayStartParams"] == {"num-cpus": "0"}
    assert "gpu" not in json.dumps(documents("train.device=cpu")[1])


def test_a_queue_suspends_the_job_and_a_secret_is_named():
    settings = replace(SETTINGS, token_secret="mine", queue="team-a")
    _, ray_job = documents(settings=settings)
    assert ray_job["spec"]["suspend"] is True
    assert ray_job["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "team-a"
    auth = ray_job["spec"]["rayClusterSpec"]["authOptions"]
    assert auth == {"mode": "token", "secretName": "mine"}


HOSTILE = ["a; rm -rf ~", "$(id)", "`id`", "a\nb", "' \"", "--- {a: b}", "!!python/object:os", "*x"]


@pytest.mark.parametrize("text", HOSTILE)
def test_hostile_values_of_the_configuration_are_data_and_nothing_else(text):
    """They appear only in the ConfigMap's text, and are unchanged there."""
    override = f"prepare.input={json.dumps([text])}"
    config_map, ray_job = documents(override)
    assert json.loads(config_map["data"]["config.json"])["prepare"]["input"] == [text]
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
    with pytest.raises(JobError, match=f"^{'--run-dir' if field == 'run_dir' else field} "):
        kuberay_manifest(config(), settings)


def test_names_of_jobs_as_kubernetes_takes_them():
    assert object_name("My_Run.2") == "my-run-2"
    for wrong in ("x" * 41, "run-", "a..-", "2nd-run"):
        with pytest.raises(JobError, match=r"job\.name"):
            object_name(wrong)
