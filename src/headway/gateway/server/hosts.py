"""The host names under which clients may reach a gateway without keys.

A web page of any origin can send requests to a gateway on its visitor's machine, and can read the answers if its own
host name resolves to that machine (DNS rebinding). Such requests carry the page's host.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from ipaddress import ip_address

ANY = "*"
"""In the settings' hosts: accept every host."""


class ExpectedHosts:
    """Loopback names, the listening address, and further names."""

    def __init__(self, listening: str, names: Sequence[str], origins: Sequence[str] = ()) -> None:
        """`listening`: the address of the listening socket. If it is not a loopback address, all IP addresses are
        accepted as hosts, because DNS rebinding needs a name. `origins`: pages of other hosts that may send requests.
        """
        self._origins = {origin.lower().encode() for origin in origins}
        self._has_any_origin = ANY.encode() in self._origins
        self._names = {_name(name.encode()) for name in names}
        self._is_local = _is_loopback(_name(listening.encode()))
        self.accepts = lru_cache(maxsize=256)(self._accepts)

    def _accepts(self, host: bytes) -> bool:
        """Whether a request with this `Host` header is served."""
        name = _name(host)
        if name == "localhost" or name.endswith(".localhost") or name in self._names or ANY in self._names:
            return True
        return _is_address(name) and (not self._is_local or _is_loopback(name))

    def accepts_origin(self, origin: bytes) -> bool:
        """Whether a page of this origin may send requests."""
        if self._has_any_origin or origin.lower() in self._origins:
            return True
        return self.accepts(origin.partition(b"://")[2])


def _name(host: bytes) -> str:
    """A host without its port and brackets, in lower case."""
    text = host.decode("latin-1").strip().lower()
    if text.startswith("["):
        return text[1:].partition("]")[0]
    name, colon, _ = text.rpartition(":")
    return (name if colon and ":" not in name else text).rstrip(".")


def _is_address(name: str) -> bool:
    try:
        ip_address(name)
    except ValueError:
        return False
    return True


def _is_loopback(name: str) -> bool:
    return _is_address(name) and ip_address(name).is_loopback
