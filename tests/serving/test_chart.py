"""The Helm chart, rendered by Helm's own library: the objects of `headway export kubernetes`, or of a trial."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

import headway
import kube_schemas
from headway import serving
from headway.cli import main

helm = pytest.importorskip("helm_python")
CHART = Path(__file__).parents[2] / "deploy" / "helm"
Objects = dict[tuple[str, str], dict[str, Any]]
POOL = {"name": "chat", "model": "llama-3.1-8b", "gpu": "h100", "engine": "vllm-0.15", "replicas": 3}
PEERS = {"peers": {"store": "postgresql://db/headway", "leader": "kubernetes"}, "drain_s": 90.5}
FLEETS: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "endpoints": ({"fleet": [POOL]}, ()),
    "scaled": ({"fleet": [POOL], "policies": {"scaling": "target-utilization"}}, ()),
    "several": ({"fleet": [POOL], "policies": {"scaling": "target-utilization"}, "gateway": PEERS}, ()),
    "secrets": ({"fleet": [{**POOL, "api_key": "${ENGINE}"}], "gateway": {"admin_keys": ["${ADMIN}"]}}, ()),
    "combos": (
        {"combos": [{"name": "pair", "prefill": {**POOL, "name": ""}, "decode": {**POOL, "name": ""}}]},
        ("--kind", "Deployment"),
    ),
    "picker": ({"fleet": [POOL, {**POOL, "name": "code", "model": "qwen3-8b"}]}, ("--inference-pool",)),
}


@pytest.fixture(scope="module")
def chart() -> Iterator[Any]:
    with helm.Chart.load(CHART) as loaded:
        yield loaded


def _rendered(chart: Any, **values: Any) -> Objects:
    files = chart.render(values, name="mine", namespace="llm")
    found = [each for text in files.values() for each in yaml.safe_load_all(text) if each is not None]
    return {(each["kind"], each["metadata"]["name"]): each for each in found}


def _exported(folder: Path, document: dict[str, Any], *options: str) -> tuple[Objects, dict[str, Any]]:
    """All manifests of a fleet, and the values of the chart for it."""
    path, out = folder / "fleet.yaml", folder / "out"
    path.write_text(yaml.safe_dump(document))
    told = ["--namespace", "llm", *options]
    assert main(["export", "kubernetes", str(path), "-o", str(out), *told]) == 0
    assert main(["export", "helm", str(path), "-o", f"{folder}/values.yaml", *told]) == 0
    names = yaml.safe_load((out / "kustomization.yaml").read_text())["resources"]
    found = [each for name in names for each in yaml.safe_load_all((out / name).read_text())]
    return {(each["kind"], each["metadata"]["name"]): each for each in found}, yaml.safe_load(
        (folder / "values.yaml").read_text()
    )


@pytest.mark.parametrize("name", FLEETS)
def test_the_chart_makes_what_the_export_makes(chart: Any, tmp_path: Path, name: str) -> None:
    """Every object; but for the hash by which Kubernetes sees that a file has changed."""
    document, options = FLEETS[name]
    exported, values = _exported(tmp_path, document, *options)
    made = _rendered(chart, **values)
    for objects in (made, exported):
        annotations = objects["Deployment", "headway"]["spec"]["template"]["metadata"].pop("annotations")
        assert len(annotations["headway/fleet-sha256"]) == 64
    assert made == exported


@pytest.mark.parametrize("name", FLEETS)
def test_a_cluster_refuses_no_key_of_the_chart(chart: Any, tmp_path: Path, name: str) -> None:
    document, options = FLEETS[name]
    _, values = _exported(tmp_path, document, *options)
    trials: list[dict[str, Any]] = [{"kind": "gateway"}, {"kind": "picker"}]
    every = [_rendered(chart, **each) for each in ({**values, **PLATFORM}, *trials)]
    assert [fault for made in every for fault in kube_schemas.faults(made.values())] == []


PLATFORM = {
    "extraArgs": ["--log-level", "debug"],
    "imagePullSecrets": [{"name": "mine"}],
    "records": {"claim": "days"},
    "modelCache": {"claim": "weights"},
    "podDisruptionBudget": {"minAvailable": 1},
    "podMonitor": {"enabled": True},
    "networkPolicy": {"enabled": True, "from": [{"namespaceSelector": {}}]},
}


def test_a_platforms_values_reach_the_gateway_and_the_engines(chart: Any, tmp_path: Path) -> None:
    _, values = _exported(tmp_path, {"fleet": [POOL]})
    before, made = _rendered(chart, **values), _rendered(chart, **values, **PLATFORM)
    gateway = made["Deployment", "headway"]["spec"]["template"]["spec"]
    engine = made["StatefulSet", "chat"]["spec"]["template"]["spec"]
    assert gateway["imagePullSecrets"] == engine["imagePullSecrets"] == [{"name": "mine"}]
    (container,) = gateway["containers"]
    assert container["args"][-4:] == ["--records", "/var/lib/headway/records", "--log-level", "debug"]
    _mounts(gateway, "days", container["args"][-3])
    _mounts(engine, "weights", "/root/.cache/huggingface")
    added = made.keys() - before.keys()
    assert added == {
        ("PodDisruptionBudget", "headway"),
        ("PodMonitor", "headway"),
        ("NetworkPolicy", "headway-engines"),
    }
    labels = made["Deployment", "headway"]["spec"]["template"]["metadata"]["labels"]
    for kind in ("PodDisruptionBudget", "PodMonitor"):
        assert made[kind, "headway"]["spec"]["selector"]["matchLabels"] == labels
    policy = made["NetworkPolicy", "headway-engines"]["spec"]
    engines = made["StatefulSet", "chat"]["spec"]["template"]["metadata"]["labels"]
    assert policy["podSelector"]["matchLabels"].items() <= engines.items()
    assert {"podSelector": {"matchLabels": labels}} in policy["ingress"][0]["from"]


def _mounts(pod: dict[str, Any], claim: str, path: str) -> None:
    (volume,) = [each["name"] for each in pod["volumes"] if each.get("persistentVolumeClaim") == {"claimName": claim}]
    assert {"name": volume, "mountPath": path} in pod["containers"][0]["volumeMounts"]


@pytest.mark.parametrize("kind", ["gateway", "picker"])
def test_a_trial_has_engines_and_a_fleet_file_that_can_be_served(
    chart: Any, tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("kubernetes", "inference_pool"):
        monkeypatch.setattr(
            pytest.importorskip(f"headway.gateway.fleet.{module}"), "check", lambda _: None, raising=False
        )
    made = _rendered(chart, kind=kind, trial={"replicas": 3, "speed": 0.5})
    engines = made["Deployment", "headway-engines"]["spec"]
    assert engines["replicas"] == 3
    path = tmp_path / "fleet.yaml"
    path.write_text(made["ConfigMap", "headway"]["data"]["fleet.yaml"])
    start = serving.load(path)[1].pools[0].start
    assert (start.name, start.namespace) == ("headway-engines", "llm")  # type: ignore[union-attr]
    (container,) = engines["template"]["spec"]["containers"]
    words = [*container["command"], *container["args"]]
    assert words[:2] == ["headway", "emulate"] and main([*words[1:], "--help"]) == 0
    labels = engines["template"]["metadata"]["labels"]
    if kind == "picker":
        spec = made["InferencePool", "headway-engines"]["spec"]
        assert spec["selector"]["matchLabels"] == labels
        assert spec["endpointPickerRef"]["name"] == "headway" and ("Service", "headway") in made


def test_all_objects_are_those_of_kubernetes_and_no_container_may_write_or_be_root(chart: Any) -> None:
    """Kubernetes' own models check required keys, and drop unknown ones when they serialise."""
    client = pytest.importorskip("kubernetes.client")
    api = client.ApiClient()
    for (kind, name), made in _rendered(chart, resources={"limits": {"memory": "1Gi"}}).items():
        read = api.deserialize(json.dumps(made), f"V1{kind}", "application/json")
        assert api.sanitize_for_serialization(read) == made, (kind, name)
        if kind == "Deployment":
            pod = made["spec"]["template"]["spec"]
            assert pod["securityContext"]["runAsNonRoot"]
            for container in pod["containers"]:
                security = container["securityContext"]
                assert security["readOnlyRootFilesystem"] and not security["allowPrivilegeEscalation"]


def test_the_chart_passes_helms_lint_and_has_the_packages_version(chart: Any) -> None:
    assert chart.version == chart.metadata["appVersion"] == headway.__version__
    assert helm.lint(CHART, strict=True)["errors"] == []


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"replica": 2}, "replica"),
        ({"kind": "proxy"}, "kind"),
        ({"fleet": "fleet: []\n"}, "gateway.hosts is missing"),
        ({"fleet": "a: [\n"}, "not YAML"),
    ],
)
def test_wrong_values_are_named(chart: Any, values: dict[str, Any], words: str) -> None:
    with pytest.raises(helm.HelmError, match=words):
        _rendered(chart, **values)
