"""The findings of SageServe's claims."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from statistics import fmean

import numpy as np

from headway_papers.reproduce.claims import Value
from headway_papers.reproduce.findings import Finding
from headway_papers.reproduce.results import increases, listed_means, ratios, reductions
from headway_papers.reproduce.sageserve import runs, scenes
from headway_papers.reproduce.sageserve.measures import BIN_S, CAUSES, SPOT_WEIGHT
from headway_papers.reproduce.sageserve.runs import (
    DAY,
    FASTER,
    FLEET,
    LACKING,
    LONG_TERM,
    PEAK,
    SCOUT,
    SLOWER,
    SPEED,
    planned_at,
)
from headway_papers.reproduce.sageserve.scenes import (
    BLOOM,
    CHIRON,
    EACH_REQUEST,
    GUARDED,
    LEAK,
    LLAMA_2,
    LT_I,
    LT_U,
    LT_UA,
    MODELS,
    REACTIVE,
    SILOED,
)
from headway_papers.reproduce.sageserve.table import SageServeRuns

FindingsById = dict[str, Finding]


def outcomes(results: SageServeRuns) -> FindingsById:
    """The findings of all claims whose runs exist."""
    findings: FindingsById = {}
    if results.includes(PEAK):
        findings |= _silos(results) | _tables(results)
    if results.includes(DAY):
        findings |= _hours(results) | _waste(results) | _tails(results)
    if results.includes(DAY, GUARDED):
        findings |= _delays(results) | _guard(results) | _use(results) | _batch(results) | _chiron(results)
        findings |= _beyond(results)
    if results.includes(FLEET):
        findings |= _fleet(results)
    for kind, suffix in ((runs.SMOOTH, "smooth"), (runs.NO_BLOOM, "no-bloom")):
        if results.includes(kind):
            findings |= _other_fleet(results, kind, suffix)
    if results.includes(runs.ARTIFACT):
        findings |= _artifact(results)
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
    if results.includes(runs.TAU):
        findings |= _taus(results)
    if results.includes(SPEED, "arima"):
        findings |= _hourly(results)
    if results.includes(SPEED, "steps"):
        findings |= _steps(results)
    return findings


def _silos(results: SageServeRuns) -> FindingsById:
    both = (SILOED, REACTIVE)
    hours = f"Instance-hours of all models: {results.means(PEAK, both, 'instance_hours', None)}."
    use = f"KV cache in use, all models: {results.means(PEAK, both, 'kv_use', None)}."
    spot = f"Hours of all models: {results.means(PEAK, both, 'spot_hours', None)}."
    of_spots = {
        name: [SPOT_WEIGHT * 3600 / BIN_S * hours for hours in results.of_all(PEAK, name, "spot_hours")]
        for name in both
    }
    utility = (
        f"Utility of all models: {results.means(PEAK, both, 'utility', None)}; of spot instances, by the artifact's "
        f"weights: {listed_means(of_spots)}. The rest is requests in time, as many on both sides."
    )
    keys = ("instance_hours", "kv_use", "spot_hours", "utility")
    pair = {key: [results.of_all(PEAK, name, key) for name in both] for key in keys}
    return {
        "unified-hours": Finding(reductions(*reversed(pair["instance_hours"])), hours),
        "unified-kv": Finding(increases(*reversed(pair["kv_use"])), use),
        "unified-spot": Finding(increases(*reversed(pair["spot_hours"])), spot),
        "unified-utility": Finding(increases(*reversed(pair["utility"])), utility),
    }


def _tables(results: SageServeRuns) -> FindingsById:
    """The findings for the rows of Table 1."""

    def longer(model: str, key: str) -> list[Value]:
        return list(increases(results.of_model(PEAK, REACTIVE, key, model), results.of_model(PEAK, SILOED, key, model)))

    def numbers(key: str, *models: str) -> str:
        return "; ".join(f"{m}: {results.means(PEAK, (SILOED, REACTIVE), key, m)}" for m in models)

    def worst(columns: list[list[Value]]) -> list[Value]:
        return [None if None in row else max(v for v in row if v is not None) for row in zip(*columns, strict=True)]

    ttft, e2e = "ttft_p95_s", "e2e_p95_s"
    return {
        "unified-tail": Finding(longer(BLOOM, ttft), f"P95 TTFT (s), {numbers(ttft, BLOOM)}."),
        "unified-tail-llama-2": Finding(longer(LLAMA_2, ttft), f"P95 TTFT (s), {numbers(ttft, LLAMA_2)}."),
        "unified-e2e": Finding(worst([longer(m, e2e) for m in MODELS]), f"P95 E2E (s), {numbers(e2e, *MODELS)}."),
    }


def _saved(results: SageServeRuns, kind: str, name: str, than: str = REACTIVE) -> Finding:
    """The relative saving of Llama-2's instance-hours by a strategy against another one."""
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
    return findings | {"lt-regions": Finding(all_less, f"Instance-hours by region, first seed: {first}.")}


def _delays(results: SageServeRuns) -> FindingsById:
    """LT-I's saving by an instance's start time."""
    saved = {kind: _saved(results, kind, LT_I) for kind in (FASTER, SLOWER)}
    pairs = zip(saved[SLOWER].values, saved[FASTER].values, strict=True)
    return {
        "lt-i-hours-60": saved[FASTER],
        "lt-i-hours-600": saved[SLOWER],
        "delay-order": Finding([_difference(a, b) for a, b in pairs], "Percentage points, seed by seed."),
    }


def _difference(a: Value, b: Value) -> Value:
    return None if a is None or b is None else a - b


def _guard(results: SageServeRuns) -> FindingsById:
    """The baseline that counts starting instances; and all strategies at equal lateness."""
    names = (REACTIVE, GUARDED, LT_I)
    reactive, guarded, planned = (results.of_model(DAY, name, "instance_hours") for name in names)
    shares = [(a - b) / (a - c) if a > c else None for a, b, c in zip(reactive, guarded, planned, strict=True)]
    hours = f"Instance-hours: {results.means(DAY, names, 'instance_hours')}; {_late(results, DAY, *names)}."
    return {
        "guard-share": Finding(shares, hours),
        "guarded-hours": _saved(results, DAY, LT_I, GUARDED),
        "equal-late-hours": _equally_late(results, DAY, LT_I, REACTIVE),
        "equal-late-lt-u": _equally_late(results, DAY, LT_U, REACTIVE),
        "equal-late-lt-ua": _equally_late(results, DAY, LT_UA, REACTIVE),
        "equal-late-60": _equally_late(results, FASTER, LT_I, REACTIVE),
        "equal-late-600": _equally_late(results, SLOWER, LT_I, REACTIVE),
        "equal-late-guarded": _equally_late(results, DAY, LT_I, GUARDED),
        "equal-late-guarded-60": _equally_late(results, FASTER, LT_I, GUARDED),
        "equal-late-guarded-600": _equally_late(results, SLOWER, LT_I, GUARDED),
    }


def _equally_late(results: SageServeRuns, kind: str, name: str, than: str) -> Finding:
    """A strategy's instance-hours at the lateness of `than`, by the planned rate of an instance.

    Between two plans, instance-hours are interpolated linearly over the logarithm of the late share. A seed has no
    value if the plans do not bracket this lateness.
    """
    plans = [planned_at(name, share) for share in (runs.THETA_SHARE, *runs.EQUAL_LATE_SHARES)]
    late = list(zip(*(results.of_model(kind, plan, "late") for plan in plans), strict=True))
    hours = list(zip(*(results.of_model(kind, plan, "instance_hours") for plan in plans), strict=True))
    wanted = zip(results.of_model(kind, than, "late"), results.of_model(kind, than, "instance_hours"), strict=True)
    values: list[Value] = []
    for lates, needs, (limit, taken) in zip(late, hours, wanted, strict=True):
        points = sorted(zip(lates, needs, strict=True))
        inside = points[0][0] <= limit <= points[-1][0]
        at = np.interp(np.log(limit), np.log([x for x, _ in points]), [y for _, y in points]) if inside else None
        values.append(None if at is None else 1 - float(at) / taken)
    both = f"Instance-hours: {results.means(kind, (than, *plans), 'instance_hours')}"
    return Finding(values, f"{both}; {_late(results, kind, than, *plans)}.")


def _use(results: SageServeRuns) -> FindingsById:
    """The use of instances: memory, and utility (2.2, 5)."""

    def more(name: str, key: str) -> list[Value]:
        return list(increases(results.of_model(DAY, name, key), results.of_model(DAY, REACTIVE, key)))

    def earned(name: str) -> list[float]:
        pairs = zip(*(results.of_model(DAY, name, key) for key in ("utility", "instance_hours")), strict=True)
        return [utility / hours for utility, hours in pairs]

    each = {name: earned(name) for name in (REACTIVE, LT_I)}
    often = (REACTIVE, EACH_REQUEST)
    use = {name: f"KV cache in use: {results.means(DAY, (REACTIVE, name), 'kv_use')}." for name in (LT_I, LT_UA)}
    return {
        "lt-i-kv": Finding(more(LT_I, "kv_use"), use[LT_I]),
        "lt-ua-kv": Finding(more(LT_UA, "kv_use"), use[LT_UA]),
        "lt-i-utility": Finding(
            increases(each[LT_I], each[REACTIVE]), f"Utility of an instance-hour: {listed_means(each)}."
        ),
        "per-request": Finding(
            more(EACH_REQUEST, "instance_hours"),
            f"Instance-hours: {results.means(DAY, often, 'instance_hours')}; {_late(results, DAY, *often)}.",
        ),
    }


def _batch(results: SageServeRuns) -> FindingsById:
    """Batch work: the completed share and the times."""
    names = (REACTIVE, *LONG_TERM)
    done = {name: results.of_model(DAY, name, "batch_done") for name in names}
    p95 = {name: [s / 3600 for s in results.of_model(DAY, name, "batch_p95_s")] for name in names}
    worst = [min(column) for column in zip(*done.values(), strict=True)]
    shares = ", ".join(f"{100 * fmean(each):.4g}% ({name})" for name, each in done.items())
    hours = listed_means(p95, " h")
    return {
        "batch-done": Finding(worst, f"Of the batch work that is 12 h old, done: {shares}. P95 of the time: {hours}."),
        "batch-wait": Finding(increases(p95[LT_I], p95[REACTIVE]), f"P95 of the time until it is done: {hours}."),
    }


def _fleet(results: SageServeRuns) -> FindingsById:
    both, names = (REACTIVE, LT_I), (REACTIVE, GUARDED, LT_I)
    waits = {name: results.values((FLEET, name), "models", BLOOM, "wasted", "redeployed") for name in both}
    hours = {name: results.of_all(FLEET, name, "instance_hours") for name in names}
    why = f"Instance-hours of all four: {listed_means(hours)}; of Llama-2, {_late(results, FLEET, *names)}."
    return {
        "fleet-hours": _saved(results, FLEET, LT_I),
        "fleet-hours-all": Finding(reductions(hours[LT_I], hours[REACTIVE]), why),
        "fleet-guarded": Finding(reductions(hours[LT_I], hours[GUARDED]), why),
        "fleet-redeploys": Finding(
            reductions(waits[LT_I], waits[REACTIVE]),
            f"Instance-hours in which Bloom is redeployed: {listed_means(waits)}. {_sources(results)} "
            f"{_without_weights(results)}",
        ),
    }


def _other_fleet(results: SageServeRuns, kind: str, suffix: str) -> FindingsById:
    """The fleet with a different demand for Bloom."""
    hours = {name: results.of_all(kind, name, "instance_hours") for name in (REACTIVE, LT_I)}
    why = f"Instance-hours of all models: {listed_means(hours)}; of Llama-2, {_late(results, kind, REACTIVE, LT_I)}."
    return {
        f"fleet-hours-{suffix}": _saved(results, kind, LT_I),
        f"fleet-hours-all-{suffix}": Finding(reductions(hours[LT_I], hours[REACTIVE]), why),
    }


def _sources(results: SageServeRuns) -> str:
    """Instance-hours of all models in starting instances, by source."""
    texts = []
    for name in (REACTIVE, GUARDED, LT_I):
        by_source = {
            cause: fmean(
                sum(each["wasted"][cause] for each in models.values())
                for models in results.values((FLEET, name), "models")
            )
            for cause in CAUSES
        }
        texts.append(f"{name}: " + ", ".join(f"{hours:.3g} {cause}" for cause, hours in by_source.items()))
    return f"Of all models: {'; '.join(texts)}."


def _without_weights(results: SageServeRuns) -> str:
    """Starts in a region that begins without Llama-2's weights."""
    texts = []
    for name in (REACTIVE, LT_I):
        measured = results.first(LACKING, name)
        first_s, later_s = (None if each is None else f"{each:,.0f} s" for each in measured["first_s"])
        sources = ", ".join(f"{num} {source}" for source, num in sorted(measured["sources"].items()))
        seconds = f"the first takes {first_s or 'forever'}" + (f", the next {later_s}" if later_s else "")
        texts.append(f"{name}: {sources}; {seconds}")
    return f"In five hours of a region that begins without Llama-2, {'; '.join(texts)}."


def _waste(results: SageServeRuns, kind: str = DAY, than: str = REACTIVE, suffix: str = "") -> FindingsById:
    """The cost of starts with long-term scaling, against the scaler `than`."""

    def fewer(name: str, key: str) -> list[float | None]:
        return reductions(results.of_model(kind, name, key), results.of_model(kind, than, key))

    findings = {}
    for name in (LT_I, LT_UA):
        both = (than, name)
        why = (
            f"Instance-hours in which instances start: {results.means(kind, both, 'wasted_hours')}; starts:"
            f" {results.means(kind, both, 'starts')}."
        )
        findings[f"{name}-waste{suffix}"] = Finding(fewer(name, "wasted_hours"), why)
    starts = f"Starts: {results.means(kind, (than, LT_UA), 'starts')}."
    return findings | {f"cold-starts{suffix}": Finding(fewer(LT_UA, "starts"), starts)}


def _artifact(results: SageServeRuns) -> FindingsById:
    """Starts with the artifact's constants: in the plans alone, and in the baseline, too."""
    plans, both = (
        _waste(results, runs.ARTIFACT, than, suffix)
        for than, suffix in ((REACTIVE, "-artifact"), (scenes.REACTIVE_50, "-artifact-both"))
    )
    return plans | both


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
    hours = [results.of_model(DAY, name, "instance_hours") for name in both]
    use = f"KV cache in use: {results.means(DAY, both, 'kv_use')}."
    tails = [results.of_model(DAY, name, "ttft_p95_s") for name in (CHIRON, LT_UA)]
    seconds = (
        f"P95 TTFT (s): {results.means(DAY, (LT_UA, CHIRON), 'ttft_p95_s')}; {_late(results, DAY, LT_UA, CHIRON)}."
    )
    return {
        "chiron-hours": Finding(
            ratios(*reversed(hours)), f"Instance-hours: {results.means(DAY, both, 'instance_hours')}."
        ),
        "chiron-kv": Finding(reductions(*(results.of_model(DAY, name, "kv_use") for name in reversed(both))), use),
        "chiron-tail": Finding(ratios(*tails), seconds),
    }


def _beyond(results: SageServeRuns) -> FindingsById:
    leak = increases(results.of_model(DAY, LEAK, "instance_hours"), results.of_model(DAY, LT_UA, "instance_hours"))
    return {"leak-hours": Finding(leak, f"Instance-hours: {results.means(DAY, (LT_UA, LEAK), 'instance_hours')}.")}


def _ablations(results: SageServeRuns) -> FindingsById:
    findings = {
        "h100-hours": _saved(results, runs.H100, LT_UA),
        "mix-9-hours": _saved(results, runs.MIX_9, LT_UA),
        "mix-1-hours": _saved(results, runs.MIX_1, LT_UA),
    }
    pairs = zip(findings["mix-9-hours"].values, findings["mix-1-hours"].values, strict=True)
    gaps = [_difference(a, b) for a, b in pairs]
    return findings | {"mix-order": Finding(gaps, "Percentage points, seed by seed.")}


def _scout(results: SageServeRuns) -> FindingsById:
    models = (scenes.SCOUT, LLAMA_2)
    tails = [results.of_model(SCOUT, LT_UA, "ttft_p90_s", model) for model in models]
    numbers = listed_means(dict(zip(models, tails, strict=True)))
    hours_of, requests_of = (
        [results.of_model(SCOUT, LT_UA, key, model) for model in models] for key in ("instance_hours", "num_requests")
    )
    each = [[a / b for a, b in zip(*pair, strict=True)] for pair in zip(hours_of, requests_of, strict=True)]
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
        order = [share[tier][name] for name in ("fcfs", "edf", "dpa", "pf")]
        findings[f"order-{label}"] = Finding(_falling(order, -sign), f"Violations: {why}.")
    return findings


def _taus(results: SageServeRuns) -> FindingsById:
    """The findings on DPA's violations of each tier, by tau_n, against FCFS."""
    findings: FindingsById = {}
    for label, tier, sign in (("fast", "0", -1), ("normal", "1", 1)):
        shares = {name: results.values((runs.TAU, name), "violations", tier) for name in results.names(runs.TAU)}
        why = ", ".join(f"{100 * fmean(values):.1f}% ({name})" for name, values in shares.items())
        for tau in ("0", "1"):
            pairs = zip(shares[f"{tau} s"], shares["fcfs"], strict=True)
            findings[f"dpa-{label}-tau{tau}"] = Finding([sign * (a - b) for a, b in pairs], f"Violations: {why}.")
            order = [shares[name] for name in ("fcfs", "edf", f"{tau} s", "pf")]
            findings[f"order-{label}-tau{tau}"] = Finding(_falling(order, -sign), f"Violations: {why}.")
    return findings


def _falling(shares: Sequence[Sequence[float]], sign: int) -> list[bool]:
    """By seed, whether each share is below the one before; with a negative sign, above it."""
    return [all(sign * a > sign * b for a, b in pairwise(column)) for column in zip(*shares, strict=True)]


def _hourly(results: SageServeRuns) -> FindingsById:
    """Seconds of the hourly work."""
    findings: FindingsById = {}
    for claim, name in (("ilp-time", "small"), ("ilp-time-large", "large")):
        gap = max(results.values((SPEED, name), "gap"))
        seconds = results.values((SPEED, name), "seconds")
        findings[claim] = Finding(seconds, f"CPU seconds, at most {100 * gap:.2g}% from the optimum.")
    fitting = fmean(results.values((SPEED, "arima"), "fitting_s"))
    why = f"In the hour in which models are fitted, once a day, {fitting:.3g} s."
    return findings | {"arima-time": Finding(results.values((SPEED, "arima"), "seconds"), why)}


def _steps(results: SageServeRuns) -> FindingsById:
    """Errors of step times."""
    findings, found = FindingsById(), results.first(SPEED, "steps")
    for kind in ("prefill", "decode"):
        why = (
            f"{found[f'num_{kind}']} shapes of Llama-2-70B and Bloom on eight A100 and H100; mean absolute error"
            f" {100 * found[f'{kind}_error']:.3g}%. On a fifth of them, after a fit to the rest: R2"
            f" {found[f'{kind}_r2_fitted']:.4g}, error {100 * found[f'{kind}_error_fitted']:.3g}%."
        )
        findings[f"step-{kind}"] = Finding([found[f"{kind}_r2"]], why)
    why = "A factor and a constant for each model, GPU and kind are fitted to four fifths of the shapes."
    return findings | {"step-error": Finding([found["error_fitted"]], why)}
