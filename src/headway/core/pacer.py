"""The pace at which an answer is read, and when its reader runs dry.

From PASCAL (sections II-C, III, V-A), after Andes: a reader takes in one token every `tpot_s`. Tokens that come
earlier are kept for later; when the reader has read them all, the request is behind its pace.
"""

from __future__ import annotations

from msgspec import Struct

from headway.core.errors import HeadwayError


class Pacer(Struct, frozen=True, forbid_unknown_fields=True):
    """What a reader expects."""

    ttfat_s: float | None = 0.25
    """From the end of reasoning to the first answering token; None: reading starts with that token, however late."""
    tpot_s: float = 0.1
    """Time per token."""

    def __post_init__(self) -> None:
        if self.ttfat_s is not None and not 0 <= self.ttfat_s < float("inf"):
            raise HeadwayError(f"pacer: ttfat_s is {self.ttfat_s}; expected seconds, 0 or more, or null")
        if not 0 < self.tpot_s < float("inf"):
            raise HeadwayError(f"pacer: tpot_s is {self.tpot_s}; expected seconds, more than 0")

    def start_s(self, reasoning_end_s: float, answer_s: float) -> float | None:
        """When the first answering token is wanted: by the target, or when it came if that was before.

        NaN stands for what has not happened, or for a request that does not reason. None: nobody reads yet.
        """
        if self.ttfat_s is not None and reasoning_end_s == reasoning_end_s:
            wanted_s = reasoning_end_s + self.ttfat_s
            return answer_s if answer_s < wanted_s else wanted_s
        return answer_s if answer_s == answer_s else None

    def run_dry_s(self, start_s: float, answer_tokens: int) -> float:
        """When the next token is wanted after so many: until then the reader has something to read."""
        return start_s + answer_tokens * self.tpot_s
