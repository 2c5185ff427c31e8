"""Classes of requests that combos are reserved for (Cauchy, section 3.4)."""

from __future__ import annotations

from msgspec import Struct

from headway.core.errors import HeadwayError
from headway.core.view import ReplicaView, RequestView


class WorkloadClass(Struct, frozen=True, forbid_unknown_fields=True):
    """A class of requests with its own combos. A class is defined by prompt length and tier, because output lengths are
    unknown."""

    combos: tuple[str, ...]
    """Names of combos or pools; the name of a combo includes all its parts."""
    min_prompt_tokens: int = 0
    max_prompt_tokens: int | None = None
    """Longest prompt of the class; None: no limit."""
    tiers: tuple[int, ...] | None = None
    """Tiers of the class; None: all tiers."""

    def __post_init__(self) -> None:
        if not self.combos:
            raise HeadwayError("classes: combos: expected at least one name")
        if self.max_prompt_tokens is not None and self.max_prompt_tokens < self.min_prompt_tokens:
            most, least = self.max_prompt_tokens, self.min_prompt_tokens
            raise HeadwayError(f"classes: max_prompt_tokens: expected at least min_prompt_tokens ({least}), got {most}")

    def matches(self, request: RequestView) -> bool:
        if self.tiers is not None and request.tier not in self.tiers:
            return False
        tokens = request.prompt_tokens
        return tokens >= self.min_prompt_tokens and (self.max_prompt_tokens is None or tokens <= self.max_prompt_tokens)

    def includes(self, replica: ReplicaView) -> bool:
        return any(replica.pool in (name, f"{name}-prefill", f"{name}-decode") for name in self.combos)
