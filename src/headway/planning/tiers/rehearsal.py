"""Finds the number of tiers that a scenario needs: merges its tiers, and rehearses every setting with several seeds."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from msgspec import Struct, structs

from headway.config.scenario import Scenario, StepTimes, assemble
from headway.config.spec import PolicySpecs
from headway.core.errors import HeadwayError
from headway.core.record import Records
from headway.metrics.interval import interval
from headway.metrics.latency import slo_masks
from headway.planning.planned import Planned
from headway.planning.rehearsals import Rehearsal, Rehearsals, Resources, Source, counted
from headway.planning.tiers import search
from headway.planning.tiers.search import TierPlan, TierSetting
from headway.report.blocks import Table
from headway.workload.files import to_parquet
from headway.workload.generate import generate
from headway.workload.spec import TraceSpec, WorkloadSpec

HEADROOM = ("freest", "llumnix")
"""Policies with headroom, whose `num_tiers` and `decay` are varied."""
TIERED = ("tiers-and-phases",)
"""Policies with a number of tiers and no headroom."""


HEADS = ("tiers", "decay", "attainment", "loss to the best, 95%", "tied with the best", "enough")


class TierOptions(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    num_tiers: tuple[int, ...] = (1, 2, 3, 4, 6, 8)
    decays: tuple[float, ...] = (0.5, 1.0, 2.0)
    """Decays of the headroom to try."""
    seeds: int = 5
    tolerance: float = 0.01
    """An acceptable loss of attainment."""

    def __post_init__(self) -> None:
        """Raises HeadwayError for a tolerance below 0."""
        if self.tolerance < 0:
            raise HeadwayError(f"tolerance: {self.tolerance!r}; expected a loss of attainment, from 0")


def planned(source: Source, options: TierOptions, resources: Resources) -> Planned:
    """The number of service tiers that a workload needs: `headway plan tiers`. There is no fleet file."""
    answer = plan(source, options, resources)
    chosen, best = answer.chosen, answer.best
    sentences = (
        f"best: {_named(best)}; {len(answer.tied)} of {len(answer.settings)} settings are tied with it",
        f"fewest tiers that lose {options.tolerance:.1%} at most: {_named(chosen)}",
    )
    settings = Table(HEADS, [_cells(each) for each in answer.settings], words=HEADS[-2:])
    return Planned(answer, True, tuple(map(_row, answer.settings)), sentences, (settings, "", *sentences))


def _row(each: TierSetting) -> dict[str, Any]:
    return {
        "num_tiers": each.num_tiers,
        "decay": each.decay,
        "attainment": each.mean,
        "loss_low": each.loss[0],
        "loss_high": each.loss[1],
        "is_tied": each.is_tied,
        "is_enough": each.is_enough,
    }


def _cells(each: TierSetting) -> list[str]:
    loss = f"{each.loss[0]:.2%} to {each.loss[1]:.2%}"
    verdicts = ("yes" if verdict else "no" for verdict in (each.is_tied, each.is_enough))
    return [str(each.num_tiers), f"{each.decay:g}", f"{each.mean:.2%}", loss, *verdicts]


def _named(setting: TierSetting) -> str:
    number = "1 tier" if setting.num_tiers == 1 else f"{setting.num_tiers} tiers"
    return f"{number}, decay {setting.decay:g} ({setting.mean:.2%} of requests meet their SLOs)"


def plan(source: Source, options: TierOptions, resources: Resources) -> TierPlan:
    """The best setting for a scenario, by the share of requests that meet all of their SLOs."""
    ks, decays, seeds = options.num_tiers, options.decays, range(options.seeds)
    total = len(seeds) * len({(k, decays[0] if k == 1 else decay) for k in ks for decay in decays})
    with TemporaryDirectory() as folder:
        scenario = assemble(*source)
        evaluate = TierRehearsal(scenario, Rehearsals(resources, total), Path(folder))
        found = search.plan(evaluate, ks, decays, seeds, interval, options.tolerance)
    return dataclasses.replace(found, pools=StepTimes(scenario).pools)


@dataclass
class TierRehearsal:
    """Maps (tiers, decay, seed) to attainment. The workload is generated once per number of tiers and seed."""

    scenario: Scenario
    rehearsals: Rehearsals
    folder: Path
    """Folder for merged workloads, which are simulated as traces."""
    _traces: dict[tuple[int, int], Path] = field(default_factory=dict)

    def __call__(self, num_tiers: int, decay: float, seed: int) -> float:
        """The attainment. Raises HeadwayError if no request has an SLO."""
        spec = structs.replace(
            self.scenario.spec,
            seed=seed,
            policies=with_tiers(self.scenario.spec.policies, num_tiers, decay),
            workload=WorkloadSpec(trace=TraceSpec(path=str(self._trace(num_tiers, seed)))),
        )
        return self.rehearsals.one(Rehearsal(dataclasses.replace(self.scenario, spec=spec), _attainment, float))

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


def _attainment(scenario: Scenario, records: Records) -> float:
    spec = scenario.spec
    has, good = slo_masks(counted(records, spec.simulation.warmup_s, spec.slo))["all"]
    if not has.any():
        raise HeadwayError("workload: no request has an SLO; expected some, as in tiers: [{tier: 0, ttft_s: 1}, ...]")
    return float(good.sum() / has.sum())


def with_tiers(policies: PolicySpecs, num_tiers: int, decay: float) -> PolicySpecs:
    """The policies with this number of tiers and this decay, where they have such arguments."""
    return structs.replace(
        policies, **{kind: _with_tiers(policy, num_tiers, decay) for kind, policy in structs.asdict(policies).items()}
    )


def _with_tiers(policy: Any, num_tiers: int, decay: float) -> Any:
    arguments = {"name": policy} if isinstance(policy, str) else policy
    name = arguments.get("name") if isinstance(arguments, dict) else None
    if name in HEADROOM:
        return {**arguments, "num_tiers": num_tiers, "decay": decay}
    return {**arguments, "num_tiers": num_tiers} if name in TIERED else policy
