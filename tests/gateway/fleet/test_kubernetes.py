"""Pods as replicas: scaling of a workload, changes by the cluster, and failed pods."""

from __future__ import annotations

import hashlib
import threading
from pathlib import Path
from typing import Any

import pytest
import yaml

import kube
import processes
import serving
from headway.core.errors import HeadwayError
from serving import chat, metric, send, until

pytest.importorskip("httptools")
pytest.importorskip("kubernetes")
BUSY = {"name": "target-utilization", "kv_use": None, "in_flight": 2, "interval_s": 0.2, "stabilization_s": 1}


@pytest.fixture
def kubeconfig(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "kubeconfig"
    monkeypatch.setenv("KUBECONFIG", str(path))
    return path


def _front(folder: Path, kind: str, port: int, **changes: Any) -> serving.Process:
    how = {"name": "chat", "namespace": "models", "kind": kind, "port": port, "poll_s": 0.1}
    pool = {"endpoints": [], "kubernetes": how, "max_replicas": 3}
    return serving.gateway(serving.fleet_file(folder, [], pool=pool, **changes))


def _health(front: serving.Process) -> tuple[int, int]:
    health = send(front, "/health").json()
    return health["up"], health["replicas"]


@pytest.mark.ci
@pytest.mark.parametrize("kind", ["Deployment", "StatefulSet"])
def test_pods_scale_with_the_load_and_none_with_requests_is_deleted(
    tmp_path: Path, kubeconfig: Path, kind: str
) -> None:
    """The long stream is at a pod that the cluster would take first, if it were not told otherwise."""
    workload = kube.Workload(kind, 1, processes.ports(1)[0])
    with kube.serve(kubeconfig, workload):
        front = _front(tmp_path, kind, workload.port, policies={"scaling": BUSY, "ordering_at": "gateway"})
        with serving.closing(front):
            serving.all_up(front, 1)
            first = [chat(front, ignore_eos=True, max_tokens=20_000, stream=True) for _ in range(3)]
            serving.all_up(front, 2)
            assert workload.replicas == 2, "asked for once, though it took longer than the scaler's interval"
            long = chat(front, ignore_eos=True, max_tokens=700, stream=True)
            assert long.headers["x-headway-replica"] == "pool/1"
            events: list[Any] = []
            reader = threading.Thread(target=lambda: events.extend(long.events()))
            reader.start()
            for stream in first:
                stream.close()
            reader.join(60)
            assert len(serving.answer_text(events).split()) == 700
            until(lambda: len(workload.pods) == 1 and _health(front) == (1, 1))
            ended = [
                pod.number for pod in workload.ended if pod.number < 2
            ]  # a pod that stood still has a third in place
            assert ended == [0 if kind == "Deployment" else 1]
            assert chat(front, max_tokens=2).json()["usage"]["completion_tokens"] == 2
            assert "Traceback" not in front.stop()
        assert workload.replicas == 1 and len(workload.pods) == 1, "a gateway that ends leaves pods alone"


def test_changes_that_the_cluster_makes_are_followed(tmp_path: Path, kubeconfig: Path) -> None:
    workload = kube.Workload("Deployment", 2, processes.ports(1)[0])
    with kube.serve(kubeconfig, workload):
        front = _front(tmp_path, "Deployment", workload.port)
        with serving.closing(front):
            serving.all_up(front, 2)
            workload.remove(workload.pods[0])
            workload.reconcile()
            until(lambda: _health(front) == (2, 2))
            workload.replicas = 1
            workload.reconcile()
            until(lambda: _health(front) == (1, 1))
            assert not any("PATCH" in each for each in workload.asked), "without a scaler, nothing is scaled"
            assert "pool/0 is gone" in front.stop()


def test_scaling_starts_from_no_pods(tmp_path: Path, kubeconfig: Path) -> None:
    """Requests wait for the first one, but not those that it could never hold."""
    workload = kube.Workload("Deployment", 0, processes.ports(1)[0])
    with kube.serve(kubeconfig, workload):
        front = _front(tmp_path, "Deployment", workload.port, policies={"scaling": BUSY})
        with serving.closing(front):
            refused = chat(front, max_tokens=10**9)
            assert (refused.status, refused.json()["error"]["code"]) == (400, "context_length_exceeded")
            assert chat(front, max_tokens=3).json()["usage"]["completion_tokens"] == 3
            assert workload.replicas == 1


def test_a_fleet_file_without_a_cluster_is_refused(tmp_path: Path, kubeconfig: Path) -> None:
    from headway import serving as composition

    path = serving.fleet_file(tmp_path, [], pool={"endpoints": [], "kubernetes": {"name": "chat"}})
    with pytest.raises(HeadwayError, match="no kubeconfig can be used"):
        composition.load(path)


@pytest.mark.ci
def test_failed_pods_are_reported_and_give_their_gpus_to_others(tmp_path: Path, kubeconfig: Path) -> None:
    """Two GPUs: one pool's pod is started again and again, the other takes its GPU while it needs it."""
    large = "llama-3.1-8b"
    good = kube.Workload("Deployment", 1, processes.ports(1)[0], subnet=1)
    bad = kube.Workload("Deployment", 1, good.port, "bad", 2, ("--model", large), ails="CrashLoopBackOff")
    with (
        kube.serve(kubeconfig, good, bad),
        serving.up(serving.gateway(_two_pools(tmp_path, good.port, large)), 1) as front,
    ):
        until(lambda: _failed(front))
        assert _failed(front) == [{"pool": "bad", "replicas": 1, "why": "CrashLoopBackOff"}]
        assert metric(front, "headway_replicas_failed") == 1 and bad.replicas == 1, "its workload tries on"
        streams = [chat(front, ignore_eos=True, max_tokens=20_000, stream=True) for _ in range(6)]
        serving.all_up(front, 2)
        assert (good.replicas, bad.replicas, _failed(front)) == (2, 0, [])
        bad.ails = ""
        for stream in streams:
            stream.close()
        until(lambda: (good.replicas, bad.replicas) == (1, 1))
        serving.all_up(front, 2)
        assert chat(front, model=large, max_tokens=3).json()["usage"]["completion_tokens"] == 3
        assert _failed(front) == [] and metric(front, "headway_replicas_failed") == 0
        assert "bad: a pod does not start (CrashLoopBackOff): it counts as failed" in front.stop()


def _two_pools(folder: Path, port: int, large: str) -> Path:
    how = {"namespace": "models", "port": port, "poll_s": 0.1}
    path = serving.fleet_file(
        folder,
        [],
        pool={"name": "good", "endpoints": [], "kubernetes": {"name": "chat", **how}},
        policies={"scaling": BUSY, "ordering_at": "gateway"},
        gateway={"admin_keys": [hashlib.sha256(b"key").hexdigest()]},
    )
    made = yaml.safe_load(path.read_text())
    made["fleet"].append({**made["fleet"][0], "name": "bad", "model": large, "kubernetes": {"name": "bad", **how}})
    made["gpu_limits"] = [{"gpu": "h100", "count": 2}]
    path.write_text(yaml.safe_dump(made))
    return path


def _failed(front: serving.Process) -> list[Any]:
    found: list[Any] = send(front, "/workers", headers={"authorization": "Bearer key"}).json()["failed"]
    return found


def test_late_missing_and_restarting_pods_count_as_failed() -> None:
    """Those that are late, wherever they are, and those whose containers have ended too often; not those in time."""
    from headway.gateway.fleet.kubernetes import Pod, PodFailures

    failures = PodFailures(ready_s=10.0, tries=2)
    pending = Pod("a", "a", "", is_running=False, why="Unschedulable")
    slow, restless = Pod("b", "b", "h"), Pod("c", "c", "h", num_restarts=1)
    assert failures.find([pending, slow, restless], 1, 100.0) == {}
    restless = Pod("c", "c", "h", num_restarts=2, why="CrashLoopBackOff")
    assert failures.find([pending, slow, restless], 1, 105.0) == {"c": "CrashLoopBackOff"}
    late = "was not up after 10 s"
    assert failures.find([pending, slow, restless], 1, 111.0) == {
        "a": "Unschedulable",
        "b": late,
        "c": "CrashLoopBackOff",
        "0": late,
    }
    assert failures.find([slow], 0, 112.0) == {"b": late}
    assert failures.find([slow, pending], 1, 113.0) == {"b": late}, "seen and missed anew"
