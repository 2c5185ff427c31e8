"""Reads and writes the messages between Envoy and the picker.

Sources: the endpoint picker protocol of the Kubernetes Gateway API Inference Extension (proposal 004, version 1.0.0),
and Envoy's `envoy/service/ext_proc/v3/external_processor.proto`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from typing import Any, Final

from google.protobuf.message import DecodeError

from headway.gateway.errors import ApiError
from headway.gateway.framing import MAX_HEAD_BYTES, MAX_HEADERS
from headway.gateway.picker import ext_proc_pb2 as pb
from headway.gateway.picker import wire

DESTINATION = "x-gateway-destination-endpoint"
"""The header, and the metadata key, with the addresses for Envoy in order of preference."""
SERVED = "x-gateway-destination-endpoint-served"
"""The metadata key with the address that Envoy used."""
PREFILLER = "x-prefiller-host-port"
"""llm-d's header with the address of the prefill replica, for the sidecar of the decode replica."""
OBJECTIVE = "x-llm-d-inference-objective", "x-gateway-inference-objective"
FAIRNESS_ID = "x-llm-d-inference-fairness-id", "x-gateway-inference-fairness-id"
MODEL_REWRITE = "x-llm-d-model-name-rewrite", "x-gateway-model-name-rewrite"
"""Header names of llm-d's router (`pkg/epp/metadata/consts.go`), the current one first, then its older alias."""
DROPPED_REASON = "x-llm-d-request-dropped-reason"
_DROPPED_REASONS = {
    "shed": "rejected-saturated",
    "queue_full": "rejected-saturated",
    "no_capacity": "rejected-no-endpoints",
    "timeout": "rejected-ttl-expired",
    "shutting_down": "rejected-shutting-down",
}
"""llm-d's names of the reasons by error code. Other codes are used as they are."""
_NAMESPACE, _SUBSET_NAMESPACE = "envoy.lb", "envoy.lb.subset_hint"
_SUBSET = "x-gateway-destination-endpoint-subset"
_CHUNK_BYTES = 62_000
"""Envoy recommends chunks of at most 64 KiB."""
_COMMON = "response", "header_mutation"
_PART = "response", "body_mutation", "streamed_response"
_REQUEST_HEADERS: Final = wire.path(pb.ProcessingResponse, "request_headers", *_COMMON)
_REQUEST_BODY_HEADERS: Final = wire.path(pb.ProcessingResponse, "request_body", *_COMMON)
_REQUEST_BODY: Final = wire.path(pb.ProcessingResponse, "request_body", "response", "body_mutation", "body")
_REQUEST_PART: Final = wire.path(pb.ProcessingResponse, "request_body", *_PART)
_RESPONSE_HEADERS: Final = wire.path(pb.ProcessingResponse, "response_headers", *_COMMON)
_RESPONSE_PART: Final = wire.path(pb.ProcessingResponse, "response_body", *_PART)
Headers = Mapping[str, str]


def _encoded(response: pb.ProcessingResponse) -> bytes:
    data: bytes = response.SerializeToString()
    return data


CONTINUE_HEADERS = _encoded(pb.ProcessingResponse(request_headers=pb.HeadersResponse()))
CONTINUE_REQUEST_TRAILERS = _encoded(pb.ProcessingResponse(request_trailers=pb.TrailersResponse()))
CONTINUE_RESPONSE_TRAILERS = _encoded(pb.ProcessingResponse(response_trailers=pb.TrailersResponse()))
CONTINUE_RESPONSE_BODY = _encoded(pb.ProcessingResponse(response_body=pb.BodyResponse()))


# Messages from Envoy.


def request_headers_of(sent: pb.HeaderMap) -> dict[str, str]:
    """A request's headers. Raises ApiError if they exceed the gateway's own limits, because few bytes can make many
    objects."""
    if len(sent.headers) > MAX_HEADERS or sent.ByteSize() > MAX_HEAD_BYTES:
        what = f"more than {MAX_HEADERS} headers, or {MAX_HEAD_BYTES:,} bytes of them"
        raise ApiError(431, what, "headers_too_long")
    return headers_of(sent)


def headers_of(sent: pb.HeaderMap) -> dict[str, str]:
    """Headers by name; Envoy writes names in lower case. Of several values the first counts, because nothing on the way
    can have added the first."""
    headers: dict[str, str] = {}
    for each in sent.headers:
        headers.setdefault(each.key, each.raw_value.decode("latin-1") if each.raw_value else each.value)
    return headers


def _metadata(message: pb.ProcessingRequest, namespace: str, key: str) -> Any:
    """A value of the filters' metadata, as in JSON; None if it is absent."""
    if not message.HasField("metadata_context") or namespace not in message.metadata_context.filter_metadata:
        return None
    fields = message.metadata_context.filter_metadata[namespace].fields
    if key not in fields:
        return None
    value = fields[key]
    if value.HasField("list_value"):
        return [each.string_value for each in value.list_value.values]
    return value.string_value


def header_of(headers: Headers, names: Iterable[str]) -> str:
    """The value of the first of these headers that a request has; empty if it has none."""
    return next((value for name in names if (value := headers.get(name, "").strip())), "")


def decoded(data: bytes) -> pb.ProcessingRequest | None:
    """A message from Envoy; None if the data cannot be decoded."""
    try:
        message: pb.ProcessingRequest = pb.ProcessingRequest.FromString(data)
    except DecodeError:
        return None
    return message


def invalid_message(what: str) -> ApiError:
    """The error of a call with messages that break the protocol."""
    return ApiError(400, f"ext_proc: {what}", "invalid_ext_proc")


def mode_name(mode: int) -> str:
    """The name of a `BodySendMode`, or the number of an unknown mode."""
    names = {number: name for name, number in pb.BodySendMode.items()}
    return str(names.get(mode, mode))


def status_of(headers: Headers) -> int:
    """The status of an engine's answer; 0 if there is none."""
    text = headers.get(":status", "")
    return int(text) if len(text) == 3 and text.isascii() and text.isdecimal() else 0


def subset_of(message: pb.ProcessingRequest) -> frozenset[str] | None:
    """The addresses (`ip:port`) that the picker must choose from; None if any is allowed."""
    value = _metadata(message, _SUBSET_NAMESPACE, _SUBSET)
    if value is None:
        return None
    addresses = value if isinstance(value, list) else value.split(",")
    return frozenset(address.strip() for address in addresses)


def served_of(message: pb.ProcessingRequest) -> str | None:
    """The address to which Envoy sent the request; None if Envoy does not report it."""
    value = _metadata(message, _NAMESPACE, SERVED)
    return value if isinstance(value, str) and value else None


# Messages from the picker.


# Concatenated encoded messages are one message with the fields of both.


def picked(
    endpoints: str,
    headers: Iterable[tuple[str, str]],
    removed: Iterable[str],
    body: bytes,
    is_new_body: bool,
    is_duplex: bool,
    is_last: bool = True,
) -> Iterator[bytes]:
    """The answer to a request's headers and body: the request's address, in a header and in metadata, and its changes.

    `is_duplex`: one answer for the headers, and one for each chunk of the body, of which the last ends the request if
    `is_last`. Otherwise one answer for the whole body. The answers are made lazily, so that Envoy has the address
    before the chunks are copied.
    """
    mutation = _mutation(headers)
    if is_new_body:
        mutation += wire.set_header("content-length", str(len(body)))
    answer = _destination(endpoints, tuple(removed), is_duplex)
    if mutation:
        answer += wire.within(_REQUEST_HEADERS if is_duplex else _REQUEST_BODY_HEADERS, mutation)
    if is_new_body and not is_duplex:
        answer += wire.within(_REQUEST_BODY, body)
    yield answer
    if is_duplex:
        yield from _chunks(body, is_last)


@lru_cache(maxsize=1024)
def _destination(endpoints: str, removed: tuple[str, ...], is_duplex: bool) -> bytes:
    """The part of the answer that is equal for all requests to these addresses."""
    mutation = wire.set_header(DESTINATION, endpoints)
    mutation += pb.HeaderMutation(remove_headers=removed).SerializeToString()
    metadata = pb.ProcessingResponse()
    metadata.dynamic_metadata.update({_NAMESPACE: {DESTINATION: endpoints}})
    return wire.within(_REQUEST_HEADERS if is_duplex else _REQUEST_BODY_HEADERS, mutation) + _encoded(metadata)


def _mutation(headers: Iterable[tuple[str, str]]) -> bytes:
    """A `HeaderMutation` that sets these headers."""
    return b"".join([wire.set_header(name, value) for name, value in headers])


def _chunks(body: bytes, is_last: bool) -> Iterator[bytes]:
    starts = range(0, len(body), _CHUNK_BYTES) or range(1)
    for start in starts:
        part = body[start : start + _CHUNK_BYTES]
        yield wire.streamed(_REQUEST_PART, part, is_last and start == starts[-1])


def sent_to(endpoint: str, headers: Iterable[tuple[str, str]], removed: Iterable[str]) -> bytes:
    """The answer to the headers of a request to this address, for any body."""
    mutation = _mutation(headers)
    return _destination(endpoint, tuple(removed), True) + wire.within(_REQUEST_HEADERS, mutation)


def passed_on(body: bytes, is_last: bool, mode: int) -> Iterable[bytes]:
    """The answers to a part of a request's body that is sent on unchanged."""
    if mode == pb.FULL_DUPLEX_STREAMED:
        return _chunks(body, is_last)
    return [_encoded(pb.ProcessingResponse(request_body=pb.BodyResponse()))]


def response_headers(headers: Iterable[tuple[str, str]]) -> bytes:
    """The answer to a response's headers."""
    return wire.within(_RESPONSE_HEADERS, _mutation(headers))


def streamed(body: bytes, is_last: bool) -> bytes:
    """A part of a response's body for the client, in full-duplex mode."""
    return wire.streamed(_RESPONSE_PART, body, is_last)


def replaced(body: bytes) -> bytes:
    """The answer to a part of a response's body, with its replacement."""
    response = pb.ProcessingResponse()
    mutation = response.response_body.response.body_mutation
    if body:
        mutation.body = body
    else:
        mutation.clear_body = True
    return _encoded(response)


def refusal(error: ApiError, request_id: str) -> bytes:
    """The response that Envoy gives the client in place of an engine's response."""
    headers = [("content-type", "application/json")]
    if request_id:
        headers.append(("x-request-id", request_id))
    if error.retry_after_s is not None:
        headers.append(("retry-after", str(error.retry_after_s)))
    if error.status in (429, 503, 504):
        headers.append((DROPPED_REASON, _DROPPED_REASONS.get(error.code, f"rejected-{error.code.replace('_', '-')}")))
    return _encoded(
        pb.ProcessingResponse(
            immediate_response=pb.ImmediateResponse(
                status=pb.HttpStatus(code=error.status),
                headers=pb.HeaderMutation.FromString(_mutation(headers)),
                body=error.json(),
                details=error.code,
            )
        )
    )


def wait_longer(seconds: float) -> bytes:
    """Make Envoy wait this long for the answer to its last message, if its configuration allows it."""
    response = pb.ProcessingResponse()
    response.override_message_timeout.FromMilliseconds(max(round(seconds * 1000), 1))
    return _encoded(response)
