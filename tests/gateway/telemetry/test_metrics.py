"""The gateway's metrics: counts, histograms, what workers hand over, and Prometheus' text format."""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

import serving
from gateway_in_process import Inside
from headway.control.policies import Policies
from headway.core.record import Outcome
from headway.core.request import Phase
from headway.gateway.gateway import _RELOADED_POLICIES
from headway.gateway.telemetry import metrics as metrics_module
from headway.gateway.telemetry.definitions import DEFINITIONS, EXEMPLARS
from headway.gateway.telemetry.metrics import PrometheusMetrics
from headway.gateway.telemetry.process import build_info, process_metrics
from headway.gateway.workers.protocol import MetricsReport
from serving import chat, metric, send, until

pytest.importorskip("httptools")

from headway.gateway.upstream.client import Connection


def _request(tier: int = 0, pool: str | None = "pool", request_id: str = "chat-1", **changes: Any) -> Any:
    live = {
        "model": 'a "model"', "tier": tier, "phase": Phase.ANSWERING, "prompt_tokens": 10, "generated_tokens": 5,
        "tenant": "ann", "arrival_s": 1.0, "placed_s": 1.5, "enqueued_s": 1.5, "first_token_s": 2.0,
        "cached_tokens": 0, "num_sequences": 1,
        "slo_ttft_s": None, "slo_tpot_s": None, "slo_e2e_s": None, "deadline_s": None,
    } | changes  # fmt: skip
    replica = None if pool is None else SimpleNamespace(id=3, pool=pool, is_hosted=pool == "hosted")
    live = SimpleNamespace(**live)
    answer = SimpleNamespace(continued_tokens=(1, 20), unread=None)
    return SimpleNamespace(live=live, replica=replica, answer=answer, request_id=request_id)


def _samples(page: str) -> dict[str, float]:
    lines = [line for line in page.splitlines() if not line.startswith("#")]
    return {line.rsplit(" ", 1)[0]: float(line.rsplit(" ", 1)[1]) for line in lines}


def test_a_finished_request_is_counted_with_its_latencies() -> None:
    metrics = PrometheusMetrics()
    metrics.count_end(_request(), Outcome.FINISHED, 4.0)
    metrics.count_end(_request(pool=None, first_token_s=float("nan")), Outcome.REJECTED, 4.0)
    found = _samples(metrics.page([("headway_peers", [({}, 2.0)])]))
    labels = r'model="a \"model\"",pool="pool",tier="0"'
    sums = {"time_to_first_token": 1.0, "time_per_output_token": 0.5, "request_duration": 3.0, "hold": 0.5}
    for name, total_s in sums.items():
        assert found[f"headway_{name}_seconds_sum{{{labels}}}"] == total_s
        assert found[f"headway_{name}_seconds_count{{{labels}}}"] == 1
    assert found[f'headway_hold_seconds_bucket{{{labels},le="0.25"}}'] == 0
    assert found[f'headway_hold_seconds_bucket{{{labels},le="0.5"}}'] == 1
    assert found[f'headway_requests_total{{{labels},outcome="finished"}}'] == 1
    assert found[r'headway_requests_total{model="a \"model\"",pool="",tier="0",outcome="rejected"}'] == 1
    assert found[r'headway_tokens_total{model="a \"model\"",kind="output"}'] == 10 and found["headway_peers"] == 2
    assert found[r'headway_continued_tokens_total{model="a \"model\"",kv="cached"}'] == 40
    assert found[r'headway_tenant_requests_total{model="a \"model\"",tenant="ann"}'] == 2
    assert found[r'headway_tenant_tokens_total{model="a \"model\"",tenant="ann"}'] == 30


def test_an_answer_that_is_not_streamed_has_a_duration_alone() -> None:
    metrics = PrometheusMetrics()
    metrics.count_end(_request(first_token_s=float("nan")), Outcome.FINISHED, 4.0)
    found = _samples(metrics.page())
    counted = {name.partition("{")[0] for name in found if "_count{" in name}
    assert counted == {"headway_request_duration_seconds_count", "headway_hold_seconds_count"}


def test_high_tiers_share_one_series() -> None:
    metrics = PrometheusMetrics()
    for tier in range(50, 30_000, 1000):
        metrics.count_end(_request(tier), Outcome.CANCELLED, 4.0)
    counted = [name for name in _samples(metrics.page()) if name.startswith("headway_requests_total")]
    assert len(counted) == 2 and any('tier="99"' in name for name in counted)


def test_further_tenants_share_one_series() -> None:
    metrics = PrometheusMetrics()
    for number in range(metrics_module.MAX_TENANTS + 10):
        metrics.count_end(_request(tenant=f"t{number}"), Outcome.CANCELLED, 4.0)
    found = set(re.findall(r'tenant="(t\d+|other)"', metrics.page()))
    assert len(found) == metrics_module.MAX_TENANTS + 1 and "other" in found


def test_counts_that_a_worker_drains_are_merged_once() -> None:
    worker, scheduler = PrometheusMetrics(), PrometheusMetrics()
    for _ in range(2):
        worker.inter_token(_request()).observe(0.02, 3)
        worker.count_send(_request(), read_s=0.9, now=1.6)
        scheduler.merge(worker.drain())
    assert worker.drain() == []
    found = _samples(scheduler.page())
    labels = r'model="a \"model\"",pool="pool",tier="0"'
    assert found[f'headway_inter_token_seconds_count{{{labels},phase="answering"}}'] == 6
    assert found[f"headway_gateway_overhead_seconds_sum{{{labels}}}"] == pytest.approx(0.4)


def _undefined(page: str) -> list[str]:
    """Samples whose name, or whose labels, are not those of their definition."""
    wrong = []
    for sample in _samples(page):
        name, _, labels = sample.partition("{")
        for suffix in ("_bucket", "_sum", "_count"):
            if name.removesuffix(suffix) in DEFINITIONS:
                name = name.removesuffix(suffix)
        found = set(re.findall(r'(\w+)="', labels)) - {"le"}
        if name not in DEFINITIONS or not found <= set(DEFINITIONS[name].labels):
            wrong.append(sample)
    return wrong


def test_definitions_follow_prometheus_rules() -> None:
    for name, definition in DEFINITIONS.items():
        assert (definition.kind == "counter") == name.endswith("_total"), name
        assert re.fullmatch(r"(headway|process)_[a-z0-9_]+", name) and "\n" not in definition.help, name
        assert definition.help[-1] not in ".:;" and '"' not in definition.help + "".join(definition.labels), name


@pytest.mark.parametrize(
    ("slos", "result"),
    [
        ({"slo_ttft_s": 1.0}, "met"),
        ({"slo_ttft_s": 0.99}, "missed"),
        ({"slo_tpot_s": 0.5, "slo_e2e_s": 3.0}, "met"),
        ({"slo_tpot_s": 0.49, "slo_e2e_s": 3.0}, "missed"),
        ({"deadline_s": 3.5}, "missed"),
        ({"deadline_s": 3.5, "slo_e2e_s": 3.0}, "met"),
        ({"slo_ttft_s": 0.1, "first_token_s": float("nan")}, "met"),
        ({"slo_e2e_s": 0.1, "first_token_s": float("nan")}, "missed"),
        ({"slo_tpot_s": 0.01, "generated_tokens": 1}, "met"),
        ({"slo_tpot_s": 0.5, "generated_tokens": 20, "num_sequences": 4}, "met"),
        ({"slo_tpot_s": 0.49, "generated_tokens": 20, "num_sequences": 4}, "missed"),
        ({}, None),
    ],
)
def test_slos_are_judged_as_in_the_metrics_of_runs(slos: dict[str, Any], result: str | None) -> None:
    """Of an answer that is not streamed the duration alone is known; a single token has no gap. A request that did not
    finish misses."""
    metrics = PrometheusMetrics()
    metrics.count_end(_request(**slos), Outcome.FINISHED, 4.0)
    name = "headway_slo_requests_total"
    found = {key: value for key, value in _samples(metrics.page()).items() if key.startswith(name)}
    labels = r'model="a \"model\""'
    assert found == ({} if result is None else {f'{name}{{{labels},result="{result}"}}': 1})
    metrics.count_end(_request(**slos), Outcome.REJECTED, 4.0)
    missed = _samples(metrics.page()).get(f'{name}{{{labels},result="missed"}}', 0)
    assert missed == 0 if result is None else missed == 1 + (result == "missed")


def test_openmetrics_is_the_same_page_with_the_last_request_of_each_bin() -> None:
    """By the parser of Prometheus' own client: the samples are equal, and each exemplar lies in its bin."""
    parser = pytest.importorskip("prometheus_client.openmetrics.parser")
    text = pytest.importorskip("prometheus_client.parser")
    metrics = PrometheusMetrics()
    slow = "a#b}{,c"
    for id, end_s in (("x" * 119, 400.0), ("", 7.0), ("first", 4.0), ("second", 4.1), (slow, 90.0)):
        metrics.count_end(_request(request_id=id), Outcome.FINISHED, end_s)
    others = [("headway_usd_total", [({"pool": "p", "model": "m"}, 0.25)]), build_info(), *process_metrics()]
    plain, opened = metrics.page(others), metrics.page(others, wall_start_s=1_700_000_000.0)
    families = list(parser.text_string_to_metric_families(opened))
    assert len({family.name for family in families}) == len(families)
    samples = {(s.name, tuple(sorted(s.labels.items()))): s for family in families for s in family.samples}
    assert {key: s.value for key, s in samples.items()} == {
        (s.name, tuple(sorted(s.labels.items()))): s.value
        for family in text.text_string_to_metric_families(plain)
        for s in family.samples
    }
    found = {
        (name.removesuffix("_bucket"), s.exemplar.labels["request_id"]): (float(dict(labels)["le"]), s.exemplar)
        for (name, labels), s in samples.items()
        if s.exemplar is not None
    }
    assert {name for name, _ in found} == set(EXEMPLARS)
    e2e = {id: exemplar for (name, id), exemplar in found.items() if name == "headway_request_duration_seconds"}
    assert e2e.keys() == {"second", slow}, "the last of a bin; too long an id, and none, are left out"
    assert e2e[slow][1].value == 89.0 and float(e2e[slow][1].timestamp) == 1_700_000_090.0
    assert all(exemplar.value <= bound for bound, exemplar in found.values())
    assert _undefined(plain) == [] and "request_id" not in plain


def test_hosted_replicas_charge_for_the_tokens_of_requests_that_they_began() -> None:
    metrics = PrometheusMetrics()
    metrics.count_end(_request(pool="hosted", cached_tokens=4), Outcome.FINISHED, 4.0)
    metrics.count_end(_request(pool="hosted", cached_tokens=99), Outcome.CANCELLED, 4.0)
    metrics.count_end(_request(pool="hosted", generated_tokens=0), Outcome.REJECTED, 4.0)
    metrics.count_end(_request(), Outcome.FINISHED, 4.0)
    assert metrics.hosted_tokens == {3: [6, 14, 10]}


def test_failures_before_and_after_the_first_token_count_apart() -> None:
    metrics = PrometheusMetrics()
    for tokens in (0, 5, 5):
        metrics.count_failure(_request(generated_tokens=tokens).live, "pool")
    found = _samples(metrics.page())
    labels = r'model="a \"model\"",pool="pool"'
    assert found[f"headway_retries_total{{{labels}}}"] == 1 and found[f"headway_failovers_total{{{labels}}}"] == 2


def test_process_metrics_are_read_from_proc(tmp_path: Path) -> None:
    fields = " ".join(["S", *(str(n) for n in range(1, 50))])
    (tmp_path / "self/fd").mkdir(parents=True)
    (tmp_path / "self/stat").write_text(f"7 (a b) c) {fields}\n")
    (tmp_path / "stat").write_text("cpu 1 2\nbtime 1000\n")
    found = {name: samples[0][1] for name, samples in process_metrics(tmp_path)}
    assert found["process_virtual_memory_bytes"] == 20 and found["process_open_fds"] == 0
    assert found["process_start_time_seconds"] == 1000 + 19 / os.sysconf("SC_CLK_TCK")
    assert found["process_resident_memory_bytes"] == 21 * os.sysconf("SC_PAGE_SIZE")
    bare = dict(process_metrics(tmp_path / "none"))
    assert set(bare) == {"process_cpu_seconds_total", "process_max_fds"}


# In front of engines.


def _fails(status: int) -> list[bytes]:
    return [b"HTTP/1.1 %d Failed\r\nContent-Length: 2\r\n\r\n{}" % status]


@pytest.mark.parametrize("stream", [False, True])
def test_clients_that_leave_before_their_answers_count_as_that(stream: bool, tmp_path: Path) -> None:
    """One at its engine, one held: none is told of a timeout, and both leave their places at once."""
    held = {"ordering": "vtc", "ordering_at": "gateway", "window": 1}
    inside = Inside(tmp_path, policies=held, gateway={"scrape_period_s": 3600.0})
    inside.engines[0].reply, inside.engines[0].then = [], "stall"

    async def leave(num: int) -> None:
        gone = asyncio.Event()
        messages = [{"role": "user", "content": "hello there"}]
        body = {"model": serving.MODEL, "messages": messages, "stream": stream}
        clients = [asyncio.create_task(inside.post(body, gone=gone)) for _ in range(num)]
        control = inside.gateway.driver.control
        await inside.until(lambda: inside.num_in_flight == 1 and control.services[0].hold_queue.num == num - 1)
        gone.set()
        await asyncio.gather(*clients)
        assert inside.num_in_flight == control.services[0].hold_queue.num == 0

    try:
        inside.run(leave(2))
        page = _samples(inside.run(inside.post(b"", "/metrics", method="GET")).body.decode())
    finally:
        inside.close()
    answers = {key: value for key, value in page.items() if key.startswith("headway_responses_total")}
    assert answers == {'headway_responses_total{path="/v1/chat/completions",status="499"}': 2}
    ended = {key: value for key, value in page.items() if key.startswith("headway_requests_total")}
    assert sum(ended.values()) == 2 and all('outcome="cancelled"' in key for key in ended)


class _HungTransport:
    """An engine's host that answers nothing, not even that it accepts no connection."""

    def __init__(self) -> None:
        self.num_opening = 0

    async def connect(self) -> Connection:
        self.num_opening += 1
        try:
            await asyncio.Event().wait()
        finally:
            self.num_opening -= 1
        raise AssertionError("nothing wakes it")


def test_a_client_that_leaves_while_its_engines_connection_is_opened_frees_its_place_at_once(tmp_path: Path) -> None:
    """The opening ends after its own time-out, and is then no failure of an engine that nobody waits for."""
    inside = Inside(tmp_path, gateway={"scrape_period_s": 3600.0})
    hung = _HungTransport()

    async def leave() -> None:
        await inside.until(lambda: inside.gateway.num_up == 1)
        client = inside.gateway.replicas[0].client
        client.close()
        client._transport, client._connect_s = hung, 0.5
        gone = asyncio.Event()
        body = {"model": serving.MODEL, "messages": [{"role": "user", "content": "hello there"}]}
        asking = asyncio.create_task(inside.post(body, gone=gone))
        await inside.until(lambda: hung.num_opening == 1)
        assert inside.num_in_flight == 1
        gone.set()
        await inside.until(lambda: inside.num_in_flight == 0)
        assert hung.num_opening == 1 and not asking.done()
        await asking
        assert inside.gateway.num_up == 1

    try:
        inside.run(leave())
        page = _samples(inside.run(inside.post(b"", "/metrics", method="GET")).body.decode())
    finally:
        inside.close()
    assert page['headway_responses_total{path="/v1/chat/completions",status="499"}'] == 1
    assert hung.num_opening == 0


def test_the_page_counts_statuses_retries_and_dollars(tmp_path: Path) -> None:
    """Dollars are those of the records, which the gateway makes of the same moment."""
    inside = Inside(tmp_path, 2, slo={"e2e_s": 600.0}, gateway={"scrape_period_s": 3600.0})
    try:
        statuses = [inside.chat().status]
        inside.engines[0].reply = _fails(500)
        statuses += [inside.chat().status for _ in range(2)]
        inside.engines[1].reply = _fails(400)
        statuses += [inside.chat().status, inside.run(inside.post(b"{", "/v1/completions")).status]
        page = _samples(inside.run(inside.post(b"", "/metrics", method="GET")).body.decode())
        later = inside.gateway.telemetry.records()
    finally:
        inside.close()
    assert statuses == [200, 200, 200, 400, 400]
    responses = {key: value for key, value in page.items() if key.startswith("headway_responses_total")}
    chat = 'headway_responses_total{path="/v1/chat/completions",status="%d"}'
    assert responses == {
        chat % 200: 3,
        chat % 400: 1,
        'headway_responses_total{path="/v1/completions",status="400"}': 1,
    }
    assert page[f'headway_retries_total{{model="{serving.MODEL}",pool="pool"}}'] >= 1
    slo = 'headway_slo_requests_total{model="%s",result="%s"}'
    assert (page[slo % (serving.MODEL, "met")], page[slo % (serving.MODEL, "missed")]) == (3, 1)
    usd = page[f'headway_usd_total{{pool="pool",model="{serving.MODEL}"}}']
    assert (
        0
        < usd
        <= sum(each.up[0][1] - each.up[0][0] for each in later.replicas) / 3600 * (later.replicas[0].usd_per_hour)
    )


def test_a_reload_that_changes_slos_alone_takes_effect(tmp_path: Path) -> None:
    inside = Inside(tmp_path, slo={"e2e_s": 600.0}, gateway={"scrape_period_s": 3600.0})

    async def reload() -> list[str]:
        plan = inside.gateway.plan
        return inside.gateway.reconfigure(replace(plan, policies=replace(plan.policies, slo_e2e_s=1e-9)))

    try:
        inside.chat()
        assert inside.run(reload()) == ["policies: slo_e2e_s changed"]
        inside.chat()
        page = _samples(inside.gateway.telemetry.metrics.page())
    finally:
        inside.close()
    slo = 'headway_slo_requests_total{model="%s",result="%s"}'
    assert page[slo % (serving.MODEL, "met")] == page[slo % (serving.MODEL, "missed")] == 1


def test_policies_are_compared_at_a_reload_unless_only_a_restart_changes_them() -> None:
    """`scaling` reconfigures what it follows by itself."""
    assert set(Policies.__struct_fields__) - set(_RELOADED_POLICIES) == {"cascade", "scaler", "least", "began_s"}


def test_a_worker_hands_its_answers_over_once() -> None:
    worker, scheduler = PrometheusMetrics(), PrometheusMetrics()
    for _ in range(2):
        worker.num_responses["/v1/chat/completions", 200] = 3
        scheduler.merge([], worker.drain_responses())
    assert worker.drain_responses() == [] and scheduler.num_responses == {("/v1/chat/completions", 200): 6}
    assert MetricsReport([], [("/v1/rerank", 401, 2)]) == msgspec.msgpack.decode(
        msgspec.msgpack.encode(MetricsReport([], [("/v1/rerank", 401, 2)])), type=MetricsReport
    )


@pytest.fixture(scope="module")
def engines() -> Iterator[list[serving.Process]]:
    made = [serving.emulator(), serving.emulator()]
    with serving.closing(*made):
        yield made


def test_every_histogram_counts_what_ran(engines: list[serving.Process], tmp_path: Path) -> None:
    with serving.up(serving.gateway(serving.fleet_file(tmp_path, [engine.url for engine in engines])), 2) as front:
        for _ in range(3):
            list(chat(front, max_tokens=9, stream=True, headers={"x-headway-tier": "2"}).events())
        chat(front, max_tokens=9).json()
        until(lambda: metric(front, "headway_requests_total") == 4)
        page = send(front, "/metrics").text()
    names = {
        "time_to_first_token": 3,
        "time_per_output_token": 3,
        "inter_token": 24,
        "request_duration": 4,
        "hold": 4,
        "gateway_overhead": 4,
    }
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
        assert re.fullmatch(r'# (HELP|TYPE) \w+ .*|\w+({(\w+="[^"]*",?)+})? [-+.\deE]+', line), line
    assert _undefined(page) == []
