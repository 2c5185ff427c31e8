"""Each scenario is simulated, and served by the gateway and emulated engines in virtual time: all decisions and times
are equal. (bench/twin.py compares with real processes, which need time of their own.)"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("httptools")
pytest.importorskip("uvicorn")

from headway.control.decisions import Decision
from headway.core.record import Outcome, Records
from keys import digest
from serving import MODEL
from virtual_time import both

URLS = [f"http://127.0.0.1:{port}" for port in range(10_001, 10_005)]
STALE = {"gateway": {"scrape_period_s": 0.2}, "observe": {"period_s": 0.2}}
TIMES = ("first_token_s", "answer_s", "end_s")
COUNTS = ("request", "outcome", "attempts", "replica", "generated_tokens", "moves")


PROMPT = {"name": "vllm-0.15", "response_overhead_s": 0, "tokenize_s_per_token": 0}
"""An engine whose scheduler and the gateway know at once of what comes and ends, as the simulator's views do."""


def side(gpu: str, *urls: str, engine: Any = PROMPT) -> dict[str, Any]:
    return {
        "model": MODEL,
        "gpu": gpu,
        "engine": engine,
        "endpoints": list(urls),
        "network_bytes_per_s": 1.25e9,
    }


def workload(arrivals: float, most_tokens: int) -> dict[str, Any]:
    prompts, answers = {"kind": "uniform", "min": 50, "max": 2000}, {"kind": "uniform", "min": 2, "max": most_tokens}
    tiers = [{"tier": 0, "share": 3}, {"tier": 1, "share": 2}, {"tier": 2, "share": 1}]
    return {
        "arrivals": arrivals,
        "num_requests": 100,
        "prompt_tokens": prompts,
        "output_tokens": answers,
        "tiers": tiers,
    }


def pool(routing: str, engine: Any = PROMPT, room_tokens: int = 100_000, **policies: Any) -> dict[str, Any]:
    """Three replicas, busy enough that which of them is chosen matters."""
    fleet = [{"name": "pool", **side("h100", *URLS[:3], engine=engine), "kv_capacity_tokens": room_tokens}]
    return {"fleet": fleet, "policies": {"routing": routing, **policies}, "workload": workload(16.0, 100), **STALE}


def combos(routing: Any, replicas: int = 1, engine: Any = PROMPT) -> dict[str, Any]:
    """A prefill replica for two that decode, or for one in each of two combos."""
    prefill, decode = (URLS[:1], URLS[1:3]) if replicas == 1 else (URLS[:2], URLS[2:])
    combo = {
        "name": "pair",
        "prefill": side("l40s", *prefill, engine=engine),
        "decode": side("l4", *decode, engine=engine),
        "replicas": replicas,
        "handover": {"first_token": "decode"},
    }
    load = workload(3.0 * replicas, 40)
    return {"combos": [combo], "policies": {"routing": routing}, "workload": load, **STALE}


HELD = {"ordering_at": "gateway", "window": 2}
STRICT = {"name": "cauchy", "within": "strict"}
TENANTS = {"flood": 10, "quiet": 1}


def tenants(
    num_requests: int = 100,
    room_tokens: int = 100_000,
    prompt_window: int | None = None,
    name: str = "fair",
    **policies: Any,
) -> dict[str, Any]:
    """Requests of two keys, one of which sends many more than three replicas can serve."""
    ordering = {"name": name, "weights": {"quiet": 2}, "prompt_window": prompt_window}
    day = pool("least-loaded", room_tokens=room_tokens, ordering=ordering, ordering_at="gateway", **policies)
    keys = [{"sha256": digest(tenant), "name": tenant} for tenant in TENANTS]
    load = {**workload(200.0, 100), "num_requests": num_requests, "tenants": TENANTS}
    return {**day, "gateway": {**STALE["gateway"], "api_keys": keys}, "workload": load}


def adapters(routing: Any, max_loras: int = 2) -> dict[str, Any]:
    """Requests for the model and for five adapters, for which three replicas have too few slots."""
    day = pool(routing)
    lora = {"adapters": [{"name": f"adapter-{i}", "rank": 16 * (i + 1)} for i in range(5)], "max_loras": max_loras}
    return {
        **day,
        "fleet": [{**day["fleet"][0], "lora": lora}],
        "workload": {**day["workload"], "loras": {"count": 5, "base_share": 0.2}},
    }


def fallback(**config: Any) -> dict[str, Any]:
    """A replica with too many requests, and a hosted service that takes some of them."""
    day = pool("least-loaded", fallback={"when": ["slow"], "ttft_s": 0.1, "min_requests": 5, "window_s": 1.0, **config})
    hosted = {
        "name": "hosted",
        "model": "house-model",
        "hosted": {"ttft_s": 0.05, "tokens_per_s": 200},
        "endpoints": URLS[3:],
    }
    own = {**day["fleet"][0], "endpoints": URLS[:1], "gpu": "l4", "fallback": ["hosted"]}
    return {**day, "fleet": [own, hosted]}


def sharing(routing: str) -> dict[str, Any]:
    """Prompts that begin with one of six texts, which the gateway expects where it placed them before."""
    day = pool(routing)
    prompts = {"kind": "uniform", "min": 20, "max": 200}
    load = {**day["workload"], "prompt_tokens": prompts, "prefixes": {"num_groups": 6, "prefix_tokens": 512}}
    return {**day, "workload": load, "observe": {**day["observe"], "cache": {"source": "placements"}}}


DAYS = {
    **{routing: pool(routing) for routing in ("least-loaded", "power-of-two", "headway")},
    "little room": pool("least-kv", room_tokens=3_000),
    "held": pool("least-loaded", ordering="priority", **HELD),
    "shared": tenants(window=2),
    "shared, few prompts": tenants(prompt_window=3000),
    "shared, little room": tenants(room_tokens=16_000),
    "shared in rounds": tenants(room_tokens=16_000, name="drr"),
    "counted": tenants(window=2, name="vtc"),
    "urgent": pool("least-loaded", room_tokens=3_000, ordering={"name": "priority", "preemptive": False}),
    "patient": pool("least-kv", admission={"name": "queue-manager", "interval_s": 0.05}),
    "pair": combos(STRICT),
    "in place": combos({"name": "cauchy", "within": "opportunistic"}),
    "two combos": combos("headway", replicas=2),
    "changing": {**combos({"name": "cauchy"}), "roles": [{"at_s": 9, "replica": 1, "role": "prefill"}]},
    "adapters": adapters({"name": "lora-affinity", "among": "least-kv"}),
    "adapters, crowded": adapters("lora-affinity", max_loras=1),
    "fallback, with overheads": fallback(),
    "fallback and back, with overheads": fallback(return_s=1.0, miss_share=0.6),
    **{f"{routing}, shared prefixes": sharing(routing) for routing in ("lmetric", "dynamo-cost")},
    "pool, with overheads": pool("round-robin", engine="vllm-0.15"),
    "pair, with overheads": combos(STRICT, engine="vllm-0.15"),
}


@pytest.mark.sampled(6)
@pytest.mark.parametrize("day", DAYS.values(), ids=DAYS)
def test_a_served_day_equals_the_simulated_day(
    day: dict[str, Any], tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    lived, chosen, simulated, foreseen = both(day, tmp_path)
    assert [_choice(each) for each in chosen] == [_choice(each) for each in foreseen]
    if "overheads" not in request.node.name:
        assert [_seen(each) for each in chosen] == [_seen(each) for each in foreseen]
    ours, theirs = _by_request(lived), _by_request(simulated)
    assert (ours["outcome"] == Outcome.FINISHED).all() and len(set(ours["replica"].tolist())) > 1
    for name in COUNTS:
        np.testing.assert_array_equal(ours[name], theirs[name], err_msg=name)
    for name in TIMES:
        np.testing.assert_allclose(ours[name], theirs[name], rtol=0, atol=1e-9, err_msg=name)


SGLANG = {"name": "sglang", "response_overhead_s": 0, "tokenize_s_per_token": 0}


@pytest.mark.ci
@pytest.mark.parametrize("num_decode", [1, 2])
def test_a_served_day_of_an_sglang_pair_equals_the_simulated_day(tmp_path: Path, num_decode: int) -> None:
    """Both of its engines are asked at once, and the first token comes with the KV cache."""
    day = combos(STRICT, engine=SGLANG)
    combo = day["combos"][0]
    combo["decode"]["endpoints"], combo["handover"] = URLS[1 : 1 + num_decode], {"first_token": "sent"}
    lived, chosen, simulated, foreseen = both({**day, "workload": workload(2.0 * num_decode, 40)}, tmp_path)
    assert [_choice(each) for each in chosen] == [_choice(each) for each in foreseen]
    ours, theirs = _by_request(lived), _by_request(simulated)
    for name in COUNTS:
        np.testing.assert_array_equal(ours[name], theirs[name], err_msg=name)
    for name in TIMES:
        np.testing.assert_allclose(ours[name], theirs[name], rtol=0, atol=1e-9, err_msg=name)


def _choice(decision: Decision) -> Any:
    return decision.what, decision.request, decision.tier, decision.choice, decision.decode, decision.why


def _seen(decision: Decision) -> Any:
    """By a policy, and what it made of that."""
    return decision.scores, [(each.replica, each.in_flight, each.waiting, each.kv_share) for each in decision.replicas]


def _by_request(ran: Records) -> dict[str, Any]:
    """Rows in order of arrival, times since each one's."""
    rows = ran.requests
    order = np.argsort(rows["request"])
    arrival_s = ran.workload["arrival_s"]
    found: dict[str, Any] = {name: rows[name][order] for name in COUNTS}
    return found | {name: rows[name][order] - arrival_s for name in TIMES}
