"""The gateway put together: what arrives becomes a request of control's, and control's word is done."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from heapq import heapify
from itertools import count
from time import time
from typing import TYPE_CHECKING

from headway.control.decisions import Decision, DecisionObserver
from headway.control.live import HELD, Live
from headway.control.service import Service
from headway.core.errors import unknown
from headway.core.policy import Ordering
from headway.core.record import Outcome, Records
from headway.core.request import Phase
from headway.gateway.clock import Clock
from headway.gateway.errors import ApiError
from headway.gateway.fleet.combos import ComboInstances, in_order
from headway.gateway.fleet.lifetime import ReplicaLifetime
from headway.gateway.fleet.membership import LiveFleet
from headway.gateway.fleet.replica import LiveReplica, Slots
from headway.gateway.fleet.scaling import LiveScaling
from headway.gateway.plan import Plan, Served
from headway.gateway.relay.relay import Relay
from headway.gateway.relay.request import ClientRequest, Features
from headway.gateway.relay.writer import ResponseWriter
from headway.gateway.scheduling.driver import Driver
from headway.gateway.scheduling.in_flight import InFlightRequest, ReleaseReason
from headway.gateway.scheduling.scorer import AnswerScorer
from headway.gateway.server import dashboard
from headway.gateway.server.auth import ApiKeys, Caller
from headway.gateway.telemetry.metrics import PrometheusMetrics, Sample
from headway.gateway.telemetry.recording import Recording
from headway.gateway.telemetry.rolling_stats import RollingStats
from headway.gateway.upstream.dialects import ADAPTERS, Load
from headway.gateway.upstream.health import HealthMonitor
from headway.gateway.upstream.kv_snapshot import delete_stale

if TYPE_CHECKING:
    from headway.gateway.batch.service import BatchService
    from headway.gateway.relay.tracing import Tracing

_TOKENS_PER_CHAR = 0.25
"""Of prompts, until an engine has counted some."""
_LEARNING = 0.05
"""Weight of the newest count."""


class Gateway:
    """One process's. Made in the event loop that it runs in."""

    def __init__(
        self, plan: Plan, recording: Recording, decision_log: Callable[[Decision], None] | None = None
    ) -> None:
        self.plan, self.settings, self.recording = plan, plan.settings, recording
        self.clock = Clock(asyncio.get_running_loop())
        self.rolling_stats: RollingStats | None = None
        self.decisions = self._overheard(decision_log)
        ordering = plan.policies.ordering()
        self.replicas: list[LiveReplica] = []
        self.terms: list[ReplicaLifetime] = []
        """Each replica's pool, and when it was there."""
        self.units = ComboInstances()
        for served, url in in_order(plan.pools):
            self.new_replica(served, url, ordering)
        self.scaling = LiveScaling(self, ordering)
        self._scorer = None if plan.judge is None else AnswerScorer(plan.judge)
        self.request_metrics = PrometheusMetrics()
        self.driver = Driver(
            self.clock,
            self.replicas,
            plan.names,
            plan.policies,
            plan.seed,
            recording.recorder,
            self.request_metrics,
            self.settings.hold_s,
            self._scorer,
            self.scaling.serve,
            self.decisions,
            self._ended,
            lambda replica, role, now: self.terms[replica].roles.append((now, role)),
        )
        self.health = HealthMonitor(
            self.replicas, self.settings, self.scaling.up, self.driver.replica_down, self.driver.fail_over,
            self._observed,
        )  # fmt: skip
        self.tracing: Tracing | None = None
        self._new_relay: Callable[..., Relay] = Relay
        if self.settings.tracing:
            from headway.gateway.relay.tracing import Tracing

            self.tracing = Tracing()
            self._new_relay = self.tracing.relay
        self.keys = ApiKeys(self.settings.api_keys, lambda: self.clock.now)
        self.fleet = LiveFleet(self, ordering)
        self.batches: BatchService | None = None
        if self.settings.batches is not None:
            from headway.gateway.batch.service import BatchService

            self.batches = BatchService(self, self.settings.batches, lambda owner: self.keys.caller_of(owner).tier)
        self.is_closing = False
        self.on_gone: list[Callable[[LiveReplica], None]] = []
        """Told of replicas that do not come back."""
        pairs = [each for each in plan.pools if ADAPTERS[each.api].dual_dispatch and each.pool.role != "mixed"]
        self._halved = {each.pool.model.name for each in pairs}
        """Models of which a request is done by two replicas at the same time."""
        self._ids = count()
        self._arrived_s = 0.0
        self._tokens_per_char = _TOKENS_PER_CHAR
        self._reasons: dict[str, bool] = {}
        """Whether a model's last answer began with reasoning."""

    def _overheard(self, log: Callable[[Decision], None] | None) -> DecisionObserver | None:
        """What hears of decisions, if anybody may want to."""
        if log is None and not dashboard.is_there(self.settings):
            return None
        decisions = DecisionObserver(self._request_id, time() - self.clock.now)
        if log is not None:
            decisions.listeners.append(log)
        if dashboard.is_there(self.settings):
            self.rolling_stats = RollingStats(decisions)
        return decisions

    def _request_id(self, live: Live) -> str:
        return self.driver.requests[live.id].request_id or str(live.id)

    def new_replica(self, served: Served, url: str, ordering: Ordering) -> LiveReplica:
        """One more, of which nobody knows yet."""
        made = LiveReplica(
            len(self.replicas), served.pool, url, ADAPTERS[served.api], served.kv_blocks, ordering, self.plan.pacer,
            self.clock, self.settings.stale_s,
        )  # fmt: skip
        self.units.join(made, served)
        if served.slots is not None:
            made.kv_folder, made.slots = served.slots, Slots()
        self.replicas.append(made)
        self.terms.append(ReplicaLifetime(served.pool, self.clock.now, roles=[(self.clock.now, made.role)]))
        return made

    def start(self) -> None:
        """Look for the replicas, and let policies tick."""
        self.health.start()
        delete_stale({served.slots for served in self.plan.pools if served.slots is not None}, self.clock)
        self.driver.start_ticking()
        self.scaling.start()
        self.fleet.expect(self.plan.roles)
        if self.batches is not None:
            self.batches.start()

    async def stop(self) -> None:
        """Let streams end, for so long; then close."""
        self.is_closing = True
        if self.batches is not None:
            await self.batches.stop()
        end_s = self.clock.now + self.settings.drain_s
        while self.driver.requests and self.clock.now < end_s:
            await asyncio.sleep(0.05)
        for ticket in list(self.driver.requests.values()):
            self.driver.release(ticket, ReleaseReason.CANCELLED)
        await self.health.stop()
        await self.scaling.stop()
        if self.plan.clerks is not None:
            self.plan.clerks.close()
        for replica in self.replicas:
            replica.client.close()
        if self._scorer is not None:
            self._scorer.close()
        if self.tracing is not None:
            await asyncio.to_thread(self.tracing.close)

    # Requests.

    async def begin(self, ask: ClientRequest, caller: Caller, reply: ResponseWriter, request_id: str) -> Relay:
        """A client's request comes in. ApiError where it cannot be taken, or is more than its caller may ask for."""
        ask.wants_explanation &= self.settings.explain
        ticket = self.admit(ask.features(self.clock.now), lambda live: InFlightRequest(live, request_id), caller)
        return self._relay(ask, ticket, reply)

    def relay(
        self, ask: ClientRequest, reply: ResponseWriter, request_id: str, deadline_s: float | None = None
    ) -> Relay:
        """A request of a batch. `deadline_s`: seconds from now."""
        ticket = self._admit(ask.features(self.clock.now), lambda live: InFlightRequest(live, request_id), deadline_s)
        return self._relay(ask, ticket, reply)

    def _relay(self, ask: ClientRequest, ticket: InFlightRequest, reply: ResponseWriter) -> Relay:
        return self._new_relay(
            ask, ticket, self.driver, self.health, reply, self.settings.max_attempts, self.plan.tell_priority
        )

    def admit(self, asked: Features, made: Callable[[Live], InFlightRequest], caller: Caller) -> InFlightRequest:
        """Within its caller's limits, a request is given to control, by the ticket that is made for it."""
        if not caller.is_limited:
            return self._admit(asked, made)
        tokens = self.prompt_tokens(asked) + (asked.max_tokens or 0)
        caller.reserve(tokens)
        try:
            ticket = self._admit(asked, made)
        except BaseException:
            caller.settle(tokens, 0)
            raise
        ticket.on_settled = partial(caller.settle, tokens)
        return ticket

    def _admit(
        self, asked: Features, made: Callable[[Live], InFlightRequest], deadline_s: float | None = None
    ) -> InFlightRequest:
        if self.is_closing:
            raise ApiError(503, "the gateway is shutting down", "shutting_down", retry_after_s=1)
        service, model = self._service(asked)
        live = self._live(asked, model, deadline_s)
        if not service.fits(live) and not any(each.fits(live) for each in self._answering(service, model)):
            wanted = f"about {live.prompt_tokens:,} prompt tokens and {live.output_tokens:,} to come"
            raise ApiError(400, f"{wanted} are more than {service.longest_tokens:,}", "context_length_exceeded")
        if len(service.hold_queue) >= self.settings.max_held and self._is_full(service):
            raise ApiError(429, f"{service.model}: too many requests are waiting", "queue_full", retry_after_s=1)
        ticket = made(live)
        self.driver.arrived(ticket)
        return ticket

    def _service(self, asked: Features) -> tuple[Service, str]:
        """Who answers, and as what model control is to know the request."""
        cascade, services = self.driver.cascade, self.driver.services
        if cascade is not None and asked.model == cascade.config.name:
            if asked.is_passthrough:
                raise ApiError(400, f"{asked.model!r} answers chats and completions only", "invalid_value", "model")
            return cascade.stages[0].service, asked.model
        service = services.get(asked.model)
        if service is None:
            self._learn_names()
            service = services.get(asked.model)
        if service is None:
            raise ApiError(404, str(unknown("model", asked.model, self.names())), "model_not_found", "model")
        if asked.is_passthrough and service.model in self._halved:
            what = f"{asked.model!r} answers chats and completions only, as its replicas do one phase each"
            raise ApiError(400, what, "invalid_value", "model")
        return service, service.model

    def _answering(self, service: Service, model: str) -> list[Service]:
        """All that may have to: a cascade's models."""
        cascade = self.driver.cascade
        return [service] if model == service.model or cascade is None else [stage.service for stage in cascade.stages]

    def names(self) -> list[str]:
        """What requests may ask for."""
        cascade = self.driver.cascade
        return [*self.plan.names, *([] if cascade is None else [cascade.config.name])]

    def _learn_names(self) -> None:
        """Engines' own names for their models are names, too."""
        for replica in self.replicas:
            if replica.reported_model is not None:
                self.driver.services.setdefault(replica.reported_model, self.driver.services[replica.model])

    def _is_full(self, service: Service) -> bool:
        """Forget those in line that have ended; is it still too long?"""
        service.hold_queue[:] = [entry for entry in service.hold_queue if entry[2].stage is HELD]
        heapify(service.hold_queue)
        return len(service.hold_queue) >= self.settings.max_held

    def _live(self, asked: Features, model: str, deadline_s: float | None) -> Live:
        prompt_tokens = self.prompt_tokens(asked)
        # Processes may tell of two requests in another order than that in which they came.
        self._arrived_s = now = max(asked.arrival_s, self._arrived_s)
        live = Live(
            id=next(self._ids), arrival_s=now, prompt_tokens=prompt_tokens,
            output_tokens=asked.max_tokens or 1, model=model, tier=asked.tier,
            region=asked.region, session_id=asked.session_id, prefix=asked.prefix, slo_ttft_s=asked.slo_ttft_s,
            slo_tpot_s=asked.slo_tpot_s, timeout_s=deadline_s or self.settings.timeout_s,
            deadline_s=None if deadline_s is None else now + deadline_s,
        )  # fmt: skip
        if self._reasons.get(model):
            live.phase = Phase.REASONING
        return live

    def prompt_tokens(self, asked: Features) -> int:
        """Tokens of a prompt: counted where it came as such, else by what texts had so far."""
        if asked.prompt_tokens is not None:
            return asked.prompt_tokens
        return max(1, round(asked.num_chars * self._tokens_per_char))

    def end(self, ask: ClientRequest, exchange: Relay) -> None:
        """An exchange is over."""
        self.settle(exchange.in_flight, len(ask.text), exchange.prompt_tokens, exchange.used_tokens)

    def settle(self, ticket: InFlightRequest, num_chars: int, prompt_tokens: int | None, used_tokens: int) -> None:
        """A request is over: its caller is told what it took, and engines have counted its prompt's tokens."""
        if ticket.on_settled is not None:
            ticket.on_settled(used_tokens)
        if prompt_tokens and num_chars >= 32:
            ratio = prompt_tokens / num_chars
            self._tokens_per_char += _LEARNING * (min(ratio, 2.0) - self._tokens_per_char)

    # What is heard.

    def _ended(self, ticket: InFlightRequest, outcome: Outcome, now: float) -> None:
        live = ticket.live
        if outcome is Outcome.FINISHED and live.answer_s == live.answer_s:
            self._reasons[live.model] = live.reasoning_tokens > 0
        self.request_metrics.count_end(ticket, outcome, now)
        if outcome is Outcome.REJECTED:
            ticket.retry_after_s = self.scaling.expected_s(live.model)
            if self.decisions is not None:
                self.decisions.record_hold_refusal(live, now, ticket.request_id or str(live.id))
        if self.decisions is not None:
            self.decisions.forget(live)
        if self.rolling_stats is not None:
            self.rolling_stats.count_end(live, outcome, now, ticket.is_unstreamed)
        self.recording.add(live, "" if live.stage_index < 0 else self.names()[-1])
        self.fleet.ended()

    def _observed(self, replica: LiveReplica, load: Load) -> None:
        replica.update_load(load)
        self.driver.control.on_views_refreshed(self.clock.now)

    def metrics_page(self) -> str:
        """The gateway's own metrics, as Prometheus reads them."""
        flight: list[Sample] = []
        ups: list[Sample] = []
        for replica in self.fleet.present():
            labels = {"pool": replica.pool, "model": replica.model, "replica": str(replica.id)}
            flight.append((labels, replica.num_in_flight))
            ups.append((labels, float(self.health.is_up(replica))))
        held: list[Sample] = [({"model": s.model}, len(s.held_requests())) for s in self.driver.control.services]
        return self.request_metrics.page([
            ("requests_in_flight", "Requests at a replica", flight),
            ("replica_up", "Whether requests are sent to a replica", ups),
            ("replicas_failed", "Replicas that are wanted and do not start",
             [({"pool": pool}, float(num)) for pool, num in self.scaling.failed_of.items()]),
            ("requests_held", "Requests that wait in the gateway", held),
            ("batch_requests_open", "Requests of batches that wait for their turn or their answer",
             [] if self.batches is None else [({}, self.batches.num_open)]),
        ])  # fmt: skip

    def records(self) -> Records:
        """What has run so far."""
        now = self.clock.now
        rows = [term.record(replica, now) for replica, term in zip(self.replicas, self.terms, strict=True)]
        cascade = self.driver.cascade
        return self.recording.records(rows, now, 0.0 if cascade is None else cascade.config.judge_usd)

    @property
    def num_up(self) -> int:
        """Replicas to which requests are sent."""
        return sum(self.health.is_up(replica) for replica in self.replicas)
