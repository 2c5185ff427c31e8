"""What control's scaling says, done to engines: they are started, count when they are up, are drained, and stopped."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from math import ceil, inf
from random import Random
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from headway.control.live import Live
from headway.control.observe import MutablePoolsView
from headway.control.scaling import PoolState, Scaling, Unit
from headway.control.service import Service
from headway.core.errors import HeadwayError
from headway.core.fleet import unit_of
from headway.core.policy import Ordering
from headway.gateway.fleet.combo_readiness import ComboReadiness
from headway.gateway.fleet.combos import combos_of
from headway.gateway.fleet.local_resources import Gpus, Ports
from headway.gateway.fleet.processes import LocalProcesses
from headway.gateway.fleet.replica import LiveReplica
from headway.gateway.fleet.starting import Actuator, Kubernetes, Processes

if TYPE_CHECKING:
    from headway.gateway.gateway import Gateway
    from headway.gateway.plan import Plan, Served

log = logging.getLogger("headway.gateway")
MOST_KINDS = 10_000
"""Of model, region and tier, that demand is told apart by."""


class _Scaling(Scaling):
    """Scaling where clients say their regions and tiers, of which there may be any number."""

    news: Callable[[], Sequence[str]] = tuple
    num_told = 0
    call_off: Callable[[PoolState], None]
    """Try no more to start one that has failed."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self._mistake = ""
        self.holding: set[str] = set()
        """Pools and combos of which those that do not start have GPUs all the same, until they are called off."""

    def _start_units(self, pool: PoolState, num: int, now: float) -> None:
        """Those that do not start are tried on as it is; others are not started in their place."""
        num_draining = sum(unit[0].is_draining for unit in pool.units())
        num = min(num, max(num - pool.num_failed, num_draining))
        if num > num_draining:
            self._make_room(pool)
        super()._start_units(pool, num, now)

    def _make_room(self, pool: PoolState) -> None:
        """Others' that do not start need not have GPUs."""
        for other in self._here(pool.region):
            for _ in range(self._num_holding(other) if other.gpus.keys() & pool.gpus.keys() else 0):
                if self.has_room(pool):
                    return
                self.call_off(other)

    def _num_holding(self, pool: PoolState) -> int:
        return pool.num_failed if pool.name in self.holding else 0

    def _num_gpus(self, region: str, gpu: str) -> int:
        failed = sum(each.gpus.get(gpu, 0) * self._num_holding(each) for each in self._here(region))
        return super()._num_gpus(region, gpu) + failed

    def _here(self, region: str) -> list[PoolState]:
        return [pool for pool in self._pools.values() if pool.region == region]

    def stop_empty(self, now: float) -> None:
        """As ever; but a model's last replica is used on while another one, for which there is room, starts."""
        kept = [entry for entry in self._draining if self._is_needed(*entry)]
        self._draining = [entry for entry in self._draining if entry not in kept]
        super().stop_empty(now)
        self._draining += kept

    def _is_needed(self, service: Service, unit: Unit) -> bool:
        if any(member.is_up and not member.is_draining for member in service.members):
            return False
        return any(pool.num_starting + pool.num_failed for pool in self._pools.values() if pool.service is service)

    def tick(self, now: float) -> None:
        """Ask how many there should be, see to it, and log what the planner has to say; a mistake once."""
        try:
            super().tick(now)
            self._mistake = ""
        except HeadwayError as error:
            if str(error) != self._mistake:
                log.error("%s", error)
            self._mistake = str(error)
        for pool in self._pools.values():
            num_holding = self._num_holding(pool)
            for _ in range(min(pool.num_serving + pool.num_starting + num_holding - pool.wanted, num_holding)):
                self.call_off(pool)
        news = self.news()
        for each in news[self.num_told :]:
            log.info("%s", each)
        self.num_told = len(news)

    def count_arrival(self, live: Live, model: str) -> None:
        """Count a request; kinds that are new when there are very many go without region and tier."""
        known = self._view.arrived
        key = model, live.region, live.tier
        if key not in known and len(known) >= MOST_KINDS:
            key = model, "", 0
        num, tokens = known.get(key, (0, 0))
        known[key] = num + 1, tokens + live.prompt_tokens


class LiveScaling:
    """All pools whose replicas the gateway starts. Satisfies `control.effects.ScalingEffects` and `starting.Host`."""

    def __init__(self, gateway: Gateway, ordering: Ordering) -> None:
        self._gateway, self._ordering = gateway, ordering
        self._served = {served.pool.name: served for served in gateway.plan.pools}
        self._ports: dict[tuple[int, int], Ports] = {}
        num_gpus = gateway.plan.planned_gpus
        self._gpus = None if num_gpus is None else Gpus(num_gpus)
        self._actuators = {name: self._actuator(s) for name, s in self._served.items() if s.start is not None}
        self._scaling: Scaling | None = None
        self._states: dict[str, PoolState] = {}
        self._initial = {name: served.num_initial for name, served in self._served.items()}
        """How many of those that come are the fleet's from the start."""
        self._starting: set[int] = set()
        """Replicas that are somewhere, and have not been up yet."""
        self._wholes = ComboReadiness(gateway, self._states, self)
        self._unawaited: set[int] = set()
        """Of these, those of which nobody expects any more that they will be."""
        self._took_s: dict[str, float] = {}
        """From its start, until the last of a model's replicas was up."""
        self.failed_of: Counter[str] = Counter()
        """By pool, replicas that are wanted and do not start."""
        self.why_of: dict[str, str] = {}
        """What became of the last start that failed."""

    def _actuator(self, served: Served) -> Actuator:
        pool = replace(served.pool, replicas=served.num_initial)
        if isinstance(served.start, Processes):
            how = served.start
            return LocalProcesses(pool, how, self, self._ports_of(how), self._gpus_of(served))
        assert isinstance(served.start, Kubernetes)
        from headway.gateway.fleet.kubernetes import Pods

        return Pods(pool, served.start, self)

    def _ports_of(self, how: Processes) -> Ports:
        """Pools of one model's shapes share them."""
        return self._ports.setdefault(how.ports, Ports(*how.ports))

    def _gpus_of(self, served: Served) -> Gpus | None:
        cascade = self._gateway.plan.policies.cascade
        planned = cascade is not None and served.pool.model.name in cascade.models
        return self._gpus if planned else None

    def serve(self, services: dict[str, Service]) -> Scaling | None:
        """The plan's scaler, over all its pools."""
        plan: Plan = self._gateway.plan
        for served in plan.pools:
            pool = served.pool
            cached_tokens = served.kv_blocks * pool.engine.block_size_tokens + 1
            services[pool.model.name].announce(min(cached_tokens, pool.model.max_context_tokens))
        if plan.policies.scaler is None:
            return None
        deployments = {served.deployment.name: served.deployment for served in plan.pools}
        self._states |= {name: PoolState(deployment, services) for name, deployment in deployments.items()}
        view = MutablePoolsView(Random(f"{plan.seed}/scaler"))
        states = list(self._states.values())
        self._scaling = _Scaling(plan.policies.scaler(), view, states, self, plan.gpu_limits)
        self._scaling.news, self._scaling.call_off = plan.news, self._call_off
        for served in plan.pools:
            if served.combo is not None or isinstance(served.start, Kubernetes):
                self._scaling.holding.add(served.deployment.name)
        return self._scaling

    def start(self) -> None:
        """Start what is to be there at first."""
        for combo in combos_of(self._gateway.plan.pools):
            self.expect(combo.name, combo.replicas)
        for actuator in self._actuators.values():
            actuator.begin()

    async def stop(self) -> None:
        """Nothing that was started stays, but for what is a cluster's to keep."""
        for actuator in self._actuators.values():
            await actuator.close()

    # Control's effects.

    def start_replica(self, deployment: str, now: float) -> None:
        """One more of a pool, or all of one more combo."""
        for pool in unit_of(next(s.deployment for s in self._served.values() if s.deployment.name == deployment)):
            self._actuators[pool.name].more()

    def _call_off(self, state: PoolState) -> None:
        """One of those that have failed, with all that is there of it, is given up."""
        parts = unit_of(next(s.deployment for s in self._served.values() if s.deployment.name == state.name))
        is_combo = parts[0].name not in self._states
        members = self._wholes.call_off(state.name) if is_combo else []
        for member in members:
            self._leave(member, at_once=True)
        for part in parts:
            num = part.replicas if is_combo else 1
            self._actuators[part.name].fewer(num - sum(member.pool == part.name for member in members))
        if is_combo:
            self._wholes.recount(state.name, less=1)

    def drain(self, replica: int, on: bool) -> None:
        """Give it nothing more, and move out what can be moved; or use it again."""
        self._gateway.driver.drain(self._gateway.replicas[replica], on)

    def stop_replica(self, replica: int, now: float) -> None:
        """It is empty. One that ended while it drained is gone already."""
        gone = self._gateway.replicas[replica]
        self._leave(gone, at_once=False)
        if not any(member.is_up for member in self._gateway.driver.services[gone.model].members):
            log.warning("%s: its last replica goes before another one serves: requests wait, each for up to %g s",
                        gone.model, self._gateway.settings.hold_s)  # fmt: skip

    def expected_s(self, model: str) -> int:
        """Until another of a model's replicas may be up, by what the last start took; where nobody knows, soon."""
        if model not in self._took_s:
            return 1
        now, replicas = self._gateway.driver.now, self._gateway.replicas
        began = [self._gateway.terms[id].start_s for id in self._starting if replicas[id].model == model]
        return max(ceil(self._took_s[model] - (now - min(began, default=now))), 1)

    def _leave(self, replica: LiveReplica, at_once: bool) -> None:
        if replica in self._gateway.fleet.present():
            self._gateway.fleet.remove(replica, at_once)

    # What happens to replicas.

    def up(self, replica: LiveReplica) -> None:
        """It has been seen to be well, for the first time or again."""
        driver = self._gateway.driver
        if replica.id not in self._starting:
            if not self._wholes.waits(replica):
                driver.replica_up(replica)
            return
        self._starting.discard(replica.id)
        term = self._gateway.terms[replica.id]
        term.down = ((term.start_s, driver.now),)
        self._took_s[replica.model] = driver.now - term.start_s
        self._actuators[replica.pool].up(replica)
        self._counts_again(replica)
        member = driver.services[replica.model].member(replica.id)
        assert member is not None
        if self._scaling is None:
            driver.replica_up(replica)
        elif replica.is_of_combo:
            self._wholes.up(replica)
            self._recount(replica.pool)
        else:
            member.is_up = True
            driver.control.on_unit_started(replica.pool, [member], driver.now)

    def gone(self, replica: LiveReplica) -> None:
        """It is no longer one of the gateway's, by whoever's wish."""
        state = self._states.get(replica.deployment)
        if replica.id in self._starting:
            self._starting.discard(replica.id)
            self._counts_again(replica)
            if state is not None and not replica.is_of_combo:
                state.num_starting -= 1
        if state is not None:
            self._forget(state, replica)
            if replica.is_of_combo:
                self._wholes.gone(replica)
                self._recount(replica.pool)
        if replica.pool in self._actuators:
            self._actuators[replica.pool].stop(replica)

    @staticmethod
    def _forget(state: PoolState, replica: LiveReplica) -> bool:
        """Whether it was one of the pool's that had been up."""
        before = len(state.members)
        state.members = [member for member in state.members if member.view is not replica]
        return len(state.members) < before

    # For who starts them.

    def came(self, pool: str, url: str, is_awaited: bool = True) -> LiveReplica:
        """One will be there, or is: it counts as up when it has been seen to be well."""
        gateway = self._gateway
        replica = gateway.new_replica(self._served[pool], url, self._ordering)
        term = gateway.terms[replica.id]
        term.down = ((term.start_s, inf),)
        if self._initial[pool] > 0:
            self._initial[pool] -= 1
        else:
            term.origin = "new"
        self._starting.add(replica.id)
        if not is_awaited:
            self._unawaited.add(replica.id)
        gateway.driver.add(replica)
        gateway.health.add(replica)
        return replica

    def lost(self, replica: LiveReplica) -> bool:
        """What it streamed goes on elsewhere, if it can. Unless it drained, there is to be another one."""
        was_up, is_awaited = replica.id not in self._starting, replica.id not in self._unawaited
        self._starting.discard(replica.id)
        self._unawaited.discard(replica.id)
        state, again = self._states.get(replica.deployment), not replica.is_draining
        if replica.is_of_combo:
            self._wholes.lost(replica, again)
        elif state is not None:
            if was_up:
                self._forget(state, replica)
            if is_awaited:
                state.num_starting += again - (not was_up)
        self._leave(replica, at_once=True)
        self._recount(replica.pool)
        return again

    def failed(self, pool: str, why: str) -> None:
        """One of those that are awaited does not start."""
        self.failed_of[pool] += 1
        self.why_of[pool] = why
        if (state := self._states.get(pool)) is not None:
            state.num_failed += 1
            state.num_starting -= 1
        self._recount(pool)

    def mended(self, pool: str) -> None:
        """One that had failed is up, or is not tried any more."""
        self.failed_of[pool] -= 1
        if (state := self._states.get(pool)) is not None:
            state.num_failed -= 1
        self._recount(pool)

    def _recount(self, pool: str) -> None:
        """Of a combo: a part that does not start keeps all of it from starting."""
        self._wholes.recount(self._served[pool].deployment.name)

    def _counts_again(self, replica: LiveReplica) -> None:
        """One that nobody awaited is there after all, and is about to be counted as one that was."""
        if replica.id in self._unawaited:
            self._unawaited.discard(replica.id)
            if (state := self._states.get(replica.pool)) is not None:
                state.num_starting += 1

    def wants(self, pool: str) -> bool:
        """One that had failed is still wanted."""
        state = self._states.get(pool)
        return state is None or state.wanted > state.num_serving + state.num_starting

    def has_room(self, pool: str) -> bool:
        """There are GPUs for it."""
        state = self._states.get(pool)
        return state is None or self._scaling is None or self._scaling.has_room(state)

    def is_starting(self, replica: LiveReplica) -> bool:
        """It is somewhere, and has not been up yet."""
        return replica.id in self._starting

    def asks(self, pool: str, num: int) -> None:
        """A cluster is to have so many of them in all."""
        self._wholes.asks(pool, num)

    def expect(self, pool: str, num: int) -> None:
        """So many will be up that are not yet."""
        if pool in self._states:
            self._states[pool].num_starting = max(num - self._states[pool].num_failed, 0)
        elif (served := self._served.get(pool)) is not None and served.combo is not None:
            self._wholes.expect(served.combo)

    def retire(self, replica: LiveReplica) -> None:
        """It is drained, then given back."""
        if replica.pool in self._states:
            self._forget(self._states[replica.pool], replica)
        elif replica.is_of_combo:
            self._gateway.units.leave(replica)  # another one takes its place while it ends what it has
        self._leave(replica, at_once=False)
