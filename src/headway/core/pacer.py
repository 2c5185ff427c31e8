"""The reading pace of an answer, and when its reader runs out of tokens.

From PASCAL (sections II-C, III, V-A), after Andes: a reader reads one token every `tpot_s` seconds. Earlier tokens are
buffered; when the buffer is empty, the request is behind its pace.
"""

from __future__ import annotations

from msgspec import Struct

from headway.core.errors import HeadwayError


class Pacer(Struct, frozen=True, forbid_unknown_fields=True):
    """The pace of a reader."""

    ttfat_s: float | None = 0.25
    """Target time from the end of reasoning to the first answer token; None: reading starts with that token."""
    tpot_s: float = 0.1
    """Time to read one token."""

    def __post_init__(self) -> None:
        if self.ttfat_s is not None and not 0 <= self.ttfat_s < float("inf"):
            raise HeadwayError(f"pacer: ttfat_s is {self.ttfat_s}; expected seconds, 0 or more, or null")
        if not 0 < self.tpot_s < float("inf"):
            raise HeadwayError(f"pacer: tpot_s is {self.tpot_s}; expected seconds, more than 0")

    def start_s(self, reasoning_end_s: float, answer_s: float) -> float | None:
        """When reading starts: at the target, or at the first answer token if it arrived earlier. None: not yet.

        Arguments are NaN for events that have not happened; `reasoning_end_s` is NaN for a request without reasoning.
        """
        if self.ttfat_s is not None and reasoning_end_s == reasoning_end_s:
            wanted_s = reasoning_end_s + self.ttfat_s
            return answer_s if answer_s < wanted_s else wanted_s
        return answer_s if answer_s == answer_s else None

    def run_dry_s(self, start_s: float, answer_tokens: int) -> float:
        """Time at which the reader has read this many tokens and needs another token."""
        return start_s + answer_tokens * self.tpot_s


class Emission:
    """Send times of an answer's tokens: at most one token every `tpot_s` seconds, as early as possible.

    A reader with this pace reads every token at the same time as without pacing, so QoE is unchanged.
    """

    def __init__(self, tpot_s: float) -> None:
        self._tpot_s, self._free_s = tpot_s, 0.0

    def send_s(self, generated_s: float, num_tokens: int = 1) -> float:
        """When tokens that were generated together at `generated_s` are sent. Call it in order of generation."""
        send_s = max(generated_s, self._free_s)
        self._free_s = send_s + num_tokens * self._tpot_s
        return send_s
