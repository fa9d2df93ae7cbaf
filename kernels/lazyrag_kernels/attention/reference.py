"""Lazy attention written to be read; every fast path is judged against it."""

from __future__ import annotations

import torch
from torch import Tensor

from lazyrag_kernels.attention.batch import (
    AttentionLayer,
    Batch,
    Pages,
    RequestRows,
    slot_ranges,
)
from lazyrag_kernels.rope import cos_sin, rotate


def reference_attention(
    q: Tensor, k_pool: Tensor, v_pool: Tensor, batch: Batch, layer: AttentionLayer
) -> Tensor:
    """Attention of every query row over the segments it may see (DESIGN, mathematics).

    Args:
        q: [rows, q_heads, head_dim], raw (not rotated).
        k_pool: [slots, kv_heads, head_dim]; node keys rotated at their local position, live keys at
            their final one.
        v_pool: [slots, kv_heads, head_dim].
        batch: what each request's rows see.
        layer: scale, rotary and window of this layer.

    Returns:
        [rows, q_heads, head_dim] in the dtype of ``q``; computed in fp64 when ``q`` is fp64, in
        fp32 otherwise.
    """
    compute = torch.float64 if q.dtype == torch.float64 else torch.float32
    outputs = []
    first = 0
    for request in batch.requests:
        for row in range(request.rows):
            outputs.append(
                _one_row(
                    q[first + row].to(compute),
                    k_pool.to(compute),
                    v_pool.to(compute),
                    request,
                    row,
                    batch.page_size,
                    layer,
                )
            )
        first += request.rows
    return torch.stack(outputs).to(q.dtype) if outputs else torch.empty_like(q)


def _one_row(
    q: Tensor,  # [q_heads, head_dim]
    k_pool: Tensor,
    v_pool: Tensor,
    request: RequestRows,
    row: int,
    page_size: int,
    layer: AttentionLayer,
) -> Tensor:
    position = int(request.positions[row])
    group = q.shape[0] // k_pool.shape[1]
    scores: list[Tensor] = []
    values: list[Tensor] = []

    def see(
        pages: Pages, length: int, offset: int, key_positions: Tensor, temperature: float = 1.0
    ) -> None:
        if length == 0:
            return
        key_positions = key_positions.to(q.device)
        slots = torch.cat([torch.arange(*slots) for slots in slot_ranges(pages, length, page_size)])
        k = k_pool[slots].repeat_interleave(group, dim=1)  # [length, q_heads, head_dim]
        v = v_pool[slots].repeat_interleave(group, dim=1)  # [length, q_heads, head_dim]
        cos, sin = cos_sin(layer.rotary, torch.tensor(position - offset, device=q.device))
        rotated = rotate(q, cos, sin, layer.rotary.interleaved)  # [q_heads, head_dim]
        score = torch.einsum("hd,lhd->hl", rotated, k) * layer.scale  # [q_heads, length]
        if layer.softcap is not None:
            score = layer.softcap * torch.tanh(score / layer.softcap)
        if layer.alibi is not None:
            score = score + layer.alibi.to(score)[:, None] * (key_positions - position)
        score = score / temperature
        if layer.window is not None:
            hidden = position - key_positions >= layer.window
            score = score.masked_fill(hidden, float("-inf"))
        scores.append(score)
        values.append(v)

    for node in request.nodes:
        if row >= node.first_row:
            where = node.offset + torch.arange(node.length)
            see(node.pages, node.length, node.offset, where, node.temperature)
    if scores and request.lse_scale != 1.0:
        # weight exp(lse_scale * lse) for all nodes together = every score moved by the same amount
        lse = torch.cat(scores, dim=-1).logsumexp(dim=-1, keepdim=True)  # [q_heads, 1]
        moved = torch.where(lse.isfinite(), (request.lse_scale - 1) * lse, 0.0)
        scores = [score + moved for score in scores]
    seen = request.live.first_slot + row + 1
    see(request.live.pages, seen, 0, request.live.positions[:seen])

    if layer.sinks is not None:
        scores.append(layer.sinks.to(q)[:, None])
        values.append(torch.zeros_like(values[-1][:1]))
    weights = torch.cat(scores, dim=-1).softmax(dim=-1)  # [q_heads, keys and sink]
    return torch.einsum("hl,lhd->hd", weights, torch.cat(values))
