"""A fleet whose replicas are the pods of an InferencePool, by a small API server, and engines of this process."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import yaml

pytest.importorskip("httptools")
pytest.importorskip("kubernetes")

from kubernetes.config import kube_config

import serving
from headway import serving as composition
from headway.control.live import Live
from headway.core.errors import HeadwayError
from headway.gateway.gateway import Gateway
from headway.gateway.scheduling.in_flight import InFlightRequest, ReleaseReason
from headway.gateway.telemetry.recording import Recording
from kube import InferencePool, serve
from scripted import GatedEngine

POOL = {
    "name": "chat",
    "model": "qwen3-8b",
    "gpu": "h100",
    "engine": "vllm-0.15",
    "inference_pool": {"name": "chat", "namespace": "models", "poll_s": 1000.0},
}


def fleet(folder: Path, **changes: object) -> Path:
    path = folder / "fleet.yaml"
    path.write_text(yaml.safe_dump({"fleet": [POOL], "gateway": {"scrape_period_s": 0.05}, **changes}))
    return path


class _Ending(InFlightRequest):
    """A request that ends when it is broken off."""

    def __init__(self, gateway: Gateway, live: Live) -> None:
        super().__init__(live)
        self._gateway = gateway

    def abort(self, why: str) -> None:
        self._gateway.driver.release(self, ReleaseReason.REFUSED)


@pytest.mark.ci
def test_ready_pods_are_replicas_until_they_are_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The pods are read again only because the watch says so: `poll_s` is longer than the test."""
    first = GatedEngine("127.0.0.2")
    second = GatedEngine("127.0.0.3", first.port)
    cluster = InferencePool(first.port)
    monkeypatch.setattr(kube_config, "KUBE_CONFIG_DEFAULT_LOCATION", str(tmp_path / "config"))

    async def story() -> None:
        gateway = Gateway(composition.load(fleet(tmp_path))[1], Recording(False))

        def urls() -> list[str]:
            return [each.url for each in gateway.fleet.present() if gateway.health.is_up(each)]

        gateway.start()
        await serving.eventually(lambda: urls() == [first.url])
        cluster.set_pod("b", "127.0.0.3", is_ready=False)
        cluster.set_pod("b", "127.0.0.3")
        await serving.eventually(lambda: urls() == [first.url, second.url])
        replica = gateway.replicas[0]
        live = Live(0, gateway.clock.now, 10, 1, "qwen3-8b")
        live.allowed = frozenset((0,))
        request = InFlightRequest(live)
        gateway.driver.arrived(request)
        cluster.set_pod("a", "127.0.0.2", is_leaving=True)
        await serving.eventually(lambda: replica.is_draining)
        assert replica.num_in_flight == 1 and not replica.is_removed
        gateway.driver.release(request, ReleaseReason.FINISHED)
        await serving.eventually(lambda: replica.is_removed)
        cluster.remove_pod("a")
        other = gateway.replicas[1]
        gateway.driver.arrived(_Ending(gateway, Live(1, gateway.clock.now, 10, 1, "qwen3-8b")))
        assert other.num_in_flight == 1
        cluster.set_pod("b", "127.0.0.3", is_ready=False)
        await serving.eventually(lambda: gateway.fleet.status(other) == "up" and not other.is_unready)
        cluster.set_pod("d", "127.0.0.2")
        await serving.eventually(lambda: other.is_unready and gateway.fleet.status(other) == "unready")
        newest = gateway.replicas[2]
        await serving.eventually(lambda: gateway.health.is_up(newest))
        requests = [InFlightRequest(Live(i, gateway.clock.now, 10, 1, "qwen3-8b")) for i in (2, 3, 4)]
        for each in requests:
            gateway.driver.arrived(each)
        assert (other.num_in_flight, newest.num_in_flight) == (1, 3)
        cluster.set_pod("b", "127.0.0.3")
        await serving.eventually(lambda: gateway.fleet.status(other) == "up")
        gateway.driver.arrived(_Ending(gateway, Live(5, gateway.clock.now, 10, 1, "qwen3-8b")))
        assert (other.num_in_flight, newest.num_in_flight) == (2, 3)
        cluster.remove_pod("b")  # its label is taken away
        await serving.eventually(lambda: other.is_draining)
        assert other.num_in_flight == 2 and not other.is_removed
        second.close()
        await serving.eventually(lambda: other.is_removed)
        cluster.remove_pod("d")
        cluster.set_pod("c", "127.0.0.2")
        await serving.eventually(lambda: urls() == [first.url])
        await gateway.stop()

    try:
        cluster.set_pod("a", "127.0.0.2")
        with serve(tmp_path / "config", cluster):
            try:
                asyncio.run(story())
            finally:
                cluster.close()
    finally:
        first.close()
        second.close()


def test_an_inference_pool_cannot_be_scaled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kube_config, "KUBE_CONFIG_DEFAULT_LOCATION", str(tmp_path / "config"))
    with (
        serve(tmp_path / "config"),
        pytest.raises(HeadwayError, match="`inference_pool`, where nothing can be started"),
    ):
        composition.load(fleet(tmp_path, policies={"scaling": "reactive"}))
