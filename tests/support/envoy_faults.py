"""What clients see when Envoy, the picker or an engine is gone: the table of docs/envoy.md, made with real ones."""

from __future__ import annotations

import http.client
import re
import signal
from pathlib import Path

import envoys
import serving
from envoys import Envoy, Picker
from scripted import GatedEngine
from serving import Process, Reply, chat, until

TABLE = re.compile(r"^\| what happens \|.*?(?=\n\n)", re.DOTALL | re.MULTILINE)
"""The table in the page."""
_HEAD = """| what happens | full duplex, fails closed | buffered, `failure_mode_allow: true` |
|---|---|---|"""
_PICKER = "{endpoint: {address: {socket_address: {address: 127.0.0.1, port_value: 9002}}}}"
_LISTED = "engines.yaml"
SETTINGS = {"hold_s": 0.0}


class Front:
    """Two engines, a picker, and an Envoy of each kind: one fails closed, and one open.

    As the page's configuration says, Envoy finds a picker that hangs: it also takes one for such whose machine stands
    still for two seconds. So Envoy looks for hanging pickers only while a picker hangs (`watch`).
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.engines = [GatedEngine() for _ in range(2)]
        self.grpc_port = envoys.free_port()
        self.picker = self._new_picker(self.engines)
        self._is_watched = False
        self.envoys = [self._new_envoy(config) for config in self._configs()]

    def _configs(self) -> list[str]:
        closed = envoys.configuration()
        if not self._is_watched:
            closed = envoys.unwatched(closed)
        return [closed, envoys.fail_open(closed)]

    def watch(self, is_watched: bool) -> None:
        """Have both Envoys look for a picker that hangs, or not."""
        self._is_watched = is_watched
        self.restart_envoys()

    def write(self, engines: list[GatedEngine]) -> Path:
        """The fleet file, and the file that it names with these engines."""
        (self.folder / _LISTED).write_text("".join(f"- {each.url}\n" for each in engines))
        policies, pool = {"routing": "least-loaded"}, {"endpoints_file": _LISTED}
        return serving.fleet_file(self.folder, [], pool=pool, policies=policies, gateway=SETTINGS)

    def _new_picker(self, engines: list[GatedEngine]) -> Picker:
        return envoys.picker(self.write(engines), "--port", str(self.grpc_port))

    def _new_envoy(self, config: str, port: int = 0) -> Envoy:
        ports = [each.port for each in self.engines]  # each twice, as the page's configuration has four
        return Envoy(config, self.grpc_port, [*ports, *ports], self.folder, port)

    def ready(self) -> None:
        """Wait until both Envoys send requests where the picker says, and it counts none of these any more."""
        serving.all_up(self.picker, len(self.engines))
        for envoy in self.envoys:
            envoys.listening(envoy)
            until(lambda envoy=envoy: asked(envoy) == "200")  # type: ignore[misc]
        self.idle()

    def restart_picker(self) -> None:
        self.picker.close()
        self.picker = self._new_picker(self.engines)
        self.ready()

    def restart_envoys(self, second_picker: int = 0) -> None:
        """`second_picker`: the port of another one beside the first; 0: there is none."""
        for i, (envoy, config) in enumerate(zip(self.envoys, self._configs(), strict=True)):
            envoy.close()
            if second_picker:
                config = config.replace(_PICKER, f"{_PICKER}, {_PICKER.replace('9002', str(second_picker))}")
            self.envoys[i] = self._new_envoy(config, envoy.port)
        self.ready()

    def second_picker(self) -> Picker:
        """Another picker, which both Envoys ask in turn with the first one."""
        picker = envoys.picker(self.folder / "fleet.yaml")
        serving.all_up(picker, len(self.engines))
        self.restart_envoys(picker.grpc_port)
        return picker

    def idle(self) -> None:
        """Wait until the picker counts no request."""
        until(lambda: serving.metric(self.picker, "headway_requests_in_flight") == 0)

    def close(self) -> None:
        for process in (*self.envoys, self.picker):
            process.close()
        for engine in self.engines:
            engine.close()


def asked(envoy: Process) -> str:
    """What a new request gets."""
    reply = chat(envoy, max_tokens=1)
    reply.text()
    is_picked = "x-headway-replica" in reply.headers
    return str(reply.status) if is_picked or reply.status != 200 else "200, by Envoy's own choice"


def begun(envoy: Process) -> Reply:
    """A stream whose first token has come. Where Envoy takes the picker for one that hangs, it is asked for again."""
    replies: list[Reply] = []

    def has_begun() -> bool:
        replies.append(chat(envoy, max_tokens=9, stream=True))
        if replies[-1].status == 200:
            return next(replies[-1].events(), None) is not None
        replies[-1].close()
        return False

    until(has_begun)
    return replies[-1]


def end_of(reply: Reply) -> str:
    try:
        return "ends well" if "[DONE]" in list(reply.events()) else "is cut off"
    except (OSError, http.client.HTTPException):
        return "is cut off"
    finally:
        reply.close()


def open_gates(front: Front) -> None:
    for engine in front.engines:
        engine.gate.set()


def close_gates(front: Front) -> None:
    for engine in front.engines:
        engine.gate.clear()


def answers(front: Front) -> list[str]:
    """What a new request gets from each Envoy."""
    return [asked(envoy) for envoy in front.envoys]


def row(what: str, streams: list[str], answers: list[str]) -> str:
    cells = [f"{stream}; {answer}" for stream, answer in zip(streams, answers, strict=True)]
    return f"| {what} | {' | '.join(cells)} |"


def made(folder: Path) -> str:
    """The table. Files are written to the folder."""
    front = Front(folder)
    try:
        front.ready()
        return "\n".join([_HEAD, *_rows(front)])
    finally:
        front.close()


def _rows(front: Front) -> list[str]:
    """Each fault befalls a front that has recovered from the one before."""
    rows = []

    streams = [begun(envoy) for envoy in front.envoys]
    front.picker.kill()
    open_gates(front)
    rows.append(row("the picker is killed (`kill -9`)", [end_of(each) for each in streams], answers(front)))
    front.restart_picker()
    rows.append(row("the picker is back", ["-", "-"], answers(front)))

    front.watch(True)
    close_gates(front)
    streams = [begun(envoy) for envoy in front.envoys]
    front.picker.process.send_signal(signal.SIGSTOP)
    open_gates(front)
    rows.append(row("the picker hangs (`kill -STOP`)", [end_of(each) for each in streams], answers(front)))
    front.picker.process.send_signal(signal.SIGCONT)
    front.ready()
    rows.append(row("the picker goes on (`kill -CONT`)", ["-", "-"], ["200", "200"]))

    second = front.second_picker()
    try:
        second.process.send_signal(signal.SIGSTOP)
        for envoy in front.envoys:
            until(lambda envoy=envoy: {asked(envoy) for _ in range(3)} == {"200"})  # type: ignore[misc]
        rows.append(row("one of two pickers hangs, for a few seconds", ["-", "-"], ["200", "200"]))
    finally:
        second.close()
    front.watch(False)

    close_gates(front)
    streams = [begun(envoy) for envoy in front.envoys]
    front.restart_envoys()
    rows.append(row("Envoy is restarted", [end_of(each) for each in streams], answers(front)))
    open_gates(front)
    front.idle()

    close_gates(front)
    streams = [begun(envoy) for envoy in front.envoys]
    at = [reply.headers["x-headway-replica"] for reply in streams]
    assert sorted(at) == ["pool/0", "pool/1"]
    front.write(front.engines[1:])
    front.picker.process.send_signal(signal.SIGHUP)
    front.picker.wait_for(f"{front.engines[0].url} is drained and removed")
    open_gates(front)
    rows.append(row("an endpoint leaves its file", [end_of(each) for each in streams], answers(front)))
    front.write(front.engines)
    front.restart_picker()

    close_gates(front)
    streams = [begun(envoy) for envoy in front.envoys for _ in range(2)]
    at = [reply.headers["x-headway-replica"] for reply in streams]
    assert at == ["pool/0", "pool/1"] * 2
    front.engines[0].close()
    open_gates(front)
    ends = [end_of(each) for each in streams]
    own = [f"at it: {ends[i]}, elsewhere: {ends[i + 1]}" for i in (0, 2)]
    rows.append(row("an engine is killed", own, answers(front)))
    front.idle()

    front.engines[1].close()
    until(lambda: serving.send(front.picker, "/health").json()["up"] == 0)
    rows.append(row("no engine is left", ["-", "-"], answers(front)))
    return rows
