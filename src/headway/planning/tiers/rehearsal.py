"""How many tiers a scenario needs: its tiers merged, and every setting rehearsed with several seeds."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from msgspec import structs

from headway.config.scenario import Scenario, StepTimes, assemble
from headway.config.spec import PolicySpecs
from headway.config.strict_yaml import Places
from headway.core.errors import HeadwayError
from headway.metrics.latency import slo_masks
from headway.planning.rehearsals import Simulator, counted
from headway.planning.tiers import search
from headway.planning.tiers.search import Interval, TierPlan
from headway.workload.files import to_parquet
from headway.workload.generate import generate
from headway.workload.spec import TraceSpec, WorkloadSpec

Progress = Callable[[int, int], None]
"""Called with the number of rehearsals done, and the number in all."""
HEADROOM = ("freest", "llumnix")
"""Policies with headroom, whose `num_tiers` and `decay` are varied."""
TIERED = ("tiers-and-phases",)
"""Policies with a number of tiers and no headroom."""


def plan(
    document: Mapping[str, Any],
    places: Places,
    base_dir: Path,
    num_tiers: Sequence[int],
    decays: Sequence[float],
    seeds: Sequence[int],
    interval: Interval,
    simulator: Simulator,
    tolerance: float = 0.01,
    progress: Progress | None = None,
) -> TierPlan:
    """The best setting for a scenario, by the share of requests that meet all of their SLOs."""
    total = len(seeds) * len({(k, decays[0] if k == 1 else decay) for k in num_tiers for decay in decays})
    with TemporaryDirectory() as folder:
        scenario = assemble(document, places, base_dir)
        evaluate = TierRehearsal(scenario, simulator, Path(folder), total, progress)
        found = search.plan(evaluate, num_tiers, decays, seeds, interval, tolerance)
    return dataclasses.replace(found, pools=StepTimes(scenario).pools)


@dataclass
class TierRehearsal:
    """(tiers, decay, seed) -> attainment. The workload is generated once per number of tiers and seed."""

    scenario: Scenario
    simulator: Simulator
    folder: Path
    """For merged workloads, which are simulated as traces."""
    total: int
    progress: Progress | None = None
    num_done: int = 0
    _traces: dict[tuple[int, int], Path] = field(default_factory=dict)

    def __call__(self, num_tiers: int, decay: float, seed: int) -> float:
        """HeadwayError if no request has an SLO."""
        spec = structs.replace(
            self.scenario.spec,
            seed=seed,
            policies=with_tiers(self.scenario.spec.policies, num_tiers, decay),
            workload=WorkloadSpec(trace=TraceSpec(path=str(self._trace(num_tiers, seed)))),
        )
        records = self.simulator.records(dataclasses.replace(self.scenario, spec=spec))
        has, good = slo_masks(counted(records, spec.simulation.warmup_s, spec.slo))["all"]
        self.num_done += 1
        if self.progress:
            self.progress(self.num_done, self.total)
        if not has.any():
            raise HeadwayError(
                "workload: no request has an SLO; expected some, as in tiers: [{tier: 0, ttft_s: 1}, ...]"
            )
        return float(good.sum() / has.sum())

    def _trace(self, num_tiers: int, seed: int) -> Path:
        if (num_tiers, seed) not in self._traces:
            workload = self.scenario.spec.workload
            if workload.reacts:
                raise HeadwayError(
                    "workload: clients that react cannot be merged; expected no concurrency, sessions or agents"
                )
            table = generate(workload, seed, self.scenario.base_dir)
            tier = table.column("tier")
            num_classes = int(tier.max(initial=0)) + 1
            if num_classes == 1:
                raise HeadwayError(
                    "workload: all requests are of one class, so there are no tiers to merge; expected several, as in"
                    " tiers: [{tier: 0, share: 0.5, ttft_s: 1}, {tier: 1, share: 0.5, ttft_s: 5}], or a trace with a"
                    " column `tier`"
                )
            table = table.with_columns({"tier": search.merged(tier, num_classes, num_tiers)})
            path = self.folder / f"{num_tiers}-{seed}.parquet"
            to_parquet(table, path)
            self._traces[num_tiers, seed] = path
        return self._traces[num_tiers, seed]


def with_tiers(policies: PolicySpecs, num_tiers: int, decay: float) -> PolicySpecs:
    """The same policies; those with tiers get this number of tiers, and those with headroom this decay."""
    return structs.replace(
        policies, **{kind: _with_tiers(policy, num_tiers, decay) for kind, policy in structs.asdict(policies).items()}
    )


def _with_tiers(policy: Any, num_tiers: int, decay: float) -> Any:
    arguments = {"name": policy} if isinstance(policy, str) else policy
    name = arguments.get("name") if isinstance(arguments, dict) else None
    if name in HEADROOM:
        return {**arguments, "num_tiers": num_tiers, "decay": decay}
    return {**arguments, "num_tiers": num_tiers} if name in TIERED else policy
