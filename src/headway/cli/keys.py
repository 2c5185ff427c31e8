"""`headway keys`: keys, teams and budgets of a key store, changed and listed; the work is in `gateway.accounts`."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Awaitable, Callable
from datetime import UTC, date, datetime
from hashlib import sha256
from typing import TYPE_CHECKING, Any, TypeVar

import click
from msgspec.structs import replace

from headway.cli.output import ABOVE_0, SubCommands, json_option, print_json, print_table
from headway.core.errors import HeadwayError
from headway.gateway.server.web_server import not_installed

if TYPE_CHECKING:
    from headway.gateway.accounts.store import AccountStore, StoredKey
    from headway.limits.budgets import Budget

T = TypeVar("T")
_PREFIX, _KEY_BYTES = "hw-", 32
_PERIODS = click.Choice(["day", "week", "month", "total"])
_GROUPS = click.Choice(["key", "team", "model", "day"])
_DATE = click.DateTime(["%Y-%m-%d"])
_OFF = "none"
"""Value of a limit option that removes the limit."""


class _Limit(click.ParamType):  # type: ignore[type-arg]  # no type of its own before click 8.3
    """A positive number, or `none`."""

    name = "NUMBER|none"

    def __init__(self, is_whole: bool = False) -> None:
        self._is_whole = is_whole

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if value == _OFF:
            return value
        number = ABOVE_0.convert(value, param, ctx)
        return int(number) if self._is_whole else number


def _options(command: Callable[..., None]) -> Callable[..., None]:
    """Options for the properties of a key."""
    options = [
        click.option("--team", help="The key's team, whose budget it shares; '' for none."),
        click.option("--weight", type=ABOVE_0, help="Share of the service, relative to other tenants. Default: 1."),
        click.option("--tier", type=click.IntRange(min=0), help="Most urgent tier. Default: 0."),
        click.option("--requests-per-minute", type=_Limit(), help="Average rate, and largest burst."),
        click.option("--tokens-per-minute", type=_Limit(), help="The same for tokens."),
        click.option("--expires", type=_DATE, help="Last day (UTC) on which the key is valid."),
        *_BUDGET,
    ]
    for option in reversed(options):
        command = option(command)
    return command


def _budget_options(command: Callable[..., None]) -> Callable[..., None]:
    for option in reversed(_BUDGET):
        command = option(command)
    return command


_BUDGET = [
    click.option("--budget-tokens", type=_Limit(is_whole=True), help="Tokens of prompts and answers in each period."),
    click.option("--budget-usd", type=_Limit(), help="Dollars in each period, by the prices of the pools."),
    click.option("--period", type=_PERIODS, help="Period of the budget. Default: month."),
]


def _given(values: dict[str, Any]) -> dict[str, Any]:
    """The given options, with `none` as None."""
    return {name: None if value == _OFF else value for name, value in values.items() if value is not None}


def _budget(before: Budget, given: dict[str, Any]) -> Budget:
    names = {"budget_tokens": "tokens", "budget_usd": "usd", "period": "period"}
    return replace(before, **{names[name]: value for name, value in given.items() if name in names})


def _with_options(key: StoredKey, values: dict[str, Any]) -> StoredKey:
    given = _given(values)
    if isinstance(given.get("expires"), datetime):
        given["expires"] = given["expires"].date()
    own = {name: value for name, value in given.items() if name in key.__struct_fields__}
    return replace(key, **own, budget=_budget(key.budget, given))


def _shown(key: StoredKey) -> dict[str, Any]:
    """A key in the printed form."""
    return {
        "key": key.id,
        "name": key.name,
        "team": key.team or None,
        "weight": key.weight,
        "tier": key.tier,
        "requests_per_minute": key.requests_per_minute,
        "tokens_per_minute": key.tokens_per_minute,
        "expires": None if key.expires is None else key.expires.isoformat(),
        "budget_tokens": key.budget.tokens,
        "budget_usd": key.budget.usd,
        "period": key.budget.period if key.budget else None,
        "created": _time(key.created_ns),
        "revoked": None if key.revoked_ns is None else _time(key.revoked_ns),
    }


def _time(ns: int) -> str:
    return datetime.fromtimestamp(ns / 1e9, UTC).isoformat(timespec="seconds").replace("+00:00", "Z")


@click.group(cls=SubCommands)
@click.option(
    "--store",
    default="keys.sqlite",
    show_default=True,
    envvar="HEADWAY_KEY_STORE",
    help="The database of `gateway.key_store`: a file, or postgresql://user@host/database, or redis://host/0. "
    "Also HEADWAY_KEY_STORE.",
)
@click.pass_context
def command(ctx: click.Context, store: str) -> None:
    """Change the keys, teams and budgets of a key store, and report their spending.

    Gateways on the store follow within `refresh_s` of `gateway.key_store`, 2 seconds. The store contains only hashes of
    keys.
    """
    ctx.obj = store


def _in_store(location: str, work: Callable[[AccountStore], Awaitable[T]]) -> T:
    """Do something with the database. Raises HeadwayError if it cannot be used."""
    try:
        from headway.gateway.accounts.stores import account_store
        from headway.gateway.database import UNAVAILABLE
        from headway.gateway.errors import line_of
    except ModuleNotFoundError as error:
        raise not_installed(str(error.name)) from None

    async def run() -> T:
        store = account_store(location)
        try:
            await store.open()
            return await work(store)
        finally:
            await store.close()

    try:
        return asyncio.run(run())
    except ModuleNotFoundError as error:
        raise not_installed(str(error.name), "valkey" if error.name == "redis" else "postgres") from None
    except UNAVAILABLE as error:
        shown = location.rpartition("@")[2]
        raise HeadwayError(f"{shown}: the key store cannot be used: {line_of(error)}") from None


def _new_key() -> tuple[str, str]:
    """A random key and its hash."""
    key = _PREFIX + secrets.token_urlsafe(_KEY_BYTES)
    return key, sha256(key.encode()).hexdigest()


@command.command()
@click.argument("name")
@_options
@click.option("--sha256", "digest", help="The SHA-256 sum of a key that exists already. Without it: a new key.")
@json_option
@click.pass_obj
def add(location: str, /, name: str, digest: str | None, as_json: bool, **values: Any) -> None:
    """Add a key for the tenant NAME, and print it. It is not stored and cannot be shown again."""
    from headway.gateway.accounts.store import StoredKey
    from headway.limits.budgets import Budget

    key = None
    if digest is None:
        key, digest = _new_key()
    elif len(digest) != 64 or set(digest) - set("0123456789abcdef"):
        raise HeadwayError(f"--sha256 {digest}: expected 64 hexadecimal digits, as printed by sha256sum")
    stored = _with_options(StoredKey(digest, name, "", Budget(), created_ns=time.time_ns()), values)
    _in_store(location, lambda store: store.add_key(stored))
    _print_key(stored, key, as_json)


def _print_key(stored: StoredKey, key: str | None, as_json: bool) -> None:
    if as_json:
        print_json(_shown(stored) | ({} if key is None else {"secret": key}))
    else:
        click.echo(stored.id if key is None else key)


@command.command()
@click.argument("key")
@_options
@json_option
@click.pass_obj
def change(location: str, /, key: str, as_json: bool, **values: Any) -> None:
    """Change a KEY, given by its name or its id; `none` removes a limit."""

    async def work(store: AccountStore) -> StoredKey:
        changed = _with_options(await store.find(key), values)
        await store.change_key(changed)
        return changed

    _print_key(_in_store(location, work), None, as_json)


@command.command()
@click.argument("key")
@json_option
@click.pass_obj
def revoke(location: str, /, key: str, as_json: bool) -> None:
    """Revoke a KEY, given by its name or its id. What it has spent stays in the reports."""

    async def work(store: AccountStore) -> StoredKey:
        found = await store.find(key)
        if found.revoked_ns is not None:
            raise HeadwayError(f"{found.id} was revoked already, on {_time(found.revoked_ns)}")
        revoked = replace(found, revoked_ns=time.time_ns())
        await store.change_key(revoked)
        return revoked

    _print_key(_in_store(location, work), None, as_json)


@command.command()
@click.argument("key")
@click.option("--keep-days", type=click.IntRange(min=0), default=0, help="Days for which the old key stays valid.")
@json_option
@click.pass_obj
def rotate(location: str, /, key: str, keep_days: int, as_json: bool) -> None:
    """Replace a KEY by a new one with the same properties, and print it. The key's budget starts again; a team's budget
    does not."""
    secret, digest = _new_key()

    async def work(store: AccountStore) -> StoredKey:
        old = await store.find(key)
        if old.revoked_ns is not None:
            raise HeadwayError(f"{old.id} was revoked, on {_time(old.revoked_ns)}; expected a key that is valid")
        new = replace(old, sha256=digest, created_ns=time.time_ns())
        last_day = date.fromordinal(datetime.now(UTC).date().toordinal() + keep_days)
        retired = (
            replace(old, expires=min(old.expires or last_day, last_day))
            if keep_days
            else replace(old, revoked_ns=time.time_ns())
        )
        await store.replace_key(retired, new)
        return new

    _print_key(_in_store(location, work), secret, as_json)


@command.command("list")
@click.option("--all", "with_revoked", is_flag=True, help="Also keys that were revoked.")
@json_option
@click.pass_obj
def list_keys(location: str, /, with_revoked: bool, as_json: bool) -> None:
    """List keys and teams, and the spending from their budgets in the current period."""
    today = datetime.now(UTC).date()

    async def work(store: AccountStore) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        keys, teams = await store.keys(with_revoked), await store.teams()
        after = date.fromordinal(today.toordinal() + 1).isoformat()
        starts = {budget.start(today) for budget in [*teams.values(), *(key.budget for key in keys)]}
        spent = {start: await store.spent(start.isoformat(), after) for start in starts}

        def used(budget: Budget, index: int, name: str) -> dict[str, Any]:
            tokens, usd = spent[budget.start(today)][index].get(name, (0, 0.0))
            return {"spent_tokens": tokens, "spent_usd": usd}

        return (
            [_shown(key) | used(key.budget, 0, key.sha256) for key in keys],
            [
                {
                    "team": name,
                    "budget_tokens": each.tokens,
                    "budget_usd": each.usd,
                    "period": each.period,
                    **used(each, 1, name),
                }
                for name, each in teams.items()
            ],
        )

    keys, teams = _in_store(location, work)
    if as_json:
        print_json({"keys": keys, "teams": teams})
        return
    hidden = set() if with_revoked else {"revoked"}
    for title, rows in (("keys", keys), ("teams", teams)):
        if rows:
            names = [name for name in rows[0] if name not in hidden]
            print_table(names, [[row[name] for name in names] for row in rows], title)
    if not keys:
        click.echo("no keys; headway keys add NAME makes one")


@command.command()
@click.argument("name")
@_budget_options
@click.pass_obj
def team(location: str, /, name: str, **values: Any) -> None:
    """Add the team NAME, or change its budget; `none` removes a limit."""
    from headway.limits.budgets import Budget

    async def work(store: AccountStore) -> None:
        before = (await store.teams()).get(name, Budget())
        await store.set_team(name, _budget(before, _given(values)))

    _in_store(location, work)


@command.command()
@click.option("--by", "groups", type=_GROUPS, multiple=True, help="Repeatable. Default: key and model.")
@click.option("--since", type=_DATE, help="First day (UTC). Default: the first of this month.")
@click.option("--until", type=_DATE, help="Last day (UTC). Default: today.")
@json_option
@click.pass_obj
def spend(
    location: str, groups: tuple[str, ...], since: datetime | None, until: datetime | None, as_json: bool
) -> None:
    """Report requests, tokens and dollars by key, team, model or day."""
    today = datetime.now(UTC).date()
    first = today.replace(day=1) if since is None else since.date()
    last = today if until is None else until.date()
    by = list(dict.fromkeys(groups)) or ["key", "model"]

    async def work(store: AccountStore) -> tuple[list[dict[str, Any]], dict[str, str]]:
        names = {key.sha256: key.name for key in await store.keys(with_revoked=True)}
        return await store.report(by, first.isoformat(), last.isoformat()), names

    rows, names = _in_store(location, work)
    if "key" in by:
        from headway.gateway.settings import key_id

        rows = [row | {"key": key_id(row["key"]), "name": names.get(row["key"])} for row in rows]
    if as_json:
        print_json({"since": first.isoformat(), "until": last.isoformat(), "rows": rows})
        return
    if not rows:
        click.echo(f"nothing was spent from {first} to {last}")
        return
    headers = [*by, *(["name"] if "key" in by else []), "requests", "input_tokens", "output_tokens", "usd"]
    print_table(headers, [[row[name] if row[name] != "" else None for name in headers] for row in rows])
