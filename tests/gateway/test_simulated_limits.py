"""Limits of keys at a gateway, and of tenants in a simulation: the same requests are refused, for the same reasons."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import pytest

from headway.core.record import REFUSAL_REASONS, REFUSED, Outcome
from keys import digest

pytest.importorskip("httptools")
pytest.importorskip("sqlalchemy")
from headway.gateway.accounts import budgets
from headway.gateway.accounts.store import StoredKey
from headway.limits.tenants import TenantLimits
from virtual_time import lived, simulated

Limits = dict[str, dict[str, Any]]


class Store:
    """The keys of these tenants, in place of a database."""

    limits: ClassVar[Limits] = {}
    spent_by: ClassVar[dict[str, tuple[int, float]]] = {}
    num_opened = 1

    def __init__(self, location: str) -> None:
        pass

    async def open(self) -> None:
        pass

    async def close(self) -> None:
        pass

    async def num_changes(self) -> int:
        return 0

    async def keys(self) -> list[StoredKey]:
        return [
            StoredKey(digest(tenant), tenant, "", TenantLimits(**limits).budget)
            for tenant, limits in self.limits.items()
        ]

    async def teams(self) -> dict[str, Any]:
        return {}

    async def exchange(self, uses: list[Any], today: str) -> tuple[dict[str, Any], dict[str, Any]]:
        for use in uses:
            tokens, usd = self.spent_by.get(use.sha256, (0, 0.0))
            self.spent_by[use.sha256] = tokens + use.input_tokens + use.output_tokens, usd + use.usd
        return dict(self.spent_by), {}

    async def spent(self, since: str, before: str) -> tuple[dict[str, Any], dict[str, Any]]:
        return {}, {}


def day(limits: Limits, **more: Any) -> dict[str, Any]:
    """Three tenants, two of which are limited, at one engine that is busy."""
    rates = ("requests_per_minute", "tokens_per_minute")
    keys = [
        {"sha256": digest(name), "name": name, **{key: own[key] for key in rates if key in own}}
        for name, own in {"free": {}, **limits}.items()
    ]
    return {
        "workload": {
            "tenants": {"free": 1, **dict.fromkeys(limits, 2)},
            "arrivals": 4.0,
            "num_requests": 160,
            "prompt_tokens": {"kind": "lognormal", "mean": 200, "cv": 0.7},
            "output_tokens": {"kind": "lognormal", "mean": 150, "cv": 0.7},
        },
        "fleet": [
            {
                "model": "qwen3-8b",
                "gpu": "l40s",
                "engine": "vllm-0.15",
                "endpoints": ["http://127.0.0.1:10001"],
                "usd_per_million_input_tokens": 1.0,
                "usd_per_million_output_tokens": 4.0,
            }
        ],
        "policies": {"ordering": "fair", "ordering_at": "gateway", "window": 6},
        "gateway": {"api_keys": keys, "scrape_period_s": 0.2, "timeout_s": 36_000.0},
        "observe": {"period_s": 0.2},
        **more,
    }


def both_refuse(data: dict[str, Any], folder: Path) -> dict[int, str]:
    """The requests that the gateway refuses with their reasons, which are those that the simulation refuses."""
    errors: dict[int, dict[str, Any]] = {}
    served, _ = lived(data, folder, refused=errors)
    reasons = {id: reason_of(error) for id, error in errors.items()}
    ran, _ = simulated(data, folder)
    codes = dict(zip(ran.requests["request"].tolist(), ran.requests[REFUSED].tolist(), strict=True))
    assert {id: REFUSAL_REASONS[code - 1] for id, code in codes.items() if code} == reasons
    rejected = ran.requests["request"][ran.requests["outcome"] == Outcome.REJECTED].tolist()
    assert sorted(rejected) == sorted(reasons)
    assert len(served.requests["request"]) == len(codes) - len(reasons)
    return reasons


def reason_of(error: dict[str, Any]) -> str:
    if error["code"] == "insufficient_quota":
        return "budget"
    assert error["code"] == "rate_limit_exceeded"
    return next(each for each in ("requests", "tokens") if f"limit of {each} per minute" in error["message"])


@pytest.mark.ci
def test_rates_of_keys_are_those_of_their_tenants(tmp_path: Path) -> None:
    limits = {"search": {"requests_per_minute": 25}, "reports": {"tokens_per_minute": 6_000, "requests_per_minute": 90}}
    reasons = both_refuse(day(limits), tmp_path)
    assert set(reasons.values()) == {"requests", "tokens"} and 30 < len(reasons) < 120


@pytest.mark.ci
def test_budgets_are_reserved_and_charged_alike(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limits = {
        "search": {"budget_tokens": 9_000, "period": "total"},
        "reports": {"budget_usd": 0.03, "period": "total", "tokens_per_minute": 7_000},
    }
    monkeypatch.setattr(budgets, "account_store", Store)
    monkeypatch.setattr(Store, "limits", limits)
    monkeypatch.setattr(Store, "spent_by", {})
    data = day(limits, simulation={"limits": limits})
    data["gateway"]["key_store"] = {"store": "none", "refresh_s": 1.0}
    reasons = both_refuse(data, tmp_path)
    assert set(reasons.values()) == {"tokens", "budget"} and 30 < len(reasons) < 120
