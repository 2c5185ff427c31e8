"""API keys, stored as hashes, each with its own limits; and the keys of administrators."""

from __future__ import annotations

import hashlib
import hmac
import math
from collections import Counter
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from datetime import UTC, datetime

from headway.gateway.errors import ApiError
from headway.gateway.settings import Key, key_id
from headway.limits.rates import RateLimit, Rates

MAX_COUNTED_KEYS = 1000
"""Keys with counters of their own. Further keys share the counters of `OTHER_KEYS`."""
OTHER_KEYS = "other"


class KeyCounts:
    """Counts of one key's use since the gateway's start."""

    __slots__ = ("num_requests", "num_tokens", "refused")

    def __init__(self) -> None:
        self.num_requests = self.num_tokens = 0
        """Number of ended requests, and the sum of their prompt and answer tokens."""
        self.refused: Counter[str] = Counter()
        """Maps each reason to the number of requests that were answered 429."""


class Caller:
    """A client with its key's tier and limits. Without a key, there are no limits."""

    def __init__(self, key: Key, clock: Callable[[], float], counts: Callable[[str], KeyCounts]) -> None:
        """`counts` returns the counters of a key."""
        self.owner, self._clock, self._counts = key.sha256, clock, counts
        self._rates = Rates()
        self._reported: tuple[RateLimit, ...] | None = None
        self.set(key)

    def set(self, key: Key) -> None:
        """Take over the settings of a key with the same hash. Tokens that were withdrawn from its limits stay
        withdrawn."""
        self.key, self.tenant, self.tier, self.expires = key, key.tenant, key.tier, key.expires
        self._rates.change(key.requests_per_minute, key.tokens_per_minute, self._clock())
        self.is_limited = bool(self._rates)

    def reserve(self, tokens: int) -> None:
        """Withdraw one request and its tokens from the limits. ApiError (429) if a limit is reached."""
        if not self.is_limited:
            return
        refused = self._rates.reserve(tokens, self._clock())
        if refused is not None:
            quantity, wait_s = refused
            message = f"this key's limit of {quantity} per minute is reached"
            raise ApiError(429, message, "rate_limit_exceeded", retry_after_s=math.ceil(wait_s), reason=quantity)

    def settle(self, reserved_tokens: int, used_tokens: int) -> None:
        """Correct a reservation by the tokens that a request has used. The reservation ends."""
        counts = self._counts(self.owner)
        counts.num_requests += 1
        counts.num_tokens += used_tokens
        self.give_back(reserved_tokens - used_tokens)

    def give_back(self, tokens: int) -> None:
        """Return reserved tokens to the key's rate; negative: withdraw more."""
        if self.is_limited:
            self._rates.give_back(tokens, self._clock())

    def count_refusal(self, error: ApiError) -> None:
        """Count a request that is refused because of a limit, or because its key cannot be checked."""
        if error.status == 429 or error.reason:
            self._counts(self.owner).refused[error.reason or error.code] += 1

    def limits(self) -> tuple[RateLimit, ...]:
        """The key's limits at this moment; in a worker, as the scheduler has reported them last."""
        if self._reported is not None:
            return self._reported
        return self._rates.state(self._clock())

    def report(self, limits: tuple[RateLimit, ...]) -> None:
        """Take over the state of the limits from the process that counts their use."""
        self._reported = limits


class RateHold:
    """A request's reservation in its caller's rates, from its admission to its end."""

    __slots__ = ("caller", "tokens")

    def __init__(self, caller: Caller, tokens: int) -> None:
        """ApiError (429) if a limit is reached."""
        caller.reserve(tokens)
        self.caller, self.tokens = caller, tokens

    def raise_to(self, tokens: int) -> None:
        """Raise the hold to the tokens that the request has already used."""
        if tokens > self.tokens:
            self.caller.give_back(self.tokens - tokens)
            self.tokens = tokens

    def give_back(self) -> None:
        """Undo the hold of a request that was not admitted."""
        self.caller.give_back(self.tokens)

    def settle(self, used_tokens: int) -> None:
        self.caller.settle(self.tokens, used_tokens)


class ApiKeys:
    """The keys that clients may send. Without keys and without a key store, every client is served."""

    def __init__(self, keys: Sequence[str | Key], clock: Callable[[], float], has_store: bool = False) -> None:
        """`has_store`: `replace_stored` will be called with the keys of a database."""
        self._clock, self._has_store = clock, has_store
        self._counts: dict[str, KeyCounts] = {}
        """Maps key ids to counters: at most `MAX_COUNTED_KEYS` keys, and one counter for all other keys."""
        self._callers: dict[str, Caller] = {}
        self._without_key = Caller(Key(sha256=""), clock, self._counts_of)
        self.anonymous: Caller | None = None
        """The caller of all requests if there are neither keys nor a key store; otherwise None."""
        self.stored: tuple[Key, ...] | None = None
        """The keys of the database. None if they were not read yet."""
        self.replace(keys)

    def replace(self, keys: Sequence[str | Key]) -> None:
        """Accept these keys of the fleet file from now on. A known key keeps the use of its limits."""
        self._own = [each if isinstance(each, Key) else Key(sha256=each) for each in keys]
        self._collect()

    def replace_stored(self, keys: Sequence[Key]) -> None:
        """From now on, accept these keys of the database in addition to the keys of the fleet file."""
        self.stored = tuple(keys)
        self._collect()

    def _collect(self) -> None:
        before, self._callers = self._callers, {}
        for key in (*self._own, *(self.stored or ())):
            if key.sha256 in self._callers:
                continue  # the first entry of a key counts
            caller = self._callers[key.sha256] = before.get(key.sha256) or Caller(key, self._clock, self._counts_of)
            if caller.key != key:
                caller.set(key)
        self.anonymous = None if self._callers or self._has_store else self._without_key

    def authenticate(self, headers: MutableMapping[str, str]) -> Caller:
        """The caller of a request, by its key. The key is removed from the headers, so that engines do not see it.
        Raises ApiError if the key is unknown or expired, or the key store cannot be used."""
        if self.anonymous is not None:
            return self.anonymous
        # The lookup time may depend on the digest, but nobody can find the key from a digest.
        digest = key_digest(headers)
        caller = self._callers.get(digest)
        if caller is None:
            if digest and self._has_store and self.stored is None:
                raise ApiError(503, "the key store cannot be used", "key_store_unavailable", retry_after_s=2)
            raise unknown_key()
        if caller.expires is not None and datetime.now(UTC).date() > caller.expires:
            raise ApiError(401, "this API key has expired", "expired_api_key")
        return caller

    def caller_of(self, owner: str) -> Caller:
        """The caller with this `owner`."""
        return self._callers.get(owner, self._without_key)

    def counts(self) -> Iterator[tuple[str, KeyCounts]]:
        """The counters by key id; "" stands for clients without a key."""
        yield from self._counts.items()

    def _counts_of(self, owner: str) -> KeyCounts:
        id = key_id(owner)
        if id not in self._counts and len(self._counts) >= MAX_COUNTED_KEYS:
            id = OTHER_KEYS
        counts = self._counts.get(id)
        if counts is None:
            counts = self._counts[id] = KeyCounts()
        return counts


def check_admin(headers: MutableMapping[str, str], admin_keys: Sequence[str]) -> None:
    """Raise ApiError (401) if the headers have none of these keys."""
    digest = key_digest(headers)
    if not sum(hmac.compare_digest(digest, each) for each in admin_keys):
        raise unknown_key()


def unknown_key() -> ApiError:
    """The error of a request that has no key which the gateway accepts."""
    return ApiError(401, "an API key is needed: Authorization: Bearer KEY", "invalid_api_key")


def key_digest(headers: MutableMapping[str, str]) -> str:
    """The SHA-256 of the key in OpenAI's or Anthropic's header; empty without a key. The header is removed."""
    scheme, _, key = headers.pop("authorization", "").partition(" ")
    if scheme.lower() != "bearer":
        key = ""
    key = headers.pop("x-api-key", "") or key
    return hashlib.sha256(key.encode("latin-1")).hexdigest() if key else ""
