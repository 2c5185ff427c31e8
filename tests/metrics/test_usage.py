"""GPU hours wasted on starting, and given away, by hand and as conserved quantities."""

import random

import numpy as np
import pytest

from headway.core.record import Records, ReplicaRecord
from headway.metrics.usage import ProvisioningMetrics, StartingGpuHours, _tokens_usd, provisioning_metrics

HOUR = 3600.0


def replica(number: int, up: tuple[float, float], starting_s: float = 0.0, origin: str = "initial", replaces: int = -1):
    down = ((up[0], min(up[0] + starting_s, up[1])),) if starting_s else ()
    return ReplicaRecord(number, "p", "m", "g", "r", 8, 1.0, 1.0, 1, 1, (up,), down, origin, replaces)


def records(*replicas: ReplicaRecord, end_s: float = 4 * HOUR) -> Records:
    return Records({}, (), (), {}, {}, {}, replicas, end_s)


def test_no_provisioning_metrics_for_a_constant_fleet():
    assert provisioning_metrics(records(replica(0, (0, 4 * HOUR))), 0.0) is None


def test_an_example_by_hand():
    found = provisioning_metrics(
        records(
            replica(0, (0, HOUR)),  # given back after an hour, taken back after two
            replica(1, (0, 4 * HOUR)),
            replica(2, (2 * HOUR, 4 * HOUR), 60, "reclaimed", 0),
            replica(3, (HOUR, 4 * HOUR), 600, "new"),
            replica(4, (3 * HOUR, 3.5 * HOUR), 7200, "redeployed"),  # gone again before it served
        ),
        0.0,
    )
    assert found is not None
    assert found.starts == 3
    assert found.starting_gpu_hours == StartingGpuHours(new=8 / 6, reclaimed=8 / 60, redeployed=4.0)
    assert found.spot_gpu_hours == pytest.approx(8 * 1.0 + 8 * 0.5)


def test_later_crash_does_not_count_as_start():
    crashed = ReplicaRecord(
        0, "p", "m", "g", "r", 8, 1.0, 1.0, 1, 1, ((0.0, 4 * HOUR),), ((0.0, 60.0), (HOUR, 2 * HOUR)), "new", -1
    )
    found = provisioning_metrics(records(crashed), 0.0)
    assert found == ProvisioningMetrics(1, StartingGpuHours(new=8 / 60, reclaimed=0.0, redeployed=0.0), 0.0)


def test_warm_up_is_excluded():
    found = provisioning_metrics(
        records(replica(0, (0, HOUR)), replica(1, (HOUR, 4 * HOUR), HOUR, "reclaimed", 0)), 1.5 * HOUR
    )
    assert found == ProvisioningMetrics(0, StartingGpuHours(new=0.0, reclaimed=4.0, redeployed=0.0), 0.0)


@pytest.mark.parametrize("seed", range(20))
def test_instances_are_conserved(seed: int):
    """Where all that is given back was there from the start, used and spot hours are those of the first fleet."""
    rng = random.Random(seed)
    made: list[ReplicaRecord] = []
    end_s = 10 * HOUR
    for _ in range(rng.randint(1, 5)):
        now, origin, replaces = 0.0, "initial", -1
        while now < end_s:
            until = min(now + rng.uniform(0.1, 5) * HOUR, end_s)
            number = len(made)
            made.append(replica(number, (now, until), 0.0 if origin == "initial" else 60.0, origin, replaces))
            now, origin, replaces = until + rng.uniform(0.0, 2) * HOUR, "reclaimed", number
    first = sum(each.origin == "initial" for each in made)
    used = sum(8 * (each.up[0][1] - each.up[0][0]) / HOUR for each in made)
    found = provisioning_metrics(records(*made, end_s=end_s), 0.0)
    given = 0.0 if found is None else found.spot_gpu_hours
    assert used + given == pytest.approx(first * 8 * 10)


def test_hosted_replicas_charge_for_answers_that_were_not_streamed_too():
    """Of these the first token's time is not known. A request without a token is free."""
    hosted = ReplicaRecord(
        0, "p", "m", "g", "r", 1, 0.0, 0.0, 0, 1, ((0.0, HOUR),),
        usd_per_million_input_tokens=1.0, usd_per_million_output_tokens=10.0,
    )  # fmt: skip
    rows = {  # streamed, not streamed, refused
        "request": [0, 1, 2],
        "replica": [0, 0, 0],
        "first_token_s": [1.0, np.nan, np.nan],
        "generated_tokens": [5, 7, 0],
        "cached_prompt_tokens": [0, 0, 0],
    }
    workload = {"arrival_s": np.zeros(3), "prompt_tokens": np.array([100, 200, 400])}
    made = Records(workload, (), (), {name: np.array(each) for name, each in rows.items()}, {}, {}, (hosted,), HOUR)
    assert _tokens_usd(made, 0.0).tolist() == pytest.approx([(300 * 1.0 + 12 * 10.0) / 1e6])
