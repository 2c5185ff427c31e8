"""What a gateway says of itself: its metrics, why it chose as it did, OpenTelemetry's spans."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import yaml

import serving
from headway.records.decision_log import BackgroundDecisionFile, DecisionFile, DroppedLines
from serving import MODEL, ask, chat, metric, until

pytest.importorskip("httptools")
ORDER = {"ordering": "priority", "ordering_at": "gateway"}


@pytest.fixture(scope="module")
def engines() -> Iterator[list[serving.Process]]:
    made = [serving.emulator(), serving.emulator()]
    with serving.closing(*made):
        yield made


def fleet(folder: Path, engines: list[serving.Process], **changes: Any) -> Path:
    return serving.fleet_file(folder, [engine.url for engine in engines], **changes)


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def headers_of(reply: serving.Reply) -> dict[str, str]:
    reply.json()
    return reply.headers


# Metrics.


def test_every_histogram_is_there_and_counts_what_ran(engines: list[serving.Process], tmp_path: Path) -> None:
    front = serving.gateway(fleet(tmp_path, engines))
    with serving.closing(front):
        serving.all_up(front, 2)
        for _ in range(3):
            list(chat(front, max_tokens=9, stream=True, headers={"x-headway-tier": "2"}).events())
        chat(front, max_tokens=9).json()
        until(lambda: metric(front, "headway_requests_total") == 4)
        page = ask(front, "/metrics").text()
    names = {
        "time_to_first_token": 4, "time_per_output_token": 3, "inter_token": 24, "request_duration": 4, "hold": 4,
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


# Decisions.


def test_a_line_for_each_choice_with_what_the_policy_saw(engines: list[serving.Process], tmp_path: Path) -> None:
    path = tmp_path / "log" / "decisions.jsonl"
    file = fleet(tmp_path, engines, policies={"routing": "least-loaded", "window": 1, **ORDER})
    front = serving.gateway(file, "--decisions", str(path))
    with serving.closing(front):
        serving.all_up(front, 2)
        long = [
            chat(front, max_tokens=30_000, ignore_eos=True, stream=True, headers={"x-request-id": f"long-{i}"})
            for i in range(2)
        ]
        for reply in long:
            next(reply.events())
        waits = threading.Thread(target=lambda: chat(front, max_tokens=2, headers={"x-request-id": "waits"}).json())
        waits.start()
        until(lambda: metric(front, "headway_requests_held") == 1)
        long[1].close()
        waits.join()
        long[0].close()
        front.stop()
    found = {line["request"]: line for line in lines(path)}
    assert list(found) == ["long-0", "long-1", "waits"]
    first, second, last = found.values()
    assert {line["what"] for line in found.values()} == {"placed"}
    assert all(line["model"] == MODEL and line["tier"] == 0 and line["phase"] == "answering" for line in found.values())
    assert [each["in_flight"] for each in first["replicas"]] == [0, 0] and first["held_s"] == 0
    assert [each["replica"] for each in second["replicas"]] == [1 - first["choice"]], "the other has no room"
    assert last["held_s"] > 0 and last["why"] == "no replica has room" and last["choice"] == second["choice"]
    for line in found.values():
        assert line["choice"] in [each["replica"] for each in line["replicas"]]
        assert all(0 <= each["age_s"] < 5 and 0 <= each["kv_share"] <= 1 for each in line["replicas"])
    assert [line["time_s"] for line in found.values()] == sorted(line["time_s"] for line in found.values())


def test_a_retry_and_its_number(tmp_path: Path) -> None:
    path, bad, good = tmp_path / "decisions.jsonl", serving.emulator(), serving.emulator()
    with serving.closing(bad, good):
        front = serving.gateway(
            fleet(tmp_path, [bad, good], policies={"routing": "round-robin"}, gateway={"explain": True}),
            "--decisions", str(path),
        )  # fmt: skip
        with serving.closing(front):
            serving.all_up(front, 2)
            ask(bad, "/emulator/failures", [500], method="PUT").text()
            wants = {"x-headway-explain": "1"}
            told = [headers_of(chat(front, max_tokens=2, headers={**wants, "x-request-id": str(i)})) for i in range(2)]
            assert sorted(headers["x-headway-attempts"] for headers in told) == ["1", "2"]
            assert all(0 <= float(headers["x-headway-held-s"]) < 5 for headers in told)
            assert [h["x-headway-replica"] for h in told if h["x-headway-attempts"] == "2"] == ["pool/1"]
            assert "x-headway-attempts" not in headers_of(chat(front, max_tokens=2))
            front.stop()
    again = [line for line in lines(path) if line.get("attempt")]
    assert len(again) == 1 and again[0]["attempt"] == 1
    assert [each["replica"] for each in again[0]["replicas"]] == [1] and again[0]["choice"] == 1


def test_explanations_are_for_those_who_may_have_them(engines: list[serving.Process], tmp_path: Path) -> None:
    front = serving.gateway(fleet(tmp_path, engines))
    with serving.closing(front):
        serving.all_up(front, 2)
        assert "x-headway-attempts" not in headers_of(chat(front, max_tokens=2, headers={"x-headway-explain": "1"}))


def test_the_simulator_writes_the_same_lines(tmp_path: Path) -> None:
    """And what is simulated does not change by it."""
    scenario = {
        "workload": {"builtin": "chat", "num_requests": 300, "arrivals": 30},
        "fleet": [{"name": "pool", "model": MODEL, "gpu": "h100", "engine": "vllm-v1", "replicas": 3}],
        "policies": {"routing": "least-loaded", "window": 8, **ORDER},
        "observe": {"period_s": 0.5, "delay_s": 0.1},
    }
    (tmp_path / "it.yaml").write_text(yaml.safe_dump(scenario))
    told, plain = (
        subprocess.run(
            [sys.executable, "-m", "headway", "simulate", "it.yaml", "--json", "--no-progress", *more],
            cwd=tmp_path, capture_output=True, text=True, check=True,
        ).stdout
        for more in (["--decisions", "decisions.jsonl"], [])
    )  # fmt: skip
    assert json.loads(told)["results"][0]["metrics"] == json.loads(plain)["results"][0]["metrics"]
    found = lines(tmp_path / "decisions.jsonl")
    assert [line["request"] for line in sorted(found, key=lambda line: int(line["request"]))] == list(
        map(str, range(300))
    )
    held = [line for line in found if line["held_s"] > 0]
    assert held and {line["why"] for line in held} <= {"no replica has room", "others come first"}
    for line in found:
        loads = {each["replica"]: each["in_flight"] for each in line["replicas"]}
        assert loads[line["choice"]] == min(loads.values()), "that is what least-loaded means"
        assert max(loads.values()) < 8
        ages = [each["age_s"] for each in line["replicas"]]
        assert all(age is None or 0.1 <= age <= 0.6 + 1e-9 for age in ages)


def test_a_long_log_is_two_files_and_no_more(tmp_path: Path) -> None:
    file = DecisionFile(tmp_path / "log", max_bytes=100)
    for num in range(50):
        file.write(DroppedLines(num))
    file.close()
    sizes = {path.name: path.stat().st_size for path in tmp_path.iterdir()}
    assert set(sizes) == {"log", "log.1"} and all(0 < size <= 100 for size in sizes.values())
    kept = [line["num"] for name in ("log.1", "log") for line in lines(tmp_path / name)]
    assert kept == list(range(50 - len(kept), 50)), "the newest, in order"


def test_what_is_too_fast_for_the_disk_is_counted(tmp_path: Path) -> None:
    class Slow(DecisionFile):
        may_write = threading.Event()

        def write(self, line: Any) -> None:
            self.may_write.wait(serving.PATIENCE_S)
            super().write(line)

    file = Slow(tmp_path / "log")
    behind = BackgroundDecisionFile(file, max_queued=10)
    for num in range(200):
        behind.write(DroppedLines(num))
    file.may_write.set()
    behind.close()
    found = [line["num"] for line in lines(tmp_path / "log")]
    assert found[:10] == list(range(10))
    missing = found[-1]
    assert len(found) - 1 + missing == 200 and missing >= 180


# Spans.


class Collector(serving.Listener):
    """Takes what OpenTelemetry's exporters send by HTTP."""

    def __init__(self) -> None:
        self.spans: list[Any] = []
        self.resources: list[dict[str, str]] = []
        super().__init__()

    def answers(self, sent: bytes) -> tuple[int, bytes]:
        from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

        for each in ExportTraceServiceRequest.FromString(sent).resource_spans:
            self.resources.append({a.key: a.value.string_value for a in each.resource.attributes})
            self.spans += [span for scope in each.scope_spans for span in scope.spans]
        return 200, b""

    def named(self, start: str) -> list[Any]:
        return sorted((s for s in self.spans if s.name.startswith(start)), key=lambda span: span.start_time_unix_nano)


def attributes(span: Any) -> dict[str, Any]:
    return {each.key: getattr(each.value, each.value.WhichOneof("value")) for each in span.attributes}


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[Collector]:
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http")
    made = Collector()
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", made.url)
    try:
        yield made
    finally:
        made.close()


class Engine:
    """Says where its requests say that they come from, fails the first of them, and speaks OpenAI's API."""

    def __init__(self) -> None:
        self.heard: list[str] = []
        self.fails = 1
        engine = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                self._say(200, {"data": [{"id": "it"}]})

            def do_POST(self) -> None:
                self.rfile.read(int(self.headers["content-length"]))
                engine.heard.append(self.headers.get("traceparent", ""))
                if engine.fails:
                    engine.fails -= 1
                    self._say(500, {})
                    return
                message = {"role": "assistant", "content": "so it is"}
                choices = [{"index": 0, "message": message, "finish_reason": "stop"}]
                self._say(200, {"choices": choices, "usage": {"prompt_tokens": 5, "completion_tokens": 3}})

            def _say(self, status: int, body: Any) -> None:
                data = json.dumps(body).encode()
                self.send_response(status)
                self.send_header("content-length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, format: str, *args: Any) -> None:
                """To nobody."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


def test_a_trace_goes_from_the_client_through_attempts_to_the_engine(collector: Collector, tmp_path: Path) -> None:
    engines = [Engine(), Engine()]
    engines[1].fails = 0
    parent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    file = serving.fleet_file(
        tmp_path, [engine.url for engine in engines], pool={"api": "openai"}, policies={"routing": "round-robin"},
        gateway={"tracing": True},
    )  # fmt: skip
    front = serving.gateway(file)
    with serving.closing(front):
        serving.all_up(front, 2)
        for _ in range(2):  # one of the two begins at the engine that fails
            chat(front, max_tokens=9, temperature=0.5, headers={"traceparent": parent}).json()
        front.stop()
    for engine in engines:
        engine.close()
    assert collector.resources[0]["service.name"] == "headway"
    requests, attempts = collector.named("chat qwen3-8b"), collector.named("attempt")
    assert len(requests) == 2 and len(attempts) == 3
    assert {span.trace_id.hex() for span in collector.spans} == {"0af7651916cd43dd8448eb211c80319c"}
    assert {span.parent_span_id.hex() for span in requests} == {"b7ad6b7169203331"}
    assert {span.parent_span_id for span in attempts} == {span.span_id for span in requests}
    heard = {trace.split("-")[2] for engine in engines for trace in engine.heard}
    assert heard == {span.span_id.hex() for span in attempts}, "each engine was told of its attempt"
    for span in requests:
        told = attributes(span)
        assert told["gen_ai.operation.name"] == "chat" and told["gen_ai.request.model"] == MODEL
        assert told["gen_ai.usage.input_tokens"] == 5 and told["gen_ai.usage.output_tokens"] == 3
        assert told["gen_ai.request.max_tokens"] == 9 and told["gen_ai.request.temperature"] == 0.5
        assert told["headway.outcome"] == "finished" and span.kind == 2
        own = [each for each in attempts if each.parent_span_id == span.span_id]
        assert told["headway.attempts"] == len(own)
        inside = [(each.start_time_unix_nano, each.end_time_unix_nano) for each in own]
        assert all(span.start_time_unix_nano <= start <= end <= span.end_time_unix_nano for start, end in inside)
        assert all(before[1] <= after[0] for before, after in pairwise(inside))
    failed = [span for span in attempts if span.status.code == 2]
    assert len(failed) == 1 and attributes(failed[0])["error.type"] == "RefusedError"
    assert {attributes(span)["server.port"] for span in attempts} == {int(e.url.rsplit(":")[-1]) for e in engines}


def test_being_held_and_being_judged_are_spans(collector: Collector, tmp_path: Path) -> None:
    small = serving.emulator("--confidence", "0.7")
    with serving.closing(small):
        pool = {"gpu": "h100", "engine": "vllm-v1", "endpoints": [small.url]}
        data = {
            "fleet": [{"name": "a", "model": MODEL, **pool}, {"name": "b", "model": "llama-3.1-8b", **pool}],
            "cascade": {
                "name": "best", "models": [MODEL, "llama-3.1-8b"], "judge": {"by": "confidence"},
                "policy": {"name": "thresholds", "thresholds": 75},
            },
            "policies": {"window": 1, **ORDER}, "gateway": {"tracing": True, "scrape_period_s": 0.1},
        }  # fmt: skip
        (tmp_path / "fleet.yaml").write_text(yaml.safe_dump(data))
        front = serving.gateway(tmp_path / "fleet.yaml")
        with serving.closing(front):
            serving.all_up(front, 2)
            asked = [threading.Thread(target=lambda: chat(front, model="best", max_tokens=60).json()) for _ in range(2)]
            for each in asked:
                each.start()
            for each in asked:
                each.join()
            front.stop()
    requests, judged = collector.named("chat best"), collector.named("judge")
    assert len(requests) == len(judged) == 2 and len(collector.named("attempt")) == 4
    assert all(69 < attributes(span)["headway.score"] < 71 for span in judged)
    assert not any(attributes(span)["headway.accepted"] for span in judged)
    assert {attributes(span)["gen_ai.response.model"] for span in judged} == {MODEL}
    assert {attributes(span)["gen_ai.response.model"] for span in requests} == {"llama-3.1-8b"}
    longest = max(span.end_time_unix_nano - span.start_time_unix_nano for span in collector.named("hold"))
    assert longest > 5e7, "one waited for the other's answer"


def test_who_does_not_ask_for_spans_does_not_load_their_library() -> None:
    modules = "headway.gateway.server.app, headway.serving.gateway"
    code = f"import sys, {modules}; sys.exit(any('opentelemetry' in m for m in sys.modules))"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_without_tracing_the_clients_context_is_passed_on(tmp_path: Path) -> None:
    engine = Engine()
    engine.fails = 0
    front = serving.gateway(serving.fleet_file(tmp_path, [engine.url], pool={"api": "openai"}))
    with serving.closing(front):
        serving.all_up(front, 1)
        chat(front, max_tokens=2, headers={"traceparent": "00-1-2-01"}).json()
    engine.close()
    assert engine.heard == ["00-1-2-01"]
