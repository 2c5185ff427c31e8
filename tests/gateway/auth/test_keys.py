"""API keys: token buckets, limits of each key, expiry, and the two headers that carry a key."""

from __future__ import annotations

import datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("httptools")

import serving
from headway.gateway.auth.keys import ApiKeys, check_admin
from headway.gateway.errors import ApiError
from headway.gateway.settings import Key
from headway.limits.rates import TokenBucket
from keys import ADMIN, bearer, digest
from serving import chat, send


@given(st.floats(1, 1e4), st.lists(st.tuples(st.floats(0, 30), st.floats(0, 500)), max_size=40))
def test_a_bucket_never_gives_more_than_its_capacity_and_its_rate(
    per_minute: float, asked: list[tuple[float, float]]
) -> None:
    """A caller that waits for `wait_s` is served."""
    bucket, now, taken = TokenBucket(per_minute, 0.0), 0.0, []
    for pause_s, amount in asked:
        now += pause_s
        wait_s = bucket.wait_s(amount, now)
        if wait_s > 0:
            assert bucket.wait_s(amount, now + wait_s * 0.5) > 0
            now += wait_s * (1 + 1e-9) + 1e-9
            assert bucket.wait_s(amount, now) == pytest.approx(0.0, abs=1e-6)
        if amount <= per_minute:
            bucket.withdraw(amount, now)
            taken.append((now, amount))
    for i, (start_s, _) in enumerate(taken):
        so_far = 0.0
        for end_s, amount in taken[i:]:
            so_far += amount
            assert so_far <= per_minute * (1 + (end_s - start_s) / 60) * (1 + 1e-6) + 1e-3


def test_unused_tokens_are_returned_and_overdrafts_are_paid_back() -> None:
    now = 0.0
    keys = ApiKeys([Key(sha256=digest("k"), tokens_per_minute=600)], lambda: now)
    caller = keys.authenticate({"authorization": "Bearer k"})
    caller.reserve(500)
    with pytest.raises(ApiError) as error:
        caller.reserve(200)
    assert (error.value.status, error.value.retry_after_s) == (429, 10)  # 100 are missing, and 10 come a second
    caller.settle(500, 100)
    caller.reserve(200)
    caller.settle(200, 900)  # more than was reserved
    with pytest.raises(ApiError) as error:
        caller.reserve(1)
    assert error.value.retry_after_s == 41  # 400 owed, and 1
    now = 41.0
    caller.reserve(1)


def test_keys_expire_after_their_last_day() -> None:
    today = datetime.datetime.now(datetime.UTC).date()
    day = datetime.timedelta(days=1)
    keys = ApiKeys(
        [Key(sha256=digest("old"), expires=today - day), Key(sha256=digest("new"), expires=today + day)], float
    )
    keys.authenticate({"authorization": "Bearer new"})
    with pytest.raises(ApiError, match="expired"):
        keys.authenticate({"authorization": "Bearer old"})


def test_a_key_comes_in_either_header_and_is_removed_from_the_headers() -> None:
    keys = ApiKeys([digest("k")], float)
    for headers in ({"authorization": "Bearer k", "a": "b"}, {"x-api-key": "k", "a": "b"}):
        assert keys.authenticate(headers).owner == digest("k") and headers == {"a": "b"}
    for wrong in ({}, {"authorization": "k"}, {"x-api-key": ""}, {"x-api-key": "j"}):
        with pytest.raises(ApiError):
            keys.authenticate(dict(wrong))


def test_only_admin_keys_are_admins() -> None:
    check_admin({"authorization": "Bearer root"}, [digest("other"), digest("root")])
    for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": "root"}):
        with pytest.raises(ApiError) as error:
            check_admin(headers, [digest("root")])
        assert error.value.status == 401


# In front of engines.


def test_each_key_has_limits_of_its_own(keyed_front: serving.Process) -> None:
    replies = [chat(keyed_front, headers=bearer("few"), max_tokens=1) for _ in range(3)]
    refusals = [(reply.status, reply.headers.get("retry-after")) for reply in replies]
    error = replies[2].json()["error"]
    assert refusals == [(200, None), (200, None), (429, "30")]
    assert error["type"] == "rate_limit_error" and error["code"] == "rate_limit_exceeded"
    assert chat(keyed_front, headers=bearer("free"), max_tokens=1).json()["usage"]
    for reply in replies[:2]:
        reply.json()


def test_used_tokens_count_in_place_of_reserved_ones(keyed_front: serving.Process) -> None:
    """Requests that use 5 of 60 tokens a minute leave room for others; one that may use 59 does not fit."""
    for _ in range(3):
        assert chat(keyed_front, "a", headers=bearer("short"), max_tokens=3).json()["usage"]["completion_tokens"] == 3
    reply = chat(keyed_front, "a", headers=bearer("short"), max_tokens=59)
    assert reply.status == 429 and "tokens per minute" in reply.json()["error"]["message"]
    assert chat(keyed_front, "a", headers=bearer("short"), max_tokens=3).json()["usage"]


def test_a_key_has_a_most_urgent_tier(keyed_front: serving.Process) -> None:
    for tier in (0, 2, 7):
        chat(keyed_front, headers=bearer("patient"), max_tokens=1, priority=tier).json()
    page = send(keyed_front, "/metrics").text()
    finished = 'headway_requests_total{{model="qwen3-8b",pool="pool",tier="{}",outcome="finished"}}'
    assert f"{finished.format(3)} 2" in page and f"{finished.format(7)} 1" in page
    assert finished.format(2) not in page


def test_expired_and_admin_keys_are_refused_by_engines_endpoints(keyed_front: serving.Process) -> None:
    assert chat(keyed_front, headers=bearer("late")).json()["error"]["code"] == "expired_api_key"
    assert chat(keyed_front, headers=ADMIN).json()["error"]["code"] == "invalid_api_key"
