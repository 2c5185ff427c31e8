"""What only Python's garbage collector finds."""

from __future__ import annotations

import gc
from collections import Counter


def left_over() -> Counter[str]:
    """Objects of Headway's own types that are in reference cycles, or are held by one, and in nothing else."""
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        gc.collect()
        return Counter(type(each).__qualname__ for each in gc.garbage if type(each).__module__.startswith("headway."))
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.collect()
