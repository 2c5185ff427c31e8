"""SageServe's queue manager for non-interactive work (section 6.2)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import inf
from operator import attrgetter

from headway.core.decision import Release
from headway.core.record import Ended
from headway.core.view import AdmissionView, ReplicaView, RequestView
from headway.policies.arguments import require_above, require_at_least, require_between
from headway.policies.endpoints import Silos, effective_use, grouped
from headway.policies.routing.work_left import MeanOutput


class QueueManagerAdmission:
    """Hold batch requests until an endpoint has room for them, or until their deadline is near.

    Batch requests are those of tier `batch_tier` and above. An endpoint is the set of a model's replicas in one region.
    Every `interval_s`, each endpoint below `threshold` of effective memory utilisation sends a signal: it is sent one
    request, below `low_threshold` two. Requests that have waited longest go first. The paper does not say which
    endpoint is served first; here it is the least utilised one. The router chooses the replica. Pools whose names end
    in `interactive_suffix` are not counted.

    The paper does not say how often an endpoint signals, and a fixed number of signals would make the rate of batch
    work independent of the fleet. Here an endpoint sends as many signals as would fill its free memory, up to
    `threshold`, in `fill_s`: one at least, and no more than it has free seats. The size of a request is its prompt plus
    the mean output so far; prompts that wait to be computed count as memory in use.

    A request is urgent when it is `urgent_after_s` old, or `margin_s` before its deadline; a request without a deadline
    gets `default_deadline_s` after its arrival. Urgent requests are released at once, whatever the utilisation, and get
    tier `urgent_tier`: the tier of interactive work. The defaults of 10 h and 24 h are the paper's. The paper gives
    neither the reporting interval nor a margin.

    The paper cuts large jobs into chunks of a fixed size, but assumes no job to be large. Here a request is one prompt,
    and the engine itself chunks its prefill.
    """

    def __init__(
        self,
        threshold: float = 0.6,
        low_threshold: float = 0.5,
        urgent_after_s: float = 36_000.0,
        default_deadline_s: float = 86_400.0,
        margin_s: float = 3600.0,
        batch_tier: int = 2,
        urgent_tier: int = 0,
        interval_s: float = 1.0,
        interactive_suffix: str = "",
        fill_s: float = 10.0,
    ) -> None:
        require_between(0, 1, threshold=threshold)
        require_between(0, threshold, low_threshold=low_threshold)
        require_at_least(0, urgent_after_s=urgent_after_s, margin_s=margin_s)
        require_above(0, default_deadline_s=default_deadline_s, interval_s=interval_s, fill_s=fill_s)
        self._silos = Silos(batch_tier, interactive_suffix, "")
        require_between(0, batch_tier, urgent_tier=urgent_tier)
        self.interval_s = interval_s
        self._threshold, self._low_threshold = threshold, low_threshold
        self._urgent_after_s, self._margin_s = urgent_after_s, margin_s
        self._default_deadline_s = default_deadline_s
        self._urgent_tier = urgent_tier
        self._filled_share = min(interval_s / fill_s, 1.0)
        """Share of its free memory that an endpoint requests in an interval."""
        self._num_held, self._prompt_tokens, self._output = 0, 0.0, MeanOutput()
        """Batch requests so far, and their mean prompt and output lengths."""
        self._soonest_s = inf
        """The shortest time from arrival to urgency over all requests so far."""

    def holds(self, request: RequestView) -> bool:
        if not self._silos.is_batch(request):
            return False
        self._soonest_s = min(self._soonest_s, self._urgent_s(request) - request.arrival_s)
        self._num_held += 1
        self._prompt_tokens += (request.prompt_tokens - self._prompt_tokens) / self._num_held
        return True

    def release(self, view: AdmissionView) -> Sequence[Release]:
        releases = list(self._urgent(view))
        urgent = {release.request for release in releases}
        regions = self._regions_with_room(view.replicas, len(view.held) - len(releases))
        waiting = (request.id for request in view.held if request.id not in urgent)
        return [
            *releases,
            *(Release(request, region=region) for region, request in zip(regions, waiting, strict=False)),
        ]

    def learn(self, record: Ended) -> None:
        if self._silos.is_batch_tier(record.tier):
            self._output.learn(record)

    def _urgent(self, view: AdmissionView) -> Iterator[Release]:
        """Release urgent requests. Held requests are in order of arrival, so the search stops at the first request that
        is too young."""
        for request in view.held:
            if request.arrival_s + self._soonest_s > view.now:
                return
            if self._urgent_s(request) <= view.now:
                yield Release(request.id, self._urgent_tier)

    def _urgent_s(self, request: RequestView) -> float:
        deadline_s = request.deadline_s
        if deadline_s is None:
            deadline_s = request.arrival_s + self._default_deadline_s
        return min(request.arrival_s + self._urgent_after_s, deadline_s - self._margin_s)

    def _regions_with_room(self, replicas: Sequence[ReplicaView], most: int) -> list[str]:
        """The region of each requested release, least utilised endpoint first; at most `most` entries."""
        if most <= 0:
            return []
        staying = (replica for replica in self._silos.serving(replicas, is_batch=True) if not replica.is_draining)
        endpoints = grouped(staying, attrgetter("region"))
        regions: list[str] = []
        uses = {region: effective_use(endpoint) for region, endpoint in endpoints.items()}
        for region in sorted(uses, key=lambda region: uses[region]):
            if len(regions) < most and uses[region] < self._threshold:
                per_signal = 1 + (uses[region] < self._low_threshold)
                regions += [region] * max(per_signal, self._asked_for(endpoints[region], per_signal))
        return regions[:most]

    def _asked_for(self, endpoint: Sequence[ReplicaView], per_signal: int) -> int:
        """The number of requests that an endpoint's signals ask for in an interval, limited by its free slots."""
        total = sum(replica.kv_blocks_total * replica.block_size_tokens for replica in endpoint)
        taken = sum(replica.kv_blocks_used * replica.block_size_tokens for replica in endpoint)
        taken += sum(replica.prefill_tokens_left for replica in endpoint)
        seats = sum(max(replica.max_num_seqs - replica.num_in_flight, 0) for replica in endpoint)
        room = max(self._threshold * total - taken, 0.0) / (self._prompt_tokens + self._output.tokens)
        return min(int(self._filled_share * room) * per_signal, int(room), seats)
