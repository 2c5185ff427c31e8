"""Moves of requests and their KV caches between replicas, in virtual time.

A request without a KV cache only changes queues. With `stage_blocks` None, a request leaves its batch, is copied, and
continues at the target. Otherwise the copy is live: the request keeps decoding while its blocks are copied stage by
stage; blocks added meanwhile form further stages, and it pauses only for the last stage, which commits the move. Blocks
at the target are reserved before they are copied. If the target has no room, a live copy is aborted, and a stopped
request goes to the target's host memory if there is room.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from math import inf

from headway.catalog.costs import costs
from headway.control.control import Control
from headway.control.live import DECODING, NEVER, PAUSED, WAITING, Live
from headway.control.recorder import RareTable
from headway.core.fleet import Handover
from headway.core.record import MoveOutcome
from headway.perf.copies import NETWORK
from headway.sim.fabric import Fabric, Flow
from headway.sim.fleet import SimulatedFleet
from headway.sim.kernel import Kernel
from headway.sim.replica import Replica


class KvMove:
    """The move of one request; `Live.move` refers to it until it ends."""

    __slots__ = (
        "_transfers", "ahead_bytes", "copied_tokens", "flow", "handover", "host_tokens", "is_sent", "live", "num_bytes",
        "num_layers", "paused_s", "reserved", "source", "stage_blocks", "start_s", "target",
    )  # fmt: skip

    def __init__(
        self, transfers: KvTransfers, live: Live, source: Replica, target: Replica, stage_blocks: int | None, now: float
    ) -> None:
        self._transfers = transfers
        self.live, self.source, self.target = live, source, target
        self.stage_blocks = stage_blocks
        self.start_s, self.paused_s = now, NEVER
        self.reserved = 0
        """GPU blocks reserved at the target."""
        self.host_tokens = 0
        """Tokens reserved in the target's host memory instead of blocks."""
        self.copied_tokens = 0
        self.num_bytes = 0.0
        self.handover: Handover | None = None
        """The hand-over from a prefill to a decode replica, if the move is one."""
        self.ahead_bytes = 0.0
        """Bytes sent during the prefill, or by streams that broke since."""
        self.num_layers = 1
        self.is_sent = False
        """Whether the request itself is at the target, which waits for the KV."""
        self.flow: Flow | None = None

    def paused(self, now: float) -> None:
        """The replica has taken the request out of its batch."""
        self.paused_s = now
        self._transfers.paused(self, now)

    def abandon(self, now: float, outcome: MoveOutcome) -> None:
        """End the move. The caller decides what happens to the request at its source."""
        self._transfers.abandon(self, now, outcome)


class KvTransfers:
    """All moves of a fleet."""

    def __init__(self, kernel: Kernel, fleet: SimulatedFleet, control: Control, table: RareTable) -> None:
        self._fabric = Fabric(kernel, fleet.network_bytes_per_s, costs().kv_transfer[NETWORK].latency_s)
        self._replicas = fleet.replicas
        self._bytes_per_token: Callable[[int], float] = cache(fleet.kv_bytes_per_token)
        self._control = control
        self._table = table
        self._moves: dict[int, KvMove] = {}

    def begin(self, live: Live, target_id: int, stage_blocks: int | None, now: float) -> None:
        """Move a request that decodes, or that waits without KV on the GPU; other requests stay."""
        source, target = self._replicas[live.replica], self._replicas[target_id]
        if live.stage is WAITING and not live.swapped_tokens:
            source.remove_waiting(live, now)
            source.transit.unqueue(live)
            self._write(KvMove(self, live, source, target, None, now), now, MoveOutcome.DONE)
            target.enqueue(live, now, tokenized=True)
            self._control.on_moved(live, now)
        elif live.stage is WAITING and live.id not in source.batch.resident:
            self._from_host(KvMove(self, live, source, target, None, now), now)
        elif live.stage is DECODING:
            move = KvMove(self, live, source, target, stage_blocks, now)
            if stage_blocks is None:
                self._stop(move, now)
            else:
                self._register(move)
                self._next_stage(move, now)

    def hand_over(self, live: Live, target_id: int, handover: Handover, num_layers: int, now: float) -> None:
        """Move the KV of a computed prompt to a decode replica if it has room; otherwise the request stays."""
        source, target = self._replicas[live.replica], self._replicas[target_id]
        move = KvMove(self, live, source, target, None, now)
        move.handover, move.num_layers = handover, num_layers
        if handover.mode == "layerwise":
            num_bytes = live.computed_tokens * self._bytes_per_token(source.id)
            rate = self._fabric.share(source.id, target_id, _limit(handover))
            sent = rate * (now - live.stay_admitted_s)
            move.ahead_bytes = min(sent, num_bytes * (1 - 1 / num_layers))
        self._stop(move, now)

    def _register(self, move: KvMove) -> None:
        move.live.move = move
        self._moves[move.live.id] = move
        move.target.transit.num_arriving += 1
        _note_changes(move)

    def _from_host(self, move: KvMove, now: float) -> None:
        """Copy a preempted request's KV from host memory to host memory if the target has room."""
        live, source = move.live, move.source
        tokens = live.swapped_tokens
        if not move.target.batch.host.reserve(tokens):
            self._write(move, now, MoveOutcome.FULL)
            return
        move.host_tokens = tokens
        self._register(move)
        source.transit.send_waiting(live, now)
        self._send(move, tokens, now)

    def _stop(self, move: KvMove, now: float) -> None:
        live, target = move.live, move.target
        # The running iteration, if any, gives one more token.
        tokens = move.source.transit.kv_tokens(live, now) + 1
        blocks = target.batch.kv.blocks(tokens)
        in_host = move.handover is not None and move.handover.landing == "host" and target.batch.host.reserve(tokens)
        if in_host:
            move.host_tokens = tokens
        elif target.transit.reserve(blocks, now):
            move.reserved = blocks
        elif target.batch.host.reserve(tokens):
            move.host_tokens = tokens
        else:
            self._write(move, now, MoveOutcome.FULL)
            return
        self._register(move)
        move.source.transit.pause(live, now)

    def _next_stage(self, move: KvMove, now: float) -> None:
        live, block = move.live, move.target.batch.kv.block
        stage_tokens = (move.stage_blocks or 1) * block
        left = move.source.transit.kv_tokens(live, now) - move.copied_tokens
        if left <= stage_tokens:
            move.source.transit.pause(live, now)
        elif self._reserve(move, move.copied_tokens + stage_tokens, now):
            self._send(move, stage_tokens, now)
        else:
            move.abandon(now, MoveOutcome.FULL)

    @staticmethod
    def _reserve(move: KvMove, tokens: int, now: float) -> bool:
        """Reserve blocks for this many tokens in total."""
        more = move.target.batch.kv.blocks(tokens) - move.reserved
        if more > 0 and not move.target.transit.reserve(more, now):
            return False
        move.reserved += max(more, 0)
        return True

    def paused(self, move: KvMove, now: float) -> None:
        """Copy the rest of the KV of a request that has left its batch."""
        tokens = move.live.computed_tokens
        if move.stage_blocks is not None and not self._reserve(move, tokens + 1, now):
            move.abandon(now, MoveOutcome.FULL)
            move.source.take_back(move.live, now)
            return
        if move.handover is not None and move.handover.first_token == "decode":
            # The request itself goes through the gateway, and is tokenized again.
            move.source.placed.uncount(move.live)
            move.target.transit.expect(move.live)
            move.is_sent = True
            now += move.source.response_s + move.target.scheduler.tokenize_s * move.live.prompt_tokens
        self._send(move, tokens - move.copied_tokens, now)

    def _send(self, move: KvMove, tokens: int, now: float) -> None:
        source = move.source
        num_bytes = tokens * self._bytes_per_token(source.id)
        move.copied_tokens += tokens
        move.num_bytes += num_bytes
        self._stream(move, num_bytes - move.ahead_bytes, now)

    def _stream(self, move: KvMove, num_bytes: float, now: float) -> None:
        sent = partial(self._sent, move)
        limit = inf if move.handover is None else _limit(move.handover)
        if move.handover is not None:
            now += move.handover.degree * move.handover.stream_overhead_s
        move.flow = self._fabric.send(move.live.id, move.source.id, move.target.id, num_bytes, now, sent, limit)

    def _sent(self, move: KvMove, now: float) -> None:
        move.flow = None
        if move.live.stage is PAUSED:
            self._commit(move, now)
        else:
            self._next_stage(move, now)

    def _commit(self, move: KvMove, now: float) -> None:
        live, source, target = move.live, move.source, move.target
        tokens = live.computed_tokens
        self._forget(move)
        source.transit.release(live, now)
        if move.handover is not None and move.handover.first_token == "decode":
            tokens = max(tokens - 1, 1)
        if move.host_tokens:
            target.batch.host.receive(live, move.host_tokens, tokens)
        else:
            live.swapped_tokens = tokens
        self._write(move, now, MoveOutcome.DONE)
        if (
            move.handover is not None
            and move.handover.first_token == "sent"
            and live.first_token_s != live.first_token_s
        ):
            live.first_token_s = now + live.response_s
        target.receive(live, move.reserved, now)
        self._control.on_moved(live, now)

    def abandon(self, move: KvMove, now: float, outcome: MoveOutcome) -> None:
        """Release the reservations at the target."""
        self._forget(move)
        if move.flow is not None:
            self._fabric.stop(move.flow, now)
        if move.target.is_up:
            if move.reserved:
                move.target.transit.unreserve(move.reserved, now)
            move.target.batch.host.unreserve(move.host_tokens)
        self._write(move, now, outcome)

    def _forget(self, move: KvMove) -> None:
        if move.is_sent:
            move.target.transit.unexpect(move.live)
            move.source.placed.count(move.live)
        move.live.move = None
        del self._moves[move.live.id]
        move.target.transit.num_arriving -= 1
        _note_changes(move)

    def abandon_all(self, replica: int, now: float) -> None:
        """End all moves from and to a replica that is about to crash."""
        for move in [m for m in self._moves.values() if replica in (m.source.id, m.target.id)]:
            move.abandon(now, MoveOutcome.CRASHED)
            if move.target.id == replica and move.live.stage is PAUSED:
                move.source.take_back(move.live, now)

    def lose_streams(self, replica: int, num: int, again_s: float | None, now: float) -> None:
        """Break the streams of the `num` oldest hand-overs from and to a replica.

        They resume after `again_s`; None: the request continues at its source.
        """
        local = [m for m in self._moves.values() if m.handover is not None and replica in (m.source.id, m.target.id)]
        for move in sorted((m for m in local if m.flow is not None), key=_by_age)[:num]:
            if again_s is None:
                move.abandon(now, MoveOutcome.BROKEN)
                move.source.take_back(move.live, now)
            else:
                self._resume(move, again_s, now)

    def _resume(self, move: KvMove, again_s: float, now: float) -> None:
        """Send everything, or the incomplete layers, again."""
        flow, handover = move.flow, move.handover
        assert flow is not None and handover is not None
        if handover.mode == "layerwise":
            layer_bytes = move.num_bytes / move.num_layers
            arrived = move.num_bytes - self._fabric.left_bytes(flow, now)
            move.ahead_bytes = arrived // layer_bytes * layer_bytes
        self._fabric.stop(flow, now)
        self._write(move, now, MoveOutcome.BROKEN)
        self._stream(move, move.num_bytes - move.ahead_bytes, now + again_s)

    def write_unfinished(self, now: float) -> None:
        """Record the moves that are in progress when the run stops."""
        for move in list(self._moves.values()):
            self._write(move, now, MoveOutcome.UNFINISHED)

    def _write(self, move: KvMove, now: float, outcome: MoveOutcome) -> None:
        self._table.write((
            move.live.id, move.source.id, move.target.id, move.start_s, move.paused_s, now, move.copied_tokens,
            move.num_bytes, outcome,
        ))  # fmt: skip


def _note_changes(move: KvMove) -> None:
    move.source.timeline.note_change()
    move.target.timeline.note_change()


def _by_age(move: KvMove) -> tuple[float, int]:
    return move.start_s, move.live.id


def _limit(handover: Handover) -> float:
    """Bytes per second of all streams together."""
    return inf if handover.stream_bytes_per_s is None else handover.degree * handover.stream_bytes_per_s
