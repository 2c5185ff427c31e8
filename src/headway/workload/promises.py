"""What requests were promised: to all of them, or by tier."""

from __future__ import annotations

from msgspec import Struct

from headway.core.errors import HeadwayError
from headway.workload.tiermix import MixName, shares


class Slo(Struct, frozen=True, forbid_unknown_fields=True):
    """What was promised to a request. Nothing = no promise."""

    ttft_s: float | None = None
    """Longest time to the first token."""
    tpot_s: float | None = None
    """Longest mean time per output token after the first."""
    e2e_s: float | None = None
    """Longest time from arrival to the last token."""
    deadline_after_s: float | None = None
    """Deadline, counted from arrival, that deadline orderings (EDF) go by."""

    def __post_init__(self) -> None:
        positive(self, "ttft_s", "tpot_s", "e2e_s", "deadline_after_s")


class Tier(Struct, frozen=True, forbid_unknown_fields=True):
    """One tier of requests and what it was promised."""

    tier: int
    """0 is the most urgent."""
    share: float = 1.0
    """Its part of all requests, relative to the other tiers' shares."""
    ttft_s: float | None = None
    """As in `slo`, for this tier; nothing = what `slo` says."""
    tpot_s: float | None = None
    """As in `slo`."""
    e2e_s: float | None = None
    """As in `slo`."""
    deadline_after_s: float | None = None
    """As in `slo`."""
    timeout_s: float | None = None
    """As `timeout_s` of the workload, for this tier."""

    def __post_init__(self) -> None:
        if not 0 <= self.tier < 32768:
            raise ValueError(f"tier: {self.tier}; expected 0 or more")
        if not 0 <= self.share < float("inf"):
            raise ValueError(f"share: {self.share}; expected 0 or more")
        positive(self, "ttft_s", "tpot_s", "e2e_s", "deadline_after_s", "timeout_s")


class TierMix(Struct, frozen=True, forbid_unknown_fields=True):
    """Tiers by the name of a mix, as K-tier Llumnix is measured with. What they are promised stands in `slo`."""

    mix: MixName
    """uniform: all alike. gaussian: most in the middle. enterprise: 10% in tier 0, 20% in the last one."""
    num_tiers: int
    """K: tiers 0 to K - 1; 1 to 10."""

    def __post_init__(self) -> None:
        try:
            shares(self.mix, self.num_tiers)
        except HeadwayError as error:
            raise ValueError(str(error)) from None


def positive(struct: Struct, *names: str) -> None:
    """ValueError for a value of these that is not above 0; None is as good."""
    for name in names:
        value = getattr(struct, name)
        if value is not None and not 0 < value < float("inf"):
            raise ValueError(f"{name}: {value}; expected a number above 0")
