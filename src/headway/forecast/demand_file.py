"""A demand forecast as a Parquet file: one row for each hour and model, with units in the column names and other values
in the metadata."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
from msgspec import structs
from pyarrow import parquet

from headway.core.errors import HeadwayError
from headway.forecast.demand import DemandForecast, ModelDemand
from headway.workload.atomic_file import open_atomic

METADATA = b"headway.demand"
ALL_MODELS = "(all)"


def save(forecast: DemandForecast, path: Path) -> None:
    """Write the forecast. Raises HeadwayError if the name does not end in .parquet, or the file cannot be written."""
    if path.suffix != ".parquet":
        raise HeadwayError(f"{path}: expected a name that ends in .parquet")
    parts = [structs.replace(forecast.total, model=ALL_MODELS), *forecast.by_model]
    columns: dict[str, list[Any]] = {"begins": [], "model": []}
    names = [_column(q) for q in forecast.quantiles]
    columns |= {name: [] for name in names} | {"prompt_tokens_mean": [], "output_tokens_mean": []}
    begins = [forecast.hour(step).isoformat() for step in range(forecast.num_steps)]
    for part in parts:
        columns["begins"] += begins
        columns["model"] += [part.model] * len(begins)
        for name, row in zip(names, part.requests_per_s, strict=True):
            columns[name] += row
        columns["prompt_tokens_mean"] += [part.prompt_tokens_mean] * len(begins)
        columns["output_tokens_mean"] += [part.output_tokens_mean] * len(begins)
    empty = structs.replace(forecast, total=_without(forecast.total), by_model=tuple(map(_without, forecast.by_model)))
    metadata = {METADATA: msgspec.json.encode(empty), b"unit": b"requests per second, in the hour that begins"}
    with open_atomic(path) as file:
        parquet.write_table(pa.table(columns).replace_schema_metadata(metadata), file)


def load(path: Path) -> DemandForecast:
    """Load a forecast that `save` wrote. Raises HeadwayError for another file."""
    try:
        table = parquet.read_table(path)
    except (pa.ArrowException, OSError) as error:
        reason = "no such file" if not path.exists() else f"not readable as Parquet: {error}"
        raise HeadwayError(f"{path}: {reason}; expected a file of headway forecast demand") from None
    content = (table.schema.metadata or {}).get(METADATA)
    if content is None:
        raise HeadwayError(f"{path}: not a demand forecast; expected a file that headway forecast demand wrote")
    try:
        empty = msgspec.json.decode(content, type=DemandForecast)
        rows = table.select(["model", *(_column(q) for q in empty.quantiles)]).to_pydict()
    except (msgspec.DecodeError, KeyError) as error:
        raise HeadwayError(f"{path}: a demand forecast of another version: {error}; forecast anew") from None
    total = _with(empty.total, ALL_MODELS, rows, empty.quantiles)
    return structs.replace(
        empty, total=total, by_model=tuple(_with(each, each.model, rows, empty.quantiles) for each in empty.by_model)
    )


def _without(part: ModelDemand) -> ModelDemand:
    return structs.replace(part, requests_per_s=())


def _with(part: ModelDemand, name: str, rows: dict[str, list[Any]], quantiles: Sequence[float]) -> ModelDemand:
    own = [i for i, model in enumerate(rows["model"]) if model == name]
    return structs.replace(part, requests_per_s=tuple(tuple(rows[_column(q)][i] for i in own) for q in quantiles))


def _column(quantile: float) -> str:
    return f"p{100 * quantile:g}_requests_per_s"
