"""packaging/kuberay.yaml has the fields of KubeRay's RayCluster that its documentation lists."""

from typing import Any

import pytest
import yaml
from support import ROOT

# Of the resource definition ray.io/v1: the fields that it has, and the types of those used here.
SPEC = {
    "authOptions", "autoscalerOptions", "enableInTreeAutoscaling", "gcsFaultToleranceOptions",
    "headGroupSpec", "headServiceAnnotations", "managedBy", "rayVersion", "suspend",
    "workerGroupSpecs",
}  # fmt: skip
HEAD = {"enableIngress", "headService", "rayStartParams", "serviceType", "template"}
WORKERS = {
    "groupName", "idleTimeoutSeconds", "maxReplicas", "minReplicas", "numOfHosts",
    "rayStartParams", "replicas", "scaleStrategy", "suspend", "template",
}  # fmt: skip


@pytest.fixture(scope="module")
def documents() -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((ROOT / "packaging" / "kuberay.yaml").read_text()))


@pytest.fixture(scope="module")
def spec(documents: list[dict[str, Any]]) -> dict[str, Any]:
    cluster = documents[0]
    assert (cluster["apiVersion"], cluster["kind"]) == ("ray.io/v1", "RayCluster")
    return dict(cluster["spec"])


def test_fields_are_those_of_a_ray_cluster(spec: dict[str, Any]) -> None:
    """Kubernetes drops a field that it doesn't know."""
    head, workers = spec["headGroupSpec"], spec["workerGroupSpecs"]
    assert spec.keys() <= SPEC and {"rayVersion", "headGroupSpec"} <= spec.keys()
    assert head.keys() <= HEAD and {"rayStartParams", "template"} <= head.keys()
    for group in workers:
        assert group.keys() <= WORKERS and {"groupName", "template"} <= group.keys()
        assert group["minReplicas"] <= group["replicas"] <= group["maxReplicas"]
    for group in (head, *workers):
        assert all(isinstance(value, str) for value in group["rayStartParams"].values())
    assert spec["authOptions"] == {"mode": "token"}


def test_pods_have_one_image_and_the_volumes_that_they_mount(
    documents: list[dict[str, Any]], spec: dict[str, Any]
) -> None:
    images, claims = set(), set()
    for group in (spec["headGroupSpec"], *spec["workerGroupSpecs"]):
        pod = group["template"]["spec"]
        volumes = {row["name"]: row["persistentVolumeClaim"]["claimName"] for row in pod["volumes"]}
        claims |= set(volumes.values())
        for container in pod["containers"]:
            images.add(container["image"])
            assert {row["name"] for row in container["volumeMounts"]} == volumes.keys()
            assert container["resources"]["limits"]["nvidia.com/gpu"] == "1"
            assert all(isinstance(row["value"], str) for row in container["env"])
    assert len(images) == 1
    made = {one["metadata"]["name"] for one in documents[1:]}
    assert claims - made == {"models"}  # which is the user's
