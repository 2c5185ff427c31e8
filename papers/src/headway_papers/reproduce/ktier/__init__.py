"""K-tier Llumnix (Vestrum, Raeesi and Rød, "Beyond Binary Priorities"); reproduction of its evaluation.

Beyond the paper: tiers under sustained load with a scarce KV cache, the best K and decay for a set of SLOs, and tiers
of reasoning requests.
"""

from __future__ import annotations

from headway_papers.reproduce.abstract import read_abstract
from headway_papers.reproduce.claims import ids_like
from headway_papers.reproduce.findings import Exhibit, Findings
from headway_papers.reproduce.ktier import burst as ktier_burst
from headway_papers.reproduce.ktier import parity as ktier_parity
from headway_papers.reproduce.ktier import phases, sustained, sweep
from headway_papers.reproduce.ktier import seats as ktier_seats
from headway_papers.reproduce.ktier import tick as ktier_tick
from headway_papers.reproduce.ktier.claims import CLAIMS, MIXES, READINGS
from headway_papers.reproduce.results import Key
from headway_papers.reproduce.runner import Runner
from headway_papers.reproduce.tasks import Task

TITLE = "K-tier Llumnix: more than two priorities"
SEEDS, QUICK_SEEDS = 5, 2
ABSTRACT = read_abstract(__package__)
PARITY, SUSTAINED = ids_like(CLAIMS, "parity-*", "overhead-*"), ids_like(CLAIMS, "sustained-*", "headroom-tier0")
SEATS, TICK, SWEEP = (ids_like(CLAIMS, pattern) for pattern in ("seats-*", "tick-*", "sweep-*"))
RARE = "headroom-tier0-rare"
BURST = ids_like(CLAIMS, "*") - PARITY - SUSTAINED - SEATS - TICK - SWEEP - {RARE}
AT_ONCE = ids_like(CLAIMS, "*-at-once")
FULL_ONLY = SWEEP | TICK | AT_ONCE
"""Claims whose values vary with the seed or the length of a burst as much as the rules allow."""
__all__ = ["ABSTRACT", "CLAIMS", "FULL_ONLY", "QUICK_SEEDS", "SEEDS", "TITLE", "run"]


def run(runner: Runner) -> Findings:
    """Run the requested parts. The best setting and the phases belong to no claim, and need a full run."""
    seeds, quick, is_full = runner.seeds, runner.quick, runner.claims is None
    readings = READINGS if runner.wants(*AT_ONCE) else READINGS[:1]
    tasks: dict[Key, Task] = {}
    if runner.wants(*PARITY):
        tasks |= ktier_parity.tasks(seeds, quick)
    if runner.wants(*BURST):
        tasks |= ktier_burst.tasks(seeds, quick, readings)
    if runner.wants(*SEATS):
        tasks |= ktier_seats.tasks(seeds, quick)
    if runner.wants(*TICK):
        tasks |= ktier_tick.tasks(seeds)
    if runner.wants(*SUSTAINED):
        tasks |= sustained.load_tasks(seeds, quick)
    if runner.wants(RARE):
        tasks |= sustained.rare_tasks(seeds, quick)
    rate = sweep.between(runner) if runner.wants(*SWEEP) else None
    if rate is not None:
        tasks |= sweep.tasks(seeds, quick, rate)
    if is_full:
        tasks |= sustained.setting_tasks(seeds, quick) | phases.tasks(seeds, quick)
    results = runner.run(tasks)
    findings, after = Findings({}), list[Exhibit]()
    if runner.wants(*BURST):
        burst = ktier_burst.BurstRuns(results, seeds, quick, readings)
        findings += Findings(burst.outcomes(), burst.figures("uniform"))
        after = [burst.table("uniform"), *(figure for mix in MIXES[1:] for figure in burst.figures(mix))]
        after += [burst.table(mix) for mix in MIXES[1:]] + [burst.sweep(), burst.parts()]
    if runner.wants(*PARITY):
        parity = ktier_parity.ParityRuns(results, seeds)
        findings += Findings(parity.outcomes(), parity.figures())
    findings += Findings({}, after)
    if runner.wants(*SEATS):
        findings += Findings(ktier_seats.SeatRuns(results, seeds).outcomes())
    if runner.wants(*TICK):
        findings += Findings(ktier_tick.TickRuns(results, seeds).outcomes())
    if runner.wants(RARE):
        findings += Findings({RARE: sustained.SustainedRuns(results, seeds).rare()})
    if runner.wants(*SUSTAINED):
        load = sustained.SustainedRuns(results, seeds)
        findings += Findings(load.outcomes(), load.figures())
    if rate is not None:
        loads = sweep.SweepRuns(results, seeds, rate)
        findings += Findings(loads.outcomes(), loads.figures())
    if is_full:
        settings = sustained.SettingRuns(results, seeds).exhibits() if len(seeds) > 1 else []
        findings += Findings({}, [*settings, phases.table(results, seeds)])
    return findings
