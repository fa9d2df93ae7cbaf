"""Copying nodes to another place, as Block-Attention does: one launch for all layers.

Keys that lie rotated at one position are turned on to another one; values stay what they are. Only
the benchmarks need this: our own attention never moves a node.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-decorators=False, disallow-untyped-calls=False
from __future__ import annotations

import triton
import triton.language as tl
from lazyrag_kernels.rope import AngleTable, Rotary
from lazyrag_kernels.rope.triton import load_angle
from torch import Tensor


@triton.jit
def _relocate_kernel(
    k_pool,  # [layers, slots, HEADS, 2 * HALF]
    v_pool,
    moves,  # int64 [3, tokens]: from slot, to slot, positions to turn on by
    angles,
    tokens,
    layer_stride,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
):
    token = tl.program_id(0)
    layer = tl.program_id(1).to(tl.int64) * layer_stride
    source = tl.load(moves + token) * (HEADS * 2 * HALF)
    target = tl.load(moves + tokens + token) * (HEADS * 2 * HALF)
    o_j = tl.arange(0, HALF)
    b_cos, b_sin = load_angle(angles, tl.load(moves + 2 * tokens + token), o_j, o_j < HALF, HALF)
    o_head = tl.arange(0, HEADS)[:, None] * (2 * HALF) + o_j[None, :]
    ELEMENT: tl.constexpr = k_pool.dtype.element_ty
    b_1 = tl.load(k_pool + layer + source + o_head).to(tl.float32)  # [HEADS, HALF]
    b_2 = tl.load(k_pool + layer + source + o_head + HALF).to(tl.float32)
    tl.store(
        k_pool + layer + target + o_head,
        (b_1 * b_cos[None, :] - b_2 * b_sin[None, :]).to(ELEMENT),
    )
    tl.store(
        k_pool + layer + target + o_head + HALF,
        (b_2 * b_cos[None, :] + b_1 * b_sin[None, :]).to(ELEMENT),
    )
    tl.store(v_pool + layer + target + o_head, tl.load(v_pool + layer + source + o_head))
    tl.store(
        v_pool + layer + target + o_head + HALF, tl.load(v_pool + layer + source + o_head + HALF)
    )


def relocate(k_pool: Tensor, v_pool: Tensor, moves: Tensor, rotary: Rotary, angles: AngleTable):
    """Copy tokens within the pool and turn their keys on.

    Args:
        k_pool, v_pool: [layers, slots, kv_heads, head_dim]; heads and half a head are powers of two
            and the whole head rotates, half-split.
        moves: int64 [3, tokens]: slot to copy from, slot to copy to, positions to turn on by.
        rotary, angles: of every layer.
    """
    layers, _, heads, dim = k_pool.shape
    if rotary.interleaved or rotary.dim != dim:
        raise ValueError("only whole heads with half-split pairs can be moved")
    tokens = moves.shape[1]
    _relocate_kernel[(tokens, layers)](
        k_pool, v_pool, moves, angles.rows, tokens, k_pool.stride(0), HEADS=heads, HALF=dim // 2
    )
