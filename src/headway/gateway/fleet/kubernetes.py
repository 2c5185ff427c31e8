"""Replicas that are pods. The workload's scale subresource sets the number of pods, and the workload's selector
identifies the pods.

The gateway follows the cluster's changes: it uses new pods once they are healthy, and removes replicas whose pods
disappear.
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
from headway.gateway.fleet.actuator import ActuatorHost
from headway.gateway.fleet.pod_changes import Departures, Readiness, answers
from headway.gateway.fleet.specs import Kubernetes, ServedPool
from headway.gateway.scheduling.replica import LiveReplica

log = logging.getLogger("headway.gateway")
_TIMEOUT_S = 10.0
_DELETE_FIRST = {"controller.kubernetes.io/pod-deletion-cost": "-1000"}
"""The annotation with which a shrinking ReplicaSet deletes this pod before the other pods."""


class Pod(Struct, frozen=True):
    """A pod of a workload."""

    uid: str
    name: str
    ip: str
    """IP address; empty if the pod has none yet."""
    is_running: bool = True
    num_restarts: int = 0
    """Restarts of the pod's containers."""
    why: str = ""
    """Why the pod, or one of its containers, does not run."""
    is_ready: bool = True
    """Whether the readiness probes succeed. True for a pod without probes."""
    is_leaving: bool = False
    """Whether the pod is being deleted."""

    @property
    def number(self) -> int:
        """The number of the pod in its StatefulSet; -1 for other pods."""
        tail = self.name.rpartition("-")[2]
        return int(tail) if tail.isdecimal() else -1


class WorkloadApi:
    """One workload, through the API server. Every call blocks."""

    def __init__(self, spec: Kubernetes) -> None:
        self._spec = spec
        api = client.ApiClient(configuration(spec.context))
        apps, self._core = client.AppsV1Api(api), client.CoreV1Api(api)
        if spec.kind == "Deployment":
            self._read, self._patch = apps.read_namespaced_deployment_scale, apps.patch_namespaced_deployment_scale
        else:
            self._read, self._patch = apps.read_namespaced_stateful_set_scale, apps.patch_namespaced_stateful_set_scale

    def read(self) -> tuple[int, list[Pod]]:
        """The number of requested pods, and the existing pods, sorted by number and name."""
        spec = self._spec
        scale = self._read(spec.name, spec.namespace, _request_timeout=_TIMEOUT_S)
        listed = self._core.list_namespaced_pod(
            spec.namespace, label_selector=scale.status.selector, _request_timeout=_TIMEOUT_S
        )
        pods = [_parse_pod(pod) for pod in listed.items]
        return scale.spec.replicas or 0, sorted(pods, key=lambda pod: (pod.number, pod.name))

    def scale(self, num: int, delete_first: list[Pod]) -> None:
        spec = self._spec
        for pod in delete_first if spec.kind == "Deployment" else []:
            with suppress(ApiException):  # the pod may be deleted already
                self._core.patch_namespaced_pod(
                    pod.name, spec.namespace, {"metadata": {"annotations": _DELETE_FIRST}}, _request_timeout=_TIMEOUT_S
                )
        self._patch(spec.name, spec.namespace, {"spec": {"replicas": num}}, _request_timeout=_TIMEOUT_S)


def _parse_pod(pod: Any) -> Pod:
    status = pod.status
    containers = status.container_statuses or []
    waiting = [each.state.waiting for each in containers if each.state is not None and each.state.waiting is not None]
    unmet = [each for each in status.conditions or [] if each.type == "PodScheduled" and each.status == "False"]
    reasons = [each.reason for each in (*waiting, *unmet) if each.reason]
    return Pod(
        pod.metadata.uid,
        pod.metadata.name,
        status.pod_ip or "",
        status.phase == "Running" and bool(status.pod_ip),
        sum(each.restart_count or 0 for each in containers),
        ", ".join(reasons) or ("" if status.phase == "Running" else str(status.phase)),
        readiness(pod) is not False,
        pod.metadata.deletion_timestamp is not None,
    )


def readiness(pod: Any) -> bool | None:
    """Whether the cluster reports the pod as ready; None without a report."""
    conditions = [each.status for each in pod.status.conditions or () if each.type == "Ready"]
    return conditions[0] == "True" if conditions else None


def configuration(context: str) -> client.Configuration:
    """The configuration of the cluster that this process runs in, else of the kubeconfig. Raises HeadwayError if there
    is neither."""
    configuration = client.Configuration()
    try:
        if not context:
            with suppress(config.ConfigException):
                config.load_incluster_config(configuration)
                return configuration
        config.load_kube_config(context=context or None, client_configuration=configuration)
    except config.ConfigException as error:
        raise HeadwayError(f"kubernetes: not in a cluster, and no kubeconfig can be used: {error}") from None
    return configuration


def check(context: str) -> None:
    """Raises HeadwayError if no cluster is configured. Sends no request to the cluster."""
    configuration(context)


class PodFailures:
    """Tracks which of a workload's pods count as failed."""

    def __init__(self, ready_s: float, tries: int) -> None:
        self._ready_s, self._tries = ready_s, tries
        self._since_s: dict[str, float] = {}
        """Maps a pod's uid to the time at which the pod was first seen. A missing pod has a running number in place of
        the uid, and the time at which it was first missing."""
        self.starting: dict[str, Pod] = {}
        """The existing pods that are not up, by uid."""
        self.reported: dict[str, str] = {}
        """Maps uids or numbers of failed pods to the reasons that were reported to the host."""

    def find(self, starting: list[Pod], num_missing: int, now: float) -> dict[str, str]:
        self.starting = {pod.uid: pod for pod in starting}
        wanted = [*self.starting, *map(str, range(num_missing))]
        self._since_s = {uid: self._since_s.get(uid, now) for uid in wanted}
        reasons = {uid: self._reason(self.starting.get(uid), now - since_s) for uid, since_s in self._since_s.items()}
        return {uid: reason for uid, reason in reasons.items() if reason}

    def _reason(self, pod: Pod | None, age_s: float) -> str:
        """Why the pod has failed; empty if it may still become healthy."""
        if pod is not None and pod.num_restarts >= self._tries:
            return pod.why or "has ended"
        late = f"was not up after {self._ready_s:g} s" if age_s > self._ready_s else ""
        return (late and pod is not None and pod.why) or late


class Pods:
    """Scales one pool's workload. Implements `Actuator`.

    A Deployment first deletes the pods that are marked for deletion. A StatefulSet deletes only its last pods: the last
    pods are drained in place of other pods, and pods drained without need are used again.
    """

    def __init__(self, served: ServedPool, spec: Kubernetes, host: ActuatorHost) -> None:
        self._pool, self._spec, self._host = served.pool, spec, host
        self._api = WorkloadApi(spec)
        self._used: dict[str, tuple[Pod, LiveReplica]] = {}
        """The pods that are replicas, by uid."""
        self._leaving: dict[str, Pod] = {}
        """Empty pods that are no longer needed, by uid."""
        self._num_owed = 0
        """Number of pods of a StatefulSet that are no longer needed but still requested."""
        self._given_up: set[str] = set()
        """Last pods of a StatefulSet that were subtracted from the request, by uid."""
        self._num_requested = served.num_initial
        """Number of requested pods, as the cluster last answered."""
        self._num_more = 0
        """Change of the number of requested pods that is not sent to the cluster yet."""
        self._failures = PodFailures(spec.ready_s, spec.tries)
        self._readiness, self._departures = Readiness(self._pool.name, host), Departures(host)
        self._changed = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def start_initial(self) -> None:
        """Find the existing pods. The cluster determines their number."""
        self._report_requested()
        self._task = asyncio.create_task(self._follow())

    def add(self) -> None:
        self._request_more(1)

    def stop(self, replica: LiveReplica) -> None:
        """Request one pod less. A Deployment deletes this replica's pod."""
        pod = next((pod for pod, used in self._used.values() if used is replica), None)
        if pod is not None:
            del self._used[pod.uid]
            self._give_up(pod)

    def cancel(self, num: int) -> None:
        """Ask for `num` fewer pods: failed pods go first, then unused pods."""
        for uid in [*self._failures.reported][: max(num, 0)]:
            num -= 1
            self._recover(uid)
            if uid in self._used:
                self._host.retire(self._used[uid][1])
            elif uid in self._failures.starting:
                self._give_up(self._failures.starting[uid])
            else:
                self._request_more(-1)
        for _ in range(num):
            self._request_more(-1)

    def _give_up(self, pod: Pod) -> None:
        self._recover(pod.uid)
        self._leaving[pod.uid] = pod
        if self._spec.kind == "StatefulSet":
            self._num_owed += 1
            asyncio.get_running_loop().call_soon(self._give_up_last)  # after all pods that leave at the same time
        else:
            self._request_more(-1)

    def _give_up_last(self) -> None:
        """Give up a StatefulSet's last pods in place of empty pods. An empty last pod is given up at once, any other
        after a drain."""
        num_owed, self._num_owed = self._num_owed, 0
        used = {uid: pod for uid, (pod, _) in self._used.items()}
        pods = [pod for uid, pod in (used | self._leaving).items() if uid not in self._given_up]
        for pod in sorted(pods, key=lambda pod: pod.number)[-num_owed:] if num_owed else ():
            if pod.uid in self._leaving:
                self._given_up.add(pod.uid)
                self._request_more(-1)
            else:
                self._host.retire(self._used[pod.uid][1])
                self._changed.set()

    def replica_up(self, replica: LiveReplica) -> None:
        for pod in [pod for pod, used in self._used.values() if used is replica]:
            self._recover(pod.uid)

    def _up(self) -> set[str]:
        """The uids of pods that are or were up."""
        return {uid for uid, (_, replica) in self._used.items() if not replica.is_starting}

    async def close(self) -> None:
        """Stop following the pods, which stay as they are."""
        self._departures.close()
        if self._task is not None:
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task

    def _request_more(self, num: int) -> None:
        self._num_more += num
        self._report_requested()
        self._changed.set()

    def _report_requested(self) -> None:
        """Report the number of requested pods, and how many of them are not up, including failed pods."""
        num = self._num_requested + self._num_more
        self._host.pods_requested(self._pool.name, num - self._num_owed, max(num - len(self._up()), 0))

    async def _follow(self) -> None:
        while True:
            self._changed.clear()
            try:
                await self._synchronize()
            except (ApiException, HTTPError, OSError) as error:
                reason = error.reason if isinstance(error, ApiException) else error
                log.warning("%s: the cluster does not answer: %s", self._pool.name, reason)
            except Exception:  # a bug, or a policy's error, must not end the loop
                log.exception("%s: its pods", self._pool.name)
            with suppress(TimeoutError):
                async with asyncio.timeout(self._spec.poll_s):
                    await self._changed.wait()

    async def _synchronize(self) -> None:
        """Send the request to the cluster, and read the existing pods."""
        num_requested, listed = await asyncio.to_thread(self._api.read)
        pods = [pod for pod in listed if not pod.is_leaving]
        if num_more := self._num_more:
            if self._host.leads:
                num_requested = max(num_requested + num_more, 0)
                await asyncio.to_thread(self._api.scale, num_requested, list(self._leaving.values()))
            self._num_more -= num_more
        self._num_requested = num_requested
        existing = {pod.uid for pod in pods}
        self._leaving = {uid: pod for uid, pod in self._leaving.items() if uid in existing}
        self._given_up &= existing
        running = [pod for pod in pods if pod.is_running]
        by_uid = {pod.uid: pod for pod in running}
        for uid in [uid for uid in self._used if uid not in by_uid]:
            await self._lose(*self._used.pop(uid), is_listed=any(pod.uid == uid for pod in listed))
        used = [(by_uid[uid].is_ready, replica) for uid, (_, replica) in self._used.items()]
        self._readiness.follow(
            [each for is_ready, each in used if is_ready], [each for is_ready, each in used if not is_ready]
        )
        num_requested += self._num_more
        self._use(running, num_requested)
        self._report_failures(pods, num_requested)
        self._report_requested()

    async def _lose(self, pod: Pod, replica: LiveReplica, is_listed: bool) -> None:
        """A pod is being deleted, has lost its label, or has ended. Its requests finish there while its engine
        answers."""
        lives = await answers(replica)
        if self._host.replica_lost(replica, at_once=not lives):
            what = "leaves" if is_listed or lives else "is gone"
            log.warning("%s %s; its workload starts another one", replica.name, what)
        else:
            self._request_more(-1)
        self._departures.watch(replica)

    def _use(self, pods: list[Pod], num_requested: int) -> None:
        """Use new pods. Use drained pods again that survived because the cluster deleted other pods."""
        num_free = num_requested - len(self._used)
        unused = [pod for pod in pods if pod.uid not in self._used]
        unused.sort(key=lambda pod: (pod.uid in self._leaving, pod.uid in self._given_up))
        for pod in unused[: max(num_free, 0)]:
            self._leaving.pop(pod.uid, None)
            self._given_up.discard(pod.uid)
            host = f"[{pod.ip}]" if ":" in pod.ip else pod.ip
            self._used[pod.uid] = pod, self._host.replica_created(self._pool.name, f"http://{host}:{self._spec.port}")

    def _report_failures(self, pods: list[Pod], num_requested: int) -> None:
        up = self._up()
        starting = [pod for pod in pods if pod.uid not in up and pod.uid not in self._leaving]
        num_missing = num_requested - len(up) - len(starting)
        failed = self._failures.find(starting, num_missing, asyncio.get_running_loop().time())
        for uid in [uid for uid in self._failures.reported if uid not in failed]:
            self._recover(uid)
        for uid, why in failed.items():
            if uid not in self._failures.reported:
                self._failures.reported[uid] = why
                log.error(
                    "%s: a pod does not start (%s): it counts as failed, and its workload goes on trying",
                    self._pool.name,
                    why,
                )
                self._host.start_failed(self._pool.name, why)

    def _recover(self, uid: str) -> None:
        """Report that a failed pod is up or given up."""
        if self._failures.reported.pop(uid, None) is not None:
            self._host.start_recovered(self._pool.name)
            self._report_requested()
