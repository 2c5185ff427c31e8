"""Combos whose parts are pods of two workloads: scaling, and combos that lose a pod."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

import kube
import processes
import serving
from headway.core.errors import HeadwayError
from serving import MODEL, all_up, chat, metric, send, until

pytest.importorskip("httptools")
pytest.importorskip("kubernetes")
SCALING = {"name": "combos", "local_window_s": 1, "global_window_s": 600, "grace_s": 0.5, "interval_s": 0.2}
STRICT = {"routing": {"name": "cauchy", "within": "strict"}}


class Parts:
    """The two workloads of a combo, and a gateway's file for them."""

    def __init__(self, kind: str, replicas: int, prefills: int = 1) -> None:
        (self.port, _), self.kind, self.prefills = processes.ports(1), kind, prefills
        self.prefill = kube.Workload(kind, replicas * prefills, self.port, "pair-prefill", 1)
        self.decode = kube.Workload(kind, replicas, self.port, "pair-decode", 2)

    def file(self, folder: Path, **changes: Any) -> Path:
        def side(part: str, replicas: int) -> dict[str, Any]:
            how = {"name": part, "namespace": "models", "kind": self.kind, "port": self.port, "poll_s": 0.1}
            return {"model": MODEL, "gpu": "h100", "engine": "vllm-0.15", "replicas": replicas, "kubernetes": how}

        combo = {
            "name": "pair",
            "goodput_rps": 1.0,
            "handover": {"first_token": "decode"},
            "max_replicas": 2,
            "prefill": side("pair-prefill", self.prefills),
            "decode": side("pair-decode", 1),
        }
        path = folder / "fleet.yaml"
        path.write_text(
            yaml.safe_dump({"combos": [combo], "policies": {**STRICT, **changes}, "gateway": {"scrape_period_s": 0.1}})
        )
        return path

    @contextmanager
    def served(self, folder: Path, **changes: Any) -> Iterator[serving.Process]:
        with kube.serve(folder / "kubeconfig", self.prefill, self.decode):
            front = serving.gateway(self.file(folder, **changes))
            with serving.closing(front):
                yield front

    @property
    def sizes(self) -> tuple[int, int]:
        """Pods that there are."""
        return len(self.prefill.pods), len(self.decode.pods)


@pytest.fixture(autouse=True)
def kubeconfig(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "kubeconfig"))


def _answers(front: serving.Process, num: int = 3) -> set[str]:
    """Who answers so many requests at a time."""
    replies = [chat(front, "hello " * 50, stream=True, max_tokens=5) for _ in range(num)]
    names = {reply.headers["x-headway-replica"] for reply in replies}
    assert all(serving.answer_text(list(reply.events())) for reply in replies)
    return names


def _up(front: serving.Process) -> tuple[int, int]:
    health = send(front, "/health").json()
    return health["up"], health["replicas"]


@pytest.mark.ci
@pytest.mark.parametrize("kind", ["Deployment", "StatefulSet"])
def test_combos_of_pods_scale_with_the_load(tmp_path: Path, kind: str) -> None:
    """Two pods compute prompts for one that decodes; a pod that dies under load is one of the same combo again."""
    parts = Parts(kind, 1, prefills=2)
    with parts.served(tmp_path, scaling=SCALING) as front:
        all_up(front, 3)

        def busy() -> bool:
            return len({name for name in _answers(front) if name.startswith("pair-decode/")}) == 2

        until(busy, 60)
        assert parts.sizes == (4, 2) == (parts.prefill.replicas, parts.decode.replicas), "a whole one more"
        assert _up(front) == (6, 6)
        parts.decode.remove(parts.decode.pods[0])
        until(lambda: _answers(front) and _up(front)[0] < 6)
        parts.decode.reconcile()
        until(lambda: busy() and _up(front) == (6, 6), 60)
        until(lambda: parts.sizes == (2, 1) and _up(front) == (3, 3), 60)
        names = _answers(front, 1)
        assert len(names) == 1 and names.pop().startswith("pair-decode/")
        until(lambda: metric(front, "headway_requests_in_flight") == 0)
        assert "Traceback" not in front.stop()
    assert (parts.prefill.replicas, parts.decode.replicas) == (2, 1)


@pytest.mark.ci
def test_the_rest_of_a_combo_serves_both_phases_until_its_pod_is_back(tmp_path: Path) -> None:
    """Without a scaler nothing is scaled, and what the cluster does by itself is followed."""
    parts = Parts("Deployment", 1)
    with parts.served(tmp_path) as front:
        all_up(front, 2)
        assert all(name.startswith("pair-decode/") for name in _answers(front))
        parts.decode.remove(parts.decode.pods[0])
        until(lambda: _up(front) == (1, 1))
        assert _answers(front) == {"pair-prefill/0"} or _answers(front) == {"pair-prefill/1"}
        parts.decode.reconcile()
        until(lambda: _up(front) == (2, 2))
        assert _answers(front) == {"pair-decode/2"}
        assert not any("PATCH" in each for each in (*parts.prefill.asked, *parts.decode.asked))


def test_the_parts_of_a_combo_need_a_workload_each_and_the_same_kind_of_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from headway import serving as composition
    from headway.gateway.fleet import kubernetes

    monkeypatch.setattr(kubernetes, "check", lambda how: None)  # there is no cluster here
    path = Parts("Deployment", 0).file(tmp_path)
    document = yaml.safe_load(path.read_text())
    decode = document["combos"][0]["decode"]
    decode["kubernetes"]["name"] = "pair-prefill"
    path.write_text(yaml.safe_dump(document))
    with pytest.raises(HeadwayError, match=r"pair-prefill is combos\[0\].prefill's, too"):
        composition.load(path)
    del decode["kubernetes"]
    decode["endpoints"] = ["http://127.0.0.1:1"]
    path.write_text(yaml.safe_dump(document))
    with pytest.raises(HeadwayError, match="have `kubernetes`; expected the same for both"):
        composition.load(path)
