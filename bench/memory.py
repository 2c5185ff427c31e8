"""The memory of a connection in each phase of a request, beside the bound that SECURITY.md promises.

`python bench/memory.py`: 200 connections of a new gateway are brought into the same phase, and what the gateway takes
more is divided by their number; then 200 with TLS, whose certificate openssl makes. `--write` puts the table in
docs/reliability.md.
"""

from __future__ import annotations

import hashlib
import json
import socket
import ssl
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import click
from click import echo

from gateway import HERE, free_ports, wait_for

PAGE = HERE.parent / "docs" / "reliability.md"
MARKS = "<!-- memory: made by bench/memory.py -->\n", "<!-- end of memory -->\n"
NUM = 200
SETTLE_S = 1.0
HOST = b" HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer key\r\n"
CHAT = b"POST /v1/chat/completions" + HOST
FLEET = """
fleet:
  - {name: mock, model: qwen3-8b, gpu: h100, api: openai, endpoints: ["http://127.0.0.1:%d"]}
gateway: {hold_s: 600, timeout_s: 900, body_timeout_s: 600, api_keys: ["%s"]}
"""


def _chat(size: int, stream: bool) -> bytes:
    message = {"role": "user", "content": "x" * size}
    body = json.dumps({"model": "qwen3-8b", "messages": [message], "stream": stream}).encode()
    return CHAT + b"Content-Length: %d\r\n\r\n" % len(body) + body


VERSION = b"GET /version" + HOST + b"\r\n"
REFUSED = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nX-Request-Id: " + b"i" * 128 + b"\r\n\r\n"
WITHOUT_ENGINE: dict[str, tuple[bytes, bool, str]] = {
    "idle, before a request": (b"", False, "30 s"),
    "idle, after an answer": (VERSION, False, "75 s"),
    "half of a head of 4 KiB": (CHAT + b"X: " + b"y" * 4096, False, "64 KiB, 30 s"),
    "half of a body of 64 KiB": (_chat(64 << 10, False)[: 32 << 10], False, "320 KiB, or `max_bodies_bytes`"),
    "a held request of 1 KiB": (_chat(1 << 10, True), False, "its body three times, `max_held`"),
    "a held request of 16 KiB": (_chat(16 << 10, True), False, "its body three times, `max_held`"),
    "refusals that are not read": (REFUSED, True, "64 KiB and one answer, 60 s; 64 KiB and one read ahead"),
    "long answers that are not read": (b"GET /openapi.json" + HOST + b"\r\n", True, "the same"),
}  # fmt: skip
WITH_ENGINE: dict[str, tuple[bytes, bool, str]] = {
    "a stream for a request of 1 KiB": (_chat(1 << 10, True), False, "its body three times, and 64 KiB unread"),
}


def resident_kib(pid: int) -> int:
    """The resident memory of a process."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS:"))


@contextmanager
def _gateway(has_engine: bool, tls: ssl.SSLContext | None) -> Iterator[tuple[int, int]]:
    """A gateway's process id and port; its engine streams a chunk a second, or is not there."""
    port, engine = free_ports(2)
    with tempfile.TemporaryDirectory() as folder:
        fleet = Path(folder) / "fleet.yaml"
        fleet.write_text(FLEET % (engine, hashlib.sha256(b"key").hexdigest()))
        commands = [[str(HERE / "mock_engine.py"), str(engine), "1000", "1.0"]] if has_engine else []
        options = [] if tls is None else ["--certfile", _certificate(Path(folder))]
        commands.append(["-m", "headway", "serve", str(fleet), "--port", str(port), "--restarts", "0", *options])
        started = [subprocess.Popen([sys.executable, *each], stdout=subprocess.DEVNULL) for each in commands]
        try:
            wait_for(port, int(has_engine), tls)
            yield started[-1].pid, port
        finally:
            for process in reversed(started):
                process.kill()
                process.wait()


def _certificate(folder: Path) -> str:
    """The file of a new certificate and its key."""
    made = str(folder / "cert.pem")
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    command += ["-keyout", made, "-out", str(folder / "only.pem"), "-days", "2", "-subj", "/CN=localhost"]
    subprocess.run(command, check=True, capture_output=True)
    with open(made, "ab") as both:
        both.write((folder / "only.pem").read_bytes())
    return made


def trusting() -> ssl.SSLContext:
    """What accepts any certificate."""
    made = ssl.create_default_context()
    made.check_hostname, made.verify_mode = False, ssl.CERT_NONE
    return made


def _kib_each(pid: int, port: int, data: bytes, is_repeated: bool, tls: ssl.SSLContext | None) -> float:
    """Resident KiB of each connection that has sent the data, again and again if `is_repeated`, and reads nothing."""
    with _connected(port, 4, data, is_repeated, tls):
        pass  # what the first such request takes is not a connection's
    before = resident_kib(pid)
    with _connected(port, NUM, data, is_repeated, tls):
        return (resident_kib(pid) - before) / NUM


@contextmanager
def _connected(port: int, num: int, data: bytes, is_repeated: bool, tls: ssl.SSLContext | None) -> Iterator[None]:
    with ExitStack() as stack:
        for _ in range(num):
            client = stack.enter_context(socket.socket())
            if is_repeated:
                client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.connect(("127.0.0.1", port))
            if tls is not None:
                client = stack.enter_context(tls.wrap_socket(client))
            if not is_repeated:
                client.sendall(data)
            else:
                client.setblocking(False)
                _fill(client, data * 200)
        time.sleep(SETTLE_S)
        yield


def _fill(client: socket.socket, data: bytes) -> None:
    """Send until nothing more is taken for a while."""
    moved_s, part = time.monotonic(), data
    while time.monotonic() < moved_s + 0.1:
        try:
            part = part[client.send(part) :] or data
            moved_s = time.monotonic()
        except (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
            time.sleep(0.01)


def table(show: Callable[[str], None]) -> str:
    """Measure each phase; the rows as Markdown."""
    rows = ["| a connection with | KiB each | over TLS | bound |", "|---|---|---|---|"]
    for has_engine, phases in ((False, WITHOUT_ENGINE), (True, WITH_ENGINE)):
        for name, (data, is_repeated, bound) in phases.items():
            found = []
            for tls in (None, trusting()):
                with _gateway(has_engine, tls) as (pid, port):
                    found.append(f"{_kib_each(pid, port, data, is_repeated, tls):.0f}")
            rows.append(f"| {name} | {found[0]} | {found[1]} | {bound} |")
            show(rows[-1])
    return "\n".join(rows) + "\n"


@click.command()
@click.option("--write", is_flag=True, help="Put the table in docs/reliability.md.")
def main(write: bool) -> None:
    """Measure, and print a table."""
    made = table(echo)
    if write:
        before, rest = PAGE.read_text().split(MARKS[0])
        PAGE.write_text(before + MARKS[0] + "\n" + made + "\n" + MARKS[1] + rest.split(MARKS[1])[1])


if __name__ == "__main__":
    main()
