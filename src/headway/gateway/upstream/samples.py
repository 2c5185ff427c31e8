"""Adds up the samples of one metric on an engine's page without counting a request twice.

Prometheus' text format does not show how the samples of one name are related: they may be parts of a whole, the same
whole seen by several processes, or parts beside their total. The engines' labels are known. An unknown label with
several values makes the metric unknown.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from math import inf

from msgspec import Struct

_PARTS = ("engine", "dp_rank")
"""Labels of data-parallel ranks: each request is at one of them."""
_COPIES = ("pp_rank", "tp_rank", "moe_ep_rank", "cp_rank", "attn_cp_rank")
"""Labels of processes that work together on the same requests."""
_PRIORITY = "priority"
"""SGLang counts requests by priority and, under an empty priority, in total."""
_MODEL = "model_name"
_LABEL = re.compile(r'\b(\w+)\s*=\s*"((?:[^"\\]|\\.)*)"')
_MAX_TOTALS = 16
"""Maximum number of labels that are tried to find a total beside its parts."""
_MAX_VALUE = 1e9
"""Larger samples are invalid."""
Sample = tuple[dict[str, str], float]


class Values(Struct, frozen=True):
    """One metric's values, one for each data-parallel rank."""

    by_rank: tuple[float, ...] = ()
    unclear: str = ""
    """The label that makes the metric unknown."""

    @property
    def total(self) -> float | None:
        return sum(self.by_rank) if self.by_rank else None

    @property
    def mean(self) -> float | None:
        return sum(self.by_rank) / len(self.by_rank) if self.by_rank else None


def values(names: Iterable[str], page: str, models: Collection[str] = ()) -> Values:
    """The values of the first of these metrics on the page. `models`: names of the model whose samples count, if the
    page has several models."""
    for name in names:
        lines = re.findall(rf"^{re.escape(name)}(?:\{{(.*)\}})?[ \t]+(\S+)", page, re.MULTILINE)
        if not lines:
            continue
        samples = [(labels_of(labels), number(text)) for labels, text in lines]
        return _values([(labels, value) for labels, value in samples if value is not None], models)
    return Values()


def labels_of(text: str) -> dict[str, str]:
    """The labels of a sample, parsed from the text in braces."""
    return dict(_LABEL.findall(text))


def _values(samples: list[Sample], models: Collection[str]) -> Values:
    """The values by rank of samples of one metric."""
    found = {labels.get(_MODEL, "") for labels, _ in samples}
    if len(found) > 1:
        samples = [sample for sample in samples if sample[0].get(_MODEL) in models]
        if len({labels[_MODEL] for labels, _ in samples}) != 1:
            return Values(unclear=_MODEL)
    ranks: dict[tuple[str, ...], list[Sample]] = {}
    for labels, value in samples:
        ranks.setdefault(tuple([labels.get(name, "") for name in _PARTS]), []).append((labels, value))
    by_rank = []
    for same in ranks.values():
        one, unclear = _one(same)
        if one is None:
            return Values(unclear=unclear)
        by_rank.append(one)
    return Values(tuple(by_rank))


def _one(samples: list[Sample]) -> tuple[float | None, str]:
    """The combined value of the samples of one rank. If a label makes the value unknown: this label."""
    if len(samples) > 1:
        first = min(_copy(labels) for labels, _ in samples)
        samples = [sample for sample in samples if _copy(sample[0]) == first]
    if len(samples) > 1 and any(_PRIORITY in labels for labels, _ in samples):
        totals = [sample for sample in samples if not sample[0].get(_PRIORITY)]
        samples = totals or _added(samples)
    if len(samples) == 1:
        return samples[0][1], ""
    others = _differing(samples)
    for name in others[:_MAX_TOTALS]:  # one sample is the total of the others
        parts = [value for labels, value in samples if labels.get(name)]
        whole = [value for labels, value in samples if not labels.get(name)]
        if len(whole) == 1 and parts and whole[0] == sum(parts):
            return whole[0], ""
    if not others:
        return samples[-1][1], ""  # the same sample, written again
    return None, others[0]


def _differing(samples: Sequence[Sample]) -> list[str]:
    """The labels whose values differ among the samples."""
    texts: dict[str, set[str]] = {}
    num = Counter[str]()
    for labels, _ in samples:
        for name, text in labels.items():
            texts.setdefault(name, set()).add(text)
            num[name] += 1
    for name, found in texts.items():
        if num[name] < len(samples):
            found.add("")
    return sorted(name for name, found in texts.items() if len(found) > 1)


def _added(samples: list[Sample]) -> list[Sample]:
    """The samples without the priority label. Samples that differ only by priority are added up."""
    by_rest: dict[frozenset[tuple[str, str]], float] = {}
    for labels, value in samples:
        rest = frozenset((name, text) for name, text in labels.items() if name != _PRIORITY)
        by_rest[rest] = by_rest.get(rest, 0.0) + value
    return [(dict(rest), value) for rest, value in by_rest.items()]


def _copy(labels: dict[str, str]) -> tuple[tuple[int, str], ...]:
    """The rank of a process among the processes that work on the same requests, as a sort key."""
    return tuple([(len(rank := labels.get(name, "")), rank) for name in _COPIES])


def time(text: str) -> float | None:
    """The value of a sample that is a time; None if it is invalid."""
    try:
        value = float(text)
    except ValueError:
        return None
    return value if 0 <= value < inf else None


def number(text: str) -> float | None:
    """The value of a sample; None if it is invalid."""
    try:
        value = float(text)
    except ValueError:
        return None
    return value if 0 <= value < _MAX_VALUE else None
