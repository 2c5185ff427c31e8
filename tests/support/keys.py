"""API keys in tests: their digests, and the headers that carry them."""

from __future__ import annotations

from hashlib import sha256

ADMIN = {"Authorization": "Bearer root"}
"""The header with the admin key `root`."""


def digest(key: str) -> str:
    """The digest of a key, as fleet files have it."""
    return sha256(key.encode()).hexdigest()


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}
