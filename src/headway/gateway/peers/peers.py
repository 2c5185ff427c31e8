"""The other gateways of this fleet: their load at its replicas, exchanged through a store in small, frequent messages.

Each gateway sends its whole state when it has changed, at most every `period_s`, and at least every third of `lease_s`.
A lost message therefore costs one period, and a new or returning gateway is up to date after one message from each
other gateway. While the store is unreachable, each gateway uses only its own counts.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Protocol
from uuid import uuid4

from msgspec import MsgspecError

from headway.control.live import Live
from headway.control.peers import GivenElsewhere, Load, PeerLoads, SharedReplica, load_of
from headway.core.policy import PeerOrdering
from headway.gateway.clock import Clock
from headway.gateway.errors import line_of, logged
from headway.gateway.fleet.scaling import LiveScaling
from headway.gateway.fleet.specs import Kubernetes, ServingPlan
from headway.gateway.peers.leader import Leader, Lease, StoreLease
from headway.gateway.peers.messages import (
    MAX_SEGMENTS,
    Arrived,
    Drained,
    Held,
    LoadAt,
    Message,
    Piece,
    Placed,
    Quarantined,
    Served,
    packed,
    replica_key,
    unpacked,
)
from headway.gateway.peers.scaling import SharedScaling
from headway.gateway.peers.stores import peer_store
from headway.gateway.peers.streams import StoredStreams
from headway.gateway.relay.quarantine import Quarantine
from headway.gateway.scheduling.driver import Driver
from headway.gateway.scheduling.replica import LiveReplica
from headway.gateway.scheduling.stream_copy import StreamCopies, StreamKey
from headway.gateway.settings import PeerSettings
from headway.gateway.telemetry.metrics import Metric, Sample

log = logging.getLogger("headway.gateway")
_RETRY_S = 0.5
"""Time between two attempts to connect to the store."""
_CLEAN_S = 30.0
"""Time between two clean-ups of the store."""
_MOST_PLACED = 256
"""Maximum number of prompts sent at a time. Of more prompts, only the latest are sent."""


class PeerHost(Protocol):
    """The parts of the gateway that its peers' state changes."""

    @property
    def driver(self) -> Driver: ...
    @property
    def clock(self) -> Clock: ...
    @property
    def quarantine(self) -> Quarantine: ...
    @property
    def copies(self) -> StreamCopies: ...
    @property
    def replicas(self) -> list[LiveReplica]: ...
    @property
    def scaling(self) -> LiveScaling: ...
    @property
    def plan(self) -> ServingPlan: ...


class _PeerState:
    """The received state of another gateway."""

    def __init__(self, run: int) -> None:
        self.run = run
        self.sequence = -1
        self.loads: dict[int, Load] = {}
        """Loads by replica key, of the state that is still arriving."""
        self.held: dict[str, int] = {}
        """Held requests by model, of the state that is still arriving."""
        self.drained: set[int] = set()
        """Keys of drained replicas, of the state that is still arriving."""


class Peers:
    """One gateway's part in a fleet that several gateways share. Belongs to one event loop."""

    def __init__(self, settings: PeerSettings, host: PeerHost) -> None:
        self._settings, self._host = settings, host
        self.name = f"{settings.name or socket.gethostname()}-{os.getpid()}-{uuid4().hex[:6]}"
        self._run_number = time.time_ns()
        self.loads, self._served_by_peers = PeerLoads(self._load_changed), GivenElsewhere()
        self.store = peer_store(settings.store, self.name, settings.lease_s)
        self._streams: StoredStreams | None = None
        self.scaling: SharedScaling | None = None
        """The scaling shared with other gateways; None if the fleet has no scaler."""
        self.is_up = False
        """Whether the store can be used."""
        self.num_errors = 0
        """Number of times that the store was lost or unreachable."""
        self.num_sent = self.num_received = 0
        """Numbers of messages."""
        self._states: dict[str, _PeerState] = {}
        self._placed: list[Placed] = []
        self._quarantined: list[Quarantined] = []
        self._is_applying = False
        self._sequence = 0
        self._last: tuple[list[Piece], float] = ([], float("-inf"))
        """(the last published state, the time of its publication)."""
        self._lost = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    # Set-up.

    def view(self, replica: LiveReplica) -> SharedReplica:
        """A replica as policies see it, with the loads of all gateways."""
        return SharedReplica(replica, replica, self.loads.at(replica.id))

    def start(self) -> None:
        host = self._host
        if self._settings.streams:
            self._streams = StoredStreams(self.store, host.copies)
        host.quarantine.listeners.append(self._on_quarantined)
        for replica in host.replicas:
            self.follow(replica)
        if host.scaling.control is not None:
            lease_s = self._settings.lease_s
            leader = Leader(self.name, self._lease(), lease_s)
            self.scaling = SharedScaling(host.scaling, leader, lease_s)
            leader.start()
        self._tasks = [asyncio.create_task(self._run()), asyncio.create_task(self._remove_silent())]

    def _lease(self) -> Lease:
        """The lease whose holder runs the scaler."""
        if self._settings.leader == "store":
            return StoreLease(self.store)
        from headway.gateway.fleet.lease import KubernetesLease

        pods = next(each.start for each in self._host.plan.pools if isinstance(each.start, Kubernetes))
        return KubernetesLease(f"headway-{pods.name}", pods.namespace, pods.context, self.name)

    def follow(self, replica: LiveReplica, _: object = None) -> None:
        """Report prompts from now on when they are placed at a replica."""
        replica.on_placed = self._on_placed

    async def stop(self) -> None:
        """Leave the group, so that the other gateways need not wait for the lease to expire."""
        if self.scaling is not None:
            await self.scaling.leader.stop()
        for task in self._tasks:
            task.cancel()
        for task in self._tasks:
            with suppress(asyncio.CancelledError):
                await task
        with suppress(OSError):
            if self.is_up:
                self._sequence += 1
                await self.store.publish(list(packed(self.name, self._run_number, self._sequence, (), True)))
        await self.store.close()

    # Sending.

    def _on_placed(self, replica: LiveReplica, live: Live) -> None:
        if not replica.cache_index.guesses or not live.prefix:
            return  # the replica's engine sends its events to all gateways
        segments = [value for each in live.prefix[:MAX_SEGMENTS] for value in (each.id, each.tokens)]
        key = replica_key(replica.model, replica.url)
        self._placed.append(Placed(key, live.id, live.prompt_tokens, segments))
        if len(self._placed) > _MOST_PLACED:
            del self._placed[:-_MOST_PLACED]

    def _on_quarantined(self, digest: bytes, until_s: float) -> None:
        if not self._is_applying:
            self._quarantined.append(Quarantined(digest.hex(), until_s - self._host.clock.now))

    def _state(self) -> list[Piece]:
        """The current state for the other gateways. News is included in only one state."""
        host = self._host
        pieces: list[Piece] = [
            LoadAt(replica_key(replica.model, replica.url), load_of(replica))
            for replica in host.replicas
            if replica.num_in_flight and not replica.is_removed
        ]
        for service in host.driver.control.services:
            if isinstance(service.hold_ordering, PeerOrdering):
                given = service.hold_ordering.given()
                pieces += [Served(service.model, share, amount) for share, amount in given.items()]
        if self.scaling is not None:
            pieces += self.scaling.pieces(host.replicas)
        pieces += self._placed
        pieces += self._quarantined
        self._placed, self._quarantined = [], []
        return pieces

    async def _run(self) -> None:
        while True:
            try:
                self._lost.clear()
                await self.store.connect(self._receive, self._lost.set)
                self._last = ([], float("-inf"))
                now = self._host.clock.now
                for digest, until_s in self._host.quarantine.held():
                    self._quarantined.append(Quarantined(digest.hex(), until_s - now))
                log.log(
                    logging.WARNING if self.num_errors else logging.INFO, "peers: %s shares its state now", self.name
                )
                self.is_up = True
                await self._exchange()
                raise ConnectionError("the connection is closed")
            except OSError as error:
                if self.is_up or not self.num_errors:
                    log.error("peers: the store cannot be used, and this gateway goes on alone: %s", line_of(error))
                self.num_errors += 1
            except Exception:  # a defect must not stop later exchanges
                self.num_errors += 1
                log.exception("peers")
            self.is_up = False
            await asyncio.sleep(_RETRY_S)

    async def _exchange(self) -> None:
        """Publish until the connection is lost."""
        clean_s = self._host.clock.now
        while not self._lost.is_set():
            await self._publish()
            if self._streams is not None:
                await self._streams.write()
            if self._host.clock.now >= clean_s:
                clean_s += _CLEAN_S
                await self.store.tidy()
            with suppress(TimeoutError):
                await asyncio.wait_for(self._lost.wait(), self._settings.period_s)

    async def _publish(self) -> None:
        now, pieces = self._host.clock.now, self._state()
        before, published_s = self._last
        if pieces == before and now - published_s < self._settings.lease_s / 3:
            return
        self._sequence += 1
        messages = list(packed(self.name, self._run_number, self._sequence, pieces))
        await self.store.publish(messages)
        self.num_sent += len(messages)
        self._last = pieces, now

    # Receiving.

    def _receive(self, text: str) -> None:
        with logged("peers: a message could not be used"):
            try:
                message = unpacked(text)
            except MsgspecError as error:
                log.warning("peers: a message of another version: %s", error)
                return
            if message.gateway != self.name:
                self.num_received += 1
                self._use(message)

    def _use(self, message: Message) -> None:
        now, name = self._host.clock.now, message.gateway
        if message.is_leaving:
            self._remove(name)
            return
        state = self._states.get(name)
        if state is None or message.run > state.run:
            self.loads.forget(name)
            self._served_by_peers.forget(name)
            if self.scaling is not None:
                self.scaling.forget_demand(name)
            state = self._states[name] = _PeerState(message.run)
            log.info("peers: %s shares its state", name)
        if message.run < state.run or message.sequence < state.sequence:
            return
        if message.sequence > state.sequence:
            state.sequence, state.loads, state.held, state.drained = message.sequence, {}, {}, set()
        found = self._by_key()
        self._is_applying = True
        try:
            for piece in message.pieces:
                self._use_piece(piece, name, state, found, now)
        finally:
            self._is_applying = False
        if message.is_last:
            self.loads.update(name, {found[key].id: load for key, load in state.loads.items() if key in found}, now)
            if self.scaling is not None:
                self.scaling.update(name, state.held, state.drained, found)
            self._host.driver.control.on_views_refreshed(now)

    def _by_key(self) -> dict[int, LiveReplica]:
        return {replica_key(each.model, each.url): each for each in self._host.replicas if not each.is_removed}

    def _use_piece(
        self, piece: Piece, peer: str, state: _PeerState, replicas: Mapping[int, LiveReplica], now: float
    ) -> None:
        """Apply one piece. `replicas` are the replicas of this gateway by key."""
        if isinstance(piece, LoadAt):
            state.loads[piece.replica] = piece.load
        elif isinstance(piece, Placed):
            replica = replicas.get(piece.replica)
            if replica is not None and replica.cache_index.guesses:
                replica.cache_index.placed(_with_unique_id(piece, state))
        elif isinstance(piece, Quarantined):
            self._host.quarantine.hold(bytes.fromhex(piece.digest), now + piece.left_s)
        elif isinstance(piece, Held):
            state.held[piece.model] = piece.num
        elif isinstance(piece, Drained):
            state.drained.add(piece.replica)
        elif isinstance(piece, Arrived):
            if self.scaling is not None:
                self.scaling.arrived(peer, piece)
        else:
            service = self._host.driver.services.get(piece.model)
            ordering = None if service is None else service.hold_ordering
            self._served_by_peers.report(peer, piece.model, piece.share, piece.service, ordering)

    def _load_changed(self, replica: int, others: Load) -> None:
        for service in self._host.driver.control.services:
            if service.sent is not None and service.member(replica) is not None:
                service.sent.set_elsewhere(replica, others.prompt_tokens, others.prefill_tokens_left)

    async def _remove_silent(self) -> None:
        """Forget gateways whose lease has expired, and their loads at the replicas."""
        lease_s = self._settings.lease_s
        while True:
            await asyncio.sleep(lease_s / 8)
            with logged("peers: a silent gateway could not be forgotten"):
                for name in self.loads.forget_silent(self._host.clock.now, lease_s):
                    log.warning("peers: no message of %s for %g s", name, lease_s)
                    self._remove(str(name))

    def _remove(self, name: str) -> None:
        if name in self._states:
            self.loads.forget(name)
            if self.scaling is not None:
                self.scaling.forget(name, self._by_key())
            # The served tokens stay known, because the gateway may only have been unreachable.
            self._host.driver.control.on_views_refreshed(self._host.clock.now)

    # Reports.

    def metrics(self) -> list[Metric]:
        others: list[Sample] = [
            ({"replica": str(replica.id), "pool": replica.pool}, self.loads.at(replica.id).num_in_flight)
            for replica in self._host.replicas
            if not replica.is_removed
        ]
        messages: list[Sample] = [
            ({"way": "sent"}, float(self.num_sent)),
            ({"way": "received"}, float(self.num_received)),
        ]
        leads: list[Sample] = [] if self.scaling is None else [({}, float(self.scaling.leader.leads))]
        return [
            ("headway_peers", [({}, float(len(self.loads.peers)))]),
            ("headway_peer_leads", leads),
            ("headway_peer_messages_total", messages),
            ("headway_peer_requests_in_flight", others),
            ("headway_peer_store_up", [({}, float(self.is_up))]),
            ("headway_peer_store_errors_total", [({}, float(self.num_errors))]),
        ]

    # Streams.

    async def restore(self, key: StreamKey | None) -> None:
        """Fetch a stream that another gateway was sending when it was killed."""
        if key is None or self._streams is None or not self.is_up:
            return
        with suppress(OSError):
            await self._streams.restore(key.digest)


def _with_unique_id(placed: Placed, state: _PeerState) -> Placed:
    """A copy of the prompt with an id that no request of any gateway has."""
    return Placed(placed.replica, (state.run << 32) + placed.id, placed.prompt_tokens, placed.segments)
