"""Headway's preset beside the policies of each paper: what is compared, and what the preset has of all five."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest

from headway import scenario
from headway.config.policy_preset import PARTS, PREEMPTING
from headway.config.strict_yaml import Places
from headway.metrics.columns import ints
from headway_papers.reproduce import united
from headway_papers.reproduce.runner import Runner
from headway_papers.reproduce.united import runs
from headway_papers.reproduce.united.rows import ROWS


def assembled(document: Any) -> scenario.Scenario:
    return scenario.assemble(copy.deepcopy(document), Places(), Path())


@pytest.mark.parametrize("part", runs.PARTS)
def test_what_is_compared_differs_in_policies_alone(part: str) -> None:
    documents = runs.documents(part, quick=True)
    assert "headway" in documents and len(documents) > 1
    rest = [{key: value for key, value in each.items() if key != "policies"} for each in documents.values()]
    assert all(each == rest[0] for each in rest)
    for document in documents.values():
        assembled(document)
    used = assembled(documents["headway"]).spec.policies if part != "all" else None
    assert used is None or (used.routing, used.admission) == ("headway", "by-deadline")
    assert used is None or used.ordering in (PARTS.ordering, PREEMPTING)


def test_every_claim_has_its_part_and_a_value() -> None:
    for row in ROWS:
        assert row.id.split("-")[0] == row.part.split(" ")[0]
        assert row.other in runs.documents(row.part, quick=True)
    found = united.run(Runner((0,), True, claims=frozenset({"cauchy-slo", "cauchy-e2e"})))
    assert {claim: len(outcome.values) for claim, outcome in found.outcomes.items()} == {
        "cauchy-slo": 1,
        "cauchy-e2e": 1,
    }
    (table,) = found.exhibits
    assert [row[0] for row in table.rows] == ["headway", "cauchy"]  # type: ignore[union-attr]


def test_the_preset_has_something_of_all_five_systems() -> None:
    document = runs.documents("all", quick=True)["headway"]
    document["workload"] = {**document["workload"], "duration_s": 900}
    ran = scenario.run(assembled(document))
    summary = ran.summary
    assert set(summary.tiers) == {"0", "1", "2"} and set(summary.regions) == {"us-east", "eu-west"}
    assert set(summary.models) == {"deepseek-r1-distill-qwen-7b", "deepseek-r1-distill-llama-70b"}
    assert summary.judged and summary.quality is not None
    assert summary.reasoning_s is not None and summary.transfer_s is not None
    assert summary.num_completed == summary.num_requests
    reasoned, output = (ints(ran.records.workload, name).sum() for name in ("reasoning_tokens", "output_tokens"))
    assert reasoned / output == pytest.approx(0.6, abs=0.01)


def test_demand_for_a_later_model_of_a_cascade_is_seen_by_scaling() -> None:
    document = runs.documents("all", quick=True)["headway"]
    document["workload"] = {**document["workload"], "duration_s": 300}
    document["policies"] = {**document["policies"], "scaling": f"{__name__}:Watching"}
    Watching.seen = {}
    summary = scenario.run(assembled(document)).summary
    asked = {
        model: sum(num for (name, _, _), num in Watching.seen.items() if name == model) for model in summary.models
    }
    small, large = "deepseek-r1-distill-qwen-7b", "deepseek-r1-distill-llama-70b"
    assert 0.8 * summary.num_requests < asked[small] <= summary.num_requests
    assert 0.3 * asked[small] < asked[large] < 0.6 * asked[small]


class Watching:
    """Scales nothing."""

    interval_s = 10.0
    seen: dict[Any, int]

    def scale(self, view: Any) -> dict[str, int]:
        Watching.seen = {key: num for key, (num, _) in view.arrived.items()}
        return {}
