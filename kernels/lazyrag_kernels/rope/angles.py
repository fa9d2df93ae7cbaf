"""Cosines and sines of any position from two small tables.

An angle of position p is that of its coarse part (p // 256 * 256) plus that of its fine part
(p % 256). Both are tabulated from fp64 and kept in fp32; a kernel joins them with one complex
product, which adds an error of about 1e-7 and keeps every table row it touches in cache:

    e^(i p f) = e^(i 256 (p // 256) f) * e^(i (p % 256) f)

131,072 positions of a 128-wide head take 0.4 MB instead of 67 MB. Negative positions are those of
|p| with the sine's sign turned.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lazyrag_kernels.rope.rotary import Rotary, cos_sin

FINE = 256
"""Positions a row of the coarse table stands for."""


@dataclass(frozen=True, slots=True, eq=False)
class AngleTable:
    """The two tables of one `Rotary` in one tensor.

    Attributes:
        rows: fp32 [FINE + coarse rows, 2, rotary_dim / 2]; cosines, then sines. Never empty, so
            that a layer without rotation has an address too.
        limit: positions p with ``|p| < limit`` are inside.
    """

    rows: Tensor
    limit: int

    @classmethod
    def build(cls, rotary: Rotary, limit: int, device: torch.device) -> AngleTable:
        """Tabulate ``|p| < limit``, rounded up to whole coarse rows."""
        coarse = -(-limit // FINE)
        fine = torch.arange(FINE)
        cos, sin = cos_sin(rotary, torch.cat((fine, torch.arange(coarse) * FINE)))
        rows = torch.stack((cos, sin), dim=1)
        if not rows.numel():
            rows = torch.zeros(1, 2, 1)
        return cls(rows.contiguous().to(device), coarse * FINE)
