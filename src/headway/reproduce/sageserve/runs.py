"""The strategies and scenes of each group of claims."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from headway.reproduce.claims import Claim, read_claims
from headway.reproduce.runner import Runner
from headway.reproduce.sageserve import bounds, measures, orderings, published, scenes
from headway.reproduce.sageserve.published import DELAYS_S, Day
from headway.reproduce.sageserve.scenes import CHIRON, GUARDED, LEAK, LT_I, LT_U, LT_UA, REACTIVE, SILOED, Scene
from headway.reproduce.tasks import Call, Measurement, SimulationTask, Task

_GROUPS = read_claims(__package__)
CLAIMS = tuple(claim for group in _GROUPS.values() for claim in group)
Results = dict[tuple[Any, ...], Measurement]
"""By (kind, strategy, seed)."""
LONG_TERM = (LT_I, LT_U, LT_UA)
BOTH = (REACTIVE, LT_UA)
PEAK, ALONE, NOVEMBER, H100, MIX_9, MIX_1, SCOUT = (
    "peak",
    "alone",
    "november",
    "h100",
    "mix 9:1",
    "mix 1:1",
    "scout",
)
BURST, WEEK, ORDER, READING, BOUND, KNOWS = "burst", "week", "order", "reading", "bound", "knows the trace"
FLEET = "fleet"
FASTER, DAY, SLOWER = (f"thursday, starts of {start_s:g} s" for start_s in DELAYS_S)
BOUNDED = (ALONE, NOVEMBER, H100, MIX_9, MIX_1)
"""What stands beside a bound, and beside the best plan of one who knows the trace: of Llama-2-70B alone."""
THETA_SHARE = 0.5
"""Of what an instance serves flat out, for theta. The artifact plans with 30 x 7,516.67 tokens a minute for Llama-2:
half of what its profile says."""
EQUAL_LATE_SHARES = (0.4, 0.7, 0.9)
"""Further shares that LT-I plans with, to find its instance-hours where as many are late as with another scaler."""
FULL_ONLY = ("thursday", "fleet", "beyond", "november", "ablations", "scouts")
"""Groups that need a full run: in less than a day, instance-hours are those of the first plan."""
FULL_ONLY_CLAIMS = frozenset(claim for name in FULL_ONLY for claim in _GROUPS[name])


@dataclass(frozen=True)
class RunGroup:
    kind: str
    claims: tuple[Claim, ...]
    scene: Scene
    strategies: Sequence[str]


def parts(quick: bool) -> list[RunGroup]:
    """All groups except orderings and days. With `quick`, those whose rows a short run can decide."""
    lone = (scenes.LLAMA_2,)
    peak = Scene(from_hour=scenes.THURSDAY + 11, hours=3.0)
    one = replace(peak, models=lone, hours=2.0)
    nov = replace(one, builtin=scenes.NOVEMBER, load=scenes.NOVEMBER_LOAD)
    five = replace(peak, hours=2.0, models=(*scenes.MODELS, scenes.SCOUT), builtin=scenes.JULY_SCOUT)
    night = replace(one, from_hour=scenes.THURSDAY + 3, hours=3.0)
    weekend = replace(one, from_hour=scenes.FRIDAY + 18, hours=12.0)
    groups = [
        RunGroup(ALONE, (*_GROUPS["chiron"], *_GROUPS["beyond"]), one, (REACTIVE, GUARDED, CHIRON, LT_U, LT_UA, LEAK)),
        RunGroup(PEAK, _GROUPS["silos"], peak, (SILOED, REACTIVE)),
        RunGroup(BURST, _GROUPS["burst"], night, LONG_TERM),
        RunGroup(NOVEMBER, _GROUPS["november"], nov, (REACTIVE, *LONG_TERM)),
        RunGroup(MIX_9, _GROUPS["ablations"], replace(nov, batch_share=0.1), BOTH),
        RunGroup(MIX_1, _GROUPS["ablations"], replace(nov, batch_share=0.5), BOTH),
        RunGroup(H100, _GROUPS["ablations"], replace(one, gpu=scenes.H100, load=scenes.H100_LOAD), BOTH),
        RunGroup(SCOUT, _GROUPS["scouts"], five, BOTH),
        RunGroup(WEEK, _GROUPS["week"], weekend, (REACTIVE, LT_U, LT_UA)),
    ]
    if not quick:
        return groups
    short = [part for part in groups if not set(part.claims) & FULL_ONLY_CLAIMS or part.kind == ALONE]
    return [replace(part, scene=_brief(part), strategies=_unplanned(part)) for part in short]


def measure_all(runner: Runner) -> tuple[Results, Mapping[str, Measurement]]:
    """Runs by kind, strategy and seed; and what instances serve, by GPU."""
    wanted = [part for part in parts(runner.quick) if runner.wants(*part.claims)]
    orders = scenes.ORDERINGS if runner.wants(*_GROUPS["order"]) else ()
    gpus = {part.scene.gpu for part in wanted} | ({scenes.A100} if runner.wants(*_GROUPS["thursday"]) else set())
    served = runner.run({gpu: _theta(gpu) for gpu in sorted(gpus)})
    seeds = runner.seeds if orders else ()
    factors = runner.run({seed: Call(orderings.overload, {"seed": seed}) for seed in seeds})
    tasks: dict[tuple[Any, ...], Task] = {}
    for name in orders:
        for seed, each in factors.items():
            tasks[ORDER, name, seed] = SimulationTask(orderings.document(name, each["factor"]), seed, orderings.measure)
    if not runner.quick:
        tasks |= _days(runner, served)
        if runner.claims is None:
            for name, document in readings(served[scenes.A100]):
                tasks[READING, name, runner.seeds[0]] = SimulationTask(document, runner.seeds[0], measures.measure)
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


def _days(runner: Runner, served: Mapping[str, Measurement]) -> dict[tuple[Any, ...], Task]:
    """The published Thursday, and the fleet of four models on equal GPUs."""
    documents: dict[tuple[str, str], scenes.Document] = {}
    if runner.wants(*_GROUPS["thursday"]):
        documents |= thursdays(served[scenes.A100], published.has_series(runner.data))
    if runner.wants(*_GROUPS["fleet"]):
        fleet = runner.run({FLEET: Call(measures.theta, {"document": published.fleet_trial()})})[FLEET]
        half = theta(fleet, THETA_SHARE)
        day = replace(published.FLEET_DAY, theta=half, half=half, has_series=published.has_series(runner.data))
        documents |= {(FLEET, name): published.document(day, name) for name in (REACTIVE, LT_I)}
    return {
        (*key, seed): SimulationTask(document, seed, measures.measure)
        for key, document in documents.items() for seed in runner.seeds
    }  # fmt: skip


def thursdays(served: Measurement, has_series: bool) -> dict[tuple[str, str], scenes.Document]:
    """By kind and strategy: start delays with and without the guard, and what LT-I plans with."""
    half = theta(served, THETA_SHARE)
    days = {
        kind: Day(theta=half, half=half, start_s=start_s, has_series=has_series)
        for kind, start_s in zip((FASTER, DAY, SLOWER), DELAYS_S, strict=True)
    }
    names = {DAY: (REACTIVE, LT_I, GUARDED, LT_U, LT_UA)}
    documents = {
        (kind, name): published.document(day, name)
        for kind, day in days.items() for name in names.get(kind, (REACTIVE, LT_I, GUARDED))
    }  # fmt: skip
    for share in EQUAL_LATE_SHARES:
        planned = replace(days[DAY], theta=theta(served, share))
        documents[DAY, lt_i_at(share)] = published.document(planned, LT_I)
    return documents


def lt_i_at(share: float) -> str:
    """The name of LT-I that plans with a share of what an instance serves flat out."""
    return LT_I if share == THETA_SHARE else f"{LT_I} (theta {share:.0%})"


def readings(served: Measurement) -> Iterator[tuple[str, scenes.Document]]:
    """(name, scenario): what the paper leaves open, one thing at a time, with Llama-2-70B alone."""
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


def _unplanned(part: RunGroup) -> Sequence[str]:
    """The strategies of a short run: where hours are compared, those without a plan."""
    return tuple(name for name in part.strategies if part.kind != ALONE or name in (REACTIVE, CHIRON))


def _brief(part: RunGroup) -> Scene:
    """Little of it: a forecaster that needs no search, and less time, but for the burst's hours."""
    hours = {BURST: part.scene.hours, WEEK: 4.0}.get(part.kind, 1.0)
    load = part.scene.load * (0.3 if part.kind == BURST else 0.6)
    return replace(part.scene, hours=hours, load=load, forecaster="arima:1-0-0:0-1-0")
