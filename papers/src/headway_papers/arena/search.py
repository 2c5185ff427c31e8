"""Searches the best arguments of a policy on one half of a grid, and judges them once on the other half.

Random search with successive halving (Jamieson and Talwalkar, 2016): all trials run on a few training runs, the better
third on three times as many, and so on, until the last trials have run on all. Trials are compared by the gain over the
policy's own defaults in the same run, with common requests and cells. The test half is used only after the search, for
its winner and the defaults.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from random import Random
from statistics import fmean
from typing import Any, Literal

from msgspec import Struct

from headway.config.user_modules import loader_of
from headway.core.errors import HeadwayError, unknown
from headway.metrics.seeds import Estimate, estimate_of
from headway.policies.resolve import PolicyChoice
from headway_papers.arena.contestants import KINDS, Contestant, label
from headway_papers.arena.grid import Cell, Grid
from headway_papers.arena.keys import key_of
from headway_papers.arena.metrics import METRICS, Measurement
from headway_papers.arena.play import Key, found_capacities, tasks
from headway_papers.arena.space import Argument, Value, space
from headway_papers.reproduce.runner import Runner
from headway_papers.reproduce.tasks import Call

KEPT = 3
"""One of this many trials goes on to a rung with this many times the runs."""
MOST_DRAWS = 200
"""Maximum number of draws for one trial, because the constructor may reject some."""
HoldOut = Literal["seeds", "cells"]
Run = tuple[Cell, int]


class Trial(Struct, frozen=True):
    """Arguments, and their mean gain over the defaults on their training runs."""

    arguments: dict[str, Value]
    gain: float
    num_runs: int


class Search(Struct, frozen=True):
    """The trials, and the winner on the test half: the output of `headway arena search --json`."""

    grid: str
    kind: str
    policy: str
    metric: str
    hold_out: str
    space: tuple[Argument, ...]
    trials: list[Trial]
    """By runs and gain, the winner first."""
    arguments: dict[str, Value]
    """Arguments of the winner; empty if no trial beat the defaults."""
    train_gain: float
    test_gain: Estimate
    """Gain over the defaults on runs that the search has not used; the 95% interval is over seeds. With one seed, `low`
    and `high` equal the mean."""
    verdict: Literal["better", "indistinguishable", "worse", "defaults"]
    num_train_runs: int
    num_test_runs: int
    num_measured: int
    num_found: int
    wall_s: float


def search(
    grid: Grid,
    kind: str,
    policy: str,
    runner: Runner,
    *,
    vary: Sequence[str] = (),
    num_trials: int = 27,
    hold_out: HoldOut = "seeds",
    seed: int = 0,
) -> Search:
    """Search the arguments of a router or an ordering. Raises HeadwayError if it has none, or no half can be held
    out."""
    began = time.perf_counter()
    runner.key_of = key_of
    train, test = halves(grid, hold_out)
    choice = _choice(grid, kind, policy)
    arguments = space(choice, vary)
    loads = {pair: each.load for pair, each in found_capacities(grid, runner).items()}
    judge = _Judge(grid, kind, policy, runner, loads)
    random = Random(seed)
    random.shuffle(train)
    trials = halved(draws(choice, grid, kind, arguments, num_trials, random), train, judge)
    best = trials[0]
    won = best.arguments if best.gain > 0 else {}
    by_run = judge.gains([won], test)[0] if won else dict.fromkeys(test, 0.0)
    gain = _over_seeds(by_run)
    return Search(
        grid.name,
        kind,
        policy,
        metric=grid.spec.metric,
        hold_out=hold_out,
        space=arguments,
        trials=trials,
        arguments=won,
        train_gain=best.gain if won else 0.0,
        test_gain=gain,
        verdict=_verdict(gain, won),
        num_train_runs=len(train),
        num_test_runs=len(test),
        num_measured=runner.num_measured,
        num_found=runner.num_found,
        wall_s=time.perf_counter() - began,
    )


def halves(grid: Grid, hold_out: HoldOut) -> tuple[list[Run], list[Run]]:
    """The runs for the search, and the held-out runs: half of the seeds, or every other cell."""
    seeds, cells = list(grid.seeds), grid.cells
    if len(seeds if hold_out == "seeds" else cells) < 2:
        raise HeadwayError(f"--hold-out {hold_out}: the grid has one of them; expected two or more")
    middle = len(seeds) // 2
    if hold_out == "seeds":
        parts = [(cells, seeds[:middle]), (cells, seeds[middle:])]
    else:
        parts = [(cells[::2], seeds), (cells[1::2], seeds)]
    train, test = ([(cell, each) for cell in own for each in drawn] for own, drawn in parts)
    return train, test


def draws(
    choice: PolicyChoice[Any], grid: Grid, kind: str, arguments: Sequence[Argument], num: int, random: Random
) -> list[dict[str, Value]]:
    """Different points that the constructor accepts: `num`, or fewer if the space is smaller."""
    resolved, load = KINDS[kind][1], loader_of(grid.base_dir)
    assert resolved is not None
    found: list[dict[str, Value]] = []
    refusal: HeadwayError | None = None
    for _ in range(MOST_DRAWS * num):
        point = {each.name: each.draw(random) for each in arguments}
        if point in found:
            continue
        try:
            resolved({"name": choice.name, **point}, load)
        except HeadwayError as error:
            refusal = error
            continue
        found.append(point)
        if len(found) == num:
            break
    if not found and refusal is not None:
        raise HeadwayError(f"every draw was refused, as in: {refusal}")
    return found


def halved(points: Sequence[dict[str, Value]], train: Sequence[Run], judge: _Judge) -> list[Trial]:
    """All trials; those with the most runs first, and among them the best first."""
    num_rungs = 1
    while KEPT**num_rungs < len(points) and KEPT**num_rungs < len(train):
        num_rungs += 1
    done: list[Trial] = []
    alive = list(points)
    for rung in reversed(range(num_rungs)):
        num_runs = max(1, len(train) // KEPT**rung)
        gains = judge.gains(alive, train[:num_runs])
        order = sorted(range(len(alive)), key=lambda i: -fmean(gains[i].values()))
        ranked = [Trial(alive[i], fmean(gains[i].values()), num_runs) for i in order]
        num_kept = len(ranked) if rung == 0 else max(1, len(ranked) // KEPT)
        done = ranked + done[len(ranked) :]
        alive = [each.arguments for each in ranked[:num_kept]]
    return done


class _Judge:
    """Compares trials with the defaults in the same runs."""

    def __init__(
        self, grid: Grid, kind: str, policy: str, runner: Runner, loads: Mapping[tuple[str, str], float]
    ) -> None:
        self._grid, self._kind, self._policy, self._runner, self._loads = grid, kind, policy, runner, loads

    def gains(self, points: Sequence[dict[str, Value]], runs: Sequence[Run]) -> list[dict[Run, float]]:
        """Returns, for each point, its gain over the defaults in each run, as a share of the larger value, from -1 to
        1."""
        everyone = [self._contestant({}), *map(self._contestant, points)]
        wanted: dict[Key, Call] = {}
        for cell in dict.fromkeys(cell for cell, _ in runs):
            seeds = [seed for each, seed in runs if each == cell]
            wanted |= tasks(self._grid, [cell], everyone, seeds, self._loads)
        results = self._runner.run(wanted)
        return [{run: self._gain(results, run, everyone[0], each) for run in runs} for each in everyone[1:]]

    def _contestant(self, point: dict[str, Value]) -> Contestant:
        spec = {"name": self._policy, **point}
        return Contestant(label(spec), {self._kind: spec}, False, True)

    def _gain(self, results: Mapping[Key, Measurement], run: Run, default: Contestant, trial: Contestant) -> float:
        cell, seed = run
        before, after = (results[cell, each.name, seed] for each in (default, trial))
        if "error" in before:
            raise HeadwayError(f"{default.name} in {cell}: {before['error']}")
        metric = self._grid.spec.metric
        a, b = before.get(metric), after.get(metric)
        if a is None or b is None:
            return 0.0 if a is b else -1.0
        size = max(abs(a), abs(b))
        sign = 1 if METRICS[metric].better == "high" else -1
        return float(sign * (b - a) / size) if size else 0.0


def _choice(grid: Grid, kind: str, policy: str) -> PolicyChoice[Any]:
    resolved = KINDS[kind][1] if kind in KINDS else None
    if resolved is None:
        raise unknown("kind", kind, [name for name, (_, each) in KINDS.items() if each is not None], "--kind")
    return resolved(policy, loader_of(grid.base_dir))


def _over_seeds(by_run: Mapping[Run, float]) -> Estimate:
    """The mean over cells and seeds, with an interval over seeds."""
    seeds = dict.fromkeys(seed for _, seed in by_run)
    means = [fmean(gain for (_, each), gain in by_run.items() if each == seed) for seed in seeds]
    return estimate_of(means) or Estimate(means[0], means[0], means[0])


def _verdict(gain: Estimate, won: Mapping[str, Value]) -> Literal["better", "indistinguishable", "worse", "defaults"]:
    if not won:
        return "defaults"
    if gain.low == gain.high or gain.low <= 0 <= gain.high:
        return "indistinguishable"
    return "better" if gain.low > 0 else "worse"
