"""HTTP services in threads of the test's process, which answer with JSON."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class JsonHandler(BaseHTTPRequestHandler):
    """Reads and writes JSON, and logs nothing."""

    protocol_version = "HTTP/1.1"

    def get(self) -> None:
        """Answer a GET request."""
        raise NotImplementedError

    def post(self, body: Any) -> None:
        """Answer a POST request."""
        raise NotImplementedError

    def do_GET(self) -> None:
        self.get()

    def do_POST(self) -> None:
        self.post(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

    def answer(self, status: int, body: Any) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def complete(self, model: str) -> None:
        """Answer a chat with one word."""
        choice = {"index": 0, "message": {"role": "assistant", "content": "hello"}, "finish_reason": "stop"}
        usage = {"prompt_tokens": 3, "completion_tokens": 1, "total_tokens": 4}
        self.answer(
            200,
            {"id": "c", "object": "chat.completion", "created": 1, "model": model, "choices": [choice], "usage": usage},
        )

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing is logged."""


@contextmanager
def listening(handler: type[JsonHandler]) -> Iterator[ThreadingHTTPServer]:
    """A server at a free port."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
