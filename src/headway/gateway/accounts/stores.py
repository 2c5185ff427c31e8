"""Chooses the key store for a location."""

from __future__ import annotations

from headway.gateway.accounts.store import AccountStore
from headway.gateway.valkey_address import is_valkey


def account_store(location: str) -> AccountStore:
    """The store at `location`: a file's path, or the address of a PostgreSQL, Valkey or Redis server. Raises
    HeadwayError if `location` is neither; ModuleNotFoundError if the store's client is not installed."""
    if is_valkey(location):
        from headway.gateway.accounts.valkey import ValkeyAccountStore

        return ValkeyAccountStore(location)
    from headway.gateway.accounts.sql import SqlAccountStore

    return SqlAccountStore(location)
