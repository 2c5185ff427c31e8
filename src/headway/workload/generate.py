"""From a spec to rows: arrivals and lengths have streams of their own, so changing one leaves the others."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from headway.core.errors import HeadwayError
from headway.workload import lengths, transform
from headway.workload.arrivals import Replay, of_rate
from headway.workload.check import MAX_TOKENS
from headway.workload.demand_rows import demanded
from headway.workload.joint import token_columns
from headway.workload.sessions import Turns
from headway.workload.streams import draw, stream
from headway.workload.table import Floats, Longs, Prefix, Workload

if TYPE_CHECKING:
    from headway.workload.spec import WorkloadSpec


def rows_of(spec: WorkloadSpec, seed: int, base_dir: Path) -> Workload:
    """One row per request, of a trace or synthetic, with tiers, SLOs, models and regions."""
    if spec.trace is not None:
        return _dressed(_traced(spec, seed, base_dir), spec, seed).validate(_path(spec, base_dir).name)
    if spec.demand is not None:
        return _dressed(demanded(spec, seed, base_dir), spec, seed).validate("workload")
    arrival_s = _starts(spec, seed, spec.num_requests, base_dir)
    rows = _with_lengths(arrival_s, spec, seed)
    if spec.prefixes is not None:
        rows = _with_prefixes(rows, spec, seed)
    return _dressed(rows, spec, seed).validate("workload")


def turns_of(spec: WorkloadSpec, seed: int, base_dir: Path) -> Turns:
    """Sessions, turn by turn."""
    assert spec.sessions is not None
    counts = _turn_counts(spec, seed, base_dir)
    starts = _starts(spec, seed, len(counts), base_dir)
    counts = counts[: len(starts)]
    offsets = np.concatenate(([0], np.cumsum(counts))).astype("i8")
    opening = _dressed(_empty(starts), spec, seed)
    group, group_tokens = _groups(spec, seed, len(counts))
    session = np.repeat(np.arange(len(counts)), counts)
    dress = opening.take(session)
    said = _with_lengths(dress.arrival_s, spec, seed)
    rows = dress.with_columns(said.columns)
    think_s = _think_s(spec.sessions.think_s, spec.sessions.think_cv, seed, len(session))
    turns = Turns(rows, offsets, think_s, group, group_tokens)
    longest = turns.requests().prompt_tokens.max(initial=0)
    if longest > MAX_TOKENS:
        raise HeadwayError(f"workload: a session grows to {longest:,} prompt tokens; expected {MAX_TOKENS:,} at most")
    return turns


def _traced(spec: WorkloadSpec, seed: int, base_dir: Path) -> Workload:
    # Readers need pyarrow, which synthetic workloads do without.
    from headway.workload.readers.read import detect, read

    trace, path = spec.trace, _path(spec, base_dir)
    if isinstance(trace, str) or trace is None:
        rows = _renamed(read(path), None, detect(path))
        return rows if spec.arrivals is None else _rescheduled(rows, spec, seed, base_dir)
    rows = read(path, trace.format, limit=trace.limit, sort=trace.sort, skip_bad=trace.skip_bad)
    rows = _renamed(rows, trace.models, trace.format or detect(path))
    if trace.from_s > 0 or trace.to_s is not None:
        rows = transform.window(rows, trace.from_s, trace.to_s)
    if not len(rows):
        raise HeadwayError(f"{path}: no request arrives from {trace.from_s} s to {trace.to_s} s")
    if spec.arrivals is not None:
        rows = _rescheduled(rows, spec, seed, base_dir)
    return rows if trace.rate_scale == 1.0 else transform.scale_rate(rows, trace.rate_scale)


def _rescheduled(rows: Workload, spec: WorkloadSpec, seed: int, base_dir: Path) -> Workload:
    """The rows of a trace in their order, at the times that `arrivals` says."""
    all_rows = None if isinstance(spec.arrivals, Replay) else len(rows)
    arrival_s = _starts(spec, seed, spec.num_requests or all_rows, base_dir)
    if spec.num_requests is None:
        arrival_s = arrival_s[: len(rows)]
    if len(arrival_s) > len(rows):
        name = _path(spec, base_dir).name
        raise HeadwayError(f"workload: num_requests: {len(arrival_s):,}; the trace {name} has {len(rows):,} requests")
    moved = transform.arriving_at(rows.head(len(arrival_s)), arrival_s)
    return moved.with_notes("requests arrive as `arrivals` says, not at the times of the trace")


def _path(spec: WorkloadSpec, base_dir: Path) -> Path:
    assert spec.trace is not None
    return base_dir / (spec.trace if isinstance(spec.trace, str) else spec.trace.path)


def _renamed(rows: Workload, models: dict[str, str] | None, format_name: str) -> Workload:
    """With the trace's model names as the fleet knows them."""
    if "model" not in rows.columns:
        return rows
    if models is None:
        if format_name.startswith("headway"):
            return rows
        note = f"the trace's models ({', '.join(rows.models)}) are left out; trace.models would keep them"
        return Workload(rows.with_columns({"model": None}).columns, (), rows.regions, rows.prefix, (*rows.notes, note))
    for name in rows.models:
        if name not in models:
            raise HeadwayError(f"workload: trace.models: says nothing of the trace's model {name!r}")
    targets = tuple(dict.fromkeys(models[name] for name in rows.models))
    codes = np.array([targets.index(models[name]) for name in rows.models], "i2")
    columns = {**rows.columns, "model": codes[rows.columns["model"].astype("i8")]}
    return Workload(columns, targets, rows.regions, rows.prefix, rows.notes)


def _starts(spec: WorkloadSpec, seed: int, num: int | None, base_dir: Path) -> Floats:
    """When requests, or sessions, begin."""
    if spec.arrivals is None:
        return np.zeros(num or 0)
    if isinstance(spec.arrivals, Replay):
        return _replayed(spec.arrivals, num, spec.duration_s, base_dir)
    process = of_rate(spec.arrivals) if isinstance(spec.arrivals, (int, float)) else spec.arrivals
    arrival_s = process.times(stream(seed, "arrivals"), num, spec.duration_s)
    if not len(arrival_s):
        raise HeadwayError(f"workload: nothing arrives within {spec.duration_s} s")
    return arrival_s


def _replayed(replay: Replay, num: int | None, duration_s: float | None, base_dir: Path) -> Floats:
    from headway.workload.readers.read import read

    arrival_s = read(base_dir / replay.path, replay.format, sort=replay.sort).arrival_s / replay.rate_scale
    arrival_s = arrival_s[arrival_s < (math.inf if duration_s is None else duration_s)]
    if num is not None and duration_s is None and num > len(arrival_s):
        raise HeadwayError(f"workload: num_requests: {num:,}; the trace {replay.path} has {len(arrival_s):,} arrivals")
    return arrival_s[:num]


def _empty(arrival_s: Floats) -> Workload:
    ones = np.ones(len(arrival_s), "i4")
    return Workload({"arrival_s": arrival_s, "prompt_tokens": ones, "output_tokens": ones})


def _with_lengths(arrival_s: Floats, spec: WorkloadSpec, seed: int) -> Workload:
    """A row for each arrival."""
    return Workload({"arrival_s": arrival_s, **token_columns(spec, len(arrival_s), seed)})


def _groups(
    spec: WorkloadSpec, seed: int, num: int
) -> tuple[npt.NDArray[np.int32] | None, npt.NDArray[np.int32] | None]:
    """The group of each of `num` requests (-1 = none), and the groups' tokens."""
    prefixes = spec.prefixes
    if prefixes is None:
        return None, None
    shares = (np.arange(1, prefixes.num_groups + 1) ** -float(prefixes.skew)).tolist()
    group = draw(list(range(prefixes.num_groups)), shares, num, seed, "prefix groups").astype("i4")
    if prefixes.share < 1:
        group[stream(seed, "prefix share").random(num) >= prefixes.share] = -1
    random = stream(seed, "prefix_tokens")
    tokens = lengths.sample(prefixes.prefix_tokens, "prompt_tokens", random, prefixes.num_groups, "prefix_tokens")
    return group, tokens.astype("i4")


def _with_prefixes(rows: Workload, spec: WorkloadSpec, seed: int) -> Workload:
    group, tokens = _groups(spec, seed, len(rows))
    assert group is not None and tokens is not None
    has = group >= 0
    own = group[has].astype("i8")
    prompt = rows.prompt_tokens + np.where(has, tokens[group], 0).astype("i4")
    offsets = np.concatenate(([0], np.cumsum(has))).astype("i8")
    return Workload({**rows.columns, "prompt_tokens": prompt}, prefix=Prefix(offsets, own, tokens[own]))


def _dressed(rows: Workload, spec: WorkloadSpec, seed: int) -> Workload:
    """With the tiers, promises, models, regions and patience that the spec adds."""
    if spec.slo is not None:
        rows = transform.with_slo(rows, **_promises(spec.slo))
    if spec.timeout_s is not None:
        rows = transform.with_slo(rows, timeout_s=spec.timeout_s)
    if isinstance(spec.tiers, tuple):  # `resolved` has spelled out a mix.
        if spec.demand is None:
            rows = transform.retier(rows, {t.tier: t.share for t in spec.tiers}, seed)
        for tier in spec.tiers:
            rows = transform.with_slo(rows, tier=tier.tier, timeout_s=tier.timeout_s, **_promises(tier))
    if spec.demand is not None:  # It says models and regions itself.
        return rows
    models, regions, columns = rows.models, rows.regions, dict(rows.columns)
    if spec.models is not None:
        models, columns["model"] = _mixed(spec.models, len(rows), seed, "models")
    if spec.regions is not None:
        regions, columns["region"] = _mixed(spec.regions, len(rows), seed, "regions")
    return Workload(columns, models, regions, rows.prefix, rows.notes)


def _promises(said: Any) -> dict[str, Any]:
    return {name: getattr(said, name) for name in ("ttft_s", "tpot_s", "e2e_s", "deadline_after_s")}


def _mixed(mix: str | dict[str, float], num: int, seed: int, name: str) -> tuple[tuple[str, ...], Longs]:
    shares = {mix: 1.0} if isinstance(mix, str) else mix
    return tuple(shares), draw(list(range(len(shares))), list(shares.values()), num, seed, name)


def _turn_counts(spec: WorkloadSpec, seed: int, base_dir: Path) -> Longs:
    """Turns of each session; in all `num_requests` of them, where that is said."""
    assert spec.sessions is not None and not isinstance(spec.sessions.turns, str)
    turns, random = spec.sessions.turns, stream(seed, "turns")
    draw: Callable[[int], Longs] = lambda n: lengths.sample(turns, "prompt_tokens", random, n, "turns")  # noqa: E731
    if spec.num_requests is None:
        return draw(len(_starts(spec, seed, None, base_dir)))
    counts = np.zeros(0, "i8")
    while (total := int(counts.sum())) < spec.num_requests:
        counts = np.concatenate((counts, draw((spec.num_requests - total) // 2 + 16)))
    ends = np.cumsum(counts)
    last = int(np.searchsorted(ends, spec.num_requests))
    counts[last] -= ends[last] - spec.num_requests
    return counts[: last + 1]


def _think_s(mean_s: float, cv: float, seed: int, num: int) -> Floats:
    if mean_s == 0 or cv == 0:
        return np.full(num, mean_s)
    variance = math.log1p(cv**2)
    return stream(seed, "think_s").lognormal(math.log(mean_s) - variance / 2, math.sqrt(variance), num)
