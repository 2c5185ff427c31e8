"""The strategies and scenes of each group of claims."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from headway_papers.reproduce.claims import Claim, ids_like, read_claims
from headway_papers.reproduce.runner import Runner
from headway_papers.reproduce.sageserve import bounds, measures, orderings, published, scenes, smoothed, speed, weights
from headway_papers.reproduce.sageserve.published import DELAYS_S, Day
from headway_papers.reproduce.sageserve.scenes import (
    CHIRON,
    EACH_REQUEST,
    GUARDED,
    LEAK,
    LT_I,
    LT_U,
    LT_UA,
    REACTIVE,
    REACTIVE_50,
    SILOED,
    Scene,
)
from headway_papers.reproduce.tasks import Call, Measurement, RecordsTask, Task

_GROUPS = read_claims(__package__)
CLAIMS = tuple(claim for group in _GROUPS.values() for claim in group)
Results = dict[tuple[Any, ...], Measurement]
"""Measurements by (kind, strategy, seed)."""
LONG_TERM = (LT_I, LT_U, LT_UA)
BOTH = (REACTIVE, LT_UA)
PEAK, NOVEMBER, H100, MIX_9, MIX_1, SCOUT = "peak", "november", "h100", "mix 9:1", "mix 1:1", "scout"
BURST, WEEK, ORDER, READING, BOUND, KNOWS = "burst", "week", "order", "reading", "bound", "knows the trace"
TAU = "tau_n"
FLEET = "fleet"
SMOOTH, NO_BLOOM = "fleet, Bloom smoothed", "fleet without Bloom"
ARTIFACT = "thursday, the artifact's constants"
LACKING = "a region without the model"
LACKING_HOURS = 5.0
"""Hours that cover the two hours until the weights arrive, and later starts."""
SPEED = "speed"
FASTER, DAY, SLOWER = (f"thursday, starts of {start_s:g} s" for start_s in DELAYS_S)
THETA_SHARE = 0.5
"""Share of an instance's highest rate that is used as theta. The artifact plans with 30 x 7,516.67 tokens a minute for
Llama-2: half of its profile."""
EQUAL_LATE_SHARES = (0.7, 0.9)
"""Further shares for LT strategies, to find their instance-hours at another scaler's lateness."""
DAYS = ("thursday", "fleet", "chiron", "beyond", "november", "ablations", "scouts", "artifact", "bloom")
"""Groups of claims on whole days."""
STEPS = ids_like(CLAIMS, "step-*")
IN_QUICK = STEPS | ids_like(
    CLAIMS, "unified-*", "lt-i-hours", "lt-regions", "lt-*-waste", "cold-starts", "lt-*-tail", "tail-order",
    "burst-lt-*",
)  # fmt: skip
"""Claims that a quick run decides: a morning in place of a day, and an hour in place of its peak, with less load."""


@dataclass(frozen=True)
class RunGroup:
    kind: str
    claims: tuple[Claim, ...]
    scene: Scene
    strategies: Sequence[str]


def parts(quick: bool) -> list[RunGroup]:
    """All groups of hours, except orderings. With `quick`, those whose rows a short run can decide."""
    lone = (scenes.LLAMA_2,)
    peak = Scene(from_hour=scenes.THURSDAY + 11, hours=3.0)
    one = replace(peak, models=lone, hours=2.0)
    night = replace(one, from_hour=scenes.THURSDAY + 3, hours=3.0)
    weekend = replace(one, from_hour=scenes.FRIDAY + 18, hours=12.0)
    groups = [
        RunGroup(PEAK, _GROUPS["silos"], peak, (SILOED, REACTIVE)),
        RunGroup(BURST, _GROUPS["burst"], night, LONG_TERM),
        RunGroup(WEEK, _GROUPS["week"], weekend, (REACTIVE, LT_U, LT_UA)),
    ]
    return [replace(part, scene=_shortened(part)) for part in groups] if quick else groups


def measure_all(runner: Runner) -> tuple[Results, Mapping[str, Measurement]]:
    """Runs by kind, strategy and seed; and the rates of instances, by GPU."""
    wanted = [part for part in parts(runner.quick) if runner.wants(*part.claims)]
    served = runner.run(_trials(runner, wanted))
    tasks: dict[tuple[Any, ...], Task] = {**_orders(runner), **_speed(runner), **_days(runner, served)}
    if runner.claims is None:
        for name, document in readings(served[scenes.A100]):
            tasks[READING, name, runner.seeds[0]] = RecordsTask(document, runner.seeds[0], measures.measure)
    for part in wanted:
        scene = replace(part.scene, theta=theta(served[part.scene.gpu], THETA_SHARE))
        for seed, strategy in product(runner.seeds, part.strategies):
            tasks[part.kind, strategy, seed] = _simulation(part.kind, scene, strategy, seed)
    return runner.run(tasks), served


def _trials(runner: Runner, wanted: Sequence[RunGroup]) -> dict[str, Task]:
    """Measurements of instances' rates by GPU, and for the fleet on equal GPUs, as far as needed."""
    trials: dict[str, Task] = {}
    if wanted or runner.wants(*(claim for name in DAYS for claim in _GROUPS[name])):
        trials[scenes.A100] = _theta(scenes.A100)
    if runner.wants(*_GROUPS["ablations"]):
        trials[scenes.H100] = _theta(scenes.H100)
    if runner.wants(*_GROUPS["fleet"], *_GROUPS["scouts"], *_GROUPS["bloom"]):
        trials[FLEET] = Call(measures.theta, {"document": published.fleet_trial()})
    return trials


def _orders(runner: Runner) -> dict[tuple[Any, ...], Task]:
    wanted = [name for name in ("order", "tau") if runner.wants(*_GROUPS[name])]
    if not wanted:
        return {}
    factors = runner.run({seed: Call(orderings.overload, {"seed": seed}) for seed in runner.seeds})
    documents: dict[tuple[str, str, int], scenes.Document] = {}
    for seed, factor in ((seed, each["factor"]) for seed, each in factors.items()):
        if "order" in wanted:
            documents |= {(ORDER, name, seed): orderings.document(name, factor) for name in scenes.ORDERINGS}
        if "tau" in wanted:
            others = (name for name in scenes.ORDERINGS if name != "dpa")
            documents |= {(TAU, name, seed): orderings.document(name, factor) for name in others}
            documents |= {
                (TAU, f"{tau_s:g} s", seed): orderings.document("dpa", factor, tau_s) for tau_s in scenes.TAUS_S
            }
    return {key: RecordsTask(document, key[-1], orderings.measure) for key, document in documents.items()}


def _speed(runner: Runner) -> dict[tuple[Any, ...], Task]:
    """Step times, programs and forecasts."""
    tasks: dict[tuple[Any, ...], Task] = {}
    is_hourly = runner.wants(*(claim for claim in _GROUPS["speed"] if claim.id not in STEPS))
    for seed in runner.seeds if is_hourly else ():
        for name, (models, regions, gpus) in speed.SIZES.items():
            size = {"models": models, "regions": regions, "gpus": gpus}
            tasks[SPEED, name, seed] = Call(speed.program_s, {**size, "seed": seed})
        tasks[SPEED, "arima", seed] = Call(speed.forecasts_s, {"seed": seed})
    if runner.wants(*STEPS) and (path := runner.file(speed.PROFILES)) is not None:
        tasks[SPEED, "steps", runner.seeds[0]] = Call(speed.step_times, {"path": str(path)})
    return tasks


def _days(runner: Runner, served: Mapping[str, Measurement]) -> dict[tuple[Any, ...], Task]:
    """Whole days by seed; with the first seed, also the bound on Thursday's and the best plan that knows it."""
    has_series = published.has_series(runner.data)
    documents: dict[tuple[str, str], scenes.Document] = {}
    if runner.wants(*_GROUPS["thursday"], *_GROUPS["chiron"], *_GROUPS["beyond"]):
        days = thursday_morning if runner.quick else thursdays
        documents |= days(served[scenes.A100], has_series)
    if runner.wants(*_GROUPS["november"], *_GROUPS["ablations"]):
        documents |= other_days(served, has_series)
    if runner.wants(*_GROUPS["scouts"]):
        documents |= scouts(served[FLEET])
    if runner.wants(*_GROUPS["fleet"]):
        documents |= fleets(served[FLEET], has_series)
    if runner.wants(*_GROUPS["artifact"]):
        documents |= with_artifacts_constants(served[scenes.A100], has_series)
    if runner.wants(*_GROUPS["bloom"]):
        documents |= fleets_without_bloom(served[FLEET], has_series)
    tasks: dict[tuple[Any, ...], Task] = {
        (*key, seed): RecordsTask(document, seed, measures.measure)
        for key, document in documents.items()
        for seed in runner.seeds
    }
    if runner.wants(*_GROUPS["fleet"]):
        tasks |= _without_weights(runner, served[scenes.A100], has_series)
    if runner.wants(*_GROUPS["bloom"]) and has_series:
        tasks |= _smoothed(runner, served[FLEET])
    if runner.claims is None:
        first = {"document": documents[DAY, REACTIVE], "seed": runner.seeds[0], "data": str(runner.data or "")}
        tasks[BOUND, DAY, runner.seeds[0]] = Call(bounds.bound, first)
        tasks[KNOWS, DAY, runner.seeds[0]] = Call(bounds.best, {**first, "tps": served[scenes.A100]["tps"]})
    return tasks


def _without_weights(runner: Runner, served: Measurement, has_series: bool) -> dict[tuple[str, str, int], Call]:
    """Hours of Thursday in which the last region begins without Llama-2, with the first seed."""
    half, seed = theta(served, THETA_SHARE), runner.seeds[0]
    day = Day(theta=half, half=half, from_hour=6.0, hours=LACKING_HOURS, has_series=has_series)
    arguments = {"region": scenes.REGIONS[-1], "seed": seed, "data": str(runner.data or "")}
    return {
        (LACKING, name, seed): Call(weights.lacking, {"document": published.document(day, name), **arguments})
        for name in (REACTIVE, LT_I)
    }


def thursdays(served: Measurement, has_series: bool) -> dict[tuple[str, str], scenes.Document]:
    """Maps each kind and strategy to start delays with and without the guard, and the planned rates of long-term
    strategies."""
    half = theta(served, THETA_SHARE)
    documents: dict[tuple[str, str], scenes.Document] = {}
    for kind, start_s in zip((FASTER, DAY, SLOWER), DELAYS_S, strict=True):
        day = Day(theta=half, half=half, start_s=start_s, has_series=has_series)
        more = (EACH_REQUEST, CHIRON, LEAK) if kind == DAY else ()
        documents |= {(kind, name): published.document(day, name) for name in (REACTIVE, GUARDED, *more)}
        for share, name in product((THETA_SHARE, *EQUAL_LATE_SHARES), LONG_TERM if kind == DAY else (LT_I,)):
            planned = replace(day, theta=theta(served, share))
            documents[kind, planned_at(name, share)] = published.document(planned, name)
    return documents


def thursday_morning(served: Measurement, has_series: bool) -> dict[tuple[str, str], scenes.Document]:
    """Thursday from 10:00 to 14:00, for quick runs."""
    half = theta(served, THETA_SHARE)
    day = Day(theta=half, half=half, from_hour=8.0, hours=6.0, has_series=has_series)
    return {(DAY, name): published.document(day, name) for name in (REACTIVE, *LONG_TERM)}


def other_days(served: Mapping[str, Measurement], has_series: bool) -> dict[tuple[str, str], scenes.Document]:
    """November's Thursday, its mixes, and Thursday on H100."""
    half, fast = (theta(served[gpu], THETA_SHARE) for gpu in (scenes.A100, scenes.H100))
    november = Day(theta=half, half=half, has_series=False, builtin=scenes.NOVEMBER, load=scenes.NOVEMBER_LOAD)
    days = {
        NOVEMBER: (november, (REACTIVE, GUARDED, *LONG_TERM)),
        MIX_9: (replace(november, batch_share=0.1), BOTH),
        MIX_1: (replace(november, batch_share=0.5), BOTH),
        H100: (Day(theta=fast, half=fast, gpu=scenes.H100, load=scenes.H100_LOAD, has_series=has_series), BOTH),
    }
    return {(kind, name): published.document(day, name) for kind, (day, names) in days.items() for name in names}


def scouts(served: Measurement) -> dict[tuple[str, str], scenes.Document]:
    """Five models on equal GPUs."""
    half = theta(served, THETA_SHARE)
    day = replace(published.SCOUT_DAY, theta=half, half=half)
    return {(SCOUT, name): published.document(day, name) for name in BOTH}


def fleets(served: Measurement, has_series: bool) -> dict[tuple[str, str], scenes.Document]:
    """Four models on equal GPUs."""
    day = _fleet_day(published.FLEET_DAY, served, has_series)
    return {(FLEET, name): published.document(day, name) for name in (REACTIVE, GUARDED, LT_I)}


def _fleet_day(day: Day, served: Measurement, has_series: bool) -> Day:
    half = theta(served, THETA_SHARE)
    return replace(day, theta=half, half=half, has_series=has_series)


def with_artifacts_constants(served: Measurement, has_series: bool) -> dict[tuple[str, str], scenes.Document]:
    """Reactive scaling as in the paper, and all strategies with the artifact's constants."""
    half = theta(served, THETA_SHARE)
    day = Day(theta=half, half=half, has_series=has_series)
    names = (REACTIVE_50, LT_I, LT_UA)
    return {(ARTIFACT, REACTIVE): published.document(day, REACTIVE)} | {
        (ARTIFACT, name): published.with_artifacts_constants(day, name) for name in names
    }


def fleets_without_bloom(served: Measurement, has_series: bool) -> dict[tuple[str, str], scenes.Document]:
    """Three models on equal GPUs."""
    day = published.without_bloom(_fleet_day(published.OTHER_BLOOM_DAY, served, has_series))
    return {(NO_BLOOM, name): published.document(day, name) for name in (REACTIVE, LT_I)}


def _smoothed(runner: Runner, served: Measurement) -> dict[tuple[str, str, int], Call]:
    """Four models on equal GPUs, with the weekly profile as Bloom's interactive demand."""
    day = _fleet_day(published.OTHER_BLOOM_DAY, served, has_series=True)
    series = f"{published.NAMES[scenes.BLOOM]} prod"
    return {
        (SMOOTH, name, seed): Call(
            smoothed.measure_smoothed,
            {"document": published.document(day, name), "name": series, "seed": seed, "data": str(runner.data)},
        )
        for name in (REACTIVE, LT_I)
        for seed in runner.seeds
    }


def planned_at(name: str, share: float) -> str:
    """The name of a strategy that plans with a share of an instance's highest rate."""
    return name if share == THETA_SHARE else f"{name} (theta {share:.0%})"


def readings(served: Measurement) -> Iterator[tuple[str, scenes.Document]]:
    """(name, scenario) pairs that vary one open detail of the paper at a time, with Llama-2-70B alone."""
    scene = Scene(models=(scenes.LLAMA_2,), hours=3.0, theta=theta(served, THETA_SHARE))
    yield "reactive", scenes.document(scene, REACTIVE)
    yield "reactive that counts what is starting", scenes.document(scene, GUARDED)
    yield "LT-U: theta half of flat out, epsilon 1", scenes.document(scene, LT_U)
    shared = scenes.document(scene, LT_U)
    shared["policies"]["scaling"]["plan"]["epsilon"] = 0.8
    yield "LT-U: epsilon 0.8", shared
    yield "LT-U: theta in time (95% within 1 s)", scenes.document(replace(scene, theta=served["tps"]), LT_U)
    yield "LT-U: theta 70% of flat out", scenes.document(replace(scene, theta=theta(served, 0.7)), LT_U)
    yield "LT-U: hourly means forecast", scenes.document(replace(scene, step_s=3600.0), LT_U)
    yield "LT-U that counts what is starting", scenes.document(replace(scene, guard=True), LT_U)


def theta(served: Measurement, share: float) -> dict[str, float]:
    """Maps each model to this share of an instance's highest rate."""
    return {model: share * tps for model, tps in served["most"].items()}


def _theta(gpu: str) -> Call:
    scene = Scene(models=(*scenes.MODELS, scenes.SCOUT), builtin=scenes.JULY_SCOUT, gpu=gpu, hours=1.0)
    return Call(measures.theta, {"document": scenes.document(scene, REACTIVE)})


def _simulation(kind: str, scene: Scene, strategy: str, seed: int) -> RecordsTask:
    if kind == BURST:
        return RecordsTask(scenes.burst(scene, strategy), seed, measures.measure_burst)
    function = measures.measure_week if kind == WEEK else measures.measure
    return RecordsTask(scenes.document(scene, strategy), seed, function)


def _shortened(part: RunGroup) -> Scene:
    """A shortened scene: a forecaster without a search and less time, except in the burst's hours."""
    hours = {BURST: part.scene.hours, WEEK: 4.0}.get(part.kind, 1.0)
    load = part.scene.load * (0.3 if part.kind == BURST else 0.6)
    return replace(part.scene, hours=hours, load=load, forecaster="arima:1-0-0:0-1-0")
