"""Limits as clients see them: OpenAI's `x-ratelimit-*` headers, and counters by key."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import serving
from headway.gateway.auth.keys import MAX_COUNTED_KEYS, OTHER_KEYS, ApiKeys
from headway.gateway.auth.limits import limit_headers
from headway.gateway.errors import ApiError
from headway.gateway.settings import Key
from headway.limits.rates import RateLimit, TokenBucket
from keys import bearer, digest
from serving import chat, send

pytest.importorskip("httptools")


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0ms"), (0.12, "120ms"), (8.64, "8.64s"), (59.996, "60s"), (360, "6m0s"), (90.2, "1m31s")]
)
def test_times_are_written_as_openai_writes_them(seconds: float, text: str) -> None:
    headers = dict(limit_headers([RateLimit("tokens", 100, 7, seconds)]))
    assert headers == {
        b"x-ratelimit-limit-tokens": b"100",
        b"x-ratelimit-remaining-tokens": b"7",
        b"x-ratelimit-reset-tokens": text.encode(),
    }


def test_a_bucket_tells_what_is_left_and_when_it_is_full() -> None:
    bucket = TokenBucket(60, 0.0)
    assert bucket.state("requests", 0.0) == RateLimit("requests", 60, 60, 0.0)
    bucket.withdraw(50, 0.0)
    assert bucket.state("requests", 10.0) == RateLimit("requests", 60, 20, 40.0)
    bucket.withdraw(30, 10.0)
    assert bucket.state("requests", 10.0) == RateLimit("requests", 60, 0, 70.0)


def test_a_changed_rate_keeps_what_was_used() -> None:
    now, key = 0.0, Key(sha256=digest("k"), requests_per_minute=10)
    keys = ApiKeys([key], lambda: now)
    caller = keys.caller_of(digest("k"))
    for _ in range(4):
        caller.reserve(1)
    keys.replace([Key(sha256=digest("k"), requests_per_minute=6, tokens_per_minute=100), digest("other")])
    assert keys.caller_of(digest("k")) is caller
    assert [limit.remaining for limit in caller.limits()] == [2, 100]
    keys.replace([digest("other")])
    with pytest.raises(ApiError):
        keys.authenticate({"authorization": "Bearer k"})
    caller.settle(0, 5)  # the request of a key that is gone


def test_counters_are_bounded() -> None:
    keys = ApiKeys([digest(str(i)) for i in range(MAX_COUNTED_KEYS + 20)], float)
    for i in range(MAX_COUNTED_KEYS + 20):
        keys.caller_of(digest(str(i))).settle(0, 3)
    counts = dict(keys.counts())
    assert len(counts) == MAX_COUNTED_KEYS + 1
    assert (counts[OTHER_KEYS].num_requests, counts[OTHER_KEYS].num_tokens) == (20, 60)


@pytest.fixture(scope="module", params=[1, 2])
def front(
    request: pytest.FixtureRequest, engines: list[serving.Process], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[serving.Process]:
    keys = [
        {"sha256": digest("both"), "requests_per_minute": 3, "tokens_per_minute": 6000},
        {"sha256": digest("few"), "requests_per_minute": 2},
        digest("free"),
    ]
    path = serving.fleet_file(tmp_path_factory.mktemp("fleet"), [engines[0].url], gateway={"api_keys": keys})
    with serving.up(serving.gateway(path, "--workers", str(request.param)), 1) as made:
        yield made


def _limits(reply: serving.Reply) -> dict[str, str]:
    return {name.removeprefix("x-ratelimit-"): v for name, v in reply.headers.items() if name.startswith("x-ratelimit")}


def test_answers_streams_and_refusals_carry_the_limits(front: serving.Process) -> None:
    reply = chat(front, headers=bearer("both"), max_tokens=100)
    limits = _limits(reply)
    assert reply.json()["usage"] and limits["limit-requests"] == "3" and limits["remaining-requests"] == "2"
    assert limits["limit-tokens"] == "6000" and 5800 < int(limits["remaining-tokens"]) < 6000
    assert limits["reset-requests"].endswith("s") and float(limits["reset-requests"][:-1]) <= 20
    reply = chat(front, headers=bearer("both"), max_tokens=5, stream=True)
    assert _limits(reply)["remaining-requests"] == "1" and list(reply.events())[-1] == "[DONE]"
    invalid = send(front, "/v1/chat/completions", {"model": 1, "messages": []}, bearer("both"))
    unknown = send(front, "/v1/chat/completions", {"model": "x", "messages": []}, bearer("both"))
    for each, status in ((invalid, 400), (unknown, 404)):
        assert each.status == status and "limit-requests" in _limits(each)
    free = chat(front, headers=bearer("free"), max_tokens=1)
    assert not _limits(free)
    for each in (invalid, unknown, free):
        each.close()


def test_requests_tokens_and_refusals_are_counted_by_key(front: serving.Process) -> None:
    replies = [chat(front, headers=bearer("few"), max_tokens=4) for _ in range(4)]
    assert [reply.status for reply in replies] == [200, 200, 429, 429]
    assert _limits(replies[-1])["remaining-requests"] == "0"
    used = sum(reply.json()["usage"]["total_tokens"] for reply in replies[:2])
    for reply in replies[2:]:
        reply.close()
    id = digest("few")[:12]

    def has_counts() -> bool:
        page = send(front, "/metrics").text()
        return (
            f'headway_key_requests_total{{key="{id}"}} 2' in page
            and f'headway_key_tokens_total{{key="{id}"}} {used}' in page
            and f'headway_key_refusals_total{{key="{id}",reason="requests"}} 2' in page
        )

    serving.until(has_counts)
