"""Holds requests with late deadlines until they delay no other request."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import inf
from operator import attrgetter

from headway.core.decision import Release
from headway.core.record import Ended
from headway.core.view import AdmissionView, ReplicaView, RequestView
from headway.policies.arguments import require_above, require_at_least, require_between
from headway.policies.engine_pace import EngineSpeed, EngineSpeeds
from headway.policies.routing.work_left import MeanOutput, pending_tokens

_FORGET = 0.999
"""Each request divides the tightest known SLOs by this share, so that old SLOs lose their effect."""
_DEFAULT_TTFT_S, _DEFAULT_TPOT_S = 1.0, 0.05
"""SLOs assumed for requests that are not held, until some have SLOs."""


class ByDeadlineAdmission:
    """Holds requests that may wait: those with a deadline more than `least_s` after arrival and no SLO.

    A request's tier does not matter. Held requests are released, earliest deadline first, while a replica has room: no
    request waits there, its iterations take at most `share` of the tightest TPOT SLO of other requests, its prompts yet
    to compute take at most `share` of the tightest TTFT SLO of other requests, and at most `kv_share` of its KV blocks
    are in use. An idle replica always has room for one request. Each release is counted against the room; the router
    chooses the replica.

    A request is released at the latest `margin_s` before its deadline, or halfway to it if that is later.
    """

    def __init__(
        self,
        share: float = 0.5,
        kv_share: float = 0.8,
        least_s: float = 60.0,
        margin_s: float = 120.0,
        interval_s: float = 1.0,
    ) -> None:
        require_between(0, 1, share=share, kv_share=kv_share)
        require_at_least(0, least_s=least_s, margin_s=margin_s)
        require_above(0, interval_s=interval_s)
        self._share, self._kv_share = share, kv_share
        self._least_s, self._margin_s = least_s, margin_s
        self.interval_s = interval_s
        self._ttft_s, self._tpot_s = _DEFAULT_TTFT_S, _DEFAULT_TPOT_S
        """The tightest recent SLOs."""
        self._output = MeanOutput()
        self._speeds = EngineSpeeds()

    def holds(self, request: RequestView) -> bool:
        has_slo = (request.slo_ttft_s, request.slo_tpot_s, request.slo_e2e_s) != (None, None, None)
        if request.deadline_s is None or has_slo:
            self._ttft_s = min(self._ttft_s / _FORGET, request.slo_ttft_s or inf)
            self._tpot_s = min(self._tpot_s / _FORGET, request.slo_tpot_s or inf)
            return False
        return request.deadline_s - request.arrival_s > self._least_s

    def release(self, view: AdmissionView) -> Sequence[Release]:
        if not view.held:
            return ()
        rooms = [self._room(replica) for replica in _that_prefill(view.replicas)]
        released = []
        for request in sorted(view.held, key=attrgetter("deadline_s", "id")):
            if view.now >= self._latest_s(request):
                released.append(Release(request.id))
                continue
            tokens = request.prompt_tokens + request.generated_tokens
            room = next((room for room in rooms if room.takes(tokens)), None)
            if room is None:
                continue
            room.take(tokens)
            released.append(Release(request.id))
        return released

    def learn(self, record: Ended) -> None:
        self._output.learn(record)

    def _latest_s(self, request: RequestView) -> float:
        deadline_s = request.deadline_s or 0.0
        return max(deadline_s - self._margin_s, 0.5 * (request.arrival_s + deadline_s))

    def _room(self, replica: ReplicaView) -> _Room:
        speed = self._speeds.of(replica.pool, replica.times, replica.max_num_seqs)
        limits = self._share * min(self._ttft_s, 60.0), self._share * min(self._tpot_s, 60.0), self._kv_share
        return _Room(replica, speed, self._output.tokens, limits)


class _Room:
    """The room of one replica for held requests."""

    def __init__(
        self, replica: ReplicaView, speed: EngineSpeed, output_tokens: float, limits: tuple[float, float, float]
    ) -> None:
        self._speed, self._output_tokens = speed, output_tokens
        self._most_prompts_s, self._most_step_s, kv_share = limits
        self._num, self._most_num = replica.num_in_flight, replica.max_num_seqs
        self._held = replica.kv_blocks_used * replica.block_size_tokens
        self._most_held = kv_share * replica.kv_blocks_total * replica.block_size_tokens
        self._prompts_s = pending_tokens(replica) * speed.token_s
        self._is_open = not replica.num_waiting

    def takes(self, tokens: int) -> bool:
        """Whether one more request with this many prompt tokens delays no other request."""
        if not self._num:
            return True
        if not self._is_open or self._num >= self._most_num:
            return False
        held = self._held + tokens + self._output_tokens
        if held > self._most_held or self._prompts_s + tokens * self._speed.token_s > self._most_prompts_s:
            return False
        base_s, token_s = self._speed.line(self._num + 1)
        return base_s + token_s * held <= self._most_step_s

    def take(self, tokens: int) -> None:
        self._num += 1
        self._held += tokens
        self._prompts_s += tokens * self._speed.token_s


def _that_prefill(replicas: Iterable[ReplicaView]) -> list[ReplicaView]:
    staying = [replica for replica in replicas if not replica.is_draining]
    return sorted((r for r in staying if r.role != "decode"), key=lambda r: (r.num_in_flight, r.id))
