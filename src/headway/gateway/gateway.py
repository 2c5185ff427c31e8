"""The gateway: puts its parts together, admits requests, and reports what has run."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from itertools import count
from math import gcd, inf
from time import time
from typing import TYPE_CHECKING

from headway.control.decisions import Decision, DecisionObserver
from headway.control.live import Live
from headway.control.service import Service
from headway.core.errors import unknown
from headway.core.policy import WeightedOrdering
from headway.core.record import Outcome, Records
from headway.core.request import Phase
from headway.gateway.auth.keys import ApiKeys, Caller, RateHold
from headway.gateway.clock import Clock
from headway.gateway.errors import ApiError, logged
from headway.gateway.fleet.membership import LiveFleet
from headway.gateway.fleet.scaling import LiveScaling
from headway.gateway.fleet.specs import ServingPlan
from headway.gateway.kv_events.prompts import PromptBlocks
from headway.gateway.metrics_page import MetricsPage
from headway.gateway.relay.paced import paced
from headway.gateway.relay.quarantine import Quarantine
from headway.gateway.relay.relay import Relay
from headway.gateway.relay.request import RESPONSES, ClientRequest, Features
from headway.gateway.relay.writer import ResponseWriter
from headway.gateway.scheduling.driver import Driver
from headway.gateway.scheduling.in_flight import InFlightRequest, ReleaseReason
from headway.gateway.scheduling.replica import LiveReplica
from headway.gateway.scheduling.scorer import AnswerScorer
from headway.gateway.scheduling.stalls import PERIOD_S, StallWatch
from headway.gateway.scheduling.stream_copy import StreamCopies, StreamKey
from headway.gateway.settings import Settings
from headway.gateway.telemetry.drift import COMPARISON_PERIOD_S, PredictionDrift
from headway.gateway.telemetry.metrics import PrometheusMetrics
from headway.gateway.telemetry.recording import Recording
from headway.gateway.telemetry.reloads import Reload, Reloads
from headway.gateway.telemetry.rolling_stats import RollingStats
from headway.gateway.upstream.dialects import ADAPTERS, Load
from headway.gateway.upstream.engine import count_prompt
from headway.gateway.upstream.health import HealthMonitor
from headway.gateway.upstream.kv_snapshot import StaleSnapshots
from headway.gateway.upstream.stored_responses import StoredResponses
from headway.limits.budgets import MostTokens, most_tokens

if TYPE_CHECKING:
    from headway.gateway.accounts.store import StoredKey
    from headway.gateway.batch.service import BatchService
    from headway.gateway.charges import Charges
    from headway.gateway.kv_events.feeds import CacheFeeds
    from headway.gateway.peers.peers import Peers
    from headway.gateway.relay.tracing import Tracing

_FINISHED, _REJECTED = Outcome.FINISHED, Outcome.REJECTED
_TOKENS_PER_CHAR = 0.25
"""Estimate for prompts, until an engine has counted one."""
_RATIO_WEIGHT = 0.05
"""Weight of the newest count in the moving average of tokens per character."""
_MIN_COUNTED_CHARS = 32
"""Shorter prompts are not used to estimate tokens per character."""
_RELOADED_POLICIES = (
    "router", "ordering", "ordering_at", "window", "prompt_window", "migration", "admission", "fallback",
    "max_hold_s", "shed_ttft_share", "slo_ttft_s", "slo_tpot_s", "slo_e2e_s",
)  # fmt: skip
_DRAIN_POLL_S = 0.05
_RECORDS_PER_PART = 20_000
"""Records of so many requests are written before their time."""


class Gateway:
    """One gateway. Created in the event loop that it runs in."""

    def __init__(
        self, plan: ServingPlan, recording: Recording, decision_log: Callable[[Decision], None] | None = None
    ) -> None:
        self.plan, self.settings, self.recording = plan, plan.settings, recording
        self.clock = Clock(asyncio.get_running_loop())
        self.keys = ApiKeys(self.settings.api_keys, lambda: self.clock.now, self.settings.key_store is not None)
        self.copies = StreamCopies(lambda: self.clock.now)
        self.rolling_stats: RollingStats | None = None
        self.decisions = self._observe_decisions(decision_log)
        self.request_metrics = PrometheusMetrics()
        self._scorer = None if plan.judge is None else AnswerScorer(plan.judge)
        self.peers = self._make_peers()
        self.fleet = LiveFleet(self, plan, self.clock)
        self.scaling = LiveScaling(self, self.fleet, plan)
        self.driver = Driver(
            self.clock, self.replicas, plan.names, plan.policies, plan.seed, recording.recorder, self.request_metrics,
            self.settings.hold_s, self._scorer, self.scaling.configure, self.decisions, self._request_ended,
            self.fleet.record_role, plan.fallbacks, *(() if self.peers is None else (self.peers.view,)),
        )  # fmt: skip
        self.driver.control.max_held = self.settings.max_held
        self.health = HealthMonitor(
            self.replicas, self.settings, self._replica_up, self.driver.replica_down, self.driver.fail_over,
            self._load_read, self._replica_ejected, lambda: self.clock.now,
        )  # fmt: skip
        self.driver.is_lost = self.health.is_lost
        self.ejections: dict[int, str] = {}
        """By replica that is ejected or generates nothing, why."""
        self._returning: set[int] = set()
        """Replicas that were ejected, and get a growing share of the requests when they are up."""
        self._stalls = StallWatch(
            self.settings.limits,
            self.health.outliers,
            self.health,
            lambda replica: self.fleet.times[replica.pool],
            self.driver.has_alternative,
        )
        self.drift = PredictionDrift(self.fleet.step_times)
        self.fleet.on_removed.append(lambda replica: self.drift.forget(replica.id))
        self._tracing, self._new_relay = self._make_relays()
        self.quarantine = Quarantine(self.settings.quarantine_s)
        self._prompt_blocks = PromptBlocks()
        self.responses = StoredResponses()
        self.cache_feeds = self._make_cache_feeds()
        self.batches = self._make_batches()
        self.charges = self._make_charges()
        self.is_closing = False
        self.reloads = Reloads()
        self.request_reload: Callable[[str], Awaitable[Reload]] | None = None
        """Reads the fleet file again, which the argument asks for; None: the gateway has no file."""
        self.on_replica_up: list[Callable[[LiveReplica], None]] = []
        """Called when a replica begins to get requests."""
        self.on_reconfigured: list[Callable[[], None]] = []
        """Called after settings, keys or policies have changed, and when the gateway begins to drain."""
        self.unapplied: set[asyncio.Future[None]] = set()
        """Changes that a worker has been sent and has not applied yet."""
        self._retired_models: set[str] = set()
        """Models that the fleet file does not have any more."""
        self._records_timer: asyncio.TimerHandle | None = None
        """Set if records are written as the run goes."""
        self._dual_dispatch_models = _dual_dispatch_models(plan)
        self.metrics = MetricsPage(
            self.request_metrics, self.fleet, self.health, self.drift, self.driver, self.keys, self.reloads,
            self.charges, self.batches, self.cache_feeds, self.peers,
        )  # fmt: skip
        self._ids = count()
        self._last_arrival_s = 0.0
        self._tokens_per_char = _TOKENS_PER_CHAR
        self._least_limits: dict[str, float] = {}
        """By model, see `_least_limit`, until a replica's limit may have changed."""
        self._reasons: dict[str, bool] = {}
        """By model, whether its last answer began with reasoning."""

    def _observe_decisions(self, log: Callable[[Decision], None] | None) -> DecisionObserver | None:
        """The observer for the decision log and the dashboard; None without both."""
        if log is None and not self.settings.has_dashboard:
            return None
        decisions = DecisionObserver(
            lambda live: self.driver.requests[live.id].request_id or str(live.id), time() - self.clock.now, is_live=True
        )
        if log is not None:
            decisions.listeners.append(log)
        if self.settings.has_dashboard:
            self.rolling_stats = RollingStats(decisions, lambda: self.metrics.usd)
        return decisions

    def _make_relays(self) -> tuple[Tracing | None, Callable[..., Relay]]:
        if not self.settings.tracing:
            return None, Relay
        from headway.gateway.relay.tracing import Tracing

        tracing = Tracing()
        return tracing, tracing.relay

    def _make_cache_feeds(self) -> CacheFeeds | None:
        """The readers of KV cache events; None: no engine publishes them, and a reload cannot change that."""
        if all(served.kv_events is None for served in self.plan.pools):
            return None
        from headway.gateway.kv_events.feeds import CacheFeeds

        pieces: dict[str, int] = {}
        for served in self.plan.pools:
            if served.kv_events is not None:
                name, size = served.pool.model.name, served.pool.engine.block_size_tokens
                pieces[name] = gcd(size, pieces.get(name, size))
        feeds = CacheFeeds(self._cache_state_changed, pieces)
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
        """Replicas to which requests are sent."""
        return sum(self.health.is_up(replica) for replica in self.replicas)

    def start(self) -> None:
        """Start to probe replicas, to call periodic policies, and to start replicas."""
        self.health.start()
        self._check_stalls(self.clock.now)
        self._compare_predictions(self.clock.now)
        slots = {served.slots for served in self.plan.pools if served.slots is not None}
        self._stale_snapshots = StaleSnapshots(slots, self.clock)
        self.driver.start_ticking()
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
        if self.recording.is_written:
            self._flush_periodically(self.clock.now, None)

    def reconfigure(self, plan: ServingPlan) -> list[str]:
        """Serve another plan from now on, and return the changes. HeadwayError, before any change, if a policy cannot
        be created. Requests in flight go on; replicas that the plan does not have are drained."""
        before, settings = self.plan, self.settings
        ordering = plan.policies.ordering()
        changed = [
            name for name in _RELOADED_POLICIES if getattr(before.policies, name) != getattr(plan.policies, name)
        ]
        if changed:
            self.driver.change_policies(before.policies, plan.policies)
        self.plan, self.settings = plan, plan.settings
        self.driver.control.fleet_fallbacks = plan.fallbacks
        for model in plan.names.keys() - before.names.keys() - self._retired_models:
            self.driver.add_model(model, plan.names[model], plan.policies)
        self._rename(before, plan)
        self._dual_dispatch_models = _dual_dispatch_models(plan)
        changes = self.fleet.reconfigure(plan, ordering)
        self.driver.control.use_fallbacks(plan.fallbacks, plan.policies.fallback)
        if plan.fallbacks != before.fallbacks:
            changes.append("fleet: other fallbacks")
        self.scaling.reconfigure(plan)
        changes += [f"policies: {name} changed" for name in changed]
        if plan.settings != settings:
            changes += self._use_settings(settings)
        self._least_limits.clear()
        for callback in self.on_reconfigured:
            callback()
        return changes

    def _rename(self, before: ServingPlan, plan: ServingPlan) -> None:
        """Accept the names of the plan's models, and refuse those that it does not have any more."""
        services = self.driver.services
        for model, names in before.names.items():
            for name in {*names} - {*plan.names.get(model, ())} - {model}:
                if name in services and services[name].model == model:
                    del services[name]
        for model, names in plan.names.items():
            for name in names:
                services.setdefault(name, services[model])
        self._retired_models |= before.names.keys()
        self._retired_models -= plan.names.keys()

    def _use_settings(self, before: Settings) -> list[str]:
        settings = self.settings
        self.keys.replace(settings.api_keys)
        self.health.use(settings)
        self._stalls.use(settings.limits)
        self.quarantine.keep_s = settings.quarantine_s
        self.driver.hold_s, self.driver.control.max_held = settings.hold_s, settings.max_held
        names = settings.__struct_fields__
        return [f"gateway: {name} changed" for name in names if getattr(settings, name) != getattr(before, name)]

    def refuse_requests(self) -> None:
        """Answer new requests, and checks of readiness, with a 503 from now on."""
        self.is_closing = True
        for callback in self.on_reconfigured:
            callback()

    async def stop(self) -> None:
        """Reject new requests, let streams end for the drain time, then close."""
        self.is_closing = True
        if self.batches is not None:
            await self.batches.stop()
        if self._records_timer is not None:
            self._records_timer.cancel()
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
        """Admit a client's request. ApiError if it is invalid, or exceeds its caller's limits."""
        client_request.wants_explanation &= self.settings.explain
        if client_request.path == RESPONSES and client_request.previous_response_id is not None:
            await self.response_holder(client_request.previous_response_id, caller.owner)
        features = await self.features(client_request)
        if client_request.stream_key is not None:
            if self.peers is not None:
                await self.peers.restore(client_request.stream_key)
            request = self._admit_copied(client_request, features, caller, request_id)
        else:
            is_streamed = client_request.stream
            request = self.admit(features, lambda live: InFlightRequest(live, request_id, is_streamed), caller)
        return self._relay(client_request, request, writer)

    async def features(self, client_request: ClientRequest) -> Features:
        """What control reads of a request that arrives now: its blocks where engines publish theirs, and its tokens as
        an engine counts them where it matters. ApiError if the request is quarantined."""
        now = self.clock.now
        self.quarantine.check(client_request.raw, now)
        if self.cache_feeds is not None:
            await self._prompt_blocks.name(client_request, self._engines_of(client_request.model))
        if client_request.prompt_ids is None and client_request.counted_tokens is None:
            longest_tokens = len(client_request.text) + (client_request.max_tokens or 1)
            if longest_tokens > self._least_limit(client_request.model):
                engines = self._engines_of(client_request.model)
                client_request.counted_tokens = await count_prompt(
                    client_request.body, len(client_request.text), client_request.max_tokens or 1, engines
                )
        return client_request.features(now)

    async def response_holder(self, id: str, owner: str) -> LiveReplica | None:
        """The replica that keeps a response of this owner; None: none that is up does."""
        up = [replica for replica in self.replicas if self.health.is_up(replica)]
        found = await self.responses.find(id, up, owner)
        return None if found is None else self.replicas[found]

    def _admit_copied(
        self, client_request: ClientRequest, features: Features, caller: Caller, request_id: str
    ) -> InFlightRequest:
        """Admit a request whose stream is copied, or that continues such a stream."""
        key = client_request.stream_key = self.stream_key(client_request.stream_key, client_request.model)
        copy, restored = self.copies.begin(key)

        def new_request(live: Live) -> InFlightRequest:
            live.generated_tokens = 0 if restored is None else restored.tokens
            return InFlightRequest(live, request_id, client_request.stream, copy, restored)

        try:
            return self.admit(features, new_request, caller)
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
        request = self.admit(
            features, lambda live: InFlightRequest(live, request_id, is_streamed=False), caller, deadline_s
        )
        return self._relay(client_request, request, writer)

    def _relay(self, client_request: ClientRequest, request: InFlightRequest, writer: ResponseWriter) -> Relay:
        relay = self._new_relay(
            client_request, request, self.driver, self.health, paced(client_request, writer, self.settings),
            self.settings.max_attempts,
            self.plan.sends_priority, self.quarantine,
        )  # fmt: skip
        relay.keep_alive_s = self.settings.keep_alive_s
        return relay

    def stream_key(self, key: StreamKey | None, model: str) -> StreamKey | None:
        """The key, unless several models of a cascade may answer."""
        cascade = self.driver.cascade
        return None if cascade is not None and model == cascade.config.name else key

    def end(self, client_request: ClientRequest, relay: Relay) -> None:
        request = relay.in_flight
        num_chars = 0 if client_request.has_media else len(client_request.text)
        used_tokens = 0 if request.rate_hold is None else relay.used_tokens
        self.settle(request, num_chars, relay.prompt_tokens, used_tokens)
        if request.copy is not None:  # the model that was asked for cannot continue another one's answer
            is_over = request.outcome is _FINISHED or request.live.fallback is not None
            self.copies.end(client_request.stream_key, request.copy, is_over)

    def admit(
        self,
        features: Features,
        new_request: Callable[[Live], InFlightRequest],
        caller: Caller,
        deadline_s: float | None = None,
    ) -> InFlightRequest:
        """Reserve the request's tokens in its caller's limits, and hand it to control. ApiError if it is refused."""
        try:
            if not caller.owner:
                return self._admit(features, new_request, caller.tenant, deadline_s, caller.owner)
            return self._admit_keyed(features, new_request, caller, deadline_s)
        except ApiError as error:
            caller.count_refusal(error)
            raise

    def _admit_keyed(
        self,
        features: Features,
        new_request: Callable[[Live], InFlightRequest],
        caller: Caller,
        deadline_s: float | None,
    ) -> InFlightRequest:
        most, hold = self.most_tokens(features), None
        rate_hold = RateHold(caller, most.total)
        try:
            if self.charges is not None:
                hold = self.charges.hold(caller.owner, features.model, most)
            request = self._admit(features, new_request, caller.tenant, deadline_s, caller.owner)
        except BaseException:
            rate_hold.give_back()
            if hold is not None and self.charges is not None:
                self.charges.accounts.give_back(hold)
            raise
        request.rate_hold, request.budget_hold = rate_hold, hold
        return request

    def settle(self, request: InFlightRequest, num_chars: int, prompt_tokens: int | None, used_tokens: int) -> None:
        """Charge the caller with the tokens used, and learn from the engine's count of the prompt."""
        if request.rate_hold is not None:
            request.rate_hold.settle(used_tokens)
            if self.charges is not None:
                self.charges.settle(request)
        if prompt_tokens and num_chars >= _MIN_COUNTED_CHARS:
            ratio = prompt_tokens / num_chars
            self._tokens_per_char += _RATIO_WEIGHT * (min(ratio, 2.0) - self._tokens_per_char)

    def most_tokens(self, features: Features) -> MostTokens:
        """What a request may cost at most, for its caller's rates and budgets. Of an answer without a limit, and of a
        prompt that was estimated too short, more is reserved as it is used."""
        cost, cascade = features.cost, self.driver.cascade
        prompt_tokens = self.prompt_tokens(features) + cost.num_tokens + round(cost.num_chars * self._tokens_per_char)
        num_stages = 1 if cascade is None else cascade.num_models(features.model)
        return most_tokens(prompt_tokens, cost.max_tokens, cost.num_sequences, cost.echoes, num_stages)

    def _raise_holds(self, requests: Sequence[InFlightRequest]) -> None:
        """Reserve what requests have used already, where that is more than they had reserved."""
        for request in requests:
            hold, live = request.rate_hold, request.live
            if hold is not None and live.generated_tokens:
                hold.raise_to(live.prompt_tokens + live.generated_tokens)
                if self.charges is not None:
                    self.charges.raise_hold(request)

    def prompt_tokens(self, features: Features) -> int:
        """Tokens of the prompt: exact if it came as token ids or was counted, else estimated from its length."""
        if features.prompt_tokens is not None:
            return features.prompt_tokens
        return max(1, round(features.num_chars * self._tokens_per_char))

    def _admit(
        self,
        features: Features,
        new_request: Callable[[Live], InFlightRequest],
        tenant: str,
        deadline_s: float | None,
        owner: str,
    ) -> InFlightRequest:
        if self.is_closing:
            raise ApiError(503, "the gateway is shutting down", "shutting_down", retry_after_s=1)
        service, model = self._service(features)
        cascade = self.driver.cascade
        stages = cascade.stages if cascade is not None and model == cascade.config.name else ()
        longest = service.longest_tokens
        for stage in stages:
            longest = max(longest, stage.service.longest_tokens)
        live = self._live(features, model, tenant, deadline_s, longest)
        live.keeps_model = features.keeps_model
        if features.response_id is not None:
            live.allowed = self._keepers(features.response_id, owner, service)
        may_fall_back = self.driver.control.may_fall_back
        if live.prompt_tokens + live.output_tokens > longest and not may_fall_back(live):
            prompt = "the prompt" if features.prompt_tokens is None else f"{live.prompt_tokens:,} prompt tokens"
            wanted = f"{prompt} and {live.output_tokens:,} output tokens"
            what = f"{wanted} exceed the context of {longest:,} tokens that {service.model} is served with"
            raise ApiError(400, what, "context_length_exceeded")
        is_full = service.hold_queue.is_full(live, self.settings.max_held)
        if features.is_flex and self.driver.control.num_kept(service) >= self.settings.max_held:
            is_full = True
        if is_full and not may_fall_back(live):
            retry_s = 1 + int(service.hold_queue.oldest_s(live, self.clock.now))
            raise ApiError(429, f"{service.model}: too many requests are waiting", "queue_full", retry_after_s=retry_s)
        if self.settings.max_waiting is not None and not may_fall_back(live):
            self._shed_beyond(self.settings.max_waiting, service)
        request = new_request(live)
        request.owner = owner
        self.driver.arrived(request)
        return request

    def _shed_beyond(self, max_waiting: int, service: Service) -> None:
        """ApiError if each replica that is up reports so many waiting requests."""
        waiting = [self.replicas[view.id].num_waiting for view in service.up_views()]
        if waiting and min(waiting) >= max_waiting:
            what = f"{service.model}: {min(waiting)} requests or more wait at each replica"
            raise ApiError(429, what, "overloaded", retry_after_s=1)

    def _keepers(self, response_id: str, owner: str, service: Service) -> frozenset[int] | None:
        """The replica that keeps the response that a request continues; None: none of the service's that is up."""
        known = self.responses.holder(response_id)
        if known is None or known[1] != owner:
            return None
        member = service.member(known[0])
        return None if member is None or not member.is_up else frozenset((known[0],))

    def _service(self, features: Features) -> tuple[Service, str]:
        """The service that answers first, and the model's name for control. ApiError if there is none."""
        cascade, services = self.driver.cascade, self.driver.services
        if cascade is not None and features.model == cascade.config.name:
            if features.is_passthrough:
                raise ApiError(400, f"{features.model!r} answers chats and completions only", "invalid_value", "model")
            return cascade.stages[0].service, features.model
        if not features.model:
            if len(self.plan.names) != 1:
                raise ApiError(400, "'model' is missing", "missing_required_parameter", "model")
            features.model = next(iter(self.plan.names))
        service = services.get(features.model)
        if service is None:
            self._add_reported_names()
            service = services.get(features.model)
        if service is None:
            service = self.driver.adapters.get(features.model)
        if service is None or service.model in self._retired_models:
            raise ApiError(404, str(unknown("model", features.model, self.names())), "model_not_found", "model")
        if features.is_passthrough and service.model in self._dual_dispatch_models:
            what = f"{features.model!r} answers chats and completions only, as its replicas do one phase each"
            raise ApiError(400, what, "invalid_value", "model")
        return service, service.model

    def _least_limit(self, model: str) -> float:
        """The most tokens that each of a model's engines holds; infinite if all hold equally many, or none is known."""
        limit = self._least_limits.get(model)
        if limit is None:
            limits = {engine.max_request_tokens for engine in self._engines_of(model)}
            limit = min(limits) if len(limits) > 1 else inf
            if model in self.driver.services:
                self._least_limits[model] = limit
        return limit

    def _engines_of(self, model: str) -> list[LiveReplica]:
        """The replicas that may hold a request for this model."""
        service = self.driver.services.get(model) or self.driver.adapters.get(model)
        return [] if service is None else [replica for replica in self.replicas if replica.model == service.model]

    def serves(self, model: str) -> bool:
        """Whether requests may name this model."""
        self._add_reported_names()
        service = self.driver.services.get(model) or self.driver.adapters.get(model)
        return model in self.names() or (service is not None and service.model not in self._retired_models)

    def names(self) -> list[str]:
        """The names of models in lists; requests may use others, too, such as aliases."""
        cascade = self.driver.cascade
        return [*self.plan.names, *([] if cascade is None else [cascade.config.name]), *self.driver.adapters]

    def parent_of(self, name: str) -> str | None:
        """The model of a LoRA adapter; None for other names."""
        service = None if name in self.driver.services else self.driver.adapters.get(name)
        return None if service is None else service.model

    def _add_reported_names(self) -> None:
        """Accept the names under which engines report their models."""
        for replica in self.replicas:
            if (served := self.fleet.pools.get(replica.pool)) is not None and served.pool.is_standby:
                continue
            for name in (replica.reported_model, *replica.aliases):
                if name is not None:
                    self.driver.services.setdefault(name, self.driver.services[replica.model])

    def _live(self, features: Features, model: str, tenant: str, deadline_s: float | None, longest: int) -> Live:
        """The request as control sees it. An estimate of its prompt is at most what fits into `longest` tokens."""
        prompt_tokens, output_tokens = self.prompt_tokens(features), features.max_tokens or 1
        if features.prompt_tokens is None:  # an estimate does not refuse the request: the engine may
            prompt_tokens = max(1, min(prompt_tokens, longest - output_tokens))
        # Messages of two workers may come in another order than their requests did.
        self._last_arrival_s = now = max(features.arrival_s, self._last_arrival_s)
        timeout_s = deadline_s or self.settings.timeout_s
        if deadline_s is None and features.is_flex:
            deadline_s = min(self.settings.flex_s, timeout_s)
        live = Live(
            next(self._ids), now, prompt_tokens, output_tokens, model, features.tier, 0, features.region,
            features.session_id, features.prefix, slo_ttft_s=features.slo_ttft_s,
            slo_tpot_s=features.slo_tpot_s, timeout_s=timeout_s,
            deadline_s=None if deadline_s is None else now + deadline_s, tenant=tenant,
            lora="" if self.parent_of(features.model) is None else features.model,
        )  # fmt: skip
        if self._reasons.get(model):
            live.phase = Phase.REASONING
        return live

    # Callbacks.

    def _check_stalls(self, now: float, _: object = None) -> None:
        """Look for engines that stall, and once a second for those that serve worse than their peers."""
        self.clock.at(self.clock.now + PERIOD_S, self._check_stalls, None)
        requests = list(self.driver.requests.values())
        with logged("the search for stalled engines failed"):
            self._stalls.check(requests, self.clock.now)
            self._stalls.abort_stuck(requests)
            self._raise_holds(requests)
            if int(now) != int(now - PERIOD_S):
                self.health.check_outliers()

    def _compare_predictions(self, now: float, _: object = None) -> None:
        """Compare the requests that have ended of late with what the step-time models say."""
        self.clock.at(self.clock.now + COMPARISON_PERIOD_S, self._compare_predictions, None)
        with logged("predictions could not be compared"):
            self.drift.compare({replica.id: replica.requests for replica in self.replicas}, self.clock.now)

    def _replica_up(self, replica: LiveReplica) -> None:
        self._least_limits.clear()
        replica.has_served = True
        if not self.plan.has_window:
            self.driver.limit_to_slots(replica)
        if replica.id in self._returning:
            self._returning.discard(replica.id)
            self.ejections.pop(replica.id, None)
            self.driver.start_slowly(replica, self.settings.outliers.slow_start_s)
        self.scaling.replica_up(replica)
        self._prompt_blocks.prepare(replica)
        for callback in self.on_replica_up:
            callback(replica)

    def _replica_ejected(self, replica: LiveReplica, reason: str, why: str) -> None:
        """A replica is ejected or generates nothing; without a reason, it returns."""
        if reason:
            self.ejections[replica.id] = why
            self._returning.add(replica.id)
            self.request_metrics.count_ejection(replica.model, reason)
        if self.decisions is not None:
            self.decisions.record_ejection(replica.id, replica.model, why, not reason, self.clock.now)

    def _cache_state_changed(self, replica: LiveReplica, state: str, why: str) -> None:
        """What is known of a replica's prefix cache is as new as its events, or is not any more."""
        if self.decisions is not None:
            self.decisions.record_cache_state(replica.id, replica.model, state, why, self.clock.now)

    def _request_ended(self, request: InFlightRequest, outcome: Outcome, now: float) -> None:
        live = request.live
        if outcome is _FINISHED:
            self._stalls.finished(request, now)
            if request.replica is not None and live.enqueued_s == live.placed_s and not request.is_unstreamed:
                self.drift.add(request.replica.id, request.replica.pool, live, now)
            if self.cache_feeds is not None and request.replica is not None:
                replica = self.replicas[request.replica.id]
                if expected := replica.take_expected(live):
                    self.cache_feeds.answered(replica, expected, live.cached_tokens)
            if request.response_id is not None and request.replica is not None:
                self.responses.add(request.response_id, request.replica.id, request.owner)
            if live.answer_s == live.answer_s:
                self._reasons[live.model] = live.reasoning_tokens > 0
        self.request_metrics.count_end(request, outcome, now)
        if live.fallback is not None and request.replica is not None:
            self.request_metrics.count_fallback(live.fallback.model, live.fallback.why)
        if outcome is _REJECTED:
            request.is_shed, request.retry_after_s = live.shed_s > 0, self.scaling.retry_after_s(live)
            if self.decisions is not None:
                self.decisions.record_hold_refusal(live, now, request.request_id or str(live.id))
        if self.decisions is not None:
            self.decisions.forget(live)
        if self.rolling_stats is not None:
            self.rolling_stats.count_end(live, outcome, now)
        self.recording.add(
            live, "" if live.stage_index < 0 else self.names()[-1], request.request_id, request.longest_gap_s,
            request.resumed_s,
        )  # fmt: skip
        if self.recording.num_waiting >= _RECORDS_PER_PART and self._records_timer is not None:
            self.flush_records()
        self.fleet.remove_empty()

    def _load_read(self, replica: LiveReplica, load: Load) -> None:
        replica.update_load(load)
        if self.cache_feeds is not None and load.num_ranks > 1:
            self.cache_feeds.ranks_reported(replica, load.num_ranks)
        self.driver.control.on_views_refreshed(self.clock.now)

    # Reports.

    def records(self) -> Records:
        return self.recording.records(self.fleet.records(), self.clock.now, self._judge_usd)

    def flush_records(self) -> None:
        """Give the records of the requests that have ended to the recording's writer."""
        if self.recording.enabled:
            self.recording.flush(self.fleet.records(), self.clock.now, self._judge_usd)

    def _flush_periodically(self, now: float, _: None) -> None:
        self._records_timer = self.clock.at(now + self.settings.records_period_s, self._flush_periodically, None)
        if self.recording.num_waiting:
            self.flush_records()

    @property
    def _judge_usd(self) -> float:
        cascade = self.driver.cascade
        return 0.0 if cascade is None else cascade.config.judge_usd


def _dual_dispatch_models(plan: ServingPlan) -> set[str]:
    """Models whose prefill and decode replicas get a request at the same time."""
    dual = [each for each in plan.pools if ADAPTERS[each.api].dual_dispatch and each.pool.role != "mixed"]
    return {each.pool.model.name for each in dual}
