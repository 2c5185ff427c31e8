"""Serves a fleet file: by a gateway, with emulated engines, or as manifests for other systems; and loads engines."""

from headway.serving.gateway import load, plan, read, read_engines

__all__ = ["load", "plan", "read", "read_engines"]
