"""Reserves stdout for Headway's output: C libraries and engines started by a command write to stderr instead."""

from __future__ import annotations

import io
import os
import sys


def keep_for_ourselves() -> None:
    """Move `sys.stdout` to a new file descriptor, and redirect descriptor 1, which others write to, to stderr.

    Has no effect if either stream is closed or replaced. Call it at a program's start; it cannot be undone.
    """
    try:
        if sys.stdout.fileno() != 1 or sys.stderr.fileno() != 2:
            return
        sys.stdout.flush()
        own = os.dup(1)
        os.dup2(2, 1)
    except (AttributeError, OSError, io.UnsupportedOperation):
        return
    before = sys.stdout
    assert isinstance(before, io.TextIOWrapper)
    sys.stdout = io.TextIOWrapper(
        os.fdopen(own, "wb"),
        before.encoding,
        before.errors,
        line_buffering=before.line_buffering,
        write_through=before.write_through,
    )
