"""Every policy that a picker may run, with a day for each; and how two accounts of a day differ."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import Any

import numpy as np

from headway.control.decisions import Decision
from headway.core.record import Records
from headway.policies import ADMISSIONS, ORDERINGS, ROUTERS
from keys import digest
from serving import MODEL

PROGRESS = {"round-robin", "fewest-quanta", "pascal", "tiers-and-phases"}
"""Orderings by what a request has generated, which the gateway refuses, too."""
_HELD = {"ordering_at": "gateway", "window": 2}
POLICIES: list[dict[str, Any]] = [
    *({"routing": name} for name, made_by in ROUTERS.items() if not getattr(made_by, "oracle", False)),
    *(
        {"ordering": name, **_HELD}
        for name, made_by in ORDERINGS.items()
        if name not in PROGRESS and not getattr(made_by, "oracle", False)
    ),
    *({"admission": name} for name in ADMISSIONS),
]
BY_CACHE = {
    "headway",
    "prefix-affinity",
    "session-affinity",
    "lmetric",
    "dynamo-cost",
    "llm-d-scorers",
    "preble",
    "dualmap",
    "dlpm",
}
"""Routers that look for cached prefixes."""
BY_HASH = {"prefix-affinity", "dualmap"}
"""Routers by a hash of the prompt's beginning. A simulation has the id of a trace's prefix in its place, so its choices
are others."""
_ENGINE = {"name": "vllm-0.15", "response_overhead_s": 0, "tokenize_s_per_token": 0}
_TENANTS = {"flood": 10, "quiet": 1}
_TIERS = [{"tier": 0, "share": 3}, {"tier": 1, "share": 2}, {"tier": 2, "share": 1}]


def name_of(policies: dict[str, Any]) -> str:
    """The policy that a set is about."""
    kind = next(iter(policies))
    return f"{kind} {policies[kind]}"


def day_of(policies: dict[str, Any], urls: Sequence[str], num_requests: int) -> dict[str, Any]:
    """A scenario, busy enough that it matters what the policy chooses: shared prefixes for routers that look for them,
    tenants with keys for orderings."""
    policies, load, gateway = dict(policies), _workload(num_requests), {"scrape_period_s": 0.2}
    observe: dict[str, Any] = {"period_s": 0.2}
    if "ordering" in policies:
        policies["routing"], load["arrivals"], load["tenants"] = "least-loaded", 100.0, _TENANTS
        gateway["api_keys"] = [{"sha256": digest(tenant), "name": tenant} for tenant in _TENANTS]
    elif "admission" in policies:
        policies["routing"] = "least-kv"
        if policies["admission"] == "queue-manager":
            policies["admission"] = {"name": "queue-manager", "interval_s": 0.043}  # never at the instant of a scrape
    elif policies["routing"] in BY_CACHE:
        load["prompt_tokens"] = {"kind": "uniform", "min": 20, "max": 200}
        load["prefixes"], observe["cache"] = {"num_groups": 6, "prefix_tokens": 512}, {"source": "placements"}
    pool = {
        "name": "pool",
        "model": MODEL,
        "gpu": "h100",
        "engine": _ENGINE,
        "endpoints": list(urls),
        "kv_capacity_tokens": 100_000,
    }
    return {"fleet": [pool], "policies": policies, "workload": load, "gateway": gateway, "observe": observe}


def _workload(num_requests: int) -> dict[str, Any]:
    return {
        "arrivals": 24.0,
        "num_requests": num_requests,
        "tiers": _TIERS,
        "prompt_tokens": {"kind": "uniform", "min": 50, "max": 2000},
        "output_tokens": {"kind": "uniform", "min": 2, "max": 40},
    }


def decide_alike(log: Sequence[Decision], other: Sequence[Decision]) -> bool:
    """Whether two logs hold the same decisions in the same order, with the same reasons and scores."""
    if [_choice(each) for each in log] != [_choice(each) for each in other]:
        return False
    return all(np.allclose(_scores(one), _scores(two), rtol=1e-9) for one, two in zip(log, other, strict=True))


def _choice(decision: Decision) -> Any:
    scored = [replica for replica, _ in decision.scores]
    return decision.what, decision.request, decision.tier, decision.choice, decision.decode, decision.why, scored


def _scores(decision: Decision) -> list[float]:
    return [score for _, score in decision.scores]


def largest_difference_s(ran: Records, other: Records) -> float:
    """Of the times from each request's arrival to its first token and to its end; infinite where one alone is known."""
    largest_s = 0.0
    for name in ("first_token_s", "end_s"):
        ours, theirs = _since_arrival_s(ran, name), _since_arrival_s(other, name)
        known = ~np.isnan(ours)
        if (known == np.isnan(theirs)).any():
            return inf
        largest_s = max(largest_s, float(np.abs(ours - theirs)[known].max(initial=0.0)))
    return largest_s


def _since_arrival_s(ran: Records, name: str) -> Any:
    order = np.argsort(ran.requests["request"])
    return ran.requests[name][order] - ran.workload["arrival_s"]
