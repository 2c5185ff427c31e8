"""The fallbacks of a fleet's models: which service answers a request, and the changes to a request that falls back."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from headway.control.fallback import Fallback, FellBack
from headway.control.live import Live
from headway.control.policies import FallbackConfig, FallbackReason
from headway.control.scaling import Scaling
from headway.control.service import Service
from headway.core.fleet import Fallbacks


class ModelFallbacks:
    """Changes the model of requests that are not at a replica."""

    def __init__(self) -> None:
        self.of_fleet = Fallbacks()
        """All fallbacks that the fleet file configures. A policy may use only some of them."""
        self.are_used = False
        self.max_held: int | None = None
        """Number of requests that a model may hold before its fallback answers; None: no limit."""
        self._by_model: dict[str, Fallback] = {}
        self._scaling: Scaling | None = None

    def use(
        self, fallbacks: Fallbacks, config: FallbackConfig, services: Mapping[str, Service], scaling: Scaling | None
    ) -> None:
        """Use these fallbacks from now on. Unchanged fallbacks keep their state.

        `scaling` counts the requests of the models that answer.
        """
        self.of_fleet, self._scaling = fallbacks, scaling
        found = {}
        for model, names in fallbacks.models.items() if config.when else ():
            home, targets = services[model], [services[name] for name in names]
            new = Fallback(home, targets, config, fallbacks)
            old = self._by_model.get(model)
            found[model] = old if old is not None and old.is_like(new) else new
        self._by_model, self.are_used = found, bool(found)

    def _of(self, live: Live, service: Service) -> Fallback | None:
        """The fallbacks of the requested model; None: it has none, or a cascade chooses its models."""
        if live.stage_index >= 0:
            return None
        return self._by_model.get(service.model if live.fallback is None else live.fallback.model)

    def answering(self, live: Live, service: Service, now: float) -> Service:
        """The service that answers the request: `service`, a fallback, or the service of the requested model."""
        fallback = self._of(live, service)
        if fallback is None:
            return service
        is_first = live.fallback is None and not live.attempt and live.placed_s != live.placed_s
        why = fallback.reason(live, now, is_first, self.max_held)
        if why is not None and (target := fallback.target(live)) is not None:
            if target is not service:
                self._change_model(live, fallback, service, target, why, now)
            return target
        if live.fallback is not None and fallback.may_return(live):
            service.ended(live, now)
            live.fallback.restore_lengths(live)
            live.model, live.fallback, live.decode_replica = live.fallback.model, None, -1
            return fallback.home
        return service

    def has(self, live: Live, service: Service) -> bool:
        """Whether the request has a fallback that may answer if the request's service rejects it. The fallback may be
        down."""
        fallback = self._of(live, service)
        return fallback is not None and fallback.allows("rejects")

    def takes(self, live: Live, service: Service) -> bool:
        """Whether a fallback would take the request now if its service rejected it."""
        fallback = self._of(live, service)
        return fallback is not None and fallback.allows("rejects") and fallback.target(live) is not None

    def after_rejection(self, live: Live, service: Service, now: float) -> Service | None:
        """The fallback for a request that its service rejects; None: no fallback takes it."""
        fallback = self._of(live, service)
        if fallback is None or not fallback.allows("rejects"):
            return None
        target = fallback.target(live, after=service)
        if target is not None:
            self._change_model(live, fallback, service, target, "rejects", now)
        return target

    def while_down(self) -> Iterator[Fallback]:
        """The fallbacks of models that hold requests and have no replica."""
        for fallback in self._by_model.values():
            if fallback.home.hold_queue.num and not fallback.home.any_up and fallback.allows("down"):
                yield fallback

    def take_held(self, live: Live, fallback: Fallback, now: float) -> Service | None:
        """The fallback that takes a held request of a model without replicas; None: no fallback takes it."""
        target = fallback.target(live)
        if target is not None:
            self._change_model(live, fallback, fallback.home, target, "down", now)
        return target

    def _change_model(
        self, live: Live, fallback: Fallback, service: Service, target: Service, why: FallbackReason, now: float
    ) -> None:
        """Move a request from `service` to `target`."""
        taken = live.fallback
        if taken is None:
            taken = FellBack(fallback.home.model, why, live.output_tokens, live.reasoning_tokens, live.output_id)
        service.note_fallback(live, target.model, f"{taken.model}: {why}", now)
        service.ended(live, now)
        taken.restore_lengths(live)
        live.fallback = FellBack(taken.model, why, taken.output_tokens, taken.reasoning_tokens, taken.output_id)
        live.decode_replica = -1
        if not live.generated_tokens:
            live.take_lengths_of(fallback.shape_of(target))
        live.model = target.model
        if self._scaling is not None:
            self._scaling.count_arrival(live, target.model)
