"""Addresses of Valkey and Redis servers."""

from __future__ import annotations

import re
from typing import Any
from urllib.parse import SplitResult, parse_qsl, unquote, urlsplit

from msgspec import Struct

from headway.core.errors import HeadwayError, unknown

SCHEMES = {"redis": False, "valkey": False, "rediss": True, "valkeys": True}
"""Maps each address scheme to whether its connections are encrypted."""
EXPECTED = "redis://user:password@host:port/0"
_PORT = 6379
_TLS_FILES = ("ssl_ca_certs", "ssl_certfile", "ssl_keyfile")
_OPTIONS = ("prefix", "ssl_cert_reqs", *_TLS_FILES)
_PREFIX = re.compile(r"[A-Za-z0-9_.:-]+")


def is_valkey(location: str) -> bool:
    """Whether this is the address of a Valkey or Redis server."""
    return location.partition("://")[0] in SCHEMES and "://" in location


class ValkeyAddress(Struct, frozen=True):
    """The address of a Valkey or Redis server, in its parts."""

    host: str
    port: int
    database: int
    prefix: str
    """Prefix of the name of each key and channel."""
    user: str | None = None
    password: str | None = None
    tls: dict[str, Any] | None = None
    """Arguments of encrypted connections; None: unencrypted."""


def valkey_address(location: str) -> ValkeyAddress:
    """Parse `redis://user:password@host:port/database?prefix=headway`, or the same with `rediss`, `valkey` or
    `valkeys`. Raises HeadwayError if it is malformed."""
    try:
        url = urlsplit(location)
        port, host = url.port or _PORT, url.hostname
    except ValueError:
        host, port, url = None, _PORT, SplitResult("", "", "", "", "")
    database = url.path.strip("/") or "0"
    if not host or url.scheme not in SCHEMES or url.fragment:
        what = "not an address of Valkey or Redis"
        raise HeadwayError(f"{what}; expected {EXPECTED}, a password with %23, %2F and %3F for #, / and ?")
    if not database.isdecimal():
        raise HeadwayError(f"{database!r} is no number of a database of Valkey or Redis; expected {EXPECTED}")
    options = dict(parse_qsl(url.query, keep_blank_values=True))
    for name in options:
        if name not in _OPTIONS:
            raise unknown("option of a Valkey or Redis address", name, list(_OPTIONS))
    prefix = options.get("prefix", "headway")
    if not _PREFIX.fullmatch(prefix):
        raise HeadwayError(f"prefix={prefix}: expected letters, digits, and -, _, . or :")
    user, password = (None if each is None else unquote(each) for each in (url.username, url.password))
    return ValkeyAddress(host, port, int(database), prefix, user or None, password, _tls(url.scheme, options))


def _tls(scheme: str, options: dict[str, str]) -> dict[str, Any] | None:
    given = {name: value for name, value in options.items() if name != "prefix"}
    if not SCHEMES[scheme]:
        if given:
            raise HeadwayError(f"{', '.join(given)}: of no use without encryption; expected rediss:// or valkeys://")
        return None
    checks = given.pop("ssl_cert_reqs", "required")
    if checks not in ("required", "none"):
        raise HeadwayError(f"ssl_cert_reqs={checks}: expected required, or none to trust any server")
    return {"ssl_cert_reqs": checks, "ssl_check_hostname": checks == "required", **given}
