"""The strategies and scenes of each group of claims."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from headway.reproduce.claims import Claim, read_claims
from headway.reproduce.runner import Runner
from headway.reproduce.sageserve import bounds, measures, orderings, scenes
from headway.reproduce.sageserve.scenes import CHIRON, GUARDED, LEAK, LT_I, LT_Q, LT_U, LT_UA, REACTIVE, SILOED, Scene
from headway.reproduce.tasks import Call, Measurement, SimulationTask, Task

_GROUPS = read_claims(__package__)
CLAIMS = tuple(claim for group in _GROUPS.values() for claim in group)
Results = dict[tuple[Any, ...], Measurement]
"""By (kind, strategy, seed)."""
LONG_TERM = (LT_I, LT_U, LT_UA)
BOTH = (REACTIVE, LT_UA)
DAY, PEAK, ALONE, NOVEMBER, H100, MIX_9, MIX_1, SCOUT = (
    "day",
    "peak",
    "alone",
    "november",
    "h100",
    "mix 9:1",
    "mix 1:1",
    "scout",
)
BURST, WEEK, ORDER, READING, BOUND, KNOWS = "burst", "week", "order", "reading", "bound", "knows the trace"
WHOLE = "whole day"
BOUNDED = (DAY, ALONE, NOVEMBER, H100, MIX_9, MIX_1)
"""What stands beside a bound, and beside the best plan of one who knows the trace: of Llama-2-70B alone."""
THETA_SHARE = 0.5
"""Of what an instance serves flat out, for theta. The artifact plans with 30 x 7,516.67 tokens a minute for Llama-2:
half of what its profile says."""


@dataclass(frozen=True)
class RunGroup:
    kind: str
    claims: tuple[Claim, ...]
    scene: Scene
    strategies: Sequence[str]


def parts(quick: bool) -> list[RunGroup]:
    """All groups except orderings. With `quick`, runs are too short for conclusions."""
    lone = (scenes.LLAMA_2,)
    peak = Scene(from_hour=scenes.THURSDAY + 11, hours=3.0)
    one = replace(peak, models=lone, hours=2.0)
    nov = replace(one, builtin=scenes.NOVEMBER, load=scenes.NOVEMBER_LOAD)
    five = replace(peak, hours=2.0, models=(*scenes.MODELS, scenes.SCOUT), builtin=scenes.JULY_SCOUT)
    night = replace(one, from_hour=scenes.THURSDAY + 3, hours=3.0)
    weekend = replace(one, from_hour=scenes.FRIDAY + 18, hours=12.0)
    groups = [
        RunGroup(DAY, (*_GROUPS["hours"], *_GROUPS["waste"], *_GROUPS["tails"]), Scene(), (REACTIVE, *LONG_TERM)),
        RunGroup(
            ALONE, (*_GROUPS["chiron"], *_GROUPS["beyond"]), one, (REACTIVE, GUARDED, CHIRON, LT_U, LT_Q, LT_UA, LEAK)
        ),
        RunGroup(PEAK, _GROUPS["silos"], peak, (SILOED, REACTIVE)),
        RunGroup(BURST, _GROUPS["burst"], night, LONG_TERM),
        RunGroup(NOVEMBER, _GROUPS["november"], nov, (REACTIVE, *LONG_TERM)),
        RunGroup(MIX_9, _GROUPS["ablations"], replace(nov, batch_share=0.1), BOTH),
        RunGroup(MIX_1, _GROUPS["ablations"], replace(nov, batch_share=0.5), BOTH),
        RunGroup(H100, _GROUPS["ablations"], replace(one, gpu=scenes.H100, load=scenes.H100_LOAD), BOTH),
        RunGroup(SCOUT, _GROUPS["scouts"], five, BOTH),
        RunGroup(WEEK, _GROUPS["week"], weekend, (REACTIVE, LT_U, LT_UA)),
    ]
    return [replace(part, scene=_brief(part)) for part in groups] if quick else groups


def measure_all(runner: Runner) -> tuple[Results, Mapping[str, Measurement]]:
    """Runs by kind, strategy and seed; and what instances serve, by GPU."""
    wanted = [part for part in parts(runner.quick) if runner.wants(*part.claims)]
    orders = scenes.ORDERINGS if runner.wants(*_GROUPS["order"]) else ()
    served = runner.run({gpu: _theta(gpu) for gpu in dict.fromkeys(part.scene.gpu for part in wanted)})
    seeds = runner.seeds if orders else ()
    factors = runner.run({seed: Call(orderings.overload, {"seed": seed}) for seed in seeds})
    tasks: dict[tuple[Any, ...], Task] = {}
    for name in orders:
        for seed, each in factors.items():
            tasks[ORDER, name, seed] = SimulationTask(orderings.document(name, each["factor"]), seed, orderings.measure)
    if runner.claims is None:
        day = next(part.scene for part in wanted if part.kind == DAY)
        for name, document in readings(day, served[scenes.A100]):
            tasks[READING, name, runner.seeds[0]] = SimulationTask(document, runner.seeds[0], measures.measure)
        for name, document in whole_day(day, served[scenes.A100]):
            tasks[WHOLE, name, runner.seeds[0]] = SimulationTask(document, runner.seeds[0], measures.measure)
    for part in wanted:
        scene = replace(part.scene, theta=theta(served[part.scene.gpu], THETA_SHARE))
        for seed, strategy in product(runner.seeds, part.strategies):
            tasks[part.kind, strategy, seed] = _simulation(part.kind, scene, strategy, seed)
    for part, seed in product(wanted, runner.seeds):
        if part.kind in BOUNDED:
            document = scenes.document(replace(part.scene, models=(scenes.LLAMA_2,)), REACTIVE)
            tasks[BOUND, part.kind, seed] = Call(bounds.bound, {"document": document, "seed": seed})
            if not runner.quick or part.kind == ALONE:
                arguments = {"document": document, "seed": seed, "tps": served[part.scene.gpu]["tps"]}
                tasks[KNOWS, part.kind, seed] = Call(bounds.best, arguments)
    return runner.run(tasks), served


def readings(day: Scene, served: Measurement) -> Iterator[tuple[str, scenes.Document]]:
    """(name, scenario): what the paper leaves open, one thing at a time, with Llama-2-70B alone."""
    scene = replace(day, models=(scenes.LLAMA_2,), hours=min(day.hours, 3.0), theta=theta(served, THETA_SHARE))
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


def whole_day(day: Scene, served: Measurement) -> Iterator[tuple[str, scenes.Document]]:
    """(name, scenario): Thursday from its first hour to its last, nights and all, with Llama-2-70B alone."""
    hours = 24.0 if day.hours > 1 else day.hours
    scene = replace(day, models=(scenes.LLAMA_2,), from_hour=scenes.THURSDAY, hours=hours)
    scene = replace(scene, theta=theta(served, THETA_SHARE))
    for strategy in (REACTIVE, *LONG_TERM):
        yield strategy, scenes.document(scene, strategy)


def theta(served: Measurement, share: float) -> dict[str, float]:
    """That share of what instances serve flat out, by model."""
    return {model: share * tps for model, tps in served["most"].items()}


def _theta(gpu: str) -> Call:
    scene = Scene(models=(*scenes.MODELS, scenes.SCOUT), builtin=scenes.JULY_SCOUT, gpu=gpu, hours=1.0)
    return Call(measures.theta, {"document": scenes.document(scene, REACTIVE)})


def _simulation(kind: str, scene: Scene, strategy: str, seed: int) -> SimulationTask:
    if kind == BURST:
        return SimulationTask(scenes.burst(scene, strategy), seed, measures.measure_burst)
    function = measures.measure_week if kind == WEEK else measures.measure
    return SimulationTask(scenes.document(scene, strategy), seed, function)


def _brief(part: RunGroup) -> Scene:
    """Little of it: a forecaster that needs no search, and less time, but for the burst's hours."""
    hours = {BURST: part.scene.hours, WEEK: 4.0}.get(part.kind, 1.0)
    load = part.scene.load * (0.3 if part.kind == BURST else 0.6)
    return replace(part.scene, hours=hours, load=load, forecaster="arima:1-0-0:0-1-0")
