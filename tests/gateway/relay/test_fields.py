"""Requests with odd values in every field and header that the gateway reads."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

pytest.importorskip("httptools")

import serving
from gateway_in_process import Inside
from headway.control.live import Live
from headway.gateway.relay.request import PATHS
from headway.gateway.telemetry.recording import Recording


@pytest.fixture(scope="module", params=["edf", "freeness"])
def inside(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Inside]:
    """Gateways with policies that read many fields of a request."""
    policies = {
        "edf": {"ordering": "edf", "ordering_at": "gateway", "routing": "session-affinity", "window": 4},
        "freeness": {"routing": "headway", "ordering": "priority"},
    }[request.param]
    made = Inside(
        tmp_path_factory.mktemp("fleet"),
        policies=policies,
        gateway={"scrape_period_s": 3600.0, "explain": True, "max_body_bytes": 1 << 20},
    )
    yield made
    made.close()


_DEEP = b'{"a":' * 400 + b"1" + b"}" * 400
_RAW = [
    b"null", b"true", b"0", b"-1", b"1e999", b"-1e999", b"1e308", b"1.5", b"3.0", b"NaN", b"Infinity", b"1" * 40,
    b"-" + b"9" * 40, b"1" * 5000, b'""', b'"a"', b'"\\ud800"', b'"\\u0000"', b'"\xff"', b'"' + b"x" * 5000 + b'"',
    b"[]", b"[null]", b"[true]", b"[1,2]", b"[1,1e30]", b'["a",1]', b'[{"text":3}]', b'[{"content":[{"text":"a"}]}]',
    b'[{"role":7,"content":{"a":1}}]', b'[{"role":"user","content":"a"}]', b"[[1],[2]]", b"[[[]]]", b"{}", b'{"a":[]}',
    b'{"include_usage":7}', b"[" * 3000, b"[" * 3000 + b"]" * 3000, _DEEP, b'"priority"', b'"flex"', b"01", b"",
]  # fmt: skip
_NAMES = (
    "model messages prompt input instructions system stream stream_options max_tokens max_completion_tokens "
    "max_output_tokens n priority service_tier prompt_cache_key stop logit_bias tools logprobs return_token_ids "
    "response_format temperature seed user"
).split()
_HEADERS = (
    "x-llm-d-slo-ttft-ms x-slo-tpot-ms x-llm-d-slo-tpot-ms x-headway-tier x-session-id x-headway-region traceparent "
    "x-headway-explain x-request-id content-length authorization x-api-key tracestate"
).split()
_VALUES = [
    b"nan", b"-1", b"1e400", b"0", b"1", b"inf", b"1e-320", b"-0", b"", b" ", b"7.5", b"99999", b"9" * 5000,
    b"\xff\xfe", b"1_0", b"\xd9\xa1", b"Bearer", b"Bearer \xe9", b"00-1-2-01", b"x" * 3000, b"true", b"a\tb",
]  # fmt: skip
_FIELDS = st.lists(st.tuples(st.sampled_from(_NAMES), st.sampled_from(_RAW)), max_size=4)
_PAIRS = st.lists(st.tuples(st.sampled_from(_HEADERS), st.sampled_from(_VALUES)), max_size=3, unique_by=lambda p: p[0])


@given(_FIELDS, _PAIRS, st.sampled_from(PATHS))
@settings(
    max_examples=200,
    deadline=None,
    database=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
def test_any_values(
    inside: Inside, fields: list[tuple[str, bytes]], headers: list[tuple[str, bytes]], path: str
) -> None:
    """Fields may occur twice."""
    good = [
        ("model", json.dumps(serving.MODEL).encode()),
        ("messages", b'[{"role":"user","content":"a"}]'),
        ("prompt", b'"a"'),
        ("input", b'"a"'),
    ]
    body = b"{" + b",".join(b'"%s":%s' % (name.encode(), value) for name, value in (*good, *fields)) + b"}"
    inside.engines[0].then = "keep"
    reply = inside.run(inside.post(body, path, headers))
    assert reply.is_whole and (reply.status in (200, 400, 401, 404, 413, 415, 502)), (reply.status, body, headers)
    if reply.status >= 400:
        assert reply.error()["message"]
    assert inside.num_in_flight == 0 and not inside.gateway.driver.requests and not inside.faults


def test_numbers_are_forwarded_exactly(inside: Inside) -> None:
    inside.engines[0].then = "keep"
    odd: dict[str, Any] = {"seed": 10**30, "logit_bias": {"7": -100}, "max_tokens": 3.0, "priority": 2.0}
    assert inside.chat(**odd).status == 200
    sent = inside.engines[0].bodies[-1]
    assert sent["seed"] == 10**30 and sent["logit_bias"] == {"7": -100} and sent["max_tokens"] == 3


def test_records_keep_requests_of_more_regions_than_have_numbers() -> None:
    recording = Recording(enabled=True)
    for i in range(40_000):
        recording.add(Live(i, float(i), 10, 1, model="m", region=f"r{i}"))
    records = recording.records([], 1e5)
    assert len(records.workload["region"]) == 40_000 and len(records.regions) <= 1 << 15


def test_spans_are_exported_whatever_numbers_and_headers_a_request_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tracing = pytest.importorskip("headway.gateway.relay.tracing")
    from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
    from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

    sent: list[Any] = []

    class Encoding(SpanExporter):
        def export(self, spans: Any) -> SpanExportResult:
            sent.extend(encode_spans(spans).resource_spans[0].scope_spans[0].spans)
            return SpanExportResult.SUCCESS

    monkeypatch.setattr(tracing, "OTLPSpanExporter", Encoding)
    made = Inside(tmp_path, gateway={"scrape_period_s": 3600.0, "tracing": True})
    made.engines[0].then = "keep"
    values = ["", "00-1-2-01", "\xff", "x" * 3000, "00-" + "0" * 32 + "-" + "0" * 16 + "-01"]
    for value in values:
        odd: dict[str, Any] = {"seed": 10**30, "top_p": -(10**40), "temperature": 1e308}
        headers = [("traceparent", value.encode("latin-1")), ("tracestate", value.encode("latin-1"))]
        assert made.chat(headers=headers, **odd).status == 200
    made.close()
    assert len([span for span in sent if span.name.startswith("chat")]) == len(values) and not made.faults
