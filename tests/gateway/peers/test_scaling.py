"""Several gateways with a scaler: one of them scales by the load of all, and another one when it is killed."""

from __future__ import annotations

from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest

import kube
import postgres
import processes
import serving
from serving import chat, metric, until

pytest.importorskip("httptools")
pytest.importorskip("kubernetes")
from headway.control.observe import MutablePoolsView
from headway.gateway.fleet.scaling import ScalingWithFailures
from headway.gateway.peers.messages import Arrived, Drained, replica_key
from headway.gateway.peers.scaling import SharedScaling

BUSY = {"name": "target-utilization", "kv_use": None, "in_flight": 2, "interval_s": 0.25, "stabilization_s": 0.5}
ENDLESS = {"stream": True, "max_tokens": 20_000, "ignore_eos": True}


class Part:
    """One gateway's part in scaling, with two replicas and without what starts them."""

    def __init__(self, leads: bool) -> None:
        self.replicas: list[Any] = [SimpleNamespace(id=id, model="m", url=f"http://{id}") for id in range(2)]
        self.members = [SimpleNamespace(view=each, is_draining=False) for each in self.replicas]
        pool: Any = SimpleNamespace(name="pool", members=self.members)
        effects: Any = self
        idle: Any = SimpleNamespace(interval_s=1.0)
        self.control = ScalingWithFailures(
            idle, MutablePoolsView(Random(0)), [pool], effects, (), lambda _: None, frozenset(), list
        )
        self.shared = SharedScaling(self, SimpleNamespace(leads=leads), 2.0)  # type: ignore[arg-type]

    def drain(self, replica: int, on: bool) -> None:
        self.members[replica].is_draining = on

    def num_held(self) -> dict[str, int]:
        return {}

    def use_peers(self, num_held: dict[str, int], drained: set[int]) -> None:
        self.control.drain_as_peers(drained)

    def hear(self, peer: str, pieces: list[Any]) -> None:
        for each in pieces:
            if isinstance(each, Arrived):
                self.shared.arrived(peer, each)
        drained = {each.replica for each in pieces if isinstance(each, Drained)}
        self.shared.update(peer, {}, drained, {replica_key(each.model, each.url): each for each in self.replicas})


def test_the_demand_of_all_gateways_counts_once_at_each() -> None:
    first, second = Part(True), Part(False)
    cell = "m", "", 0
    for num in (1, 2, 3):
        for each in (first, second):
            each.control.demand[cell] = tuple(n + num for n in each.control.demand.get(cell, (0, 0)))  # type: ignore
        pieces = first.shared.pieces(first.replicas)
        second.hear("first", pieces)
        second.hear("first", pieces)  # a state that is told again
        first.hear("second", second.shared.pieces(second.replicas))
    assert first.control.demand == second.control.demand == {cell: (12, 12)}
    late = Part(False)
    late.hear("first", [Arrived(*cell, 4, 4, 6, 6)])
    assert late.control.demand == {cell: (2, 2)}, "what came before it was there is no demand of now"


def test_a_replica_that_the_leader_drains_gets_no_requests_elsewhere_until_the_leader_is_gone() -> None:
    leader, follower = Part(True), Part(False)
    unit: Any = [leader.members[1]]
    leader.control._draining.append((SimpleNamespace(), unit))  # type: ignore[arg-type]
    follower.hear("leader", leader.shared.pieces(leader.replicas))
    assert [each.is_draining for each in follower.members] == [False, True]
    follower.drain(0, True)  # by hand
    follower.shared.forget("leader", {})
    assert [each.is_draining for each in follower.members] == [True, False]


def leads(gateway: serving.Process) -> bool:
    return metric(gateway, "headway_peer_leads") == 1


def test_one_gateway_scales_by_the_load_of_all_and_another_when_it_is_killed(
    database: postgres.Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No gateway alone has the requests for a second pod."""
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "kubeconfig"))
    workload, leases = kube.Workload("Deployment", 1, processes.ports(1)[0]), kube.Leases()
    with kube.serve(tmp_path / "kubeconfig", workload, leases):
        how = {"name": "chat", "namespace": "models", "port": workload.port, "poll_s": 0.25}
        peers = {"store": database.new(), "lease_s": 1.0, "leader": "kubernetes"}
        path = serving.fleet_file(
            tmp_path,
            [],
            pool={"endpoints": [], "kubernetes": how, "max_replicas": 2},
            gateway={"peers": peers},
            policies={"scaling": BUSY},
        )
        gateways = [serving.gateway(path) for _ in range(2)]
        with serving.closing(*gateways):
            for each in gateways:
                serving.all_up(each, 1)
            until(lambda: sum(map(leads, gateways)) == 1)
            assert list(leases.found) == ["headway-chat"]
            follower, leader = sorted(gateways, key=leads)
            streams = [chat(each, **ENDLESS) for each in (follower, follower, leader)]
            for each in gateways:
                serving.all_up(each, 2)
            assert workload.replicas == 2, "one of them has asked for it"
            leader.kill()
            until(lambda: leads(follower))
            for stream in streams:
                stream.close()
            until(lambda: workload.replicas == 1 and len(workload.pods) == 1)
            serving.all_up(follower, 1)
            assert chat(follower, max_tokens=2).json()["usage"]["completion_tokens"] == 2
