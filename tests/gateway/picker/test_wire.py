"""Messages encoded by hand have the bytes of protobuf's own."""

from __future__ import annotations

import pytest

pytest.importorskip("grpc")

from hypothesis import given
from hypothesis import strategies as st

from headway.gateway.picker import ext_proc_pb2 as pb
from headway.gateway.picker import messages, wire

NAMES = st.text(st.characters(codec="ascii", categories=["L", "N"]), min_size=1, max_size=200)
VALUES = st.text(max_size=300)
BODIES = st.one_of(st.binary(max_size=300), st.integers(0, 70_000).map(lambda size: b"x" * size))
OVERWRITE = pb.HeaderValueOption.OVERWRITE_IF_EXISTS_OR_ADD


def mutation(headers: list[tuple[str, str]], removed: list[str] | None = None) -> pb.HeaderMutation:
    options = [
        pb.HeaderValueOption(
            header=pb.HeaderValue(key=name, raw_value=value.encode("latin-1", "replace")), append_action=OVERWRITE
        )
        for name, value in headers
    ]
    return pb.HeaderMutation(set_headers=options, remove_headers=removed or [])


def test_a_path_to_a_field_of_a_high_number() -> None:
    where = wire.path(pb.ProcessingResponse, "dynamic_metadata")
    found = pb.ProcessingResponse.FromString(wire.within(where, b""))
    assert found == pb.ProcessingResponse(dynamic_metadata={})


@given(st.lists(st.tuples(NAMES, VALUES), max_size=4))
def test_headers_of_an_answer(headers: list[tuple[str, str]]) -> None:
    common = pb.CommonResponse(header_mutation=mutation(headers))
    expected = pb.ProcessingResponse(response_headers=pb.HeadersResponse(response=common))
    assert messages.response_headers(headers) == expected.SerializeToString()


@given(BODIES, st.booleans())
def test_a_part_of_an_answer(body: bytes, is_last: bool) -> None:
    part = pb.StreamedBodyResponse(body=body, end_of_stream=is_last)
    common = pb.CommonResponse(body_mutation=pb.BodyMutation(streamed_response=part))
    expected = pb.ProcessingResponse(response_body=pb.BodyResponse(response=common))
    assert messages.streamed(body, is_last) == expected.SerializeToString()


@given(
    BODIES, st.lists(st.tuples(NAMES, VALUES), max_size=3), st.lists(NAMES, max_size=2), st.booleans(), st.booleans()
)
def test_the_first_answer_to_a_request(
    body: bytes, headers: list[tuple[str, str]], removed: list[str], is_new_body: bool, is_duplex: bool
) -> None:
    length = [("content-length", str(len(body)))] if is_new_body else []
    changed = mutation([(messages.DESTINATION, "10.0.0.1:80,10.0.0.2:80"), *headers, *length], removed)
    expected = pb.ProcessingResponse()
    answer = (expected.request_headers if is_duplex else expected.request_body).response
    answer.header_mutation.CopyFrom(changed)
    if is_new_body and not is_duplex:
        answer.body_mutation.body = body
    expected.dynamic_metadata.update({"envoy.lb": {messages.DESTINATION: "10.0.0.1:80,10.0.0.2:80"}})
    first, *parts = messages.picked("10.0.0.1:80,10.0.0.2:80", headers, removed, body, is_new_body, is_duplex)
    assert pb.ProcessingResponse.FromString(first) == expected
    told = [pb.ProcessingResponse.FromString(part).request_body.response.body_mutation for part in parts]
    assert b"".join(each.streamed_response.body for each in told) == (body if is_duplex else b"")
    assert [each.streamed_response.end_of_stream for each in told] == [False] * (len(told) - 1) + [True] * is_duplex
