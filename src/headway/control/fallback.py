"""Fallbacks: when another model, or another pool of the same model, answers in place of the requested model. A request
may change its model only before its first token, because one answer cannot mix two models' tokens.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from heapq import heappop, heappush
from typing import Final

from msgspec import Struct

from headway.control.live import ENDED, Live
from headway.control.policies import FallbackConfig, FallbackReason
from headway.control.service import Service
from headway.core.fleet import Fallbacks

_KEPT_SHARE: Final = 0.1
"""Share of its requests that a slow model keeps."""


class FellBack(Struct, frozen=True, gc=False):
    """Why another model answers a request, and the request's original fields."""

    model: str
    """The requested model."""
    why: FallbackReason
    output_tokens: int
    reasoning_tokens: int
    output_id: int | None

    def restore_lengths(self, live: Live) -> None:
        """Restore the output length of the requested model's own answer."""
        live.output_tokens, live.reasoning_tokens = self.output_tokens, self.reasoning_tokens
        live.output_id = self.output_id


class Fallback:
    """The fallbacks of one model."""

    def __init__(self, home: Service, targets: Sequence[Service], config: FallbackConfig, fallbacks: Fallbacks) -> None:
        """`targets`: the fallback services, in order."""
        self.home, self.targets, self._config = home, targets, config
        self._fallbacks, self._are_same = fallbacks, fallbacks.are_same
        self._watch = TtftWatch(config) if "slow" in config.when else None

    def is_like(self, other: Fallback) -> bool:
        """Whether another fallback has the same configuration. The state of the two may differ."""
        same = self.home is other.home and self.targets == other.targets
        return same and self._config == other._config and self._fallbacks == other._fallbacks

    def allows(self, why: FallbackReason) -> bool:
        return why in self._config.when

    def shape_of(self, target: Service) -> str:
        """The workload's name for a fallback's model."""
        return self._fallbacks.standby_of.get(target.model, target.model)

    def reason(self, live: Live, now: float, is_first: bool, most_held: int | None) -> FallbackReason | None:
        """The reason for the request to leave its model; None: the request stays. `is_first`: whether the request was
        never placed. Must be called once per placement, because it counts the requests that a slow model keeps.
        """
        if not self.home.any_up:
            return "down" if self.allows("down") else None
        if self.allows("rejects") and most_held is not None and self.home.hold_queue.is_full(live, most_held):
            return "rejects"
        if self._watch is None or not is_first or self._watch.keeps(live, now):
            return None
        return "slow"

    def target(self, live: Live, after: Service | None = None) -> Service | None:
        """The fallback for a request: the first with room, else the first that may hold the request; None if there is
        none.

        `after`: a fallback that failed: only the fallbacks listed after it are tried. If `after` is not a fallback,
        all are tried.
        """
        first = self.targets.index(after) + 1 if after in self.targets else 0
        able = [service for service in self.targets[first:] if self._may_take(service, live)]
        return next((service for service in able if service.has_room(live)), able[0] if able else None)

    def _may_take(self, service: Service, live: Live) -> bool:
        if live.keeps_model or live.generated_tokens:
            answering = self.home.model if live.fallback is None else live.model
            if not self._are_same(answering, service.model):
                return False
        return service.any_up and (service.has_room(live) or not service.why_rejected(live))

    def may_return(self, live: Live) -> bool:
        """Whether the request may go back from its fallback to its own model."""
        has_begun = live.keeps_model or live.generated_tokens > 0
        return not has_begun or self._are_same(live.model, self.home.model)


class TtftWatch:
    """Detects whether too many of a model's requests miss their TTFT SLO.

    A request counts when its SLO's time is over: by then the request has its first token or has missed the SLO.
    Requests that end earlier without a token do not count, nor do unstreamed answers, because their TTFT is unknown.
    """

    def __init__(self, config: FallbackConfig) -> None:
        self._config = config
        self._waiting: list[tuple[float, int, Live]] = []
        """Heap of (deadline by the SLO, id, request)."""
        self._judged: deque[tuple[float, bool]] = deque()
        """(time, missed its SLO) of the requests in the window, oldest first."""
        self._num_missed = 0
        self._slow_since_s: float | None = None
        self._returned_s: float | None = None
        """Time at which the model last stopped being slow; None once the model gets all requests again."""
        self._credit = 0.0

    def keeps(self, live: Live, now: float) -> bool:
        """Whether the model keeps this arriving request. The TTFT of a kept request is watched."""
        self._judge(now)
        share = self._kept_share(now)
        self._credit += share
        if share < 1 and self._credit < 1:
            return False
        self._credit = self._credit - 1 if share < 1 else 0.0
        slo_s = self._config.ttft_s if live.slo_ttft_s is None else live.slo_ttft_s
        if slo_s is not None and live.is_streamed:
            heappush(self._waiting, (live.arrival_s + slo_s, live.id, live))
        return True

    def _judge(self, now: float) -> None:
        """Judge the requests whose deadline has passed, then the model."""
        waiting, judged, config = self._waiting, self._judged, self._config
        while waiting and waiting[0][0] <= now:
            end_s, _, live = heappop(waiting)
            has_token = live.first_token_s == live.first_token_s
            if live.fallback is None and (has_token or live.stage is not ENDED):
                is_missed = not live.first_token_s <= end_s
                judged.append((end_s, is_missed))
                self._num_missed += is_missed
        while judged and judged[0][0] <= now - config.window_s:
            self._num_missed -= judged.popleft()[1]
        share = self._num_missed / len(judged) if judged else 0.0
        if self._slow_since_s is None:
            if len(judged) >= config.min_requests and share >= config.miss_share:
                self._slow_since_s, self._returned_s, self._credit = now, None, 0.0
        elif now >= self._slow_since_s + config.window_s and share <= config.miss_share / 2:
            self._slow_since_s, self._returned_s = None, now

    def _kept_share(self, now: float) -> float:
        if self._slow_since_s is not None:
            return _KEPT_SHARE
        if self._returned_s is None:
            return 1.0
        passed_s = now - self._returned_s
        if passed_s >= self._config.return_s:
            self._returned_s = None
            return 1.0
        return max(passed_s / self._config.return_s, _KEPT_SHARE)
