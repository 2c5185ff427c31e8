"""File descriptors of this process: whether they are used up, and for how many clients they last.

A process without descriptors can open no connection, which says nothing about the engine at its other end.
"""

from __future__ import annotations

import errno
import os
import resource

RESERVED = 64
"""Descriptors for files, databases, probes and the process itself."""
_PER_REPLICA = 2
"""For a replica's health checks and its KV cache events."""


def is_used_up(error: OSError) -> bool:
    """Whether an operation failed as this process, or the machine, has no descriptors left."""
    if error.errno in (errno.EMFILE, errno.ENFILE):
        return True
    try:  # an address that cannot be resolved for lack of them has another error
        os.close(os.dup(0))
    except OSError as found:
        return found.errno in (errno.EMFILE, errno.ENFILE)
    return False


def limit() -> int:
    """The most descriptors that this process may have."""
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def max_clients(per_client: int) -> int:
    """Connections of clients for which the descriptors last, if each needs so many: 2 with one to an engine."""
    return max((limit() - RESERVED) // per_client, 1)


def allow(num_clients: int, per_client: int, num_replicas: int) -> str:
    """Raise this process's limit, and that of those which it starts, to what so many clients need, as far as the system
    permits; why that is not far enough, empty if it is."""
    wanted = num_clients * per_client + num_replicas * _PER_REPLICA + RESERVED
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < wanted:
        soft = min(wanted, hard) if hard != resource.RLIM_INFINITY else wanted
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        except (OSError, ValueError):
            soft = limit()
    if soft >= wanted:
        return ""
    return (
        f"ulimit -n is {soft:,}: {max_clients(per_client):,} clients are connected at a time, and others wait; the "
        f"settings allow {num_clients:,}, which takes {wanted:,}"
    )
