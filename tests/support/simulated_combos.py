"""Combos in the simulator, small enough to compute by hand: a network of `TOKENS_PER_S`, one second an iteration."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from headway.catalog.costs import costs
from headway.core.fleet import Combo, Handover
from headway.core.record import Records
from headway.core.request import Request
from headway.perf import memory
from headway.perf.copies import NETWORK
from headway.policies.routing.cauchy import CauchyRouter
from replica_state import assert_empty, assert_sound, replicas_of, watched
from simulation import MODEL, Made, Scenario, by_request, pool, seconds

BYTES_PER_TOKEN = memory.kv_bytes_per_token(MODEL, 2)
LATENCY_S = costs().kv_transfer[NETWORK].latency_s
TOKENS_PER_S = 16


def combo(
    num_prefill: int = 1, num_decode: int = 1, replicas: int = 1, handover: Handover | None = None, **given: Any
) -> Combo:
    """A combo; `given` are fields of the combo, of its decode part, or of both parts."""
    of_combo = {key: given.pop(key) for key in ("goodput_rps", "min_replicas", "max_replicas", "name") if key in given}
    of_decode = {key: given.pop(key) for key in ("kv_capacity_tokens", "host_memory_bytes") if key in given}
    both = {"network_bytes_per_s": TOKENS_PER_S * BYTES_PER_TOKEN, **given}
    parts = (
        pool("p", role="prefill", replicas=num_prefill, handover=handover or Handover(), **both),
        pool("d", role="decode", replicas=num_decode, **both, **of_decode),
    )
    return Combo(**{"name": "c", "parts": parts, "replicas": replicas, **of_combo})


def run(requests: Sequence[Request], *combos: Combo, step: Any = "stretch", **given: Any) -> Records:
    """Simulate combos; check that every replica is empty at the end."""
    made = {"line": seconds(1.0), "router": Made(CauchyRouter, ("goodput", "strict")), "pools": (), **given}
    scenario = Scenario(tuple(requests), combos=combos or (combo(),), **made)
    cluster = watched(scenario.cluster(step), assert_sound)
    records = scenario.run(cluster)
    for replica in replicas_of(cluster):
        assert_empty(replica)
    return records


def ended_at(records: Records) -> list[int]:
    """The last replica of each request."""
    return by_request(records.requests)["replica"].tolist()  # type: ignore[no-any-return]
