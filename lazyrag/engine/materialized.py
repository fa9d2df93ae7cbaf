"""The oracle: every node is copied and its raw keys are rotated to their place.

This is how position-aware block caches work (Block-Attention, arXiv 2409.15355): contiguous KV of
the whole prompt, already rotated, and a plain masked attention over it. Nothing here is shared with
the lazy path but the model seam and the rotation.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from lazyrag_kernels.rope import cos_sin, rotate
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from lazyrag.model.geometry import Geometry
from lazyrag.prompt.segments import PlacedPrompt
from lazyrag.store.format import StoredKV


class MaterializedSequence:
    """A request over its own contiguous copy of every node.

    Args:
        geometry: of the model.
        prompt: placed nodes and live tokens.
        stored: raw KV of each placed node, in prompt order.
        new_tokens: how many tokens may be generated.
        dtype, device: of the copies.
    """

    def __init__(
        self,
        geometry: Geometry,
        prompt: PlacedPrompt,
        stored: Sequence[StoredKV],
        new_tokens: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        node_tokens = sum(node.run.used for node in prompt.nodes)
        capacity = prompt.tokens + new_tokens
        shape = (len(geometry.layers), geometry.kv_heads, capacity, geometry.head_dim)
        self._geometry = geometry
        self._k = torch.zeros(shape, dtype=dtype, device=device)
        self._v = torch.zeros(shape, dtype=dtype, device=device)
        self._key_positions = torch.zeros(capacity, dtype=torch.int64)
        self._first_seen_by = torch.zeros(
            capacity, dtype=torch.int64
        )  # first live row that sees it
        self._live_start = node_tokens
        self._length = 0
        column = 0
        for node, kv in zip(prompt.nodes, stored, strict=True):
            columns = slice(column, column + node.run.used)
            positions = node.offset + torch.arange(node.run.used)
            self._key_positions[columns] = positions
            self._first_seen_by[columns] = node.first_row
            for layer, spec in enumerate(geometry.layers):
                cos, sin = cos_sin(spec.rotary, positions)
                raw = kv.k[layer, : node.run.used].to(dtype)
                rotated = rotate(raw, cos.unsqueeze(1), sin.unsqueeze(1))
                self._k[layer, :, columns] = rotated.transpose(0, 1)
                self._v[layer, :, columns] = kv.v[layer, : node.run.used].transpose(0, 1)
            column = columns.stop
        live = torch.arange(capacity - node_tokens)
        self._first_seen_by[node_tokens:] = live

    def step(self, positions: Sequence[int]) -> MaterializedStep:
        """The attention of a forward pass over the next live tokens."""
        first, self._length = self._length, self._length + len(positions)
        columns = slice(self._live_start + first, self._live_start + self._length)
        where = torch.as_tensor(positions)
        self._key_positions[columns] = where
        rows = torch.arange(first, self._length)
        keys = columns.stop
        seen = self._first_seen_by[:keys] <= rows[:, None]
        return MaterializedStep(
            self._geometry,
            self._k[:, :, :keys],
            self._v[:, :, :keys],
            columns,
            where,
            seen,
            where[:, None] - self._key_positions[:keys],
        )


class MaterializedStep:
    """One forward pass over rotated copies."""

    def __init__(
        self,
        geometry: Geometry,
        k: Tensor,
        v: Tensor,
        columns: slice,
        positions: Tensor,
        seen: Tensor,
        distance: Tensor,
    ) -> None:
        self._geometry = geometry
        self._k, self._v = k, v
        self._columns = columns
        self._positions = positions
        self._seen = seen
        self._distance = distance

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """See `lazyrag.model.seam.AttentionStep`."""
        spec = self._geometry.layers[layer]
        cos, sin = cos_sin(spec.rotary, self._positions.to(q.device))
        self._k[layer, :, self._columns] = rotate(k[0], cos, sin)
        self._v[layer, :, self._columns] = v[0]
        seen = self._seen
        if spec.window is not None:
            seen = seen & (self._distance < spec.window)
        mask = torch.zeros(seen.shape, dtype=q.dtype).masked_fill_(~seen, float("-inf"))
        out = scaled_dot_product_attention(
            rotate(q, cos, sin),
            self._k[layer][None],
            self._v[layer][None],
            attn_mask=mask.to(q.device),
            scale=spec.scale,
            enable_gqa=q.shape[1] != k.shape[1],
        )
        return out.transpose(1, 2)
