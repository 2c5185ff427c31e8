"""Turns a trace of several models into a scenario for a fleet plan."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from headway import catalog
from headway.config import strict_yaml
from headway.core.errors import HeadwayError
from headway.records import parts
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

    `models` maps requested names to models of the catalog, folders with a config.json, GGUF files, or repositories in
    the hub's local cache. A name without an entry is itself such a model, or one that the fleet file of the trace's
    records reads from a config. `assume`: as in `catalog.model_from_config`. Raises HeadwayError for an unknown model,
    or if the trace names none and `models` is not one model.
    """
    names = read(path, limit=limit).models
    recorded = {} if all(name in models or _is_listed(name) for name in names) else _recorded(path)
    models = {name: config for name, (config, _) in recorded.items()} | dict(models)
    if not names:
        if len(models) != 1:
            raise HeadwayError(f"{path}: requests name no model; expected --model MODEL, one of the catalog")
        served: dict[str, str] = {}
        planned = {_name_of(path, each, models, assume): "" for each in models}
    else:
        served = {name: _name_of(path, name, models, assume) for name in names}
        planned = {}
        for name, model in served.items():
            _, asked = recorded.get(name, ("", ""))
            planned[model] = "" if model in planned or name == model else asked or name
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


def _recorded(path: Path) -> dict[str, tuple[str, str]]:
    """(config, name that clients ask for) of models in the fleet file that served the records, by both names.

    Empty if the trace is no record of a run, or has no fleet file that can be read.
    """
    folder = path if path.is_dir() else path.parent
    found: dict[str, tuple[str, str]] = {}
    with suppress(HeadwayError):
        _, provenance = parts.load(folder)
        text = provenance.get("fleet") or provenance.get("scenario_yaml") or ""
        document, _ = strict_yaml.parse(str(text), str(folder))
        for pool in document.get("fleet") or ():
            if isinstance(pool, Mapping) and isinstance(pool.get("model"), Mapping):
                config = str(pool["model"].get("config", ""))
                model = catalog.model_of_config(config, assume=bool(pool["model"].get("assume")))
                asked = str(pool.get("served_name") or "")
                found |= dict.fromkeys((model.name, asked or model.name), (config, asked))
    return found


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
