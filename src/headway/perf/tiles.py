"""Rows that a matrix product computes in vain where it works on whole tiles. Pure.

Tiles and clusters are those of vLLM's FP8 kernels for Hopper (its CUTLASS dispatch by the number of rows); a cluster of
two tiles of 128 rows makes 256 the unit of long batches. Tiles are dealt out to the multiprocessors in waves. A wave
that does not fill them all takes as long as a full one, but for what faster clocks and a free memory bus make up for.
"""

from __future__ import annotations

from math import ceil, inf

TILES = ((64, 64, 64, 64), (128, 128, 64, 128), (inf, 256, 128, 128))
"""(up to so many rows, rows of a cluster, rows of a tile, columns of a tile)."""


def tiled_rows(rows: float, out: float, num_sms: int, wave_share: float) -> float:
    """Rows that would take as long if none were computed in vain, for `rows` of `out` columns.

    `wave_share` is how much of what lacks to whole waves is lost, 0 to 1. Never falls when `rows` grow.
    """
    if not rows:
        return 0.0
    _, unit, high, wide = next(tile for tile in TILES if rows <= tile[0])
    padded = unit * ceil(rows / unit)
    waves = padded / high * ceil(out / wide) / num_sms
    return padded * (1.0 - wave_share + wave_share * ceil(waves) / waves)
