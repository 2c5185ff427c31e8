"""Rows of a workload with `demand`: a rate per cell and minute, a Poisson count, and times spread evenly in the minute.

Each cell (tier, model, region) has its own random streams, so omitting a cell does not change the others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from math import inf, log1p, sqrt
from pathlib import Path

import numpy as np
from msgspec import Struct

from headway.core.errors import HeadwayError, unknown
from headway.workload import lengths
from headway.workload.arrivals import BurstWindow
from headway.workload.random_streams import stream
from headway.workload.spec import DemandSpec, Population, SeriesDemand, WorkloadSpec
from headway.workload.table import Floats, Workload

BIN_S = 60.0
HOUR_S = 3600.0
SAMPLED = 200_000
"""Sample size for the mean prompt length of a model, which converts tokens to requests."""


class DemandCell(Struct, frozen=True):
    """The requests of one tier, model and region."""

    tier: int
    model: str
    region: str
    factor: float
    """Factor on `rates`."""
    rates: Callable[[float, int], Floats]
    """Requests per second in each bin, from (start hour, number of bins)."""
    bin_s: float
    num_bins: int | None = None
    """Number of bins in a file; None: endless."""

    @property
    def stream_name(self) -> str:
        return f"{self.tier} {self.model} {self.region}"


def demand_rows(spec: WorkloadSpec, seed: int, base_dir: Path) -> Workload:
    """Rows in order of arrival, with tiers, models and regions but without objectives."""
    assert spec.demand is not None
    cells = [each for each in _cells(spec, spec.demand, seed, base_dir) if each.factor > 0]
    if not cells:
        raise HeadwayError("workload: demand: no demand is left for these models, regions and tiers")
    start_hour, surges = spec.start_hour or 0.0, spec.surges or ()
    duration_s = spec.duration_s if spec.duration_s is not None else _sufficient_duration_s(cells, spec, start_hour)
    models = tuple(dict.fromkeys(each.model for each in cells))
    regions = tuple(dict.fromkeys(each.region for each in cells))
    parts: list[dict[str, np.ndarray[tuple[int], np.dtype[np.generic]]]] = []
    for cell in cells:
        at_s = _times(cell, seed, start_hour, duration_s, surges)
        length, num = spec.demand.lengths[cell.model], len(at_s)
        drawn: dict[str, np.ndarray[tuple[int], np.dtype[np.generic]]] = {
            name: lengths.sample(getattr(length, name), name, stream(seed, f"{name} {cell.stream_name}"), num).astype(
                "i4"
            )
            for name in ("prompt_tokens", "output_tokens")
        }
        codes = {"tier": cell.tier, "model": models.index(cell.model), "region": regions.index(cell.region)}
        parts.append({"arrival_s": at_s, **drawn, **{name: np.full(num, code, "i2") for name, code in codes.items()}})
    columns = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    del parts
    if not len(columns["arrival_s"]):
        raise HeadwayError(f"workload: nothing arrives within {duration_s:g} s")
    order = np.argsort(columns["arrival_s"], kind="stable")[: spec.num_requests]
    for name in columns:
        columns[name] = columns[name][order]
    if regions == ("",):
        del columns["region"]
    return Workload(columns, models, () if regions == ("",) else regions)


def _times(
    cell: DemandCell, seed: int, start_hour: float, duration_s: float, surges: tuple[BurstWindow, ...]
) -> Floats:
    """Arrivals of a cell, unordered within a bin."""
    num_bins = int(np.ceil(min(duration_s / cell.bin_s, inf if cell.num_bins is None else cell.num_bins) - 1e-9))
    rates = cell.rates(start_hour, num_bins) * cell.factor * _surge_factors(surges, num_bins, cell.bin_s)
    random = stream(seed, f"arrivals {cell.stream_name}")
    counts = random.poisson(rates * cell.bin_s)
    at_s = (np.repeat(np.arange(num_bins), counts) + random.random(int(counts.sum()))) * cell.bin_s
    return at_s if num_bins * cell.bin_s <= duration_s else at_s[at_s < duration_s]


def _surge_factors(surges: tuple[BurstWindow, ...], num_bins: int, bin_s: float) -> Floats:
    """The factor of each bin: the surge factors weighted by their overlap with the bin."""
    start_s = np.arange(num_bins) * bin_s
    factor = np.ones(num_bins)
    for each in surges:
        inside_s = np.clip(np.minimum(start_s + bin_s, each.to_s) - np.maximum(start_s, each.from_s), 0.0, None)
        factor *= 1 + (each.factor - 1) * inside_s / bin_s
    return factor


def _sufficient_duration_s(cells: list[DemandCell], spec: WorkloadSpec, start_hour: float) -> float:
    """Seconds within which `num_requests` almost surely arrive; infinite for a file, which is read to its end."""
    if any(cell.num_bins is not None for cell in cells):
        return inf
    assert spec.num_requests is not None
    wanted = spec.num_requests + 6 * sqrt(spec.num_requests) + 10
    num_bins, expected = 60, 0.0
    while True:
        expected = sum(float((cell.rates(start_hour, num_bins) * cell.factor).sum()) * cell.bin_s for cell in cells)
        if expected >= wanted:
            return num_bins * BIN_S
        num_bins *= 2


def _cells(spec: WorkloadSpec, demand: DemandSpec, seed: int, base_dir: Path) -> Iterator[DemandCell]:
    if demand.populations is not None:
        known = list(_population_cells(spec, demand, seed))
    else:
        known = list(_file_cells(spec, demand, base_dir))
    scale = 1.0 if spec.scale is None else spec.scale
    models = _factors(spec.models, [cell.model for cell in known], "models")
    regions = _factors(spec.regions, [cell.region for cell in known], "regions")
    for cell in known:
        factor = cell.factor * scale * models.get(cell.model, 0.0) * regions.get(cell.region, 0.0)
        yield DemandCell(cell.tier, cell.model, cell.region, factor, cell.rates, cell.bin_s, cell.num_bins)


def _factors(chosen: str | Mapping[str, float] | None, known: list[str], key: str) -> Mapping[str, float]:
    """Factor of each chosen name. Without a choice, all have factor 1."""
    if chosen is None:
        return dict.fromkeys(known, 1.0)
    factors = {chosen: 1.0} if isinstance(chosen, str) else chosen
    for name, factor in factors.items():
        if name not in known:
            raise unknown(key.removesuffix("s"), name, known, f"workload: {key}")
        if not 0 <= factor < inf:
            raise HeadwayError(f"workload: {key}: {name}: {factor}; expected a number from 0")
    return factors


def _population_cells(spec: WorkloadSpec, demand: DemandSpec, seed: int) -> Iterator[DemandCell]:
    assert demand.populations is not None and isinstance(spec.arrivals, (int, float))
    tiers = {t.tier: t.share for t in spec.tiers} if isinstance(spec.tiers, tuple) else {}
    weights = [tiers.get(each.tier, 0.0 if tiers else 1.0) for each in demand.populations]
    for tier in tiers:
        if tier not in {each.tier for each in demand.populations}:
            raise HeadwayError(f"workload: tiers: {tier} has no population in demand")
    if sum(weights) <= 0:
        raise HeadwayError("workload: tiers: no population has a share above 0")
    for weight, each in zip(weights, demand.populations, strict=True):
        total = sum(share for by_model in each.cells.values() for share in by_model.values())
        rate = spec.arrivals * weight / sum(weights) / total
        for region, by_model in each.cells.items():
            for model, share in by_model.items():
                rates = _population_rates(each, seed, f"{each.tier} {model} {region}")
                yield DemandCell(each.tier, model, region, rate * share, rates, BIN_S)


def _population_rates(each: Population, seed: int, name: str) -> Callable[[float, int], Floats]:
    """The shape times the cell's noise. The noise depends on the time of the week only, not on the start hour."""

    def rates(start_hour: float, num_bins: int) -> Floats:
        at_s = start_hour * HOUR_S + (np.arange(num_bins, dtype="f8") + 0.5) * BIN_S
        shape = each.shape(at_s)
        if each.noise_cv == 0:
            return shape
        step = (at_s // each.noise_s).astype("i8")
        variance = log1p(each.noise_cv**2)
        noise = stream(seed, f"noise {name}").lognormal(-variance / 2, sqrt(variance), int(step[-1]) + 1)
        return np.asarray(shape * noise[step], "f8")

    return rates


def _file_cells(spec: WorkloadSpec, demand: DemandSpec, base_dir: Path) -> Iterator[DemandCell]:
    from headway.workload.series import read_series  # imports pyarrow, which synthetic demand does not need

    assert demand.path is not None
    path = base_dir / demand.path
    known = {each.name: each for each in read_series(path)}
    for name, source in demand.series.items():
        if name not in known:
            raise unknown("series", name, known, str(path))
        series = known[name]
        first = round((spec.start_hour or 0.0) * HOUR_S / series.step_s)
        if first >= len(series):
            raise HeadwayError(f"workload: start_hour: {spec.start_hour}; {path} ends before")
        per_request = 1.0 if demand.counts == "requests" else _mean_prompt(demand, source.model)
        values = series.values[first:] / (demand.per_s * per_request)
        for region, share in _region_shares(source).items():
            yield DemandCell(
                source.tier, source.model, region, share, _series_rates(values), series.step_s, len(values)
            )


def _series_rates(values: Floats) -> Callable[[float, int], Floats]:
    return lambda start_hour, num_bins: values[:num_bins]


def _mean_prompt(demand: DemandSpec, model: str) -> float:
    random = stream(0, f"mean prompt {model}")
    return float(lengths.sample(demand.lengths[model].prompt_tokens, "prompt_tokens", random, SAMPLED).mean())


def _region_shares(source: SeriesDemand) -> dict[str, float]:
    """Share of each region. Shares sum to 1."""
    shares = {source.regions: 1.0} if isinstance(source.regions, str) else source.regions
    total = sum(shares.values())
    if not all(0 <= share < inf for share in shares.values()) or total <= 0:
        raise HeadwayError(f"workload: demand: series: regions {shares}; expected shares from 0, not all of them 0")
    return {region: share / total for region, share in shares.items()}
