"""A fleet file served: by a gateway, by emulated engines, or exported as manifests."""

from headway.serving.gateway import load, plan, read

__all__ = ["load", "plan", "read"]
