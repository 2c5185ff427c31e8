"""The simulator's errors on measured serving, as V-A validates the paper's simulator."""

from __future__ import annotations

from pathlib import Path

from headway.calibration.replay import replay
from headway.calibration.serving import read
from headway.calibration.validation import compare, validation
from headway.reproduce.tasks import Measurement

KEYS = ("e2e_mean", "ttft_mean", "tpot_mean")


def errors(path: str, seed: int) -> Measurement:
    """Mean absolute errors over the experiments of a file, as shares: of all, and E2E of dense models alone.

    Experiments whose measurement contradicts itself are left out. Raises HeadwayError for a file with a bad row.
    """
    experiments = [one for one in read(Path(path))[0] if one.contradiction is None]
    compared = [compare(one, replay(one, [seed]), calibrated=True) for one in experiments]
    dense = [errors for one, errors in zip(experiments, compared, strict=True) if one.model.moe is None]
    found: Measurement = {key: validation(compared).overall[key] / 100 for key in KEYS}
    return found | {"num_experiments": len(experiments), "e2e_dense": validation(dense).overall["e2e_mean"] / 100}
