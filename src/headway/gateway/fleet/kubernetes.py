"""Replicas as pods: a workload's scale subresource says how many there are, its selector which they are.

What the cluster does by itself is followed: pods that come are used once they are well, pods that go are forgotten.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from typing import Any

from kubernetes import client, config
from kubernetes.client.exceptions import ApiException
from msgspec import Struct
from urllib3.exceptions import HTTPError

from headway.core.errors import HeadwayError
from headway.core.fleet import Pool
from headway.gateway.fleet.replica import LiveReplica
from headway.gateway.fleet.starting import Host, Kubernetes

log = logging.getLogger("headway.gateway")
_TIMEOUT_S = 10.0
_FIRST = {"controller.kubernetes.io/pod-deletion-cost": "-1000"}
"""Has a ReplicaSet that shrinks give this pod back before others."""


class Pod(Struct, frozen=True):
    """One that is not on its way out."""

    uid: str
    name: str
    ip: str
    """"": it has none yet."""
    is_running: bool = True
    num_restarts: int = 0
    """Of its containers."""
    why: str = ""
    """It is not running, or its containers are not."""

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
        pods = [_pod(pod) for pod in listed.items if pod.metadata.deletion_timestamp is None]
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


def _pod(said: Any) -> Pod:
    status = said.status
    containers = status.container_statuses or []
    waiting = [each.state.waiting for each in containers if each.state is not None and each.state.waiting is not None]
    unmet = [each for each in status.conditions or [] if each.type == "PodScheduled" and each.status == "False"]
    reasons = [each.reason for each in (*waiting, *unmet) if each.reason]
    return Pod(
        said.metadata.uid, said.metadata.name, status.pod_ip or "",
        status.phase == "Running" and bool(status.pod_ip), sum(each.restart_count or 0 for each in containers),
        ", ".join(reasons) or ("" if status.phase == "Running" else str(status.phase)),
    )  # fmt: skip


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


class Sick:
    """Of a workload's pods, those that do not start."""

    def __init__(self, ready_s: float, tries: int) -> None:
        self._ready_s, self._tries = ready_s, tries
        self._since_s: dict[str, float] = {}
        """When a pod was first seen, by uid; of those that are not there, by number, when they were first missed."""
        self.pods: dict[str, Pod] = {}
        """By uid, those that come."""
        self.why: dict[str, str] = {}
        """Of those that count as failed."""

    def look(self, coming: list[Pod], num_missing: int, now: float) -> dict[str, str]:
        """Those that have had the time, or the starts, that they may have; and why."""
        self.pods = {pod.uid: pod for pod in coming}
        wanted = [*self.pods, *map(str, range(num_missing))]
        self._since_s = {uid: self._since_s.get(uid, now) for uid in wanted}
        return {uid: why for uid in wanted if (why := self._why(self.pods.get(uid), now - self._since_s[uid]))}

    def _why(self, pod: Pod | None, age_s: float) -> str:
        """It has failed; "": it may still be well."""
        if pod is not None and pod.num_restarts >= self._tries:
            return pod.why or "has ended"
        late = f"was not up after {self._ready_s:g} s" if age_s > self._ready_s else ""
        return (late and pod is not None and pod.why) or late


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
        self._sick = Sick(how.ready_s, how.tries)
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
        self._give(pod)

    def fewer(self, num: int) -> None:
        """So many pods less, of those that are not used, or have failed."""
        for uid in [*self._sick.why][: max(num, 0)]:
            num -= 1
            self._recover(uid)
            if uid in self._known:
                self._host.retire(self._known[uid][1])
            elif uid in self._sick.pods:
                self._give(self._sick.pods[uid])
            else:
                self._want(-1)
        for _ in range(num):
            self._want(-1)

    def _give(self, pod: Pod) -> None:
        """It goes, if that can be said."""
        self._recover(pod.uid)
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
        for pod in [pod for pod, known in self._known.values() if known is replica]:
            self._recover(pod.uid)
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
        self._expect()
        self._changed.set()

    def _expect(self) -> None:
        """All that are wanted and not up, whether they have failed or not."""
        self._host.expect(self._pool.name, max(self._asked + self._more - len(self._up), 0))

    async def _follow(self) -> None:
        while True:
            self._changed.clear()
            try:
                await self._look()
            except (ApiException, HTTPError, OSError) as error:
                reason = error.reason if isinstance(error, ApiException) else error
                log.warning("%s: the cluster does not answer: %s", self._pool.name, reason)
            except Exception:  # a mistake of ours, or of a policy that hears of it, must not be the last look
                log.exception("%s: its pods", self._pool.name)
            with suppress(TimeoutError):
                async with asyncio.timeout(self._how.poll_s):
                    await self._changed.wait()

    async def _look(self) -> None:
        """Have the cluster know what is wanted, and see what there is."""
        asked, there = await asyncio.to_thread(self._cluster.look)
        if more := self._more:
            asked = max(asked + more, 0)
            await asyncio.to_thread(self._cluster.scale, asked, list(self._leaving.values()))
            self._more -= more
        self._asked = asked
        self._leaving = {uid: pod for uid, pod in self._leaving.items() if uid in {pod.uid for pod in there}}
        self._given &= {pod.uid for pod in there}
        pods = [pod for pod in there if pod.is_running]
        here = {pod.uid for pod in pods}
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
        self._tell_of_failed(there, asked)
        self._expect()

    def _tell_of_failed(self, there: list[Pod], asked: int) -> None:
        """Those that are wanted and do not start."""
        up = {uid for uid, (_, replica) in self._known.items() if replica.id in self._up}
        coming = [pod for pod in there if pod.uid not in up and pod.uid not in self._leaving]
        failed = self._sick.look(coming, asked - len(up) - len(coming), asyncio.get_running_loop().time())
        for uid in [uid for uid in self._sick.why if uid not in failed]:
            self._recover(uid)
        for uid, why in failed.items():
            if uid not in self._sick.why:
                self._sick.why[uid] = why
                log.error("%s: a pod does not start (%s): it counts as failed, and is tried on", self._pool.name, why)
                self._host.failed(self._pool.name, why)

    def _recover(self, uid: str) -> None:
        """It is well after all, or not tried any more."""
        if self._sick.why.pop(uid, None) is not None:
            self._host.mended(self._pool.name)
            self._expect()

    def _use(self, pods: list[Pod], asked: int) -> None:
        """Those that are new, and those that were to leave and are to stay, as others have gone."""
        num_free = asked - len(self._known)
        new = [pod for pod in pods if pod.uid not in self._known]
        for pod in sorted(new, key=lambda pod: (pod.uid in self._leaving, pod.uid in self._given))[: max(num_free, 0)]:
            self._leaving.pop(pod.uid, None)
            self._given.discard(pod.uid)
            host = f"[{pod.ip}]" if ":" in pod.ip else pod.ip
            self._known[pod.uid] = pod, self._host.came(self._pool.name, f"http://{host}:{self._how.port}")
