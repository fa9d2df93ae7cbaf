"""Dense causal attention for ingestion: many nodes at once, each behind the same prefix."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention

from lazyrag_kernels.attention.batch import AttentionLayer
from lazyrag_kernels.rope import cos_sin, rotate


def attend_behind_prefix(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    prefix: tuple[Tensor, Tensor] | None,
    layer: AttentionLayer,
) -> Tensor:
    """Causal attention of right-padded sequences that all start behind one prefix (the sink).

    Args:
        q: [sequences, q_heads, tokens, head_dim], raw.
        k, v: [sequences, kv_heads, tokens, head_dim], raw.
        prefix: raw K and V of the prefix, each [kv_heads, prefix_tokens, head_dim]; None = none.
        layer: scale, rotary and window.

    Returns:
        [sequences, q_heads, tokens, head_dim]. Padding on the right needs no mask: no token sees
        what stands behind it.
    """
    layer.refuse_unless_plain("dense attention")
    before = 0 if prefix is None else prefix[0].shape[1]
    if prefix is not None:
        k, v = (
            torch.cat((old.to(new.dtype).expand(new.shape[0], -1, -1, -1), new), dim=2)
            for old, new in zip(prefix, (k, v), strict=True)
        )
    positions = torch.arange(k.shape[2], device=q.device)
    cos, sin = cos_sin(layer.rotary, positions)
    mask: Tensor | None = None
    fused = q.device.type == "cuda" and q.dtype in (torch.float16, torch.bfloat16)
    if before and layer.window is None and fused:
        mask = causal_lower_right(q.shape[2], k.shape[2])  # says which, and takes no memory
    elif before or layer.window is not None:
        distance = positions[before:, None] - positions[None, :]  # [tokens, prefix + tokens]
        seen = distance >= 0
        if layer.window is not None:
            seen &= distance < layer.window
        mask = torch.zeros(seen.shape, dtype=q.dtype, device=q.device)
        mask.masked_fill_(~seen, float("-inf"))
    return scaled_dot_product_attention(
        rotate(q, cos[before:], sin[before:], layer.rotary.interleaved),
        rotate(k, cos, sin, layer.rotary.interleaved),
        v,
        attn_mask=mask,
        is_causal=mask is None,
        scale=layer.scale,
        enable_gqa=q.shape[1] != k.shape[1],
    )
