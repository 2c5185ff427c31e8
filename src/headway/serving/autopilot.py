"""Carries out the stages of `headway.autopilot.machine` at a gateway: sets policies, measures, and changes the fleet
file.

The state is written to disk before each effect. While a change is staged, the fleet file stays unchanged and the
policies in memory alternate, so a killed gateway restarts with the old policies. When a change has been judged, the
fleet file is replaced by the new version or stays; either step can be repeated safely.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from datetime import date, datetime
from math import inf
from pathlib import Path
from typing import Any, TypeVar

from msgspec.structs import replace

from headway.autopilot.evidence import Bounds
from headway.autopilot.machine import (
    ALPHA,
    CarriedOut,
    Change,
    Event,
    Limits,
    Observed,
    Resumed,
    Saving,
    Staged,
    State,
    Stopped,
    Withdrawn,
    step,
    too_dear,
    why_not,
)
from headway.autopilot.staging import Staging, staging, staging_for_dollars
from headway.config.yaml_edit import edited
from headway.control.decisions import Decision
from headway.control.policies import Policies
from headway.core.errors import HeadwayError
from headway.core.fleet import Combo, Pool, unit_of
from headway.gateway.blocking import OneAtATime
from headway.gateway.fleet.specs import ServingPlan
from headway.gateway.gateway import Gateway
from headway.gateway.settings import AutopilotSettings
from headway.gateway.telemetry.autopilot import AutopilotState, PastChange
from headway.gateway.telemetry.trial import Period, Trial
from headway.limits.calendar import Today, weekly, zone
from headway.serving.autopilot_state import AutopilotFiles, Stored, shown
from headway.serving.gateway import windows
from headway.serving.proposals import advice, changes_of, kinds_option, saving_of, why_none
from headway.serving.reload import FleetFile

log = logging.getLogger("headway.gateway")
POLL_S = 0.5
DISK_S = 10.0
"""Time limit of a file operation. After it, the change on trial is taken back."""
T = TypeVar("T")
SCALING = "scaling.settings"
LEAST_SETTLE_S = 1.0
_MOST_STAGED = 3.0
"""Maximum length of the staged phase, as a multiple of the time planned for the judgement. After it, the change is
taken back, even if there was little traffic."""
Ask = Callable[[Sequence[str]], Awaitable[dict[str, Any]]]


class _WithdrawnError(HeadwayError):
    """The trial of a change cannot go on."""


class Autopilot:
    """One gateway's autopilot. Implements `gateway.telemetry.autopilot.AutopilotControls`."""

    def __init__(
        self,
        gateway: Gateway,
        file: FleetFile,
        records: Path,
        ask: Ask | None = None,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        """`ask(kinds)` returns the answer of `headway advise --json`. `wall_clock`: seconds since 1970. Raises
        HeadwayError if the state on disk cannot be used."""
        self._gateway, self._file, self._records = gateway, file, records
        self._ask, self._wall_clock = ask or self._ask_advise, wall_clock
        self._files = AutopilotFiles(file.path)
        self._stored = self._files.load()
        self._files.save(self._stored)
        self._trial = gateway.telemetry.trial = Trial()
        self._disk, self._changing = OneAtATime(), asyncio.Lock()
        self._task: asyncio.Task[None] | None = None
        self._today = Today(lambda: self._now().date())
        self._looked: date | None = None
        """The day on which the autopilot last looked for changes."""
        self._began_s = 0.0, 0.0
        """(a change's `Stored.began_s`, its beginning on the gateway's clock)."""
        gateway.autopilot = self

    # Interface for the gateway.

    def start(self) -> None:
        self._looked = self._today() if self._is_past_time() else None
        if self._stored.state.change is not None:
            self._log(_told(self._stored.state))  # a killed gateway may not have written the line
        self._task = asyncio.create_task(self._run())

    def close(self) -> None:
        if self._task is not None:
            self._task.cancel()

    def state(self) -> AutopilotState:
        return shown(self._stored)

    async def stop(self) -> None:
        await self._at_disk(self._files.stop)
        await self._follow_switch()

    async def resume(self) -> None:
        await self._at_disk(self._files.resume)
        await self._follow_switch()

    async def look_now(self) -> None:
        await self._at_disk(self._files.look_now)

    async def _at_disk(self, function: Callable[..., T], *arguments: Any) -> T:
        """The function's result, computed in a thread. Raises HeadwayError if the disk does not answer."""
        try:
            async with asyncio.timeout(DISK_S):
                return await self._disk.call(function, *arguments)
        except TimeoutError:
            raise HeadwayError(f"{self._files.folder}: did not answer within {DISK_S:g} s") from None

    # The operator's permissions.

    @property
    def _settings(self) -> AutopilotSettings:
        settings = self._file.scenario.spec.autopilot
        if settings is None:
            raise HeadwayError(f"{self._file.path}: autopilot: missing; nothing is allowed")
        return settings

    @property
    def _limits(self) -> Limits:
        settings = self._settings
        return Limits(settings.allow, settings.max_usd_per_h)

    def _now(self) -> datetime:
        return datetime.fromtimestamp(self._wall_clock(), zone(self._settings.time_zone))

    def _is_frozen(self) -> bool:
        return any(weekly(text).contains(self._now()) for text in windows(self._settings))

    def _is_past_time(self) -> bool:
        at = self._settings.at
        return at is not None and f"{self._now():%H:%M}" >= at

    # The main loop.

    async def _run(self) -> None:
        while True:
            try:
                await self._next()
            except HeadwayError as error:
                await self._note(str(error))
            except Exception:
                log.exception("the autopilot failed")
                await self._note("it failed; the log says why")
            await asyncio.sleep(POLL_S)

    async def _next(self) -> None:
        await self._follow_switch()
        match self._stored.state.stage:
            case "staged":
                await self._stage()
            case "judged":
                await self._carry_out()
            case _:
                if await self._is_due():
                    await self._look()

    async def _is_due(self) -> bool:
        if await self._at_disk(self._files.take_request):
            return True
        today = self._today()
        if not self._is_past_time() or self._looked == today:
            return False
        self._looked = today
        return True

    async def _follow_switch(self) -> None:
        is_stopped = await self._at_disk(self._files.is_stopped)
        if is_stopped != self._stored.state.is_stopped:
            await self._step(Stopped() if is_stopped else Resumed())

    async def _step(self, event: Event, **changes: Any) -> None:
        """Write the next state, and other changes, to disk before their effects."""
        async with self._changing:
            before = self._stored.state
            after = step(before, event, self._limits)
            await self._save(replace(self._stored, state=after, note="", **changes))
        if after.stage != before.stage or after.is_stopped != before.is_stopped:
            self._log(_told(after))

    async def _note(self, why: str) -> None:
        """Store the reason why no change is tried, and log the reason once."""
        async with self._changing:
            if why == self._stored.note:
                return
            self._stored = replace(self._stored, note=why)
            self._log(why)
            with suppress(HeadwayError):  # the disk may not answer
                await self._save(self._stored)

    async def _save(self, stored: Stored) -> None:
        await self._at_disk(self._files.save, stored)
        self._stored = stored

    def _log(self, what: str) -> None:
        log.info("autopilot: %s", what)
        decisions = self._gateway.telemetry.decisions
        if decisions is not None:
            line = Decision(self._wall_clock(), "autopilot", "", "", 0, "", why=what)
            for listener in decisions.listeners:
                listener(line)

    # The start of a change.

    async def _ask_advise(self, kinds: Sequence[str]) -> dict[str, Any]:
        return await advice(self._file.path, self._records, self._settings.records_s, *kinds_option(kinds))

    async def _look(self) -> None:
        """Ask for proposals, and stage the first permitted one."""
        if self._stored.state.is_stopped:
            return await self._note("the autopilot is stopped")
        self._log("looks for a change")
        text = await self._at_disk(self._files.text)
        answer = await self._ask(self._limits.allow)
        await self._follow_switch()
        if why := why_none(answer):
            return await self._note(why)
        tried = {each.change for each in self._stored.past if each.outcome == "rolled back"}
        found = [await self._change(each, answer, text) for each in answer["proposals"] if each["name"] not in tried]
        reasons = [each for each in found if isinstance(each, str)]
        for change in found:
            if isinstance(change, Change):
                why = why_not(self._stored.state, change, self._limits, self._is_frozen())
                if not why and await self._at_disk(self._files.text) == text:
                    return await self._step(Staged(change, self._is_frozen()), began_s=self._wall_clock(), drift=())
                reasons.append(f"{change.name}: {why or 'the fleet file was changed meanwhile'}")
        await self._note("; ".join(reasons) or "every proposal was tried before, and rolled back")

    async def _change(self, proposal: dict[str, Any], answer: dict[str, Any], text: str) -> Change | str:
        """Turn a proposal into a change with its version on disk. Returns a text with the reason if it cannot be
        tried."""
        name, gain = proposal["name"], proposal["attainment"]
        try:
            plan, saving = self._schedule(proposal, answer)
            changed = edited(text, changes_of(proposal), self._file.path.name)
            if changed == text:
                return f"{name}: the fleet file says so already"
            before, version = [await self._at_disk(self._files.version_of, each) for each in (text, changed)]
            await self._policies_of(version)
        except HeadwayError as error:
            return f"{name}: {error}"
        predicted, most_usd = Bounds(gain["low"], gain["high"]), most_usd_per_h(self._gateway.plan)
        return Change(name, tuple(proposal["kinds"]), before, version, predicted, most_usd, plan, saving)

    def _schedule(self, proposal: dict[str, Any], answer: dict[str, Any]) -> tuple[Staging, Saving | None]:
        """When a change is tried. A change is judged by its saving, where a gain of SLO attainment is not certain or
        cannot be told in time. Raises HeadwayError if neither can be told."""
        met, gain = answer["today"]["attainment"], proposal["attainment"]
        measured = self._trial.requests_per_s(self._gateway.clock.now), self._settle_s(proposal["kinds"])
        saving = saving_of(proposal, answer)
        try:
            return staging(gain["low"], met, *measured, self._settings.judge_s, ALPHA), None
        except HeadwayError:
            if saving is None:
                raise
        expected = saving.most_lost + min(gain["mean"], 0.0)
        return staging_for_dollars(saving.least, expected, met, *measured, self._settings.judge_s, ALPHA), saving

    def _settle_s(self, kinds: Sequence[str]) -> float:
        """The settling part of a period, in seconds. During it, requests of the last period end, and replicas that the
        scaler wants are started."""
        settle_s = max(self._trial.longest_s(), LEAST_SETTLE_S)
        return max(settle_s, self._gateway.scaling.react_s) if SCALING in kinds else settle_s

    async def _policies_of(self, version: str) -> Policies:
        return await self._at_disk(self._file.policies_of, self._files.path(version), self._gateway.plan)

    # The trial of a change.

    async def _stage(self) -> None:
        """Serve pairs of periods until the change is judged."""
        change = self._stored.state.change
        assert change is not None
        try:
            if not await self._at_disk(self._files.is_at, change.before):
                raise _WithdrawnError("the fleet file was changed by hand")
            before = self._gateway.plan.policies
            after = await self._policies_of(change.version)
            self._gateway.driver.take_turns(True)
            try:
                while self._stored.state.stage == "staged":
                    await self._pair(change, before, after)
            finally:
                if self._gateway.plan.policies is after:
                    self._serve(before)
                self._gateway.driver.take_turns(False)
        except HeadwayError as error:
            if self._stored.state.stage == "staged":
                await self._step(Withdrawn(str(error)))

    async def _pair(self, change: Change, before: Policies, after: Policies) -> None:
        """Serve two periods in random order, and record the gain of the change."""
        staging = change.staging
        periods: dict[bool, Period] = {}
        for has_change in random.sample((True, False), 2):
            policies = after if has_change else before
            self._serve(policies)
            now = self._gateway.clock.now
            periods[has_change] = Period(now + staging.settle_s, now + staging.period_s)
            self._trial.periods = [*periods.values()]
            await self._wait(staging.settle_s, change, policies)
            periods[has_change].usd_per_s = await self._cost_of_wait(staging.counted_s, change, policies)
        self._serve(before)
        await self._wait(staging.settle_s, change, before)
        self._trial.periods = []
        for period in periods.values():
            period.close(request.live for request in self._gateway.driver.requests.values())
        await self._observe(periods[True], periods[False])
        await self._tell_drift()
        if self._stored.state.stage == "staged":
            await self._wait(staging.rest_s, change, before)

    async def _cost_of_wait(self, wait_s: float, change: Change, policies: Policies) -> float:
        """`_wait`, and return the fleet's cost per second meanwhile."""
        from_usd, from_s = self._gateway.telemetry.usd, self._gateway.clock.now
        await self._wait(wait_s, change, policies)
        return (self._gateway.telemetry.usd - from_usd) / max(self._gateway.clock.now - from_s, 1e-9)

    async def _observe(self, with_change: Period, without: Period) -> None:
        """Judge the change by a pair of periods, unless one of them had no requests."""
        met, met_before = with_change.attainment, without.attainment
        if met is None or met_before is None:
            return
        most = max(with_change.usd_per_s, without.usd_per_s)
        saved = (without.usd_per_s - with_change.usd_per_s) / most if most > 0 else 0.0
        await self._step(Observed(met - met_before, saved, min(with_change.num, without.num)))

    async def _tell_drift(self) -> None:
        """Report each engine whose speed has changed, once. The drift affects both sides of a pair."""
        told = list(self._stored.drift)
        for replica in self._gateway.replicas:
            ratio = self._gateway.telemetry.drift.ratio(replica.id, self._gateway.clock.now)
            for each in () if ratio is None else ratio.drift:
                name = f"{replica.name}: {each.term}"
                if name not in told:
                    told.append(name)
                    self._log(f"drift, with the change and without it: {replica.name}: {each.text}")
        if len(told) > len(self._stored.drift):
            async with self._changing:
                await self._save(replace(self._stored, drift=tuple(told)))

    def _serve(self, policies: Policies) -> None:
        plan = self._gateway.plan
        if plan.policies is not policies:
            self._gateway.reconfigure(replace(plan, policies=policies))

    def _change_began_s(self) -> float:
        """The time at which the current change began, on the gateway's clock. The time before a restart comes from the
        wall clock. The wall clock is read only once, because it may be set at any time."""
        stored_s, now = self._stored.began_s, self._gateway.clock.now
        if self._began_s[0] != stored_s:
            self._began_s = stored_s, now - max(self._wall_clock() - stored_s, 0.0)
        return self._began_s[1]

    async def _wait(self, wait_s: float, change: Change, policies: Policies) -> None:
        """Serve these policies for `wait_s`, also across a reload. Raises HeadwayError once the change may not go
        on."""
        end_s = self._gateway.clock.now + wait_s
        while (left_s := end_s - self._gateway.clock.now) > 0:
            await asyncio.sleep(min(POLL_S, left_s))
            await self._follow_switch()
            if self._stored.state.stage != "staged":
                raise _WithdrawnError("stopped")
            if not await self._at_disk(self._files.is_at, change.before):
                raise _WithdrawnError("the fleet file was changed by hand")
            if self._gateway.clock.now > self._change_began_s() + _MOST_STAGED * self._settings.judge_s:
                raise _WithdrawnError("there was too little traffic to judge it")
            limits = self._limits
            if more := [each for each in change.kinds if each not in limits.allow]:
                raise _WithdrawnError(f"not among the allowed kinds any more: {', '.join(more)}")
            if why := too_dear(most_usd_per_h(self._gateway.plan), limits):
                raise _WithdrawnError(why)
            self._serve(policies)

    # The verdict.

    async def _carry_out(self) -> None:
        """Set the fleet file according to the verdict, and serve it. Repeating it is harmless."""
        state = self._stored.state
        change = state.change
        assert change is not None
        if state.verdict == "promote":
            if await self._at_disk(self._files.is_at, change.before):
                await self._at_disk(self._files.use, change.version)
            elif not await self._at_disk(self._files.is_at, change.version):
                await self._step(Withdrawn("the fleet file was changed by hand"))
        if self._gateway.request_reload is not None:
            reload = await self._gateway.request_reload("autopilot")
            if reload.outcome == "failed" and self._stored.state.verdict == "promote":
                await self._at_disk(self._files.use, change.before)
                await self._step(Withdrawn(f"it cannot be reloaded: {reload.error}"))
                return
        await self._step(CarriedOut())
        stage: Any = self._stored.state.stage
        past = PastChange(self._wall_clock(), change.name, stage, self._stored.state.reason, len(state.gains))
        async with self._changing:
            await self._save(self._stored.with_past(past))


def most_usd_per_h(plan: ServingPlan) -> float | None:
    """The highest cost per hour of a fleet with all its possible replicas; None if their number is unbounded."""
    usd = 0.0
    for deployment in {each.deployment.name: each.deployment for each in plan.pools}.values():
        own = [each for each in plan.pools if each.deployment.name == deployment.name]
        num: float = deployment.replicas
        if plan.policies.scaler is not None and any(each.start is not None for each in own):
            num = max(num, _most_units(deployment, plan.gpu_limits))
        usd += num * sum(part.usd_per_hour for part in unit_of(deployment)) if num else 0.0
    return usd if usd < inf else None


def _most_units(deployment: Pool | Combo, gpu_limits: Sequence[tuple[str, str, int]]) -> float:
    """The largest number of replicas, or instances of a combo, that a scaler may start."""
    most = inf if deployment.max_replicas is None else deployment.max_replicas
    parts = unit_of(deployment)
    for region, gpu, count in gpu_limits:
        needed = sum(part.num_gpus for part in parts if (part.region, part.gpu.name) == (region, gpu))
        if needed:
            most = min(most, count // needed)
    return most


def _told(state: State) -> str:
    """The stage in words, for the log: the change on trial, or the reason why there is none."""
    if state.change is None:
        return "stopped by the operator" if state.is_stopped else "waits for a change"
    staging, name = state.change.staging, state.change.name
    if state.stage == "staged":
        return f"{name} is staged, for {staging.share:.0%} of the time, in periods of {staging.period_s:.3g} s"
    verdict = f"{state.verdict}: " if state.stage == "judged" else ""
    return f"{name} is {state.stage}: {verdict}{state.reason}"
