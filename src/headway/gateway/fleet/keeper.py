"""Keeps an engine for a gateway and ends it with it: `python keeper.py STOP_S COMMAND...`.

It needs the standard library only. The gateway holds the other end of its standard input. When that is closed, also
because the gateway was killed, the engine's process group gets SIGTERM, and SIGKILL after STOP_S seconds. When the
engine ends by itself, what it leaves behind is killed.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time


def main() -> None:
    """Leads a process group of its own, as the gateway has made it."""
    stop_s, command = float(sys.argv[1]), sys.argv[2:]
    signal.signal(signal.SIGTERM, lambda number, frame: None)  # a handler is not handed down, as SIG_IGN would be
    try:
        engine = subprocess.Popen(command, stdin=subprocess.DEVNULL)
    except OSError as error:
        _say(f"{command[0]}: {error.strerror}")
        sys.exit(1)
    threading.Thread(target=_mind, args=(stop_s,), daemon=True).start()
    status = engine.wait()
    _say(f"ended by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}")
    os.killpg(0, signal.SIGKILL)


def _mind(stop_s: float) -> None:
    while os.read(0, 1):
        pass
    os.killpg(0, signal.SIGTERM)
    time.sleep(stop_s)
    os.killpg(0, signal.SIGKILL)


def _say(what: str) -> None:
    try:
        os.write(1, f"{what}\n".encode())
    except OSError:
        return  # nobody listens any more


if __name__ == "__main__":
    main()
