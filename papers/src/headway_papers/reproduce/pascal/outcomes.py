"""The findings of PASCAL's claims."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

from headway_papers.reproduce.claims import Value
from headway_papers.reproduce.findings import Finding
from headway_papers.reproduce.pascal.bench import ALPACA, HEAVY, LEVELS, MEASURED, PAIR, TRACE, Bench
from headway_papers.reproduce.pascal.runs import BY_PACE, FCFS, NO_MIGRATION, NON_ADAPTIVE, PASCAL, RR, SOONEST
from headway_papers.reproduce.pascal.tails import Tails
from headway_papers.reproduce.results import differences, increases
from headway_papers.reproduce.tasks import Measurement

Outcomes = dict[str, Finding]
Seeds = Sequence[Measurement]
BINS = "The bin is that of the other seeds' means."


def phases(bench: Bench) -> Outcomes:
    rate, free, runs = bench.phase("pascal-reasoning", FCFS, RR)
    load_text = (
        f"{rate:.3g} requests/s, at which the oracle fills about 80% of the GPU's KV cache; then half of the cache."
    )
    blocked = f"FCFS blocks them for {_part(runs[FCFS], 128, 2):.0f} s of {_part(runs[FCFS], 128, 1):.0f} s."
    long = (
        f"Preempted for {_part(runs[RR], 2048, 3):.0f} s of {_part(runs[RR], 2048, 1):.0f} s: past their first quanta,"
    )
    outcomes = {
        "short-reasoning-fcfs": Finding(_ratios(runs[FCFS], free, 128), f"{load_text} {blocked}"),
        "long-reasoning-rr": Finding(
            _ratios(runs[RR], free, 2048), f"{load_text} {long} long requests wait for all shorter ones."
        ),
        "short-reasoning-rr": Finding([1 - v for v in _ratios(runs[RR], runs[FCFS], 128)], blocked),
    }
    rate, free, runs = bench.phase("pascal-answering", FCFS, RR)
    load_text = f"{rate:.3g} requests/s."
    missed = [
        [alone[4] - each[4] for alone, each in zip(best["lengths"], run["lengths"], strict=True)]
        for best, run in zip(free, runs[FCFS], strict=True)
    ]
    shares = ", ".join(f"{_part(runs[RR], each[0], 4):.0%} of {each[0]:,} tokens" for each in runs[RR][0]["lengths"])
    outcomes |= {
        "answers-fcfs": Finding([min(each) for each in missed], f"{load_text} The length that misses least, by seed."),
        "answers-rr": Finding(
            [fmean(each[4] for each in run["lengths"]) for run in runs[RR]],
            f"Mean over the lengths; met: {shares}.",
        ),
        "long-answers-rr-latency": Finding(
            [v - 1 for v in _ratios(runs[RR], runs[FCFS], 2048)],
            f"{_part(runs[RR], 2048, 1):.0f} s with RR, {_part(runs[FCFS], 2048, 1):.0f} s with FCFS.",
        ),
        "long-answers-rr": Finding(
            [_at(a, 2048)[4] - _at(b, 2048)[4] for a, b in zip(runs[RR], free, strict=True)],
            f"Preempted for {_part(runs[RR], 2048, 3):.0f} s, once their first quanta are used up; what a "
            "quantum of 500 tokens gives to read lasts for 50 s.",
        ),
    }
    return outcomes


def simulator(bench: Bench) -> Outcomes:
    """The findings of section V-A, which simulates measured runs."""
    ids = {
        "simulator-e2e": "e2e_mean",
        "simulator-ttft": "ttft_mean",
        "simulator-tpot": "tpot_mean",
        "simulator-e2e-dense": "e2e_dense",
    }
    found = bench.simulator_errors()
    if found is None:
        why = f"No measurements were given: --data names the folder that has {MEASURED}."
        return {each: Finding([None] * len(bench.seeds), why) for each in ids}
    why = (
        f"{found[0]['num_experiments']} experiments with vLLM 0.15 on H100, each seed with arrivals of its own. Six "
        "coefficients of overhead, equal for all models, are fitted on the same experiments. E2E of the dense models "
        f"alone: {fmean(_values(found, 'e2e_dense')):.2%}; the paper has one dense model on one GPU."
    )
    return {each: Finding(_values(found, key), why) for each, key in ids.items()}


def chat(bench: Bench, key: str) -> Outcomes:
    """V-B and V-C for one dataset."""
    fcfs, rr, pascal = bench.runs(key, "high", FCFS, RR, PASCAL)
    from_fcfs, from_rr = Tails(fcfs, pascal), Tails(rr, pascal)
    load_text = f"{bench.rate(key, 'high'):.3g} requests/s."
    outcomes = {
        f"{key}-tail-fcfs": Finding(from_fcfs.most(), f"{load_text} {from_fcfs.summary(FCFS)}"),
        f"{key}-tail-fcfs-s": Finding(from_fcfs.most_s(), ""),
        f"{key}-tail-rr": Finding(from_rr.most(), f"{from_rr.summary(RR)} {BINS}"),
        f"{key}-tail-rr-s": Finding(from_rr.most_s(), f"{load_text} {BINS}"),
        f"{key}-tail-rr-there": Finding(
            from_rr.at_largest_cut_of(from_fcfs),
            "Reasoning within the first quantum is as urgent with RR as with PASCAL: there is little left to gain.",
        ),
        f"{key}-throughput-fcfs": _throughput(fcfs, pascal),
        f"{key}-throughput-rr": _throughput(rr, pascal),
        f"{key}-throughput-fcfs-arriving": _throughput(fcfs, pascal, "arriving_tokens_per_s"),
        f"{key}-throughput-rr-arriving": _throughput(rr, pascal, "arriving_tokens_per_s"),
        f"{key}-transfer": Finding(_values(pascal, "transfer_p99_s"), f"{_mean(pascal, 'moves'):.0f} moves a run."),
    }
    if key == ALPACA:
        outcomes |= {
            "alpaca-worse-fcfs": _worst(from_fcfs, FCFS),
            "alpaca-worse-rr": _worst(from_rr, RR),
            "alpaca-slo-high-ttfat": _violations(bench, key, "high", "violations_with_ttfat"),
        }
    for level in LEVELS:
        outcomes[f"{key}-slo-{level}"] = _violations(bench, key, level)
    return outcomes


def _worst(tails: Tails, baseline: str) -> Finding:
    at = ", ".join(f"{first:,}" for first in tails.worst_at())
    demoted = "past 5,000 tokens, reasoning stands with the answers"
    text = f"The worst bin begins, by seed, at {at} reasoning tokens; {demoted}. {tails.summary(baseline)} {BINS}"
    return Finding(tails.worst(), text)


def _violations(bench: Bench, key: str, level: str, name: str = "violations") -> Finding:
    fcfs, rr, pascal = bench.runs(key, level, FCFS, RR, PASCAL)
    violations = [_values(runs, name) for runs in (fcfs, rr, pascal)]
    values = [p - min(a, b) for a, b, p in zip(*violations, strict=True)]
    shares = ", ".join(
        f"{_mean(runs, name):.2%} with {system}" for system, runs in ((FCFS, fcfs), (RR, rr), (PASCAL, pascal))
    )
    text = f"{bench.rate(key, level):.3g} requests/s; missed: {shares}."
    why = (
        "Reasoning goes first whatever answers miss: where memory is short for long, answers past their first quantum "
        "are late. The paper says so of rates above its own."
    )
    return Finding(values, f"{text} {why}" if fmean(values) > 0 else text)


def _throughput(baseline: Seeds, pascal: Seeds, name: str = "tokens_per_s") -> Finding:
    until = "till all is served" if name == "tokens_per_s" else "while requests arrive, prompts included"
    text = f"{_mean(baseline, name):,.0f}, {_mean(pascal, name):,.0f} tokens/s {until}."
    return Finding(_changes(baseline, pascal, name), text)


def pair(bench: Bench) -> Outcomes:
    """Sections V-B and V-D at the rate with V-D's violations."""
    tried = bench.add_pair(ALPACA)["tried"]
    fcfs, rr, pascal, pinned, moved = bench.runs(ALPACA, PAIR, FCFS, RR, PASCAL, NO_MIGRATION, NON_ADAPTIVE)
    from_fcfs, from_rr = Tails(fcfs, pascal), Tails(rr, pascal)
    choices = "; ".join(f"{rate}/s {each[PASCAL]:.2%} and {each[NON_ADAPTIVE]:.2%}" for rate, each in tried.items())
    rate = (
        f"{bench.rate(ALPACA, PAIR):.3g} requests/s: {_mean(pascal, 'violations'):.2%} and "
        f"{_mean(moved, 'violations'):.2%} (paper: 0.69 and 7.45%). Tried on other requests: {choices}."
    )
    waits = (
        f"By seed: {_listed(pinned, 'blocking_p99_s')} s without, {_listed(pascal, 'blocking_p99_s')} s with migration."
    )
    missed = f"{_mean(pinned, 'violations'):.2%} without, {_mean(pascal, 'violations'):.2%} with migration."
    return {
        "alpaca-tail-fcfs-pair": Finding(from_fcfs.most(), f"{rate} {from_fcfs.summary(FCFS)}"),
        "alpaca-tail-rr-pair": Finding(from_rr.most(), f"{from_rr.summary(RR)} {BINS}"),
        "alpaca-slo-pair": _violations(bench, ALPACA, PAIR),
        "alpaca-throughput-fcfs-pair": _throughput(fcfs, pascal, "arriving_tokens_per_s"),
        "alpaca-throughput-rr-pair": _throughput(rr, pascal, "arriving_tokens_per_s"),
        "no-migration-blocking-pair": Finding(_values(pinned, "blocking_p99_s"), waits),
        "blocking-pair": Finding(_values(pascal, "blocking_p99_s"), waits),
        "no-migration-slo-pair": Finding(_differences(pascal, pinned, "violations"), missed),
    }


def migration(bench: Bench) -> Outcomes:
    """V-D: without migration, and with migration of all answers."""
    pascal, pinned, moved = bench.runs(ALPACA, "high", PASCAL, NO_MIGRATION, NON_ADAPTIVE)
    worse = [fmean(-each.cut for each in bins.values()) for bins in Tails(pascal, pinned).seeds]
    missed = f"{_mean(pinned, 'violations'):.2%} without, {_mean(pascal, 'violations'):.2%} with migration."
    both = f"{_mean(moved, 'violations'):.2%} and {_mean(pascal, 'violations'):.2%}."
    waits = (
        f"By seed: {_listed(pinned, 'blocking_p99_s')} s without, {_listed(pascal, 'blocking_p99_s')} s with migration."
    )
    medians = f"{_mean(moved, 'e2e_p50_s'):.1f} s and {_mean(pascal, 'e2e_p50_s'):.1f} s."
    ends = f"{_mean(moved, 'e2e_p99_s'):.1f} s and {_mean(pascal, 'e2e_p99_s'):.1f} s."
    pins = "Reasoning is placed by footprint either way, and goes before answers wherever they are."
    return {
        "no-migration-tail": Finding(worse, f"Mean over the bins. {pins}"),
        "no-migration-reasoning": Finding(_changes(pascal, pinned, "reasoning_mean_s"), "Mean reasoning latency."),
        "no-migration-blocking": Finding(
            _values(pinned, "blocking_p99_s"),
            f"{waits} It depends on the reading of turns: in a circle, answers that begin queue behind all others.",
        ),
        "blocking": Finding(_values(pascal, "blocking_p99_s"), f"{waits} {_blocking_at_lower_rates(bench)}"),
        "no-migration-slo": Finding(_differences(pascal, pinned, "violations"), missed),
        "non-adaptive-ttft": Finding(_changes(pascal, moved, "ttft_p50_s"), "Median TTFT."),
        "non-adaptive-slo": Finding(_differences(pascal, moved, "violations"), both),
        "non-adaptive-e2e-median": Finding(_changes(pascal, moved, "e2e_p50_s"), medians),
        "non-adaptive-e2e-tail": Finding(
            _changes(pascal, moved, "e2e_p99_s"), f"{ends} The longest requests set P99; they migrate once, late."
        ),
    }


def by_pace(bench: Bench) -> Outcomes:
    """V-D with a scheduler's pacer that has no target for an answer's first token."""
    fcfs, rr, pascal = bench.runs(ALPACA, "high", FCFS, RR, BY_PACE)
    missed = [_values(runs, "violations") for runs in (fcfs, rr, pascal)]
    shares = ", ".join(f"{fmean(each):.2%} with {name}" for each, name in zip(missed, (FCFS, RR, PASCAL), strict=True))
    rate = f"{bench.rate(ALPACA, 'high'):.3g} requests/s"
    return {
        "blocking-by-pace": Finding(
            _values(pascal, "blocking_p99_s"),
            f"{rate}; by seed: {_listed(pascal, 'blocking_p99_s')} s. Who waits to begin an answer is behind no pace.",
        ),
        "alpaca-slo-high-by-pace": Finding(
            [p - min(a, b) for a, b, p in zip(*missed, strict=True)], f"{rate}; missed: {shares}."
        ),
    }


def _blocking_at_lower_rates(bench: Bench) -> str:
    """Whether the rate is what blocks answers."""
    texts = []
    for level in ("medium", "low"):
        (pascal,) = bench.runs(ALPACA, level, PASCAL)
        texts.append(f"{_mean(pascal, 'blocking_p99_s'):.2f} s at {bench.rate(ALPACA, level):.3g} requests/s")
    return f"The rate decides: with migration it is {', '.join(texts)}."


def heavy(bench: Bench) -> Outcomes:
    """V-D: half of Arena-Hard replaced by problems."""
    fcfs, rr, pascal = bench.runs(HEAVY, "high", FCFS, RR, PASCAL)
    from_fcfs, from_rr = Tails(fcfs, pascal), Tails(rr, pascal)
    shares = ", ".join(
        f"{_mean(runs, 'violations'):.2%} with {name}" for name, runs in ((FCFS, fcfs), (RR, rr), (PASCAL, pascal))
    )
    return {
        "heavy-tail-fcfs": Finding(
            from_fcfs.most(), f"{bench.rate(HEAVY, 'high'):.3g} requests/s. {from_fcfs.summary(FCFS)}"
        ),
        "heavy-worse-fcfs": _worst(from_fcfs, FCFS),
        "heavy-tail-rr": Finding(from_rr.most(), f"{from_rr.summary(RR)} {BINS} {_by_chance(from_rr)}"),
        "heavy-worse-rr": _worst(from_rr, RR),
        "heavy-slo-rr": Finding(_differences(rr, pascal, "violations"), f"Missed: {shares}."),
        "heavy-slo-fcfs": Finding(_differences(pascal, fcfs, "violations"), f"Missed: {shares}."),
    }


def _by_chance(tails: Tails) -> str:
    """The result with a seed's own best bin, compared with a bin that the other seeds choose."""
    return f"In the bin in which a seed itself gains most, its tail falls by {fmean(tails.most_of_own()):.1%}."


def oracle(bench: Bench, key: str, name: str) -> Outcomes:
    """The remaining gap to the oracle."""
    fcfs, pascal, soonest = bench.runs(key, "high", FCFS, PASCAL, SOONEST)
    ttft_s = [_values(runs, "ttft_mean_s") for runs in (fcfs, pascal, soonest)]
    values = [(a - p) / (a - o) if a > o else None for a, p, o in zip(*ttft_s, strict=True)]
    means = [fmean(each) for each in ttft_s]
    text = f"Mean TTFT: {means[0]:.1f} s with FCFS, {means[1]:.1f} s with PASCAL, {means[2]:.1f} s with {SOONEST}."
    return {name: Finding(values, text)}


def trace(bench: Bench, ids: Sequence[str]) -> Outcomes:
    """The claims on production requests; without values if there is no --data."""
    if bench.trace is None:
        why = "No trace was given: --data names the folder that has it."
        return {each: Finding([None] * len(bench.seeds), why) for each in ids}
    fcfs, rr, pascal = bench.runs(TRACE, "high", FCFS, RR, PASCAL)
    from_fcfs, from_rr = Tails(fcfs, pascal), Tails(rr, pascal)
    rates = [each["high"] for each in bench.rates(TRACE)]
    slices = f"{len(rates)} slices of the day, {min(rates):.3g} to {max(rates):.3g} requests/s."
    return {
        "trace-tail-fcfs": Finding(from_fcfs.most(), f"{slices} {from_fcfs.summary(FCFS)}"),
        "trace-tail-rr": Finding(from_rr.most(), f"{from_rr.summary(RR)} {BINS}"),
        "trace-slo": _violations(bench, TRACE, "high"),
        "trace-throughput": _throughput(fcfs, pascal),
        "trace-blocking": Finding(
            _values(pascal, "blocking_p99_s"), f"By seed: {_listed(pascal, 'blocking_p99_s')} s."
        ),
        **oracle(bench, TRACE, "trace-oracle-gap"),
    }


def _values(runs: Seeds, name: str) -> list[float]:
    return [run[name] for run in runs]


def _mean(runs: Seeds, name: str) -> float:
    return fmean(_values(runs, name))


def _listed(runs: Seeds, name: str) -> str:
    return ", ".join(f"{value:.1f}" for value in _values(runs, name))


def _changes(before: Seeds, after: Seeds, name: str) -> list[Value]:
    """The relative increase of a value."""
    return [*increases(_values(after, name), _values(before, name))]


def _differences(before: Seeds, after: Seeds, name: str) -> list[Value]:
    return [*differences(_values(after, name), _values(before, name))]


def _at(run: Measurement, length: int) -> list[float]:
    """[length, latency, blocked, preempted, share that meets the SLO]."""
    row: list[float] = next(each for each in run["lengths"] if each[0] == length)
    return row


def _part(runs: Seeds, length: int, part: int) -> float:
    return fmean(_at(run, length)[part] for run in runs)


def _ratios(runs: Seeds, free: Seeds, length: int) -> list[float]:
    """Ratios of latencies, by seed."""
    return [_at(a, length)[1] / _at(b, length)[1] for a, b in zip(runs, free, strict=True)]
