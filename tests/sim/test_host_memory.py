"""Host memory: swapped KV, and the second tier of the prefix cache."""

from __future__ import annotations

from typing import Any

import pytest

from headway.control.live import Live
from headway.perf import copies, memory
from headway.sim.host_memory import HostPrefixTier
from replica_state import replicas_of
from simulation import GPU, MODEL, Scenario, pool, request


def host_memory(num_bytes: float) -> Any:
    engine = {"preemption": "swap", "host_memory_bytes": num_bytes}
    return replicas_of(Scenario((request(0),), (pool(**engine),)).cluster())[0].batch.host


def test_swapped_kv_takes_and_frees_capacity() -> None:
    per_token = memory.kv_bytes_per_token(MODEL)
    host = host_memory(100 * per_token)
    one, other = Live(0, 0.0, 1, 1), Live(1, 0.0, 1, 1)
    assert host.swap_out(one, 60) == pytest.approx(copies.host_copy_s(60 * per_token, GPU), rel=1e-9)
    assert (one.swapped_tokens, host.used_tokens) == (60, 60)
    assert host.swap_out(other, 41) is None
    assert (other.swapped_tokens, host.used_tokens) == (0, 60)
    assert host.swap_out(other, 40) is not None
    assert host.swap_in(one) == pytest.approx(copies.host_copy_s(60 * per_token, GPU), rel=1e-9)
    host.drop(other)
    assert (one.swapped_tokens, other.swapped_tokens, host.used_tokens) == (0, 0, 0)


def test_the_prefix_tier_evicts_the_least_recently_used() -> None:
    tier = HostPrefixTier(10, lambda blocks: float(blocks))
    tier.store(1, 4)
    tier.store(2, 4)
    tier.store(1, 0)  # used again
    tier.store(3, 4)
    assert [tier.blocks(segment) for segment in (1, 2, 3)] == [4, 2, 4]
    tier.store(3, 9)
    assert [tier.blocks(segment) for segment in (1, 2, 3)] == [1, 0, 9]
    tier.store(4, 99)
    assert [tier.blocks(segment) for segment in (1, 2, 3, 4)] == [0, 0, 0, 10]
    assert tier.load_s(3) == 3.0
