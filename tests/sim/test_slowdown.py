"""Replicas whose iterations take longer for a while."""

from __future__ import annotations

import pytest

from headway.core.fleet import Fault
from simulation import Scenario, assert_agree, pool, request, seconds, sloped


def ends(fault: Fault | None, *outputs: int) -> list[float]:
    """When requests that arrive at 0 end, with a prompt of one token and iterations of one second."""
    requests = tuple(request(i, output=num) for i, num in enumerate(outputs))
    scenario = Scenario(requests, (pool(),), line=seconds(1.0), faults=(fault,) if fault else ())
    return [float(each) for each in assert_agree(scenario).requests["end_s"]]


def test_iterations_that_begin_while_a_replica_is_slow_take_longer() -> None:
    before = ends(None, 10)
    # The iteration from 3 to 4 began in time; six more take two seconds each.
    assert ends(Fault(3.5, 0, slowdown=2.0), 10) == [4.0 + 2.0 * (before[0] - 4.0)]
    # Of these, the one from 4 to 6 and the one from 6 to 8 are slow.
    assert ends(Fault(3.5, 0, 3.0, slowdown=2.0), 10) == [before[0] + 2.0]
    assert ends(Fault(100.0, 0, slowdown=2.0), 10) == before


def test_an_idle_replica_may_become_slow() -> None:
    requests = (request(0, arrival_s=5.0, output=4),)
    late = [
        assert_agree(Scenario(requests, (pool(),), line=seconds(1.0), faults=faults)).requests["end_s"][0]
        for faults in ((), (Fault(1.0, 0, slowdown=3.0),))
    ]
    assert late[1] - 5.0 == 3.0 * (late[0] - 5.0)


@pytest.mark.parametrize("at_s", [0.03, 0.4, 1.1])
def test_stretches_agree_with_single_iterations(at_s: float) -> None:
    requests = tuple(request(i, 0.05 * i, 30 + 7 * i, 5 + 11 * i) for i in range(9))
    assert_agree(Scenario(requests, (pool(), pool("b")), line=sloped, faults=(Fault(at_s, 0, 0.5, slowdown=1.7),)))
