"""Which fleets can have prefill and decode apart or together, as the file and its records say."""

from __future__ import annotations

from typing import Any

import pytest

import headway as hw
from headway.planning.advise.changes import Candidate, LeftOut
from headway.planning.advise.phases import phases

SHORT = {"arrivals": 1, "num_requests": 5, "prompt_tokens": 50, "output_tokens": 5}
SIDE = {"model": "llama-3.1-8b", "gpu": "h100", "engine": "vllm-0.15"}
URLS = [f"http://127.0.0.1:{8001 + i}" for i in range(4)]


def found(document: dict[str, Any]) -> list[Candidate | LeftOut]:
    return list(phases(hw.load({**document, "workload": SHORT}), document))


def pool(**keys: Any) -> dict[str, Any]:
    return {"fleet": [{"name": "chat", **SIDE, **keys}]}


def pair(**decode: Any) -> dict[str, Any]:
    sides = {"prefill": {**SIDE, "endpoints": URLS[:1]}, "decode": {**SIDE, "endpoints": URLS[1:3], **decode}}
    return {"combos": [{"name": "pair", **sides, "handover": {"first_token": "decode"}}]}


@pytest.mark.parametrize(
    ("document", "why", "needs"),
    [
        (pool(replicas=2), "the bandwidth between its replicas is not recorded", "fleet[0].network_bytes_per_s"),
        (pool(network_bytes_per_s=5e10), "it has one replica", "a second one"),
        (
            pool(replicas=2, network_bytes_per_s=5e10, endpoints_file="urls.yaml"),
            "its replicas are not listed in the file",
            "endpoints",
        ),
        (pair(endpoints=[], endpoints_file="urls.yaml"), "its replicas are not listed in the file", "endpoints"),
        (pair(gpu="h20"), "its replicas for prefill and for decode differ", "headway plan combos"),
        (
            {**pool(replicas=2, network_bytes_per_s=5e10), "policies": {"scaling": "keda"}},
            "the scaler sets the numbers",
            "headway plan combos",
        ),
    ],
)
def test_what_cannot_be_tried_is_told_with_what_it_needs(document: dict[str, Any], why: str, needs: str) -> None:
    (only,) = found(document)
    assert isinstance(only, LeftOut) and only.reason.startswith(why) and needs in only.needs


def test_a_pair_is_put_together_at_the_same_endpoints() -> None:
    (only,) = found(pair())
    assert isinstance(only, Candidate)
    assert only.document(pair()) == {"combos": [{"name": "pair", "aggregated": {**SIDE, "endpoints": URLS[:3]}}]}


def test_a_pool_is_put_apart_with_each_of_its_endpoints_in_one_half() -> None:
    document = {"fleet": [*pool(endpoints=URLS, network_bytes_per_s=5e10)["fleet"], {"name": "other", **SIDE}]}
    made = found(document)
    for each, num in zip(made, (1, 2, 3), strict=False):
        assert isinstance(each, Candidate)
        changed = each.document(document)
        (combo,) = changed["combos"]
        assert combo["name"] == "chat" and combo["handover"] == {"first_token": "decode"}
        assert (combo["prefill"]["endpoints"], combo["decode"]["endpoints"]) == (URLS[:num], URLS[num:])
        assert changed["fleet"] == document["fleet"][1:]
        hw.load({**changed, "workload": SHORT})
    assert isinstance(made[3], LeftOut) and made[3].name.endswith("other")
    assert len(made) == 4
