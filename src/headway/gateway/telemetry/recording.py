"""Records of a served run in the simulator's format, so that a served day can be simulated again."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from time import time

from headway.control.live import Live
from headway.control.recorder import Recorder
from headway.core.record import Records, ReplicaRecord
from headway.gateway.names import KnownNames
from headway.records.parts import Rows, assemble
from headway.workload.readers.run_parts import Arrival, RunState

_MAX_REGIONS = 1 << 15
_MAX_TENANTS = (1 << 15) - 2
"""Maximum number of tenants with a recorded name, because their codes have two bytes. Later tenants are recorded as
`other`."""


class Recording:
    """The requests of one run. A disabled recording keeps nothing, so that memory does not grow."""

    def __init__(self, enabled: bool, write: Callable[[Rows], None] | None = None, has_fallbacks: bool = False) -> None:
        """`write` takes the rows at each `flush`; without it, all rows are kept. `has_fallbacks`: whether fallbacks are
        recorded."""
        self.enabled, self._write = enabled, write
        self.recorder = Recorder(has_fallbacks and enabled)
        self.num_requests = self.num_waiting = 0
        """(number of recorded requests, number of those that are not flushed)."""
        self._arrivals: list[Arrival] = []
        self._flushed: list[Rows] = []
        self._regions: set[str] = set()
        self._tenants = KnownNames(_MAX_TENANTS)
        self._started_s: float | None = None
        self.is_written = enabled and write is not None

    def add(
        self,
        live: Live,
        cascade: str = "",
        request_id: str = "",
        longest_gap_s: float = 0.0,
        resumed_s: float | None = None,
    ) -> None:
        """Add a request that has ended. `cascade`: the cascade that it asked for, instead of a model. The other
        arguments are columns of `core.record`."""
        if not self.enabled:
            return
        nan, requested = float("nan"), live.model if live.fallback is None else live.fallback.model
        output_tokens = max(live.generated_tokens, 1)
        self._arrivals.append((
            live.id, live.arrival_s, live.prompt_tokens, output_tokens, cascade or requested, live.tier,
            min(live.reasoning_tokens, output_tokens), self._region(live.region),
            -1 if live.session_id is None else live.session_id,
            nan if live.slo_ttft_s is None else live.slo_ttft_s, nan if live.slo_tpot_s is None else live.slo_tpot_s,
            self._tenants.known(live.tenant) if live.tenant else "",
            live.quality if cascade else (), live.lengths if cascade else (), live.lora,
            request_id, longest_gap_s, nan if resumed_s is None else resumed_s, live.num_sequences,
        ))  # fmt: skip
        self.num_requests += 1
        self.num_waiting += 1

    def _region(self, name: str) -> str:
        """The recorded region name. Clients name regions, so regions beyond the largest code are recorded without a
        name."""
        if len(self._regions) >= _MAX_REGIONS - 1 and name not in self._regions:
            return ""
        self._regions.add(name)
        return name

    def flush(self, replicas: Iterable[ReplicaRecord], now: float, judge_usd: float = 0.0) -> None:
        """Give all rows since the last flush to `write`. `now` is on the clock of the requests' times."""
        if self._started_s is None:
            self._started_s = time() - now
        state = RunState(self._started_s, now, judge_usd, tuple(replicas))
        rows = Rows(self._arrivals, self.recorder.drain_requests(), self.recorder.segments.drain(), state)
        self._arrivals, self.num_waiting = [], 0
        (self._write or self._flushed.append)(rows)

    def records(self, replicas: Iterable[ReplicaRecord], end_s: float, judge_usd: float = 0.0) -> Records:
        """All requests that have ended, numbered in order of arrival; time starts with the first arrival. Only for a
        recording without `write`."""
        self.flush(replicas, end_s, judge_usd)
        return assemble([(rows.tables(), rows.state) for rows in self._flushed])
