"""A Lease of the Kubernetes API. The gateway that holds the Lease does the scaling."""

from __future__ import annotations

import asyncio
import time
from datetime import UTC, datetime
from math import ceil
from typing import Any

from kubernetes import client
from kubernetes.client.exceptions import ApiException
from urllib3.exceptions import HTTPError

from headway.gateway.fleet.kubernetes import configuration

_TIMEOUT_S = 5.0
_NOT_FOUND, _CONFLICT = 404, 409


class KubernetesLease:
    """The Lease `name`. Clocks of different machines are not compared: a Lease has expired if it was seen unchanged for
    its duration."""

    def __init__(self, name: str, namespace: str, context: str, holder: str) -> None:
        self._name, self._namespace, self._holder = name, namespace, holder
        self._api = client.CoordinationV1Api(client.ApiClient(configuration(context)))
        self._last_read: tuple[Any, ...] = ()
        """The holder and the renewal time at the last read."""
        self._unchanged_since_s = 0.0
        """The time at which this state was first read."""

    async def acquire(self, lease_s: float) -> bool:
        """Take or renew the Lease, unless another gateway holds it. Raises OSError if the cluster does not answer."""
        return await asyncio.to_thread(self._call, self._acquire, lease_s)

    async def release(self) -> None:
        """Release the Lease, so that another gateway can take the Lease at once. Raises OSError if the cluster does not
        answer."""
        await asyncio.to_thread(self._call, self._release)

    @staticmethod
    def _call(operation: Any, *args: Any) -> bool:
        try:
            return bool(operation(*args))
        except ApiException as error:
            if error.status == _CONFLICT:  # another gateway was first
                return False
            raise ConnectionError(f"the cluster answers {error.status}: {error.reason}") from None
        except HTTPError as error:
            raise ConnectionError(str(error)) from None

    def _acquire(self, lease_s: float) -> bool:
        try:
            lease = self._api.read_namespaced_lease(self._name, self._namespace, _request_timeout=_TIMEOUT_S)
        except ApiException as error:
            if error.status != _NOT_FOUND:
                raise
            body = client.V1Lease(metadata=client.V1ObjectMeta(name=self._name), spec=client.V1LeaseSpec())
            self._take(body.spec, lease_s)
            self._api.create_namespaced_lease(self._namespace, body, _request_timeout=_TIMEOUT_S)
            return True
        spec = lease.spec
        if spec.holder_identity not in (None, "", self._holder) and not self._has_lapsed(spec):
            return False
        self._take(spec, lease_s)
        # The request names the version of the Lease that was read: if two gateways take the Lease at the same time, one
        # of them gets a conflict.
        self._api.replace_namespaced_lease(self._name, self._namespace, lease, _request_timeout=_TIMEOUT_S)
        return True

    def _has_lapsed(self, spec: Any) -> bool:
        now, read = time.monotonic(), (spec.holder_identity, spec.renew_time, spec.lease_transitions)
        if read != self._last_read:
            self._last_read, self._unchanged_since_s = read, now
        return now - self._unchanged_since_s > (spec.lease_duration_seconds or 0)

    def _take(self, spec: Any, lease_s: float) -> None:
        now = datetime.now(UTC)
        now = now.replace(microsecond=max(now.microsecond, 1))  # the API requires a fraction
        if spec.holder_identity != self._holder:
            spec.holder_identity, spec.acquire_time = self._holder, now
            spec.lease_transitions = 0 if spec.lease_transitions is None else spec.lease_transitions + 1
        spec.renew_time, spec.lease_duration_seconds = now, ceil(lease_s)

    def _release(self) -> None:
        lease = self._api.read_namespaced_lease(self._name, self._namespace, _request_timeout=_TIMEOUT_S)
        if lease.spec.holder_identity == self._holder:
            lease.spec.holder_identity = ""
            self._api.replace_namespaced_lease(self._name, self._namespace, lease, _request_timeout=_TIMEOUT_S)
