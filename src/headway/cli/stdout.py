"""Stdout is for what Headway prints: libraries written in C, and engines that a command starts, write to stderr."""

from __future__ import annotations

import io
import os
import sys


def keep_for_ourselves() -> None:
    """Lead `sys.stdout` to a file descriptor of its own, and descriptor 1, which others write to, to stderr.

    Without effect where either stream is closed or replaced. For a program's start: it is never undone.
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
