"""Which store of keys a location names."""

from __future__ import annotations

from headway.gateway.accounts.store import AccountStore
from headway.gateway.valkey_address import is_valkey


def account_store(location: str) -> AccountStore:
    """`location`: a file's path, or the address of a PostgreSQL, Valkey or Redis server. HeadwayError if it is none,
    ModuleNotFoundError if what the store needs is not installed."""
    if is_valkey(location):
        from headway.gateway.accounts.valkey import ValkeyAccountStore

        return ValkeyAccountStore(location)
    from headway.gateway.accounts.sql import SqlAccountStore

    return SqlAccountStore(location)
