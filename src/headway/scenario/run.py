"""Loads a scenario, runs it, and compares its variants."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import yaml
from msgspec.structs import replace

from headway import __version__
from headway.catalog.errors import Band
from headway.config import scenario as config
from headway.config.fleet import fleet_of
from headway.config.limits import check_tenants, limits_of
from headway.config.own_modules import named, plain
from headway.config.proxied import proxied_names, without_proxied
from headway.config.scenario import Changes, Scenario, StepTimes, only_variant, read, variants, with_seed, written
from headway.config.spec import Spec
from headway.config.strict_yaml import Places
from headway.control.decisions import DecisionObserver
from headway.control.policies import Policies
from headway.core.errors import HeadwayError
from headway.core.fleet import Pool
from headway.core.record import REFUSED, Outcome, Records
from headway.metrics.latency import nothing_measured, sample
from headway.metrics.seeds import SeededMetrics
from headway.metrics.summary import Summary, flatten, summarize
from headway.metrics.usage import usage
from headway.report import model_error
from headway.report.run import Provenance, Run
from headway.scenario.policies import check, check_begins, knows_future, labels, policies_of
from headway.scenario.policy_errors import as_policy_errors
from headway.scenario.processes import available_cores, processes
from headway.scenario.sharding import simulate_apart, what_couples
from headway.sim.cluster import simulate
from headway.workload.generate import build, generate
from headway.workload.sources import RequestSource

if TYPE_CHECKING:
    from concurrent.futures import Executor

    from headway.planning.rehearsals import Watch

Progress = Callable[[float], None]
"""Called at intervals with the completed share, 0 to 1."""


LEAK_NOTE = "cheating: the forecaster is fitted on the demand of this very run, its future included"


class Simulator:
    """Simulates scenarios for planners. Implements `planning.rehearsals.Simulator`."""

    def records(self, scenario: Scenario, watch: Watch | None = None) -> Records:
        chosen = _with_empty_pools(_simulated(scenario))
        source = _source(chosen) if watch is None else watch(_source(chosen))
        policies = policies_of(chosen)
        check_begins(chosen, policies)
        records = _simulate(_with_sequence_lengths(chosen), policies, source, StepTimes(chosen))
        _check_makespan(chosen.spec, records)
        return records

    def policies(self, scenario: Scenario) -> Policies:
        return policies_of(_with_empty_pools(_without_proxied(scenario)))

    def couples(self, scenario: Scenario) -> bool:
        return what_couples(scenario, policies_of(scenario), only_metrics=True) is not None


def load(path: str | Path, changes: Changes | None = None) -> Scenario:
    """The scenario in a file, with some values changed. Raises HeadwayError if it cannot be run."""
    return assemble(*read(Path(path)), Path(path).parent, changes)


def assemble(document: Mapping[str, Any], places: Places, base_dir: Path, changes: Changes | None = None) -> Scenario:
    """The scenario of a document, including the empty pools that replanning needs. Raises HeadwayError if it cannot be
    run."""
    scenario = assemble_unresolved(document, places, base_dir, changes)
    check(scenario)
    return scenario


def assemble_unresolved(
    document: Mapping[str, Any], places: Places, base_dir: Path, changes: Changes | None = None
) -> Scenario:
    """As `assemble`, without resolving the policies: for a scenario that is run next, which resolves them anyway."""
    return _with_empty_pools(config.assemble(document, places, base_dir, changes))


def _simulated(scenario: Scenario) -> Scenario:
    """The only variant, checked to be simulable."""
    return only_variant(_without_proxied(scenario))


def _without_proxied(scenario: Scenario) -> Scenario:
    if not proxied_names(scenario.document):
        return scenario
    document, places = without_proxied(written(scenario), scenario.places)
    return config.assemble(document, places, scenario.base_dir)


def _with_empty_pools(scenario: Scenario) -> Scenario:
    if scenario.spec.cascade is None or scenario.spec.cascade.replan is None:
        return scenario
    from headway.planning.cascade import replan

    spec = replan.with_empty_pools(scenario.spec, scenario.fleet, scenario.places)
    return dataclasses.replace(scenario, spec=spec, fleet=fleet_of(spec, scenario.base_dir, scenario.places))


def run(
    scenario: Scenario,
    progress: Progress | None = None,
    decisions: DecisionObserver | None = None,
    with_bound: bool = False,
    jobs: int | None = 1,
    pool: Executor | None = None,
) -> Run:
    """Simulate a scenario with one variant. `decisions` records the policies' decisions.

    Several `jobs`, or a `pool`, are used if models do not affect each other (`scenario.sharding`); the records are the
    same. None: one job per core if the run is long, or per model in a pool. `with_bound` adds the least GPU hours of
    any plan to the summary of a run that scales, which takes seconds.
    """
    chosen = _simulated(scenario)
    spec, policies, step_times = chosen.spec, policies_of(chosen), StepTimes(chosen)
    check_begins(chosen, policies)
    began = time.perf_counter()
    source = _source(chosen)
    chosen = _with_sequence_lengths(chosen)
    started = time.perf_counter()
    apart: Records | str = "its decisions are recorded"
    if decisions is None:
        apart = simulate_apart(chosen, policies, source, jobs, pool)
    records = (
        apart if isinstance(apart, Records) else _simulate(chosen, policies, source, step_times, progress, decisions)
    )
    simulated = time.perf_counter()
    _check_makespan(spec, records)
    summary = summarize(records, warmup_s=spec.simulation.warmup_s, slo=spec.slo, pacer=spec.pacer)
    bound, without_bound = _bound(chosen, records, step_times) if with_bound else (None, ())
    return Run(
        name=spec.name,
        policies=labels(chosen, policies),
        records=records,
        summary=replace(summary, gpu_hours_bound=bound),
        simulate_s=simulated - started,
        total_s=time.perf_counter() - began,
        calibrated=all(each.calibrated for each in step_times.pools),
        uncalibrated=tuple(
            f"{each.name} ({each.gpu}: {', '.join(each.uncalibrated)})"
            for each in step_times.pools
            if each.uncalibrated
        ),
        pools=step_times.pools,
        bands=_bands(chosen, summary, step_times),
        slo=spec.slo,
        notes=(
            *source.table().notes,
            *_empty_window(records, summary),
            *_rejections(records, chosen.fleet.all_pools, spec.policies.shed_ttft_share is not None),
            *([LEAK_NOTE] if knows_future(policies.scaler) else []),
            *_planner_messages(spec, policies),
            *without_bound,
            *([f"simulated in one process: {apart}"] if isinstance(apart, str) and (pool or (jobs or 1) > 1) else []),
        ),
    )


def _bands(chosen: Scenario, summary: Summary, step_times: StepTimes) -> dict[str, Band]:
    """Error bands of the metrics; empty with hosted pools, whose latencies are given and not predicted."""
    pools = chosen.fleet.all_pools
    if any(pool.hosted is not None for pool in pools):
        return {}
    latencies = model_error.bands([(each.model, step_times.coefficients[each.name]) for each in pools], summary)
    return latencies | model_error.energy_bands([each.gpu for each in pools], summary)


def compare(
    scenario: Scenario,
    jobs: int | None = 1,
    progress: Progress | None = None,
    pool: Executor | None = None,
    with_bound: bool = False,
) -> list[Run]:
    """Simulate every variant, in `jobs` processes or in a pool. All get the same arrivals and lengths.

    Without `jobs`, the first variant's duration decides whether to use one process per core for the others.
    """
    chosen = variants(scenario)
    runs: list[Run] = []
    if pool is None and jobs is None:
        runs = [run(chosen[0], _part_of_progress(progress, 0, len(chosen)), with_bound=with_bound)]
        jobs = _jobs_for(runs[0].total_s * (len(chosen) - 1))
    rest = chosen[len(runs) :]
    own = processes(jobs or 1, len(rest)) if pool is None else nullcontext(pool)
    with own as workers:
        for each in rest if workers is None else ():
            runs.append(run(each, _part_of_progress(progress, len(runs), len(chosen)), with_bound=with_bound))
        for done in () if workers is None else workers.map(partial(run, with_bound=with_bound), rest):
            runs.append(done)
            if progress:
                progress(len(runs) / len(chosen))
    return runs


_WORTH_PROCESSES_S = 2.0
"""Total duration from which runs are spread over the cores; below it, starting processes gains little."""


def _jobs_for(expected_s: float) -> int:
    return available_cores() if expected_s > _WORTH_PROCESSES_S else 1


def replicate(
    scenario: Scenario,
    runs: Sequence[Run],
    num_seeds: int,
    jobs: int | None = 1,
    progress: Progress | None = None,
    pool: Executor | None = None,
    by_replica: bool = True,
) -> SeededMetrics:
    """The metrics of `compare`'s runs and of the same variants with the following seeds, `num_seeds` in all.

    Without `by_replica`, per-replica metrics are omitted once the other metrics differ between two seeds. A variant
    whose second seed changes nothing (a trace, and policies without random numbers) is not run again. Without `jobs`:
    one process per core if the runs take long enough.
    """
    chosen, first = variants(scenario), scenario.spec.seed
    seeds = tuple(range(first, first + num_seeds))
    flat: list[list[dict[str, float | int | None]]] = [[flatten(each.summary, by_replica)] for each in runs]
    whole = [by_replica] * len(runs)
    num_done, expected = 0, len(chosen) * (num_seeds - 1)
    if pool is None and jobs is None:
        jobs = _jobs_for(sum(each.total_s for each in runs) * (num_seeds - 1))
    own = processes(jobs or 1, expected) if pool is None else nullcontext(pool)
    with own as workers:
        work = map if workers is None else workers.map
        for batch in (seeds[1:2], seeds[2:]):
            varying = [i for i, values in enumerate(flat) if len(values) == 1 or values[1] != values[0]]
            order = [(i, seed) for seed in batch for i in varying]
            tasks = [with_seed(chosen[i], seed) for i, seed in order]
            unlike = [None if whole[i] or len(flat[i]) > 1 else flat[i][0] for i, _ in order]
            found = work(metrics_of, tasks, [whole[i] for i, _ in order], unlike)
            for (i, _), metrics in zip(order, found, strict=True):
                if not whole[i] and "replica.0.num_requests" in metrics:
                    whole[i], flat[i] = True, [flatten(runs[i].summary)]
                flat[i].append(metrics)
                num_done += 1
                if progress:
                    progress(num_done / expected)
    same = (values + values[:1] * (num_seeds - len(values)) for values in flat)
    return SeededMetrics(seeds, tuple(map(tuple, same)))


def metrics_of(
    scenario: Scenario, by_replica: bool = True, unlike: dict[str, float | int | None] | None = None
) -> dict[str, float | int | None]:
    """The metrics of a run. Per-replica metrics are included only with `by_replica`, or if the other metrics equal
    `unlike`."""
    summary = run(scenario).summary
    flat = flatten(summary, by_replica)
    return flatten(summary) if flat == unlike else flat


def provenance(scenario: Scenario, command: str | None = None) -> Provenance:
    """The information needed to reproduce a scenario's runs."""
    policies = plain(msgspec.structs.asdict(scenario.spec.policies), _shown)
    if not scenario.fleet.fallbacks.models:
        del policies["fallback"]
    for key in ("preempt_every_s", "max_hold_s", "shed_ttft_share", "preset"):
        if policies[key] is None:
            del policies[key]  # so that records equal those of versions without this key
    document = plain({**scenario.document, "seed": scenario.spec.seed, "policies": policies}, _shown)
    text = yaml.safe_dump(document, sort_keys=False, allow_unicode=True, width=100)
    return Provenance(scenario_yaml=text, seed=scenario.spec.seed, version=__version__, command=command)


def _shown(value: Any) -> Any:
    """The name of a user's policy as in `config.own_modules`, else a name valid only in its own process."""
    try:
        return named(value)
    except HeadwayError:
        made_by = value if isinstance(value, type) else type(value)
        return f"{made_by.__module__}:{made_by.__qualname__}"


def _source(scenario: Scenario) -> RequestSource:
    with scenario.places.at("workload"):
        return build(scenario.spec.workload, scenario.spec.seed, scenario.base_dir)


def _with_sequence_lengths(scenario: Scenario) -> Scenario:
    """The scenario, with the workload's mean sequence length set in pools whose models have windowed layers."""
    fleet = scenario.fleet
    if not any(pool.model.memory_varies_with_length for pool in fleet.all_pools):
        return scenario
    with scenario.places.at("workload"):
        rows = generate(scenario.spec.workload, scenario.spec.seed, scenario.base_dir)
    prompt, output = rows.prompt_tokens.astype(float), rows.output_tokens.astype(float)
    steps = float(output.sum())
    # A request occupies the cache while it generates; on average half of its output is there.
    mean = float((output * (prompt + output / 2)).sum() / steps) if steps else None

    def known(pool: Pool) -> Pool:
        is_known = pool.mean_sequence_tokens is not None or not pool.model.memory_varies_with_length
        return pool if is_known else replace(pool, mean_sequence_tokens=mean)

    combos = tuple(replace(combo, parts=tuple(map(known, combo.parts))) for combo in fleet.combos)
    fleet = replace(fleet, pools=tuple(map(known, fleet.pools)), combos=combos)
    return dataclasses.replace(scenario, fleet=fleet)


def _simulate(
    scenario: Scenario,
    policies: Policies,
    source: RequestSource,
    step_times: StepTimes,
    progress: Progress | None = None,
    decisions: DecisionObserver | None = None,
) -> Records:
    spec = scenario.spec
    limits = limits_of(spec)
    check_tenants(scenario, source.table().tenants)
    with as_policy_errors(policies):
        return simulate(
            scenario.fleet, source, policies, seed=spec.seed, step=spec.simulation.step, faults=spec.faults,
            roles=spec.roles, until_s=spec.simulation.until_s, scrape=spec.observe,
            progress=_share_done(progress, source, spec), line=step_times, pacer=spec.pacer, decisions=decisions,
            limits=limits,
        )  # fmt: skip


def _empty_window(records: Records, summary: Summary) -> list[str]:
    """Why nothing is measured, if no request arrived after the warm-up."""
    arrivals = records.workload["arrival_s"]
    if summary.num_requests or not len(arrivals) or not summary.warmup_s:
        return []
    return [nothing_measured(arrivals, summary.warmup_s)]


def _rejections(records: Records, pools: tuple[Pool, ...], is_shedding: bool) -> list[str]:
    """How many requests were rejected, and why."""
    is_rejected, refusals = records.requests["outcome"] == Outcome.REJECTED, list[str]()
    if REFUSED in records.requests and (num := int((records.requests[REFUSED] != 0).sum())):
        is_rejected = is_rejected & (records.requests[REFUSED] == 0)
        refusals = [f"rejected: {num:,} requests beyond the limits of their tenants"]
    rejected = records.requests["request"][is_rejected]
    if not len(rejected):
        return refusals
    contexts = {pool.model.name: pool.model.max_context_tokens for pool in pools}
    limit = max(min(replica.kv_capacity_tokens, contexts[replica.model]) for replica in records.replicas)
    tokens = records.workload["prompt_tokens"][rejected] + records.workload["output_tokens"][rejected]
    too_long = int((tokens > limit).sum())
    notes = [f"rejected: {too_long:,} requests of more than {limit:,} tokens, the most that a replica takes"]
    if too_long < len(rejected):
        late = " in time" if is_shedding else ""
        notes.append(f"rejected: {len(rejected) - too_long:,} requests that no queue had room for{late}")
    return refusals + (notes if too_long else notes[1:])


_LONGEST_IDLE_S = 30 * 86_400.0
_LEAST_BUSY_SHARE = 1e-3
"""In a run of several days, the share of busy time below which arrival times are probably in another unit."""


def _check_makespan(spec: Spec, records: Records) -> None:
    """Raise HeadwayError if a run is so long for its load that arrival times cannot be in seconds."""
    warmup_s = spec.simulation.warmup_s
    window_s = records.end_s - warmup_s
    if spec.simulation.until_s is not None or window_s <= _LONGEST_IDLE_S:
        return
    busy = usage(records, warmup_s).busy_share(list(range(len(records.replicas))))
    if busy is not None and busy < _LEAST_BUSY_SHARE:
        days, num = f"{window_s / 86_400.0:,.0f} days", len(sample(records, warmup_s, None))
        what = f"{num:,} requests in {days} keep the fleet busy for {busy:.3%} of the time"
        raise HeadwayError(f"workload: {what}; expected arrival times in seconds, or --until-s to simulate this")


def _planner_messages(spec: Spec, policies: Policies) -> Sequence[str]:
    if spec.cascade is None or spec.cascade.replan is None:
        return ()
    from headway.planning.cascade.replan import replanner_of

    planner = replanner_of(policies)
    return () if planner is None else planner.messages


def _bound(scenario: Scenario, records: Records, step_times: StepTimes) -> tuple[float | None, tuple[str, ...]]:
    """The least GPU hours of any plan, if the run scales; or a note saying why it is unknown."""
    spec = scenario.spec
    if spec.policies.scaling is None or spec.cascade is not None:
        return None, ()
    from headway.planning.gpu_hours_bound import gpu_hours_bound

    try:
        bound = gpu_hours_bound(
            scenario.fleet,
            records,
            step_times.model,
            warmup_s=spec.simulation.warmup_s,
            slo=spec.slo,
            to_the_end=spec.simulation.until_s is None,
        )
    except HeadwayError as error:
        return None, (f"no bound on GPU hours: {error}",)
    return bound, ()


def _share_done(progress: Progress | None, source: RequestSource, spec: Spec) -> Callable[[float, int], None] | None:
    """The simulator's callback (time, ended requests), which reports the larger of two completed shares: of the
    requests, and of `until_s`."""
    if progress is None:
        return None
    num_requests, until_s = source.num_requests, spec.simulation.until_s

    def report(now_s: float, num: int) -> None:
        shares = (num / num_requests if num_requests else 0.0, now_s / until_s if until_s else 0.0)
        progress(min(max(shares), 1.0))

    return report


def _part_of_progress(progress: Progress | None, i: int, num: int) -> Progress | None:
    return progress and (lambda share: progress((i + share) / num))
