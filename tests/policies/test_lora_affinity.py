"""The router that looks for a request's LoRA adapter first."""

from __future__ import annotations

from typing import Any

import pytest

from fakes import FakeFleet, FakeReplica, FakeRequest, finished
from headway.core.errors import HeadwayError
from headway.policies import resolve
from headway.policies.routing.kv import LeastKvRouter
from headway.policies.routing.lora_affinity import LoraAffinityRouter

LOADED = {"loras": ("sql", "chat"), "max_loras": 2}
FREE = {"loras": ("chat",), "max_loras": 2}
QUEUED = {"loras": ("chat", "legal"), "loras_waiting": ("sql",), "max_loras": 2}
FULL = {"loras": ("chat", "legal"), "max_loras": 2}


def route(*replicas: dict[str, Any], lora: str = "sql", router: LoraAffinityRouter | None = None) -> int:
    fleet = FakeFleet([FakeReplica(id=i, combo=i, **each) for i, each in enumerate(replicas)])
    return (router or LoraAffinityRouter()).route(FakeRequest(lora=lora), fleet).replica


def test_a_loaded_adapter_comes_before_a_free_slot_before_a_queue_before_the_rest() -> None:
    assert route(FULL, QUEUED, FREE, {**LOADED, "num_in_flight": 3}) == 3
    assert route(FULL, QUEUED, {**FREE, "num_in_flight": 3}) == 2
    assert route(FULL, {**QUEUED, "num_in_flight": 3}) == 1
    assert route({**FULL, "num_in_flight": 3}, FULL) == 1


def test_an_adapter_that_waits_and_runs_takes_one_slot() -> None:
    assert route(FULL, {"loras": ("chat",), "loras_waiting": ("chat",), "max_loras": 2, "num_in_flight": 3}) == 1


def test_a_replica_with_too_many_requests_is_passed_over() -> None:
    assert route({**LOADED, "num_in_flight": 40}, FREE) == 1
    assert route({**LOADED, "num_in_flight": 40}, FREE, router=LoraAffinityRouter(spare_requests=100)) == 0


def test_requests_without_an_adapter_go_where_the_other_router_says() -> None:
    assert route({**LOADED, "num_in_flight": 1}, FULL, lora="") == 1


def test_the_other_router_chooses_among_the_best() -> None:
    router = LoraAffinityRouter(LeastKvRouter)
    assert route({**LOADED, "kv_blocks_used": 9}, {**LOADED, "num_in_flight": 3}, FULL, router=router) == 1


def test_both_replicas_of_a_combo_count() -> None:
    half = [FakeReplica(id=0, combo=1, **LOADED), FakeReplica(id=1, combo=1, **FULL)]
    other = FakeReplica(id=2, combo=2, num_in_flight=2, **FREE)
    assert LoraAffinityRouter().route(FakeRequest(lora="sql"), FakeFleet([*half, other])).replica == 2


@pytest.mark.parametrize("among", ["jsq-tokens", {"name": "prefix-affinity", "load_factor": 2.0}, "headway", "pascal"])
def test_any_router_may_be_the_other_one(among: Any) -> None:
    choice = resolve.router({"name": "lora-affinity", "among": among})
    router: Any = choice()
    assert router is not choice() and route(FULL, LOADED, router=router) == 1
    router.learn(finished(10))
    assert getattr(router, "pairs", False) == (among == "headway")


def test_an_unknown_other_router_is_named() -> None:
    with pytest.raises(HeadwayError, match="least-loaded"):
        resolve.router({"name": "lora-affinity", "among": "least-loded"})
