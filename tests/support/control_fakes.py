"""A control with fake effects: every effect is written down, and the test plays the driver."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from fakes import FakeReplica
from headway.control.control import Control
from headway.control.decisions import DecisionObserver
from headway.control.live import WAITING, Live
from headway.control.policies import Policies
from headway.control.recorder import Recorder
from headway.control.scaling import Scaling
from headway.control.service import Member, Service
from headway.core.decision import Placement
from headway.core.fleet import Fallbacks, Role
from headway.core.record import Columns, Outcome
from headway.core.view import FleetView, RequestView
from headway.policies.ordering.fcfs import FcfsOrdering


class FirstRouter:
    """Chooses the first replica that is offered."""

    def route(self, request: RequestView, view: FleetView) -> Placement:
        return Placement(view.replicas[0].id, scores=((view.replicas[0].id, 1.0),))


class FakeEffects:
    """Writes down every effect. A request that starts counts as in flight at its replica."""

    def __init__(self) -> None:
        self.replicas: dict[int, FakeReplica] = {}
        self.started: list[tuple[int, int]] = []
        """(request, replica)."""
        self.cancelled: list[int] = []
        self.moved: list[tuple[int, int, int | None]] = []
        """(request, target, blocks per stage)."""
        self.handed_over: list[tuple[int, int]] = []
        self.judged: list[int] = []
        self.roles: list[tuple[int, Role]] = []
        self.timers: list[tuple[float, Callable[[float, Any], None], Any]] = []
        self.ended: list[tuple[int, Outcome]] = []
        self.started_units: list[str] = []
        self.drained: list[tuple[int, bool]] = []
        self.stopped: list[int] = []

    def start(self, live: Live, replica: int, now: float) -> None:
        self.started.append((live.id, replica))
        live.replica = replica
        live.stage = WAITING
        self.replicas[replica].num_in_flight += 1

    def cancel(self, live: Live, now: float) -> None:
        self.cancelled.append(live.id)

    def move(self, live: Live, target: int, stage_blocks: int | None, now: float) -> None:
        self.moved.append((live.id, target, stage_blocks))

    def hand_over(self, live: Live, target: int, now: float) -> None:
        self.handed_over.append((live.id, target))

    def judge(self, live: Live, now: float) -> None:
        self.judged.append(live.id)

    def set_role(self, replica: int, role: Role) -> None:
        self.roles.append((replica, role))
        self.replicas[replica].role = role

    def call_at(self, time_s: float, action: Callable[[float, Any], None], argument: Any) -> None:
        self.timers.append((time_s, action, argument))

    def notify_ended(self, live: Live, now: float, outcome: Outcome) -> None:
        self.ended.append((live.id, outcome))

    def start_replica(self, deployment: str, now: float) -> None:
        self.started_units.append(deployment)

    def drain(self, replica: int, on: bool) -> None:
        self.drained.append((replica, on))
        self.replicas[replica].is_draining = on

    def stop_replica(self, replica: int, now: float) -> None:
        self.stopped.append(replica)


class Fleet:
    """Control over fake replicas, each alone in its combo unless `combo` says otherwise."""

    def __init__(
        self,
        replicas: Sequence[FakeReplica],
        router: Callable[[], Any] = FirstRouter,
        max_tokens: int = 1000,
        max_num_waiting: int | None = None,
        scaling: Callable[[FakeEffects, dict[str, Service]], Scaling | None] = lambda effects, services: None,
        observer: DecisionObserver | None = None,
        deployment: str = "main",
        fallbacks: Fallbacks | None = None,
        tokens_of: Mapping[str, int] = MappingProxyType({}),
        **policies: Any,
    ) -> None:
        """`tokens_of`: the longest request by model, where it is not `max_tokens`."""
        self.effects = FakeEffects()
        self.effects.replicas = {replica.id: replica for replica in replicas}
        self.recorder = Recorder(has_fallbacks=fallbacks is not None)
        self.control = Control(self.effects, self.recorder, notify=True)
        members: dict[str, list[Member]] = {}
        for replica in replicas:
            longest = tokens_of.get(replica.model, max_tokens)
            member = Member(replica, longest, max_num_waiting, deployment)
            members.setdefault(replica.model, []).append(member)
        names = {model: (model, model.upper()) for model in members}
        self.control.configure(
            Policies(router, **{"ordering": FcfsOrdering, **policies}),
            members,
            names,
            0,
            lambda services: scaling(self.effects, services),
            observer,
            fallbacks,
        )

    @property
    def service(self) -> Service:
        """The only service."""
        return self.control.services[0]

    def arrive(
        self,
        id: int,
        now: float = 0.0,
        prompt: int = 10,
        output: int = 5,
        is_streamed: bool = True,
        **fields: Any,
    ) -> Live:
        """Let a request arrive."""
        live = Live(id, now, prompt, output, **fields)
        live.is_streamed = is_streamed
        self.control.on_arrival(live, now)
        return live

    def finish(self, live: Live, now: float) -> None:
        """Let a request finish at its replica."""
        self.effects.replicas[live.replica].num_in_flight -= 1
        live.generated_tokens = live.output_tokens
        self.control.on_finished(live, now)

    def records(self) -> Columns:
        """The request table."""
        return self.recorder.request_columns()


def fleet(*roles: Role, combo: int | None = None, model: str = "llama", **given: Any) -> Fleet:
    """Replicas 0, 1, ... with these roles, in one combo if its number is given."""
    replicas = [
        FakeReplica(i, model=model, role=role, combo=i if combo is None else combo) for i, role in enumerate(roles)
    ]
    return Fleet(replicas, **given)
