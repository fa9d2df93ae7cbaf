"""One running request: where its tokens lie, and the step its next forward pass attends with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from lazyrag_kernels.attention import Batch, CpuStep, LiveSpan, NodeSpan, Pages, RequestRows
from lazyrag_kernels.kv_write import write_kv
from lazyrag_kernels.rope import Rotary, cos_sin
from torch import Tensor

from lazyrag.engine.live import LiveKey, LiveNames
from lazyrag.engine.pool import PagePool
from lazyrag.model.geometry import Geometry
from lazyrag.quality.scale import PLAIN, Scale


@dataclass(frozen=True, slots=True)
class SeenNode:
    """A resident node at its place in this request."""

    pages: Pages
    length: int
    offset: int
    first_row: int


class PagedSequence:
    """A request over the pool: nodes and leading live pages shared with others, the rest its own.

    Args:
        pool: holds them all.
        nodes: what the prompt sees, in order.
        live_pages: of all live text, the shared ones first.
        live_capacity: most live tokens.
        names: names the live pages from the first one that is not shared; None = others get none.
        shared: how many leading pages were computed by earlier requests.
        positions: of the tokens in those.
        scale: of attention to the nodes; ``names`` are those of the same.
    """

    def __init__(
        self,
        pool: PagePool,
        nodes: Sequence[SeenNode],
        live_pages: Pages,
        live_capacity: int,
        names: LiveNames | None = None,
        shared: int = 0,
        positions: Sequence[int] = (),
        *,
        scale: Scale = PLAIN,
    ) -> None:
        self._pool = pool
        self.nodes = nodes
        self._lse_scale = scale.lse_scale
        self._seen = tuple(
            NodeSpan(node.pages, node.length, node.offset, temperature=scale.temperature)
            for node in nodes
        )
        self._last_first_row = max((node.first_row for node in nodes), default=0)
        self._names = names
        self._full_pages = shared
        self._published: list[LiveKey] = []
        self._own = dict.fromkeys(live_pages[shared:])
        self.live_pages = live_pages
        self.reused = len(positions)
        self.released = False
        self._positions = torch.empty(live_capacity, dtype=torch.int64)
        self._where = self._positions.numpy()  # the same memory
        self._where[: self.reused] = positions
        self._slots = pool.host_slots(live_pages, 0, live_capacity)
        self._length = self.reused

    def rows(self, positions: Sequence[int]) -> tuple[RequestRows, Tensor]:
        """The next ``len(positions)`` live tokens as query rows, and their slots (on the host)."""
        first, self._length = self._length, self._length + len(positions)
        self._where[first : self._length] = positions
        live = LiveSpan(self.live_pages, self._positions[: self._length], first)
        nodes = self._seen  # the same tuple for every row behind the last node
        if first < self._last_first_row:
            nodes = tuple(
                replace(seen, first_row=max(0, node.first_row - first))
                for seen, node in zip(self._seen, self.nodes, strict=True)
            )
        return RequestRows(live, nodes, self._lse_scale), self._slots[first : self._length]

    @property
    def capacity(self) -> int:
        """Most live tokens."""
        return self._positions.numel()

    @property
    def positions(self) -> list[int]:
        """Of the live tokens so far."""
        positions: list[int] = self._where[: self._length].tolist()
        return positions

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

    def extend(self, position: int) -> None:
        """Count one more live token, in a pass that needs no new plan."""
        self._where[self._length] = position
        self._length += 1

    def computed(self, ids: Sequence[int], positions: Sequence[int]) -> None:
        """Live tokens were computed: full pages of them serve later requests as well.

        That is no use yet. Until it is used again, a page stays in free room only.
        """
        for name in self._names.extend(ids, positions) if self._names is not None else ():
            page = self.live_pages[self._full_pages]
            self._full_pages += 1
            if name not in self._pool:
                self._pool.admit(name, (page,), self._pool.page_size)
                self._published.append(name)
                del self._own[page]

    def distrust(self) -> None:
        """Something came out wrong: nothing that was computed here serves later requests."""
        self._names = None
        for name in self._published:
            self._pool.drop(name)

    def release(self) -> None:
        """Give the request's own pages back; what serves others is only left.

        A pass over them may still run: whoever gets them writes behind it.
        """
        self.released = True
        self._pool.release(tuple(self._own))
        for name in reversed(self._published):  # the first pages serve the most requests
            self._pool.leave(name)


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
        self._slots = torch.cat([slots for _, slots in rows]).to(pool.k.device)
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
        interleaved = spec.rotary.interleaved
        write_kv(k_pool, v_pool, k, v, self._slots, *self._tables[spec.rotary], interleaved)
        return self._attention.attend(q[0].transpose(0, 1), k_pool, v_pool, spec)[None]
