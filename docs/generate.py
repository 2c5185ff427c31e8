"""Writes docs/scenario.md, cli.md, api.md, gateway-metrics.md and the table in README.md: `python docs/generate.py`."""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from textwrap import dedent

import click
import msgspec
from msgspec import inspect as schema

import headway
from headway.cli import COMMANDS, commands
from headway.config.spec import Spec
from headway.core.fleet import Engine
from headway.gateway.telemetry.definitions import DEFINITIONS, EXEMPLARS
from headway.report.table import render
from headway.scenario.presets import builtin
from headway.scenario.run import compare, load, replicate

DOCS = Path(__file__).parent
README = DOCS.parent / "README.md"
SCENARIO = """\
# The scenario file

*Written from the schema by `make docs`.*

A scenario is one YAML file. `headway new` writes a commented one to start from. A key that is not listed here
is an error, which names the file, the line and the nearest key. Paths are relative to the scenario's folder.
Keys that end in `_s` are seconds, or durations such as `450ms`, `2s`, `1m` and `1h`.
[policies.md](policies.md) has the names and arguments of policies.
"""
CLI = """\
# The command line

*The options are written from the commands by `make docs`.*

Results go to stdout, everything else to stderr. With `--json`, stdout holds JSON and nothing else.

| exit code | meaning |
|---|---|
| 0 | done |
| 1 | the reader of stdout went away; `headway reproduce --strict`: a claim is refuted |
| 2 | a mistake in what was given: one line on stderr says what, where, and the nearest valid name |
| 3 | `plan`: no candidate meets the targets, and how near they come; `validate`: error over limit; `advise`: withheld |
| 130 | interrupted (Ctrl-C) |

Files appear whole or not at all. Anything else, with a traceback, is a bug in Headway.

## Completion in the shell

Commands, options and their values complete with the Tab key once the shell has loaded the completion script:

```console
eval "$(_HEADWAY_COMPLETE=bash_source headway)"         # bash 4.4 or newer: a line of ~/.bashrc
eval "$(_HEADWAY_COMPLETE=zsh_source headway)"          # zsh: a line of ~/.zshrc
_HEADWAY_COMPLETE=fish_source headway | source          # fish: a line of ~/.config/fish/completions/headway.fish
```

## What `--json` prints

`headway simulate` and `headway compare` print one object; `--out` writes the same to `results.json`.

| key | value |
|---|---|
| `version` | Headway's version |
| `name`, `seed` | of the scenario |
| `scenario` | the scenario as YAML text, options included: enough to make the runs again |
| `results` | a list, one object per run |
| `results[].policies` | `routing` and `ordering`; `ordering_at` where that is not the replica |
| `results[].num_requests` | requests that arrived, after the warm-up |
| `results[].num_completed` | those of them that finished |
| `results[].simulate_s` | wall seconds of the simulation with its records |
| `results[].total_s` | the same with making the workload before and the metrics after |
| `results[].calibrated` | whether step times come from measurements of this GPU and engine |
| `results[].notes` | what was skipped or assumed when the workload was read |
| `results[].intervals` | with several seeds: of each metric, `mean` and the 95% interval of the mean, `low` to `high` |
| `results[].bands` | in which 9 of 10 measured runs have a latency ([accuracy.md](accuracy.md#error-bars)), \
or the energy ([plan-fleet.md](plan-fleet.md#energy)) |
| `results[].verdicts` | with several seeds: of a metric, `best`, `indistinguishable` (from the best) or `worse` |
| `seeds` | with several seeds: all of them; `metrics` are those of the first |
| `results[].metrics` | flat, as in `ttft_s.p50` or `tier.0.e2e_s.mean`; null where there is no data |

[metrics.md](metrics.md) defines every metric.

[reproduce.md](reproduce.md#json-output) says what `headway reproduce` prints.
"""


def scenario_page() -> str:
    """docs/scenario.md."""
    parts = [SCENARIO, *_sections()]
    return "\n".join(parts)


def _sections() -> Iterator[str]:
    waiting: list[tuple[str, type]] = [("", Spec)]
    seen: set[type] = set()
    while waiting:
        path, cls = waiting.pop(0)
        if cls in seen:
            continue
        seen.add(cls)
        info = schema.type_info(cls)
        assert isinstance(info, schema.StructType)
        yield _section(path, info)
        for field in filter(_is_key, info.fields):
            waiting += [(f"{path}.{field.encode_name}".lstrip("."), child) for child in _structs(field.type)]
        if path == "fleet":
            waiting.append(("fleet.engine", Engine))


def _section(path: str, info: schema.StructType) -> str:
    kind = f" (`{info.tag_field}: {info.tag}`)" if info.tag_field else ""
    title = f"`{path}`{kind}" if path else "The whole file"
    rows = [f"## {title}", "", _prose(info.cls), "", "| key | value | default | |", "|---|---|---|---|"]
    rows += [
        f"| `{field.encode_name}` | {_spell(field.type)} | {_default(field)} | "
        f"{_field_docs(info.cls).get(field.name, '')} |"
        for field in filter(_is_key, info.fields)
    ]
    return "\n".join(rows) + "\n"


def _is_key(field: schema.Field) -> bool:
    """Whether users set it: a field that is absent unless the program sets it is no key, unless it may be null."""
    may_be_null = isinstance(field.type, schema.UnionType) and field.type.includes_none
    has_default = field.default is not msgspec.NODEFAULT or field.default_factory is not msgspec.NODEFAULT
    return field.required or has_default or may_be_null


def _structs(kind: schema.Type) -> Iterator[type]:
    if isinstance(kind, schema.StructType):
        yield kind.cls
    elif isinstance(kind, schema.UnionType):
        for member in kind.types:
            yield from _structs(member)
    elif isinstance(kind, schema.CollectionType):
        yield from _structs(kind.item_type)
    elif isinstance(kind, schema.DictType):
        yield from _structs(kind.value_type)


def _spell(kind: schema.Type) -> str:
    match kind:
        case schema.UnionType():
            return " or ".join(dict.fromkeys(_spell(t) for t in kind.types if not isinstance(t, schema.NoneType)))
        case schema.StructType():
            return f"`{{{kind.tag_field}: {kind.tag}, ...}}`" if kind.tag_field else "keys, see below"
        case schema.LiteralType():
            return " or ".join(f"`{value}`" for value in kind.values)
        case schema.VarTupleType() | schema.ListType():
            return f"list of ({_spell(kind.item_type)})"
        case schema.TupleType():
            return "list"
        case schema.DictType():
            value = "any" if isinstance(kind.value_type, schema.AnyType) else _spell(kind.value_type)
            return "keys and values" if value == "any" else f"name: {value}"
        case schema.IntType() | schema.FloatType():
            name = "whole number" if isinstance(kind, schema.IntType) else "number"
            limits = [f"{sign} {bound:g}" for sign, bound in (("≥", kind.ge), (">", kind.gt)) if bound is not None]
            return " ".join([name, *limits])
        case schema.DateType():
            return "date"
        case schema.BoolType():
            return "true or false"
        case schema.StrType():
            return "text"
    return "any"


def _default(field: schema.Field) -> str:
    if field.required:
        return "**required**"
    if field.default_factory is not msgspec.NODEFAULT or field.default in (None, msgspec.NODEFAULT):
        return ""
    value = field.default
    if isinstance(value, bool):
        return "true" if value else "false"
    if value in ("", ()):
        return ""
    return f"`{value:g}`" if isinstance(value, float) else f"`{value}`"


def _prose(cls: type) -> str:
    """A class's docstring, its line breaks as in the source."""
    return inspect.cleandoc(cls.__doc__ or "")


@cache
def _field_docs(cls: type) -> dict[str, str]:
    """The string below each field, as one line; inherited fields included."""
    docs: dict[str, str] = {}
    for each in reversed(cls.__mro__):
        if each.__module__.startswith("headway"):
            body = ast.parse(dedent(inspect.getsource(each))).body[0]
            assert isinstance(body, ast.ClassDef)
            for field, below in zip(body.body, body.body[1:], strict=False):
                if isinstance(field, ast.AnnAssign) and isinstance(below, ast.Expr):
                    assert isinstance(field.target, ast.Name) and isinstance(below.value, ast.Constant)
                    docs[field.target.id] = " ".join(str(below.value.value).split()).replace("|", "\\|")
    return docs


def cli_page() -> str:
    """docs/cli.md. HeadwayError where the commands of headway-papers are not installed."""
    settings = {**commands.context_settings, "max_content_width": 100, "terminal_width": 100}
    root = click.Context(commands, info_name="headway", **settings)
    return "\n".join([CLI, *_helps(commands, root, COMMANDS)])


def _helps(group: click.Group, context: click.Context, names: Iterable[str]) -> Iterator[str]:
    for name in names:
        command = group.get_command(context, name)
        assert command is not None
        inner = click.Context(command, info_name=name, parent=context)
        yield f"## `{inner.command_path}`\n\n```text\n{command.get_help(inner)}\n```\n"
        if isinstance(command, click.Group):
            yield from _helps(command, inner, command.list_commands(inner))


BEFORE, AFTER = "<!-- demo: written by make docs -->\n", "<!-- end of demo -->\n"


API = """\
# From Python

*Written from the docstrings by `make docs`.*

```python
import headway as hw

chat = hw.load(
    {
        "workload": {"builtin": "chat", "num_requests": 300, "arrivals": 20},
        "fleet": [{"model": "llama-3.1-8b", "gpu": "h100", "engine": "vllm", "replicas": 2}],
    }
)
comparison = hw.compare(chat, routing=["round-robin", "jsq-tokens"], seeds=3)
print(comparison.verdict)
print(comparison.to_pandas()[["routing", "seed", "ttft_s.p99"]])
```

A scenario is a file, a dictionary of [the same keys](scenario.md), or what `hw.load` returns. Results are tables
(`table`), frames (`to_arrow`, `to_pandas`, `to_polars`) and Plotly figures (`plot`, whose `save` writes .html, .svg,
.png or .pdf; pictures need `pip install 'headway[figures]'`). Pages draw their charts with
`plotly-VERSION.min.js`, which is written beside them and which all pages of a folder share. A mistake raises
`HeadwayError` with one line that says what was expected.
[examples/compare_routers.ipynb](../examples/compare_routers.ipynb) goes from a trace to a figure with intervals.
"""


def api_page() -> str:
    """docs/api.md."""
    parts = [API]
    for name in headway.__all__:
        value = getattr(headway, name)
        if inspect.isclass(value):
            parts.append(f"## `{name}`\n\n{_prose(value)}\n")
            if value.__module__.startswith("headway.api"):
                parts.append("\n".join(_member(key, member) for key, member in _members(value)) + "\n")
        else:
            parts.append(f"## `{name}{_signature(value)}`\n\n{_prose(value)}\n")
    return "\n".join(parts)


def _prose(value: object) -> str:
    text = inspect.getdoc(value) or ""
    return "" if text.startswith(f"{getattr(value, '__name__', '')}(") else text


def _members(value: type) -> Iterator[tuple[str, object]]:
    """Public methods and properties, those of Headway's own classes only."""
    for each in reversed(value.__mro__):
        members = vars(each).items() if each.__module__.startswith("headway.api") else ()
        for key, member in members:
            is_shown = inspect.isfunction(member) or isinstance(member, property)
            if is_shown and not key.startswith("_") and getattr(value, key) is member:
                yield key, member


def _member(key: str, member: object) -> str:
    shown = key if isinstance(member, property) else f"{key}{_signature(member)}"
    text = " ".join(_prose(member).split())
    return f"- `{shown}`{': ' + text if text else ''}"


def _signature(function: object) -> str:
    """Arguments as a caller sees them, with types in short."""
    signature = inspect.signature(inspect.unwrap(function))  # type: ignore[arg-type]
    shown = []
    for parameter in signature.parameters.values():
        if parameter.name == "self":
            continue
        star = {parameter.VAR_KEYWORD: "**", parameter.VAR_POSITIONAL: "*"}.get(parameter.kind, "")
        if parameter.kind is parameter.KEYWORD_ONLY and "*" not in shown and not any(s.startswith("*") for s in shown):
            shown.append("*")
        default = "" if parameter.default is parameter.empty else f"={parameter.default!r}"
        shown.append(f"{star}{parameter.name}{default}")
    return f"({', '.join(shown)})"


METRICS = """\
# The gateway's metrics

*Written from `gateway/telemetry/definitions.py` by `make docs`.*

`GET /metrics` of `headway serve` and `headway epp` has these, in Prometheus' text format;
[observe.md](observe.md#metrics-and-records) says which to look at first. A scraper that asks for OpenMetrics
(`Accept: application/openmetrics-text`, as Prometheus does) gets it, with the `request_id` of the last request of each
bin as an exemplar of these histograms:

%s

`headway why ID` says why that request took so long ([observe.md](observe.md#why-was-this-request-slow)). What is not
known has no sample: a KV cache that an engine does not report is not an empty one.

| metric | labels | content |
|---|---|---|
"""


def metrics_page() -> str:
    """docs/gateway-metrics.md."""
    shown = "\n".join(f"- `{name}`" for name in EXEMPLARS)
    rows = (
        f"| `{name}` | {', '.join(f'`{label}`' for label in each.labels)} | {each.kind}: {each.help} |\n"
        for name, each in DEFINITIONS.items()
    )
    return METRICS % shown + "".join(rows)


def readme_page() -> str:
    """README.md, with the table that the demo prints."""
    text = README.read_text(encoding="utf-8")
    head, rest = text.split(BEFORE)
    _, tail = rest.split(AFTER)
    scenario = load(builtin("chat"))
    runs = compare(scenario)
    table = render(runs, width=110, seeded=replicate(scenario, runs, 5))
    lines = [line.strip().rstrip() for line in table.splitlines() if line.strip()]
    return "".join([head, BEFORE, "```text\n", "\n".join(lines), "\n```\n", AFTER, tail])


PAGES = {
    DOCS / "scenario.md": scenario_page, DOCS / "cli.md": cli_page, DOCS / "api.md": api_page, README: readme_page,
    DOCS / "gateway-metrics.md": metrics_page,
}  # fmt: skip

if __name__ == "__main__":
    for page, write in PAGES.items():
        page.write_text(write(), encoding="utf-8")
        sys.stderr.write(f"wrote {page.name}\n")
