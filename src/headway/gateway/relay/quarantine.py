"""Quarantine: a request that broke two engines is barred from others, and so are its copies for a while.

It is unknown which of an engine's requests broke it. Three rules protect harmless requests. An engine that generated a
few tokens of the request survived its prompt, so the request did not break it. A second engine must also break while it
runs the request. And a body that an engine has answered before is harmless: when all engines are killed at once, a
request may be running on two of them.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable
from typing import Final

from headway.gateway.errors import ApiError

SURVIVED_TOKENS = 4
"""An engine that has generated this many tokens of a request in one attempt did not break because of it."""
MAX_BROKEN = 2
"""Number of engines that a request may break."""
_STATUS, _CODE = 422, "request_quarantined"
"""(status, code) of the error. The status is below 500, because clients retry by themselves after a 5xx and would break
the next engines."""
_MAX_KEPT: Final = 1024
"""Maximum number of quarantined bodies."""
_MAX_ANSWERED: Final = 4096
"""Maximum number of answered bodies in each of two sets."""
_MAX_HASHED_BYTES: Final = 1 << 18
"""Longer bodies are not remembered as answered, because hashing them takes time."""


class Quarantine:
    """Barred bodies of requests that broke engines, each for `keep_s` seconds. Time is an argument.

    The processes of a gateway exchange the digests. Each process has its own list of answered bodies.
    """

    def __init__(self, keep_s: float) -> None:
        self.keep_s = keep_s
        self.until_s: OrderedDict[bytes, float] = OrderedDict()
        """Maps the digest of each barred body to the time until which its copies are barred, oldest first. If empty, no
        check is needed."""
        self.listeners: list[Callable[[bytes, float], None]] = []
        """Called with (new digest, time until which the body is barred)."""
        self._answered: set[int] = set()
        """Hashes of recently answered bodies."""
        self._answered_before: set[int] = set()
        """Hashes of bodies answered earlier."""

    def answered(self, body: bytes) -> None:
        """Record that an engine has answered a request with this body."""
        if len(body) <= _MAX_HASHED_BYTES:
            self._answered.add(hash(body))
            if len(self._answered) >= _MAX_ANSWERED:
                self._answered_before, self._answered = self._answered, set()

    def is_harmless(self, body: bytes) -> bool:
        """Whether an engine has recently answered a request with this body."""
        if len(body) > _MAX_HASHED_BYTES:
            return False
        key = hash(body)
        return key in self._answered or key in self._answered_before

    def add(self, body: bytes, now: float) -> None:
        """Bar copies of this body from now on. Beyond the limit, the oldest body is forgotten."""
        if self.keep_s:
            self.hold(_digest(body), now + self.keep_s)

    def hold(self, digest: bytes, until_s: float) -> None:
        """Bar copies of the body with this digest, which this or another process has found."""
        if self.until_s.get(digest, 0.0) >= until_s:
            return
        self.until_s.pop(digest, None)
        self.until_s[digest] = until_s
        if len(self.until_s) > _MAX_KEPT:
            self.until_s.popitem(last=False)
        for listener in self.listeners:
            listener(digest, until_s)

    def held(self) -> list[tuple[bytes, float]]:
        """The digests of all quarantined bodies, and the times until which they are barred."""
        return list(self.until_s.items())

    def check(self, body: bytes, now: float) -> None:
        """Raises ApiError if a copy of this body broke engines, unless this process knows the body to be harmless."""
        digest = _digest(body)
        until_s = self.until_s.get(digest)
        if until_s is None or self.is_harmless(body):
            return
        if until_s > now:
            what = f"a request with the same body broke {MAX_BROKEN} engines and is quarantined"
            raise ApiError(_STATUS, what, _CODE)
        del self.until_s[digest]


def _digest(body: bytes) -> bytes:
    """A digest that is the same in every process, unlike Python's hashes."""
    return hashlib.blake2b(body, digest_size=16).digest()


class BrokenEngines:
    """The engines that broke while they ran one request, if the request may be the cause."""

    def __init__(self) -> None:
        self._names: list[str] = []

    def count(self, name: str, generated_tokens: int) -> None:
        """Count an engine that broke. `generated_tokens`: tokens that it had generated for the request in this
        attempt."""
        if generated_tokens < SURVIVED_TOKENS:
            if name not in self._names:
                self._names.append(name)
        else:
            self._names.clear()

    @property
    def is_quarantined(self) -> bool:
        return len(self._names) >= MAX_BROKEN

    def error(self) -> ApiError:
        """The client's error for a request that broke these engines."""
        names = " and ".join(self._names)
        what = f"{names} broke off while they ran the request: it is quarantined, and sent to no other engine"
        return ApiError(_STATUS, what, _CODE)
