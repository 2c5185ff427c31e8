"""SageServe's queue manager for non-interactive work (section 6.2)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import inf

from headway.core.decision import Release
from headway.core.view import AdmissionView, ReplicaView, RequestView
from headway.policies.arguments import require_above, require_at_least, require_between
from headway.policies.endpoints import Silos, effective_use


class QueueManagerAdmission:
    """Batch requests are kept until an endpoint has room for them, or their time is running out.

    Batch are the requests of tier `batch_tier` and above. Every `interval_s` each endpoint, a model's replicas in one
    region, says how full it is (effective memory utilisation): below `threshold` it gets one request, below
    `low_threshold` two, those that wait longest; the least full is served first, as the paper leaves it open whose
    signal comes first. Which replica there is the router's to say. Pools whose names end in `interactive_suffix` do not
    count.

    A request that is `urgent_after_s` old goes at once, however full the endpoints are, and is of tier `urgent_tier`
    from then on: on a par with interactive work. So does one whose deadline is `margin_s` away; without a deadline of
    its own it has `default_deadline_s` from its arrival. The paper's are 10 h and 24 h; it neither says how often
    endpoints send signals nor has a margin.

    The paper would cut large jobs into chunks of a fixed size, but takes none to be large. A request here is one
    prompt, whose prefill the engine cuts into chunks itself.
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
    ) -> None:
        require_between("threshold", threshold, 0, 1)
        require_between("low_threshold", low_threshold, 0, threshold)
        require_at_least("urgent_after_s", urgent_after_s, 0)
        require_above("default_deadline_s", default_deadline_s, 0)
        require_at_least("margin_s", margin_s, 0)
        require_above("interval_s", interval_s, 0)
        self._silos = Silos(batch_tier, interactive_suffix, "")
        require_between("urgent_tier", urgent_tier, 0, batch_tier)
        self.interval_s = interval_s
        self._threshold, self._low_threshold = threshold, low_threshold
        self._urgent_after_s, self._margin_s = urgent_after_s, margin_s
        self._default_deadline_s = default_deadline_s
        self._urgent_tier = urgent_tier
        self._soonest_s = inf
        """The shortest time from arrival to urgency of any request so far."""

    def holds(self, request: RequestView) -> bool:
        if not self._silos.is_batch(request):
            return False
        self._soonest_s = min(self._soonest_s, self._urgent_s(request) - request.arrival_s)
        return True

    def release(self, view: AdmissionView) -> Sequence[Release]:
        going = list(self._urgent(view))
        urgent = {release.request for release in going}
        asking = self._asking(view.replicas, len(view.held) - len(going))
        others = (request.id for request in view.held if request.id not in urgent)
        return [*going, *(Release(request, region=region) for region, request in zip(asking, others, strict=False))]

    def _urgent(self, view: AdmissionView) -> Iterator[Release]:
        """Whose time is running out. They stand in order of arrival, so the young ones need no look."""
        for request in view.held:
            if request.arrival_s + self._soonest_s > view.now:
                return
            if self._urgent_s(request) <= view.now:
                yield Release(request.id, self._urgent_tier)

    def _urgent_s(self, request: RequestView) -> float:
        """When it goes at the latest."""
        deadline_s = request.deadline_s
        if deadline_s is None:
            deadline_s = request.arrival_s + self._default_deadline_s
        return min(request.arrival_s + self._urgent_after_s, deadline_s - self._margin_s)

    def _asking(self, replicas: Sequence[ReplicaView], most: int) -> list[str]:
        """The endpoint, by its region, of each request that is asked for, as far as there are so many."""
        endpoints: dict[str, list[ReplicaView]] = {}
        for replica in self._silos.serving(replicas, is_batch=True):
            if not replica.is_draining:
                endpoints.setdefault(replica.region, []).append(replica)
        asking: list[str] = []
        uses = {region: effective_use(endpoint) for region, endpoint in endpoints.items()} if most > 0 else {}
        for region in sorted(uses, key=lambda region: uses[region]):
            if uses[region] < self._threshold:
                asking += [region] * (1 + (uses[region] < self._low_threshold))
        return asking[:most]
