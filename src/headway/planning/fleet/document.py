"""A trace of several models as a scenario to plan a fleet for."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from headway import catalog
from headway.core.duration import seconds
from headway.core.errors import HeadwayError, unknown
from headway.workload.read import read

LIMITS = {"ttft": "ttft_s", "tpot": "tpot_s", "e2e": "e2e_s"}


def slo_of(text: str) -> dict[str, float]:
    """The `slo` section of "ttft=2s,tpot=50ms,e2e=30", in seconds."""
    found: dict[str, float] = {}
    for each in filter(None, (part.strip() for part in text.split(","))):
        name, _, value = each.partition("=")
        if name.strip() not in LIMITS:
            raise unknown("SLO", name.strip(), LIMITS)
        try:
            limit_s = seconds(value)
        except HeadwayError:
            limit_s = 0.0
        if not limit_s:
            raise HeadwayError(f"{each!r}; expected more than 0 seconds, as in ttft=2s or tpot=50ms")
        found[LIMITS[name.strip()]] = limit_s
    if not found:
        raise HeadwayError("nothing is listed; expected ttft=2s, tpot=50ms or e2e=30s")
    return found


def of_trace(
    path: Path, models: Mapping[str, str], engine: str | None = None, limit: int | None = None,
    rate_scale: float | None = None,
) -> dict[str, Any]:  # fmt: skip
    """A scenario with the trace's requests, and a pool for each of its models.

    `models`: requested names -> models of the catalog; names that are missing are models of the catalog themselves.
    HeadwayError for a model that is in neither, or if the trace names none and `models` is not one model.
    """
    names = read(path, limit=limit).models
    if not names:
        if len(models) != 1:
            raise HeadwayError(f"{path}: requests name no model; expected --model MODEL, one of the catalog")
        served: dict[str, str] = {}
        planned = {each: "" for each in models.values()}
    else:
        served = {name: _catalog_name(path, name, models) for name in names}
        planned = {}
        for name, model in served.items():
            planned[model] = "" if model in planned or name == model else name
    trace: dict[str, Any] = {"path": str(path.absolute())}
    trace |= {"limit": limit} if limit is not None else {}
    trace |= {"rate_scale": rate_scale} if rate_scale is not None else {}
    trace |= {"models": served} if served else {}
    engines = {} if engine is None else {"engine": engine}
    fleet = [{"model": model, **engines, **({"served_name": name} if name else {})} for model, name in planned.items()]
    return {"name": path.name.split(".")[0], "workload": {"trace": trace}, "fleet": fleet}


def _catalog_name(path: Path, name: str, models: Mapping[str, str]) -> str:
    try:
        return catalog.model(models.get(name, name)).name
    except HeadwayError as error:
        raise HeadwayError(f"{path}: {error}; --model {name}=MODEL says which model of the catalog it is") from None
