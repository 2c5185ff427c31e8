"""Serves a fleet file by a gateway or with emulated engines, exports it for other systems, and load-tests engines."""

from headway.serving.gateway import load, plan, read, read_engines

__all__ = ["load", "plan", "read", "read_engines"]
