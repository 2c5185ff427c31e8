"""A small API server for one workload: its scale, its pods, and what a controller does when the two differ.

It speaks HTTP with the official client. Pods are emulated engines, each at a loopback address of its own.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import yaml

COST = "controller.kubernetes.io/pod-deletion-cost"


class Pod:
    """A container that runs."""

    def __init__(self, number: int, name: str, port: int) -> None:
        self.number, self.name, self.uid = number, name, f"uid-{number}-{id(self)}"
        self.ip = f"127.0.0.{number + 2}"
        self.annotations: dict[str, str] = {}
        command = [sys.executable, "-m", "headway", "emulate", "--model", "qwen3-8b", "--gpu", "h100"]
        self.process = subprocess.Popen(
            [*command, "--host", self.ip, "--port", str(port)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )

    def json(self) -> dict[str, Any]:
        metadata = {"name": self.name, "uid": self.uid, "annotations": self.annotations, "labels": {"app": "chat"}}
        return {"metadata": metadata, "spec": {"containers": []}, "status": {"phase": "Running", "podIP": self.ip}}

    def end(self) -> None:
        self.process.kill()
        self.process.wait()


class Workload:
    """A Deployment or a StatefulSet called `chat`, in the namespace `models`."""

    def __init__(self, kind: str, replicas: int, port: int) -> None:
        self.kind, self.replicas, self.port = kind, replicas, port
        self.pods: list[Pod] = []
        self.ended: list[Pod] = []
        self.asked: list[str] = []
        self._lock = threading.Lock()
        self.reconcile()

    def reconcile(self) -> None:
        """As the controllers do: a ReplicaSet by the cost of deletion, then the newest, a StatefulSet the last."""
        with self._lock:
            while len(self.pods) < self.replicas:
                number = next(n for n in range(99) if all(pod.number != n for pod in self.pods))
                name = f"chat-{number}" if self.kind == "StatefulSet" else f"chat-7d9f-{len(self.ended)}{number}x"
                self.pods.append(Pod(number, name, self.port))
            while len(self.pods) > self.replicas:
                costs = [(int(pod.annotations.get(COST, 0)), -i) for i, pod in enumerate(self.pods)]
                last = max(range(len(self.pods)), key=lambda i: self.pods[i].number)
                self.remove(self.pods[last if self.kind == "StatefulSet" else costs.index(min(costs))])

    def remove(self, pod: Pod) -> None:
        self.pods.remove(pod)
        self.ended.append(pod)
        pod.end()

    def scale(self) -> dict[str, Any]:
        status = {"replicas": len(self.pods), "selector": "app=chat"}
        return {"metadata": {"name": "chat"}, "spec": {"replicas": self.replicas}, "status": status}

    def answer(self, method: str, url: str, body: Any) -> tuple[int, Any]:
        """What the API server says."""
        parts = urlsplit(url)
        self.asked.append(f"{method} {parts.path}")
        plural = {"Deployment": "deployments", "StatefulSet": "statefulsets"}[self.kind]
        if parts.path == f"/apis/apps/v1/namespaces/models/{plural}/chat/scale":
            if method == "PATCH":
                self.replicas = body["spec"]["replicas"]
                self.reconcile()
            return 200, self.scale()
        if parts.path == "/api/v1/namespaces/models/pods" and parse_qs(parts.query)["labelSelector"] == ["app=chat"]:
            return 200, {"kind": "PodList", "apiVersion": "v1", "items": [pod.json() for pod in list(self.pods)]}
        if method == "PATCH" and (found := re.fullmatch("/api/v1/namespaces/models/pods/(.+)", parts.path)):
            for pod in self.pods:
                if pod.name == found[1]:
                    pod.annotations |= body["metadata"]["annotations"]
                    return 200, pod.json()
        return 404, {"kind": "Status", "status": "Failure", "code": 404, "message": parts.path}


@contextmanager
def serve(workload: Workload, kubeconfig: Path) -> Iterator[None]:
    """The workload behind an API server that this kubeconfig says."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = self.rfile.read(int(self.headers.get("content-length", 0)))
            status, value = workload.answer(self.command, self.path, json.loads(body) if body else None)
            data = json.dumps(value).encode()
            self.send_response(status)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        do_PATCH = do_GET  # noqa: N815  # as http.server calls it

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
        for pod in workload.pods:
            pod.end()
