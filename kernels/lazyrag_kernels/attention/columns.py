"""Small operations on columns of numbers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]


def before(counts: Ints) -> Ints:
    """Exclusive cumulative sum."""
    return cast(Ints, counts.cumsum() - counts)


def ranges(counts: Ints) -> Ints:
    """0 .. count - 1 for every count, one after the other."""
    ends = counts.cumsum()
    total = int(ends[-1]) if ends.size else 0
    return np.arange(total) - (ends - counts).repeat(counts)


def none() -> Ints:
    return np.zeros(0, np.int64)


def concatenate(parts: Sequence[Any], columns: int | None = None) -> Ints:
    if parts:
        return cast(Ints, np.concatenate(parts))
    return np.zeros((0,) if columns is None else (0, columns), np.int64)


def float_bits(values: float | NDArray[np.float64]) -> Any:
    """fp32 values as the int32 they share their bits with, widened."""
    return np.asarray(values, np.float32).view(np.int32).astype(np.int64)
