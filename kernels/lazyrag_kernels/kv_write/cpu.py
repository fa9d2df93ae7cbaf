"""Write K and V of one layer into the pool."""

from __future__ import annotations

from torch import Tensor

from lazyrag_kernels.rope import rotate


def write_kv(
    k_pool: Tensor,
    v_pool: Tensor,
    k: Tensor,
    v: Tensor,
    slots: Tensor,
    cos: Tensor,
    sin: Tensor,
    interleaved: bool = False,
) -> None:
    """Rotate raw keys once and write keys and values to their slots.

    Args:
        k_pool, v_pool: [slots, kv_heads, head_dim], one layer of the pool, written in place.
        k, v: [tokens, kv_heads, head_dim]; ``k`` is raw (not rotated).
        slots: int64 [tokens], where each token goes; distinct.
        cos, sin: fp32 [tokens, rotary_dim / 2] at the position the key is kept at: the local
            position of a node's token, the final position of live text.
        interleaved: which pairs, see `Rotary`.
    """
    rotated = rotate(k, cos.unsqueeze(1), sin.unsqueeze(1), interleaved)
    k_pool.index_copy_(0, slots, rotated.to(k_pool.dtype))
    v_pool.index_copy_(0, slots, v.to(v_pool.dtype))
