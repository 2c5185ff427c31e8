"""KV that replicas share over the network, and KV that is kept for the next call."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from headway.config.scenario import assemble
from headway.config.strict_yaml import Places
from headway.core.errors import HeadwayError
from headway.core.fleet import Fault, KvStoreConfig
from headway.core.record import Records
from headway.core.request import Request, Segment
from headway.sim.kv_store import KvStore
from simulation import MODEL, Scenario, assert_agree, pool, request, seconds

BLOCK = 16
KV_BYTES_PER_TOKEN = 2 * 2 * MODEL.num_layers * MODEL.num_kv_heads * MODEL.head_dim
BLOCK_BYTES = BLOCK * KV_BYTES_PER_TOKEN
BIG = KvStoreConfig(capacity_bytes=1e12, bytes_per_s=1e12, latency_s=0.0)


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_reads_and_writes_wait_for_others() -> None:
    clock = Clock()
    store = KvStore(KvStoreConfig(capacity_bytes=1e6, bytes_per_s=100.0, latency_s=0.5), clock)
    here, there = (store.client(0, 10.0, bytes_per_s) for bytes_per_s in (1000.0, 50.0))
    here.write(1, 20)
    there.write(2, 10)
    spans = [(1, 0, 20), (2, 20, 30)]
    assert here.reach(spans, 0) == 0, "a write of 200 bytes takes 2 s"
    clock.now = 2.5
    assert here.reach(spans, 0) == 20 and there.reach(spans, 0) == 20
    clock.now = 4.5
    assert there.reach(spans, 0) == 30 and there.reach([(3, 0, 5)], 0) == 0
    assert here.read_s(spans, 0, 30) == pytest.approx(3.5), "300 bytes at 100 a second, and the latency"
    assert here.read_s(spans, 20, 30) == pytest.approx(4.5), "after those"
    assert there.read_s(spans, 20, 30) == pytest.approx(6.5), "its own network has half of that"
    clock.now = 100.0
    assert here.read_s(spans, 0, 1) == pytest.approx(0.6)


@pytest.mark.parametrize("seed", range(5))
def test_bytes_are_conserved(seed: int) -> None:
    """What was written is held or was evicted; the store is never fuller than it is large."""
    chance, clock = random.Random(seed), Clock()
    store = KvStore(KvStoreConfig(capacity_bytes=700.0, bytes_per_s=500.0, latency_s=0.01), clock)
    clients = [store.client(kind, size, 1e9) for kind, size in ((0, 10.0), (1, 7.0), (1, 7.0))]
    for _ in range(400):
        clock.now += chance.expovariate(5.0)
        client, segment = chance.choice(clients), chance.randrange(12)
        if chance.random() < 0.6:
            client.write(segment, chance.randrange(1, 30))
        else:
            client.read_s([(segment, 0, 5)], 0, client.reach([(segment, 0, 5)], 0))
        held = sum(blocks * (10.0, 7.0)[kind] for (kind, _), blocks in store._held.items())
        assert store.used_bytes == pytest.approx(held) and store.used_bytes <= 700.0
        assert store.written_bytes == pytest.approx(store.used_bytes + store.evicted_bytes, abs=1e-6)
    assert store.evicted_bytes > 0


def _prompt(id: int, arrival_s: float, tokens: int = 320, segment: int = 1, **more: Any) -> Request:
    prefix = (Segment(segment, tokens), Segment(10_000 + id, 20))
    return request(id, arrival_s, tokens + 20, 4, prefix=prefix, **more)


def _run(*requests: Request, store: KvStoreConfig | None = BIG, **more: Any) -> Records:
    engine = {"prefix_caching": True, "kv_capacity_tokens": 3200, "replicas": 2, **more.pop("engine", {})}
    line = seconds(0.01, 1e-3)
    return assert_agree(Scenario(requests, (pool(**engine),), line=line, kv_store=store, **more))


def _ttft_s(records: Records) -> list[float]:
    by_id = records.requests["request"].argsort()
    return [float(each) for each in (records.requests["first_token_s"] - records.workload["arrival_s"][by_id])[by_id]]


def test_another_replica_loads_what_one_has_computed() -> None:
    alone, shared = (_run(_prompt(0, 0.0), _prompt(1, 5.0), store=store) for store in (None, BIG))
    assert alone.requests["cached_prompt_tokens"].tolist() == [0, 0]
    assert shared.requests["cached_prompt_tokens"].tolist() == [0, 320]
    assert _ttft_s(shared)[1] < _ttft_s(shared)[0] / 5 and _ttft_s(shared)[0] == pytest.approx(_ttft_s(alone)[0])


def test_a_slow_store_takes_longer_than_computing() -> None:
    slow = KvStoreConfig(capacity_bytes=1e12, bytes_per_s=20 * BLOCK_BYTES / 2.0, latency_s=0.1)
    records = _run(_prompt(0, 0.0), _prompt(1, 5.0), store=slow)
    assert records.requests["cached_prompt_tokens"].tolist() == [0, 320]
    assert _ttft_s(records)[1] == pytest.approx(2.1 + 0.01 + 20e-3, abs=0.02)


def test_replicas_wait_for_each_other_at_the_store() -> None:
    slow = KvStoreConfig(capacity_bytes=1e12, bytes_per_s=20 * BLOCK_BYTES / 2.0, latency_s=0.0)
    # Request 0 fills the store from replica 0; 1 and 2 come to replicas 1 and 2 at once.
    records = _run(_prompt(0, 0.0), _prompt(1, 9.0), _prompt(2, 9.0), store=slow, engine={"replicas": 3})
    first, second = sorted(_ttft_s(records)[1:])
    assert second - first == pytest.approx(2.0, abs=0.02)


def test_the_store_outlives_a_replica() -> None:
    faults = (Fault(2.0, 0, 0.5),)
    alone, shared = (
        _run(_prompt(0, 0.0), _prompt(1, 5.0), store=store, faults=faults, engine={"replicas": 1})
        for store in (None, BIG)
    )
    assert [each.requests["cached_prompt_tokens"].tolist() for each in (alone, shared)] == [[0, 0], [0, 320]]


def test_other_models_and_shapes_share_nothing() -> None:
    other = pool("other", prefix_caching=True, kv_capacity_tokens=3200, kv_dtype_bytes=1.0)
    here = pool(prefix_caching=True, kv_capacity_tokens=3200)
    records = Scenario((_prompt(0, 0.0), _prompt(1, 5.0)), (here, other), line=seconds(0.01), kv_store=BIG).play()
    assert records.requests["cached_prompt_tokens"].tolist() == [0, 0]


def _turns(keep_s: float, gap_s: float, **engine: Any) -> int:
    """Cached tokens of a program's second call, between which others fill the replica's memory."""
    first = request(0, 0.0, 320, 4, prefix=(Segment(1, 320),), output_id=2)
    others = [request(i, 1.0 + 0.1 * i, 600, 4, prefix=(Segment(100 + i, 600),)) for i in range(1, 8)]
    then = request(8, gap_s, 360, 4, prefix=(Segment(1, 320), Segment(2, 4), Segment(3, 36)))
    given = {"replicas": 1, "kv_capacity_tokens": 1600, "kv_keep_s": keep_s, **engine}
    records = _run(first, *others, then, store=None, engine=given)
    return int(records.requests["cached_prompt_tokens"][records.requests["request"] == 8][0])


def test_the_blocks_of_a_program_are_kept_for_its_next_call() -> None:
    assert _turns(0.0, 6.0) == 0, "others have taken its blocks"
    assert _turns(30.0, 6.0) == 320
    assert _turns(0.5, 6.0) == 0, "the time is over before others come"
    assert _turns(30.0, 6.0, kv_keep_share=0.1) < 320, "10 of 100 blocks are kept"
    assert _turns(30.0, 60.0) == 320, "nobody has come since"


def test_kept_blocks_give_way_where_there_are_no_others() -> None:
    """A request that needs all memory is served at once."""
    first = request(0, 0.0, 320, 4, prefix=(Segment(1, 320),), output_id=2)
    large = request(1, 2.0, 1500, 60, prefix=(Segment(5, 1500),))
    engine = {"replicas": 1, "kv_capacity_tokens": 1600, "kv_keep_s": 100.0, "kv_keep_share": 1.0}
    records = _run(first, large, store=None, engine=engine)
    assert records.requests["preemptions"].sum() == 0 and _ttft_s(records)[1] < 2.0


BAD: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "pool": ({}, {"kv_store": {"capacity_bytes": 1e9, "pools": ["mian"]}}, "kv_store.pools[0]: unknown pool 'mian'"),
    "no cache": (
        {"engine": {"name": "vllm-0.15", "prefix_caching": False}},
        {"kv_store": {"capacity_bytes": 1e9, "pools": ["main"]}},
        "kv_store.pools[0]: main has no prefix cache; set prefix_caching: true",
    ),
    "capacity": ({}, {"kv_store": {"capacity_bytes": 0}}, "kv_store.capacity_bytes: expected number > 0.0"),
    "keep": (
        {"engine": {"name": "vllm-0.15", "prefix_caching": False, "kv_keep_s": 5}},
        {},
        "fleet[0].engine.kv_keep_s: keeps blocks of the prefix cache; set prefix_caching: true",
    ),
    "share": (
        {"engine": {"name": "vllm-0.15", "kv_keep_s": 5, "kv_keep_share": 2}},
        {},
        "fleet[0].engine.kv_keep_share: 2.0; expected a share, 0 to 1",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_what_cannot_be_is_told_by_key(name: str) -> None:
    own, more, message = BAD[name]
    main = {"name": "main", "model": "llama-3.1-8b", "gpu": "h100", "engine": "vllm-0.15", **own}
    load = {"arrivals": 1.0, "num_requests": 1, "prompt_tokens": 10, "output_tokens": 10}
    with pytest.raises(HeadwayError) as error:
        assemble({"workload": load, "fleet": [main], **more}, Places(), Path())
    assert str(error.value).startswith(message)
