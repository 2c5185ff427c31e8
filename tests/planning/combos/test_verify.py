"""The checker of deployments finds every kind of wrong plan."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from headway.core.errors import HeadwayError
from headway.planning.combos.problem import ComboCandidate, ComboProblem, GpuCombo, Group, ServiceDemand
from headway.planning.combos.search import deploy
from headway.planning.combos.verify import faults, verify

COMBO = GpuCombo("llama", 2.69, aggregated=Group("h800"))
PROBLEM = ComboProblem((ServiceDemand("chat", 3.0),), (ComboCandidate("chat", COMBO, 2.0, 1e6),), {"h800": 8})


def test_a_plan_without_faults() -> None:
    plan = deploy(PROBLEM)
    assert faults(PROBLEM, plan) == ()
    verify(PROBLEM, plan)


@pytest.mark.parametrize(
    ("change", "combo_change", "fault"),
    [
        ({"combos": ()}, {}, "0 of 3.0 req/s"),
        ({}, {"count": 9}, "9 in use of 8"),
        ({}, {"count": 0}, "count 0"),
        ({}, {"goodput_rps": 9.0}, "is not a candidate of chat"),
        ({"usd_per_hour": 1.0}, {}, "1.0 $/h, the sum is 5.38"),
        ({"gpus": {}}, {}, "are in use"),
        ({"objective": 1.0}, {}, "objective 1.0"),
    ],
)
def test_wrong_plans(change: dict[str, object], combo_change: dict[str, object], fault: str) -> None:
    plan = deploy(PROBLEM)
    wrong = replace(plan, **{"combos": (replace(plan.combos[0], **combo_change),), **change})
    assert fault in "; ".join(faults(PROBLEM, wrong))
    with pytest.raises(HeadwayError, match="the co plan does not hold"):
        verify(PROBLEM, wrong)
