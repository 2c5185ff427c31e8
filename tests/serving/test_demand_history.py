"""Demand from before the start: which files are refused, and what is read of records and of Prometheus."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from time import sleep, time
from typing import Any
from urllib.parse import parse_qs, urlparse

import numpy as np
import pytest

pytest.importorskip("httptools")

import processes
import serving
from headway import serving as composition
from headway.cli.live_run import LiveOptions, LiveRun
from headway.core.errors import HeadwayError
from headway.records import demand
from headway.serving import demand_history
from headway.serving.reload import FleetFile
from scripted import Exchange, ScriptedEngine, running

NOW_S = 6_000_000.0


def fleet(folder: Path, history: str, scaling: str = "headway") -> Path:
    path = folder / "fleet.yaml"
    path.write_text(f"""
fleet:
  - name: main
    model: qwen3-8b
    gpu: h100
    engine: vllm-0.15
    max_replicas: 3
    processes: {{command: [sleep, "{{port}}"], ports: [9101, 9103]}}
policies: {{scaling: {scaling}}}
gateway:
  demand_history: {history}
""")
    return path


@pytest.mark.parametrize(
    ("history", "scaling", "words"),
    [
        ("{records: a, prometheus: http://b}", "headway", "either records or prometheus"),
        ("{days: 3}", "headway", "either records or prometheus"),
        ("{record: a}", "headway", "did you mean 'records'?"),
        ("{records: a, days: 0}", "headway", "days"),
        ("{prometheus: prom}", "headway", "'prom'; expected the server's address, http://host:port"),
        ("{records: a}", "keda", "the scaler keda forecasts nothing; expected headway, lt-i, lt-u or lt-ua"),
        ("{records: a}", "null", "is for a scaler"),
        ("{records: a}", "{name: headway, forecaster: {name: ets, past_hours: 5}}", "past_hours"),
    ],
)
def test_a_history_that_nothing_reads_is_refused(tmp_path: Path, history: str, scaling: str, words: str) -> None:
    with pytest.raises(HeadwayError) as error:
        composition.load(fleet(tmp_path, history, scaling))
    assert words in str(error.value) and "\n" not in str(error.value)


def test_records_are_read_and_kept(tmp_path: Path) -> None:
    """By a name that requests may use; three hours are known."""
    first = int(NOW_S // 60) - 180
    tokens = {("another", "", 0): {first + i: 600.0 + i for i in range(180)}}
    demand.keep(tmp_path / "live", demand.KeptDemand(tokens, ((NOW_S - 180 * 60, NOW_S),)))
    scenario, plan = composition.load(fleet(tmp_path, "{records: live}"))
    past, line = demand_history.load(scenario, plan, NOW_S)
    assert line == f"forecast: 3.0 hours of demand from records in {tmp_path / 'live'}"
    assert past is not None and list(past.tps) == [("another", "", 0)]  # of the only model
    assert past.tps["another", "", 0] == pytest.approx((600 + np.arange(180)) / 60)
    assert demand.read(tmp_path / "live").until_s == NOW_S


def test_a_gateway_forecasts_from_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What `headway serve` starts, up to its scaler. A process that is started again does without damaged records."""
    until_s = 60 * (time() // 60)
    tokens = {("qwen3-8b", "", 0): {int(until_s // 60) - i: 600.0 for i in range(1, 181)}}
    demand.keep(tmp_path / "live", demand.KeptDemand(tokens, ((until_s - 180 * 60, until_s),)))
    file = FleetFile(fleet(tmp_path, "{records: live}"), lambda scenario: scenario)
    log = {"log_level": "info", "log_format": "text", "certfile": None, "keyfile": None, "decisions": None}
    options = LiveOptions(port=0, host="", restarts=0, reload=False, records=None, **log)

    async def scaler() -> Any:
        run = LiveRun(file.plan, file, options, is_restart=False)
        gateway = run.make()
        assert gateway.scaling.control is not None
        return gateway.scaling.control.scaler

    made = asyncio.run(scaler())
    assert made._past.tps["qwen3-8b", "", 0][:170] == pytest.approx(10.0)
    assert "  forecast: 3.0 hours of demand from records in" in capsys.readouterr().err
    (tmp_path / "live" / "demand.parquet").write_bytes(b"")
    with pytest.raises(HeadwayError, match=r"demand.parquet: cannot be read"):
        LiveRun(file.plan, file, options, is_restart=False)
    assert LiveRun(file.plan, file, options, is_restart=True)._plan.past_demand is None


@pytest.mark.ci
def test_a_gateway_that_was_killed_scales_by_the_demand_before(tmp_path: Path) -> None:
    """Real processes: three replicas for a demand that the gateway itself has not seen; one without its history."""
    until_s = 60 * (time() // 60)
    tokens = {(serving.MODEL, "", 0): {int(until_s // 60) - i: 60 * 25.0 for i in range(1, 181)}}
    demand.keep(tmp_path / "live", demand.KeptDemand(tokens, ((until_s - 180 * 60, until_s),)))
    scaling = {"name": "headway", "tps": {serving.MODEL: 10}, "use": 1.0, "interval_s": 0.2}
    changes = {"pool": processes.pool(3, max_replicas=3), "policies": {"scaling": scaling}}
    options = ("--records", str(tmp_path / "live"))

    def front(**settings: Any) -> serving.Process:
        settings["records_period_s"] = 0.1
        return serving.gateway(serving.fleet_file(tmp_path, [], gateway=settings, **changes), *options)

    first = front(demand_history={"records": "live"})
    with serving.closing(first):
        serving.all_up(first, 3)
        prompt_tokens = sum(serving.chat(first, max_tokens=2).json()["usage"]["prompt_tokens"] for _ in range(5))
        until_written(tmp_path / "live", tokens, prompt_tokens)
        first.kill()
    again = front(demand_history={"records": "live"})
    with serving.closing(again):
        serving.all_up(again, 3)
        assert "  forecast: 3.0 hours of demand from records in" in again.stop()
    kept = demand.read(tmp_path / "live")
    assert new_tokens(kept, tokens) == prompt_tokens
    without = front()
    with serving.closing(without):
        serving.all_up(without, 1)
        sleep(1.0)
        assert serving.send(without, "/health").json()["replicas"] == 1


def new_tokens(kept: demand.KeptDemand, before: Any) -> float:
    return sum(sum(by.values()) for by in kept.tokens.values()) - sum(sum(by.values()) for by in before.values())


def until_written(folder: Path, before: Any, prompt_tokens: int) -> None:
    serving.until(lambda: new_tokens(demand.read(folder), before) == prompt_tokens)


def test_the_first_start_has_no_history(tmp_path: Path) -> None:
    scenario, plan = composition.load(fleet(tmp_path, "{records: live}"))
    past, line = demand_history.load(scenario, plan, NOW_S)
    assert past is None and "no demand in records in" in line
    assert not (tmp_path / "live").exists()


class Prometheus(ScriptedEngine):
    """Answers a query with `series`, and keeps it."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: dict[str, list[str]] = {}
        self.series: list[dict[str, Any]] = []

    async def get(self, exchange: Exchange) -> None:
        self.asked = parse_qs(urlparse(exchange.path).query)
        exchange.answer({"status": "success", "data": {"resultType": "matrix", "result": self.series}})


@pytest.fixture
def prometheus() -> Iterator[Prometheus]:
    with running(Prometheus()) as made:
        yield made


def test_prometheus_is_asked_for_the_last_days(tmp_path: Path, prometheus: Prometheus) -> None:
    """Where it has no value, as the gateway was down, demand lies between; before its first one, nothing is known."""
    at_s = [NOW_S - 60 * i for i in (5, 4, 1, 0)]
    prometheus.series = [
        {"metric": {"model": "qwen3-8b"}, "values": [[t, str(v)] for t, v in zip(at_s, (3, 6, 12, 15), strict=True)]},
        {"metric": {"model": "qwen3-8b", "tier": "2"}, "values": [[at_s[1], "1"]]},
    ]
    scenario, plan = composition.load(fleet(tmp_path, f"{{prometheus: '{prometheus.url}', days: 0.25}}"))
    past, line = demand_history.load(scenario, plan, NOW_S)
    assert line == f"forecast: 6 minutes of demand from {prometheus.url}"
    assert past is not None and {key: tps.tolist() for key, tps in past.tps.items()} == {
        ("qwen3-8b", "", 0): [3, 6, 8, 10, 12, 15],
        ("qwen3-8b", "", 2): [0, 1, pytest.approx(2 / 3), pytest.approx(1 / 3), 0, 0],
    }
    asked = {key: float(value[0]) for key, value in prometheus.asked.items() if key != "query"}
    assert asked == {"start": NOW_S - 6 * 3600 + 60, "end": NOW_S, "step": 60}


def test_a_prometheus_without_an_answer_is_named(tmp_path: Path, prometheus: Prometheus) -> None:
    prometheus.series = [{"metric": {}, "values": [[NOW_S, "-1"]]}]
    scenario, plan = composition.load(fleet(tmp_path, f"{{prometheus: '{prometheus.url}'}}"))
    with pytest.raises(HeadwayError, match="'-1' at 6e\\+06; expected a number from 0"):
        demand_history.load(scenario, plan, NOW_S)
    scenario, plan = composition.load(fleet(tmp_path, "{prometheus: 'http://127.0.0.1:9'}"))
    with pytest.raises(HeadwayError, match=r"gateway.demand_history: http://127.0.0.1:9: .*refused"):
        demand_history.load(scenario, plan, NOW_S)
