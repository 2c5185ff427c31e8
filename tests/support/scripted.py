"""An engine that answers every completion with the same bytes, and parts of such answers."""

from __future__ import annotations

import socket
import threading
from contextlib import suppress

OK = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
CHUNK = b'data: {"id":"c","created":1,"model":"m","choices":[{"index":0,"delta":{"content":"so"}}]}\n\n'
WELL = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: close\r\n\r\n{}"


def framed(body: bytes) -> bytes:
    """A chunk in HTTP's chunked encoding."""
    return b"%x\r\n%s\r\n" % (len(body), body)


class Script:
    """An engine whose health checks succeed, and whose completions are the bytes `reply`."""

    def __init__(self) -> None:
        self.reply = b""
        self.request = b""
        self.num_sent = 0
        """Bytes of the present answer that were sent."""
        self.holds = False
        """Connections stay open after `reply`, until the client closes them."""
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with connection, suppress(OSError):  # the client may be gone
            request = connection.recv(1 << 16)
            if request.startswith(b"POST"):
                self.request = request
                self.num_sent = 0
                while left := self.reply[self.num_sent : self.num_sent + (1 << 20)]:
                    self.num_sent += connection.send(left)
                while self.holds and connection.recv(1 << 16):
                    pass
            else:
                connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")

    def close(self) -> None:
        """Accept no more connections."""
        self._socket.close()
