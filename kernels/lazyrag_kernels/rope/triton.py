"""Cosines and sines inside a kernel, from the tables of `angles`."""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-decorators=False, disallow-untyped-calls=False
from __future__ import annotations

import triton
import triton.language as tl

from lazyrag_kernels.rope.angles import FINE

_FINE: tl.constexpr = tl.constexpr(FINE)


@triton.jit
def load_angle(table, distance, o_j, m_j, HALF: tl.constexpr):
    """Cosine and sine of ``distance`` times every frequency, from the two-level table.

    ``distance`` is a scalar with ``o_j`` a vector, or a column with ``o_j`` a row.
    """
    size = tl.abs(distance)
    p_fine = table + (size % _FINE) * (2 * HALF) + o_j
    p_coarse = table + (_FINE + size // _FINE) * (2 * HALF) + o_j
    fine_cos = tl.load(p_fine, mask=m_j, other=1.0)
    fine_sin = tl.load(p_fine + HALF, mask=m_j, other=0.0)
    coarse_cos = tl.load(p_coarse, mask=m_j, other=1.0)
    coarse_sin = tl.load(p_coarse + HALF, mask=m_j, other=0.0)
    cos = coarse_cos * fine_cos - coarse_sin * fine_sin
    sin = coarse_sin * fine_cos + coarse_cos * fine_sin
    return cos, tl.where(distance < 0, -sin, sin)
