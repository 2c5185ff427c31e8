"""Replicas as pods: a workload's scale subresource says how many there are, its selector which they are.

What the cluster does by itself is followed: pods that come are used once they are well, pods that go are forgotten.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress

from kubernetes import client, config
from kubernetes.client.exceptions import ApiException
from msgspec import Struct
from urllib3.exceptions import HTTPError

from headway.core.errors import HeadwayError
from headway.core.fleet import Pool
from headway.gateway.replica import LiveReplica
from headway.gateway.starting import Host, Kubernetes

log = logging.getLogger("headway.gateway")
_TIMEOUT_S = 10.0
_FIRST = {"controller.kubernetes.io/pod-deletion-cost": "-1000"}
"""Has a ReplicaSet that shrinks give this pod back before others."""


class Pod(Struct, frozen=True):
    """One that runs, and is not on its way out."""

    uid: str
    name: str
    ip: str

    @property
    def number(self) -> int:
        """A StatefulSet's own."""
        tail = self.name.rpartition("-")[2]
        return int(tail) if tail.isdecimal() else -1


class Cluster:
    """A workload, as the API server has it. Every call blocks."""

    def __init__(self, how: Kubernetes) -> None:
        self._how = how
        api = client.ApiClient(_configuration(how.context))
        apps, self._core = client.AppsV1Api(api), client.CoreV1Api(api)
        if how.kind == "Deployment":
            self._read, self._patch = apps.read_namespaced_deployment_scale, apps.patch_namespaced_deployment_scale
        else:
            self._read, self._patch = apps.read_namespaced_stateful_set_scale, apps.patch_namespaced_stateful_set_scale

    def look(self) -> tuple[int, list[Pod]]:
        """How many pods are asked for, and those that there are, by name."""
        how = self._how
        scale = self._read(how.name, how.namespace, _request_timeout=_TIMEOUT_S)
        listed = self._core.list_namespaced_pod(
            how.namespace, label_selector=scale.status.selector, _request_timeout=_TIMEOUT_S
        )
        pods = [
            Pod(pod.metadata.uid, pod.metadata.name, pod.status.pod_ip)
            for pod in listed.items
            if pod.status.phase == "Running" and pod.status.pod_ip and pod.metadata.deletion_timestamp is None
        ]
        return scale.spec.replicas or 0, sorted(pods, key=lambda pod: (pod.number, pod.name))

    def scale(self, num: int, first: list[Pod]) -> None:
        """Ask for so many; these are to go before others."""
        how = self._how
        for pod in first if how.kind == "Deployment" else []:
            with suppress(ApiException):  # it may be gone already
                self._core.patch_namespaced_pod(
                    pod.name, how.namespace, {"metadata": {"annotations": _FIRST}}, _request_timeout=_TIMEOUT_S
                )
        self._patch(how.name, how.namespace, {"spec": {"replicas": num}}, _request_timeout=_TIMEOUT_S)


def _configuration(context: str) -> client.Configuration:
    """The cluster that this process runs in, else the kubeconfig's. HeadwayError where there is neither."""
    made = client.Configuration()
    try:
        if not context:
            with suppress(config.ConfigException):
                config.load_incluster_config(made)
                return made
        config.load_kube_config(context=context or None, client_configuration=made)
    except config.ConfigException as error:
        raise HeadwayError(f"kubernetes: not in a cluster, and no kubeconfig can be used: {error}") from None
    return made


def check(how: Kubernetes) -> None:
    """HeadwayError where no cluster is known."""
    _configuration(how.context)


class Pods:
    """One pool's. Satisfies `starting.Actuator`."""

    def __init__(self, pool: Pool, how: Kubernetes, host: Host) -> None:
        self._pool, self._how, self._host = pool, how, host
        self._cluster = Cluster(how)
        self._known: dict[str, tuple[Pod, LiveReplica]] = {}
        """By uid, those that are used."""
        self._leaving: dict[str, Pod] = {}
        """Empty, and to go; the cluster may take another one instead."""
        self._owed = 0
        """Of a StatefulSet's, those that are to go and have not been asked for less yet."""
        self._given: set[str] = set()
        """By uid, those that were: its last ones."""
        self._up: set[int] = set()
        self._asked = pool.replicas
        """Pods that the cluster was last known to be to have."""
        self._more = 0
        """Pods to ask for besides; below 0: fewer."""
        self._changed = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def begin(self) -> None:
        """Those that there are. How many there should be, the cluster knows from before."""
        self._host.asks(self._pool.name, self._asked)
        self._host.expect(self._pool.name, self._asked)
        self._task = asyncio.create_task(self._follow())

    def more(self) -> None:
        """One more pod."""
        self._want(1)

    def stop(self, replica: LiveReplica) -> None:
        """One pod less: this one, if that can be said."""
        pod = next((pod for pod, known in self._known.values() if known is replica), None)
        self._up.discard(replica.id)
        if pod is None:
            return
        del self._known[pod.uid]
        self._leaving[pod.uid] = pod
        if self._how.kind == "StatefulSet":
            self._owed += 1
            asyncio.get_running_loop().call_soon(self._give_last)  # once all that go together are empty
        else:
            self._want(-1)

    def _give_last(self) -> None:
        """A StatefulSet gives back its last pods only. So these are emptied, and the empty ones are used again."""
        owed, self._owed = self._owed, 0
        known = {uid: pod for uid, (pod, _) in self._known.items()}
        left = [pod for uid, pod in (known | self._leaving).items() if uid not in self._given]
        for pod in sorted(left, key=lambda pod: pod.number)[-owed:] if owed else ():
            if pod.uid in self._leaving:
                self._given.add(pod.uid)
                self._want(-1)
            else:
                self._host.retire(self._known[pod.uid][1])
                self._changed.set()

    def up(self, replica: LiveReplica) -> None:
        """It has been seen to be well."""
        self._up.add(replica.id)

    async def close(self) -> None:
        """Pods stay as they are."""
        if self._task is not None:
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task

    def _want(self, more: int) -> None:
        self._more += more
        self._host.asks(self._pool.name, self._asked + self._more - self._owed)
        self._changed.set()

    async def _follow(self) -> None:
        while True:
            self._changed.clear()
            try:
                await self._look()
            except (ApiException, HTTPError, OSError) as error:
                reason = error.reason if isinstance(error, ApiException) else error
                log.warning("%s: the cluster does not answer: %s", self._pool.name, reason)
            with suppress(TimeoutError):
                async with asyncio.timeout(self._how.poll_s):
                    await self._changed.wait()

    async def _look(self) -> None:
        """Have the cluster know what is wanted, and see what there is."""
        asked, pods = await asyncio.to_thread(self._cluster.look)
        if more := self._more:
            asked = max(asked + more, 0)
            await asyncio.to_thread(self._cluster.scale, asked, list(self._leaving.values()))
            self._more -= more
        self._asked = asked
        here = {pod.uid for pod in pods}
        self._leaving = {uid: pod for uid, pod in self._leaving.items() if uid in here}
        self._given &= here
        for uid in [uid for uid in self._known if uid not in here]:
            _, replica = self._known.pop(uid)
            self._up.discard(replica.id)
            if self._host.lost(replica):
                log.warning("%s is gone; its workload starts another one", replica.name)
            else:
                self._want(-1)
        asked += self._more
        self._host.asks(self._pool.name, asked - self._owed)
        self._use(pods, asked)
        self._host.expect(self._pool.name, max(asked - len(self._up), 0))

    def _use(self, pods: list[Pod], asked: int) -> None:
        """Those that are new, and those that were to leave and are to stay, as others have gone."""
        num_free = asked - len(self._known)
        new = [pod for pod in pods if pod.uid not in self._known]
        for pod in sorted(new, key=lambda pod: (pod.uid in self._leaving, pod.uid in self._given))[: max(num_free, 0)]:
            self._leaving.pop(pod.uid, None)
            self._given.discard(pod.uid)
            host = f"[{pod.ip}]" if ":" in pod.ip else pod.ip
            self._known[pod.uid] = pod, self._host.came(self._pool.name, f"http://{host}:{self._how.port}")
