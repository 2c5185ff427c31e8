"""Turns a trace of several models into a scenario for a fleet plan."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from headway import catalog
from headway.core.errors import HeadwayError
from headway.workload.read import read


def of_trace(
    path: Path,
    models: Mapping[str, str],
    engine: str | None = None,
    limit: int | None = None,
    rate_scale: float | None = None,
    assume: bool = False,
) -> dict[str, Any]:
    """A scenario with the trace's requests, and a pool for each of its models.

    `models` maps requested names to models of the catalog, folders with a config.json, or repositories in the hub's
    local cache; a name without an entry is itself such a model. `assume`: as in `catalog.model_from_config`. Raises
    HeadwayError for an unknown model, or if the trace names none and `models` is not one model.
    """
    names = read(path, limit=limit).models
    if not names:
        if len(models) != 1:
            raise HeadwayError(f"{path}: requests name no model; expected --model MODEL, one of the catalog")
        served: dict[str, str] = {}
        planned = {_name_of(path, each, models, assume): "" for each in models}
    else:
        served = {name: _name_of(path, name, models, assume) for name in names}
        planned = {}
        for name, model in served.items():
            planned[model] = "" if model in planned or name == model else name
    trace: dict[str, Any] = {"path": str(path.absolute())}
    trace |= {"limit": limit} if limit is not None else {}
    trace |= {"rate_scale": rate_scale} if rate_scale is not None else {}
    engines = {} if engine is None else {"engine": engine}
    served = {name: model if _is_listed(model) else name for name, model in served.items()}
    trace |= {"models": served} if served else {}
    fleet = [
        {
            "model": model if _is_listed(model) else {"config": model, "assume": assume},
            **engines,
            **({"served_name": name} if name else {}),
        }
        for model, name in planned.items()
    ]
    return {"name": path.name.split(".")[0], "workload": {"trace": trace}, "fleet": fleet}


def _is_listed(name: str) -> bool:
    """Whether the catalog has the model. Otherwise its name locates a config."""
    with suppress(HeadwayError):
        return bool(catalog.model(name))
    return False


def _name_of(path: Path, name: str, models: Mapping[str, str], assume: bool) -> str:
    """A model's name in the catalog, or the place of its config. Raises HeadwayError if there is neither."""
    wanted = models.get(name, name)
    if Path(wanted).exists() and not _is_listed(wanted):
        wanted = str(Path(wanted).absolute())
    try:
        found = catalog.find_model(wanted, assume=assume)
        return found.name if _is_listed(wanted) else wanted
    except HeadwayError as error:
        raise HeadwayError(f"{path}: {error}; --model {name}=MODEL says which model of the catalog it is") from None
