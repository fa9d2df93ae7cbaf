"""Bringing a prompt's nodes into the pool: resident, from disk, or computed now. Never wrong KV."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
from lazyrag_kernels.attention import Pages
from lazyrag_kernels.kv_write import write_kv
from lazyrag_kernels.rope import cos_sin

from lazyrag.engine.encode import Encoder
from lazyrag.engine.library import Library
from lazyrag.engine.pool import PagePool, ResidentNode
from lazyrag.engine.report import Origin, Reason, Tier
from lazyrag.errors import StoreError
from lazyrag.model.geometry import Geometry
from lazyrag.prompt.segments import NodeRun, NodeSource
from lazyrag.store import KVStore, LoadFailure, NewNode, StoredKV
from lazyrag.types import NodeKey

logger = logging.getLogger("lazyrag")


class NodeLoader:
    """Gets nodes from the store, or computes and stores them.

    Args:
        store: on disk.
        encoding: digest of the encoding.
        encoder: computes what the store does not have.
        library: makes a text given with a request findable once it is stored.
    """

    def __init__(self, store: KVStore, encoding: bytes, encoder: Encoder, library: Library) -> None:
        self._store = store
        self._library = library
        self._encoding = encoding
        self._encoder = encoder

    def load(self, run: NodeRun) -> tuple[StoredKV, Origin]:
        """Raw KV of a node, checked, and where it came from.

        Whatever goes wrong in the store, want of memory included, the node is computed anew.
        """
        try:
            stored = self._store.load(run.key, run.ids)
        except (StoreError, OSError, MemoryError) as error:
            logger.warning("node %s is computed anew: %r", run.key, error)
            stored = LoadFailure.UNREADABLE
        if isinstance(stored, StoredKV):
            return stored, Origin(Tier.DISK, stored.nbytes)
        (kv,) = self._encoder.encode([run.ids])
        try:
            self._store.publish(self._encoding, [NewNode(run.key, kv, run.text)])
            if run.text is not None and run.source is NodeSource.GIVEN:
                self._library.register([self._library.describe(run.text, None, alias=False)])
            self._store.sweep([run.key])  # its text may have been released since it was found
        except (StoreError, OSError, MemoryError) as error:
            logger.warning("node %s is used but not stored: %r", run.key, error)
        return kv, Origin(Tier.NONE, 0, _reason(stored, run.source))


def _reason(failure: LoadFailure, source: NodeSource) -> Reason:
    if failure is LoadFailure.ABSENT:
        return {
            NodeSource.INGESTED: Reason.MISSING,
            NodeSource.ALIAS: Reason.FIRST_USE,
            NodeSource.GIVEN: Reason.NOT_STORED,
        }[source]
    return {
        LoadFailure.MISSING: Reason.MISSING,
        LoadFailure.DAMAGED: Reason.DAMAGED,
        LoadFailure.UNREADABLE: Reason.UNREADABLE,
    }[failure]


class Placed(NamedTuple):
    """What a request holds in the pool, and where its nodes came from."""

    nodes: dict[NodeKey, ResidentNode]
    origins: dict[NodeKey, Origin]
    live_pages: Pages


class NodePlacer:
    """Makes nodes resident: raw keys are rotated at their local position, once, into pages."""

    def __init__(self, pool: PagePool, geometry: Geometry, loader: NodeLoader) -> None:
        self._pool = pool
        self._geometry = geometry
        self._loader = loader

    def acquire(
        self, runs: Iterable[NodeRun], live_tokens: int, between: Callable[[], None]
    ) -> Placed | None:
        """Every node resident and in use, and pages for live text.

        Args:
            runs: the nodes; one may occur more than once.
            live_tokens: to make room for.
            between: called before each node that is brought; may raise to give up.

        Returns:
            None, with nothing held and nothing loaded, when the pool has no room.
        """
        pool = self._pool
        held: dict[NodeKey, ResidentNode] = {}
        origins: dict[NodeKey, Origin] = {}
        missing: dict[NodeKey, NodeRun] = {}
        complete = False
        try:
            for run in runs:  # residents first, so that making room cannot evict them
                if run.key in held or run.key in missing:
                    continue
                resident = pool.acquire(run.key)
                if resident is None:
                    missing[run.key] = run
                else:
                    nbytes = resident.tokens * self._geometry.kv_bytes_per_token(pool.k.dtype)
                    held[run.key], origins[run.key] = resident, Origin(Tier.DEVICE, nbytes)
            tokens = (live_tokens, *(len(run.ids) for run in missing.values()))
            if sum(map(pool.pages_for, tokens)) > pool.free_pages + pool.evictable_pages:
                return None
            for run in missing.values():
                between()
                held[run.key], origins[run.key] = self._bring(run)
            pages = pool.allocate(live_tokens)
            assert pages is not None
            complete = True
            return Placed(held, origins, pages)
        finally:
            if not complete:
                for key in held:
                    pool.leave(key)

    def _bring(self, run: NodeRun) -> tuple[ResidentNode, Origin]:
        pages = self._pool.allocate(len(run.ids))
        assert pages is not None
        try:
            kv, origin = self._loader.load(run)
            write_node_kv(self._pool, self._geometry, kv, pages)
        except BaseException:
            self._pool.release(pages)
            raise
        return self._pool.admit(run.key, pages, len(run.ids)), origin


def write_node_kv(pool: PagePool, geometry: Geometry, kv: StoredKV, pages: Pages) -> None:
    """Fill a node's pages: raw keys rotated at their local position (invariant 2), values as is."""
    device = pool.k.device
    slots = pool.slots(pages, 0, len(kv.ids))
    positions = torch.arange(len(kv.ids), device=device)
    k, v = kv.k.to(device, pool.k.dtype), kv.v.to(device, pool.v.dtype)
    tables = {
        rotary: cos_sin(rotary, positions) for rotary in {layer.rotary for layer in geometry.layers}
    }
    for index, layer in enumerate(geometry.layers):
        cos, sin = tables[layer.rotary]
        write_kv(pool.k[index], pool.v[index], k[index], v[index], slots, cos, sin)
