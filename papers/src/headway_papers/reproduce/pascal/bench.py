"""Runs by workload, rate and policies, each simulated once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean

from headway.calibration.replay import replay
from headway.calibration.serving import read
from headway.calibration.validation import compare, validation
from headway_papers.reproduce.pascal import load
from headway_papers.reproduce.pascal.runs import FCFS, Document, measure, measure_phase, served
from headway_papers.reproduce.runner import Runner
from headway_papers.reproduce.tasks import Call, Measurement, SimulationTask

ALPACA, ARENA, HEAVY, TRACE = "alpaca", "arena", "heavy", "trace"
NAMES = {ALPACA: "alpaca-eval", ARENA: "arena-hard", HEAVY: "arena-hard-reasoning-heavy"}
NUM_REQUESTS = {ALPACA: 3000, ARENA: 2000, HEAVY: 2000, TRACE: 2500}
"""Numbers of requests, so that arrivals last several times a request's duration: some minutes."""
REPLICAS = 8
FILE = "servegen_reasoning_requests.csv.gz"
"""A file of --data: a day of ServeGen's requests to a production DeepSeek-R1."""
MEASURED = "vllm015_serving_train.csv"
"""A file of --data: twelve serving experiments on H100."""
ERRORS = ("e2e_mean", "ttft_mean", "tpot_mean")
LEVELS = ("low", "medium", "high")
PAIR = "pair"
"""The level with the violations of section V-D."""


@dataclass
class Bench:
    """A runner with the runs made so far."""

    runner: Runner
    _rates: dict[str, list[dict[str, float]]] = field(default_factory=dict)
    _runs: dict[tuple[str, str, str, int], Measurement] = field(default_factory=dict)

    @property
    def seeds(self) -> Sequence[int]:
        return self.runner.seeds

    @property
    def trace(self) -> str | None:
        """The file of production requests, if it exists."""
        path = self.runner.file(FILE)
        return None if path is None else str(path)

    def simulator_errors(self) -> list[Measurement] | None:
        """Mean absolute errors of replayed experiments, by seed; None without the file of measurements."""
        path = self.runner.file(MEASURED)
        if path is None:
            return None
        return self.runner.repeat("simulator", replay_errors, {"path": str(path)})

    def _size(self, key: str) -> tuple[str, int, int]:
        """Name or file, number of requests, replicas; with --quick, half of the last two."""
        part = 2 if self.runner.quick else 1
        return NAMES.get(key) or self.trace or "", NUM_REQUESTS[key] // part, REPLICAS // part

    def rates(self, key: str) -> list[dict[str, float]]:
        """Each level's rate, by seed. A trace has one for each of its slices, because its hours differ."""
        if key not in self._rates:
            name, num_requests, replicas = self._size(key)
            wanted = list(LEVELS if key in (ALPACA, ARENA) else LEVELS[-1:])
            searches = {seed: (load.SEEDS[0] + seed,) if key == TRACE else load.SEEDS for seed in self.seeds}
            arguments = {"name": name, "num_requests": num_requests, "replicas": replicas, "wanted": wanted}
            calls = {seeds: Call(load.levels, {**arguments, "seeds": list(seeds)}) for seeds in searches.values()}
            measured = self.runner.run({(key, "rate", *seeds): call for seeds, call in calls.items()})
            self._rates[key] = [measured[key, "rate", *searches[seed]] for seed in self.seeds]
        return self._rates[key]

    def add_pair(self, key: str) -> Measurement:
        """Add the level `PAIR` to the rates. Returns all tried rates with their violations."""
        name, num_requests, replicas = self._size(key)
        arguments = {"name": name, "num_requests": num_requests, "replicas": replicas, "high": self.rate(key, "high")}
        call = Call(load.pair, {**arguments, "seeds": list(load.SEEDS)})
        found = self.runner.run({(key, PAIR): call})[key, PAIR]
        self._rates[key] = [rates | {PAIR: found["rate"]} for rates in self.rates(key)]
        return found

    def rate(self, key: str, level: str) -> float:
        return fmean(rates[level] for rates in self.rates(key))

    def runs(self, key: str, level: str, *systems: str, most: int | None = None) -> list[list[Measurement]]:
        """Measurements by system and seed, of at most `most` seeds."""
        seeds = self.seeds[:most]
        tasks = {
            (key, level, system, seed): SimulationTask(self._document(key, rates[level], system, seed), seed, measure)
            for system in systems
            for seed, rates in zip(seeds, self.rates(key), strict=False)
            if (key, level, system, seed) not in self._runs
        }
        self._runs |= self.runner.run(tasks)
        return [[self._runs[key, level, system, seed] for seed in seeds] for system in systems]

    def _document(self, key: str, rate: float, system: str, seed: int) -> Document:
        name, num_requests, replicas = self._size(key)
        return served(load.workload(name, rate, num_requests, seed), system, replicas=replicas)

    def phase(self, name: str, *systems: str) -> tuple[float, list[Measurement], dict[str, list[Measurement]]]:
        """The rate, the oracle's runs, and each system's runs with half of the GPU's KV cache, for section III."""
        rate = self.runner.run({(name, "rate"): Call(load.unpressed, {"name": name, "num_requests": 300})})
        per_s = rate[name, "rate"]["rate"]

        def task(seed: int, system: str, kv_tokens: int | None) -> SimulationTask:
            workload = load.workload(name, per_s, 300, seed)
            return SimulationTask(
                served(workload, system, replicas=1, kv_capacity_tokens=kv_tokens), seed, measure_phase
            )

        free = self.runner.run({(name, "oracle", seed): task(seed, FCFS, None) for seed in self.seeds})
        half = {seed: int(free[name, "oracle", seed]["kv_capacity_tokens"]) // 2 for seed in self.seeds}
        measured = self.runner.run(
            {(name, system, seed): task(seed, system, half[seed]) for system in systems for seed in self.seeds}
        )
        by_system = {system: [measured[name, system, seed] for seed in self.seeds] for system in systems}
        return per_s, list(free.values()), by_system


def replay_errors(path: str, seed: int) -> Measurement:
    """The simulator's mean absolute errors on measured serving, as shares (V-A): of all, and E2E of dense models alone.

    Contradictory experiments are left out. Raises HeadwayError for a file with a bad row.
    """
    experiments = [one for one in read(Path(path))[0] if one.contradiction is None]
    compared = [compare(one, replay(one, [seed]), calibrated=True) for one in experiments]
    dense = [errors for one, errors in zip(experiments, compared, strict=True) if one.model.moe is None]
    found: Measurement = {key: validation(compared).overall[key] / 100 for key in ERRORS}
    return found | {"num_experiments": len(experiments), "e2e_dense": validation(dense).overall["e2e_mean"] / 100}
