"""What advice is worth: cells of the arena's held-out grid as days of fleets whose step times the model does not know.

`nice python papers/bench/advise.py [--requests 500] [--loads 0.95,1.3] [--cells N] [--seed N]`: in each cell, engines
are slower or faster than the model by as much as measured ones are, memory and products each for themselves. Seven days
are served there by today's router. `headway advise` chooses a router on three days and judges on four. What it
proposes is then run on those four days by the engines as they are. Printed are:

- regret: how far the SLO attainment with the advice is below that of the best router in hindsight, as a share of it;
- false advice: how often something is proposed where today's router is the best in hindsight;
- coverage: how often the realised gain is within the predicted interval.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Mapping, Sequence
from math import exp, log
from pathlib import Path
from random import Random
from statistics import fmean
from tempfile import TemporaryDirectory
from typing import Any

import click
from msgspec import Struct

import headway as hw
from headway import catalog
from headway.calibration import calibrate
from headway.catalog.coefficients import CoefficientFile, scaled
from headway.config.strict_yaml import dump
from headway.planning.advise.plan import Advice
from headway.planning.advise.text import sentences
from headway.policies import ROUTERS
from headway.records import save
from headway_papers.arena import grid as grids
from headway_papers.arena.capacity import FIRST_REQUESTS, capacity
from headway_papers.arena.contestants import Contestant
from headway_papers.arena.grids import builtin

FLEETS = ("homogeneous", "mixed GPUs")
WORKLOADS = ("code", "tiers")
NUM_DAYS = 7
BAND = 0.08
"""9 of 10 efficiencies are within this of the model's: the error of E2E where GPU and engine version were measured."""
OF_NORMAL = 1.645
"""Standard deviations within which 9 of 10 normal values are."""


class Result(Struct, frozen=True):
    """One cell with one router of today's."""

    cell: str
    today: str
    is_best: bool
    advised: str
    """Empty: nothing is proposed."""
    is_withheld: bool
    attainment: tuple[float, float, float]
    """By today's router, by the advised one, and by the best in hindsight."""
    is_covered: bool | None
    undecided: str
    """What the answer says of the best change that is not certain, where it proposes none."""
    num_rehearsals: int

    @property
    def regret(self) -> float:
        _, advised, best = self.attainment
        return (best - advised) / best if best > 0 else 0.0


class World:
    """The engines of one cell as they are, and its days."""

    def __init__(self, document: Mapping[str, Any], folder: Path, seed: int) -> None:
        self.folder, self._seed = folder, seed
        self._document = copy.deepcopy(dict(document))
        random = Random(seed)
        for pool in self._document["fleet"]:
            pool["coefficients"] = str(self._coefficients(pool["gpu"], pool["engine"], random))

    def _coefficients(self, gpu: str, engine: str, random: Random) -> Path:
        """The model's coefficients, with the errors of this world."""
        memory, compute = (exp(random.gauss(0, log(1 + BAND) / OF_NORMAL)) for _ in range(2))
        used = catalog.coefficients(gpu, engine)
        kernels = scaled(used.kernels, {"memory": memory, "compute": compute, "attention": memory})
        file = self.folder / f"{gpu}.json"
        calibrate.write(file, CoefficientFile((gpu,), kernels, {engine: used.overhead}))
        return file

    def run(self, day: int, router: Any) -> Any:
        seed = 1000 * self._seed + day
        return hw.simulate({**self._document, "seed": seed, "policies": {"routing": router}})

    def attainment(self, router: Any) -> float | None:
        """On the days that advice is judged on; None: the router does not fit the fleet."""
        try:
            found = [self.run(day, router).summary.slo_attainment for day in range(0, NUM_DAYS, 2)]
        except hw.HeadwayError:
            return None
        return fmean(each or 0.0 for each in found)

    def record(self, router: str) -> list[str]:
        """The days as today's router serves them."""
        folders = []
        for day in range(NUM_DAYS):
            folder = self.folder / router / f"day{day}"
            if not folder.exists():
                save(self.run(day, router).records, folder, {})
            folders.append(str(folder))
        return folders


def advised(cell: str, world: World, document: Mapping[str, Any], today: str, known: Mapping[str, float]) -> Result:
    """The advice for one router of today's, and what comes of it."""
    fleet = world.folder / f"{today}.yaml"
    fleet.write_text(dump({**document, "policies": {"routing": today}}))
    days = world.record(today)
    answer: Advice = hw.advise(fleet, days, kinds=["routing"], cache=world.folder / "cache").answer
    best = max(known.values())
    new, name, is_covered = known[today], "", None
    if answer.proposals:
        first = answer.proposals[0]
        name = str(first.changes[0].value)
        new = known[name]
        is_covered = first.attainment.low <= new - known[today] <= first.attainment.high
    return Result(
        cell,
        today,
        known[today] >= best - 1e-9,
        name,
        answer.is_withheld,
        (known[today], new, best),
        is_covered,
        "" if answer.proposals else sentences(answer)[1].partition("; ")[2],
        answer.tried.num_rehearsals,
    )


def documents(requests: int, loads: Sequence[float]) -> dict[str, dict[str, Any]]:
    """By cell: its scenario at its load, without policies."""
    grid, found = grids.read(builtin("held-out")), {}
    reference = Contestant("capacity", {"routing": grid.spec.capacity, "ordering": "fcfs"}, False, True)
    for fleet in FLEETS:
        for workload in WORKLOADS:
            own = grid.document(fleet, workload, reference)
            at_one = grids.at_load(own, grid.base_dir, 1.0, FIRST_REQUESTS)
            full = capacity(copy.deepcopy(at_one), str(grid.base_dir))["load"]
            for load in loads:
                made = grids.at_load(own, grid.base_dir, load * full, requests)
                found[f"{fleet} / {workload} / {load:.0%}"] = {
                    key: value for key, value in made.items() if key != "policies"
                }
    return found


@click.command()
@click.option("--requests", default=500, show_default=True, help="Of a day.")
@click.option("--loads", default="0.95,1.3", show_default=True, help="Shares of each fleet's capacity.")
@click.option("--cells", type=int, help="The first so many cells.")
@click.option(
    "--seed", default=0, show_default=True, help="Of the first cell's engines and days; 1 more in each other."
)
def main(requests: int, loads: str, cells: int | None, seed: int) -> None:
    began_s = time.process_time()
    results = []
    listed = list(documents(requests, [float(each) for each in loads.split(",")]).items())[:cells]
    for own_seed, (cell, document) in enumerate(listed, seed):
        with TemporaryDirectory() as folder:
            world = World(document, Path(folder), own_seed)
            names = [name for name, each in ROUTERS.items() if not getattr(each, "oracle", False)]
            known = {name: met for name in names if (met := world.attainment(name)) is not None}
            best = max(known, key=lambda name: known[name])
            for today in dict.fromkeys(("round-robin", best)):
                results.append(advised(cell, world, document, today, known))
                click.echo(line(results[-1]))
    click.echo(summary(results))
    click.echo(f"{sum(each.num_rehearsals for each in results)} rehearsals, {time.process_time() - began_s:.0f} CPU s")


def line(each: Result) -> str:
    today, new, best = each.attainment
    what = "withheld" if each.is_withheld else each.advised or "no change"
    return (
        f"{each.cell}: {each.today} {today:.1%} -> {what} {new:.1%}, best {best:.1%}"
        f"{'' if each.is_covered is None else ', covered' if each.is_covered else ', not covered'}"
        f"{'' if each.is_best or not each.undecided else f'; {each.undecided}'}"
    )


def summary(results: Sequence[Result]) -> str:
    given = [each for each in results if not each.is_withheld]
    regrets = [each.regret for each in given]
    best = [each for each in given if each.is_best]
    false = [each for each in best if each.advised]
    covered = [each.is_covered for each in given if each.is_covered is not None]
    lines = [
        f"advice in {len(given)} of {len(results)} cases, withheld in the others",
        f"regret: mean {fmean(regrets):.2%}, worst {max(regrets):.2%}",
        f"false advice: {len(false)} of {len(best)} cases in which today's router is the best",
        f"realised gain within its interval: {sum(map(bool, covered))} of {len(covered)}",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
