"""Records of a served run: rows of a workload, in order of arrival, with time from the first request."""

from __future__ import annotations

from headway.control.live import Live
from headway.gateway.telemetry.recording import Recording


def _live(id: int, arrival_s: float, model: str = "m", region: str = "") -> Live:
    live = Live(id, arrival_s, 10, 1, model=model, region=region)
    live.generated_tokens = 7
    return live


def test_requests_are_rows_from_the_first_arrival_on() -> None:
    recording = Recording(enabled=True)
    for id, arrival_s, model in ((2, 30.0, "b"), (1, 20.0, "a"), (3, 45.0, "a")):
        recording.add(_live(id, arrival_s, model))
    records = recording.records([], 50.0)
    assert recording.num_requests == 3 and records.end_s == 30.0
    assert records.workload["arrival_s"].tolist() == [0.0, 10.0, 25.0]
    assert [records.models[i] for i in records.workload["model"]] == ["a", "b", "a"]
    assert records.workload["output_tokens"].tolist() == [7, 7, 7]


def test_scores_and_lengths_of_a_cascade_are_columns_by_model() -> None:
    recording = Recording(enabled=True)
    live = _live(1, 1.0, "small")
    live.quality = (("small", 40.0), ("large", 90.0))  # type: ignore[misc]  # of a frozen base, thawed here
    live.lengths = (("small", 5), ("large", 7))  # type: ignore[misc]
    recording.add(_live(0, 0.0, "small"))
    recording.add(live, cascade="best")
    workload = recording.records([], 2.0).workload
    assert workload["quality:large"].tolist()[1] == 90.0 and workload["output_tokens:small"].tolist()[1] == 5


def test_more_names_than_have_codes_lose_no_records() -> None:
    """Clients can name regions, and tenants where Envoy passes their fairness ids on."""
    recording, num = Recording(enabled=True), (1 << 15) + 100
    for id in range(num):
        live = _live(id, float(id), region=f"r{id}")
        live.tenant = f"t{id}"
        recording.add(live)
    records = recording.records([], float(num))
    tenants = [records.tenants[code] for code in records.workload["tenant"]]
    regions = [records.regions[code] for code in records.workload["region"]]
    assert len(tenants) == len(regions) == num
    assert (tenants[5], regions[5], tenants[-1], regions[-1]) == ("t5", "r5", "other", "")


def test_a_disabled_recording_keeps_nothing() -> None:
    recording = Recording(enabled=False)
    for id in range(10):
        recording.add(_live(id, float(id)))
    assert recording.num_requests == 0
