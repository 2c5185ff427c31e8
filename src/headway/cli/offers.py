"""GPUs as they are said on a command line: types, how many, at which price."""

from __future__ import annotations

from headway import catalog
from headway.core.errors import HeadwayError
from headway.planning.combos.problem import Offer


def offer(text: str, per_server: int | None) -> Offer:
    """type, type:count, type:count:price, or type:count:price:interruptions"""
    name, *rest = text.strip().split(":")
    count, price, interruptions, *more = *rest, *("" for _ in range(3 - len(rest)))
    try:
        if more:
            raise ValueError("too many parts")
        gpu = catalog.gpu(name)
        usd = float(price) if price else None
        return Offer(gpu, int(count) if count else None, usd, per_server, float(interruptions or 0))
    except HeadwayError as error:
        raise HeadwayError(f"--gpus: {error}") from None
    except ValueError as error:
        raise HeadwayError(f"--gpus: {text.strip()!r}; expected type:count:price:interruptions ({error})") from None
