"""One launch puts K and V into pages, keys turned to their positions: live text's before attention,
with the queries, or a node's of all layers.

A key is rotated once, rounded once and stays. A query is rotated in fp32 and not rounded: attention
turns it on, from its position to its distance from each node, and rounds then.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-decorators=False, disallow-untyped-calls=False
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from lazyrag_kernels.rope import AngleTable, Rotary
from lazyrag_kernels.rope.triton import load_angle

FP8 = torch.float8_e4m3fn
_FP8_MAX: tl.constexpr = tl.constexpr(448.0)


@triton.jit
def _write_kernel(
    k_pool,
    v_pool,
    k_scale,  # fp32 [pages, kv_heads], fp8 pages only
    v_scale,
    k,  # [layers, tokens, kv_heads, DIM] raw
    v,
    q,  # [tokens, q_heads, DIM] raw
    q_turned,  # fp32 [tokens, q_heads, DIM]
    slots,  # int32 or int64 [tokens]
    positions,
    angles,
    k_layer_stride,
    k_stride,
    k_head_stride,
    v_layer_stride,
    v_stride,
    v_head_stride,
    q_stride,
    q_head_stride,
    layer_stride,
    page_stride,
    slot_stride,
    kv_head_stride,
    kv_heads,
    DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    HALF: tl.constexpr,
    HALF_PAD: tl.constexpr,
    GROUP: tl.constexpr,  # query heads of a program, 0 = no queries
    GROUP_PAD: tl.constexpr,
    PAGE: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    FP8_PAGES: tl.constexpr,
):
    """One program a token and kv head of a layer."""
    layer = tl.program_id(1).to(tl.int64)
    token = (tl.program_id(0) // kv_heads).to(tl.int64)
    head = tl.program_id(0) % kv_heads
    slot = tl.load(slots + token).to(tl.int64)
    if slot < 0:  # padding of a captured launch
        return
    o_j = tl.arange(0, HALF_PAD)
    m_pair = o_j < DIM // 2
    m_turns = o_j < HALF
    if INTERLEAVED:
        o_1 = 2 * o_j
        o_2 = 2 * o_j + 1
    else:
        o_1 = tl.where(m_turns, o_j, o_j + HALF)
        o_2 = tl.where(m_turns, o_j + HALF, o_j + DIM // 2)
    b_cos, b_sin = load_angle(angles, tl.load(positions + token), o_j, m_turns, HALF)  # [HALF_PAD]

    if GROUP > 0:
        o_head = tl.arange(0, GROUP_PAD)[:, None]
        m_q = (o_head < GROUP) & m_pair[None, :]
        o_head += head * GROUP
        p_q = q + token * q_stride + o_head * q_head_stride
        b_q1 = tl.load(p_q + o_1[None, :], mask=m_q, other=0.0).to(tl.float32)
        b_q2 = tl.load(p_q + o_2[None, :], mask=m_q, other=0.0).to(tl.float32)
        p_q = q_turned + (token * (kv_heads * GROUP) + o_head) * DIM
        b_t1 = b_q1 * b_cos[None, :] - b_q2 * b_sin[None, :]
        b_t2 = b_q2 * b_cos[None, :] + b_q1 * b_sin[None, :]
        tl.store(p_q + o_1[None, :], b_t1, mask=m_q)
        tl.store(p_q + o_2[None, :], b_t2, mask=m_q)

    p_k = k + layer * k_layer_stride + token * k_stride + head * k_head_stride
    b_k1 = tl.load(p_k + o_1, mask=m_pair, other=0.0).to(tl.float32)  # [HALF_PAD]
    b_k2 = tl.load(p_k + o_2, mask=m_pair, other=0.0).to(tl.float32)
    b_r1 = b_k1 * b_cos - b_k2 * b_sin
    b_r2 = b_k2 * b_cos + b_k1 * b_sin
    o_dim = tl.arange(0, DIM_PAD)
    m_dim = o_dim < DIM
    p_v = v + layer * v_layer_stride + token * v_stride + head * v_head_stride
    b_v = tl.load(p_v + o_dim, mask=m_dim, other=0.0)
    page = slot // PAGE
    if FP8_PAGES:
        unit = tl.load(k_scale + page * kv_heads + head)
        b_r1 = tl.clamp(b_r1 / unit, -_FP8_MAX, _FP8_MAX)
        b_r2 = tl.clamp(b_r2 / unit, -_FP8_MAX, _FP8_MAX)
        b_v = b_v.to(tl.float32) / tl.load(v_scale + page * kv_heads + head)
        b_v = tl.clamp(b_v, -_FP8_MAX, _FP8_MAX)
    at = layer * layer_stride + page * page_stride
    at += slot % PAGE * slot_stride + head.to(tl.int64) * kv_head_stride
    ELEMENT: tl.constexpr = k_pool.dtype.element_ty
    tl.store(k_pool + at + o_1, b_r1.to(ELEMENT), mask=m_pair)
    tl.store(k_pool + at + o_2, b_r2.to(ELEMENT), mask=m_pair)
    tl.store(v_pool + at + o_dim, b_v.to(ELEMENT), mask=m_dim)


def write_step(
    k_pool: Tensor,
    v_pool: Tensor,
    k: Tensor,
    v: Tensor,
    slots: Tensor,
    positions: Tensor,
    rotary: Rotary,
    angles: AngleTable,
    page_size: int,
    *,
    q: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> Tensor | None:
    """Rotate raw keys and queries to their positions; write keys and values to their slots.

    Args:
        k_pool, v_pool: [slots, kv_heads, head_dim] or [pages, kv_heads, page_size, head_dim].
        k, v: [tokens, kv_heads, head_dim]; ``k`` is raw (not rotated).
        slots: int32 or int64 [tokens], distinct; a negative one is padding and writes nothing.
        positions: int32 or int64 [tokens] that keys are kept at and queries ask from, inside
            ``angles``.
        rotary, angles: of the layer.
        page_size: of the pool.
        q: [tokens, q_heads, head_dim], raw.
        k_scale, v_scale: fp32 [pages, kv_heads] that fp8 pages are divided by.

    Returns:
        fp32 [tokens, q_heads, head_dim], what `TritonStep.attend` takes; None without ``q``. Rows
        of padding are not written.

    Raises:
        ValueError: names what a launch cannot do.
    """
    if q is not None:
        tokens, kv_heads, dim = k.shape
        if q.shape[0] != tokens or q.shape[2] != dim or q.shape[1] % kv_heads or q.stride(2) != 1:
            raise ValueError(f"q of shape {tuple(q.shape)} does not go with k of {tuple(k.shape)}")
    return _launch(
        k_pool[None],
        v_pool[None],
        k[None],
        v[None],
        slots,
        positions,
        rotary,
        angles,
        page_size,
        q=q,
        k_scale=k_scale,
        v_scale=v_scale,
    )


def write_layers(
    k_pool: Tensor,
    v_pool: Tensor,
    k: Tensor,
    v: Tensor,
    slots: Tensor,
    positions: Tensor,
    rotary: Rotary,
    angles: AngleTable,
    page_size: int,
) -> None:
    """As `write_step`, of several layers in one launch and without queries.

    Args:
        k_pool, v_pool: [layers, slots, kv_heads, head_dim] or
            [layers, pages, kv_heads, page_size, head_dim], not fp8.
        k, v: [layers, tokens, kv_heads, head_dim]; ``k`` is raw (not rotated).
        slots, positions, page_size: see `write_step`.
        rotary, angles: of every layer.

    Raises:
        ValueError: names what a launch cannot do.
    """
    _launch(k_pool, v_pool, k, v, slots, positions, rotary, angles, page_size)


def _launch(
    k_pool: Tensor,
    v_pool: Tensor,
    k: Tensor,
    v: Tensor,
    slots: Tensor,
    positions: Tensor,
    rotary: Rotary,
    angles: AngleTable,
    page_size: int,
    *,
    q: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> Tensor | None:
    layers, tokens, kv_heads, dim = k.shape
    if v.shape != k.shape or k.stride(3) != 1 or v.stride(3) != 1:
        raise ValueError(f"k and v must be one shape with dense heads: {k.shape} and {v.shape}")
    if k_pool.stride() != v_pool.stride() or k_pool.stride(-1) != 1:
        raise ValueError("the pools of K and V must have the same strides and dense heads")
    fp8 = k_pool.dtype == FP8
    if fp8 and (k_scale is None or v_scale is None):
        raise ValueError("pages in fp8 need k_scale and v_scale")
    if k_pool.dim() == 4:
        layer, slot, head, _ = k_pool.stride()
        page = page_size * slot
    else:
        layer, page, head, slot, _ = k_pool.stride()
    group = 0 if q is None else q.shape[1] // kv_heads
    turned = None if q is None else torch.empty(q.shape, dtype=torch.float32, device=q.device)
    if not tokens:
        return turned
    nothing = angles.rows
    raw = k[0] if q is None else q
    _write_kernel[(tokens * kv_heads, layers)](
        k_pool,
        v_pool,
        nothing if k_scale is None else k_scale,
        nothing if v_scale is None else v_scale,
        k,
        v,
        raw,
        nothing if turned is None else turned,
        slots,
        positions,
        angles.rows,
        k.stride(0),
        k.stride(1),
        k.stride(2),
        v.stride(0),
        v.stride(1),
        v.stride(2),
        raw.stride(0),
        raw.stride(1),
        layer,
        page,
        slot,
        head,
        kv_heads,
        DIM=dim,
        DIM_PAD=triton.next_power_of_2(dim),
        HALF=rotary.dim // 2,
        HALF_PAD=triton.next_power_of_2(dim // 2),
        GROUP=group,
        GROUP_PAD=triton.next_power_of_2(max(1, group)),
        PAGE=page_size,
        INTERLEAVED=rotary.interleaved,
        FP8_PAGES=fp8,
        num_warps=1,
    )
    return turned
