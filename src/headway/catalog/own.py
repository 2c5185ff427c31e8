"""Coefficient files of a user's own: what `headway calibrate` writes."""

from __future__ import annotations

from pathlib import Path

import msgspec

from headway.catalog.coefficients import CoefficientFile, Coefficients
from headway.catalog.load import resolved
from headway.core.errors import HeadwayError


def coefficients_in(path: Path, gpu_name: str, engine_name: str) -> Coefficients:
    """Step-time coefficients as `catalog.coefficients` gives them, from this file in place of the catalog's.

    HeadwayError where it cannot be read or is of another GPU.
    """
    try:
        data = msgspec.json.decode(path.read_bytes(), type=CoefficientFile)
    except OSError as error:
        raise HeadwayError(f"{path}: {error.strerror}") from None
    except msgspec.DecodeError as error:
        raise HeadwayError(f"{path}: not a file of coefficients: {error}") from None
    measured_on = (*data.gpus, *data.like)
    if gpu_name not in measured_on:
        raise HeadwayError(f"{path}: coefficients of {', '.join(measured_on)}; expected {gpu_name}")
    return resolved(data, gpu_name in data.gpus, engine_name)
