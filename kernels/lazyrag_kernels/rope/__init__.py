"""Rotary position embedding with exact angles."""

from lazyrag_kernels.rope.angles import AngleTable
from lazyrag_kernels.rope.rotary import Rotary, cos_sin, rotate

__all__ = ["AngleTable", "Rotary", "cos_sin", "rotate"]
