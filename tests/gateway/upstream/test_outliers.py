"""Which replicas are ejected, and for how long."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("httptools")

from headway.gateway.settings import Outliers
from headway.gateway.upstream.outliers import Ejection, OutlierDetector

SETTINGS = Outliers()


def _detector(num: int, settings: Outliers = SETTINGS) -> OutlierDetector:
    detector = OutlierDetector(settings)
    for replica in range(num):
        detector.add(replica, "pool")
    return detector


def _report(detector: OutlierDetector, replica: int, fails: bool, now: float) -> None:
    if fails:
        detector.failed(replica, now)
    else:
        detector.succeeded(replica)


def _up(replica: int) -> bool:
    return True


def test_a_replica_that_fails_beside_a_good_one_is_ejected_within_ten_requests() -> None:
    detector = _detector(2)
    for num in range(1, 11):
        detector.failed(0, num)
        detector.succeeded(1)
        if changes := detector.check(num, _up):
            break
    assert changes == [Ejection(0, "failures in a row", "5 failures in a row; for 10 s")] and num == 5
    assert detector.is_ejected(0) and not detector.is_ejected(1)


def test_a_replica_that_fails_more_often_than_its_peers_is_ejected() -> None:
    detector = _detector(3)
    reasons = []
    for num in range(40):
        for replica in range(3):
            fails = num % 2 if replica == 0 else num % 10 == 0
            _report(detector, replica, bool(fails), num / 10)
        reasons += [(change.replica, change.reason) for change in detector.check(num / 10, _up)]
    assert reasons == [(0, "failures")]


@pytest.mark.parametrize(("seconds", "is_ejected"), [(0.05, False), (0.2, False), (2.0, True)])
@pytest.mark.parametrize("kind", ["first token", "between tokens"])
def test_a_slow_replica_is_ejected_by_what_is_expected_of_each(kind: str, seconds: float, is_ejected: bool) -> None:
    """Replica 0 has four times the work, and may take four times as long."""
    detector = _detector(2)
    for num in range(60):
        detector.observe(0, kind, seconds, 0.04, num * 0.1)  # type: ignore[arg-type]
        detector.observe(1, kind, 0.02, 0.01, num * 0.1)  # type: ignore[arg-type]
    assert [change.reason for change in detector.check(6.0, _up)] == ["latency"] * is_ejected


def test_one_pause_of_an_engine_is_not_taken_for_slowness() -> None:
    """It delays the next token of all streams at once."""
    detector = _detector(2)
    for num in range(1000):
        detector.observe(0, "between tokens", 0.01, 0.01, num * 0.01)
        detector.observe(1, "between tokens", 0.01, 0.01, num * 0.01)
    for _ in range(50):
        detector.observe(0, "between tokens", 2.0, 0.01, 10.0)
    assert not detector.check(10.0, _up)


def test_ejections_grow_and_end() -> None:
    detector, now, lengths = _detector(2), 0.0, []
    for _ in range(4):
        for _ in range(5):
            detector.failed(0, now)
        assert detector.check(now, _up)
        start_s = now
        while detector.is_ejected(0):
            now += 1.0
            changes = detector.check(now, _up)
        assert changes == [Ejection(0, None)]
        lengths.append(now - start_s)
    assert lengths == [10.0, 20.0, 30.0, 40.0]
    now += SETTINGS.max_ejection_s + 1
    for _ in range(5):
        detector.failed(0, now)
    assert "for 10 s" in detector.check(now, _up)[0].why, "it has served well for long"


def test_an_ejected_replica_returns_when_no_peer_serves() -> None:
    detector = _detector(2)
    for _ in range(5):
        detector.failed(0, 0.0)
    assert detector.check(0.0, _up)
    assert not detector.check(1.0, lambda replica: replica == 1)
    assert detector.check(1.0, lambda replica: replica == 0) == [Ejection(0, None, "none of its peers serves")]


@settings(deadline=None, max_examples=40)
@given(
    num=st.integers(1, 9),
    share=st.floats(0, 1),
    failing=st.lists(st.floats(0, 1), min_size=9, max_size=9),
    seed=st.integers(0, 1000),
)
def test_the_share_that_is_ejected_is_bounded_and_never_all(
    num: int, share: float, failing: list[float], seed: int
) -> None:
    detector, random = _detector(num, Outliers(max_ejected_share=share)), Random(seed)
    down: set[int] = set()
    ejected: set[int] = set()
    for step in range(300):
        replica, now = random.randrange(num), step / 3
        _report(detector, replica, random.random() < failing[replica], now)
        detector.observe(replica, "between tokens", 10 * failing[replica], 0.1, now)
        if random.random() < 0.05:
            down ^= {random.randrange(num)}
        for change in detector.check(now, lambda replica: replica not in down):  # noqa: B023
            assert (change.replica in ejected) == (change.reason is None)
            ejected ^= {change.replica}
        assert ejected == {replica for replica in range(num) if detector.is_ejected(replica)}
        assert len(ejected) <= (max(int(share * num), 1) if share else 0)
        up = set(range(num)) - down
        assert not up or up - ejected or not ejected & up


@settings(deadline=None, max_examples=40)
@given(num=st.integers(1, 6), share=st.floats(0, 0.9), seed=st.integers(0, 1000))
def test_equal_replicas_are_not_ejected(num: int, share: float, seed: int) -> None:
    """However often all of them fail, and however slow all of them are."""
    detector, random = _detector(num, Outliers(failures=601)), Random(seed)
    for step in range(600):
        replica, now = random.randrange(num), step / 20
        _report(detector, replica, (step // num) % 10 < 10 * share, now)
        detector.observe(replica, "first token", random.uniform(1.0, 1.5), 0.1, now)
        if step >= 60 * num:
            assert not detector.check(now, _up)


def test_replicas_of_other_groups_are_no_peers() -> None:
    detector = OutlierDetector(SETTINGS)
    for replica, group in enumerate(("prefill", "decode")):
        detector.add(replica, group)
    for _ in range(50):
        detector.failed(0, 0.0)
        detector.succeeded(1)
    assert not detector.check(0.0, _up)
    detector.remove(0)
    detector.failed(0, 0.0)
    assert not detector.is_ejected(0)


@pytest.mark.parametrize("seed", range(10))
def test_replicas_without_observations_are_passed_over_at_no_difference(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A replica that was quiet, and is no longer, counts as before."""
    rng, both = Random(seed), (_detector(6), _detector(6))
    for step in range(400):
        now, replica, fails = step / 4, rng.choice([0, 1, 2, 2, rng.randrange(6)]), rng.random() < 0.1 * seed / 10
        kind, seconds, is_told = rng.choice(["first token", "between tokens"]), rng.expovariate(1.0), rng.random() < 0.5
        for detector in both:
            if is_told:
                _report(detector, replica, fails or (replica == 2 and step % 90 < 12), now)
                detector.observe(replica, kind, (5 if replica == 1 and step > 200 else 1) * seconds, 1.0, now)
        found = both[0].check(now, _up)
        with monkeypatch.context() as patched:
            patched.setattr("headway.gateway.upstream.outliers._Host.is_quiet", lambda host: False)
            assert both[1].check(now, _up) == found
