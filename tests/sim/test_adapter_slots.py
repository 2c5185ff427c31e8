"""Slots for LoRA adapters: what is in them, what waits for them, and what loading them costs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from headway.core.errors import HeadwayError
from headway.core.fleet import Fault, LoraAdapter, LoraConfig, Pool
from headway.core.record import Outcome
from headway.core.request import Segment
from headway.perf.lora import adapter_bytes, slots_bytes
from headway.policies.ordering.tiers import PriorityOrdering
from headway.policies.routing.lora_affinity import LoraAffinityRouter
from headway.sim.adapter_slots import AdapterSlots, LoadTimes
from headway.sim.replica_resources import adapter_times, kv_blocks
from simulation import MODEL, Scenario, assert_agree, by_request, pool, request, seconds

NAMES = ("a", "b", "c")


def with_slots(max_loras: int, load_s: float = 0.0, max_cpu_loras: int | None = None, **given: Any) -> Pool:
    adapters = tuple(LoraAdapter(name=name, load_s=load_s) for name in NAMES)
    config = LoraConfig(adapters=adapters, max_loras=max_loras, max_cpu_loras=max_cpu_loras)
    return pool(lora=config, **given)


def ends(scenario: Scenario) -> list[float]:
    return by_request(assert_agree(scenario).requests)["end_s"].tolist()


def one_second(*requests: Any, of: Pool, **given: Any) -> list[float]:
    return ends(Scenario(requests, (of,), line=seconds(1.0), **given))


# The slots themselves.


def test_the_least_recently_used_idle_adapter_makes_room() -> None:
    slots = AdapterSlots(2, 3, {name: LoadTimes(5.0, 1.0) for name in "abcd"})
    assert [slots.use("a"), slots.use("b"), slots.use("a")] == [5.0, 5.0, 0.0]
    assert not slots.has_room_for("c")
    slots.release("a")
    slots.release("b")
    assert slots.has_room_for("c") and slots.use("c") == 5.0  # for b, as a is in use
    assert not slots.has_room_for("b")
    slots.release("a")
    assert slots.use("b") == 1.0  # from host memory
    slots.release("c")
    assert slots.use("d") == 5.0  # host memory holds three, and a was used there first
    slots.release("b")
    assert slots.use("a") == 5.0
    slots.clear()
    assert slots.use("b") == 5.0


# Requests.


def test_a_request_waits_until_a_slot_is_free_and_others_pass_it() -> None:
    made = (
        request(0, 0, 1, 4, lora="a"),
        request(1, 0, 1, 2, lora="b"),
        request(2, 0, 1, 2),
        request(3, 0, 1, 1, lora="a"),
    )
    assert one_second(*made, of=with_slots(1)) == [4.0, 6.0, 2.0, 1.0]
    assert one_second(*made, of=with_slots(2)) == [4.0, 2.0, 2.0, 1.0]


def test_a_request_that_arrives_behind_one_that_waits_for_a_slot_is_admitted() -> None:
    made = (request(0, 0, 1, 9, lora="a"), request(1, 0.5, 1, 2, lora="b"), request(2, 1.5, 1, 2, lora="a"))
    assert one_second(*made, of=with_slots(1)) == [9.0, 11.0, 4.0]


def test_loading_delays_the_iteration_and_is_done_once() -> None:
    made = (request(0, 0, 1, 2, lora="a"), request(1, 20, 1, 2, lora="a"), request(2, 40, 1, 2, lora="b"))
    assert one_second(*made, of=with_slots(2, load_s=3.0)) == [5.0, 22.0, 45.0]


def test_adapters_are_loaded_again_after_a_crash() -> None:
    made = (request(0, 0, 1, 2, lora="a"), request(1, 20, 1, 2, lora="a"))
    crash = (Fault(at_s=10.0, replica=0, down_s=1.0),)
    assert one_second(*made, of=with_slots(2, load_s=3.0), faults=crash) == [5.0, 25.0]


def test_a_cancelled_request_gives_its_slot_back() -> None:
    made = (request(0, 0, 1, 50, lora="a", timeout_s=2.5), request(1, 0, 1, 2, lora="b"))
    assert one_second(*made, of=with_slots(1))[1] == 5.0


def test_cached_prompts_belong_to_one_adapter() -> None:
    shared = (Segment(7, 64),)
    made = [request(i, 10.0 * i, 80, 1, prefix=shared, lora=lora) for i, lora in enumerate(("a", "b", "a", ""))]
    records = Scenario(tuple(made), (with_slots(2, prefix_caching=True),)).play()
    assert by_request(records.requests)["cached_prompt_tokens"].tolist() == [0, 0, 64, 0]


def test_an_adapter_that_no_pool_has_is_named() -> None:
    with pytest.raises(HeadwayError, match="LoRA adapter 'd'"):
        Scenario((request(0, lora="d"),), (with_slots(1),)).play()
    with pytest.raises(HeadwayError, match="expected a pool of `fleet` with it"):
        Scenario((request(0, lora="d"),)).play()


def test_only_replicas_that_have_the_adapter_are_chosen() -> None:
    pools = (pool("bare"), with_slots(1, name="tuned"))
    made = [request(i, i / 10, 4, 5, lora="" if i % 3 else "a") for i in range(21)]
    records = Scenario(tuple(made), pools).play()
    replicas = by_request(records.requests)["replica"]
    assert set(replicas[::3].tolist()) == {1} and set(replicas.tolist()) == {0, 1}


def test_a_request_without_a_replica_for_its_adapter_is_rejected_and_others_go_on() -> None:
    pools = (pool("bare"), with_slots(1, name="tuned"))
    made = [request(i, 5.0 + i / 10, 4, 5, lora="a" if i % 2 else "") for i in range(20)]
    records = Scenario(tuple(made), pools, window=1, faults=(Fault(at_s=1.0, replica=1),)).play()
    outcomes = by_request(records.requests)["outcome"]
    assert (outcomes[1::2] == Outcome.REJECTED).all() and (outcomes[::2] == Outcome.FINISHED).all()


@pytest.mark.parametrize("preemptive", [False, True])
@pytest.mark.parametrize("max_loras", [1, 2])
def test_stretches_change_nothing_with_adapters(preemptive: bool, max_loras: int) -> None:
    rng = np.random.default_rng(3)
    arrivals_s = np.cumsum(rng.exponential(0.03, 80))
    made = tuple(
        request(
            i,
            float(arrivals_s[i]),
            int(rng.integers(1, 200)),
            int(rng.integers(1, 100)),
            tier=int(rng.integers(0, 3)),
            lora=str(rng.choice(("", *NAMES))),
            timeout_s=3.0 if i % 9 == 0 else None,
        )
        for i in range(80)
    )
    few = with_slots(max_loras, load_s=0.02, replicas=2, kv_capacity_tokens=900, max_num_seqs=6, prefix_caching=True)
    scenario = Scenario(
        made,
        (few,),
        LoraAffinityRouter,
        ordering=lambda: PriorityOrdering(preemptive=preemptive),
        faults=(Fault(at_s=1.0, replica=1, down_s=0.5),),
    )
    records = assert_agree(scenario)
    assert (records.requests["preemptions"] > 0).any()


# Sizes.


def test_an_adapter_has_two_matrices_for_each_linear_layer() -> None:
    per_layer = 4 * (4096 + 4096) + 3 * (4096 + 11008)
    assert adapter_bytes(MODEL, LoraAdapter(name="a", rank=8)) == 2 * 8 * 32 * per_layer
    assert adapter_bytes(MODEL, LoraAdapter(name="a", num_bytes=5.0)) == 5.0


def test_slots_take_room_from_the_kv_cache_and_larger_adapters_take_longer() -> None:
    small, large = (LoraAdapter(name="a", rank=rank) for rank in (16, 64))
    pools = [pool(lora=LoraConfig(adapters=(each,), max_loras=4)) for each in (small, large)]
    assert kv_blocks(pool()) > kv_blocks(pools[0]) > kv_blocks(pools[1])
    assert slots_bytes(pools[0]) == 4 * adapter_bytes(MODEL, small)
    times = [adapter_times(each, adapter) for each, adapter in zip(pools, (small, large), strict=True)]
    assert times[0].copy_s < times[1].copy_s < times[0].load_s < times[1].load_s


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"adapters": (LoraAdapter(name="a"), LoraAdapter(name="a"))}, "each another one"),
        ({"max_loras": 4, "max_cpu_loras": 2}, "expected max_loras"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LoraConfig(**given)
