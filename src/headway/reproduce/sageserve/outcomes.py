"""The findings of SageServe's claims."""

from __future__ import annotations

from itertools import pairwise
from statistics import fmean

from headway.reproduce.claims import Value
from headway.reproduce.findings import Finding
from headway.reproduce.sageserve import runs, scenes
from headway.reproduce.sageserve.runs import ALONE, DAY, LONG_TERM, PEAK, SCOUT
from headway.reproduce.sageserve.scenes import (
    BLOOM,
    CHIRON,
    GUARDED,
    LEAK,
    LLAMA_2,
    LLAMA_31,
    LLAMA_32,
    LT_I,
    LT_Q,
    LT_U,
    LT_UA,
    MODELS,
    REACTIVE,
    SILOED,
)
from headway.reproduce.sageserve.table import SageServeRuns, less, more

USD_PER_HOUR = 98.32
"""Price of an instance (7.2.1)."""
Made = dict[str, Finding]


def outcomes(kept: SageServeRuns) -> Made:
    """The findings of all claims whose runs exist."""
    made: Made = {}
    if kept.has(PEAK):
        made |= _silos(kept) | _tables(kept)
    if kept.has(ALONE):
        made |= _chiron(kept) | _beyond(kept)
    if kept.has(DAY):
        made |= _hours(kept) | _waste(kept) | _tails(kept)
    if kept.has(runs.NOVEMBER):
        for name in LONG_TERM:
            made[f"nov-{name}-hours"] = _saved(kept, runs.NOVEMBER, name)
    if kept.has(runs.H100):
        made |= _ablations(kept)
    if kept.has(SCOUT):
        made |= _scout(kept)
    if kept.has(runs.BURST):
        made |= _burst(kept)
    if kept.has(runs.WEEK):
        made |= _week(kept)
    if kept.has(runs.ORDER):
        made |= _order(kept)
    return made


def _silos(kept: SageServeRuns) -> Made:
    both = (SILOED, REACTIVE)
    hours = f"Instance-hours of all models: {kept.means(PEAK, both, 'instance_hours', None)}."
    columns = {
        name: [kept.llama(PEAK, name, "instance_hours", model) for model in (LLAMA_31, LLAMA_32)] for name in both
    }
    small = {name: list(map(sum, zip(*each, strict=True))) for name, each in columns.items()}
    numbers = f"Instance-hours of both: {fmean(small[SILOED]):.3g} (siloed), {fmean(small[REACTIVE]):.3g} (reactive)."
    use = f"KV cache in use, all models: {kept.means(PEAK, both, 'kv_use', None)}."
    spot = f"Hours of all models: {kept.means(PEAK, both, 'spot_hours', None)}."
    pair = {key: [kept.whole(PEAK, name, key) for name in both] for key in ("instance_hours", "kv_use", "spot_hours")}
    return {
        "unified-hours": Finding(less(*reversed(pair["instance_hours"])), hours),
        "unified-small": Finding(less(small[REACTIVE], small[SILOED]), numbers),
        "unified-kv": Finding(more(*reversed(pair["kv_use"])), use),
        "unified-spot": Finding(more(*reversed(pair["spot_hours"])), spot),
    }


def _tables(kept: SageServeRuns) -> Made:
    """Table 1's rows."""

    def longer(model: str, key: str) -> list[Value]:
        return list(more(kept.llama(PEAK, REACTIVE, key, model), kept.llama(PEAK, SILOED, key, model)))

    def numbers(key: str, *models: str) -> str:
        return "; ".join(f"{m}: {kept.means(PEAK, (SILOED, REACTIVE), key, m)}" for m in models)

    def worst(columns: list[list[Value]]) -> list[Value]:
        return [None if None in row else max(v for v in row if v is not None) for row in zip(*columns, strict=True)]

    ttft, e2e, small = "ttft_p95_s", "e2e_p95_s", (LLAMA_31, LLAMA_32)
    return {
        "unified-tail": Finding(longer(BLOOM, ttft), f"P95 TTFT (s), {numbers(ttft, BLOOM)}."),
        "unified-tail-llama-2": Finding(longer(LLAMA_2, ttft), f"P95 TTFT (s), {numbers(ttft, LLAMA_2)}."),
        "unified-tail-small": Finding(
            worst([longer(m, ttft) for m in small]), f"P95 TTFT (s), {numbers(ttft, *small)}."
        ),
        "unified-e2e": Finding(worst([longer(m, e2e) for m in MODELS]), f"P95 E2E (s), {numbers(e2e, *MODELS)}."),
    }


def _saved(kept: SageServeRuns, kind: str, name: str, than: str = REACTIVE) -> Finding:
    """Llama-2's instance-hours."""
    values = less(kept.llama(kind, name, "instance_hours"), kept.llama(kind, than, "instance_hours"))
    hours = kept.means(kind, (than, name), "instance_hours")
    return Finding(values, f"Instance-hours: {hours}; {_late(kept, kind, than, name)}.")


def _late(kept: SageServeRuns, kind: str, *names: str) -> str:
    shares = ", ".join(f"{100 * fmean(kept.llama(kind, name, 'late')):.2g}% ({name})" for name in names)
    return f"late first tokens: {shares}"


def _hours(kept: SageServeRuns) -> Made:
    made = {f"{name}-hours": _saved(kept, DAY, name) for name in LONG_TERM}
    by_region = {
        name: kept.values(DAY, name, lambda run: run["models"][LLAMA_2]["regions"]) for name in (REACTIVE, *LONG_TERM)
    }
    all_less = [
        all(by_region[name][i][region] < hours for name in LONG_TERM for region, hours in reactive.items())
        for i, reactive in enumerate(by_region[REACTIVE])
    ]
    first = "; ".join(
        f"{name}: " + ", ".join(f"{hours:.3g}" for hours in each[0].values()) for name, each in by_region.items()
    )
    saved = [None if v is None else USD_PER_HOUR * v for v in made["lt-ua-hours"].values]
    return made | {
        "lt-regions": Finding(all_less, f"Instance-hours by region, first seed: {first}."),
        "usd-saved": Finding(saved, f"Per instance-hour of reactive scaling. {made['lt-ua-hours'].why}"),
        "a100-hours": made["lt-ua-hours"],
    }


def _waste(kept: SageServeRuns) -> Made:
    def fewer(name: str, key: str) -> list[float | None]:
        return less(kept.llama(DAY, name, key), kept.llama(DAY, REACTIVE, key))

    made = {}
    for name in LONG_TERM:
        both = (REACTIVE, name)
        why = (
            f"Instance-hours in which instances start: {kept.means(DAY, both, 'wasted_hours')}; starts:"
            f" {kept.means(DAY, both, 'starts')}."
        )
        made[f"{name}-waste"] = Finding(fewer(name, "wasted_hours"), why)
    starts = f"Starts: {kept.means(DAY, (REACTIVE, LT_UA), 'starts')}."
    return made | {"cold-starts": Finding(fewer(LT_UA, "starts"), starts)}


def _tails(kept: SageServeRuns) -> Made:
    p90 = {name: kept.llama(DAY, name, "ttft_p90_s") for name in (REACTIVE, *LONG_TERM)}
    made = {
        f"{name}-tail": Finding(
            more(p90[name], p90[REACTIVE]),
            f"P90 TTFT (s): {kept.means(DAY, (REACTIVE, name), 'ttft_p90_s')};"
            f" P99: {kept.means(DAY, (REACTIVE, name), 'ttft_p99_s')}.",
        )
        for name in LONG_TERM
    }
    order = (LT_U, LT_UA, REACTIVE, LT_I)
    rising = [all(a < b for a, b in pairwise(row)) for row in zip(*(p90[name] for name in order), strict=True)]
    return made | {"tail-order": Finding(rising, f"P90 TTFT (s): {kept.means(DAY, order, 'ttft_p90_s')}.")}


def _chiron(kept: SageServeRuns) -> Made:
    both = (REACTIVE, CHIRON)
    hours = [kept.llama(ALONE, name, "instance_hours") for name in both]
    ratios = [b / a for a, b in zip(*hours, strict=True)]
    use = f"KV cache in use: {kept.means(ALONE, both, 'kv_use')}."
    return {
        "chiron-hours": Finding(ratios, f"Instance-hours: {kept.means(ALONE, both, 'instance_hours')}."),
        "chiron-kv": Finding(less(*(kept.llama(ALONE, name, "kv_use") for name in reversed(both))), use),
    }


def _beyond(kept: SageServeRuns) -> Made:
    late = less(kept.llama(ALONE, LT_Q, "late"), kept.llama(ALONE, LT_U, "late"))
    leak = more(kept.llama(ALONE, LEAK, "instance_hours"), kept.llama(ALONE, LT_UA, "instance_hours"))
    both = f"Instance-hours: {kept.means(ALONE, (LT_U, LT_Q), 'instance_hours')}"
    return {
        "guarded-hours": _saved(kept, ALONE, LT_UA, GUARDED),
        "quantile-late": Finding(late, f"{both}; {_late(kept, ALONE, LT_U, LT_Q)}."),
        "quantile-hours": _saved(kept, ALONE, LT_Q),
        "leak-hours": Finding(leak, f"Instance-hours: {kept.means(ALONE, (LT_UA, LEAK), 'instance_hours')}."),
    }


def _ablations(kept: SageServeRuns) -> Made:
    made = {
        "h100-hours": _saved(kept, runs.H100, LT_UA),
        "mix-9-hours": _saved(kept, runs.MIX_9, LT_UA),
        "mix-1-hours": _saved(kept, runs.MIX_1, LT_UA),
    }
    pairs = zip(made["mix-9-hours"].values, made["mix-1-hours"].values, strict=True)
    gaps = [None if a is None or b is None else a - b for a, b in pairs]
    return made | {"mix-order": Finding(gaps, "Percentage points, seed by seed.")}


def _scout(kept: SageServeRuns) -> Made:
    models = (scenes.SCOUT, LLAMA_2)
    tails = [kept.llama(SCOUT, LT_UA, "ttft_p90_s", model) for model in models]
    numbers = ", ".join(f"{fmean(values):.3g} ({model})" for values, model in zip(tails, models, strict=True))
    hours_of, asked_of = (
        [kept.llama(SCOUT, LT_UA, key, model) for model in models] for key in ("instance_hours", "num_requests")
    )
    each = [[a / b for a, b in zip(*pair, strict=True)] for pair in zip(hours_of, asked_of, strict=True)]
    hours = ", ".join(f"{1000 * fmean(values):.3g} ({model})" for values, model in zip(each, models, strict=True))
    both = [kept.whole(SCOUT, name, "instance_hours") for name in (LT_UA, REACTIVE)]
    return {
        "scout-tail": Finding(less(*tails), f"P90 TTFT (s): {numbers}."),
        "scout-hours": Finding(less(*each), f"Instance-hours for a thousand interactive requests: {hours}."),
        "scout-saved": Finding(
            less(*both), f"Instance-hours of all five: {kept.means(SCOUT, (REACTIVE, LT_UA), 'instance_hours', None)}."
        ),
    }


def _burst(kept: SageServeRuns) -> Made:
    tails = {name: kept.values(runs.BURST, name, lambda run: run["ttft_p95_s"]) for name in LONG_TERM}
    ends = {name: kept.values(runs.BURST, name, lambda run: run["recovered_s"]) for name in LONG_TERM}
    why = "P95 TTFT (s): " + ", ".join(f"{fmean(values):.3g} ({name})" for name, values in tails.items()) + "."
    over = ", ".join(f"{fmean(values) / 60:.3g} min ({name})" for name, values in ends.items())
    first = [a < min(b, c) for a, b, c in zip(ends[LT_UA], ends[LT_U], ends[LT_I], strict=True)]
    made = {f"burst-{name}": Finding(less(tails[LT_UA], tails[name]), why) for name in (LT_U, LT_I)}
    return made | {"burst-first": Finding(first, f"From the burst's begin until median TTFT is below 1 s: {over}.")}


def _week(kept: SageServeRuns) -> Made:
    tails = {name: kept.values(runs.WEEK, name, lambda run: run["ttft_p95_s"]) for name in kept.names(runs.WEEK)}
    why = "P95 TTFT (s): " + ", ".join(f"{fmean(values):.3g} ({name})" for name, values in tails.items()) + "."
    return {f"week-{name}": Finding(less(tails[name], tails[REACTIVE]), why) for name in (LT_U, LT_UA)}


def _order(kept: SageServeRuns) -> Made:
    share, q3 = (
        {tier: {name: _of_order(kept, name, key, tier) for name in scenes.ORDERINGS} for tier in ("0", "1")}
        for key in ("violations", "q3_s")
    )
    made: Made = {}
    for label, tier, sign in (("fast", "0", -1), ("normal", "1", 1)):
        why = ", ".join(f"{100 * fmean(values):.1f}% ({name})" for name, values in share[tier].items())
        quartiles = ", ".join(f"{fmean(values):.3g} s ({name})" for name, values in q3[tier].items())
        for name in ("edf", "pf", "dpa"):
            pairs = zip(share[tier][name], share[tier]["fcfs"], strict=True)
            made[f"{name}-{label}"] = Finding([sign * (a - b) for a, b in pairs], f"Violations: {why}.")
            change = more(q3[tier][name], q3[tier]["fcfs"])
            made[f"{name}-{label}-q3"] = Finding([None if v is None else sign * v for v in change], f"{quartiles}.")
        columns = zip(*(share[tier][name] for name in ("fcfs", "edf", "dpa", "pf")), strict=True)
        made[f"order-{label}"] = Finding(
            [all(sign * a < sign * b for a, b in pairwise(column)) for column in columns], f"Violations: {why}."
        )
    return made


def _of_order(kept: SageServeRuns, name: str, key: str, tier: str) -> list[float]:
    return kept.values(runs.ORDER, name, lambda run: float(run[key][tier]))
