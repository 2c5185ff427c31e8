"""Quarantine: a request that broke two engines is sent to no third one, and neither is a copy of it for a while.

Nothing shows which of the requests that ran on an engine broke it. Three rules keep the innocent out. An
engine that had generated a few tokens of the request has survived its prompt, and its end is not the request's. One
engine is not enough: a second one must break with the request on it as well. And a body that an engine has answered
before breaks none: when all engines are killed at once, requests run on two of them.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable

from headway.gateway.errors import ApiError

SURVIVED_TOKENS = 4
"""An engine that has generated so many tokens of a request in one attempt did not break because of it."""
MAX_BROKEN = 2
"""Engines that a request may break."""
_STATUS, _CODE = 422, "request_quarantined"
"""Clients repeat a request by themselves after a 5xx, and would break the next engines."""
_MAX_KEPT, _MAX_ANSWERED = 1024, 4096
"""Quarantined bodies; bodies in each of two sets of answered ones."""
_MAX_HASHED_BYTES = 1 << 18
"""Longer bodies are not remembered as answered: each request's hash takes time."""


class Quarantine:
    """The bodies of requests that broke engines, each for `keep_s` seconds. Time is an argument.

    The processes of a gateway send each other these digests. Each has a list of its own of bodies that were answered.
    """

    def __init__(self, keep_s: float) -> None:
        self.keep_s = keep_s
        self.until_s: OrderedDict[bytes, float] = OrderedDict()
        """Until when copies of a body are refused, by its digest, the oldest first. Empty: nothing is to be checked."""
        self.listeners: list[Callable[[bytes, float], None]] = []
        """Called with the digest of a body, and until when it is refused, unless that was known."""
        self._answered: set[int] = set()
        """Hashes of bodies that engines have answered lately."""
        self._answered_before: set[int] = set()
        """The same of those before."""

    def answered(self, body: bytes) -> None:
        """An engine has answered a request with this body."""
        if len(body) <= _MAX_HASHED_BYTES:
            self._answered.add(hash(body))
            if len(self._answered) >= _MAX_ANSWERED:
                self._answered_before, self._answered = self._answered, set()

    def is_harmless(self, body: bytes) -> bool:
        """An engine has answered a request with this body lately."""
        if len(body) > _MAX_HASHED_BYTES:
            return False
        key = hash(body)
        return key in self._answered or key in self._answered_before

    def add(self, body: bytes, now: float) -> None:
        """Refuse copies of this body from now on. Beyond a limit, the oldest body is forgotten."""
        if self.keep_s:
            self.hold(_digest(body), now + self.keep_s)

    def hold(self, digest: bytes, until_s: float) -> None:
        """Refuse copies of the body with this digest, which this process or another one has found out."""
        if self.until_s.get(digest, 0.0) >= until_s:
            return
        self.until_s.pop(digest, None)
        self.until_s[digest] = until_s
        if len(self.until_s) > _MAX_KEPT:
            self.until_s.popitem(last=False)
        for listener in self.listeners:
            listener(digest, until_s)

    def held(self) -> list[tuple[bytes, float]]:
        """The digests of all quarantined bodies, and until when they are refused."""
        return list(self.until_s.items())

    def check(self, body: bytes, now: float) -> None:
        """ApiError if a copy of this body broke engines, unless this process knows that it does not."""
        digest = _digest(body)
        until_s = self.until_s.get(digest)
        if until_s is None or self.is_harmless(body):
            return
        if until_s > now:
            what = f"a request with the same body broke {MAX_BROKEN} engines and is quarantined"
            raise ApiError(_STATUS, what, _CODE)
        del self.until_s[digest]


def _digest(body: bytes) -> bytes:
    """The same in every process, unlike Python's own hashes."""
    return hashlib.blake2b(body, digest_size=16).digest()


class BrokenEngines:
    """The engines that broke while they ran one request, as far as it may be the cause."""

    def __init__(self) -> None:
        self._names: list[str] = []

    def count(self, name: str, generated_tokens: int) -> None:
        """An engine broke off, after it had generated so many tokens of the request in this attempt."""
        if generated_tokens < SURVIVED_TOKENS:
            if name not in self._names:
                self._names.append(name)
        else:
            self._names.clear()

    @property
    def is_quarantined(self) -> bool:
        return len(self._names) >= MAX_BROKEN

    def error(self) -> ApiError:
        """The client's error for a request on which these engines broke."""
        names = " and ".join(self._names)
        what = f"{names} broke off while they ran the request: it is quarantined, and sent to no other engine"
        return ApiError(_STATUS, what, _CODE)
