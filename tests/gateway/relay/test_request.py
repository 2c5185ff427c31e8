"""Clients' requests: any body is a request or a client's error."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.gateway.errors import ApiError
from headway.gateway.relay.request import (
    CHAT,
    COMPLETIONS,
    EMBEDDINGS,
    MAX_NAME_CHARS,
    MAX_TOKENS,
    MESSAGES,
    PATHS,
    RESPONSES,
    ClientRequest,
)
from headway.gateway.relay.request_reader import read_request


@given(st.binary(max_size=200))
def test_any_body_is_a_request_or_a_clients_error(raw: bytes) -> None:
    for path in PATHS:
        try:
            read_request(path, raw, {})
        except ApiError as error:
            assert 400 <= error.status < 500


_ODD_VALUES: list[object] = [
    None, True, 0, -1, 7, 1e300, 10**30, "", "x" * 3000, [], [1, "a"], [[1], [2]], [None], {}, {"a": []},
]  # fmt: skip
_NAMES = "prompt messages input instructions system stream stream_options max_tokens n priority tools".split()


@given(st.dictionaries(st.sampled_from(_NAMES), st.sampled_from(_ODD_VALUES)))
def test_any_object_is_a_request_or_a_clients_error(body: dict[str, object]) -> None:
    for path in PATHS:
        try:
            request = read_request(path, json.dumps({**body, "model": "m"}).encode(), {})
        except ApiError as error:
            assert 400 <= error.status < 500
        else:
            assert type(request.can_resume) is bool and len(request.prefix()) <= 64


_NUMBERS = (
    "n best_of n_cmpl priority max_tokens max_completion_tokens max_output_tokens max_new_tokens n_predict min_tokens"
).split()


@pytest.mark.parametrize("value", [10**400, -(10**400), [10**400], {"max_tokens": 10**400, "budget_tokens": 10**400}])
@pytest.mark.parametrize("name", [*_NUMBERS, "thinking", "reasoning", "prompt", "input"])
def test_numbers_too_long_for_a_float_are_clients_errors_at_most(name: str, value: object) -> None:
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "prompt": "hi", "input": "hi", name: value}
    for path in PATHS:
        try:
            request = read_request(path, json.dumps(body).encode(), {})
        except ApiError as error:
            assert 400 <= error.status < 500
        else:
            assert 0 <= (request.max_tokens or 0) <= MAX_TOKENS
            assert request.cost().max_tokens >= 0 and len(request.prefix()) <= 64


_TYPES: dict[str, tuple[type, ...]] = {"model": (str,), "stream": (bool,), "n": (int, float), "priority": (int, float)}


@given(st.dictionaries(st.sampled_from([*_TYPES, "user"]), st.sampled_from([*_ODD_VALUES, False, 2.0])))
def test_the_first_field_of_a_wrong_type_is_named(body: dict[str, object]) -> None:
    """The types are exact: a boolean is no number."""
    wrong = [
        name for name, value in body.items() if name in _TYPES and value is not None and type(value) not in _TYPES[name]
    ]
    try:
        read_request(EMBEDDINGS, json.dumps({"input": "hi", **body}).encode(), {})
    except ApiError as error:
        assert ([error.param] if "must be of type" in error.message else []) == wrong[:1]
    else:
        assert not wrong


def read(path: str = CHAT, headers: dict[str, str] | None = None, **fields: object) -> ClientRequest:
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "prompt": "hi", "input": "hi", **fields}
    return read_request(path, json.dumps(body).encode(), headers or {})


@pytest.mark.parametrize(
    ("path", "fields", "text", "ids"),
    [
        (CHAT, {"messages": [{"role": "user", "content": [{"text": "a"}, {"image": "b"}]}]}, "user\na", None),
        (COMPLETIONS, {"prompt": ["a", "b"]}, "a\nb", None),
        (COMPLETIONS, {"prompt": [1, 2.0]}, "", [1, 2]),
        (EMBEDDINGS, {"input": ["a", "b"]}, "a\nb", None),
        (RESPONSES, {"instructions": "be", "input": [{"content": "a"}]}, "be\na", None),
        (MESSAGES, {"system": "be", "messages": [{"role": "user", "content": "a"}]}, "be\nuser\na", None),
    ],
)
def test_the_prompt_of_each_endpoint(path: str, fields: dict[str, object], text: str, ids: list[int] | None) -> None:
    request = read(path, **fields)
    assert (request.text, request.prompt_ids) == (text, ids)


@pytest.mark.parametrize(
    ("fields", "headers", "tier"),
    [
        ({}, {}, 0),
        ({"service_tier": "flex"}, {}, 1),
        ({"service_tier": "flex"}, {"x-headway-tier": "3"}, 3),
        ({"priority": 2}, {"x-headway-tier": "3"}, 2),
    ],
)
def test_the_tier_is_the_bodys_then_the_headers_then_openais(
    fields: dict[str, object], headers: dict[str, str], tier: int
) -> None:
    request = read(headers=headers, **fields)
    assert request.tier == tier
    assert request.is_flex == request.features(0.0).is_flex == ("service_tier" in fields)


@pytest.mark.parametrize(
    ("fields", "headers", "param"),
    [
        ({"model": 7}, {}, "model"),
        ({"stream": "yes"}, {}, "stream"),
        ({"n": 1.5}, {}, "n"),
        ({"priority": -1}, {}, "priority"),
        ({}, {"x-headway-tier": "high"}, "x-headway-tier"),
        ({}, {"x-slo-ttft-ms": "nan"}, "x-slo-ttft-ms"),
    ],
)
def test_errors_name_the_field(fields: dict[str, object], headers: dict[str, str], param: str) -> None:
    with pytest.raises(ApiError) as caught:
        read(headers=headers, **fields)
    assert (caught.value.status, caught.value.param) == (400, param)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (COMPLETIONS, {"prompt": "x", "max_tokens": 0, "echo": True, "logprobs": 1}), (COMPLETIONS, {"prompt": ""}),
        (COMPLETIONS, {"prompt_embeds": "AAAA", "max_tokens": 4}), (COMPLETIONS, {"prompt": {"prompt_string": "x"}}),
        (COMPLETIONS, {"prompt": [1, "a"]}), (COMPLETIONS, {"prompt": "x", "max_tokens": -1}), (CHAT, {}),
        (COMPLETIONS, {"prompt": "x", "max_tokens": "16"}), (CHAT, {"messages": []}), (CHAT, {"messages": [7]}),
        (CHAT, {"messages": {}}), (CHAT, {"messages": [{"role": "user"}], "stream_options": [], "max_tokens": {}}),
        (EMBEDDINGS, {"messages": [{"role": "user", "content": "x"}]}), (EMBEDDINGS, {"input": {"image": "a"}}),
        ("/pooling", {"input": "x"}), ("/classify", {"input": ["x"]}), ("/v1/messages/count_tokens", {"messages": []}),
        ("/v2/rerank", {"query": "q", "documents": [{"text": "d"}]}), ("/score", {"queries": "a", "documents": ["b"]}),
        (RESPONSES, {"previous_response_id": "resp_1", "input": None}), ("/tokenize", {"messages": []}),
    ],
)  # fmt: skip
def test_what_the_gateway_need_not_understand_is_the_engines(path: str, body: dict[str, object]) -> None:
    raw = json.dumps({**body, "model": "m"}).encode()
    request = read_request(path, raw, {})
    assert request.encoded(dict(request.body)) == raw
    assert len(request.features(0.0).prefix) <= 64 and (request.max_tokens or 0) >= 0


@pytest.mark.parametrize(
    ("path", "fields", "num"),
    [
        (CHAT, {}, 1),
        (CHAT, {"n": 3}, 3),
        (COMPLETIONS, {"prompt": ["a", "b"], "n": 3}, 6),
        (CHAT, {"n": None}, 1),
        (COMPLETIONS, {"prompt": [[1], [2, 3]]}, 2),
        (COMPLETIONS, {"prompt": [1, 2]}, 1),
        (CHAT, {"n": -4}, 1),
        (COMPLETIONS, {"best_of": 5, "n": 2}, 5),
        (COMPLETIONS, {"best_of": "x"}, 1),
        (CHAT, {"n": 10**30}, 1 << 16),
    ],
)
def test_a_request_costs_the_tokens_of_all_its_sequences(path: str, fields: dict[str, object], num: int) -> None:
    request = read(path, **fields)
    assert request.num_sequences == request.features(0.0).cost.num_sequences == num


@pytest.mark.parametrize(
    ("path", "fields", "expected"),
    [
        (CHAT, {}, True),
        (CHAT, {"messages": [7]}, False),
        (COMPLETIONS, {"prompt_embeds": "AAAA"}, False),
        (CHAT, {"n": 2}, False),
        (CHAT, {"tools": [{}]}, False),
        (COMPLETIONS, {"prompt": [1, 2]}, True),
        (COMPLETIONS, {"prompt": ["a", "b"]}, False),
        (RESPONSES, {}, False),
    ],
)
def test_answers_that_another_engine_can_continue(path: str, fields: dict[str, object], expected: bool) -> None:
    assert read(path, **fields).can_resume is expected


def test_prompts_that_begin_alike_share_segments() -> None:
    first, second = read(COMPLETIONS, prompt="a" * 2500 + "b" * 600), read(COMPLETIONS, prompt="a" * 2500 + "c" * 600)
    assert len(first.prefix()) == 3 and first.prefix()[:2] == second.prefix()[:2]
    assert first.prefix()[2] != second.prefix()[2] and read(COMPLETIONS, prompt="a" * 200).prefix() == ()


def test_features_have_no_text() -> None:
    request = read(headers={"x-session-id": "me", "x-headway-region": "eu", "x-slo-tpot-ms": "50"}, max_tokens=7)
    features = request.features(1.5)
    assert (features.arrival_s, features.num_chars, features.prompt_tokens) == (1.5, len(request.text), None)
    assert (features.max_tokens, features.region, features.slo_tpot_s) == (7, "eu", 0.05)
    again = read(headers={"x-session-id": "me"}).features(2.5)
    assert features.session_id == again.session_id is not None
    assert read(headers={"x-session-id": "you"}).features(2.5).session_id != again.session_id


def test_embeddings_are_no_stream() -> None:
    assert read(CHAT, stream=True).stream and not read(EMBEDDINGS, stream=True).stream
    with pytest.raises(ApiError, match="'model' has more than"):
        read(model="m" * (MAX_NAME_CHARS + 1))


def test_media_are_parts_of_a_message_and_no_text_about_them() -> None:
    about = 'an "image_url" and an "image"'
    picture = {"type": "image_url", "image_url": {"url": "http://a/b.png"}}
    assert not read(messages=[{"role": "user", "content": about}]).has_media
    assert read(messages=[{"role": "user", "content": "see"}, {"role": "user", "content": [picture]}]).has_media
    assert not read(messages=[{"role": "user", "content": [{"type": "text", "text": "see"}]}]).has_media
    assert read(MESSAGES, messages=[{"role": "user", "content": [{"type": "image", "source": {}}]}]).has_media
