"""The dashboard: one page without anything from elsewhere, and the JSON that it shows."""

from __future__ import annotations

import base64
import hashlib
import re
import time
from collections.abc import Callable
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING, Any

import msgspec
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Route

from headway import __version__
from headway.gateway.errors import ApiError
from headway.gateway.relay.writer import error_response
from headway.gateway.server.auth import check_admin
from headway.gateway.settings import Settings
from headway.gateway.telemetry.rolling_stats import NUM_SLOTS, SLOT_S

if TYPE_CHECKING:
    from headway.gateway.gateway import Gateway


def is_there(settings: Settings) -> bool:
    """Who has an admin key may look, or everybody, or there is none."""
    return settings.dashboard == "open" or (settings.dashboard == "key" and bool(settings.admin_keys))


def routes(gateway: Callable[[], Gateway]) -> list[Route]:
    """The page, which says nothing by itself, and its data."""

    async def page(request: Request) -> Response:
        if not is_there(gateway().settings):
            return error_response(_missing())
        text, policy = _page()
        headers = {"content-security-policy": policy, "x-frame-options": "DENY", "cache-control": "no-cache"}
        return HTMLResponse(text, headers=headers)

    async def data(request: Request) -> Response:
        front = gateway()
        try:
            if not is_there(front.settings):
                raise _missing()
            if front.settings.dashboard == "key":
                check_admin(dict(request.headers), front.settings.admin_keys)
        except ApiError as error:
            return error_response(error)
        return Response(msgspec.json.encode(shown(front)), headers={"cache-control": "no-store"},
                        media_type="application/json")  # fmt: skip

    return [Route("/dashboard", page), Route("/dashboard/data", data)]


def shown(gateway: Gateway) -> dict[str, Any]:
    """All that the page shows."""
    board, now = gateway.board, gateway.clock.now
    assert board is not None
    board.collect_decisions(now)
    replicas = [_replica(gateway, replica, now) for replica in gateway.fleet.present()]
    queues = _queues(gateway, now)
    return {
        "version": __version__, "time_s": time.time(), "uptime_s": now, "closing": gateway.is_closing,
        "replicas": replicas, "queues": queues,
        "in_flight": sum(replica["in_flight"] for replica in replicas),
        "held": sum(queue["held"] for queue in queues),
        "up": gateway.num_up,
        "batch_requests_open": 0 if gateway.office is None else gateway.office.num_open,
        "window_s": SLOT_S * NUM_SLOTS, "rates": board.rates(now), "tiers": board.tiers(now),
        "series": board.series(now), "decisions": board.decisions,
    }  # fmt: skip


def _replica(gateway: Gateway, replica: Any, now: float) -> dict[str, Any]:
    age_s = now - replica.seen_s
    return {
        **gateway.fleet.described(replica), "gpu": replica.gpu, "region": replica.region,
        "most_in_flight": min(replica.max_num_seqs, gateway.plan.policies.window or replica.max_num_seqs),
        "kv_share": replica.kv_blocks_used / max(replica.kv_blocks_total, 1),
        "by_tier": {str(tier): num for tier, num in sorted(replica.num_by_tier.items()) if num},
        "age_s": None if age_s == float("inf") else age_s,
    }  # fmt: skip


def _queues(gateway: Gateway, now: float) -> list[dict[str, Any]]:
    """Who waits in the gateway, by model and tier."""
    found: dict[tuple[str, int], list[float]] = {}
    for live in gateway.driver.control.held_requests():
        found.setdefault((live.model, live.tier), []).append(now - live.arrival_s)
    return [
        {"model": model, "tier": tier, "held": len(ages), "oldest_s": max(ages)}
        for (model, tier), ages in sorted(found.items())
    ]


def _missing() -> ApiError:
    return ApiError(404, "this gateway has no dashboard: it needs admin_keys, or `dashboard: open`", "not_found")


@cache
def _page() -> tuple[str, str]:
    """The page, and what it may do: run its own script, and ask this gateway."""
    text = files("headway.gateway.server").joinpath("dashboard.html").read_text(encoding="utf-8")
    found = re.search(r"<script>(.*?)</script>", text, re.DOTALL)
    assert found is not None
    digest = base64.b64encode(hashlib.sha256(found[1].encode()).digest()).decode()
    return text, (
        f"default-src 'none'; script-src 'sha256-{digest}'; style-src 'unsafe-inline'; connect-src 'self';"
        " img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
