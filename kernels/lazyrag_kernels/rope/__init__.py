"""Rotary position embedding with exact angles."""

from lazyrag_kernels.rope.rotary import Rotary, cos_sin, rotate

__all__ = ["Rotary", "cos_sin", "rotate"]
