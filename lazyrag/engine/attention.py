"""Which attention a pool is served with: the Triton kernels on a GPU, plain torch elsewhere."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Protocol

import torch
from lazyrag_kernels.attention import Batch, LiveSpan, NodeSpan, RequestRows
from torch import Tensor

from lazyrag.engine.pool import PagePool
from lazyrag.engine.sequence import PagedStep
from lazyrag.model.geometry import Geometry
from lazyrag.model.seam import AttentionStep

if TYPE_CHECKING:
    from lazyrag_kernels.attention.table import Plan

MAX_ROWS = 4096
"""Query tokens of one forward pass, at most."""

logger = logging.getLogger("lazyrag")


class PagedAttention(Protocol):
    """Makes the attention of forward passes over one pool."""

    def step(self, rows: Sequence[tuple[RequestRows, Tensor]]) -> AttentionStep:
        """The attention of one pass.

        Args:
            rows: query rows and their slots, one entry a request; tokens are packed in this order.
        """
        ...


def paged_attention(pool: PagePool, geometry: Geometry, *, scaled: bool = False) -> PagedAttention:
    """The fastest there is for this device, these heads and this dtype.

    Args:
        pool, geometry: of the engine.
        scaled: requests may have a `Scale` (the kernels are compiled for it).
    """
    if pool.k.device.type != "cuda":
        return TorchAttention(pool, geometry)
    try:
        attention = TritonAttention(pool, geometry, scaled=scaled)
        attention.probe()
        return attention
    except Exception as error:  # no compiler, too little shared memory, ...: Triton fails variously
        logger.warning("attention runs in plain torch on this GPU: %s", error)
        return TorchAttention(pool, geometry)


class TorchAttention:
    """`PagedStep`, planned anew for every pass."""

    def __init__(self, pool: PagePool, geometry: Geometry) -> None:
        self._pool = pool
        self._geometry = geometry

    def step(self, rows: Sequence[tuple[RequestRows, Tensor]]) -> AttentionStep:
        """See `PagedAttention`."""
        return PagedStep(self._pool, self._geometry, rows)


class TritonAttention:
    """The kernels of `lazyrag_kernels`; plans and workspace are allocated once.

    Raises:
        ImportError: Triton is not installed.
        ValueError: a head size or dtype no launch can do.
    """

    def __init__(self, pool: PagePool, geometry: Geometry, *, scaled: bool = False) -> None:
        from lazyrag_kernels.attention.step import TritonStep
        from lazyrag_kernels.attention.table import Heads

        heads = Heads(geometry.q_heads, geometry.kv_heads, geometry.head_dim)
        self._pool = pool
        self._layers = geometry.layers
        self._launches = TritonStep(
            heads,
            pool.page_size,
            MAX_ROWS,
            pool.k.dtype,
            pool.k.device,
            temperature=scaled,
            lse_scale=scaled,
        )
        self._planner = self._launches.planner()
        self._loads = 0
        self._windows = sorted({spec.window for spec in self._layers}, key=lambda one: one or 0)

    @property
    def page_size(self) -> int:
        """Of the pool, in tokens."""
        return self._pool.page_size

    def probe(self) -> None:
        """Compile and run every launch once, over the first pages of the pool, which is empty.

        Raises:
            Exception: whatever this GPU, driver or machine cannot do.
        """
        pool = self._pool
        longest = min(pool.capacity, self._launches.classes[-1].rows)
        for length in sorted({1, longest}):
            pages = tuple(range(pool.pages_for(length)))
            live = LiveSpan(pages, torch.arange(length), 0)
            rows = RequestRows(live, (NodeSpan(pages[:1], 1, 0),))
            self.step([(rows, pool.slots(pages, 0, length))])
            heads = self._launches.heads
            q, k = (
                torch.zeros(1, count, length, heads.dim, dtype=pool.k.dtype, device=pool.k.device)
                for count in (heads.q_heads, heads.kv_heads)
            )
            for layer in range(len(self._layers)):
                self.attend(layer, q, k, k).sum().item()

    def step(self, rows: Sequence[tuple[RequestRows, Tensor]]) -> AttentionStep:
        """See `PagedAttention`."""
        device = self._pool.k.device
        with self._on_device():
            self.load(
                self.plan([request for request, _ in rows]),
                torch.cat([slots for _, slots in rows]).to(device),
                torch.cat([request.positions for request, _ in rows]).to(device),
            )
        return self

    def plan(self, requests: Sequence[RequestRows], padded_rows: int | None = None) -> list[Plan]:
        """Plans of one pass, one for each kind of layer.

        Args:
            requests: tokens are packed in this order.
            padded_rows: tokens of a captured pass.
        """
        batch = Batch(tuple(requests), self._pool.page_size)
        return [
            self._planner.plan(batch, window, padded_rows=padded_rows) for window in self._windows
        ]

    def fits(self, plans: Sequence[Plan]) -> bool:
        """Whether captured passes can read plans of this size."""
        return all(self._launches.fits(plan) for plan in plans)

    def load(
        self, plans: Sequence[Plan], slots: Tensor, positions: Tensor, *, fixed: bool = False
    ) -> int:
        """Make ready for `attend`.

        Args:
            plans: of `plan`.
            slots, positions: int32 or int64 [tokens], on the device; a negative slot is padding.
            fixed: into the tables of captured passes.

        Returns:
            A number for `advance`.
        """
        for plan in plans:
            self._launches.load(plan, fixed=fixed)
        self._slots, self._positions = slots, positions
        self._loads += 1
        return self._loads

    def advance(self, loaded: int) -> bool:
        """Bring plans to the next token of the same requests.

        Args:
            loaded: what `load` returned for them.

        Returns:
            False: others were loaded since, or they do not reach that far; plan anew.
        """
        return loaded == self._loads and self._launches.advance()

    def _on_device(self) -> AbstractContextManager[object]:
        """Triton launches on the current GPU, whatever its arguments are on."""
        device = self._pool.k.device
        return torch.cuda.device(device) if device.type == "cuda" else nullcontext()

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """See `lazyrag.model.seam.AttentionStep`; of the pass that was loaded last."""
        from lazyrag_kernels.kv_write.triton import write_step

        spec, pool = self._layers[layer], self._pool
        with self._on_device():
            turned = write_step(
                pool.k[layer],
                pool.v[layer],
                k[0].transpose(0, 1),
                v[0].transpose(0, 1),
                self._slots,
                self._positions,
                spec.rotary,
                self._launches.angles(spec.rotary),
                pool.page_size,
                q=q[0].transpose(0, 1),
            )
            assert turned is not None
            return self._launches.attend(turned, pool.k[layer], pool.v[layer], spec)[None]
