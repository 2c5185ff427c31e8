"""Requests that a longer wait makes late, against the integral over their arrivals."""

from __future__ import annotations

import numpy as np
import pytest

from headway.policies.routing.slo_misses import RATE_WINDOW_S, late_probability, num_delayed


@pytest.mark.parametrize("seed", range(20))
def test_requests_made_late_are_those_of_the_integral(seed: int) -> None:
    rng = np.random.default_rng(seed)
    slo_s, wait_s, more_s = rng.uniform(0.2, 5.0), rng.uniform(0.0, 8.0), rng.uniform(0.0, 3.0)
    rate_rps, busy = rng.uniform(0.1, 50.0), rng.choice([rng.uniform(0.0, 0.9), 1.2])
    drain = max(1.0 - busy, 0.0)
    times_s = (np.arange(20_000) + 0.5) * (RATE_WINDOW_S / 20_000)
    late = [late_probability((wait_s + more_s - drain * t) / slo_s) for t in times_s]
    before = [late_probability((wait_s - drain * t) / slo_s) for t in times_s]
    expected = rate_rps * RATE_WINDOW_S * float(np.mean(np.subtract(late, before)))
    assert num_delayed(slo_s, rate_rps, wait_s, more_s, busy) == pytest.approx(expected, rel=1e-3, abs=1e-6)
