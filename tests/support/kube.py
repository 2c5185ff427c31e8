"""A small API server for workloads: their scales, their pods, and what a controller does when the two differ.

It speaks HTTP with the official client. Pods are emulated engines, each at a loopback address of its own.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import yaml

import serving

COST = "controller.kubernetes.io/pod-deletion-cost"


class Pod:
    """A container that runs."""

    def __init__(
        self, number: int, name: str, address: tuple[str, int], options: Sequence[str], ails: str = ""
    ) -> None:
        """`ails`: why its container does not stay, if it does not."""
        self.number, self.name, self.uid = number, name, f"uid-{number}-{id(self)}"
        self.ip, port = address
        self.annotations: dict[str, str] = {}
        self._ails = ails
        self._engine = None if ails else serving.emulator("--host", self.ip, *options, port=port)

    def json(self) -> dict[str, Any]:
        metadata = {"name": self.name, "uid": self.uid, "annotations": self.annotations}
        status: dict[str, Any] = {"phase": "Running", "podIP": self.ip}
        if self._ails:
            state = {"waiting": {"reason": self._ails}}
            about = {"name": "engine", "image": "x", "imageID": "x", "ready": False, "restartCount": 3, "state": state}
            status["containerStatuses"] = [about]
        return {"metadata": metadata, "spec": {"containers": []}, "status": status}

    def end(self) -> None:
        if self._engine is not None:
            self._engine.process.kill()
            self._engine.process.wait()
            self._engine.close()


class Workload:
    """A Deployment or a StatefulSet, in the namespace `models`. `subnet`: of its pods, when there are others."""

    def __init__(
        self,
        kind: str,
        replicas: int,
        port: int,
        name: str = "chat",
        subnet: int = 0,
        options: Sequence[str] = (),
        ails: str = "",
    ) -> None:
        self.kind, self.replicas, self.port, self.name = kind, replicas, port, name
        self._subnet, self._options = subnet, options
        self.pods: list[Pod] = []
        self.ended: list[Pod] = []
        self.asked: list[str] = []
        self.ails = ails
        """What pods that are made from now on will suffer from."""
        self._lock = threading.Lock()
        self.reconcile()

    def reconcile(self) -> None:
        """As the controllers do: a ReplicaSet by the cost of deletion, then the newest, a StatefulSet the last."""
        with self._lock:
            while len(self.pods) < self.replicas:
                number = next(n for n in range(99) if all(pod.number != n for pod in self.pods))
                own = f"{number}" if self.kind == "StatefulSet" else f"7d9f-{len(self.ended)}{number}x"
                address = f"127.0.{self._subnet}.{number + 2}", self.port
                self.pods.append(Pod(number, f"{self.name}-{own}", address, self._options, self.ails))
            while len(self.pods) > self.replicas:
                costs = [(int(pod.annotations.get(COST, 0)), -i) for i, pod in enumerate(self.pods)]
                last = max(range(len(self.pods)), key=lambda i: self.pods[i].number)
                self.remove(self.pods[last if self.kind == "StatefulSet" else costs.index(min(costs))])

    def remove(self, pod: Pod) -> None:
        self.pods.remove(pod)
        self.ended.append(pod)
        pod.end()

    def close(self) -> None:
        for pod in self.pods:
            pod.end()

    def scale(self) -> dict[str, Any]:
        status = {"replicas": len(self.pods), "selector": f"app={self.name}"}
        return {"metadata": {"name": self.name}, "spec": {"replicas": self.replicas}, "status": status}

    def answer(self, method: str, url: str, body: Any) -> tuple[int, Any]:
        """What the API server says; 404: it is not about this one."""
        parts = urlsplit(url)
        self.asked.append(f"{method} {parts.path}")
        plural = {"Deployment": "deployments", "StatefulSet": "statefulsets"}[self.kind]
        if parts.path == f"/apis/apps/v1/namespaces/models/{plural}/{self.name}/scale":
            if method == "PATCH":
                self.replicas = body["spec"]["replicas"]
                self.reconcile()
            return 200, self.scale()
        selected = parse_qs(parts.query).get("labelSelector")
        if parts.path == "/api/v1/namespaces/models/pods" and selected == [f"app={self.name}"]:
            return 200, {"kind": "PodList", "apiVersion": "v1", "items": [pod.json() for pod in list(self.pods)]}
        if method == "PATCH" and (found := re.fullmatch("/api/v1/namespaces/models/pods/(.+)", parts.path)):
            for pod in self.pods:
                if pod.name == found[1]:
                    pod.annotations |= body["metadata"]["annotations"]
                    return 200, pod.json()
        return 404, {"kind": "Status", "status": "Failure", "code": 404, "message": parts.path}


class Leases:
    """The Leases of the namespace `models`. A change must name the version that it changes."""

    def __init__(self) -> None:
        self.found: dict[str, dict[str, Any]] = {}
        """By name."""
        self._lock = threading.Lock()

    def answer(self, method: str, url: str, body: Any) -> tuple[int, Any]:
        """What the API server says; 404: it is not about these."""
        at = "/apis/coordination.k8s.io/v1/namespaces/models/leases"
        missing = 404, {"kind": "Status", "status": "Failure", "code": 404, "message": url}
        if not url.startswith(at):
            return missing
        with self._lock:
            name = body["metadata"]["name"] if method == "POST" else url.removeprefix(f"{at}/")
            found = self.found.get(name)
            if method == "GET" or (method == "PUT" and found is None):
                return missing if found is None else (200, found)
            version = 0 if found is None else int(found["metadata"]["resourceVersion"])
            if (method == "POST" and version) or (
                method == "PUT" and body["metadata"]["resourceVersion"] != str(version)
            ):
                return 409, {"kind": "Status", "status": "Failure", "code": 409, "reason": "Conflict"}
            body["metadata"]["resourceVersion"] = str(version + 1)
            self.found[name] = body
            return 200, body

    def close(self) -> None:
        """Nothing of them runs."""


class InferencePool:
    """An InferencePool `chat` in the namespace `models`, and its pods, each with an engine of this process."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.pods: dict[str, dict[str, Any]] = {}
        """By name, with their status."""
        self._changed = threading.Condition()
        self._is_closed = False
        self._version = 1

    def set_pod(self, name: str, ip: str, is_ready: bool = True, is_leaving: bool = False) -> None:
        """Create or change a pod."""
        conditions = [{"type": "Ready", "status": str(is_ready)}]
        metadata: dict[str, Any] = {"name": name, "uid": f"uid-{name}", "labels": {"app": "chat"}}
        if is_leaving:
            metadata["deletionTimestamp"] = "2026-01-01T00:00:00Z"
        status = {"phase": "Running", "podIP": ip, "conditions": conditions}
        with self._changed:
            self.pods[name] = {"metadata": metadata, "spec": {"containers": []}, "status": status}
            self._version += 1
            self._changed.notify_all()

    def remove_pod(self, name: str) -> None:
        with self._changed:
            del self.pods[name]
            self._version += 1
            self._changed.notify_all()

    def close(self) -> None:
        """End the watches."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    def answer(self, method: str, url: str, body: Any) -> tuple[int, Any]:
        """What the API server says; 404: it is not about this one."""
        parts = urlsplit(url)
        query = parse_qs(parts.query)
        if parts.path == "/apis/inference.networking.k8s.io/v1/namespaces/models/inferencepools/chat":
            spec = {"selector": {"matchLabels": {"app": "chat"}}, "targetPorts": [{"number": self.port}]}
            return 200, {"metadata": {"name": "chat"}, "spec": spec}
        if parts.path == "/api/v1/namespaces/models/pods" and query.get("labelSelector") == ["app=chat"]:
            if query.get("watch"):
                return 200, self._events(int(query["resourceVersion"][0]))
            with self._changed:
                items, version = list(self.pods.values()), str(self._version)
            return 200, {
                "kind": "PodList",
                "apiVersion": "v1",
                "metadata": {"resourceVersion": version},
                "items": items,
            }
        return 404, {"kind": "Status", "status": "Failure", "code": 404, "message": parts.path}

    def _events(self, version: int) -> Iterator[Any]:
        """The first change after this version."""
        with self._changed:
            self._changed.wait_for(lambda: self._version > version or self._is_closed)
            pods = list(self.pods.values())
        if pods and not self._is_closed:
            yield {"type": "MODIFIED", "object": {"kind": "Pod", "apiVersion": "v1", **pods[0]}}


@contextmanager
def serve(kubeconfig: Path, *workloads: Workload | InferencePool | Leases) -> Iterator[None]:
    """The workloads behind an API server that this kubeconfig says."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = self.rfile.read(int(self.headers.get("content-length", 0)))
            asked = json.loads(body) if body else None
            answers = [workload.answer(self.command, self.path, asked) for workload in workloads]
            status, value = min(answers, key=lambda answer: answer[0])
            if isinstance(value, Iterator):  # a watch
                self.send_response(status)
                self.send_header("connection", "close")
                self.end_headers()
                for event in value:
                    self.wfile.write(json.dumps(event).encode() + b"\n")
                return
            data = json.dumps(value).encode()
            self.send_response(status)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        do_PATCH = do_POST = do_PUT = do_GET  # noqa: N815  # as http.server calls them

        def log_message(self, format: str, *args: Any) -> None:
            """To nobody."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    cluster = {"name": "here", "cluster": {"server": f"http://127.0.0.1:{server.server_address[1]}"}}
    context = {"name": "here", "context": {"cluster": "here", "user": "me"}}
    user = {"name": "me", "user": {"token": "secret"}}
    document = {"clusters": [cluster], "contexts": [context], "users": [user], "current-context": "here"}
    kubeconfig.write_text(yaml.safe_dump({"apiVersion": "v1", "kind": "Config", **document}))
    try:
        yield
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
        for workload in workloads:
            workload.close()
