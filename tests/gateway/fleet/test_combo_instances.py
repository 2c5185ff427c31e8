"""Which replicas form an instance of a combo, and how the gateway numbers them."""

from __future__ import annotations

import asyncio

import pytest
from msgspec.structs import replace

pytest.importorskip("httptools")

from headway.catalog import engine, gpu, model
from headway.core.fleet import Combo, Pool
from headway.core.pacer import Pacer
from headway.gateway.clock import Clock
from headway.gateway.fleet.combos import ComboInstances, in_order
from headway.gateway.fleet.specs import ServedPool
from headway.gateway.scheduling.replica import LiveReplica
from headway.gateway.upstream.dialects import ADAPTERS
from headway.policies.ordering.fcfs import FcfsOrdering

POOL = Pool("plain", model("qwen3-8b"), gpu("h100"), engine("vllm-0.15"))
PARTS = (
    replace(POOL, name="pair-prefill", role="prefill"),
    replace(POOL, name="pair-decode", role="decode", replicas=2),
)
PAIR = Combo("pair", PARTS, replicas=2)
PREFILL, DECODE = (
    ServedPool(part, tuple(f"http://{part.role}:{i}" for i in range(2 * part.replicas)), "vllm", 100, combo=PAIR)
    for part in PARTS
)
PLAIN = ServedPool(POOL, ("http://plain:0",), "vllm", 100)


def _replica(id: int, served: ServedPool) -> LiveReplica:
    clock = Clock(asyncio.new_event_loop())
    clock._loop.close()
    return LiveReplica(id, served.pool, f"http://h:{id}", ADAPTERS["vllm"], 100, FcfsOrdering(), Pacer(), clock, 5.0)


def test_endpoints_are_in_order_of_pools_first_and_then_instance_by_instance() -> None:
    urls = [url for _, url in in_order([PREFILL, PLAIN, DECODE])]
    assert urls == [
        "http://plain:0",
        "http://prefill:0",
        "http://decode:0",
        "http://decode:1",
        "http://prefill:1",
        "http://decode:2",
        "http://decode:3",
    ]


def test_a_replica_joins_the_first_instance_that_lacks_one_of_its_pool() -> None:
    instances = ComboInstances()
    pools = [PREFILL, DECODE, PREFILL, DECODE, DECODE, PLAIN]
    replicas = [_replica(i, served) for i, served in enumerate(pools)]
    for replica, served in zip(replicas, pools, strict=True):
        instances.join(replica, served)
    assert [replica.combo for replica in replicas] == [1, 1, 2, 1, 2, 3]
    assert [replica.deployment for replica in replicas] == ["pair"] * 5 + ["plain"]
    assert [replica.is_of_combo for replica in replicas] == [True] * 5 + [False]
    first, second = instances.named("pair")
    assert first.is_complete and not second.is_complete and second.has_room_for("pair-decode")


def test_a_place_that_was_left_is_taken_by_the_next_replica_and_an_empty_instance_goes() -> None:
    instances = ComboInstances()
    first, second, later = (_replica(i, served) for i, served in enumerate((PREFILL, DECODE, PREFILL)))
    instances.join(first, PREFILL)
    instances.join(second, DECODE)
    instances.leave(first)
    assert instances.of(first) is instances.of(second), "the instance that it was in"
    instances.join(later, PREFILL)
    assert later.combo == second.combo == 1
    for replica in (second, later):
        instances.leave(replica)
    assert not instances.named("pair")


@pytest.mark.parametrize(("api", "is_single_phase"), [("vllm", False), ("sglang", True)])
def test_sglang_s_replicas_of_a_pair_do_one_phase(api: str, is_single_phase: bool) -> None:
    replica = _replica(0, PREFILL)
    replica.adapter = ADAPTERS[api]  # type: ignore[index]
    ComboInstances().join(replica, PREFILL)
    assert replica.is_single_phase is is_single_phase and replica.role == "prefill"
