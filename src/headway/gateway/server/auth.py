"""Who may ask for what, and how much of it: API keys, known by their hashes, each with limits of its own."""

from __future__ import annotations

import hashlib
import hmac
import math
from collections.abc import Callable, MutableMapping, Sequence
from datetime import UTC, datetime

from headway.gateway.errors import ApiError
from headway.gateway.settings import Key

_UNKNOWN = ApiError(401, "an API key is needed: Authorization: Bearer KEY", "invalid_api_key")


class Bucket:
    """Fills at a steady rate, up to a minute's worth. What is taken after the fact may leave it in debt."""

    def __init__(self, per_minute: float, now: float) -> None:
        self._most, self._per_s = per_minute, per_minute / 60.0
        self._level, self._at_s = per_minute, now

    def _fill(self, now: float) -> None:
        self._level = min(self._level + (now - self._at_s) * self._per_s, self._most)
        self._at_s = now

    def wait_s(self, amount: float, now: float) -> float:
        """Until so much is there; what is more than there can ever be waits for a full bucket."""
        self._fill(now)
        return max(min(amount, self._most) - self._level, 0.0) / self._per_s

    def take(self, amount: float, now: float) -> None:
        """Less than nothing: give back."""
        self._fill(now)
        self._level = min(self._level - amount, self._most)


class Caller:
    """Who has a key."""

    def __init__(self, key: Key | None, clock: Callable[[], float]) -> None:
        self.owner = "" if key is None else key.sha256
        self.tier = 0 if key is None else key.tier
        self._key, self._clock = key, clock
        requests = None if key is None else key.requests_per_minute
        tokens = None if key is None else key.tokens_per_minute
        self._requests = None if requests is None else Bucket(requests, clock())
        self._tokens = None if tokens is None else Bucket(tokens, clock())
        self.is_limited = not (requests is tokens is None)

    @property
    def has_expired(self) -> bool:
        """Its last day is over."""
        last = None if self._key is None else self._key.expires
        return last is not None and datetime.now(UTC).date() > last

    def begin(self, tokens: int) -> None:
        """A request that may take so many tokens. ApiError where that is too much for now."""
        now = self._clock()
        for bucket, amount, what in ((self._requests, 1, "requests"), (self._tokens, tokens, "tokens")):
            wait_s = 0.0 if bucket is None else bucket.wait_s(amount, now)
            if wait_s > 0:
                message = f"this key's limit of {what} per minute is reached"
                raise ApiError(429, message, "rate_limit_exceeded", retry_after_s=math.ceil(wait_s))
        if self._requests is not None:
            self._requests.take(1, now)
        if self._tokens is not None:
            self._tokens.take(tokens, now)

    def end(self, begun_tokens: int, used_tokens: int) -> None:
        """It took so many."""
        if self._tokens is not None:
            self._tokens.take(used_tokens - begun_tokens, self._clock())


class Keys:
    """All of them."""

    def __init__(self, known: Sequence[str | Key], clock: Callable[[], float]) -> None:
        keys = [key if isinstance(key, Key) else Key(sha256=key) for key in known]
        self._callers = [Caller(key, clock) for key in keys]
        self._anybody = Caller(None, clock)

    def caller(self, headers: MutableMapping[str, str]) -> Caller:
        """Who sent these headers; a key that the gateway knows is taken out, as it is not the engines' business.

        ApiError for a client without one.
        """
        if not self._callers:
            return self._anybody
        digest = _digest(headers)
        # All are compared, each in constant time: how long it takes says nothing about them.
        found = [caller for caller in self._callers if hmac.compare_digest(digest, caller.owner)]
        if not found:
            raise _UNKNOWN
        if found[0].has_expired:
            raise ApiError(401, "this API key has expired", "expired_api_key")
        return found[0]

    def of(self, owner: str) -> Caller:
        """The one that a request's headers have told already."""
        return next((caller for caller in self._callers if caller.owner == owner), self._anybody)

    def tier(self, owner: str) -> int:
        """The most urgent tier of the requests that this owner left behind."""
        return self.of(owner).tier


def check_admin(headers: MutableMapping[str, str], known: Sequence[str]) -> None:
    """ApiError for who has none of these keys. Without any, there is nothing to be seen."""
    if not known:
        raise ApiError(404, "this gateway has no admin_keys", "not_found")
    digest = _digest(headers)
    if not sum(hmac.compare_digest(digest, each) for each in known):
        raise _UNKNOWN


def _digest(headers: MutableMapping[str, str]) -> str:
    """Of the key that came: OpenAI's way, or Anthropic's. Empty where none did."""
    scheme, _, key = headers.pop("authorization", "").partition(" ")
    if scheme.lower() != "bearer":
        key = ""
    key = headers.pop("x-api-key", "") or key
    return hashlib.sha256(key.encode("latin-1")).hexdigest() if key else ""
