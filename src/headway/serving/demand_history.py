"""Demand from before a gateway's start, for scalers that forecast: from its own records, or from Prometheus."""

from __future__ import annotations

from collections.abc import Mapping
from time import time
from typing import Any
from urllib.parse import urlencode

import numpy as np

from headway.config.scenario import Scenario
from headway.core.errors import HeadwayError
from headway.core.past_demand import DemandKey, PastDemand
from headway.core.policy import RemembersDemand
from headway.gateway.fleet.specs import ServingPlan
from headway.gateway.server.admin import is_address
from headway.gateway.settings import DemandHistory
from headway.planning.scaling.demand import range_query, rate_of, read_bytes
from headway.policies.resolve import PolicyChoice
from headway.records import demand as records

AT = ("gateway", "demand_history")
MOST_POINTS = 11_000
"""Maximum number of values of one series in an answer of a Prometheus server."""


def check(scenario: Scenario, choice: object) -> None:
    """Raises HeadwayError if the fleet file asks for history that its scaler cannot use. `choice`: the scaler."""
    settings, places = scenario.spec.gateway.demand_history, scenario.places
    if settings is None:
        return
    if not isinstance(choice, PolicyChoice):
        raise places.error(AT, "is for a scaler; expected `policies: {scaling: ...}`")
    if not hasattr(choice.made_by, RemembersDemand.remember.__name__):
        raise places.error(AT, f"the scaler {choice.name} forecasts nothing; expected headway, lt-i, lt-u or lt-ua")
    scaling = scenario.spec.policies.scaling
    forecaster = scaling.get("forecaster") if isinstance(scaling, Mapping) else None
    if isinstance(forecaster, Mapping) and forecaster.get("past_hours"):
        what = "is generated demand, and gateway.demand_history has what was recorded; expected one of them"
        raise places.error(("policies", "scaling", "forecaster", "past_hours"), what)
    if settings.prometheus is not None and not is_address(settings.prometheus):
        what = f"{settings.prometheus!r}; expected the server's address, http://host:port"
        raise places.error((*AT, "prometheus"), what)


def load(scenario: Scenario, plan: ServingPlan, now_s: float | None = None) -> tuple[PastDemand | None, str]:
    """(demand before `now_s`, a line of text about its known part). `now_s` None: the present.

    Raises HeadwayError for damaged records, or a Prometheus server that does not answer.
    """
    settings = plan.settings.demand_history
    assert settings is not None
    now_s = time() if now_s is None else now_s
    if settings.records is not None:
        folder = scenario.base_dir / settings.records
        known = records.read(folder)
        past, source = known.before(now_s, settings.days), f"records in {folder}"
        if known.covered:
            records.keep(folder, known.since(now_s - settings.days * 86_400))
    else:
        past, source = _of_prometheus(settings, scenario, now_s), f"{settings.prometheus}"
    names = {name: model for model, others in plan.names.items() for name in (model, *others)}
    past = None if past is None else _renamed(past, names)
    if past is None:
        return None, f"forecast: no demand in {source} yet; it begins with the gateway"
    return past, f"forecast: {_length(past.length_s)} of demand from {source}"


def _length(seconds: float) -> str:
    for unit_s, unit in ((86_400.0, "days"), (3600.0, "hours")):
        if seconds >= 2 * unit_s:
            return f"{seconds / unit_s:.1f} {unit}"
    return f"{seconds / 60:.0f} minutes"


def _renamed(past: PastDemand, names: Mapping[str, str]) -> PastDemand | None:
    """The demand with each model's own name. With several models, demand for unknown names is left out."""
    is_one = len(set(names.values())) == 1
    tps: dict[DemandKey, Any] = {}
    for (model, region, tier), rates in past.tps.items():
        if model in names or is_one:
            key = names.get(model, model), region, tier
            tps[key] = tps[key] + rates if key in tps else rates
    return PastDemand(past.step_s, tps) if tps else None


def _of_prometheus(settings: DemandHistory, scenario: Scenario, now_s: float) -> PastDemand | None:
    step_s = records.STEP_S * max(int(np.ceil(settings.days * 86_400 / records.STEP_S / MOST_POINTS)), 1)
    end = int(now_s // step_s)
    num = round(settings.days * 86_400 / step_s)
    parameters = {"query": settings.query, "start": (end - num + 1) * step_s, "end": end * step_s, "step": step_s}
    url = f"{settings.prometheus}/api/v1/query_range?{urlencode(parameters)}"
    source = f"{settings.prometheus}: {settings.query}"
    regions = {pool.region for pool in scenario.fleet.all_pools}
    found: dict[DemandKey, dict[int, float]] = {}
    for series in range_query(_answer(url, str(settings.prometheus)), source):
        if len(regions) > 1 and "region" not in series.metric:
            raise HeadwayError(f"{source}: a series without the label `region`; the fleet has {len(regions)} regions")
        tier = series.metric.get("tier", "0")
        key = series.metric.get("model", ""), series.metric.get("region", ""), int(tier) if tier.isdigit() else 0
        rates = found.setdefault(key, {})
        for at_s, value in series.values:
            step = round(at_s / step_s) - (end - num) - 1  # Prometheus' rate at a time covers the step before it
            rates[step] = rates.get(step, 0.0) + (0.0 if value == "NaN" else rate_of(value, at_s, source))
    known = sorted({step for rates in found.values() for step in rates if 0 <= step < num})
    if not known:
        return None
    steps = np.arange(known[0], num)
    values = {key: np.array([rates.get(step, 0.0) for step in known]) for key, rates in found.items()}
    return PastDemand(step_s, {key: np.interp(steps, known, rates) for key, rates in values.items()})


def _answer(url: str, server: str) -> bytes:
    try:
        return read_bytes(url)
    except HeadwayError as error:
        reason = str(error).removeprefix(f"{url}: ")
        raise HeadwayError(f"gateway.demand_history: {server}: {reason}") from None
