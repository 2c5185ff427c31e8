"""Turns the `workload:` section into requests: a source for a driver, or a table.

Arrivals, lengths and all other properties have their own random streams, so a change of one does not affect the others.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from msgspec import structs

from headway.core.errors import HeadwayError, unknown
from headway.workload import lengths, transform
from headway.workload.arrivals import Replay, poisson_of_rate
from headway.workload.demand import demand_rows
from headway.workload.programs import ProgramCalls, Programs, TracedCalls, flattened_programs
from headway.workload.quality_source import scored
from headway.workload.random_streams import column_of, draw, drawing, stream
from headway.workload.sessions import Sessions, SessionTurns, flattened
from headway.workload.sources import ClosedLoop, RequestSource, TraceSource
from headway.workload.spec import AgentsSpec, MixPart, TraceSpec, WorkloadSpec, resolved
from headway.workload.table import DTYPES, MAX_TOKENS, NAMED, Floats, Longs, Prefix, Workload, constant
from headway.workload.tiers import SloSpec, TierSpec


def build(spec: WorkloadSpec, seed: int, base_dir: str | Path = ".") -> RequestSource:
    """Build the source of requests. The same spec and seed give the same requests. Paths are relative to `base_dir`."""
    full = resolved(spec)
    with _memory_errors():
        if full.sessions is not None:
            return Sessions(_session_turns(full, seed, Path(base_dir)))
        if full.agents is not None:
            return Programs(_program_calls(full, full.agents, seed, Path(base_dir)))
        if full.trace is not None and _has_programs(full, Path(base_dir)):
            return Programs(_traced_calls(full, seed, Path(base_dir)))
        rows = _rows(full, seed, Path(base_dir))
        if full.concurrency is not None:
            return ClosedLoop(rows, full.concurrency, full.think_s or 0.0)
        return TraceSource(rows)


def generate(spec: WorkloadSpec, seed: int, base_dir: str | Path = ".") -> Workload:
    """Generate the requests as a table of fixed arrivals.

    Turns of a session are spaced by their think times, as if answers took no time. Requests of a closed loop keep
    their own arrival times.
    """
    full = resolved(spec)
    with _memory_errors():
        if full.sessions is not None:
            return flattened(_session_turns(full, seed, Path(base_dir)))
        if full.agents is not None:
            return flattened_programs(_program_calls(full, full.agents, seed, Path(base_dir)))
        if full.trace is not None and _has_programs(full, Path(base_dir)):
            return flattened_programs(_traced_calls(full, seed, Path(base_dir)))
        return _rows(full, seed, Path(base_dir))


def _rows(full: WorkloadSpec, seed: int, base_dir: Path) -> Workload:
    if full.quality is None:
        return _request_rows(full, seed, base_dir)
    bare = structs.replace(full, quality=None, prompt_tokens=1, output_tokens=1)
    return scored(_request_rows(bare, seed, base_dir), full.quality, seed, base_dir).validate("workload")


@contextmanager
def _memory_errors() -> Iterator[None]:
    """Turn a MemoryError into a HeadwayError."""
    try:
        yield
    except MemoryError as error:
        raise HeadwayError(f"workload: does not fit in memory ({error}); ask for fewer requests") from None


def _request_rows(spec: WorkloadSpec, seed: int, base_dir: Path) -> Workload:
    """One row per request of a trace or a synthetic workload, with tiers, SLOs, models and regions."""
    if spec.trace is not None:
        return _with_properties(_trace_rows(spec, seed, base_dir), spec, seed).validate(_path(spec, base_dir).name)
    if spec.demand is not None:
        return _with_properties(demand_rows(spec, seed, base_dir), spec, seed).validate("workload")
    arrival_s = _arrival_times(spec, seed, spec.num_requests, base_dir)
    rows = _with_lengths(arrival_s, spec, seed)
    if spec.prefixes is not None:
        rows = _with_prefixes(rows, spec, seed)
    return _with_properties(rows, spec, seed).validate("workload")


def _session_turns(spec: WorkloadSpec, seed: int, base_dir: Path) -> SessionTurns:
    assert spec.sessions is not None
    counts = _turn_counts(spec, seed, base_dir)
    starts = _arrival_times(spec, seed, len(counts), base_dir)
    counts = counts[: len(starts)]
    offsets = np.concatenate(([0], np.cumsum(counts))).astype("i8")
    opening = _with_properties(_empty(starts), spec, seed)
    group, group_tokens = _groups(spec, seed, len(counts))
    session = np.repeat(np.arange(len(counts)), counts)
    by_turn = opening.take(session)
    rows = by_turn.with_columns(_with_lengths(by_turn.arrival_s, spec, seed).columns)
    think_s = _lognormal_s(spec.sessions.think_s, spec.sessions.think_cv, stream(seed, "think_s"), len(session))
    turns = SessionTurns(rows, offsets, think_s, group, group_tokens)
    _check_longest("session", turns.requests())
    return turns


def _check_longest(what: str, requests: Workload) -> None:
    longest = requests.prompt_tokens.max(initial=0)
    if longest > MAX_TOKENS:
        raise HeadwayError(f"workload: a {what} grows to {longest:,} prompt tokens; expected {MAX_TOKENS:,} at most")


def _program_calls(spec: WorkloadSpec, agents: AgentsSpec, seed: int, base_dir: Path) -> ProgramCalls:
    most = spec.num_requests if spec.num_requests is not None else sys.maxsize
    starts = _arrival_times(spec, seed, spec.num_requests, base_dir)
    steps = lengths.sample(agents.steps, "prompt_tokens", stream(seed, "steps"), len(starts), "steps")
    fans = stream(seed, "fan out")
    graph = _CallGraph(agents)
    offsets = [0]
    for num_steps in steps.tolist():
        if offsets[-1] >= most:
            break
        graph.add_program((fans.random(num_steps) < agents.fan_out_share).tolist(), most)
        offsets.append(len(graph.after))
    num_programs = len(offsets) - 1
    starts = starts[:num_programs]
    opening = _with_properties(_empty(starts), spec, seed)
    by_call = opening.take(np.repeat(np.arange(num_programs), np.diff(offsets)))
    rows = by_call.with_columns(_with_lengths(by_call.arrival_s, spec, seed).columns)
    new, output = rows.prompt_tokens.copy(), rows.output_tokens
    for row, sources in graph.results:
        new[row] += sum(int(output[source]) for source in sources)
    group, group_tokens = _groups(spec, seed, num_programs)
    calls = ProgramCalls(
        rows.with_columns({"prompt_tokens": new}),
        np.array(offsets, "i8"),
        np.array(graph.context, "i8"),
        graph.after,
        _lognormal_s(agents.tool_s, agents.tool_cv, stream(seed, "tool_s"), len(graph.after)),
        group,
        group_tokens,
    )
    _check_longest("program", calls.requests())
    return calls


class _CallGraph:
    """The calls of all programs, each after the calls that it depends on."""

    def __init__(self, agents: AgentsSpec) -> None:
        self._agents = agents
        self.context: list[int] = []
        self.after: list[tuple[int, ...]] = []
        self.results: list[tuple[int, list[int]]] = []
        """Calls whose new tokens contain the answers of other calls: row, and the rows of these calls."""

    def add_program(self, fans: Sequence[bool], most: int) -> None:
        """Add a program with a step for each item of `fans`, which tells whether the step calls sub-agents. `most`:
        total calls."""
        agents, last = self._agents, -1
        answers: list[int] = []
        for i, has_fan in enumerate(fans):
            after = tuple(answers) if answers else (last,) * (last >= 0)
            step = self._add(last, after)
            if answers:
                self.results.append((step, answers))
            last, answers = step, []
            for _ in range(agents.fan_out if has_fan and i + 1 < len(fans) else 0):
                context, before = last if agents.sub_context == "parent" else -1, last
                for _ in range(agents.sub_steps):
                    context = before = self._add(context, (before,))
                answers.append(before)
        del self.context[most:], self.after[most:]
        self.results = [(row, sources) for row, sources in self.results if row < most]

    def _add(self, context: int, after: tuple[int, ...]) -> int:
        self.context.append(context)
        self.after.append(after)
        return len(self.after) - 1


def _trace_rows(spec: WorkloadSpec, seed: int, base_dir: Path) -> Workload:
    # Readers import pyarrow; synthetic workloads do not need it.
    from headway.workload.read import detect, read

    trace, path = spec.trace, _path(spec, base_dir)
    if isinstance(trace, str) or trace is None:
        rows = _renamed(read(path), None, detect(path), spec)
        return rows if spec.arrivals is None else _rescheduled(rows, spec, seed, base_dir)
    rows = read(
        path,
        trace.format,
        limit=trace.limit,
        sort=trace.sort,
        skip_bad=trace.skip_bad,
        timestamp_unit=trace.timestamp_unit,
        block_tokens=trace.block_tokens,
        spread_ticks=trace.spread_ticks,
    )
    rows = _renamed(rows, trace.models, trace.format or detect(path), spec)
    if trace.without_models:
        rows = _without_models(rows, trace.without_models, path)
    if trace.from_s > 0 or trace.to_s is not None:
        rows = transform.window(rows, trace.from_s, trace.to_s)
    if not len(rows):
        raise HeadwayError(f"{path}: no request arrives from {trace.from_s} s to {trace.to_s} s")
    if spec.arrivals is not None:
        rows = _rescheduled(rows, spec, seed, base_dir)
    return rows if trace.rate_scale == 1.0 else transform.scale_rate(rows, trace.rate_scale)


def _has_programs(spec: WorkloadSpec, base_dir: Path) -> bool:
    """Whether the trace has calls that wait for others."""
    from headway.workload.read import detect

    given = None if isinstance(spec.trace, str) or spec.trace is None else spec.trace.format
    return (given or detect(_path(spec, base_dir))) == "mooncake-agents" and spec.concurrency is None


def _traced_calls(spec: WorkloadSpec, seed: int, base_dir: Path) -> TracedCalls:
    """The programs of a trace. Trace options about time select and move whole programs."""
    from headway.workload.agent_calls import read_calls
    from headway.workload.read import check_unsaid
    from headway.workload.readers.shared import ReadOptions

    path = _path(spec, base_dir)
    trace = TraceSpec(path=str(path)) if isinstance(spec.trace, str) or spec.trace is None else spec.trace
    options = ReadOptions(
        trace.limit, trace.sort, trace.skip_bad, trace.timestamp_unit, trace.block_tokens, trace.spread_ticks
    )
    check_unsaid(options, "mooncake-agents", path)
    calls = read_calls(path, options)
    start_s = calls.rows.arrival_s[calls.offsets[:-1]]
    end_s = math.inf if trace.to_s is None else trace.to_s
    calls = calls.take(np.flatnonzero((start_s >= trace.from_s) & (start_s < end_s)))
    if not len(calls.rows):
        raise HeadwayError(f"{path}: no program starts from {trace.from_s} s to {trace.to_s} s")
    start_s = calls.rows.arrival_s[calls.offsets[:-1]] - trace.from_s
    if spec.arrivals is not None:
        num = None if isinstance(spec.arrivals, Replay) else len(start_s)
        start_s = _arrival_times(spec, seed, num, base_dir)[: len(start_s)]
        calls = calls.take(np.arange(len(start_s)))
    start_s = start_s / trace.rate_scale
    program = calls.program_of_row()
    opening = _with_properties(_empty(start_s), spec, seed).take(program)
    columns = {**opening.columns, **calls.rows.columns, "arrival_s": start_s[program]}
    rows = replace(opening, columns=columns, prefix=calls.rows.prefix, notes=calls.rows.notes)
    return replace(calls, rows=rows)


def _rescheduled(rows: Workload, spec: WorkloadSpec, seed: int, base_dir: Path) -> Workload:
    """Give the rows of a trace the arrival times of `arrivals`, in order."""
    all_rows = None if isinstance(spec.arrivals, Replay) else len(rows)
    arrival_s = _arrival_times(spec, seed, spec.num_requests or all_rows, base_dir)
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


def _renamed(rows: Workload, models: dict[str, str] | None, format_name: str, spec: WorkloadSpec) -> Workload:
    """Replace the trace's model names by names of the fleet."""
    if "model" not in rows.columns:
        return rows
    if models is None:
        if format_name.startswith("headway") or (spec.models is not None and set(_factors(spec)) <= set(rows.models)):
            return rows
        note = f"the trace's models ({', '.join(rows.models)}) are left out; trace.models would keep them"
        return replace(rows.with_columns({"model": None}), models=(), notes=(*rows.notes, note))
    for name in rows.models:
        if name not in models:
            raise HeadwayError(f"workload: trace.models: the trace's model {name!r} is missing")
    targets = tuple(dict.fromkeys(models[name] for name in rows.models))
    codes = np.array([targets.index(models[name]) for name in rows.models], "i2")
    columns = {**rows.columns, "model": codes[rows.columns["model"].astype("i8")]}
    return replace(rows, columns=columns, models=targets)


def _without_models(rows: Workload, names: Sequence[str], path: Path) -> Workload:
    """The requests without those for the models `names`. Raises HeadwayError if no request would be left."""
    left_out = [code for code, name in enumerate(rows.models) if name in names]
    if "model" not in rows.columns or not left_out:
        return rows
    is_kept = ~np.isin(rows.columns["model"], left_out)
    if not is_kept.any():
        raise HeadwayError(f"{path}: all requests are for {', '.join(names)}, which is left out")
    what = ", ".join(name for name in rows.models if name in names)
    kept = rows.take(np.flatnonzero(is_kept))
    note = f"{len(rows) - len(kept):,} of the trace's {len(rows):,} requests are left out, those for {what}"
    return replace(kept, notes=(*kept.notes, note))


def _arrival_times(spec: WorkloadSpec, seed: int, num: int | None, base_dir: Path) -> Floats:
    """Arrival times of requests, or of sessions."""
    if spec.arrivals is None:
        return np.zeros(num or 0)
    if isinstance(spec.arrivals, Replay):
        return _replayed(spec.arrivals, num, spec.duration_s, base_dir)
    process = poisson_of_rate(spec.arrivals) if isinstance(spec.arrivals, (int, float)) else spec.arrivals
    arrival_s = process.times(stream(seed, "arrivals"), num, spec.duration_s)
    if not len(arrival_s):
        raise HeadwayError(f"workload: nothing arrives within {spec.duration_s} s")
    return arrival_s


def _replayed(replay: Replay, num: int | None, duration_s: float | None, base_dir: Path) -> Floats:
    from headway.workload.read import read

    arrival_s = read(base_dir / replay.path, replay.format, sort=replay.sort).arrival_s / replay.rate_scale
    arrival_s = arrival_s[arrival_s < (math.inf if duration_s is None else duration_s)]
    if num is not None and duration_s is None and num > len(arrival_s):
        raise HeadwayError(f"workload: num_requests: {num:,}; the trace {replay.path} has {len(arrival_s):,} arrivals")
    return arrival_s[:num]


def _empty(arrival_s: Floats) -> Workload:
    ones = np.ones(len(arrival_s), "i4")
    return Workload({"arrival_s": arrival_s, "prompt_tokens": ones, "output_tokens": ones})


def _with_lengths(arrival_s: Floats, spec: WorkloadSpec, seed: int) -> Workload:
    return Workload({"arrival_s": arrival_s, **_token_columns(spec, len(arrival_s), seed)})


def _token_columns(spec: WorkloadSpec, num: int, seed: int) -> dict[str, npt.NDArray[Any]]:
    """Prompt, output and, if any request reasons, reasoning tokens (part of the outputs) of `num` requests.

    A request of a mix has the lengths that it would have if all requests were of its kind. Changed shares therefore
    change only the kinds of requests.
    """
    if spec.mix is None:
        names = _TOKENS if spec.reasoning_tokens is not None else _TOKENS[:2]
        return {name: column_of(num, "i4", _tokens(spec, name, seed)) for name in names}
    names = _TOKENS if any(kind.reasoning_tokens is not None for kind in spec.mix) else _TOKENS[:2]
    return {name: column_of(num, "i4", _mixed_tokens(spec.mix, name, seed)) for name in names}


_TOKENS: tuple[lengths.Column, ...] = ("prompt_tokens", "output_tokens", "reasoning_tokens")
Tokens = Callable[[int], Longs]
"""Draws the tokens of the next n requests."""


def _mixed_tokens(mix: Sequence[MixPart], name: lengths.Column, seed: int) -> Tokens:
    """Draws a column of requests of several kinds."""
    kind_of = drawing(list(range(len(mix))), [part.share for part in mix], seed, "mix")
    absent: Tokens = lambda num: np.zeros(num, "i8")  # noqa: E731
    without = [name == "reasoning_tokens" and part.reasoning_tokens is None for part in mix]
    kinds = [absent if none else _tokens(part, name, seed) for none, part in zip(without, mix, strict=True)]
    return lambda num: np.asarray(np.stack([tokens(num) for tokens in kinds])[kind_of(num), np.arange(num)])


def _tokens(spec: WorkloadSpec | MixPart, name: lengths.Column, seed: int, alone: bool = False) -> Tokens:
    """Draws a column of requests of one kind. Output tokens include reasoning tokens, unless they are drawn `alone`.

    Prompt, reasoning and answer are drawn independently, or tied by a rank correlation: a Gaussian copula with one
    common factor, so that each keeps its own distribution. In real traces long reasoning comes with long answers
    (Spearman 0.43 in ServeGen's reasoning requests, over its clients), and both occupy a request's memory.
    """
    if name == "output_tokens" and spec.reasoning_tokens is not None and not alone:
        answer, reasoning = _tokens(spec, name, seed, alone=True), _tokens(spec, "reasoning_tokens", seed)
        return lambda num: answer(num) + reasoning(num)
    length, random = getattr(spec, name), stream(seed, name)
    if not spec.correlation:
        return partial(lengths.sample, length, name, random, where=name)
    common = stream(seed, "correlation")
    # For two normals with correlation r, the rank correlation is 6 / pi * asin(r / 2).
    shared = 2 * math.sin(math.pi / 6 * spec.correlation)

    def tied(num: int) -> Longs:
        scores = math.sqrt(shared) * common.standard_normal(num) + math.sqrt(1 - shared) * random.standard_normal(num)
        return lengths.at_scores(length, name, scores, name)

    return tied


def _groups(
    spec: WorkloadSpec, seed: int, num: int
) -> tuple[npt.NDArray[np.int32] | None, npt.NDArray[np.int32] | None]:
    """The prefix group of each of `num` requests (-1 = none), and the prefix tokens of each group."""
    prefixes = spec.prefixes
    if prefixes is None:
        return None, None
    shares = (np.arange(1, prefixes.num_groups + 1) ** -float(prefixes.skew)).tolist()
    group = draw(list(range(prefixes.num_groups)), shares, num, seed, "prefix groups").astype("i4")
    if prefixes.share < 1:
        group[stream(seed, "prefix share").random(num) >= prefixes.share] = -1
    num_groups = prefixes.num_groups
    if prefixes.per_tenant and spec.tenants is not None:
        names, tenant = _mixed(spec.tenants, num, seed, NAMED["tenant"])
        group = np.where(group >= 0, group + num_groups * tenant, -1).astype("i4")
        num_groups *= len(names)
    random = stream(seed, "prefix_tokens")
    tokens = lengths.sample(prefixes.prefix_tokens, "prompt_tokens", random, num_groups, "prefix_tokens")
    return group, tokens.astype("i4")


def _with_prefixes(rows: Workload, spec: WorkloadSpec, seed: int) -> Workload:
    group, tokens = _groups(spec, seed, len(rows))
    assert group is not None and tokens is not None
    grouped = group >= 0
    own = group[grouped].astype("i8")
    prompt = rows.prompt_tokens + np.where(grouped, tokens[group], 0).astype("i4")
    offsets = np.concatenate(([0], np.cumsum(grouped))).astype("i8")
    return Workload({**rows.columns, "prompt_tokens": prompt}, prefix=Prefix(offsets, own, tokens[own]))


def _with_properties(rows: Workload, spec: WorkloadSpec, seed: int) -> Workload:
    """Add the tiers, objectives, models, regions, tenants, adapters and timeouts of the spec."""
    if spec.slo is not None:
        rows = transform.with_slo(rows, **_objectives(spec.slo))
    if spec.timeout_s is not None:
        rows = transform.with_slo(rows, timeout_s=spec.timeout_s)
    if spec.acceptance is not None:
        rows = rows.with_columns({"acceptance": constant(len(rows), spec.acceptance)})
    if isinstance(spec.tiers, tuple):  # `resolved` has replaced a mix.
        if spec.demand is None:
            rows = transform.retier(rows, {t.tier: t.share for t in spec.tiers}, seed)
        for tier in spec.tiers:
            rows = transform.with_slo(rows, tier=tier.tier, timeout_s=tier.timeout_s, **_objectives(tier))
    mixes = {"model": spec.models, "region": spec.regions, "tenant": spec.tenants}
    if spec.demand is not None:  # Demand sets models and regions itself.
        mixes = {"tenant": spec.tenants}
    elif spec.models is not None and "model" in rows.columns:
        rows = _only_models(rows, _factors(spec), seed)
        del mixes["model"]
    if spec.loras is not None:
        mixes["lora"] = spec.loras.all_shares()
    for column, mix in mixes.items():
        if mix is not None:
            names, codes = _mixed(mix, len(rows), seed, NAMED[column], DTYPES[column])
            changes: dict[str, Any] = {"columns": {**rows.columns, column: codes}, NAMED[column]: names}
            rows = replace(rows, **changes)
    return rows


def _factors(spec: WorkloadSpec) -> dict[str, float]:
    """The selected models, and the factors on their rates."""
    return {spec.models: 1.0} if isinstance(spec.models, str) else dict(spec.models or {})


def _only_models(rows: Workload, factors: dict[str, float], seed: int) -> Workload:
    """A trace's requests for these models. Of each model, a share equal to its factor is kept."""
    unwanted = [name for name in factors if name not in rows.models]
    if unwanted:
        raise unknown("model", unwanted[0], rows.models, "workload: models: the trace has requests of its own models")
    for name, factor in factors.items():
        if not 0 <= factor <= 1:
            raise HeadwayError(
                f"workload: models: {name}: {factor:g}; expected a share of the trace's requests, 0 to 1"
            )
    share = np.array([factors.get(name, 0.0) for name in rows.models])[rows.columns["model"].astype("i8")]
    kept = stream(seed, "models").random(len(rows)) < share
    if not kept.any():
        raise HeadwayError(f"workload: models: no request of the trace is for {', '.join(factors)}")
    num_left_out = int((~kept).sum())
    note = f"{num_left_out:,} requests for other models are left out" if num_left_out else ""
    chosen = rows.take(kept)
    return chosen.with_notes(note) if note else chosen


def _objectives(spec: SloSpec | TierSpec) -> dict[str, Any]:
    return {name: getattr(spec, name) for name in ("ttft_s", "tpot_s", "e2e_s", "deadline_after_s")}


def _mixed(
    mix: str | dict[str, float], num: int, seed: int, name: str, dtype: str = "i8"
) -> tuple[tuple[str, ...], npt.NDArray[Any]]:
    shares = {mix: 1.0} if isinstance(mix, str) else mix
    codes = drawing(list(range(len(shares))), list(shares.values()), seed, name)
    return tuple(shares), column_of(num, dtype, codes)


def _turn_counts(spec: WorkloadSpec, seed: int, base_dir: Path) -> Longs:
    """Number of turns of each session. The sum is `num_requests` if the spec sets it."""
    assert spec.sessions is not None and not isinstance(spec.sessions.turns, str)
    turns, random = spec.sessions.turns, stream(seed, "turns")
    draw: Callable[[int], Longs] = lambda n: lengths.sample(turns, "prompt_tokens", random, n, "turns")  # noqa: E731
    if spec.num_requests is None:
        return draw(len(_arrival_times(spec, seed, None, base_dir)))
    counts = np.zeros(0, "i8")
    while (total := int(counts.sum())) < spec.num_requests:
        counts = np.concatenate((counts, draw((spec.num_requests - total) // 2 + 16)))
    ends = np.cumsum(counts)
    last = int(np.searchsorted(ends, spec.num_requests))
    counts[last] -= ends[last] - spec.num_requests
    return counts[: last + 1]


def _lognormal_s(mean_s: float, cv: float, random: np.random.Generator, num: int) -> Floats:
    if mean_s == 0 or cv == 0:
        return np.full(num, mean_s)
    variance = math.log1p(cv**2)
    return random.lognormal(math.log(mean_s) - variance / 2, math.sqrt(variance), num)
