"""Replicas that are the pods of an InferencePool of the Kubernetes Gateway API Inference Extension.

The pool's selector and ports determine the endpoints. Pods are listed, and watched until a pod changes or `poll_s` have
passed; then they are listed again.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from math import ceil
from typing import Any

from kubernetes import client, watch
from kubernetes.client.exceptions import ApiException
from msgspec import Struct
from urllib3.exceptions import HTTPError

from headway.gateway.fleet.actuator import ActuatorHost
from headway.gateway.fleet.kubernetes import configuration, readiness
from headway.gateway.fleet.pod_changes import Departures, Readiness
from headway.gateway.fleet.specs import InferencePool, ServedPool
from headway.gateway.scheduling.replica import LiveReplica

log = logging.getLogger("headway.gateway")
_GROUP, _VERSION, _PLURAL = "inference.networking.k8s.io", "v1", "inferencepools"
_TIMEOUT_S = 10.0
_GONE = 410
"""The API server's status if it no longer knows the version of the last list: the pods must be listed again."""
_PAUSE_S = 2.0
"""Pause after an error."""


class Endpoint(Struct, frozen=True):
    """One port of a pod."""

    uid: str
    url: str
    is_leaving: bool
    """Whether the pod is being deleted."""
    is_ready: bool = True


class PoolApi:
    """One InferencePool, through the API server. Every call blocks."""

    def __init__(self, spec: InferencePool) -> None:
        self._spec = spec
        api = client.ApiClient(configuration(spec.context))
        self._core, self._custom = client.CoreV1Api(api), client.CustomObjectsApi(api)
        self._selector = self._version = ""
        """(selector, version) of the last list of pods."""
        self._watch: Any = None

    def read(self) -> list[Endpoint]:
        """The endpoints of all pods that have an address."""
        spec = self._spec
        found = self._custom.get_namespaced_custom_object(
            _GROUP, _VERSION, spec.namespace, _PLURAL, spec.name, _request_timeout=_TIMEOUT_S
        )
        labels = found["spec"]["selector"]["matchLabels"]
        self._selector = ",".join(f"{name}={value}" for name, value in sorted(labels.items()))
        ports = [int(each["number"]) for each in found["spec"]["targetPorts"]]
        listed = self._core.list_namespaced_pod(
            spec.namespace, label_selector=self._selector, _request_timeout=_TIMEOUT_S
        )
        self._version = listed.metadata.resource_version or ""
        endpoints: list[Endpoint] = []
        for pod in listed.items:
            is_leaving, ip = pod.metadata.deletion_timestamp is not None, pod.status.pod_ip
            if not ip:
                continue
            host = f"[{ip}]" if ":" in ip else ip
            is_ready = bool(readiness(pod))
            endpoints += [Endpoint(pod.metadata.uid, f"http://{host}:{port}", is_leaving, is_ready) for port in ports]
        return endpoints

    def wait_for_change(self) -> None:
        """Return when a pod of the pool has changed since the last list, and after `poll_s` at the latest."""
        self._watch = watch.Watch()
        stream = self._watch.stream(
            self._core.list_namespaced_pod,
            self._spec.namespace,
            label_selector=self._selector,
            resource_version=self._version,
            timeout_seconds=ceil(self._spec.poll_s),
            _request_timeout=(_TIMEOUT_S, self._spec.poll_s + _TIMEOUT_S),
        )
        try:
            next(stream, None)
        except ApiException as error:
            if error.status != _GONE:
                raise

    def stop(self) -> None:
        if self._watch is not None:
            self._watch.stop()


class InferencePoolPods:
    """Follows the endpoints of one pool. The gateway does not set their number. Implements `Actuator`."""

    def __init__(self, served: ServedPool, spec: InferencePool, host: ActuatorHost) -> None:
        self._name, self._spec, self._host = served.pool.name, spec, host
        self._api = PoolApi(spec)
        self._used: dict[tuple[str, str], LiveReplica] = {}
        """Maps (pod's uid, address) to the replica."""
        self._retired: set[tuple[str, str]] = set()
        self._readiness, self._departures = Readiness(self._name, host), Departures(host)
        self._is_closed = threading.Event()

    def start_initial(self) -> None:
        # A daemon thread, because a watch may be silent for long when the gateway ends.
        loop = asyncio.get_running_loop()
        threading.Thread(target=self._follow, args=(loop,), name=f"pods of {self._name}", daemon=True).start()

    def _follow(self, loop: asyncio.AbstractEventLoop) -> None:
        """Read the pods, report them to the event loop, and wait for a change, until the gateway ends."""
        while not self._is_closed.is_set():
            try:
                endpoints = self._api.read()
                loop.call_soon_threadsafe(self._use, endpoints)
                self._api.wait_for_change()
            except (ApiException, HTTPError, OSError) as error:
                if self._is_closed.is_set():
                    return
                reason = error.reason if isinstance(error, ApiException) else error
                log.warning("%s: the cluster does not answer: %s", self._name, reason)
                self._is_closed.wait(_PAUSE_S)
            except RuntimeError:  # the event loop is closed
                return
            except Exception:  # an unexpected pool must not end the loop
                log.exception("%s: its InferencePool", self._name)
                self._is_closed.wait(_PAUSE_S)

    def _use(self, endpoints: list[Endpoint]) -> None:
        """Use new endpoints that are ready. Place no more requests at endpoints that are not ready or leave.

        A pod that is no longer listed may be gone, or may have another label. Its requests go on while its engine
        answers.
        """
        if self._is_closed.is_set():
            return
        present = {(each.uid, each.url): each for each in endpoints}
        for key in [key for key in self._used if key not in present]:
            replica = self._used.pop(key)
            if key in self._retired:
                self._retired.discard(key)
            elif not replica.is_removed:
                log.info("%s at %s is not of the pool any more", replica.name, replica.url)
                self._host.retire(replica)
            self._departures.watch(replica)
        for key, endpoint in present.items():
            if key not in self._used:
                if endpoint.is_ready and not endpoint.is_leaving:
                    self._used[key] = self._host.replica_created(self._name, endpoint.url)
            elif endpoint.is_leaving and key not in self._retired:
                self._retired.add(key)
                self._host.retire(self._used[key])
        staying = [(present[key].is_ready, each) for key, each in self._used.items() if key not in self._retired]
        ready = [each for is_ready, each in staying if is_ready]
        self._readiness.follow(ready, [each for is_ready, each in staying if not is_ready])

    async def close(self) -> None:
        """Stop following the pods, which stay as they are."""
        self._is_closed.set()
        self._departures.close()
        self._api.stop()

    # Headway does not set the number of pods.

    def add(self) -> None:
        """Ignored: the cluster starts the pods."""

    def cancel(self, num: int) -> None:
        """Ignored: Headway starts no pods."""

    def replica_up(self, replica: LiveReplica) -> None:
        """Ignored: the pod was ready already."""

    def stop(self, replica: LiveReplica) -> None:
        """Ignored: Headway does not stop these pods."""
