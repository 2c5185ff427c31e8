"""The simulator's errors on measured serving, as V-A validates the paper's simulator."""

from __future__ import annotations

from pathlib import Path

from headway.calibration.replay import replay
from headway.calibration.serving import read
from headway.calibration.validation import compare, validation
from headway.reproduce.tasks import Measurement

KEYS = ("e2e_mean", "ttft_mean", "tpot_mean")


def errors(path: str, seed: int) -> Measurement:
    """Mean absolute errors over the experiments of a file, as shares, and the number of experiments.

    Experiments whose measurement contradicts itself are left out. Raises HeadwayError for a file with a bad row.
    """
    experiments = [one for one in read(Path(path))[0] if one.contradiction is None]
    result = validation([compare(one, replay(one, [seed]), calibrated=True) for one in experiments])
    return {key: result.overall[key] / 100 for key in KEYS} | {"num_experiments": len(experiments)}
