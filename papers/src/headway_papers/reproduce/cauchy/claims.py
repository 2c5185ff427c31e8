"""Cauchy's claims, from `claims.yaml`, and the cases of its tables."""

from __future__ import annotations

from headway_papers.reproduce.claims import read_claims

WORKLOADS = {"cnn-dailymail": "DailyMail", "sharegpt": "ShareGPT", "longwriter": "LongWriter"}
TABLE_3 = {
    1: ((2.14, 2.32), (1505.23, 1636.24), (22.03, 20.16)),
    2: ((2.90, 3.14), (1525.31, 1630.15), (17.75, 16.38)),
    3: ((2.96, 3.22), (1231.35, 1329.15), (14.56, 14.47)),
}
"""Goodput (requests/s), CE (K tokens/USD) and mean E2E (s) by decode GPUs; each with basic round robin, then
opportunistic."""
COMBINED = {"h800-h20": "H800 and H20", "h800-a800": "H800 and A800", "a800-h20": "A800 and H20"}
LENGTHS = (256, 512, 1024)
"""Prompt lengths of Figure 11 that no parameter is fitted to."""
GROUPS = read_claims(__package__)
"""Claims by their needs: see `claims.yaml`."""
CLAIMS = tuple(claim for group in GROUPS.values() for claim in group)
