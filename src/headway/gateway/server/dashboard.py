"""The dashboard: one self-contained page, and its JSON data."""

from __future__ import annotations

import base64
import hashlib
import re
import time
from collections import Counter
from functools import cache
from importlib.resources import files

import msgspec
from msgspec.structs import replace
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response

from headway import __version__
from headway.control.policies import Policies
from headway.gateway.gateway import Gateway
from headway.gateway.scheduling.replica import LiveReplica
from headway.gateway.server.admin import replica_state
from headway.gateway.server.routes import Access, Endpoint, collected, json_response
from headway.gateway.server.schema import DashboardData, HeldRequests, PolicyNames, ReplicaRow
from headway.gateway.server.troubles import troubles
from headway.gateway.telemetry.metrics import LAST_TIER
from headway.gateway.telemetry.rolling_stats import NUM_SLOTS, SLOT_S, SloCounts

_LIBRARY = "<script>/* uPlot */</script>"
_MOST_TENANTS = 10


async def _page(request: Request, gateway: Gateway) -> Response:
    text, policy = _page_and_policy()
    headers = {"content-security-policy": policy, "x-frame-options": "DENY", "cache-control": "no-cache"}
    return HTMLResponse(text, headers=headers)


@cache
def _page_and_policy() -> tuple[str, str]:
    """The page with its chart library, and a content security policy. The policy allows only the page's two scripts,
    and requests to this gateway."""
    folder = files("headway.gateway.server")
    text = folder.joinpath("dashboard.html").read_text(encoding="utf-8")
    uplot = {each.name: each.read_text(encoding="utf-8") for each in folder.joinpath("uplot").iterdir()}
    license = f"/*! uPlot\n{uplot['LICENSE']}\n*/"
    code = uplot["uPlot.iife.min.js"].partition("*/")[2]  # without its banner, which names another site
    text = text.replace(_LIBRARY, f"<script>{license}{code}</script>").replace(
        "/* uPlot.css */", uplot["uPlot.min.css"]
    )
    scripts = re.findall(r"<script>(.*?)</script>", text, re.DOTALL)
    digests = [base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts]
    allowed = " ".join(f"'sha256-{digest}'" for digest in digests)
    return text, (
        f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; connect-src 'self';"
        " img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )


async def _data(request: Request, gateway: Gateway) -> Response:
    stats, now = gateway.telemetry.rolling_stats, gateway.clock.now
    assert stats is not None
    stats.collect_decisions(now)
    replicas = [_replica_row(gateway, replica, now) for replica in gateway.fleet.present()]
    queues = _queues(gateway, now)
    tiers, tenants = await collected(stats.tiers(now), 1), stats.tenants(now)
    cost = stats.cost(now, gateway.fleet.usd_per_hour())
    data = DashboardData(
        version=__version__,
        time_s=time.time(),
        uptime_s=now,
        closing=gateway.admission.is_closing,
        replicas=replicas,
        queues=queues,
        in_flight=sum(replica.in_flight for replica in replicas),
        held=sum(queue.held for queue in queues),
        up=gateway.num_up,
        batch_requests_open=0 if gateway.batches is None else gateway.batches.num_open,
        window_s=SLOT_S * NUM_SLOTS,
        troubles=troubles(gateway, replicas, queues),
        policies=_policies(gateway.plan.policies),
        slo=SloCounts(sum(tier.slo.num for tier in tiers), sum(tier.slo.met for tier in tiers)),
        cost=cost if cost.usd or cost.usd_per_hour else None,
        rates=stats.rates(now),
        tiers=tiers,
        tenants=tenants[:_MOST_TENANTS],
        num_tenants=sum(bool(tenant.tenant) for tenant in tenants),
        series=stats.series(now, dict(await collected(stats.medians(now), 1))),
        slowest=[] if (slowest := gateway.telemetry.slowest) is None else slowest.last(now),
        decisions=stats.decisions,
        reload=gateway.reloads.last,
        autopilot=None if gateway.autopilot is None else gateway.autopilot.state(),
        shadow=[] if gateway.shadows is None else gateway.shadows.decisions(),
    )
    return json_response(data, headers={"cache-control": "no-store"})


def _replica_row(gateway: Gateway, replica: LiveReplica, now: float) -> ReplicaRow:
    age_s = now - replica.seen_s
    window = gateway.driver.services[replica.model].window
    return ReplicaRow(
        **msgspec.structs.asdict(replica_state(gateway, replica)),
        gpu=replica.gpu,
        region=replica.region,
        most_in_flight=min(replica.max_num_seqs, window or replica.max_num_seqs),
        kv_share=replica.kv_blocks_used / max(replica.kv_blocks_total, 1),
        by_tier=_by_tier(replica),
        age_s=None if age_s == float("inf") else age_s,
    )


def _policies(policies: Policies) -> PolicyNames:
    named = {
        name: None if (choice := getattr(policies, name)) is None else str(choice)
        for name in ("admission", "migration")
    }
    return PolicyNames(
        routing=str(policies.router),
        ordering=str(policies.ordering),
        ordering_at=policies.ordering_at,
        window=policies.window,
        scaling=None if policies.scaler is None else str(policies.scaler),
        slo_ttft_s=policies.slo_ttft_s,
        slo_tpot_s=policies.slo_tpot_s,
        slo_e2e_s=policies.slo_e2e_s,
        **named,
    )


def _by_tier(replica: LiveReplica) -> dict[str, int]:
    """Requests in flight by tier, up to `LAST_TIER`."""
    counts: Counter[int] = Counter()
    for tier, num in replica.num_by_tier.items():
        counts[min(tier, LAST_TIER)] += num
    return {str(tier): num for tier, num in sorted(counts.items()) if num}


def _queues(gateway: Gateway, now: float) -> list[HeldRequests]:
    ages_s: dict[tuple[str, int], list[float]] = {}
    for live in gateway.driver.control.parts.held_requests():
        ages_s.setdefault((live.model, min(live.tier, LAST_TIER)), []).append(now - live.arrival_s)
    return [
        HeldRequests(model=model, tier=tier, held=len(ages), oldest_s=max(ages))
        for (model, tier), ages in sorted(ages_s.items())
    ]


_MISSING = "this gateway has no dashboard: it needs admin_keys, or `dashboard: open`"
_PAGE_ACCESS = Access(exists=lambda settings: settings.has_dashboard, missing=_MISSING)
_DATA_ACCESS = replace(_PAGE_ACCESS, key=lambda settings: "admin" if settings.dashboard == "key" else "")

ENDPOINTS = [
    Endpoint("GET", "/dashboard", "The dashboard", _page, str, _PAGE_ACCESS, media_types=("text/html",)),
    Endpoint("GET", "/dashboard/data", "The data of the dashboard", _data, DashboardData, _DATA_ACCESS),
]
