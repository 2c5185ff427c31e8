"""The chart's pods as processes of this machine, behind a small API server: what a trial serves can be rehearsed.

No container and no cluster is there: each container's command runs with its arguments, and its volumes are folders.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

import kube
import serving
from headway import records
from headway.cli import main

helm = pytest.importorskip("helm_python")
pytest.importorskip("kubernetes")
CHART = Path(__file__).parents[2] / "deploy" / "helm"
NUM_REQUESTS = 12


def _objects(**values: Any) -> dict[tuple[str, str], dict[str, Any]]:
    with helm.Chart.load(CHART) as chart:
        files = chart.render(values, name="trial", namespace="models")
    found = [each for text in files.values() for each in yaml.safe_load_all(text) if each is not None]
    return {(each["kind"], each["metadata"]["name"]): each for each in found}


def _command(container: dict[str, Any], **changed: str) -> list[str]:
    """The container's words, less the program, with other values of options that name places outside of it."""
    words = [*container["command"], *container["args"]]
    for option, value in changed.items():
        words[words.index(f"--{option}") + 1] = value
    return words[1:]


def _mounted(pod: dict[str, Any], objects: dict[tuple[str, str], dict[str, Any]], root: Path) -> dict[str, str]:
    """The folders of a pod's volumes by their path in the container. ConfigMaps are written."""
    volumes = {each["name"]: each for each in pod["volumes"]}
    folders = {}
    for mount in pod["containers"][0]["volumeMounts"]:
        volume, folder = volumes[mount["name"]], root / mount["name"]
        folder.mkdir()
        if "configMap" in volume:
            for name, text in objects["ConfigMap", volume["configMap"]["name"]]["data"].items():
                (folder / name).write_text(text)
        folders[mount["mountPath"]] = str(folder)
    return folders


@pytest.mark.ci
def test_a_day_of_the_charts_gateway_is_rehearsed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = _objects(trial={"replicas": 2}, records={"claim": "days"})
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "kubeconfig"))
    engines = made["Deployment", "headway-engines"]["spec"]
    (engine,) = engines["template"]["spec"]["containers"]
    (port,) = (each["containerPort"] for each in engine["ports"])
    options = _command(engine)[1:]
    for option in ("--host", "--port"):  # the stand-in gives each pod an address of its own
        at = options.index(option)
        del options[at : at + 2]
    pod = made["Deployment", "headway"]["spec"]["template"]["spec"]
    folders = _mounted(pod, made, tmp_path)
    words = [
        next((word.replace(path, folder) for path, folder in folders.items() if word.startswith(path)), word)
        for word in _command(pod["containers"][0], host="127.0.0.1", port="0")
    ]
    workload = kube.Workload("Deployment", engines["replicas"], port, "headway-engines", 77, options)
    front = serving.Process("-m", "headway", *words)
    with kube.serve(tmp_path / "kubeconfig", workload), serving.closing(front):
        serving.all_up(front, 2)
        for i in range(NUM_REQUESTS):
            body = {"model": "qwen3-8b", "prompt": f"Number {i}", "max_tokens": 4, "ignore_eos": True}
            assert serving.send(front, "/v1/completions", body).json()["usage"]["completion_tokens"] == 4
        front.stop()
    day, fleet = folders["/var/lib/headway/records"], Path(folders["/etc/headway"]) / "fleet.yaml"
    assert len(records.load(Path(day))[0].requests["request"]) == NUM_REQUESTS
    assert main(["simulate", str(fleet), "--trace", day, "--out", str(tmp_path / "rehearsed")]) == 0
    again = records.load(tmp_path / "rehearsed")[0]
    assert len(again.requests["request"]) == NUM_REQUESTS and len(again.replicas) == 2
