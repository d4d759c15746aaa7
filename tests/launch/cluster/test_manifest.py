"""The JobSet fits the schemas of JobSet and of Kubernetes."""

from __future__ import annotations

import copy
import dataclasses

import jsonschema
import kubernetes_validate
import pytest
import yaml
from kubeflow_trainer_api.models.jobset_v1alpha2_job_set_spec import JobsetV1alpha2JobSetSpec

from aamoe_jax.config import ConfigError
from tests.launch.cluster.cases import CLUSTERS, JOB
from tests.launch.cluster.test_scripts import batch_scripts

GKE = CLUSTERS["gke"]
TWO = dataclasses.replace(GKE, slices=2)
MANIFESTS = {
    "run": GKE.manifest(JOB, ()),
    "elsewhere": GKE.manifest(JOB, ("pool-1", "pool-2")),
    "health": GKE.manifest(JOB, (), "health"),
    "two slices": TWO.manifest(JOB, ()),
    "in a queue": dataclasses.replace(GKE, queue="team-a").manifest(JOB, ()),
}


def closed(schema: dict) -> dict:
    """The schema, but a field that it does not name is an error: kubectl's own strictness."""
    schema = {
        key: [closed(item) if isinstance(item, dict) else item for item in value] if isinstance(value, list) else value
        for key, value in schema.items()
    }
    if "properties" in schema:
        schema["properties"] = {name: closed(value) for name, value in schema["properties"].items()}
        schema.setdefault("additionalProperties", False)
    if isinstance(schema.get("items"), dict):
        schema["items"] = closed(schema["items"])
    return schema


@pytest.fixture(scope="module")
def jobset_schema() -> jsonschema.Draft202012Validator:
    """Of Kubeflow's models of the API, which are made from the resource definition."""
    schema = closed(JobsetV1alpha2JobSetSpec.model_json_schema())
    schema["$defs"] = {name: closed(definition) for name, definition in schema["$defs"].items()}
    # What the definition has as an enumeration the models have in words, and quantities as an empty object.
    action = schema["$defs"]["JobsetV1alpha2FailurePolicyRule"]["properties"]["action"]
    action["enum"] = action["description"].partition("Valid values are ")[2].rstrip(".").split(", ")
    assert "FailJobSet" in action["enum"]
    schema["$defs"]["IoK8sApimachineryPkgApiResourceQuantity"] = {"type": "string"}
    return jsonschema.Draft202012Validator(schema)


def pod_job(manifest: dict) -> dict:
    """The Job that JobSet makes of a manifest."""
    spec = manifest["spec"]["replicatedJobs"][0]["template"]["spec"]
    return {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "mine"}, "spec": spec}


def test_several_slices_are_replicas_of_one_job():
    plain = (dataclasses.replace(cluster, xla_flags="none").manifest(JOB, ()) for cluster in (GKE, TWO))
    (one,), (two,) = (manifest["spec"]["replicatedJobs"] for manifest in plain)
    assert (one["replicas"], two["replicas"]) == (1, 2)
    assert one["template"] == two["template"]  # hosts of one slice; 64 hosts are several processes already
    assert (GKE.devices, TWO.devices) == (256, 512)
    small = dataclasses.replace(TWO, accelerator="v5litepod-8").manifest(JOB, ())
    (container,) = pod_job(small)["spec"]["template"]["spec"]["containers"]
    assert "--distributed=auto" in container["command"]  # each slice is one host


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"slices": 0}, "--slices = 0: must be at least 1"),
        ({"slices": 2, "node_pool": "mine"}, "--node_pool = 'mine': one node pool is one slice"),
    ],
)
def test_slices_that_cannot_be(fields, message):
    with pytest.raises(ConfigError, match=message):
        dataclasses.replace(GKE, **fields)


def test_a_queue_is_a_label_and_nothing_else():
    queued = copy.deepcopy(MANIFESTS["in a queue"])
    assert queued["metadata"].pop("labels") == {"kueue.x-k8s.io/queue-name": "team-a"}
    assert queued == MANIFESTS["run"]
    with pytest.raises(ConfigError, match=r"--queue = 'Team A': must be the name of a LocalQueue"):
        dataclasses.replace(GKE, queue="Team A")


@pytest.mark.parametrize("manifest", MANIFESTS.values(), ids=MANIFESTS)
def test_it_is_a_jobset(manifest, jobset_schema):
    jobset_schema.validate(manifest["spec"])


def test_the_jobset_schema_sees_mistakes(jobset_schema):
    def refused(change) -> bool:
        manifest = copy.deepcopy(MANIFESTS["run"])
        change(manifest["spec"])
        return not jobset_schema.is_valid(manifest["spec"])

    assert refused(lambda spec: spec["failurePolicy"]["rules"][0].update(action="GiveUp"))
    assert refused(lambda spec: spec["failurePolicy"].update(maxRestart=3))
    assert refused(lambda spec: spec["replicatedJobs"][0]["template"]["spec"].update(parallelism="64"))
    assert not refused(lambda spec: None)


@pytest.mark.parametrize("version", ["1.33", "1.37"])
@pytest.mark.parametrize("manifest", MANIFESTS.values(), ids=MANIFESTS)
def test_its_job_is_one_of_kubernetes(manifest, version):
    kubernetes_validate.validate(pod_job(manifest), version, strict=True)


def test_the_kubernetes_schema_sees_mistakes():
    manifest = copy.deepcopy(MANIFESTS["run"])
    pod = manifest["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
    pod["containers"][0]["comand"] = ["python3"]
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(pod_job(manifest), "1.37", strict=True)


def test_what_is_applied_is_the_manifest():
    (applied,) = batch_scripts(GKE.run(JOB, ()))
    assert yaml.safe_load(applied) == MANIFESTS["run"]


def test_one_pod_for_every_host_of_the_slice():
    job = pod_job(MANIFESTS["run"])["spec"]
    pod = job["template"]["spec"]
    assert (job["parallelism"], job["completions"], job["completionMode"]) == (64, 64, "Indexed")
    assert pod["nodeSelector"]["cloud.google.com/gke-tpu-topology"] == "16x16"
    assert [container["resources"]["limits"] for container in pod["initContainers"] + pod["containers"]] == [
        {"google.com/tpu": "4"}
    ] * 2
    assert pod["restartPolicy"] == "Never"  # podFailurePolicy needs it


def test_pools_that_failed_are_avoided():
    pod = pod_job(MANIFESTS["elsewhere"])["spec"]["template"]["spec"]
    (term,) = pod["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]
    (expression,) = term["matchExpressions"]
    assert expression == {"key": "cloud.google.com/gke-nodepool", "operator": "NotIn", "values": ["pool-1", "pool-2"]}
