"""The replicas that control may choose: which replicas exist, are up, ready or draining, and which LoRA adapters they
have."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from headway.control.live import Live
from headway.control.service import Member, Service
from headway.core.view import ReplicaView
from headway.gateway.clock import Clock
from headway.gateway.scheduling.control import LiveControl
from headway.gateway.scheduling.hold_timeouts import HoldTimeouts
from headway.gateway.scheduling.replica import LiveReplica
from headway.gateway.upstream.engine import EngineEndpoint


class Roster:
    """Updates control's entries when replicas change."""

    def __init__(
        self,
        clock: Clock,
        control: LiveControl,
        replicas: list[LiveReplica],
        holds: HoldTimeouts,
        view: Callable[[LiveReplica], ReplicaView] | None,
        has_prompt_window: bool,
    ) -> None:
        """`view` returns a replica as policies see it; None: unchanged."""
        self._clock, self._control, self._holds, self._view = clock, control, holds, view
        self.replicas = replicas
        """All replicas, by id."""
        self._services = control.by_model
        self.adapters: dict[str, Service] = {}
        """The services of LoRA adapters, by the adapters' names."""
        self.places_pairs_at_once = False
        """See `place_pairs_at_once`."""
        self._has_prompt_window = has_prompt_window
        self._watch_all()

    def members(self, models: Sequence[str]) -> Mapping[str, Sequence[Member]]:
        """Control's entries of the initial replicas, by model."""
        return {model: [self._member(r) for r in self.replicas if r.model == model] for model in models}

    def _member(self, replica: LiveReplica) -> Member:
        """Control's entry for a replica that is not up yet."""
        view = replica if self._view is None else self._view(replica)
        member = Member(view, replica.max_request_tokens, None, replica.deployment, replica.adapters)
        member.is_up, member.is_single_phase = False, replica.is_single_phase
        member.window = replica.most_concurrent
        return member

    def add(self, replica: LiveReplica) -> None:
        """Add a replica that is not up yet. The replica may reuse the number of a replica that failed to start."""
        self.replicas[replica.id : replica.id + 1] = [replica]
        self._watch_prompts(replica)
        service = self._services[replica.model]
        service.members.append(self._member(replica))
        service.refresh()
        self.find_adapters()

    def remove(self, replica: LiveReplica) -> None:
        """Remove an empty replica."""
        service = self._services[replica.model]
        service.members = [member for member in service.members if member.view.id != replica.id]
        service.refresh()
        self.find_adapters()
        self._holds.start_all(service)

    def replica_up(self, replica: EngineEndpoint) -> None:
        """Start to place requests at a replica."""
        self._control.on_recovered(replica.id, self._clock.now)

    def replica_down(self, replica: EngineEndpoint) -> None:
        """Stop placing requests at a replica. Its streams continue."""
        self._control.on_crashed(replica.id, [], self._clock.now)
        self._holds.start_all(self._services[replica.model])

    def start_slowly(self, replica: LiveReplica, duration_s: float) -> None:
        """Give a replica that was ejected a growing share of the requests."""
        self._services[replica.model].start_slowly(replica.id, self._clock.now, duration_s)

    def set_draining(self, replica: LiveReplica, on: bool) -> None:
        """Place no requests at a replica while others can take them. With `on` false, place requests there again."""
        service = self._services[replica.model]
        member = service.member(replica.id)
        assert member is not None
        member.is_draining = replica.is_draining = on
        service.refresh()
        if not on:
            self._control.release_held(service, self._clock.now)

    def set_unready(self, replica: LiveReplica, on: bool) -> None:
        """Place no requests at a replica while others can take them; its current requests stay. With `on` false,
        place requests there again."""
        service = self._services[replica.model]
        member = service.member(replica.id)
        if member is not None and member.is_unready != on:
            member.is_unready = replica.is_unready = on
            service.refresh()
            if not on:
                self._control.release_held(service, self._clock.now)

    def limit_to_slots(self, replica: LiveReplica) -> None:
        """Send a replica no more requests than it has slots. Further requests wait in the gateway, where they survive
        a failure of the replica."""
        service = self._services[replica.model]
        member = service.member(replica.id)
        if member is not None and member.window != replica.num_slots:
            member.window = replica.num_slots
            service.refresh()

    # LoRA adapters.

    def adapters_changed(self, replica: LiveReplica) -> None:
        """Offer a replica for its current LoRA adapters."""
        service = self._services[replica.model]
        if (member := service.member(replica.id)) is not None:
            member.loras = replica.adapters
            service.refresh()
        self.find_adapters()
        self._control.release_held(service, self._clock.now)

    def find_adapters(self) -> None:
        """Record which service has which adapter. The name of a model is never taken as an adapter. An adapter of two
        models belongs to the first model."""
        self.adapters = {}
        for service in self._control.services:
            for name in sorted({name for member in service.members for name in member.loras}):
                if name not in self._services:
                    self.adapters.setdefault(name, service)

    # Computed prompts.

    def place_pairs_at_once(self) -> None:
        """From now on, reserve both replicas of a prefill and decode pair when a request is placed. Used with a proxy
        that sends the request to only one replica: the engines then hand the KV cache over by themselves."""
        self.places_pairs_at_once = True
        self._watch_all()

    def limit_prompts(self, has_prompt_window: bool) -> None:
        """Set whether control limits the prompts at a replica."""
        self._has_prompt_window = has_prompt_window
        self._watch_all()

    def _watch_all(self) -> None:
        for replica in self.replicas:
            self._watch_prompts(replica)

    def _watch_prompts(self, replica: LiveReplica) -> None:
        """Report computed prompts to control if it limits the prompts at a replica."""
        # With a pair of single-phase replicas, the prompt is computed at one replica, and counts as computed at the
        # other.
        is_pair = replica.is_single_phase or (self.places_pairs_at_once and replica.role != "mixed")
        is_watched = self._has_prompt_window and not is_pair
        replica.on_prompt = self._prompt_computed if is_watched else None

    def _prompt_computed(self, live: Live) -> None:
        self._control.on_prompt_computed(live, self._clock.now)
