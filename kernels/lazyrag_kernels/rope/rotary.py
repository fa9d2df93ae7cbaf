"""Rotary position embedding (Su et al., arXiv 2104.09864), half-split or interleaved pairs.

Angles are formed in fp64 from integer positions and the checkpoint's own fp32 frequencies; cosines
and sines are kept in fp32. Forming the angle in fp32 is off by up to position * 6e-8 rad, in bf16
it is useless.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Rotary:
    """One frequency table, shared by every layer that uses it (compared by identity).

    Attributes:
        inv_freq: fp32 [rotary_dim / 2], the checkpoint's own, any scaling already inside; empty for
            a layer without rotation.
        interleaved: pairs are (x_2j, x_2j+1) instead of (x_j, x_j+rotary_dim/2).
    """

    inv_freq: Tensor
    interleaved: bool = False

    def __post_init__(self) -> None:
        if self.inv_freq.dtype != torch.float32 or self.inv_freq.dim() != 1:
            raise ValueError(
                f"inv_freq must be a vector in float32, got {self.inv_freq.dtype} "
                f"of shape {tuple(self.inv_freq.shape)}"
            )

    @property
    def dim(self) -> int:
        """Number of leading head dimensions that rotate."""
        return 2 * self.inv_freq.numel()


def cos_sin(rotary: Rotary, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Cosine and sine of every angle.

    Args:
        rotary: the frequency table.
        positions: int64 [...], may be negative (n - S_d with free offsets).

    Returns:
        Two fp32 tensors [..., rotary_dim / 2] on the device of ``positions``.
    """
    inv_freq = rotary.inv_freq.to(device=positions.device, dtype=torch.float64)
    angles = positions.to(torch.float64).unsqueeze(-1) * inv_freq
    return angles.cos().to(torch.float32), angles.sin().to(torch.float32)


def rotate(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False) -> Tensor:
    """Rotate the pairs of ``x`` in fp32 (fp64 stays fp64) and round once to its dtype.

    Args:
        x: [..., head_dim].
        cos, sin: fp32 [..., rotary_dim / 2], broadcast against the leading dimensions of ``x``.
        interleaved: which pairs, see `Rotary`.

    Returns:
        A new tensor of the broadcast shape; dimensions beyond rotary_dim pass unchanged.
    """
    half = cos.shape[-1]
    turning = x[..., : 2 * half]
    if x.dtype != torch.float64:
        turning = turning.float()
    if interleaved:
        first, second = turning[..., 0::2], turning[..., 1::2]
    else:
        first, second = turning[..., :half], turning[..., half:]
    pair = (first * cos - second * sin, second * cos + first * sin)
    rotated = torch.stack(pair, dim=-1).flatten(-2) if interleaved else torch.cat(pair, dim=-1)
    rotated = rotated.to(x.dtype)
    if 2 * half == x.shape[-1]:
        return rotated
    rest = x[..., 2 * half :].expand(*rotated.shape[:-1], x.shape[-1] - 2 * half)
    return torch.cat((rotated, rest), dim=-1)
