"""Chooses the store of peers for an address."""

from __future__ import annotations

from headway.gateway.peers.store import PeerStore
from headway.gateway.valkey_address import is_valkey


def peer_store(address: str, gateway: str, timeout_s: float) -> PeerStore:
    """The store of peers at the `address` of a PostgreSQL, Valkey or Redis server. ModuleNotFoundError if its client is
    not installed."""
    if is_valkey(address):
        from headway.gateway.peers.valkey import ValkeyPeerStore

        return ValkeyPeerStore(address, gateway, timeout_s)
    from headway.gateway.peers.postgres import PostgresPeerStore

    return PostgresPeerStore(address, gateway, timeout_s)
