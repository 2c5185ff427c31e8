"""A Lease of the cluster: one holder at a time, and another once it has lapsed or was given up."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

import kube
from serving import until

pytest.importorskip("kubernetes")
from headway.gateway.fleet.lease import KubernetesLease

LEASE_S = 0.5
"""The API knows whole seconds: 1."""


@pytest.fixture
def leases(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[kube.Leases]:
    location = "kubernetes.config.kube_config.KUBE_CONFIG_DEFAULT_LOCATION"  # read from the environment at import
    monkeypatch.setattr(location, str(tmp_path / "kubeconfig"))
    made = kube.Leases()
    with kube.serve(tmp_path / "kubeconfig", made):
        yield made


def _leads(lease: KubernetesLease) -> bool:
    return asyncio.run(lease.acquire(LEASE_S))


def test_one_holds_it_until_it_lapses_or_is_given_up(leases: kube.Leases) -> None:
    first, second = (KubernetesLease("headway", "models", "", name) for name in ("first", "second"))
    assert _leads(first) and not _leads(second) and _leads(first)
    assert leases.found["headway"]["spec"]["holderIdentity"] == "first"
    until(lambda: _leads(second))  # it sees no renewal for a second
    assert not _leads(first)
    asyncio.run(second.release())
    assert _leads(first)
    assert leases.found["headway"]["spec"]["leaseTransitions"] == 2


def test_of_two_that_take_it_at_the_same_time_one_gets_it(leases: kube.Leases, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both have read it before either writes."""
    first, second = (KubernetesLease("headway", "models", "", name) for name in ("first", "second"))
    assert _leads(first)
    asyncio.run(first.release())
    take = second._take

    def late(*args: object) -> None:
        assert _leads(first)
        take(*args)

    monkeypatch.setattr(second, "_take", late)
    assert not _leads(second)


def test_a_cluster_that_does_not_answer_is_unavailable(leases: kube.Leases, monkeypatch: pytest.MonkeyPatch) -> None:
    lease = KubernetesLease("headway", "models", "", "first")
    monkeypatch.setattr(leases, "answer", lambda *_: (500, {}))
    with pytest.raises(OSError, match="the cluster answers 500"):
        _leads(lease)
