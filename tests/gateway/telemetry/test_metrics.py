"""The gateway's metrics: counts, histograms, what workers hand over, and Prometheus' text format."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import serving
from headway.core.record import Outcome
from headway.core.request import Phase
from headway.gateway.telemetry.metrics import PrometheusMetrics
from serving import chat, metric, send, until

pytest.importorskip("httptools")


def _request(tier: int = 0, pool: str | None = "pool", **changes: Any) -> Any:
    live = {
        "model": 'a "model"', "tier": tier, "phase": Phase.ANSWERING, "prompt_tokens": 10, "generated_tokens": 5,
        "tenant": "ann", "arrival_s": 1.0, "placed_s": 1.5, "enqueued_s": 1.5, "first_token_s": 2.0,
        "cached_tokens": 0,
    } | changes  # fmt: skip
    replica = None if pool is None else SimpleNamespace(pool=pool)
    live = SimpleNamespace(**live)
    return SimpleNamespace(live=live, replica=replica, continued_tokens=(1, 20), unread=None)


def _samples(page: str) -> dict[str, float]:
    lines = [line for line in page.splitlines() if not line.startswith("#")]
    return {line.rsplit(" ", 1)[0]: float(line.rsplit(" ", 1)[1]) for line in lines}


def test_a_finished_request_is_counted_with_its_latencies() -> None:
    metrics = PrometheusMetrics()
    metrics.count_end(_request(), Outcome.FINISHED, 4.0)
    metrics.count_end(_request(pool=None, first_token_s=float("nan")), Outcome.REJECTED, 4.0)
    found = _samples(metrics.page([("replicas", "Replicas", [({}, 2.0)])]))
    labels = r'model="a \"model\"",pool="pool",tier="0"'
    sums = {"time_to_first_token": 1.0, "time_per_output_token": 0.5, "request_duration": 3.0, "hold": 0.5}
    for name, total_s in sums.items():
        assert found[f"headway_{name}_seconds_sum{{{labels}}}"] == total_s
        assert found[f"headway_{name}_seconds_count{{{labels}}}"] == 1
    assert found[f'headway_hold_seconds_bucket{{{labels},le="0.25"}}'] == 0
    assert found[f'headway_hold_seconds_bucket{{{labels},le="0.5"}}'] == 1
    assert found[f'headway_requests_total{{{labels},outcome="finished"}}'] == 1
    assert found[r'headway_requests_total{model="a \"model\"",pool="",tier="0",outcome="rejected"}'] == 1
    assert found[r'headway_tokens_total{model="a \"model\"",kind="output"}'] == 10 and found["headway_replicas"] == 2
    assert found[r'headway_continued_tokens_total{model="a \"model\"",kv="cached"}'] == 40
    assert found[r'headway_tenant_requests_total{model="a \"model\"",tenant="ann"}'] == 2
    assert found[r'headway_tenant_tokens_total{model="a \"model\"",tenant="ann"}'] == 30


def test_an_answer_that_is_not_streamed_has_a_duration_alone() -> None:
    metrics = PrometheusMetrics()
    metrics.count_end(_request(first_token_s=float("nan")), Outcome.FINISHED, 4.0)
    found = _samples(metrics.page([]))
    counted = {name.partition("{")[0] for name in found if "_count{" in name}
    assert counted == {"headway_request_duration_seconds_count", "headway_hold_seconds_count"}


def test_high_tiers_share_one_series() -> None:
    metrics = PrometheusMetrics()
    for tier in range(50, 30_000, 1000):
        metrics.count_end(_request(tier), Outcome.CANCELLED, 4.0)
    counted = [name for name in _samples(metrics.page([])) if name.startswith("headway_requests_total")]
    assert len(counted) == 2 and any('tier="99"' in name for name in counted)


def test_counts_that_a_worker_drains_are_merged_once() -> None:
    worker, scheduler = PrometheusMetrics(), PrometheusMetrics()
    for _ in range(2):
        worker.inter_token(_request()).observe(0.02, 3)
        worker.count_send(_request(), read_s=0.9, now=1.6)
        scheduler.merge(worker.drain())
    assert worker.drain() == []
    found = _samples(scheduler.page([]))
    labels = r'model="a \"model\"",pool="pool",tier="0"'
    assert found[f'headway_inter_token_seconds_count{{{labels},phase="answering"}}'] == 6
    assert found[f"headway_gateway_overhead_seconds_sum{{{labels}}}"] == pytest.approx(0.4)


# In front of engines.


@pytest.fixture(scope="module")
def engines() -> Iterator[list[serving.Process]]:
    made = [serving.emulator(), serving.emulator()]
    with serving.closing(*made):
        yield made


def test_every_histogram_counts_what_ran(engines: list[serving.Process], tmp_path: Path) -> None:
    front = serving.gateway(serving.fleet_file(tmp_path, [engine.url for engine in engines]))
    with serving.closing(front):
        serving.all_up(front, 2)
        for _ in range(3):
            list(chat(front, max_tokens=9, stream=True, headers={"x-headway-tier": "2"}).events())
        chat(front, max_tokens=9).json()
        until(lambda: metric(front, "headway_requests_total") == 4)
        page = send(front, "/metrics").text()
    names = {
        "time_to_first_token": 3, "time_per_output_token": 3, "inter_token": 24, "request_duration": 4, "hold": 4,
        "gateway_overhead": 4,
    }  # fmt: skip
    for name, num in names.items():
        counts = re.findall(rf"^headway_{name}_seconds_count{{(.*)}} (\d+)$", page, re.MULTILINE)
        assert sum(int(count) for _, count in counts) == num, name
        assert all('model="qwen3-8b",pool="pool",tier="' in labels for labels, _ in counts)
        least = [float(x) for x in re.findall(rf"^headway_{name}_seconds_sum{{.*}} (\S+)$", page, re.MULTILINE)]
        assert all(x >= 0 for x in least) and sum(least) < 30
    assert 'phase="answering"' in page
    whole = r'^headway_requests_total{model="qwen3-8b",pool="pool",tier="2",outcome="finished"} 3$'
    assert re.search(whole, page, re.MULTILINE)
    for line in page.splitlines():
        assert re.fullmatch(r'# (HELP|TYPE) headway_\w+ .*|headway_\w+({(\w+="[^"]*",?)+})? [-+.\deE]+', line), line
