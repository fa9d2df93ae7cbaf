"""Filling pages with nodes: raw keys are rotated at their local position (invariant 2)."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Sequence
from functools import partial

import torch
from lazyrag_kernels.attention import Pages
from lazyrag_kernels.kv_write import write_kv
from lazyrag_kernels.rope import AngleTable, Rotary, cos_sin
from lazyrag_kernels.staging import send
from torch import Tensor

from lazyrag.engine.pool import PagePool
from lazyrag.model.geometry import Geometry

logger = logging.getLogger("lazyrag")

_Write = Callable[[Tensor, Tensor, Tensor, Tensor], None]
"""Of all layers raw k and v [layers, tokens, kv_heads, head_dim], slots and positions [tokens]."""


class PageFiller:
    """Writes nodes into the pages of one pool.

    On a GPU it is one launch a node (for each run of layers that rotate alike), in line behind the
    passes that were launched before; the host waits for none of them.

    Args:
        pool: of pages.
        geometry: of the model.
    """

    def __init__(self, pool: PagePool, geometry: Geometry) -> None:
        self._pool = pool
        self._write: _Write = partial(_write_plainly, pool, geometry)
        if pool.k.is_cuda:
            try:
                write = TritonWrite(pool, geometry)
                write.probe()
                self._write = write
            except Exception as error:  # as with attention: Triton fails variously
                logger.warning("nodes are written by plain torch on this GPU: %s", error)

    def fill(self, k: Tensor, v: Tensor, pages: Pages, first: int = 0) -> None:
        """One node.

        Args:
            k, v: [layers, tokens, kv_heads, head_dim]; ``k`` is raw (not rotated).
            pages: of the node.
            first: position of the first token; 0 but for copies that stand at one place only.
        """
        self.fill_all(k, v, [(pages, k.shape[1])], first)

    def fill_all(
        self, k: Tensor, v: Tensor, places: Sequence[tuple[Pages, int]], first: int = 0
    ) -> None:
        """Several nodes.

        Args:
            k, v: [layers, tokens, kv_heads, head_dim], one node after the other.
            places: pages and tokens of each.
            first: position of the first token of each.
        """
        pool, device = self._pool, self._pool.k.device
        slots = torch.cat([pool.host_slots(pages, 0, tokens) for pages, tokens in places])
        positions = torch.cat([torch.arange(first, first + tokens) for _, tokens in places])
        where = torch.empty(2, len(slots), dtype=torch.int32, device=device)
        send((slots.numpy(), positions.numpy()), where.view(-1))
        k, v = (x.to(device, non_blocking=True) for x in (k, v))
        self._write(k, v, *where)


def _write_plainly(
    pool: PagePool, geometry: Geometry, k: Tensor, v: Tensor, slots: Tensor, positions: Tensor
) -> None:
    k, v, slots = k.to(pool.k.dtype), v.to(pool.v.dtype), slots.long()
    tables = {
        rotary: cos_sin(rotary, positions.long())
        for rotary in {layer.rotary for layer in geometry.layers}
    }
    for index, layer in enumerate(geometry.layers):
        write_kv(
            pool.k[index],
            pool.v[index],
            k[index],
            v[index],
            slots,
            *tables[layer.rotary],
            layer.rotary.interleaved,
        )


class TritonWrite:
    """Writes nodes by a kernel; see `PageFiller` for the arguments."""

    def __init__(self, pool: PagePool, geometry: Geometry) -> None:
        self._pool = pool
        layers = itertools.groupby(
            range(len(geometry.layers)), key=lambda index: geometry.layers[index].rotary
        )
        self._runs = [(rotary, list(numbers)) for rotary, numbers in layers]
        self._angles: dict[Rotary, AngleTable] = {
            rotary: AngleTable.build(rotary, geometry.max_positions, pool.k.device)
            for rotary, _ in self._runs
        }

    def probe(self) -> None:
        """Compile and run every launch once, into the first slot of the pool, which is empty."""
        pool = self._pool
        nothing = torch.zeros_like(pool.k[:, :1])
        where = torch.zeros(1, dtype=torch.int32, device=pool.k.device)
        self(nothing, nothing, where, where)
        pool.k[0, 0].sum().item()

    def __call__(self, k: Tensor, v: Tensor, slots: Tensor, positions: Tensor) -> None:
        from lazyrag_kernels.kv_write.triton import write_layers

        pool = self._pool
        with torch.cuda.device_of(pool.k):
            for rotary, layers in self._runs:
                here = slice(layers[0], layers[-1] + 1)
                write_layers(
                    pool.k[here],
                    pool.v[here],
                    k[here],
                    v[here],
                    slots,
                    positions,
                    rotary,
                    self._angles[rotary],
                    pool.page_size,
                )
