"""Lazy attention in plain torch: no node's K or V is copied, the query is rotated per segment.

Made for the CPU; it runs on any device torch knows, and is the path wherever no kernel is.

A step is planned once (`CpuStep`) and used by every layer. Rows are cut into tiles, so that the
scores of a tile stay small however long the prompt is. Per tile there is one batched product for
each contiguous slot range, one softmax over all keys, and one batched product per range that
accumulates the output:

    scores  [kv_heads, tile_rows * group, keys]      keys = node ranges, then live ranges; the
                                                     tile's own tokens are the last columns

A node's temperature is a factor on its rotated query; the group scale moves all node columns of a
row by the same amount (see `lazyrag_kernels.attention.reference`).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lazyrag_kernels.attention.batch import AttentionLayer, Batch, RequestRows, slot_ranges
from lazyrag_kernels.rope import Rotary, cos_sin, rotate

TILE_BYTES = 32 * 2**20
"""Upper bound of one tile's scores and rotated queries (a tile has at least one row)."""
MAX_TILE_ROWS = 256
"""Longer tiles would compute more masked scores above the causal diagonal."""


@dataclass(frozen=True, slots=True)
class _Range:
    """Contiguous slots of one segment, and where their scores go."""

    segment: int
    slots: slice
    columns: slice
    first_row: int


@dataclass(frozen=True, slots=True, eq=False)
class _Tile:
    """A run of rows of one request."""

    rows: slice
    positions: Tensor  # int64 [tile_rows]
    offsets: Tensor  # int64 [segments]; live text is the last segment, offset 0
    ranges: tuple[_Range, ...]
    keys: int
    key_positions: Tensor  # int64 [keys]
    node_keys: int  # the first columns
    sharpness: Tensor | None  # fp32 [segments], 1 / temperature; None = all 1
    lse_scale: float


class CpuStep:
    """One step's attention, planned once and run for every layer.

    Args:
        batch: requests, segments, pages.
        q_heads, head_dim: of the queries (they bound the tile size).
    """

    def __init__(self, batch: Batch, q_heads: int, head_dim: int) -> None:
        self._tiles: list[_Tile] = []
        self._tables: dict[Rotary, list[tuple[Tensor, Tensor]]] = {}
        self._masks: dict[int | None, list[Tensor | None]] = {}
        first = 0
        for request in batch.requests:
            self._tiles += _tiles(request, first, batch.page_size, q_heads, head_dim)
            first += request.rows

    def attend(self, q: Tensor, k_pool: Tensor, v_pool: Tensor, layer: AttentionLayer) -> Tensor:
        """Attention of all rows over one layer's pool.

        Args:
            q: [rows, q_heads, head_dim], raw.
            k_pool, v_pool: [slots, kv_heads, head_dim]; this step's live K and V already written.
            layer: scale, rotary and window.

        Returns:
            [rows, q_heads, head_dim].
        """
        layer.refuse_unless_plain("the torch path")
        out = torch.empty_like(q)
        tables = self._tables_for(layer.rotary, q.device)
        masks = self._masks_for(layer.window, q.device)
        for tile, (cos, sin), mask in zip(self._tiles, tables, masks, strict=True):
            _attend_tile(tile, q[tile.rows], k_pool, v_pool, cos, sin, mask, layer, out[tile.rows])
        return out

    def _tables_for(self, rotary: Rotary, device: torch.device) -> list[tuple[Tensor, Tensor]]:
        if rotary not in self._tables:
            self._tables[rotary] = [
                cos_sin(rotary, (tile.positions[None, :] - tile.offsets[:, None]).to(device))
                for tile in self._tiles
            ]
        return self._tables[rotary]

    def _masks_for(self, window: int | None, device: torch.device) -> list[Tensor | None]:
        if window not in self._masks:
            hidden = [_hidden(tile, window) for tile in self._tiles]
            self._masks[window] = [None if mask is None else mask.to(device) for mask in hidden]
        return self._masks[window]


def _tiles(
    request: RequestRows, first: int, page_size: int, q_heads: int, head_dim: int
) -> list[_Tile]:
    live = request.live
    nodes = [node for node in request.nodes if node.length]
    offsets = torch.tensor([node.offset for node in nodes] + [0])
    sharpness = None
    if any(node.temperature != 1.0 for node in nodes):
        sharpness = torch.tensor([1 / node.temperature for node in nodes] + [1.0])
    keys = sum(node.length for node in nodes) + live.length
    row_bytes = 4 * q_heads * (keys + offsets.numel() * head_dim)  # scores and rotated queries
    tile_rows = max(1, min(MAX_TILE_ROWS, TILE_BYTES // row_bytes))
    tiles = []
    for start in range(0, request.rows, tile_rows):
        stop = min(start + tile_rows, request.rows)
        live_length = live.first_slot + stop  # what the last row of the tile sees
        # (pages, length, first row of the tile that sees it, key positions) per segment
        segments = [
            (
                node.pages,
                node.length if node.first_row < stop else 0,
                max(0, node.first_row - start),
                node.offset + torch.arange(node.length if node.first_row < stop else 0),
            )
            for node in nodes
        ]
        segments.append((live.pages, live_length, 0, live.positions[:live_length]))
        ranges: list[_Range] = []
        column = 0
        for segment, (pages, length, first_row, _) in enumerate(segments):
            for low, high in slot_ranges(pages, length, page_size):
                columns = slice(column, column + high - low)
                ranges.append(_Range(segment, slice(low, high), columns, first_row))
                column += high - low
        tiles.append(
            _Tile(
                rows=slice(first + start, first + stop),
                positions=request.positions[start:stop],
                offsets=offsets,
                ranges=tuple(ranges),
                keys=column,
                key_positions=torch.cat([positions for *_, positions in segments]),
                node_keys=column - live_length,
                sharpness=sharpness,
                lse_scale=request.lse_scale,
            )
        )
    return tiles


def _hidden(tile: _Tile, window: int | None) -> Tensor | None:
    """Bool [tile_rows, columns]: keys a row must not see, for the last columns of the tile.

    Without a window these are the tile's own live tokens (causality): every row sees all columns
    before them. With a window all columns are listed. None when there is nothing to hide.
    """
    rows = tile.positions.numel()
    causal = torch.ones(rows, rows, dtype=torch.bool).triu(1)
    if window is None:
        return causal if rows > 1 else None
    hidden = tile.positions[:, None] - tile.key_positions[None, :] >= window
    hidden[:, -rows:] |= causal
    return hidden


def _attend_tile(
    tile: _Tile,
    q: Tensor,  # [rows, q_heads, head_dim]
    k_pool: Tensor,
    v_pool: Tensor,
    cos: Tensor,  # [segments, rows, rotary_dim / 2]
    sin: Tensor,
    hidden: Tensor | None,
    layer: AttentionLayer,
    out: Tensor,
) -> None:
    rows, q_heads = q.shape[:2]
    kv_heads = k_pool.shape[1]
    group = q_heads // kv_heads
    # [segments, rows, q_heads, head_dim] -> [segments, kv_heads, rows * group, head_dim]
    scaled = q.float() * layer.scale
    rotated = rotate(scaled, cos.unsqueeze(2), sin.unsqueeze(2), layer.rotary.interleaved)
    if tile.sharpness is not None:
        rotated = rotated * tile.sharpness.to(rotated.device)[:, None, None, None]
    rotated = rotated.to(q.dtype)
    rotated = rotated.unflatten(2, (kv_heads, group)).permute(0, 2, 1, 3, 4).flatten(2, 3)
    parts = []
    for span in tile.ranges:
        k = k_pool[span.slots].permute(1, 2, 0)  # [kv_heads, head_dim, slots], a view
        part = torch.bmm(rotated[span.segment], k)
        part[:, : span.first_row * group] = float("-inf")  # rows of the tile before the node
        parts.append(part)
    scores = parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)
    if hidden is not None:
        by_row = scores[:, :, -hidden.shape[1] :].unflatten(1, (rows, group))
        by_row.masked_fill_(hidden[:, None], float("-inf"))
    if tile.lse_scale != 1.0 and tile.node_keys:
        _scale_nodes(scores[:, :, : tile.node_keys], tile.lse_scale)
    weights = torch.softmax(scores, dim=-1, out=scores)
    sums = torch.zeros_like(rotated[0], dtype=torch.float32)  # rounded once, however many ranges
    for span in tile.ranges:
        v = v_pool[span.slots].permute(1, 0, 2)  # [kv_heads, slots, head_dim], a view
        if v.dtype == torch.float32:
            sums.baddbmm_(weights[:, :, span.columns], v)
        else:
            sums += torch.bmm(weights[:, :, span.columns], v)
    out.copy_(sums.unflatten(1, (rows, group)).permute(1, 0, 2, 3).flatten(1, 2))


def _scale_nodes(scores: Tensor, lse_scale: float) -> None:
    """Make the log-sum-exp of each row ``lse_scale`` times what it is; a row of -inf stays.

    Args:
        scores: [kv_heads, rows * group, node keys], changed in place.
        lse_scale: see `RequestRows`.
    """
    lse = scores.float().logsumexp(dim=-1, keepdim=True)
    scores += torch.where(lse.isfinite(), (lse_scale - 1) * lse, 0.0).to(scores.dtype)
