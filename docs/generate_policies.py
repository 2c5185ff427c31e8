"""Writes docs/policies.md from the policies themselves: `python docs/generate_policies.py`.

The attributes that a policy reads are recorded by the conformance checks, not written down by hand.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from headway.core.policy import Learner
from headway.policies import ADMISSIONS, CASCADES, MIGRATIONS, ORDERINGS, ROUTERS, SCALERS
from headway.testing import (
    admission_reads,
    cascade_reads,
    migration_reads,
    ordering_reads,
    router_reads,
    scaler_reads,
)

PAGE = Path(__file__).with_name("policies.md")

INTRO = """<!-- Written by docs/generate_policies.py from the code. Do not edit. -->
# Policies

A scenario names one policy of each kind, with arguments where the defaults do not suit:

```yaml
policies:
  routing: least-loaded
  ordering: {name: edf, default_deadline_s: 30}
```

*Reads* lists the attributes that a policy was seen to read in its conformance checks, besides the ids of replicas.
Their names are those of `headway.core.view`; `placed` is one of a replica's requests. A policy marked *oracle* reads
values that only a simulation knows: use it as a bound. [Write a policy](write-a-policy.md) shows how to add one.
"""


KINDS: tuple[tuple[str, str, Mapping[str, type[Any]], Any], ...] = (
    ("Routers", "Which replica gets a request.", ROUTERS, router_reads),
    (
        "Orderings", "Which request runs first. When memory runs out, the last in the ranking is preempted.",
        ORDERINGS, ordering_reads,
    ),
    (
        "Migrations", "Which requests move to another replica. Without a migration policy, none does.",
        MIGRATIONS, migration_reads,
    ),
    ("Admissions", "Which requests are held back. Without an admission policy, none is.", ADMISSIONS, admission_reads),
    ("Cascades", "Which of several models answers a request.", CASCADES, cascade_reads),
    (
        "Scalers", "How many replicas each pool has. Without a scaler, as many as the fleet file says.",
        SCALERS, scaler_reads,
    ),
)  # fmt: skip
"""(title, what such a policy decides, the policies by name, the function that returns what one reads)."""


def page() -> str:
    parts = [INTRO]
    for title, decides, named, reads in KINDS:
        if named:
            parts += [f"## {title}\n\n{decides}\n", _table(named, reads)]
            parts += [_section(name, cls) for name, cls in named.items()]
    return "\n".join(parts)


def _table(named: Mapping[str, type[Any]], reads: Any) -> str:
    rows = ["| name | in a sentence | reads | arguments |", "|---|---|---|---|"]
    for name, cls in named.items():
        sentence = " ".join(_doc(cls).partition("\n\n")[0].split())
        mark = " *(oracle)*" if getattr(cls, "oracle", False) else ""
        rows.append(f"| `{name}`{mark} | {sentence} | {_reads(cls, reads(cls))} | {_arguments(cls)} |")
    return "\n".join(rows) + "\n"


def _reads(cls: type[Any], reads: Iterable[str]) -> str:
    dull = {"replica.id", "view.replicas"}
    shown = [f"`{read}`" for read in sorted(reads) if read not in dull]
    if issubclass(cls, Learner):
        shown.append("requests that ended")
    return ", ".join(shown) or "nothing"


def _arguments(cls: type[Any]) -> str:
    parameters = inspect.signature(cls).parameters.values()
    shown = [f"`{p.name}: {p.annotation} = {_yaml(p.default)}`" for p in parameters]
    return "<br>".join(shown).replace("|", r"\|") or "none"  # a bare bar would end the table's cell


def _yaml(value: object) -> str:
    if isinstance(value, type):
        return next(name for name, cls in ROUTERS.items() if cls is value)
    return str(value).lower() if isinstance(value, bool) else str(value)


def _section(name: str, cls: type[Any]) -> str:
    return f"### {name}\n\n{_doc(cls)}\n\n*`{cls.__module__}.{cls.__name__}`*\n"


def _doc(cls: type[Any]) -> str:
    return inspect.cleandoc(cls.__doc__ or "")


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
