"""File descriptors of this process: whether they are exhausted, and for how many clients they suffice.

A process without free descriptors can open no connection; the engine has no part in this failure.
"""

from __future__ import annotations

import errno
import os
import resource

RESERVED = 64
"""Descriptors for files, databases, probes and the process itself."""
_PER_REPLICA = 2
"""Descriptors for a replica's health checks and its KV cache events."""


def is_used_up(error: OSError) -> bool:
    """Whether an operation failed because this process, or the machine, has no descriptors left."""
    if error.errno in (errno.EMFILE, errno.ENFILE):
        return True
    try:  # without descriptors, an address cannot be resolved, and the error is another one
        os.close(os.dup(0))
    except OSError as found:
        return found.errno in (errno.EMFILE, errno.ENFILE)
    return False


def limit() -> int:
    """The largest number of descriptors of this process."""
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def max_clients(per_client: int) -> int:
    """Number of clients for which the descriptors suffice, if each needs `per_client`: 2 with a connection to an
    engine."""
    return max((limit() - RESERVED) // per_client, 1)


def allow(num_clients: int, per_client: int, num_replicas: int) -> str:
    """Raise the limit of this process and its children for this many clients, as far as the system permits. Returns the
    reason if the limit is still too low; empty if it suffices."""
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
