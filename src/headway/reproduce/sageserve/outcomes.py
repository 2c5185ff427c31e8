"""The findings of SageServe's claims."""

from __future__ import annotations

from itertools import pairwise
from statistics import fmean

from headway.reproduce.claims import Value
from headway.reproduce.findings import Finding
from headway.reproduce.results import increases, listed_means, reductions
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
    LT_U,
    LT_UA,
    MODELS,
    REACTIVE,
    SILOED,
)
from headway.reproduce.sageserve.table import SageServeRuns

USD_PER_HOUR = 98.32
"""Price of an instance (7.2.1)."""
FindingsById = dict[str, Finding]


def outcomes(results: SageServeRuns) -> FindingsById:
    """The findings of all claims whose runs exist."""
    findings: FindingsById = {}
    if results.includes(PEAK):
        findings |= _silos(results) | _tables(results)
    if results.includes(ALONE):
        findings |= _chiron(results) | _beyond(results)
    if results.includes(DAY):
        findings |= _hours(results) | _waste(results) | _tails(results)
    if results.includes(runs.NOVEMBER):
        for name in LONG_TERM:
            findings[f"nov-{name}-hours"] = _saved(results, runs.NOVEMBER, name)
    if results.includes(runs.H100):
        findings |= _ablations(results)
    if results.includes(SCOUT):
        findings |= _scout(results)
    if results.includes(runs.BURST):
        findings |= _burst(results)
    if results.includes(runs.WEEK):
        findings |= _week(results)
    if results.includes(runs.ORDER):
        findings |= _order(results)
    return findings


def _silos(results: SageServeRuns) -> FindingsById:
    both = (SILOED, REACTIVE)
    hours = f"Instance-hours of all models: {results.means(PEAK, both, 'instance_hours', None)}."
    columns = {
        name: [results.of_model(PEAK, name, "instance_hours", model) for model in (LLAMA_31, LLAMA_32)] for name in both
    }
    small = {name: list(map(sum, zip(*each, strict=True))) for name, each in columns.items()}
    numbers = f"Instance-hours of both: {fmean(small[SILOED]):.3g} (siloed), {fmean(small[REACTIVE]):.3g} (reactive)."
    use = f"KV cache in use, all models: {results.means(PEAK, both, 'kv_use', None)}."
    spot = f"Hours of all models: {results.means(PEAK, both, 'spot_hours', None)}."
    pair = {
        key: [results.of_all(PEAK, name, key) for name in both] for key in ("instance_hours", "kv_use", "spot_hours")
    }
    return {
        "unified-hours": Finding(reductions(*reversed(pair["instance_hours"])), hours),
        "unified-small": Finding(reductions(small[REACTIVE], small[SILOED]), numbers),
        "unified-kv": Finding(increases(*reversed(pair["kv_use"])), use),
        "unified-spot": Finding(increases(*reversed(pair["spot_hours"])), spot),
    }


def _tables(results: SageServeRuns) -> FindingsById:
    """Table 1's rows."""

    def longer(model: str, key: str) -> list[Value]:
        return list(increases(results.of_model(PEAK, REACTIVE, key, model), results.of_model(PEAK, SILOED, key, model)))

    def numbers(key: str, *models: str) -> str:
        return "; ".join(f"{m}: {results.means(PEAK, (SILOED, REACTIVE), key, m)}" for m in models)

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


def _saved(results: SageServeRuns, kind: str, name: str, than: str = REACTIVE) -> Finding:
    """Llama-2's instance-hours."""
    values = reductions(results.of_model(kind, name, "instance_hours"), results.of_model(kind, than, "instance_hours"))
    hours = results.means(kind, (than, name), "instance_hours")
    return Finding(values, f"Instance-hours: {hours}; {_late(results, kind, than, name)}.")


def _late(results: SageServeRuns, kind: str, *names: str) -> str:
    shares = ", ".join(f"{100 * fmean(results.of_model(kind, name, 'late')):.2g}% ({name})" for name in names)
    return f"late first tokens: {shares}"


def _hours(results: SageServeRuns) -> FindingsById:
    findings = {f"{name}-hours": _saved(results, DAY, name) for name in LONG_TERM}
    by_region = {name: results.values((DAY, name), "models", LLAMA_2, "regions") for name in (REACTIVE, *LONG_TERM)}
    all_less = [
        all(by_region[name][i][region] < hours for name in LONG_TERM for region, hours in reactive.items())
        for i, reactive in enumerate(by_region[REACTIVE])
    ]
    first = "; ".join(
        f"{name}: " + ", ".join(f"{hours:.3g}" for hours in each[0].values()) for name, each in by_region.items()
    )
    saved = [None if v is None else USD_PER_HOUR * v for v in findings["lt-ua-hours"].values]
    return findings | {
        "lt-regions": Finding(all_less, f"Instance-hours by region, first seed: {first}."),
        "usd-saved": Finding(saved, f"Per instance-hour of reactive scaling. {findings['lt-ua-hours'].why}"),
        "a100-hours": findings["lt-ua-hours"],
    }


def _waste(results: SageServeRuns) -> FindingsById:
    def fewer(name: str, key: str) -> list[float | None]:
        return reductions(results.of_model(DAY, name, key), results.of_model(DAY, REACTIVE, key))

    findings = {}
    for name in LONG_TERM:
        both = (REACTIVE, name)
        why = (
            f"Instance-hours in which instances start: {results.means(DAY, both, 'wasted_hours')}; starts:"
            f" {results.means(DAY, both, 'starts')}."
        )
        findings[f"{name}-waste"] = Finding(fewer(name, "wasted_hours"), why)
    starts = f"Starts: {results.means(DAY, (REACTIVE, LT_UA), 'starts')}."
    return findings | {"cold-starts": Finding(fewer(LT_UA, "starts"), starts)}


def _tails(results: SageServeRuns) -> FindingsById:
    p90 = {name: results.of_model(DAY, name, "ttft_p90_s") for name in (REACTIVE, *LONG_TERM)}
    findings = {
        f"{name}-tail": Finding(
            increases(p90[name], p90[REACTIVE]),
            f"P90 TTFT (s): {results.means(DAY, (REACTIVE, name), 'ttft_p90_s')};"
            f" P99: {results.means(DAY, (REACTIVE, name), 'ttft_p99_s')}.",
        )
        for name in LONG_TERM
    }
    order = (LT_U, LT_UA, REACTIVE, LT_I)
    rising = [all(a < b for a, b in pairwise(row)) for row in zip(*(p90[name] for name in order), strict=True)]
    return findings | {"tail-order": Finding(rising, f"P90 TTFT (s): {results.means(DAY, order, 'ttft_p90_s')}.")}


def _chiron(results: SageServeRuns) -> FindingsById:
    both = (REACTIVE, CHIRON)
    hours = [results.of_model(ALONE, name, "instance_hours") for name in both]
    ratios = [b / a for a, b in zip(*hours, strict=True)]
    use = f"KV cache in use: {results.means(ALONE, both, 'kv_use')}."
    return {
        "chiron-hours": Finding(ratios, f"Instance-hours: {results.means(ALONE, both, 'instance_hours')}."),
        "chiron-kv": Finding(reductions(*(results.of_model(ALONE, name, "kv_use") for name in reversed(both))), use),
    }


def _beyond(results: SageServeRuns) -> FindingsById:
    late = reductions(results.of_model(ALONE, LT_Q, "late"), results.of_model(ALONE, LT_U, "late"))
    leak = increases(results.of_model(ALONE, LEAK, "instance_hours"), results.of_model(ALONE, LT_UA, "instance_hours"))
    both = f"Instance-hours: {results.means(ALONE, (LT_U, LT_Q), 'instance_hours')}"
    return {
        "guarded-hours": _saved(results, ALONE, LT_UA, GUARDED),
        "quantile-late": Finding(late, f"{both}; {_late(results, ALONE, LT_U, LT_Q)}."),
        "quantile-hours": _saved(results, ALONE, LT_Q),
        "leak-hours": Finding(leak, f"Instance-hours: {results.means(ALONE, (LT_UA, LEAK), 'instance_hours')}."),
    }


def _ablations(results: SageServeRuns) -> FindingsById:
    findings = {
        "h100-hours": _saved(results, runs.H100, LT_UA),
        "mix-9-hours": _saved(results, runs.MIX_9, LT_UA),
        "mix-1-hours": _saved(results, runs.MIX_1, LT_UA),
    }
    pairs = zip(findings["mix-9-hours"].values, findings["mix-1-hours"].values, strict=True)
    gaps = [None if a is None or b is None else a - b for a, b in pairs]
    return findings | {"mix-order": Finding(gaps, "Percentage points, seed by seed.")}


def _scout(results: SageServeRuns) -> FindingsById:
    models = (scenes.SCOUT, LLAMA_2)
    tails = [results.of_model(SCOUT, LT_UA, "ttft_p90_s", model) for model in models]
    numbers = listed_means(dict(zip(models, tails, strict=True)))
    hours_of, asked_of = (
        [results.of_model(SCOUT, LT_UA, key, model) for model in models] for key in ("instance_hours", "num_requests")
    )
    each = [[a / b for a, b in zip(*pair, strict=True)] for pair in zip(hours_of, asked_of, strict=True)]
    hours = ", ".join(f"{1000 * fmean(values):.3g} ({model})" for values, model in zip(each, models, strict=True))
    both = [results.of_all(SCOUT, name, "instance_hours") for name in (LT_UA, REACTIVE)]
    return {
        "scout-tail": Finding(reductions(*tails), f"P90 TTFT (s): {numbers}."),
        "scout-hours": Finding(reductions(*each), f"Instance-hours for a thousand interactive requests: {hours}."),
        "scout-saved": Finding(
            reductions(*both),
            f"Instance-hours of all five: {results.means(SCOUT, (REACTIVE, LT_UA), 'instance_hours', None)}.",
        ),
    }


def _burst(results: SageServeRuns) -> FindingsById:
    tails = {name: results.values((runs.BURST, name), "ttft_p95_s") for name in LONG_TERM}
    ends = {name: results.values((runs.BURST, name), "recovered_s") for name in LONG_TERM}
    why = f"P95 TTFT (s): {listed_means(tails)}."
    over = ", ".join(f"{fmean(values) / 60:.3g} min ({name})" for name, values in ends.items())
    first = [a < min(b, c) for a, b, c in zip(ends[LT_UA], ends[LT_U], ends[LT_I], strict=True)]
    findings = {f"burst-{name}": Finding(reductions(tails[LT_UA], tails[name]), why) for name in (LT_U, LT_I)}
    return findings | {"burst-first": Finding(first, f"From the burst's begin until median TTFT is below 1 s: {over}.")}


def _week(results: SageServeRuns) -> FindingsById:
    tails = {name: results.values((runs.WEEK, name), "ttft_p95_s") for name in results.names(runs.WEEK)}
    why = f"P95 TTFT (s): {listed_means(tails)}."
    return {f"week-{name}": Finding(reductions(tails[name], tails[REACTIVE]), why) for name in (LT_U, LT_UA)}


def _order(results: SageServeRuns) -> FindingsById:
    share, q3 = (
        {
            tier: {name: results.values((runs.ORDER, name), key, tier) for name in scenes.ORDERINGS}
            for tier in ("0", "1")
        }
        for key in ("violations", "q3_s")
    )
    findings: FindingsById = {}
    for label, tier, sign in (("fast", "0", -1), ("normal", "1", 1)):
        why = ", ".join(f"{100 * fmean(values):.1f}% ({name})" for name, values in share[tier].items())
        quartiles = listed_means(q3[tier], " s")
        for name in ("edf", "pf", "dpa"):
            pairs = zip(share[tier][name], share[tier]["fcfs"], strict=True)
            findings[f"{name}-{label}"] = Finding([sign * (a - b) for a, b in pairs], f"Violations: {why}.")
            change = increases(q3[tier][name], q3[tier]["fcfs"])
            findings[f"{name}-{label}-q3"] = Finding([None if v is None else sign * v for v in change], f"{quartiles}.")
        columns = zip(*(share[tier][name] for name in ("fcfs", "edf", "dpa", "pf")), strict=True)
        findings[f"order-{label}"] = Finding(
            [all(sign * a < sign * b for a, b in pairwise(column)) for column in columns], f"Violations: {why}."
        )
    return findings
