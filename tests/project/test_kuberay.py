"""packaging/kuberay.yaml has fields of KubeRay's RayCluster alone, with their types."""

from typing import Any

import pytest
import yaml
from support import ROOT

# Of the resource definition ray.io/v1 of KubeRay 1.7.0 (helm-chart/kuberay-operator/crds), which is
# as long as Kubernetes itself: the spec's fields that the file uses. A type is a name, the values
# that are possible, [the type of a list's items], {"*": the type of a map's values}, or an object's
# fields; those that end in "!" are required.
LIMITS = {"*": "quantity"}
CONTAINER = {
    "name!": "string",
    "image": "string",
    "env": [{"name!": "string", "value": "string"}],
    "ports": [{"name": "string", "containerPort!": "integer"}],
    "resources": {"requests": LIMITS, "limits": LIMITS},
    "volumeMounts": [{"name!": "string", "mountPath!": "string"}],
}
CLAIM = {"claimName!": "string", "readOnly": "boolean"}
VOLUME = {"name!": "string", "persistentVolumeClaim": CLAIM}
POD = {"spec": {"containers!": [CONTAINER], "volumes": [VOLUME]}}
GROUP = {"rayStartParams": {"*": "string"}, "template!": POD}
COUNTS = {"replicas": "integer", "minReplicas!": "integer", "maxReplicas!": "integer"}
SPEC = {
    "rayVersion": "string",
    "authOptions": {"mode": ("disabled", "token")},
    "headGroupSpec!": GROUP,
    "workerGroupSpecs": [{"groupName!": "string", **COUNTS, **GROUP}],
}
TYPES = {"string": (str,), "integer": (int,), "boolean": (bool,), "quantity": (int, str)}


def wrong(value: Any, kind: Any, place: str) -> list[str]:
    """Where a value is not of a type."""
    match kind:
        case str():
            return [] if type(value) in TYPES[kind] else [f"{place} is no {kind}"]
        case tuple():
            return [] if value in kind else [f"{place} is none of {kind}"]
        case [items]:
            rows = enumerate(value) if isinstance(value, list) else [(-1, value)]
            return [text for at, row in rows for text in wrong(row, items, f"{place}[{at}]")]
    if not isinstance(value, dict):
        return [f"{place} is no object"]
    known = {name.rstrip("!"): one for name, one in kind.items()}
    known |= dict.fromkeys(value, known.get("*")) if "*" in known else {}
    found = [f"{place}.{name} is not known" for name in value.keys() - known.keys()]
    found += [
        f"{place} has no {name}" for name in kind if "!" in name and name.rstrip("!") not in value
    ]
    for name in value.keys() & known.keys():
        found += wrong(value[name], known[name], f"{place}.{name}")
    return found


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
    assert wrong(spec, SPEC, "spec") == []
    assert spec["authOptions"] == {"mode": "token"}
    for group in spec["workerGroupSpecs"]:
        assert group["minReplicas"] <= group["replicas"] <= group["maxReplicas"]


@pytest.mark.parametrize(
    ("group", "told"),
    [
        ({"groupName": "gpu", "minReplicas": 1, "maxReplicas": 2, "template": {}}, []),
        ({"groupName": 7, "minReplicas": 1, "maxReplicas": 2, "template": {}}, ["groupName is no"]),
        (
            {"groupName": "", "minReplicas": True, "maxReplicas": 2, "template": []},
            ["is no ", "is"],
        ),
        (
            {"groupName": "", "maxReplicas": 2, "template": {"spce": {}}},
            ["has no min", "spce is not"],
        ),
    ],
)
def test_other_fields_are_told(group: dict[str, Any], told: list[str]) -> None:
    found = wrong({"headGroupSpec": {"template": {}}, "workerGroupSpecs": [group]}, SPEC, "spec")
    assert len(found) == len(told)
    assert all(text in line for text, line in zip(told, found, strict=True))


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
    assert len(images) == 1
    made = {one["metadata"]["name"] for one in documents[1:]}
    assert claims - made == {"models"}  # which is the user's
