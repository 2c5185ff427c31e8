"""Keys, teams and their use in Valkey or Redis.

Keys and teams are JSON in two hashes. One hash a day counts the use. Hashes for each day and each month hold the sums
by key and by team, so that a long period is read from few hashes.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from contextlib import suppress
from datetime import date, timedelta
from typing import Any

from msgspec import json

from headway.core.errors import HeadwayError, unknown
from headway.gateway.accounts.store import AccountStore, Spent, StoredKey, Use, stamped
from headway.gateway.valkey import Valkey
from headway.limits.budgets import Budget

log = logging.getLogger("headway.gateway")
_TIMEOUT_S = 10.0
_COUNTED = ("requests", "input_tokens", "output_tokens", "usd")
_ONE_DAY = timedelta(days=1)
_CHANGED = """
local function changed(key)
  local now = redis.call('TIME')
  local num = math.max(now[1] * 1000000 + now[2], (tonumber(redis.call('GET', key)) or 0) + 1)
  redis.call('SET', key, string.format('%.0f', num))
end
"""
"""Change numbers are times in microseconds, so that a server that has lost some changes repeats no number."""
_WRITE_KEYS = (
    _CHANGED
    + """
local is_new, team = ARGV[1], ARGV[2]
if team ~= '' and redis.call('HEXISTS', KEYS[2], team) == 0 then return 'no team' end
if is_new == '1' and redis.call('HEXISTS', KEYS[1], ARGV[#ARGV - 1]) == 1 then return 'exists' end
for i = 3, #ARGV, 2 do
  if is_new == '1' and i == #ARGV - 1 or redis.call('HEXISTS', KEYS[1], ARGV[i]) == 1 then
    redis.call('HSET', KEYS[1], ARGV[i], ARGV[i + 1])
  end
end
changed(KEYS[3])
return 'written'
"""
)
"""`KEYS`: keys, teams, changes. `ARGV`: whether the last key is new, the required team, and pairs of a key's hash and
its properties."""
_SET_TEAM = _CHANGED + "redis.call('HSET', KEYS[1], ARGV[1], ARGV[2]) changed(KEYS[2])"
_EXCHANGE = """
for i = 0, #ARGV / 8 - 1 do
  local id, key, team, day, requests, input, output, usd = unpack(ARGV, 8 * i + 1, 8 * i + 8)
  redis.call('SADD', KEYS[1], day)
  redis.call('HINCRBY', KEYS[3 * i + 4], 'requests ' .. id, requests)
  redis.call('HINCRBY', KEYS[3 * i + 4], 'input_tokens ' .. id, input)
  redis.call('HINCRBY', KEYS[3 * i + 4], 'output_tokens ' .. id, output)
  redis.call('HINCRBYFLOAT', KEYS[3 * i + 4], 'usd ' .. id, usd)
  for _, sums in ipairs({KEYS[3 * i + 5], KEYS[3 * i + 6]}) do
    for _, who in ipairs({'key ' .. key, 'team ' .. team}) do
      redis.call('HINCRBY', sums, 'tokens ' .. who, input)
      redis.call('HINCRBY', sums, 'tokens ' .. who, output)
      redis.call('HINCRBYFLOAT', sums, 'usd ' .. who, usd)
    end
  end
end
return {redis.call('HGETALL', KEYS[2]), redis.call('HGETALL', KEYS[3])}
"""
"""`KEYS`: days, the sums of today and tomorrow, and for each use the hashes of its day's counts, its day's sums and its
month's sums. `ARGV`: eight values for each use."""
_ADD_UP = """
local sums, found = {}, {}
for _, key in ipairs(KEYS) do
  local fields = redis.call('HGETALL', key)
  for i = 1, #fields, 2 do sums[fields[i]] = (sums[fields[i]] or 0) + tonumber(fields[i + 1]) end
end
for field, sum in pairs(sums) do
  found[#found + 1] = field
  found[#found + 1] = string.format('%.17g', sum)
end
return found
"""


class ValkeyAccountStore(AccountStore):
    """One database of a server. Other programs may use the database too, under names with another prefix."""

    def __init__(self, location: str) -> None:
        self._valkey = Valkey(location, _TIMEOUT_S)
        key = self._valkey.key
        self._keys, self._teams, self._changes, self._days = (
            key(name) for name in ("keys", "teams", "key-changes", "days")
        )
        self._has_changed = False
        """Whether the server has ever had a key or a team."""

    async def open(self) -> None:
        await self.num_changes()
        if not self.num_opened:
            self.num_opened = 1
            for risk in await self._risks():
                log.warning("the key store: %s", risk)

    async def _risks(self) -> list[str]:
        """The ways in which the server's own settings allow it to lose data."""
        settings: dict[str, str] = {}
        for section in ("memory", "persistence"):
            with suppress(OSError):  # not every user may read the settings
                lines = (await self._valkey.run("INFO", section)).decode().splitlines()
                settings |= dict(line.split(":", 1) for line in lines if ":" in line)
        policy = settings.get("maxmemory_policy", "noeviction")
        found = []
        if policy.startswith("allkeys"):
            found.append(f"its server removes keys when its memory is full ({policy}); expected noeviction")
        if settings.get("aof_enabled") == "0":
            found.append("its server has no log (appendonly no): a restart loses changes and spending")
        return found

    async def close(self) -> None:
        await self._valkey.close()

    # Keys and teams.

    async def num_changes(self) -> int:
        found = await self._valkey.run("GET", self._changes)
        if found is None and self._has_changed:
            raise ConnectionError("the server has lost its keys: it was emptied, or started anew without its data")
        self._has_changed = self._has_changed or found is not None
        return int(found or 0)

    async def keys(self, with_revoked: bool = False) -> list[StoredKey]:
        values = await self._valkey.run("HVALS", self._keys)
        found = [json.decode(value, type=StoredKey) for value in values]
        found.sort(key=lambda key: (key.created_ns, key.sha256))
        return [key for key in found if with_revoked or key.revoked_ns is None]

    async def teams(self) -> dict[str, Budget]:
        found = await self._valkey.run("HGETALL", self._teams)
        return {name.decode(): json.decode(value, type=Budget) for name, value in sorted(_pairs(found))}

    async def add_key(self, key: StoredKey) -> None:
        await self._write(True, key.team, key)

    async def change_key(self, key: StoredKey) -> None:
        await self._write(False, key.team, key)

    async def replace_key(self, old: StoredKey, new: StoredKey) -> None:
        await self._write(True, "", old, new)

    async def _write(self, is_new: bool, team: str, *keys: StoredKey) -> None:
        """Write keys; the last key may be new. Raises HeadwayError if there is no such team, or the key exists."""
        pairs = [text for key in keys for text in (key.sha256, json.encode(stamped(key)))]
        names = self._keys, self._teams, self._changes
        done = await self._valkey.run_script(_WRITE_KEYS, names, [int(is_new), team, *pairs])
        if done == b"no team":
            raise unknown("team", team, list(await self.teams()))
        if done == b"exists":
            raise HeadwayError(f"there is a key {keys[-1].id} already")

    async def set_team(self, name: str, budget: Budget) -> None:
        await self._valkey.run_script(_SET_TEAM, (self._teams, self._changes), [name, json.encode(budget)])

    # Use.

    def _counts(self, day: str) -> str:
        return self._valkey.key("usage", day)

    def _sums(self, period: str) -> str:
        """`period`: a day, or a month."""
        return self._valkey.key("spent", period)

    async def exchange(self, uses: Sequence[Use], today: str) -> tuple[Spent, Spent]:
        # tomorrow's sums exist already if another gateway's clock is ahead
        tomorrow = (date.fromisoformat(today) + _ONE_DAY).isoformat()
        keys, arguments = [self._days, self._sums(today), self._sums(tomorrow)], []
        for use in uses:
            keys += [self._counts(use.day), self._sums(use.day), self._sums(use.day[:7])]
            id = json.encode([use.sha256, use.team, use.model])
            arguments += [id, use.sha256, use.team, use.day, *(getattr(use, name) for name in _COUNTED)]
        return _spent(*await self._valkey.run_script(_EXCHANGE, keys, arguments))

    async def spent(self, since: str, before: str) -> tuple[Spent, Spent]:
        days = [day for day in await self._known_days() if since <= day < before]
        periods = sorted({_period(day, since, before) for day in days})
        found = await self._valkey.run_script(_ADD_UP, list(map(self._sums, periods))) if periods else []
        return _spent(found)

    async def report(self, by: Iterable[str], since: str, until: str) -> list[dict[str, Any]]:
        groups = list(by)
        sums: dict[tuple[str, ...], dict[str, Any]] = {} if groups else {(): _nothing()}
        for day in await self._known_days():
            if since <= day <= until:
                for field, value in _pairs(await self._valkey.run("HGETALL", self._counts(day))):
                    name, _, id = field.decode().partition(" ")
                    row = dict(zip(("key", "team", "model"), json.decode(id), strict=True)) | {"day": day}
                    sum = sums.setdefault(tuple(row[group] for group in groups), _nothing())
                    sum[name] += float(value) if name == "usd" else int(value)
        return [dict(zip(groups, group, strict=True)) | sums[group] for group in sorted(sums)]

    async def _known_days(self) -> list[str]:
        """The days with recorded use."""
        return sorted(day.decode() for day in await self._valkey.run("SMEMBERS", self._days))


def _pairs(flat: Sequence[bytes]) -> Iterable[tuple[bytes, bytes]]:
    """The fields and values of a hash, from the server's answer."""
    found = iter(flat)
    return zip(found, found, strict=True)


def _period(day: str, since: str, before: str) -> str:
    """The month of a day if the whole month lies in the period, else the day."""
    first = date.fromisoformat(day).replace(day=1)
    next_month = (first + timedelta(days=31)).replace(day=1)
    return day[:7] if since <= first.isoformat() and next_month.isoformat() <= before else day


def _spent(*hashes: Sequence[bytes]) -> tuple[Spent, Spent]:
    """Tokens and dollars by key and by team, from hashes of sums."""
    found: dict[bytes, Spent] = {b"key": {}, b"team": {}}
    for each in hashes:
        for field, value in _pairs(each):
            what, kind, name = field.split(b" ", 2)
            spent = found[kind]
            tokens, usd = spent.get(name.decode(), (0, 0.0))
            added = (int(float(value)), 0.0) if what == b"tokens" else (0, float(value))
            spent[name.decode()] = tokens + added[0], usd + added[1]
    return found[b"key"], found[b"team"]


def _nothing() -> dict[str, Any]:
    return {"requests": 0, "input_tokens": 0, "output_tokens": 0, "usd": 0.0}
