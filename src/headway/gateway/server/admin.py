"""Administrators' endpoints, which list and change replicas."""

from __future__ import annotations

from urllib.parse import urlsplit

from starlette.requests import Request

from headway.gateway.errors import ApiError
from headway.gateway.gateway import Gateway
from headway.gateway.scheduling.replica import LiveReplica
from headway.gateway.server.bodies import read_json
from headway.gateway.server.routes import Access, Endpoint, path_id, query
from headway.gateway.server.schema import (
    EngineLoad,
    FailedPool,
    NewRole,
    NewWorker,
    PrefixCacheState,
    ReplicaList,
    ReplicaState,
)
from headway.gateway.telemetry.autopilot import AutopilotControls, AutopilotState
from headway.gateway.telemetry.reloads import Reload

_BODY_TIMEOUT_S = 10.0
ADMIN = Access(
    key=lambda settings: "admin",
    exists=lambda settings: bool(settings.admin_keys),
    missing="this gateway has no admin_keys",
)


def replica_state(gateway: Gateway, replica: LiveReplica) -> ReplicaState:
    load = replica.load
    return ReplicaState(
        id=replica.id,
        name=replica.name,
        pool=replica.pool,
        model=replica.model,
        url=replica.url,
        status=gateway.fleet.status(replica),
        combo=replica.deployment if replica.is_of_combo else None,
        role=replica.role,
        in_flight=replica.num_in_flight,
        empty=replica.num_in_flight == 0,
        engine=EngineLoad(running=load.running, waiting=load.waiting, kv_share=load.kv_share),
        why=gateway.ejections.get(replica.id) or gateway.health.why_down(replica) or None,
        prediction=gateway.telemetry.drift.ratio(replica.id, gateway.clock.now),
        prefix_cache=_prefix_cache(gateway, replica),
        shadow=None if gateway.shadows is None else gateway.shadows.placements(replica.model, replica.id),
    )


def _prefix_cache(gateway: Gateway, replica: LiveReplica) -> PrefixCacheState | None:
    feeds, blocks = gateway.cache_feeds, replica.cache_index.num_blocks
    if feeds is not None and (feed := feeds.of.get(replica.id)) is not None:
        counts = feed.counts
        return PrefixCacheState(feed.state, feed.why, blocks, counts.gaps, counts.lost, feed.age_s)
    return PrefixCacheState("guess", "", blocks, 0, 0, None) if replica.caches_prefixes else None


async def _list(request: Request, gateway: Gateway) -> ReplicaList:
    data = [replica_state(gateway, replica) for replica in gateway.fleet.present()]
    failed = [FailedPool(pool=pool, replicas=num, why=why) for pool, num, why in gateway.fleet.failed()]
    return ReplicaList(object="list", data=data, failed=failed)


async def _get(request: Request, gateway: Gateway) -> ReplicaState:
    return replica_state(gateway, _replica(request, gateway))


def _replica(request: Request, gateway: Gateway) -> LiveReplica:
    id = request.path_params["id"]
    if not (id.isascii() and id.isdigit() and len(id) < 10):
        raise ApiError(404, f"there is no worker {id!r}", "not_found", "id")
    return gateway.fleet.find(int(id))


async def _add(request: Request, gateway: Gateway) -> ReplicaState:
    new: NewWorker = await read_json(request, _BODY_TIMEOUT_S, NewWorker, "expected pool and url")
    if not is_address(new.url):
        raise ApiError(400, f"{new.url!r}; expected http://host:port", "invalid_value", "url")
    return replica_state(gateway, gateway.fleet.add(new.pool, new.url))


def is_address(url: str) -> bool:
    """Whether this URL can be an engine's address."""
    try:
        parts = urlsplit(url)
        is_valid = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0 and not parts.username
    except ValueError:
        return False
    return bool(is_valid) and not parts.query and not parts.fragment and url.isascii() and url.isprintable()


async def _remove(request: Request, gateway: Gateway) -> ReplicaState:
    replica = _replica(request, gateway)
    force = request.query_params.get("force", "false")
    if force not in ("true", "false"):
        raise ApiError(400, f"{force!r}; expected true or false", "invalid_value", "force")
    gateway.fleet.remove(replica, at_once=force == "true")
    return replica_state(gateway, replica)


async def _drain(request: Request, gateway: Gateway) -> ReplicaState:
    """Drain a replica; on a path of /undrain, end the drain."""
    replica = _replica(request, gateway)
    gateway.fleet.drain(replica, request.url.path.endswith("/drain"))
    return replica_state(gateway, replica)


async def _set_role(request: Request, gateway: Gateway) -> ReplicaState:
    new: NewRole = await read_json(request, _BODY_TIMEOUT_S, NewRole, "expected role")
    replica = _replica(request, gateway)
    gateway.fleet.switch(replica, new.role)
    return replica_state(gateway, replica)


def _autopilot(gateway: Gateway) -> AutopilotControls:
    if gateway.autopilot is None:
        raise ApiError(409, "this gateway has no autopilot: it was started without --autopilot", "conflict")
    return gateway.autopilot


async def _autopilot_state(request: Request, gateway: Gateway) -> AutopilotState:
    return _autopilot(gateway).state()


async def _stop_autopilot(request: Request, gateway: Gateway) -> AutopilotState:
    await _autopilot(gateway).stop()
    return _autopilot(gateway).state()


async def _resume_autopilot(request: Request, gateway: Gateway) -> AutopilotState:
    await _autopilot(gateway).resume()
    return _autopilot(gateway).state()


async def _look_now(request: Request, gateway: Gateway) -> AutopilotState:
    await _autopilot(gateway).look_now()
    return _autopilot(gateway).state()


async def _reload(request: Request, gateway: Gateway) -> Reload:
    """Read the fleet file again. Raises ApiError if it cannot be applied."""
    if gateway.request_reload is None:
        raise ApiError(409, "this gateway has no fleet file to reload", "conflict")
    reload = await gateway.request_reload("request")
    if reload.outcome == "failed":
        raise ApiError(409, reload.error, "reload_failed")
    return reload


_ID = path_id({"type": "integer", "minimum": 0})
_FORCE = query("force", {"enum": ["true", "false"]})

ENDPOINTS = [
    Endpoint("GET", "/workers", "All replicas", _list, ReplicaList, ADMIN),
    Endpoint("POST", "/workers", "Add a replica to a pool", _add, ReplicaState, ADMIN, accepts=NewWorker, status=201,
             errors=(409,)),
    Endpoint("GET", "/workers/{id}", "A replica", _get, ReplicaState, ADMIN, parameters=(_ID,)),
    Endpoint("DELETE", "/workers/{id}", "Remove a replica when it is empty, or at once", _remove, ReplicaState, ADMIN,
             status=202, parameters=(_ID, _FORCE)),
    Endpoint("POST", "/workers/{id}/drain", "Send a replica no more requests", _drain, ReplicaState, ADMIN,
             errors=(409,), parameters=(_ID,)),
    Endpoint("POST", "/workers/{id}/undrain", "Send a replica requests again", _drain, ReplicaState, ADMIN,
             errors=(409,), parameters=(_ID,)),
    Endpoint("POST", "/workers/{id}/role", "Set the role of a replica in a combo", _set_role, ReplicaState, ADMIN,
             accepts=NewRole, errors=(409,), parameters=(_ID,)),
    Endpoint("GET", "/autopilot", "The autopilot's stage, and the changes that it tried", _autopilot_state,
             AutopilotState, ADMIN, errors=(409,)),
    Endpoint("POST", "/autopilot/stop", "Take back the change that is tried, and begin none", _stop_autopilot,
             AutopilotState, ADMIN, errors=(409,)),
    Endpoint("POST", "/autopilot/resume", "Let changes begin again", _resume_autopilot, AutopilotState, ADMIN,
             errors=(409,)),
    Endpoint("POST", "/autopilot/now", "Look for a change now", _look_now, AutopilotState, ADMIN, errors=(409,)),
    Endpoint("POST", "/reload", "Read the fleet file again", _reload, Reload, ADMIN, errors=(409,)),
]  # fmt: skip
