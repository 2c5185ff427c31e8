"""Cauchy's claims, from `claims.yaml`, and the cases of its tables."""

from __future__ import annotations

from headway_papers.reproduce.claims import read_claims

WORKLOADS = {"cnn-dailymail": "DailyMail", "sharegpt": "ShareGPT", "longwriter": "LongWriter"}
TABLE_3 = {
    1: ((2.14, 2.32), (1505.23, 1636.24), (22.03, 20.16)),
    2: ((2.90, 3.14), (1525.31, 1630.15), (17.75, 16.38)),
    3: ((2.96, 3.22), (1231.35, 1329.15), (14.56, 14.47)),
}
"""By decode GPUs: goodput (requests/s), CE (K tokens/USD), mean E2E (s); basic round robin, then opportunistic."""
COMBINED = {"h800-h20": "H800 and H20", "h800-a800": "H800 and A800", "a800-h20": "A800 and H20"}
LENGTHS = (256, 512, 1024)
"""Prompts of Figure 11 that nothing is fitted to."""
GROUPS = read_claims(__package__)
"""By what they need: see `claims.yaml`."""
CLAIMS = tuple(claim for group in GROUPS.values() for claim in group)
