"""Tenants' rates and budgets in a simulation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from headway import records, scenario
from headway.core.errors import HeadwayError
from headway.core.record import REFUSAL_REASONS, REFUSED, Outcome
from headway.metrics.summary import flatten
from headway.report.run import Run
from headway.report.table import render

DAY_S = 86_400


def run(folder: Path, limits: dict[str, Any], trace: list[tuple[float, str]], **more: Any) -> Run:
    """Requests of 100 prompt tokens and 50 of the answer, each (arrival, tenant)."""
    lines = ["arrival_s,prompt_tokens,output_tokens,tenant", *(f"{at_s},100,50,{tenant}" for at_s, tenant in trace)]
    (folder / "day.csv").write_text("\n".join(lines))
    path = folder / "day.yaml"
    pool = {"model": "qwen3-8b", "gpu": "h100", "engine": "vllm-0.15"}
    pool |= {"usd_per_million_input_tokens": 1.0, "usd_per_million_output_tokens": 10.0}
    path.write_text(
        yaml.safe_dump(
            {
                "workload": {"trace": "day.csv"},
                "fleet": [pool],
                **more,
                "simulation": {"limits": limits, **more.get("simulation", {})},
            }
        )
    )
    return scenario.run(scenario.load(path))


def reasons(ran: Run) -> list[str]:
    """By request: the limit that refused it, or ""."""
    rows = ran.records.requests
    found = dict(zip(rows["request"].tolist(), rows[REFUSED].tolist(), strict=True))
    return ["" if not found[id] else REFUSAL_REASONS[found[id] - 1] for id in sorted(found)]


def test_a_rate_is_also_the_largest_burst(tmp_path: Path) -> None:
    burst = [(0.0, "a"), (0.1, "a"), (0.2, "a"), (0.3, "b"), (31.0, "a"), (31.1, "a")]
    ran = run(tmp_path, {"a": {"requests_per_minute": 2}}, burst)
    assert reasons(ran) == ["", "", "requests", "", "", "requests"]
    assert (ran.records.requests["outcome"] == Outcome.REJECTED).sum() == 2


def test_tokens_that_are_not_used_come_back(tmp_path: Path) -> None:
    trace = [(0.0, "a"), (0.1, "a"), (30.0, "a")]
    assert reasons(run(tmp_path, {"a": {"tokens_per_minute": 400}}, trace)) == ["", "", ""]
    wide = {"tokens_per_minute": 400, "max_tokens": 300}
    assert reasons(run(tmp_path, {"a": wide}, trace)) == ["", "tokens", ""]


def test_budgets_begin_anew_with_each_period(tmp_path: Path) -> None:
    trace = [(at_s, "a") for at_s in (0, 10, 20, DAY_S - 1, DAY_S + 1, 7 * DAY_S + 1, 31 * DAY_S + 1)]
    for period, served in (("day", 5), ("week", 4), ("month", 3), ("total", 2)):
        limits = {"a": {"budget_tokens": 300, "period": period}}
        found = reasons(run(tmp_path, limits, trace, simulation={"until_s": 40 * DAY_S}))
        assert found.count("") == served and set(found) == {"", "budget"}, (period, found)


def test_dollars_are_counted_by_the_prices_of_the_pool(tmp_path: Path) -> None:
    trace = [(10.0 * i, "a") for i in range(4)]
    cost_usd = (100 * 1.0 + 50 * 10.0) / 1e6
    found = reasons(run(tmp_path, {"a": {"budget_usd": 2.5 * cost_usd, "period": "total"}}, trace))
    assert found == ["", "", "budget", "budget"]


def test_each_scheduler_counts_rates_and_all_share_a_budget(tmp_path: Path) -> None:
    trace = [(0.01 * i, "a") for i in range(20)]
    shared = {"observe": {"schedulers": {"num": 2}}}
    by_rate = reasons(run(tmp_path, {"a": {"requests_per_minute": 3}}, trace, **shared))
    assert by_rate.count("") == 6
    by_budget = reasons(run(tmp_path, {"a": {"budget_tokens": 450}}, trace, **shared))
    assert by_budget.count("") == 3


def test_all_models_of_a_cascade_are_charged(tmp_path: Path) -> None:
    pools = [{"model": name, "gpu": "h100", "engine": "vllm-0.15"} for name in ("qwen3-8b", "qwen3-14b")]
    cascade = {"models": ["qwen3-8b", "qwen3-14b"], "policy": {"name": "thresholds", "thresholds": [50]}}
    workload = {
        "tenants": {"a": 1, "b": 0.001},
        "num_requests": 6,
        "arrivals": {"kind": "deterministic", "rate": 0.1},
        "quality": {"path": "answers.csv"},
    }
    answers = ["request,model,score,output_tokens", "r,qwen3-8b,10,50", "r,qwen3-14b,90,50"]
    (tmp_path / "answers.csv").write_text("\n".join(answers))
    path = tmp_path / "cascade.yaml"
    made = {"workload": workload, "fleet": pools, "cascade": cascade}

    def ran(budget_tokens: int) -> Run:
        path.write_text(yaml.safe_dump({**made, "simulation": {"limits": {"a": {"budget_tokens": budget_tokens}}}}))
        return scenario.run(scenario.load(path))

    prompt_tokens = int(ran(10**6).records.workload["prompt_tokens"][0])
    # A request has two answers, and reserves both.
    assert [reasons(ran(num * (prompt_tokens + 50))).count("") for num in (5, 6)] == [2, 3]


def test_reports_have_refusals_by_tenant_and_records_keep_them(tmp_path: Path) -> None:
    trace = [(0.1 * i, "ab"[i % 2]) for i in range(12)]
    ran = run(tmp_path, {"a": {"requests_per_minute": 2}}, trace)
    flat = flatten(ran.summary)
    assert flat["num_rejected"] == flat["refused_by_requests_per_minute"] == 4
    assert flat["tenant.a.refused_by_requests_per_minute"] == 4 and flat["tenant.b.num_rejected"] == 0
    assert flat["refused_by_budget"] == 0
    assert ran.notes == ("rejected: 4 requests beyond the limits of their tenants",)
    assert "over req/min" in render([ran], width=200)
    records.save(ran.records, tmp_path / "records", {})
    again = records.load(tmp_path / "records")[0]
    assert again.requests[REFUSED].tolist() == ran.records.requests[REFUSED].tolist()
    unlimited = run(tmp_path, {}, trace)
    assert REFUSED not in unlimited.records.requests and "refused_by_budget" not in flatten(unlimited.summary)


def test_errors_name_the_file_the_key_and_the_nearest_name(tmp_path: Path) -> None:
    trace = [(0.0, "search"), (1.0, "reports")]
    with pytest.raises(
        HeadwayError, match=r"day\.yaml:\d+: simulation\.limits\.serch: unknown tenant 'serch'; did you"
    ):
        run(tmp_path, {"serch": {"requests_per_minute": 2}}, trace)
    with pytest.raises(
        HeadwayError, match=r"limits\.search\.request_per_minute: unknown key .* mean 'requests_per_minute'"
    ):
        run(tmp_path, {"search": {"request_per_minute": 2}}, trace)
    with pytest.raises(HeadwayError, match=r"limits\.search\.budget_usd: expected number > 0"):
        run(tmp_path, {"search": {"budget_usd": 0}}, trace)
    with pytest.raises(HeadwayError, match=r"limits\.search\.period: unknown value 'days'; did you mean 'day'"):
        run(tmp_path, {"search": {"period": "days"}}, trace)
    with pytest.raises(HeadwayError, match=r"limits\.a: the workload has no tenants"):
        path = tmp_path / "plain.yaml"
        pool = {"model": "qwen3-8b", "gpu": "h100"}
        path.write_text(
            yaml.safe_dump(
                {
                    "workload": {"num_requests": 2, "arrivals": 1, "prompt_tokens": 9, "output_tokens": 9},
                    "fleet": [pool],
                    "simulation": {"limits": {"a": {"requests_per_minute": 2}}},
                }
            )
        )
        scenario.run(scenario.load(path))


def test_keys_of_one_name_are_one_tenant(tmp_path: Path) -> None:
    keys = [{"sha256": f"{i}" * 64, "name": "a", "requests_per_minute": 1} for i in range(2)]
    trace = [(0.1 * i, "a") for i in range(4)]
    assert reasons(run(tmp_path, {}, trace, gateway={"api_keys": keys})).count("") == 2
    unlimited = run(tmp_path, {}, trace, gateway={"api_keys": [keys[0], {"sha256": "f" * 64, "name": "a"}]})
    assert REFUSED not in unlimited.records.requests
