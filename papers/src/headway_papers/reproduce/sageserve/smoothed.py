"""Days on which the demand of one series has the profile of its week.

In the artifact's figure, from which the series are decoded, Bloom's interactive tokens change from hour to hour between
none and several millions a minute. It is unknown whether this comes from its users or from the decoding.
"""

from __future__ import annotations

import csv
import gzip
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from headway import scenario
from headway.config.strict_yaml import Places
from headway.workload.series import DemandSeries, read_series
from headway.workload.table import Floats
from headway_papers.reproduce.sageserve import measures
from headway_papers.reproduce.sageserve.published import SERIES
from headway_papers.reproduce.tasks import Measurement

DAYS, WEEKDAYS, HOURS = 7, 5, 24


def measure_smoothed(document: Mapping[str, Any], name: str, seed: int, data: str) -> Measurement:
    """`measures.measure` of a day of the published series in folder `data`, of which `name` is smoothed."""
    with TemporaryDirectory() as folder:
        path = Path(folder, SERIES)
        path.parent.mkdir()
        write(path, name, read_series(Path(data, SERIES)))
        chosen = scenario.assemble({**document, "seed": seed}, Places(), Path(folder))
        return measures.measure(scenario.Simulator().records(chosen), chosen.spec.simulation.warmup_s)


def write(path: Path, name: str, known: Sequence[DemandSeries]) -> None:
    """All series in wide form as gzipped CSV; `name` has the profile of its week."""
    columns = {each.name: weekly_profile(each.values) if each.name == name else each.values for each in known}
    at_s = known[0].start_s + known[0].step_s * np.arange(len(known[0]))
    with gzip.open(path, "wt", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["time_s", *columns])
        rows.writerows(zip(at_s, *columns.values(), strict=True))


def weekly_profile(values: Floats) -> Floats:
    """A week from Monday on, in which each hour has its mean over the weekdays, or over the weekend."""
    hours = values.reshape(DAYS, HOURS, -1)
    smooth = np.empty_like(hours)
    for days in (slice(WEEKDAYS), slice(WEEKDAYS, DAYS)):
        smooth[days] = hours[days].mean(axis=(0, 2))[:, None]
    return smooth.ravel()
