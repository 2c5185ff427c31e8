"""The gateway: assembles its parts, starts and stops them, and passes events between them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from functools import partial
from math import gcd
from typing import TYPE_CHECKING, Final

from headway.control.decisions import Decision
from headway.control.live import Live
from headway.core.policy import WeightedOrdering
from headway.core.record import Outcome
from headway.gateway.admission import Admission
from headway.gateway.auth.keys import ApiKeys, Caller
from headway.gateway.clock import Clock
from headway.gateway.errors import logged
from headway.gateway.fleet.membership import LiveFleet
from headway.gateway.fleet.scaling import LiveScaling
from headway.gateway.fleet.specs import ServingPlan
from headway.gateway.kv_events.prompts import PromptBlocks
from headway.gateway.metrics_page import MetricsPage
from headway.gateway.relay.features import Features
from headway.gateway.relay.paced import paced
from headway.gateway.relay.quarantine import Quarantine
from headway.gateway.relay.relay import Relay
from headway.gateway.relay.request import RESPONSES, ClientRequest
from headway.gateway.relay.writer import ResponseWriter
from headway.gateway.run_telemetry import RunTelemetry
from headway.gateway.scheduling.driver import Driver
from headway.gateway.scheduling.in_flight import InFlightRequest, ReleaseReason
from headway.gateway.scheduling.replica import LiveReplica
from headway.gateway.scheduling.scorer import AnswerScorer
from headway.gateway.scheduling.shadows import Shadows
from headway.gateway.scheduling.stalls import PERIOD_S, StallWatch
from headway.gateway.scheduling.stream_copy import StreamCopies, StreamKey
from headway.gateway.served_models import ServedModels
from headway.gateway.settings import Settings
from headway.gateway.telemetry.autopilot import AutopilotControls
from headway.gateway.telemetry.recording import Recording
from headway.gateway.telemetry.reloads import Reload, Reloads
from headway.gateway.upstream.dialects import Load
from headway.gateway.upstream.health import HealthMonitor
from headway.gateway.upstream.kv_snapshot import StaleSnapshots
from headway.gateway.upstream.stored_responses import StoredResponses

if TYPE_CHECKING:
    from headway.gateway.accounts.store import StoredKey
    from headway.gateway.batch.service import BatchService
    from headway.gateway.charges import Charges
    from headway.gateway.kv_events.feeds import CacheFeeds
    from headway.gateway.peers.peers import Peers
    from headway.gateway.relay.tracing import Tracing

_FINISHED: Final = Outcome.FINISHED
_REJECTED: Final = Outcome.REJECTED
_RELOADED_POLICIES = (
    "router", "ordering", "ordering_at", "window", "prompt_window", "migration", "admission", "fallback",
    "max_hold_s", "preempt_every_s", "shed_ttft_share", "slo_ttft_s", "slo_tpot_s", "slo_e2e_s",
)  # fmt: skip
_DRAIN_POLL_S = 0.05


class Gateway:
    """One gateway. It must be created in the event loop in which it runs."""

    def __init__(
        self, plan: ServingPlan, recording: Recording, decision_log: Callable[[Decision], None] | None = None
    ) -> None:
        self.plan, self.settings = plan, plan.settings
        self.clock = Clock(asyncio.get_running_loop())
        self.keys = ApiKeys(self.settings.api_keys, lambda: self.clock.now, self.settings.key_store is not None)
        self.copies = StreamCopies(lambda: self.clock.now)
        self.quarantine = Quarantine(self.settings.quarantine_s)
        self.responses = StoredResponses()
        self.peers = self._make_peers()
        self.fleet = LiveFleet(self, plan, self.clock)
        self.telemetry = RunTelemetry(self.clock, plan, self.fleet, recording, decision_log, self._request_id)
        self.scaling = LiveScaling(self, self.fleet, plan)
        self._scorer = None if plan.judge is None else AnswerScorer(plan.judge)
        self.shadows = None if plan.shadow is None else Shadows(plan.shadow, plan.seed)
        self.driver = self._make_driver(recording)
        self.models = ServedModels(self.driver, self.fleet, plan)
        self.health = self._make_health()
        self.driver.holds.is_lost = self.health.is_lost
        self.driver.on_prefill_sent = self.health.succeeded
        self.ejections: dict[int, str] = {}
        """Maps each replica that is ejected or generates nothing to the reason."""
        self._returning: set[int] = set()
        """Ejected replicas that will get a growing share of the requests once they are up again."""
        self._checking: Iterator[None] | None = None
        """The check for stalled engines that has begun."""
        self._stalls = StallWatch(
            self.settings.limits, self.health.outliers, self.health, self.fleet.times, self.driver.has_alternative
        )
        self._tracing, self._new_relay = self._make_relays()
        self._prompt_blocks = PromptBlocks()
        self.cache_feeds = self._make_cache_feeds()
        self.charges = self._make_charges()
        self.admission = self._make_admission()
        self.batches = self._make_batches()
        self.reloads = Reloads()
        self.request_reload: Callable[[str], Awaitable[Reload]] | None = None
        """Reads the fleet file again; the argument names the source of the request. None if the gateway has no file."""
        self.autopilot: AutopilotControls | None = None
        """Tries changes of the fleet file automatically."""
        self.on_replica_up: list[Callable[[LiveReplica], None]] = []
        """Called when a replica starts to get requests."""
        self.on_reconfigured: list[Callable[[], None]] = []
        """Called after settings, keys or policies have changed, and when the gateway begins to drain."""
        self.unapplied: set[asyncio.Future[None]] = set()
        """Changes that were sent to a worker and not confirmed yet."""
        self.metrics = self._make_metrics_page()

    def _request_id(self, live: Live) -> str:
        return self.driver.requests[live.id].request_id or str(live.id)

    def _make_driver(self, recording: Recording) -> Driver:
        plan, settings = self.plan, self.settings
        driver = Driver(
            clock=self.clock,
            replicas=self.replicas,
            names=plan.names,
            policies=plan.policies,
            seed=plan.seed,
            recorder=recording.recorder if recording.enabled else None,
            metrics=self.telemetry.metrics,
            hold_s=settings.hold_s,
            scorer=self._scorer,
            make_scaling=self.scaling.configure,
            decisions=self.telemetry.decisions,
            on_ended=self._request_ended,
            on_role=self.fleet.record_role,
            fallbacks=plan.fallbacks,
            view=None if self.peers is None else self.peers.view,
            new_shadow=None if self.shadows is None else self.shadows.new,
        )
        driver.control.fallbacks.max_held = settings.max_held
        return driver

    def _make_health(self) -> HealthMonitor[LiveReplica]:
        return HealthMonitor(
            self.replicas,
            self.settings,
            self._replica_up,
            self.driver.roster.replica_down,
            self.driver.fail_over,
            self._load_read,
            self._replica_ejected,
            lambda: self.clock.now,
        )

    def _make_admission(self) -> Admission:
        return Admission(
            self.clock,
            self.driver,
            self.models,
            self.settings,
            self.quarantine,
            self.responses,
            self.charges,
            None if self.cache_feeds is None else self._prompt_blocks,
        )

    def _make_metrics_page(self) -> MetricsPage:
        return MetricsPage(
            ended=self.telemetry.metrics,
            fleet=self.fleet,
            health=self.health,
            drift=self.telemetry.drift,
            loop_delay=self.telemetry.loop_delay,
            driver=self.driver,
            keys=self.keys,
            reloads=self.reloads,
            charges=self.charges,
            batches=self.batches,
            cache_feeds=self.cache_feeds,
            peers=self.peers,
            shadows=self.shadows,
            autopilot=lambda: self.autopilot,
        )

    def _make_relays(self) -> tuple[Tracing | None, Callable[..., Relay]]:
        if not self.settings.tracing:
            return None, Relay
        from headway.gateway.relay.tracing import Tracing

        tracing = Tracing()
        return tracing, tracing.relay

    def _make_cache_feeds(self) -> CacheFeeds | None:
        """The readers of KV cache events; None if no engine publishes events. A reload cannot add readers if there are
        none."""
        if all(served.kv_events is None for served in self.plan.pools):
            return None
        from headway.gateway.kv_events.feeds import CacheFeeds

        pieces: dict[str, int] = {}
        for served in self.plan.pools:
            if served.kv_events is not None:
                name, size = served.pool.model.name, served.pool.engine.block_size_tokens
                pieces[name] = gcd(size, pieces.get(name, size))
        feeds = CacheFeeds(self.telemetry.cache_state_changed, pieces)
        self.fleet.on_added.append(lambda replica, served: feeds.add(replica, served.kv_events))
        self.fleet.on_removed.append(feeds.remove)
        return feeds

    def _make_batches(self) -> BatchService | None:
        if self.settings.batches is None:
            return None
        from headway.gateway.batch.service import BatchService

        return BatchService(self.settings, self.relay, self.end, self.keys.caller_of)

    def _make_peers(self) -> Peers | None:
        if self.settings.peers is None:
            return None
        from headway.gateway.peers.peers import Peers

        return Peers(self.settings.peers, self)

    def _make_charges(self) -> Charges | None:
        if self.settings.key_store is None:
            return None
        from headway.gateway.accounts.budgets import Accounts
        from headway.gateway.charges import Charges

        accounts = Accounts(self.settings.key_store, self._use_stored_keys)
        charges = Charges(accounts, self.fleet.pools, lambda: self.plan)
        self.driver.charge = charges.charge
        return charges

    def _use_stored_keys(self, keys: Sequence[StoredKey]) -> None:
        """Accept these keys of the database, with the weights of their tenants."""
        self.keys.replace_stored([key.key() for key in keys])
        weights = {key.key().tenant: key.weight for key in keys if key.weight != 1}
        for service in self.driver.control.services:
            if isinstance(service.hold_ordering, WeightedOrdering):
                service.hold_ordering.set_weights(weights)
        for callback in self.on_reconfigured:
            callback()

    @property
    def replicas(self) -> list[LiveReplica]:
        return self.fleet.replicas

    @property
    def num_up(self) -> int:
        """Number of replicas that get requests."""
        return sum(self.health.is_up(replica) for replica in self.replicas)

    def start(self) -> None:
        """Start to probe replicas, to call periodic policies, and to start replicas."""
        self.health.start()
        self._check_stalls(self.clock.now)
        self.telemetry.start()
        slots = {served.slots for served in self.plan.pools if served.slots is not None}
        self._stale_snapshots = StaleSnapshots(slots, self.clock)
        self.driver.ticks.start()
        if self.cache_feeds is not None:
            for replica in self.fleet.present():
                self.cache_feeds.add(replica, self.fleet.served(replica).kv_events)
        self.scaling.start()
        self.fleet.schedule_roles(self.plan.roles)
        if self.charges is not None:
            self.charges.accounts.start()
        if self.batches is not None:
            self.batches.start()
        if self.peers is not None:
            self.peers.start()
            self.fleet.on_added.append(self.peers.follow)

    def reconfigure(self, plan: ServingPlan) -> list[str]:
        """Apply another plan, and return the changes. HeadwayError, before any change, if a policy cannot be created.
        Requests in flight go on; replicas that the plan lacks are drained."""
        before, settings = self.plan, self.settings
        ordering = plan.policies.ordering()
        changed = [
            name for name in _RELOADED_POLICIES if getattr(before.policies, name) != getattr(plan.policies, name)
        ]
        if changed:
            self.driver.change_policies(before.policies, plan.policies)
        self.plan, self.settings = plan, plan.settings
        self.driver.control.fallbacks.of_fleet = plan.fallbacks
        self.models.use(plan)
        changes = self.fleet.reconfigure(plan, ordering)
        self.driver.control.use_fallbacks(plan.fallbacks, plan.policies.fallback)
        if plan.fallbacks != before.fallbacks:
            changes.append("fleet: other fallbacks")
        changes += self.scaling.reconfigure(plan)
        changes += [f"policies: {name} changed" for name in changed]
        if plan.settings != settings:
            changes += self._use_settings(settings)
        self.admission.forget_limits()
        for callback in self.on_reconfigured:
            callback()
        return changes

    def _use_settings(self, before: Settings) -> list[str]:
        settings = self.settings
        self.admission.settings = self.telemetry.settings = settings
        self.keys.replace(settings.api_keys)
        self.health.use(settings)
        self._stalls.use(settings.limits)
        self.quarantine.keep_s = settings.quarantine_s
        self.driver.holds.hold_s, self.driver.control.fallbacks.max_held = settings.hold_s, settings.max_held
        names = settings.__struct_fields__
        return [f"gateway: {name} changed" for name in names if getattr(settings, name) != getattr(before, name)]

    def refuse_requests(self) -> None:
        """Answer new requests, and readiness checks, with 503 from now on."""
        self.admission.is_closing = True
        for callback in self.on_reconfigured:
            callback()

    async def stop(self) -> None:
        """Reject new requests, let streams end for the drain time, then close."""
        self.admission.is_closing = True
        if self.batches is not None:
            await self.batches.stop()
        self.telemetry.stop()
        end_s = self.clock.now + self.settings.drain_s
        while self.driver.requests and self.clock.now < end_s:
            await asyncio.sleep(_DRAIN_POLL_S)
        for request in list(self.driver.requests.values()):
            self.driver.release(request, ReleaseReason.CANCELLED)
        if self.charges is not None:
            await self.charges.accounts.stop()
        if self.peers is not None:
            await self.peers.stop()
        await self.health.stop()
        if self.cache_feeds is not None:
            await self.cache_feeds.stop()
        await self.scaling.stop()
        self.plan.stop_planners()
        for replica in self.replicas:
            replica.client.close()
        if self._scorer is not None:
            self._scorer.close()
        if self._tracing is not None:
            await asyncio.to_thread(self._tracing.close)

    # Requests.

    async def begin(
        self, client_request: ClientRequest, caller: Caller, writer: ResponseWriter, request_id: str
    ) -> Relay:
        """Admit a client's request. Raises ApiError if it is invalid, or exceeds its caller's limits."""
        client_request.wants_explanation &= self.settings.explain
        if client_request.path == RESPONSES and client_request.previous_response_id is not None:
            await self.response_holder(client_request.previous_response_id, caller.owner)
        features = await self.admission.features(client_request, bool(caller.owner))
        if client_request.stream_key is not None:
            if self.peers is not None:
                await self.peers.restore(client_request.stream_key)
            request = self._admit_copied(client_request, features, caller, request_id)
        else:
            is_streamed, can_resume = client_request.stream, client_request.can_resume

            def new_request(live: Live) -> InFlightRequest:
                return InFlightRequest(live, request_id, is_streamed, is_movable=is_streamed and can_resume)

            request = self.admission.admit(features, new_request, caller)
        return self._relay(client_request, request, writer)

    async def response_holder(self, id: str, owner: str) -> LiveReplica | None:
        """The replica that stores a response of this owner; None if no running replica does."""
        up = [replica for replica in self.replicas if self.health.is_up(replica)]
        found = await self.responses.find(id, up, owner)
        return None if found is None else self.replicas[found]

    def _admit_copied(
        self, client_request: ClientRequest, features: Features, caller: Caller, request_id: str
    ) -> InFlightRequest:
        """Admit a request whose stream is copied, or a request that continues a copied stream."""
        key = self.stream_key(client_request.stream_key, client_request.model)
        copy, restored = self.copies.begin(key)

        def new_request(live: Live) -> InFlightRequest:
            live.generated_tokens = 0 if restored is None else restored.tokens
            request = InFlightRequest(live, request_id, client_request.stream, copy, restored, is_movable=True)
            request.stream_key = key
            return request

        try:
            return self.admission.admit(features, new_request, caller)
        except BaseException:
            self.copies.end(key, copy, is_finished=False)
            raise

    def relay(
        self,
        client_request: ClientRequest,
        caller: Caller,
        writer: ResponseWriter,
        request_id: str,
        deadline_s: float | None = None,
    ) -> Relay:
        """Admit a request of a batch, within its caller's limits. `deadline_s`: seconds from now."""
        self.quarantine.check(client_request.raw, self.clock.now)
        features = client_request.features(self.clock.now)
        request = self.admission.admit(
            features, partial(InFlightRequest, request_id=request_id, is_streamed=False), caller, deadline_s
        )
        return self._relay(client_request, request, writer)

    def _relay(self, client_request: ClientRequest, request: InFlightRequest, writer: ResponseWriter) -> Relay:
        relay = self._new_relay(
            client_request,
            request,
            self.driver,
            self.health,
            writer if self.settings.pace_s is None else paced(client_request, writer, self.settings.pace_s),
            self.settings.max_attempts,
            self.plan.sends_priority,
            self.quarantine,
        )
        relay.keep_alive_s = self.settings.keep_alive_s
        return relay

    def stream_key(self, key: StreamKey | None, model: str) -> StreamKey | None:
        """The request's stream key. Empty if several models of a cascade may answer."""
        cascade = self.driver.cascade
        return None if cascade is not None and model == cascade.config.name else key

    def end(self, request: InFlightRequest) -> None:
        """Account for a request that has ended."""
        self.admission.settle(request)
        if request.copy is not None:  # the requested model cannot continue another model's answer
            is_over = request.outcome is _FINISHED or request.live.fallback is not None
            self.copies.end(request.stream_key, request.copy, is_over)

    # Callbacks.

    def _check_stalls(self, now: float, _: object = None) -> None:
        """Check for engines that stall and, once a second, for engines that serve worse than their peers."""
        self.clock.at(self.clock.now + PERIOD_S, self._check_stalls, None)
        with logged("the search for stalled engines failed"):
            self.admission.raise_holds(self.driver.requests.values())
            if self._checking is None:
                self._checking = self._stalls.check(list(self.driver.requests.values()), self.clock.now)
                self._check_further(now)
            if int(now) != int(now - PERIOD_S):
                self.health.check_outliers()

    def _check_further(self, now: float, _: object = None) -> None:
        """Check some of the requests, and the others after what is due meanwhile."""
        checking, self._checking = self._checking, None
        with logged("the search for stalled engines failed"):
            if checking is not None and next(checking, False) is None:
                self._checking = checking
                self.clock.at(now, self._check_further, None)

    def _replica_up(self, replica: LiveReplica) -> None:
        self.admission.forget_limits()
        replica.has_served = True
        if not self.plan.has_window:
            self.driver.roster.limit_to_slots(replica)
        if replica.id in self._returning:
            self._returning.discard(replica.id)
            self.ejections.pop(replica.id, None)
            self.driver.roster.start_slowly(replica, self.settings.outliers.slow_start_s)
        self.scaling.replica_up(replica)
        self._prompt_blocks.prepare(replica)
        for callback in self.on_replica_up:
            callback(replica)

    def _replica_ejected(self, replica: LiveReplica, reason: str, why: str) -> None:
        """A replica was ejected or generates nothing, for this reason. Without a reason: the replica returns."""
        if reason:
            self.ejections[replica.id] = why
            self._returning.add(replica.id)
        self.telemetry.replica_ejected(replica, reason, why)

    def _request_ended(self, request: InFlightRequest, outcome: Outcome, now: float) -> None:
        live = request.live
        if outcome is _FINISHED:
            self._stalls.finished(request, now)
            if request.replica is not None:
                if self.cache_feeds is not None:
                    replica = self.replicas[request.replica.id]
                    expected = replica.take_expected(live)
                    # vLLM reports the cached tokens of one sequence, which finds what another one has computed.
                    if expected and live.num_sequences == 1:
                        self.cache_feeds.answered(replica, expected, live.cached_tokens)
                if request.answer.response_id is not None:
                    num_tokens = live.prompt_tokens + live.generated_tokens
                    self.responses.add(request.answer.response_id, request.replica.id, request.owner, num_tokens)
            if live.answer_s == live.answer_s:
                self.admission.reasons[live.model] = live.reasoning_tokens > 0
        elif outcome is _REJECTED:
            request.is_shed, request.retry_after_s = live.shed_s > 0, self.scaling.retry_after_s(live)
        self.telemetry.request_ended(request, outcome, now)
        if self.fleet.leaving:
            self.fleet.remove_empty()

    def _load_read(self, replica: LiveReplica, load: Load) -> None:
        replica.update_load(load)
        if self.cache_feeds is not None and load.num_ranks > 1:
            self.cache_feeds.ranks_reported(replica, load.num_ranks)
        self.driver.control.on_views_refreshed(self.clock.now)
