"""Lazy attention in Triton: the query is rotated per run, stored keys never (arXiv 2606.04302).

One program is one worker of one kv head. It walks over the items that the plan gave it (see
`plan`); an item is a tile of query rows and a list of page runs under one online softmax
(Milakov & Gimelshein, arXiv 1805.02867). Rows of the tile are query tokens times the heads that
share the kv head.

Rotation is done in two turns, in fp32, and rounded once. The launch that writes live K and V turns
queries to their own position n (`kv_write`, where keys are turned as well). Here a query turns back
by the offset of what it meets, R_(n - S) = R_(-S) R_n: at every run all rows of a walking item turn
by the same angle, one vector of cosines and sines; rows of a joined item turn once, each by its
own.

A row's parts are merged by a second launch in the order of the plan, without atomics: one plan,
identical bits.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-decorators=False, disallow-untyped-calls=False
from __future__ import annotations

import math

import triton
import triton.language as tl

from lazyrag_kernels.attention.table import (
    BLOCK_FIELDS,
    HEAD,
    ITEM_FIELDS,
    MASKED,
    MERGE_FIELDS,
    NUMBER,
    OPENS,
    ROW_FIELDS,
    Head,
)
from lazyrag_kernels.rope.triton import load_angle

_LOG2E: tl.constexpr = tl.constexpr(math.log2(math.e))
_WORKERS_AT: tl.constexpr = tl.constexpr(HEAD)
_ITEM_FIELDS: tl.constexpr = tl.constexpr(ITEM_FIELDS)
_ROW_FIELDS: tl.constexpr = tl.constexpr(ROW_FIELDS)
_BLOCK_FIELDS: tl.constexpr = tl.constexpr(BLOCK_FIELDS)
_OPENS: tl.constexpr = tl.constexpr(OPENS)
_MASKED: tl.constexpr = tl.constexpr(MASKED)
_NUMBER: tl.constexpr = tl.constexpr(NUMBER)
_MERGE_FIELDS: tl.constexpr = tl.constexpr(MERGE_FIELDS)
_TOKENS: tl.constexpr = tl.constexpr(int(Head.TOKENS))
_LIVE: tl.constexpr = tl.constexpr(int(Head.LIVE))
_MERGE: tl.constexpr = tl.constexpr(int(Head.MERGE))
_NODES: tl.constexpr = tl.constexpr(int(Head.NODES))
_MERGED_ROWS: tl.constexpr = tl.constexpr(int(Head.MERGED_ROWS))


@triton.jit
def attention_kernel(
    q,  # fp32 [rows, q_heads, DIM], turned to each row's position
    k_pool,
    v_pool,
    k_scale,  # fp32 [pages, kv_heads], fp8 pages only
    v_scale,
    out,  # [rows, q_heads, DIM]
    partial,  # fp32 [slots, q_heads, DIM]
    partial_lse,  # fp32 [slots, q_heads], base 2
    table,  # int32, the packed plan
    angles,  # fp32 [FINE + coarse, 2, HALF]
    sinks,  # fp32 [q_heads]
    slopes,  # fp32 [q_heads]
    score_scale,  # times log2(e)
    softcap,  # times log2(e)
    page_stride,
    slot_stride,
    kv_head_stride,
    kv_heads,
    first_worker,
    WINDOW: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    HALF: tl.constexpr,  # rotary_dim / 2
    HALF_PAD: tl.constexpr,
    GROUP: tl.constexpr,
    PAGE: tl.constexpr,
    M: tl.constexpr,
    BLOCK: tl.constexpr,
    ROTATE: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    SOFTCAP: tl.constexpr,
    SINKS: tl.constexpr,
    ALIBI: tl.constexpr,
    FP8_PAGES: tl.constexpr,
    TEMPERATURE: tl.constexpr,
    JOINED: tl.constexpr,
    OVERLAP: tl.constexpr,
    STAGES: tl.constexpr,
):
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    kv_head = tl.program_id(0) % kv_heads
    p_worker = table + _WORKERS_AT + first_worker + tl.program_id(0) // kv_heads
    p_k = k_pool + kv_head.to(tl.int64) * kv_head_stride
    p_v = v_pool + kv_head.to(tl.int64) * kv_head_stride

    SCALAR_PAGE: tl.constexpr = PAGE % BLOCK == 0
    # Tall tiles read their queries again at every run: the loop is short of registers.
    KEEP: tl.constexpr = M <= 16
    ELEMENT: tl.constexpr = out.dtype.element_ty
    o_m = tl.arange(0, M)
    o_row = o_m // GROUP  # row of the tile
    o_head = kv_head * GROUP + o_m % GROUP
    o_key = tl.arange(0, BLOCK)
    o_dim = tl.arange(0, DIM_PAD)
    m_dim = o_dim < DIM
    o_j = tl.arange(0, HALF_PAD)  # pairs of dimensions
    m_pair = o_j < DIM // 2
    m_turns = o_j < HALF
    # A query is [first members | second members] of its pairs, or the pairs as they are if they
    # are interleaved; keys are loaded in the same order of dimensions.
    o_k = tl.arange(0, 2 * HALF_PAD)
    m_k = o_k < DIM
    if INTERLEAVED:
        o_1 = 2 * o_j
        o_2 = 2 * o_j + 1
    elif HALF == 0 or 2 * HALF == DIM:
        o_1 = o_j
        o_2 = o_j + DIM // 2
    else:
        o_1 = tl.where(m_turns, o_j, o_j + HALF)
        o_2 = tl.where(m_turns, o_j + HALF, o_j + DIM // 2)
    if not INTERLEAVED and (2 * HALF_PAD != DIM or (HALF > 0 and 2 * HALF < DIM)):
        o_pair = o_k % HALF_PAD
        m_k = o_pair < DIM // 2
        o_still = tl.where(o_k < HALF_PAD, o_pair + HALF, o_pair + DIM // 2)
        o_turns = tl.where(o_k < HALF_PAD, o_pair, o_pair + HALF)
        o_k = tl.where(o_pair < HALF, o_turns, o_still)
        # Every piece starts at a multiple of 8 dimensions, which the compiler cannot see.
        o_k = tl.max_contiguous(tl.multiple_of(o_k, 8), 8)
    o_k_tile = (o_key * slot_stride)[:, None] + o_k[None, :]  # [BLOCK, 2 * HALF_PAD]
    o_v_tile = (o_key * slot_stride)[:, None] + o_dim[None, :]  # [BLOCK, DIM_PAD]

    for item in tl.range(tl.load(p_worker), tl.load(p_worker + 1), _ITEM_FIELDS):
        p_item = table + item
        p_rows = table + tl.load(p_item)
        rows = tl.load(p_item + 1)
        p_block = table + tl.load(p_item + 2)
        blocks = tl.load(p_item + 3)
        walking = tl.load(p_item + 4)
        m_row = o_row < rows
        p_row = p_rows + o_row * _ROW_FIELDS
        b_token = tl.load(p_row, mask=m_row, other=0)  # [M]
        b_rank = tl.load(p_row + 1, mask=m_row, other=-2147483648)

        p_q = q + (b_token * (kv_heads * GROUP) + o_head).to(tl.int64)[:, None] * DIM
        m_q = m_row[:, None] & m_pair[None, :]
        if KEEP:
            b_x1 = tl.load(p_q + o_1[None, :], mask=m_q, other=0.0)  # [M, HALF_PAD]
            b_x2 = tl.load(p_q + o_2[None, :], mask=m_q, other=0.0)
        if ALIBI or WINDOW > 0:
            p_tokens = table + tl.load(table + _TOKENS)
            p_live = table + tl.load(table + _LIVE)
            b_position = tl.load(p_tokens + b_token, mask=m_row, other=0)
        if ALIBI:
            b_slope = tl.load(slopes + o_head, mask=m_row, other=0.0) * _LOG2E
            if JOINED:
                # The run of a joined item does not know where its rows see it.
                b_position -= tl.load(p_row + 2, mask=m_row, other=0)

        b_acc = tl.zeros([M, DIM_PAD], tl.float32)
        b_sum = tl.zeros([M], tl.float32)
        # Below every score and finite: a row that sees no key of a block needs no special case.
        b_max = tl.full([M], -1.0e30, tl.float32)
        b_q = tl.zeros([M, 2 * HALF_PAD], ELEMENT)
        # One loop over the blocks of all runs: K and V of the next run are on their way while the
        # last blocks of this one are computed. The record of a block is read one step ahead, so
        # that the pipeline starts with K and V themselves.
        next_slot = tl.load(p_block)
        next_bits = tl.load(p_block + 1)
        next_base = tl.load(p_block + 2)
        next_run = tl.load(p_block + 3)
        for index in tl.range(0, blocks, num_stages=STAGES):
            slot = next_slot
            bits = next_bits
            base = next_base
            p_run = table + next_run
            m_key = o_key < (bits & 255)
            if SCALAR_PAGE:
                at = (slot // PAGE).to(tl.int64) * page_stride + (slot % PAGE) * slot_stride
                p_k_tile = p_k + at + o_k_tile
                p_v_tile = p_v + at + o_v_tile
            else:
                page = tl.load(table + slot + o_key // PAGE, mask=m_key, other=0).to(tl.int64)
                o_slot = page * page_stride + (o_key % PAGE) * slot_stride  # [BLOCK]
                p_k_tile = p_k + o_slot[:, None] + o_k[None, :]
                p_v_tile = p_v + o_slot[:, None] + o_dim[None, :]
            b_k = tl.load(p_k_tile, mask=m_key[:, None] & m_k[None, :], other=0.0)
            b_v = tl.load(p_v_tile, mask=m_key[:, None] & m_dim[None, :], other=0.0)
            if (bits & _OPENS) != 0:
                if KEEP:
                    b_q1 = b_x1
                    b_q2 = b_x2
                else:
                    b_q1 = tl.load(p_q + o_1[None, :], mask=m_q, other=0.0)  # [M, HALF_PAD]
                    b_q2 = tl.load(p_q + o_2[None, :], mask=m_q, other=0.0)
                if ROTATE:
                    b_cos, b_sin = load_angle(angles, -base, o_j, m_turns, HALF)  # [HALF_PAD]
                    b_first = b_q1
                    b_q1 = b_first * b_cos[None, :] - b_q2 * b_sin[None, :]
                    b_q2 = b_q2 * b_cos[None, :] + b_first * b_sin[None, :]
                    if JOINED:  # noqa: SIM102
                        if walking == 0:
                            b_base = tl.load(p_row + 2, mask=m_row, other=0)
                            b_row_cos, b_row_sin = load_angle(
                                angles, -b_base[:, None], o_j[None, :], m_turns[None, :], HALF
                            )
                            b_first = b_q1
                            b_q1 = b_first * b_row_cos - b_q2 * b_row_sin
                            b_q2 = b_q2 * b_row_cos + b_first * b_row_sin
                # Scores come out as exponents of 2.
                b_q1 *= score_scale
                b_q2 *= score_scale
                if TEMPERATURE and not SOFTCAP:
                    temper = tl.load(p_run + 7).to(tl.float32, bitcast=True)
                    b_q1 *= temper
                    b_q2 *= temper
                b_pairs = tl.join(b_q1.to(ELEMENT), b_q2.to(ELEMENT))  # [M, HALF_PAD, 2]
                if not INTERLEAVED:
                    b_pairs = tl.permute(b_pairs, (0, 2, 1))
                b_q = tl.reshape(b_pairs, (M, 2 * HALF_PAD))
            b_s = tl.dot(b_q, tl.trans(b_k.to(ELEMENT)), input_precision="ieee")  # [M, BLOCK]
            if FP8_PAGES:
                if SCALAR_PAGE:
                    o_unit = slot // PAGE * kv_heads + kv_head
                else:
                    o_unit = (page * kv_heads + kv_head)[None, :]
                b_s *= tl.load(k_scale + o_unit)
            if SOFTCAP:
                # tanh(x) = 1 - 2 / (e^2x + 1)
                b_s = softcap * (1.0 - 2.0 / (tl.exp2(b_s * (2.0 * _LOG2E / softcap)) + 1.0))
                if TEMPERATURE:
                    b_s *= tl.load(p_run + 7).to(tl.float32, bitcast=True)
            if ALIBI or WINDOW > 0:
                key = (bits >> _NUMBER) * BLOCK + o_key
                b_where = base + key
                if tl.load(p_run + 5) == 1:
                    b_where = tl.load(p_live + tl.load(p_run + 6) + key, mask=m_key, other=0)
                b_distance = b_position[:, None] - b_where[None, :]  # [M, BLOCK]
            if ALIBI:
                b_bias = b_slope[:, None] * b_distance.to(tl.float32)
                if TEMPERATURE:
                    b_bias *= tl.load(p_run + 7).to(tl.float32, bitcast=True)
                b_s -= b_bias
            if WINDOW > 0:
                b_s = tl.where(b_distance < WINDOW, b_s, float("-inf"))
            if (bits & _MASKED) != 0:
                # Rank of the first row that sees each key.
                b_least = tl.load(p_run + 4) + tl.load(p_run + 5) * (
                    (bits >> _NUMBER) * BLOCK + o_key
                )  # [BLOCK]
                m_seen = m_key[None, :] & (b_rank[:, None] >= b_least[None, :])
                b_s = tl.where(m_seen, b_s, float("-inf"))
            b_new = tl.maximum(b_max, tl.max(b_s, 1))
            b_p = tl.exp2(b_s - b_new[:, None])  # [M, BLOCK]
            b_keep = tl.exp2(b_max - b_new)
            b_sum = b_sum * b_keep + tl.sum(b_p, 1)
            b_acc = b_acc * b_keep[:, None]
            if FP8_PAGES:
                b_p *= tl.load(v_scale + o_unit)
            b_acc = tl.dot(b_p.to(ELEMENT), b_v.to(ELEMENT), b_acc, input_precision="ieee")
            b_max = b_new
            p_block += _BLOCK_FIELDS
            m_next = index + 1 < blocks
            next_slot = tl.load(p_block, mask=m_next, other=0)
            next_bits = tl.load(p_block + 1, mask=m_next, other=0)
            next_base = tl.load(p_block + 2, mask=m_next, other=0)
            next_run = tl.load(p_block + 3, mask=m_next, other=0)

        b_weight = 1.0 / tl.where(b_sum == 0.0, 1.0, b_sum)
        if tl.load(p_item + 5) == 1:
            if SINKS:
                b_sink = tl.load(sinks + o_head) * _LOG2E
                b_weight = 1.0 / (b_sum + tl.exp2(b_sink - b_max))
            o_out = (b_token * (kv_heads * GROUP) + o_head).to(tl.int64) * DIM
            tl.store(
                out + o_out[:, None] + o_dim[None, :],
                (b_acc * b_weight[:, None]).to(ELEMENT),
                mask=m_row[:, None] & m_dim[None, :],
            )
        else:
            b_slot = tl.load(p_row + 3, mask=m_row, other=0)
            o_part = b_slot.to(tl.int64) * (kv_heads * GROUP) + o_head
            tl.store(
                partial + o_part[:, None] * DIM + o_dim[None, :],
                b_acc * b_weight[:, None],
                mask=m_row[:, None] & m_dim[None, :],
            )
            b_lse = tl.where(b_sum == 0.0, float("-inf"), b_max + tl.log2(b_sum))
            tl.store(partial_lse + o_part, b_lse, mask=m_row)


@triton.jit
def _part_lse(
    p_lse, p_nodes, first, stop, b_moved, q_heads, SCALED: tl.constexpr, PARTS: tl.constexpr
):
    """Base-2 log-sum-exp of some parts; node parts moved by ``b_moved``. [PARTS]"""
    o_part = first + tl.arange(0, PARTS)
    m_part = o_part < stop
    b_lse = tl.load(p_lse + o_part.to(tl.int64) * q_heads, mask=m_part, other=float("-inf"))
    if SCALED:
        b_node = tl.load(p_nodes + o_part, mask=m_part, other=0)
        b_lse = tl.where(b_node == 1, b_lse + b_moved, b_lse)
    return b_lse


@triton.jit
def merge_kernel(
    partial,  # fp32 [slots, q_heads, DIM]
    partial_lse,  # fp32 [slots, q_heads], base 2
    out,  # [rows, q_heads, DIM]
    table,
    sinks,
    q_heads,
    DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    SINKS: tl.constexpr,
    SCALED: tl.constexpr,
    OVERLAP: tl.constexpr,
    PARTS: tl.constexpr,
):
    """Sum the parts of each row in the order of the plan; rows without parts become zeros."""
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    p_merge = table + tl.load(table + _MERGE)
    p_nodes = table + tl.load(table + _NODES)
    work = tl.load(table + _MERGED_ROWS) * q_heads
    o_dim = tl.arange(0, DIM_PAD)
    m_dim = o_dim < DIM
    for index in tl.range(tl.program_id(0), work, tl.num_programs(0)):
        head = index % q_heads
        p_row = p_merge + index // q_heads * _MERGE_FIELDS
        token = tl.load(p_row)
        first = tl.load(p_row + 1)
        stop = first + tl.load(p_row + 2)
        p_lse = partial_lse + head

        moved = 0.0
        if SCALED:
            # Log-sum-exp of the node parts alone: what the scale multiplies.
            top = -float("inf")
            total = 0.0
            for part in tl.range(first, stop, PARTS):
                b_lse = _part_lse(p_lse, p_nodes, part, stop, 0.0, q_heads, False, PARTS)
                o_part = part + tl.arange(0, PARTS)
                b_node = tl.load(p_nodes + o_part, mask=o_part < stop, other=0)
                b_lse = tl.where(b_node == 1, b_lse, float("-inf"))
                new = tl.maximum(top, tl.max(b_lse, 0))
                shift = tl.where(new == float("-inf"), 0.0, new)
                total = total * tl.exp2(top - shift) + tl.sum(tl.exp2(b_lse - shift), 0)
                top = new
            scale = tl.load(p_row + 3).to(tl.float32, bitcast=True)
            safe = tl.where(total > 0.0, total, 1.0)
            moved = tl.where(total > 0.0, (scale - 1.0) * (top + tl.log2(safe)), 0.0)

        top = -float("inf")
        if SINKS:
            top = tl.load(sinks + head) * _LOG2E
        total = tl.where(top == float("-inf"), 0.0, 1.0)
        b_acc = tl.zeros([DIM_PAD], tl.float32)
        for part in tl.range(first, stop, PARTS):
            o_part = part + tl.arange(0, PARTS)
            b_lse = _part_lse(p_lse, p_nodes, part, stop, moved, q_heads, SCALED, PARTS)
            p_part = partial + (o_part.to(tl.int64) * q_heads + head)[:, None] * DIM
            b_part = tl.load(
                p_part + o_dim[None, :],
                mask=(o_part < stop)[:, None] & m_dim[None, :],
                other=0.0,
            )  # [PARTS, DIM_PAD]
            new = tl.maximum(top, tl.max(b_lse, 0))
            shift = tl.where(new == float("-inf"), 0.0, new)
            b_weight = tl.exp2(b_lse - shift)
            keep = tl.exp2(top - shift)
            total = total * keep + tl.sum(b_weight, 0)
            b_acc = b_acc * keep + tl.sum(b_part * b_weight[:, None], 0)
            top = new
        b_acc = b_acc / tl.where(total > 0.0, total, 1.0)
        o_out = (token * q_heads + head).to(tl.int64) * DIM
        tl.store(out + o_out + o_dim, b_acc.to(out.dtype.element_ty), mask=m_dim)
