"""The gateway put together: what arrives becomes a request of control's, and control's word is done."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from heapq import heapify
from itertools import count

from msgspec import Struct

from headway.control.live import HELD, Live
from headway.control.policies import Policies
from headway.control.service import Service
from headway.core.errors import unknown
from headway.core.fleet import Pool
from headway.core.pacer import Pacer
from headway.core.policy import Ordering
from headway.core.record import Outcome, Records, ReplicaRecord
from headway.core.request import Phase
from headway.gateway.adapters import ADAPTERS
from headway.gateway.ask import Ask
from headway.gateway.clock import Clock
from headway.gateway.driver import Driver, Ticket
from headway.gateway.errors import ApiError
from headway.gateway.exchange import Exchange, Send
from headway.gateway.recording import Recording
from headway.gateway.replica import LiveReplica
from headway.gateway.settings import Api, Settings
from headway.gateway.telemetry import Sample, Telemetry
from headway.gateway.watch import Watch

_TOKENS_PER_CHAR = 0.25
"""Of prompts, until an engine has counted some."""
_LEARNING = 0.05
"""Weight of the newest count."""


class Served(Struct, frozen=True):
    """One pool, and where its replicas listen."""

    pool: Pool
    endpoints: tuple[str, ...]
    api: Api
    kv_blocks: int
    """Of one replica."""


class Plan(Struct, frozen=True):
    """What a gateway is to do."""

    pools: tuple[Served, ...]
    names: dict[str, tuple[str, ...]]
    """What requests may call each model."""
    policies: Policies
    pacer: Pacer
    seed: int
    settings: Settings
    tell_priority: bool
    """Engines are told tiers, and go by them."""


class Gateway:
    """One process's. Made in the event loop that it runs in."""

    def __init__(self, plan: Plan, recording: Recording) -> None:
        self.plan, self.settings, self.recording = plan, plan.settings, recording
        self.clock = Clock(asyncio.get_running_loop())
        ordering = plan.policies.ordering()
        self.replicas: list[LiveReplica] = []
        for served in plan.pools:
            for url in served.endpoints:
                self.replicas.append(self._replica(served, url, ordering))
        self.driver = Driver(
            self.clock,
            self.replicas,
            plan.names,
            plan.policies,
            plan.seed,
            recording.recorder,
            _longest,
            self.settings.hold_s,
        )
        self.driver.on_ended = self._ended
        self.watch = Watch(
            self.replicas, self.settings, self.driver.up, self.driver.down, self.driver.abandon, self._observed
        )
        self.telemetry = Telemetry()
        self.is_closing = False
        self._ids = count()
        self._sessions: dict[str, int] = {}
        self._tokens_per_char = _TOKENS_PER_CHAR
        self._reasons: dict[str, bool] = {}
        """Whether a model's last answer began with reasoning."""

    def _replica(self, served: Served, url: str, ordering: Ordering) -> LiveReplica:
        return LiveReplica(
            len(self.replicas), served.pool, url, ADAPTERS[served.api], served.kv_blocks, ordering, self.plan.pacer,
            self.clock, self.settings.stale_s,
        )  # fmt: skip

    def start(self) -> None:
        """Look for the replicas, and let policies tick."""
        self.watch.start()
        self.driver.start_ticking()

    async def stop(self) -> None:
        """Let streams end, for so long; then close."""
        self.is_closing = True
        end_s = self.clock.now + self.settings.drain_s
        while self.driver.tickets and self.clock.now < end_s:
            await asyncio.sleep(0.05)
        for ticket in list(self.driver.tickets.values()):
            self.driver.gave_up(ticket)
        await self.watch.stop()
        for replica in self.replicas:
            replica.client.close()

    # Requests.

    def exchange(self, ask: Ask, send: Send, request_id: str) -> Exchange:
        """A request comes in. ApiError where it cannot be taken."""
        if self.is_closing:
            raise ApiError(503, "the gateway is shutting down", "shutting_down", retry_after_s=1)
        service = self._service(ask.model)
        live = self._live(ask, service)
        if not service.fits(live):
            most = max(member.max_tokens for member in service.members)
            asked = f"about {live.prompt_tokens:,} prompt tokens and {live.output_tokens:,} to come"
            raise ApiError(400, f"{asked} are more than {most:,}", "context_length_exceeded")
        if len(service.line) >= self.settings.max_held and self._is_full(service):
            raise ApiError(429, f"{service.model}: too many requests are waiting", "queue_full", retry_after_s=1)
        ticket = Ticket(live, service)
        made = Exchange(
            ask, ticket, self.driver, self.watch, send, request_id, self.settings.max_attempts, self.plan.tell_priority
        )
        self.driver.arrived(ticket)
        return made

    def _service(self, model: str) -> Service:
        services = self.driver.services
        service = services.get(model)
        if service is None:
            self._learn_names()
            service = services.get(model)
        if service is None:
            raise ApiError(404, str(unknown("model", model, services)), "model_not_found", "model")
        return service

    def _learn_names(self) -> None:
        """Engines' own names for their models are names, too."""
        for replica in self.replicas:
            if replica.served is not None:
                self.driver.services.setdefault(replica.served, self.driver.services[replica.model])

    def _is_full(self, service: Service) -> bool:
        """Forget those in line that have ended; is it still too long?"""
        service.line[:] = [entry for entry in service.line if entry[2].stage is HELD]
        heapify(service.line)
        return len(service.line) >= self.settings.max_held

    def _live(self, ask: Ask, service: Service) -> Live:
        prompt_tokens = self.prompt_tokens(ask)
        live = Live(
            id=next(self._ids), arrival_s=self.clock.now, prompt_tokens=prompt_tokens,
            output_tokens=ask.max_tokens or 1, model=service.model, tier=ask.tier,
            region=ask.region, session_id=self._session(ask.session), prefix=ask.prefix(), slo_ttft_s=ask.slo_ttft_s,
            slo_tpot_s=ask.slo_tpot_s, timeout_s=self.settings.timeout_s,
        )  # fmt: skip
        if self._reasons.get(service.model):
            live.phase = Phase.REASONING
        return live

    def prompt_tokens(self, ask: Ask) -> int:
        """Tokens of a prompt: counted where it came as such, else by what texts had so far."""
        if ask.prompt_ids is not None:
            return len(ask.prompt_ids)
        return max(1, round(len(ask.text) * self._tokens_per_char))

    def _session(self, name: str | None) -> int | None:
        return None if name is None else hash(name) & 0x7FFF_FFFF_FFFF_FFFF

    def learn(self, ask: Ask, exchange: Exchange) -> None:
        """An exchange is over: engines have counted the prompt's tokens."""
        if exchange.prompt_tokens and len(ask.text) >= 32:
            ratio = exchange.prompt_tokens / len(ask.text)
            self._tokens_per_char += _LEARNING * (min(ratio, 2.0) - self._tokens_per_char)

    # What is heard.

    def _ended(self, live: Live, outcome: Outcome, now: float) -> None:
        if outcome is Outcome.FINISHED and live.answer_s == live.answer_s:
            self._reasons[live.model] = live.reasoning_tokens > 0
        self.telemetry.ended(live, outcome, now)
        self.recording.ended(live)

    def _observed(self) -> None:
        self.driver.control.observed(self.clock.now)

    def metrics(self) -> str:
        """The gateway's own metrics, as Prometheus reads them."""
        flight: list[Sample] = []
        ups: list[Sample] = []
        for replica in self.replicas:
            labels = {"pool": replica.pool, "model": replica.model, "replica": str(replica.id)}
            flight.append((labels, replica.num_in_flight))
            ups.append((labels, float(self.watch.is_up(replica))))
        held: list[Sample] = [({"model": s.model}, len(s.held())) for s in self.driver.control.services]
        return self.telemetry.text([
            ("requests_in_flight", "Requests at a replica", flight),
            ("replica_up", "Whether requests are sent to a replica", ups),
            ("requests_held", "Requests that wait in the gateway", held),
        ])  # fmt: skip

    def records(self) -> Records:
        """What has run so far."""
        return self.recording.records([_record(r, s, self.clock.now) for r, s in self._replica_pools()], self.clock.now)

    def _replica_pools(self) -> Iterator[tuple[LiveReplica, Pool]]:
        pools = [served.pool for served in self.plan.pools for _ in served.endpoints]
        return zip(self.replicas, pools, strict=True)

    @property
    def num_up(self) -> int:
        """Replicas to which requests are sent."""
        return sum(self.watch.is_up(replica) for replica in self.replicas)


def _longest(replica: LiveReplica) -> int:
    """Prompt and output together, that a replica can hold."""
    return min(replica.kv_blocks_total * replica.block_size_tokens + 1, replica.max_context_tokens)


def _record(replica: LiveReplica, pool: Pool, end_s: float) -> ReplicaRecord:
    """A replica's row; the gateway does not know what an engine that is down costs, so it is paid for throughout."""
    num_gpus = pool.parallel.num_gpus
    return ReplicaRecord(
        replica.id, pool.name, pool.model.name, pool.gpu.name, pool.region, num_gpus, pool.usd_per_hour,
        pool.gpu.watts * num_gpus, replica.kv_blocks_total * replica.block_size_tokens, replica.max_num_seqs,
        ((0.0, end_s),),
    )  # fmt: skip
