"""Tenants with requests waiting, and the order in which an ordering has them start."""

from __future__ import annotations

from collections import deque
from typing import Any

from fakes import FakeRequest


class Lines:
    """The line of each tenant. No request ends."""

    def __init__(self, ordering: Any, *tenants: str) -> None:
        self.ordering, self.id = ordering, 0
        self.waiting = {tenant: deque[FakeRequest]() for tenant in tenants}

    def add(self, tenant: str, prompt_tokens: int = 100, tier: int = 0) -> FakeRequest:
        self.id += 1
        request = FakeRequest(self.id, arrival_s=float(self.id), prompt_tokens=prompt_tokens, tier=tier, tenant=tenant)
        self.waiting.setdefault(tenant, deque()).append(request)
        return request

    def start(self) -> FakeRequest:
        heads = [line[0] for line in self.waiting.values() if line]
        first = min(heads, key=lambda request: self.ordering.rank(request, 0.0))
        self.waiting[first.tenant].popleft()
        self.ordering.started(first, 0.0)
        return first
