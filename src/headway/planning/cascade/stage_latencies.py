"""Latencies of one stage alone, kept by content."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from math import inf
from pathlib import Path

import msgspec

from headway import __version__
from headway.core.fleet import Gpu
from headway.planning.capacity import rehearsal
from headway.planning.cascade.bounds import StepBounds
from headway.planning.cascade.latencies import Latencies
from headway.planning.cascade.planning_request import PlanningRequest
from headway.planning.cascade.problem import Problem
from headway.planning.cascade.stage_simulator import Simulated, rounds
from headway.workload.atomic_file import write_text


def bounds(asked: PlanningRequest) -> StepBounds:
    """Those that hold for `evaluator`."""
    problem = asked.problem
    in_place = bool(getattr(asked.policies.router(), "pairs", False))
    return StepBounds(
        problem.gpu, problem.engine, rounds(problem), asked.coefficients, _others(problem), in_place=in_place
    )


def evaluator(asked: PlanningRequest) -> Simulated:
    """What a stage's latency is asked of."""
    problem = asked.problem
    return Simulated(
        problem.gpu, problem.engine, asked.policies, asked.seed, rounds(problem), asked.coefficients, _others(problem),
        asked.handing,
    )  # fmt: skip


def _others(problem: Problem) -> dict[str, Gpu]:
    return {offer.gpu.name: offer.gpu for offer in problem.others}


@dataclass
class Known:
    """Latencies in a file, under a digest of all that they depend on."""

    asked: PlanningRequest
    folder: Path | None
    latencies: Latencies = field(init=False)

    def __post_init__(self) -> None:
        self.latencies = Latencies(evaluator(self.asked), self._read())

    @property
    def file(self) -> Path | None:
        problem, said = self.asked.problem, self.asked.document.get("policies")
        facts = [problem.models, problem.gpu, problem.engine, said, self.asked.seed, rounds(problem)]
        facts += [self.asked.handing, sorted(self.asked.coefficients.items())]
        facts += [offer.gpu for offer in problem.others]
        digest = hashlib.sha256(msgspec.json.encode([__version__, rehearsal.code(), facts])).hexdigest()[:32]
        return None if self.folder is None else self.folder / f"{digest}.json"

    def _read(self) -> dict[str, float]:
        if self.file is None or not self.file.is_file():
            return {}
        try:
            found = msgspec.json.decode(self.file.read_bytes(), type=dict[str, float | None])
        except msgspec.DecodeError:
            return {}
        return {key: inf if value is None else value for key, value in found.items()}

    def write(self) -> None:
        """Keep what is known by now."""
        if self.file is not None:
            write_text(self.file, msgspec.json.encode(self.latencies.known).decode())
