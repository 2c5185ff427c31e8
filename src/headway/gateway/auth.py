"""API keys, known by their hashes, each with limits of its own; and the keys of administrators."""

from __future__ import annotations

import hashlib
import hmac
import math
from collections.abc import Callable, MutableMapping, Sequence
from datetime import UTC, datetime

from headway.gateway.errors import ApiError
from headway.gateway.settings import Key


class TokenBucket:
    """A bucket that fills at a steady rate, up to a minute's worth. Its level may become negative."""

    def __init__(self, per_minute: float, now: float) -> None:
        self._capacity, self._per_s = per_minute, per_minute / 60.0
        self._level, self._at_s = per_minute, now

    def _fill(self, now: float) -> None:
        self._level = min(self._level + (now - self._at_s) * self._per_s, self._capacity)
        self._at_s = now

    def wait_s(self, amount: float, now: float) -> float:
        """Seconds until this amount is there; more than the capacity waits for a full bucket."""
        self._fill(now)
        return max(min(amount, self._capacity) - self._level, 0.0) / self._per_s

    def withdraw(self, amount: float, now: float) -> None:
        """Withdraw an amount; a negative one is a deposit."""
        self._fill(now)
        self._level = min(self._level - amount, self._capacity)


class Caller:
    """A client with its key's tier and limits. Without a key, there are no limits."""

    def __init__(self, key: Key, clock: Callable[[], float]) -> None:
        self.owner, self.tenant, self.tier, self._clock = key.sha256, key.tenant, key.tier, clock
        self.expires = key.expires
        requests, tokens = key.requests_per_minute, key.tokens_per_minute
        self._requests = None if requests is None else TokenBucket(requests, clock())
        self._tokens = None if tokens is None else TokenBucket(tokens, clock())
        self.is_limited = not (requests is tokens is None)

    def reserve(self, tokens: int) -> None:
        """Withdraw one request and its tokens from the limits. ApiError (429) if a limit is reached."""
        now = self._clock()
        for bucket, amount, what in ((self._requests, 1, "requests"), (self._tokens, tokens, "tokens")):
            wait_s = 0.0 if bucket is None else bucket.wait_s(amount, now)
            if wait_s > 0:
                message = f"this key's limit of {what} per minute is reached"
                raise ApiError(429, message, "rate_limit_exceeded", retry_after_s=math.ceil(wait_s))
        if self._requests is not None:
            self._requests.withdraw(1, now)
        if self._tokens is not None:
            self._tokens.withdraw(tokens, now)

    def settle(self, reserved_tokens: int, used_tokens: int) -> None:
        """Correct a reservation by the tokens that the request has used."""
        if self._tokens is not None:
            self._tokens.withdraw(used_tokens - reserved_tokens, self._clock())


class ApiKeys:
    """The keys that clients may send. Without any, every client is served."""

    def __init__(self, keys: Sequence[str | Key], clock: Callable[[], float]) -> None:
        self._callers = [Caller(key if isinstance(key, Key) else Key(sha256=key), clock) for key in keys]
        self._without_key = Caller(Key(sha256=""), clock)

    def authenticate(self, headers: MutableMapping[str, str]) -> Caller:
        """The caller by its key, which is removed from the headers, so that engines do not see it. ApiError (401)."""
        if not self._callers:
            return self._without_key
        digest = _key_digest(headers)
        # The comparison takes the same time whichever key matches.
        matches = [caller for caller in self._callers if hmac.compare_digest(digest, caller.owner)]
        if not matches:
            raise _unknown_key()
        last_day = matches[0].expires
        if last_day is not None and datetime.now(UTC).date() > last_day:
            raise ApiError(401, "this API key has expired", "expired_api_key")
        return matches[0]

    def caller_of(self, owner: str) -> Caller:
        """The caller with this `owner`."""
        return next((caller for caller in self._callers if caller.owner == owner), self._without_key)


def check_admin(headers: MutableMapping[str, str], admin_keys: Sequence[str]) -> None:
    """ApiError (401) if the headers have none of these keys."""
    digest = _key_digest(headers)
    if not sum(hmac.compare_digest(digest, each) for each in admin_keys):
        raise _unknown_key()


def _unknown_key() -> ApiError:
    return ApiError(401, "an API key is needed: Authorization: Bearer KEY", "invalid_api_key")


def _key_digest(headers: MutableMapping[str, str]) -> str:
    """The SHA-256 of the key in OpenAI's or Anthropic's header, which is removed; empty without a key."""
    scheme, _, key = headers.pop("authorization", "").partition(" ")
    if scheme.lower() != "bearer":
        key = ""
    key = headers.pop("x-api-key", "") or key
    return hashlib.sha256(key.encode("latin-1")).hexdigest() if key else ""
