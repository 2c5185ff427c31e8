"""The models that requests may name: names of the fleet file, of engines and of LoRA adapters."""

from __future__ import annotations

from headway.control.service import Service
from headway.core.errors import unknown
from headway.gateway.errors import ApiError
from headway.gateway.fleet.membership import LiveFleet
from headway.gateway.fleet.specs import ServingPlan
from headway.gateway.relay.features import Features
from headway.gateway.scheduling.driver import Driver
from headway.gateway.scheduling.replica import LiveReplica
from headway.gateway.upstream.dialects import ADAPTERS


class ServedModels:
    """Finds the service that answers under a model's name."""

    def __init__(self, driver: Driver, fleet: LiveFleet, plan: ServingPlan) -> None:
        self._driver, self._fleet, self._plan = driver, fleet, plan
        self._retired: set[str] = set()
        """Models that were removed from the fleet file."""
        self._dual_dispatch = _dual_dispatch_models(plan)

    def use(self, plan: ServingPlan) -> None:
        """Serve the models of another plan under the plan's names, and refuse names that the plan lacks."""
        before, services = self._plan, self._driver.services
        for model in plan.names.keys() - before.names.keys() - self._retired:
            self._driver.add_model(model, plan.names[model], plan.policies)
        for model, names in before.names.items():
            for name in {*names} - {*plan.names.get(model, ())} - {model}:
                if name in services and services[name].model == model:
                    del services[name]
        for model, names in plan.names.items():
            for name in names:
                services.setdefault(name, services[model])
        self._retired |= before.names.keys()
        self._retired -= plan.names.keys()
        self._dual_dispatch = _dual_dispatch_models(plan)
        self._plan = plan

    def answering(self, features: Features) -> tuple[Service, str]:
        """The service that answers a request first, and the model's name for control. Raises ApiError if there is
        none."""
        cascade, services = self._driver.cascade, self._driver.services
        if cascade is not None and features.model == cascade.config.name:
            if features.is_passthrough:
                raise ApiError(400, f"{features.model!r} answers chats and completions only", "invalid_value", "model")
            return cascade.stages[0].service, features.model
        if not features.model:
            if len(self._plan.names) != 1:
                raise ApiError(400, "'model' is missing", "missing_required_parameter", "model")
            features.model = next(iter(self._plan.names))
        service = services.get(features.model)
        if service is None:
            self._add_reported_names()
            service = services.get(features.model)
        if service is None:
            service = self._driver.roster.adapters.get(features.model)
        if service is None or service.model in self._retired:
            raise ApiError(404, str(unknown("model", features.model, self.names())), "model_not_found", "model")
        if features.is_passthrough and service.model in self._dual_dispatch:
            what = f"{features.model!r} answers chats and completions only, as its replicas do one phase each"
            raise ApiError(400, what, "invalid_value", "model")
        return service, service.model

    def replicas_of(self, name: str) -> list[LiveReplica]:
        """The replicas that may serve a request for this model."""
        service = self._driver.services.get(name) or self._driver.roster.adapters.get(name)
        return [] if service is None else [each for each in self._fleet.replicas if each.model == service.model]

    def serves(self, name: str) -> bool:
        """Whether requests may name this model."""
        self._add_reported_names()
        service = self._driver.services.get(name) or self._driver.roster.adapters.get(name)
        return name in self.names() or (service is not None and service.model not in self._retired)

    def names(self) -> list[str]:
        """The model names for lists. Requests may also use other names, such as aliases."""
        cascade = self._driver.cascade
        return [*self._plan.listed, *([] if cascade is None else [cascade.config.name]), *self._driver.roster.adapters]

    def parent_of(self, name: str) -> str | None:
        """The model of a LoRA adapter; None for other names."""
        service = None if name in self._driver.services else self._driver.roster.adapters.get(name)
        return None if service is None else service.model

    def _add_reported_names(self) -> None:
        """Accept the names that engines report for their models."""
        for replica in self._fleet.replicas:
            if (served := self._fleet.pools.get(replica.pool)) is not None and served.pool.is_standby:
                continue
            for name in (replica.reported_model, *replica.aliases):
                if name is not None:
                    self._driver.services.setdefault(name, self._driver.services[replica.model])


def _dual_dispatch_models(plan: ServingPlan) -> set[str]:
    """Models whose prefill and decode replicas get a request at the same time."""
    dual = [each for each in plan.pools if ADAPTERS[each.api].dual_dispatch and each.pool.role != "mixed"]
    return {each.pool.model.name for each in dual}
