"""One load: sends a workload's requests to an engine at their times, and returns the results."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
from msgspec import Struct

from headway.core.errors import HeadwayError
from headway.serving.load_generator.drive import Driver, Report, Sent
from headway.serving.load_generator.engine import Target
from headway.serving.load_generator.prompts import Prompts
from headway.serving.load_generator.results import Measured, Slo, measured, notes
from headway.serving.load_generator.warm_up import Interval, first_uses, standstills, without
from headway.workload.generate import build, generate
from headway.workload.spec import WorkloadSpec
from headway.workload.table import Workload

ENDLESS = 100_000
"""Number of requests of a closed loop that is limited by time."""
FIRST = 1000
"""Number of first requests whose lengths count as typical."""


class Load(Struct, frozen=True):
    """One load and its results."""

    sent: list[Sent]
    """Requests, without those in flight during an initial standstill."""
    table: Workload
    """All requests, including those that are left out of the results."""
    measured: Measured
    first_uses: tuple[Interval, ...]
    """Initial standstills, in seconds since the start. Requests in flight during a standstill are left out."""
    num_left_out: int
    is_stopped: bool
    """Whether Ctrl-C stopped the load before its end."""
    later_stalls: tuple[Interval, ...] = ()

    def notes(self) -> Iterator[str]:
        if self.first_uses:
            spans = ", ".join(f"{end - begin:.1f} s" for begin, end in self.first_uses)
            yield f"the engine stood still at the beginning ({spans}): {self.num_left_out:,} requests are left out"
        for begin, end in self.later_stalls:
            yield f"the engine stood still from {begin:.1f} to {end:.1f} s; this counts"
        yield from notes(self.measured)


async def load(
    target: Target,
    spec: WorkloadSpec,
    prompts: Prompts,
    seed: int,
    base_dir: Path,
    duration_s: float | None = None,
    slo: Slo | None = None,
    report: Report | None = None,
) -> Load:
    """Send the workload's requests. Raises HeadwayError for an invalid workload, or a workload without requests."""
    source = build(spec, seed, base_dir)
    driver = Driver(source, target.asker(prompts), duration_s, report)
    sent = await driver.run()
    if not sent:
        raise HeadwayError("the workload has no request" if not driver.is_stopped else "stopped before a request ended")
    found = standstills(sent)
    early = first_uses(found)
    kept = without(sent, early) if early else sent
    if not any(each.answer.is_whole for each in kept):
        kept, early = sent, []
    return Load(
        kept,
        source.table(),
        measured(kept, slo),
        tuple(early),
        len(sent) - len(kept),
        driver.is_stopped,
        tuple(each for each in found if each not in early),
    )


def typical_lengths(spec: WorkloadSpec, seed: int, base_dir: Path) -> tuple[int, int]:
    """Median tokens of the first prompts and answers."""
    table = generate(spec, seed, base_dir).head(FIRST)
    if not len(table):
        raise HeadwayError("the workload has no request")
    return int(np.median(table.prompt_tokens)), int(np.median(table.output_tokens))
