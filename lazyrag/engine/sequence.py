"""One running request: where its tokens lie, and the step its next forward pass attends with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from lazyrag_kernels.attention import Batch, CpuStep, LiveSpan, NodeSpan, Pages, RequestRows
from lazyrag_kernels.kv_write import write_kv
from lazyrag_kernels.rope import Rotary, cos_sin
from torch import Tensor

from lazyrag.engine.pool import PagePool
from lazyrag.model.geometry import Geometry


@dataclass(frozen=True, slots=True)
class SeenNode:
    """A resident node at its place in this request."""

    pages: Pages
    length: int
    offset: int
    first_row: int


class PagedSequence:
    """A request over the pool: nodes shared with others, live pages of its own.

    Args:
        pool: of the engine.
        nodes: in prompt order.
        live_pages: for ``live_capacity`` tokens.
        live_capacity: live tokens at most.
        temperature, lse_scale: of attention to the nodes, see `NodeSpan` and `RequestRows`.
    """

    def __init__(
        self,
        pool: PagePool,
        nodes: Sequence[SeenNode],
        live_pages: Pages,
        live_capacity: int,
        temperature: float = 1.0,
        lse_scale: float = 1.0,
    ) -> None:
        self.nodes = nodes
        self._lse_scale = lse_scale
        self._seen = tuple(
            NodeSpan(node.pages, node.length, node.offset, temperature=temperature)
            for node in nodes
        )
        self._last_first_row = max((node.first_row for node in nodes), default=0)
        self.live_pages = live_pages
        self._positions = torch.empty(live_capacity, dtype=torch.int64)
        self._slots = pool.slots(live_pages, 0, live_capacity)
        self._length = 0

    def rows(self, positions: Sequence[int]) -> tuple[RequestRows, Tensor]:
        """The next ``len(positions)`` live tokens as query rows, and their slots."""
        first, self._length = self._length, self._length + len(positions)
        self._positions[first : self._length] = torch.as_tensor(positions)
        live = LiveSpan(self.live_pages, self._positions[: self._length], first)
        nodes = self._seen  # the same tuple for every row behind the last node
        if first < self._last_first_row:
            nodes = tuple(
                replace(seen, first_row=max(0, node.first_row - first))
                for seen, node in zip(self._seen, self.nodes, strict=True)
            )
        return RequestRows(live, nodes, self._lse_scale), self._slots[first : self._length]

    @property
    def length(self) -> int:
        """Live tokens so far, those of the step being planned included."""
        return self._length

    def rewind(self, length: int) -> None:
        """Forget the live tokens from number ``length`` on; others take their slots.

        Raises:
            ValueError: there are fewer.
        """
        if not 0 <= length <= self._length:
            raise ValueError(f"{length} of {self._length} live tokens cannot be kept")
        self._length = length


class PagedStep:
    """One forward pass: write live K and V into pages, attend lazily over everything visible.

    Args:
        pool, geometry: of the engine.
        rows: query rows and their slots, one entry a request; tokens are packed in this order.
    """

    def __init__(
        self, pool: PagePool, geometry: Geometry, rows: Sequence[tuple[RequestRows, Tensor]]
    ) -> None:
        batch = Batch(tuple(request for request, _ in rows), pool.page_size)
        self._pool = pool
        self._layers = geometry.layers
        self._slots = torch.cat([slots for _, slots in rows])
        self._positions = torch.cat([request.positions for request in batch.requests])
        self._attention = CpuStep(batch, geometry.q_heads, geometry.head_dim)
        self._tables: dict[Rotary, tuple[Tensor, Tensor]] = {}

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """See `lazyrag.model.seam.AttentionStep`; one packed sequence."""
        spec = self._layers[layer]
        if spec.rotary not in self._tables:
            self._tables[spec.rotary] = cos_sin(spec.rotary, self._positions.to(q.device))
        k_pool, v_pool = self._pool.k[layer], self._pool.v[layer]
        k, v = k[0].transpose(0, 1), v[0].transpose(0, 1)
        write_kv(k_pool, v_pool, k, v, self._slots, *self._tables[spec.rotary])
        return self._attention.attend(q[0].transpose(0, 1), k_pool, v_pool, spec)[None]
