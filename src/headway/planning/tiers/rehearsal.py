"""How many tiers a scenario needs: its tiers merged, every setting rehearsed, and how sure the answer is."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from headway import scenario
from headway.config.strict_yaml import Places
from headway.core.errors import HeadwayError
from headway.planning.tiers import search
from headway.planning.tiers.search import Interval, TierPlan
from headway.workload.files import to_parquet
from headway.workload.generate import generate

Tell = Callable[[int, int], None]
"""Told how many rehearsals are done, of how many."""
HEADROOM = ("freest", "llumnix")
"""Policies with headroom: their `num_tiers` and `decay` are what is tried."""
TIERED = ("tiers-and-phases",)
"""Policies that have a number of tiers, and no headroom."""


def plan(
    document: dict[str, Any],
    base_dir: Path,
    num_tiers: Sequence[int],
    decays: Sequence[float],
    seeds: Sequence[int],
    interval: Interval,
    tolerance: float = 0.01,
    tell: Tell | None = None,
) -> TierPlan:
    """The best setting for what a scenario file holds, by the share of requests that meet all their SLOs."""
    total = len(seeds) * len({(k, decays[0] if k == 1 else decay) for k in num_tiers for decay in decays})
    with TemporaryDirectory() as folder:
        evaluate = Evaluator(document, base_dir, Path(folder), total, tell)
        return search.plan(evaluate, num_tiers, decays, seeds, interval, tolerance)


@dataclass
class Evaluator:
    """(tiers, decay, seed) -> attainment. The workload is generated once a seed, and merged into so many tiers."""

    document: dict[str, Any]
    base_dir: Path
    folder: Path
    """For workloads, which are traces from there on."""
    total: int
    tell: Tell | None = None
    num_done: int = 0
    _traces: dict[tuple[int, int], Path] = field(default_factory=dict)

    def __call__(self, num_tiers: int, decay: float, seed: int) -> float:
        """HeadwayError where no request has an SLO."""
        document = copy.deepcopy(self.document)
        document["seed"] = seed
        document["policies"] = with_tiers(document.get("policies", {}), num_tiers, decay)
        document["workload"] = {"trace": {"path": str(self._trace(num_tiers, seed))}}
        run = scenario.run(scenario.assemble(document, Places(), self.base_dir))
        self.num_done += 1
        if self.tell:
            self.tell(self.num_done, self.total)
        if run.summary.slo_attainment is None:
            raise HeadwayError(
                "workload: no request has an SLO; expected some, as in tiers: [{tier: 0, ttft_s: 1}, ...]"
            )
        return run.summary.slo_attainment

    def _trace(self, num_tiers: int, seed: int) -> Path:
        """The merged workload, as a file."""
        if (num_tiers, seed) not in self._traces:
            chosen = scenario.assemble({**copy.deepcopy(self.document), "seed": seed}, Places(), self.base_dir)
            workload = chosen.spec.workload
            if workload.concurrency is not None or workload.sessions is not None:
                raise HeadwayError(
                    "workload: clients that react cannot be merged; expected no concurrency, no sessions"
                )
            table = generate(workload, seed, self.base_dir)
            num_classes = int(table.columns["tier"].max()) + 1
            table.columns["tier"] = search.merged(table.columns["tier"], num_classes, num_tiers)
            path = self.folder / f"{num_tiers}-{seed}.parquet"
            to_parquet(table, path)
            self._traces[num_tiers, seed] = path
        return self._traces[num_tiers, seed]


def with_tiers(policies: dict[str, Any], num_tiers: int, decay: float) -> dict[str, Any]:
    """What a scenario says under `policies`, with so many tiers where a policy minds them."""
    return {kind: _with_tiers(said, num_tiers, decay) for kind, said in policies.items()}


def _with_tiers(said: Any, num_tiers: int, decay: float) -> Any:
    made = {"name": said} if isinstance(said, str) else said
    name = made.get("name") if isinstance(made, dict) else None
    if name in HEADROOM:
        return {**made, "num_tiers": num_tiers, "decay": decay}
    return {**made, "num_tiers": num_tiers} if name in TIERED else said
