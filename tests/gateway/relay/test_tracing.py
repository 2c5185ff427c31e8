"""OpenTelemetry's spans: requests, holds, attempts and judgements, in the client's trace."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import yaml

import serving
from scripted import Exchange, ScriptedEngine, running
from serving import MODEL, chat

pytest.importorskip("httptools")
ORDER = {"ordering": "priority", "ordering_at": "gateway"}


class Collector(ScriptedEngine):
    """Receives spans from OpenTelemetry's HTTP exporter."""

    def __init__(self) -> None:
        super().__init__()
        self.keeps_bodies = False
        self.spans: list[Any] = []
        self.resources: list[dict[str, str]] = []

    async def complete(self, exchange: Exchange) -> None:
        from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

        for each in ExportTraceServiceRequest.FromString(exchange.body).resource_spans:
            self.resources.append({a.key: a.value.string_value for a in each.resource.attributes})
            self.spans += [span for scope in each.scope_spans for span in scope.spans]
        exchange.answer(b"")

    def named(self, start: str) -> list[Any]:
        return sorted((s for s in self.spans if s.name.startswith(start)), key=lambda span: span.start_time_unix_nano)


def attributes(span: Any) -> dict[str, Any]:
    return {each.key: getattr(each.value, each.value.WhichOneof("value")) for each in span.attributes}


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[Collector]:
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http")
    with running(Collector()) as made:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", made.url)
        yield made


class Engine(ScriptedEngine):
    """Speaks OpenAI's API, records the `traceparent` of each request, and fails the first `fails` requests."""

    def __init__(self, fails: int) -> None:
        super().__init__()
        self.parents: list[str] = []
        self.fails = fails
        self.start()

    async def get(self, exchange: Exchange) -> None:
        exchange.answer({"data": [{"id": "it"}]})

    async def complete(self, exchange: Exchange) -> None:
        self.parents.append(exchange.headers.get("traceparent", ""))
        if self.fails:
            self.fails -= 1
            exchange.answer({}, 500)
            return
        message = {"role": "assistant", "content": "so it is"}
        choices = [{"index": 0, "message": message, "finish_reason": "stop"}]
        exchange.answer({"choices": choices, "usage": {"prompt_tokens": 5, "completion_tokens": 3}})


def test_a_trace_goes_from_the_client_through_attempts_to_the_engine(collector: Collector, tmp_path: Path) -> None:
    engines = [Engine(1), Engine(0)]
    parent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    file = serving.fleet_file(
        tmp_path,
        [engine.url for engine in engines],
        pool={"api": "openai"},
        policies={"routing": "round-robin"},
        gateway={"tracing": True},
    )
    with serving.up(serving.gateway(file), 2) as front:
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
    parents = {trace.split("-")[2] for engine in engines for trace in engine.parents}
    assert parents == {span.span_id.hex() for span in attempts}, "each engine gets the context of its attempt"
    for span in requests:
        values = attributes(span)
        assert values["gen_ai.operation.name"] == "chat" and values["gen_ai.request.model"] == MODEL
        assert values["gen_ai.usage.input_tokens"] == 5 and values["gen_ai.usage.output_tokens"] == 3
        assert values["gen_ai.request.max_tokens"] == 9 and values["gen_ai.request.temperature"] == 0.5
        assert values["headway.outcome"] == "finished" and span.kind == 2
        own = [each for each in attempts if each.parent_span_id == span.span_id]
        assert values["headway.attempts"] == len(own)
        inside = [(each.start_time_unix_nano, each.end_time_unix_nano) for each in own]
        assert all(span.start_time_unix_nano <= start <= end <= span.end_time_unix_nano for start, end in inside)
        assert all(before[1] <= after[0] for before, after in pairwise(inside))
    failed = [span for span in attempts if span.status.code == 2]
    assert len(failed) == 1 and attributes(failed[0])["error.type"] == "RefusedError"
    assert {attributes(span)["server.port"] for span in attempts} == {int(e.url.rsplit(":")[-1]) for e in engines}


def test_holds_and_judgements_are_spans(collector: Collector, tmp_path: Path) -> None:
    small = serving.emulator("--confidence", "0.7")
    with serving.closing(small):
        pool = {"gpu": "h100", "engine": "vllm-0.15", "endpoints": [small.url]}
        data = {
            "fleet": [{"name": "a", "model": MODEL, **pool}, {"name": "b", "model": "llama-3.1-8b", **pool}],
            "cascade": {
                "name": "best",
                "models": [MODEL, "llama-3.1-8b"],
                "judge": {"by": "confidence"},
                "policy": {"name": "thresholds", "thresholds": 75},
            },
            "policies": {"window": 1, **ORDER},
            "gateway": {"tracing": True, "scrape_period_s": 0.1},
        }
        (tmp_path / "fleet.yaml").write_text(yaml.safe_dump(data))
        with serving.up(serving.gateway(tmp_path / "fleet.yaml"), 2) as front:
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
    assert longest > 5e7, "one request was held until the other ended"


def test_without_tracing_opentelemetry_is_not_imported() -> None:
    modules = "headway.gateway.server.app, headway.serving.gateway"
    code = f"import sys, {modules}; sys.exit(any('opentelemetry' in m for m in sys.modules))"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_without_tracing_the_clients_context_is_passed_on(tmp_path: Path) -> None:
    engine = Engine(0)
    with serving.up(serving.gateway(serving.fleet_file(tmp_path, [engine.url], pool={"api": "openai"})), 1) as front:
        chat(front, max_tokens=2, headers={"traceparent": "00-1-2-01"}).json()
    engine.close()
    assert engine.parents == ["00-1-2-01"]
