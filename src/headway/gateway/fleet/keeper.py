"""Runs an engine for a gateway and ends it with the gateway: `python keeper.py STOP_S COMMAND...`.

Uses the standard library only. The gateway holds the other end of the keeper's standard input. When that end is closed,
also because the gateway was killed, the engine's process group gets SIGTERM, and SIGKILL after STOP_S seconds. When the
engine ends by itself, its remaining processes are killed.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time


def main() -> None:
    """Run the command. The gateway has made this process the leader of its process group."""
    stop_s, command = float(sys.argv[1]), sys.argv[2:]
    # the engine does not inherit a handler; it would inherit SIG_IGN
    signal.signal(signal.SIGTERM, lambda number, frame: None)
    try:
        engine = subprocess.Popen(command, stdin=subprocess.DEVNULL)
    except OSError as error:
        _print(f"{command[0]}: {error.strerror}")
        sys.exit(1)
    threading.Thread(target=_end_with_gateway, args=(stop_s,), daemon=True).start()
    status = engine.wait()
    _print(f"ended by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}")
    os.killpg(0, signal.SIGKILL)


def _end_with_gateway(stop_s: float) -> None:
    while os.read(0, 1):
        pass
    os.killpg(0, signal.SIGTERM)
    time.sleep(stop_s)
    os.killpg(0, signal.SIGKILL)


def _print(line: str) -> None:
    try:
        os.write(1, f"{line}\n".encode())
    except OSError:
        return  # the gateway is gone


if __name__ == "__main__":
    main()
