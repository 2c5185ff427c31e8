"""An engine in threads of this process whose streams begin, and go on when they are told to."""

from __future__ import annotations

import json
import socket
import threading
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from scripted import CHUNK, framed

MODEL = "qwen3-8b"
_ANSWER = {"object": "chat.completion", "choices": [], "usage": {"prompt_tokens": 1, "completion_tokens": 1}}


class GatedEngine:
    """Answers at once, but for streams: the first token comes at once, the rest once the gate is open."""

    def __init__(self, host: str = "127.0.0.1", port: int = 0) -> None:
        self.gate = threading.Event()
        self._open: set[socket.socket] = set()
        engine = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def setup(self) -> None:
                super().setup()
                engine._open.add(self.connection)

            def finish(self) -> None:
                engine._open.discard(self.connection)
                with suppress(OSError):
                    super().finish()

            def do_GET(self) -> None:
                models = {"object": "list", "data": [{"id": MODEL}]} if self.path == "/v1/models" else {}
                self._say(json.dumps(models).encode())

            def do_POST(self) -> None:
                body = json.loads(self._body())
                if not body.get("stream"):
                    self._say(json.dumps(_ANSWER).encode())
                    return
                self.send_response(200)
                self.send_header("content-type", "text/event-stream")
                self.send_header("transfer-encoding", "chunked")
                self.end_headers()
                self.wfile.write(framed(CHUNK))
                engine.gate.wait()
                self.wfile.write(framed(CHUNK) + framed(b"data: [DONE]\n\n") + b"0\r\n\r\n")

            def _body(self) -> bytes:
                """The body, which Envoy sends in chunks in its full-duplex mode."""
                if "content-length" in self.headers:
                    return self.rfile.read(int(self.headers["content-length"]))
                parts: list[bytes] = []
                while size := int(self.rfile.readline(), 16):
                    parts.append(self.rfile.read(size))
                    self.rfile.readline()
                self.rfile.readline()
                return b"".join(parts)

            def _say(self, body: bytes) -> None:
                self.send_response(200)
                self.send_header("content-type", "application/json")
                self.send_header("content-length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: Any) -> None:
                """To nobody."""

        class Server(ThreadingHTTPServer):
            daemon_threads = True

            def handle_error(self, request: Any, client_address: Any) -> None:
                """Whoever asked may be gone."""

        self._server = Server((host, port), Handler)
        self.port = int(self._server.server_address[1])
        self.url = f"http://{host}:{self.port}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,))
        self._thread.start()

    def end(self) -> None:
        """End as a process that is killed: no connection is accepted, and those that are open break."""
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()
        for each in list(self._open):
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
        self.gate.set()
