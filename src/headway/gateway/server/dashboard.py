"""The dashboard: one self-contained page, and the JSON that it shows."""

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
from headway.gateway.gateway import Gateway
from headway.gateway.scheduling.replica import LiveReplica
from headway.gateway.server.admin import replica_state
from headway.gateway.server.routes import Access, Endpoint, collected, json_response
from headway.gateway.server.schema import DashboardData, HeldRequests, ReplicaRow
from headway.gateway.telemetry.metrics import LAST_TIER
from headway.gateway.telemetry.rolling_stats import NUM_SLOTS, SLOT_S


async def _page(request: Request, gateway: Gateway) -> Response:
    text, policy = _page_and_policy()
    headers = {"content-security-policy": policy, "x-frame-options": "DENY", "cache-control": "no-cache"}
    return HTMLResponse(text, headers=headers)


@cache
def _page_and_policy() -> tuple[str, str]:
    """The page, and a content security policy that allows its own script and requests to this gateway only."""
    text = files("headway.gateway.server").joinpath("dashboard.html").read_text(encoding="utf-8")
    script = re.search(r"<script>(.*?)</script>", text, re.DOTALL)
    assert script is not None
    digest = base64.b64encode(hashlib.sha256(script[1].encode()).digest()).decode()
    return text, (
        f"default-src 'none'; script-src 'sha256-{digest}'; style-src 'unsafe-inline'; connect-src 'self';"
        " img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )


async def _data(request: Request, gateway: Gateway) -> Response:
    stats, now = gateway.rolling_stats, gateway.clock.now
    assert stats is not None
    stats.collect_decisions(now)
    replicas = [_replica_row(gateway, replica, now) for replica in gateway.fleet.present()]
    queues = _queues(gateway, now)
    data = DashboardData(
        version=__version__,
        time_s=time.time(),
        uptime_s=now,
        closing=gateway.is_closing,
        replicas=replicas,
        queues=queues,
        in_flight=sum(replica.in_flight for replica in replicas),
        held=sum(queue.held for queue in queues),
        up=gateway.num_up,
        batch_requests_open=0 if gateway.batches is None else gateway.batches.num_open,
        window_s=SLOT_S * NUM_SLOTS,
        rates=stats.rates(now),
        tiers=await collected(stats.tiers(now), 1),
        series=stats.series(now, dict(await collected(stats.medians(now), 1))),
        decisions=stats.decisions,
        reload=gateway.reloads.last,
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


def _by_tier(replica: LiveReplica) -> dict[str, int]:
    """Requests in flight by tier, up to `LAST_TIER`."""
    counts: Counter[int] = Counter()
    for tier, num in replica.num_by_tier.items():
        counts[min(tier, LAST_TIER)] += num
    return {str(tier): num for tier, num in sorted(counts.items()) if num}


def _queues(gateway: Gateway, now: float) -> list[HeldRequests]:
    ages_s: dict[tuple[str, int], list[float]] = {}
    for live in gateway.driver.control.held_requests():
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
