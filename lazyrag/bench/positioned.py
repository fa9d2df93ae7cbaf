"""A position-aware cache in the engine: a node lies in the pool once for every place it is used at.

As Block-Attention has it (arXiv 2409.15355): keys lie rotated at their place, and a node that is
asked at another place is copied and its keys are turned on. Requests, pool, eviction, tiers and
forward pass are those of the engine. A prompt sees a copy under a key that its place is part of, at
offset 0; the store and host memory know the node alone.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import Any

import torch
from lazyrag_kernels.rope import AngleTable, cos_sin, rotate

from lazyrag.engine.live import LiveKey
from lazyrag.engine.nodes import Arrival, NodePlacer, Placed
from lazyrag.engine.pool import PagePool
from lazyrag.engine.report import Origin, Tier
from lazyrag.engine.request import Request
from lazyrag.model.geometry import Geometry
from lazyrag.prompt.segments import NodeRun, PlacedNode
from lazyrag.types import NodeKey


@dataclass(frozen=True, slots=True)
class PositionedKey(NodeKey):
    """A node at one place; the digest is of both.

    Attributes:
        node: whose KV.
        offset: position of its first token.
    """

    node: NodeKey
    offset: int

    @classmethod
    def of(cls, node: NodeKey, offset: int) -> PositionedKey:
        """The key of a node at a place."""
        place = struct.pack("<q", offset)
        return cls(blake2b(node.digest + place, digest_size=32).digest(), node, offset)


def positioned(request: Request) -> Request:
    """The same request over copies at their places."""

    def at(run: NodeRun, offset: int) -> NodeRun:
        return replace(run, key=PositionedKey.of(run.key, offset))

    nodes = tuple(
        PlacedNode(at(node.run, node.offset), 0, node.first_row) for node in request.prompt.nodes
    )
    known = tuple(replace(one, run=at(one.run, one.offset)) for one in request.known)
    return replace(request, prompt=replace(request.prompt, nodes=nodes), known=known)


@dataclass(frozen=True, slots=True, eq=False)
class _Source:
    """Where a missing copy is made from; in use until then.

    Attributes:
        key: another copy.
        arrival: its own way into the pool; None = it is there.
    """

    key: PositionedKey
    arrival: Arrival | None


class PositionedPlacer(NodePlacer):
    """Places nodes as `NodePlacer`, and copies of them under a `PositionedKey`.

    A missing copy is made from any other copy of the node that is in the pool or on its way there;
    without one it is brought as the node itself would be. Arguments are those of `NodePlacer`.

    Attributes:
        copied_tokens: of nodes that were copied within the pool so far.
    """

    copied_tokens = 0

    def __init__(self, pool: PagePool, geometry: Geometry, *rest: Any) -> None:
        super().__init__(pool, geometry, *rest)
        self._mover = Mover(pool, geometry)
        self._copies: dict[NodeKey, dict[PositionedKey, None]] = {}  # some may have gone
        self._sources: dict[PositionedKey, _Source] = {}  # of copies that are not made yet

    def acquire(
        self,
        runs: Sequence[NodeRun],
        live_names: Sequence[LiveKey],
        live_tokens: int,
        priority: int = 0,
    ) -> Placed | None:
        """See `NodePlacer`. What missing copies are made from is not evicted for them, unless that
        is all there is.
        """
        missing = [
            run.key
            for run in runs
            if isinstance(run.key, PositionedKey) and run.key not in self._pool
        ]
        held = [source for key in missing if (source := self._ready_source(key)) is not None]
        for key in held:
            self._pool.acquire(key)
        try:
            placed = super().acquire(runs, live_names, live_tokens, priority)
            if placed is not None:
                self._make_copies()
        finally:
            for key in held:
                self._pool.leave(key)
        if placed is None and held:
            placed = super().acquire(runs, live_names, live_tokens, priority)
            self._make_copies()
        return placed

    def leave(self, placed: Placed) -> None:
        """See `NodePlacer`; what a copy that nobody waits for would be made from is left, too."""
        super().leave(placed)
        for key in placed.nodes:
            if isinstance(key, PositionedKey) and key not in self._pool:
                self._leave_source(key)

    def ahead(self, run: NodeRun) -> bool:
        """See `NodePlacer`; a node that can be copied need not be read."""
        copies = list(self._copies.get(self._stored(run).key, ()))
        return any(copy in self._pool for copy in copies) or super().ahead(run)

    def others(self, key: PositionedKey) -> list[PositionedKey]:
        """Copies of the same node for other places that are in the pool."""
        copies = self._copies.get(key.node, {})
        return [
            copy
            for copy in copies
            if copy != key and copy in self._pool and self._pool.entry(copy).ready
        ]

    def goes(self, key: PositionedKey) -> None:
        """A copy leaves the pool: one that stays alone is worth what the node is worth."""
        self._copies.get(key.node, {}).pop(key, None)
        if len(others := self.others(key)) == 1:
            self._pool.reprice(others[0])

    def place(self, until: float) -> bool:
        """See `NodePlacer`."""
        moved = super().place(until)
        return self._make_copies() or moved

    def _begin(self, arrival: Arrival) -> None:
        key = arrival.key
        if not isinstance(key, PositionedKey):
            super()._begin(arrival)
            return
        source = self._ready_source(key) or self._arriving_source(key)
        self._copies.setdefault(key.node, {})[key] = None
        if source is None:
            super()._begin(arrival)
            return
        self._pool.acquire(source)
        begun = self._arriving.get(source)
        if begun is not None:
            begun.urgency = min(begun.urgency, arrival.urgency)
        self._sources[key] = _Source(source, begun)

    def _make_copies(self) -> bool:
        """Make the copies whose sources are there; whether there were any."""
        made: list[tuple[PositionedKey, _Source]] = []
        for key, source in list(self._sources.items()):
            arrival = self._arriving[key]
            if self._pool.entry(source.key).ready:
                made.append((key, source))
            elif source.arrival is not None and source.arrival.error is not None:
                self._leave_source(key)
                super()._begin(arrival)
        if made:
            self._copy(made)
        return bool(made)

    def _copy(self, made: Sequence[tuple[PositionedKey, _Source]]) -> None:
        pool, moves = self._pool, []
        for key, source in made:
            entry = pool.entry(key)
            slots = [
                pool.host_slots(pages, 0, entry.tokens)
                for pages in (pool.entry(source.key).pages, entry.pages)
            ]
            turn = torch.full((entry.tokens,), key.offset - source.key.offset)
            moves.append(torch.stack((*slots, turn)))
            self.copied_tokens += entry.tokens
        self._mover.move(torch.cat(moves, dim=1))
        for key, source in made:
            entry = pool.entry(key)
            entry.ready = True
            arrival = self._arriving.pop(key)
            nbytes = entry.tokens * self._geometry.kv_bytes_per_token(pool.k.dtype)
            if source.arrival is None:
                arrival.origin = Origin(Tier.DEVICE, nbytes)
            else:
                arrival.origin = source.arrival.origin
            self._fetcher.settled(key.node)
            self._leave_source(key)

    def _leave_source(self, key: PositionedKey) -> None:
        if (source := self._sources.pop(key, None)) is not None:
            self._leave(source.key)
            if source.key not in self._pool:  # it was itself to be copied
                self._leave_source(source.key)

    def _ready_source(self, key: PositionedKey) -> PositionedKey | None:
        """Another copy that is in the pool."""
        copies = self._copies.get(key.node, {})
        for gone in [copy for copy in copies if copy not in self._pool]:
            del copies[gone]
        return next((copy for copy in copies if self._pool.entry(copy).ready), None)

    def _arriving_source(self, key: PositionedKey) -> PositionedKey | None:
        """Another copy whose way into the pool has begun: no two wait for each other."""
        for copy in self._copies.get(key.node, {}):
            begun = self._arriving.get(copy)
            if begun is None or begun.error is not None:
                continue
            if begun.fetch is not None or begun.reason is not None or copy in self._sources:
                return copy
        return None

    def _stored(self, run: NodeRun) -> NodeRun:
        return replace(run, key=run.key.node) if isinstance(run.key, PositionedKey) else run

    def _first_position(self, key: NodeKey) -> int:
        return key.offset if isinstance(key, PositionedKey) else 0

    def _drop(self, key: NodeKey) -> None:
        super()._drop(key)
        for copy in self._copies.pop(key, {}):
            self._pool.drop(copy)


class Mover:
    """Copies tokens within a pool and turns their keys on.

    Args:
        pool, geometry: of the engine.
    """

    def __init__(self, pool: PagePool, geometry: Geometry) -> None:
        self._pool = pool
        self._layers = geometry.layers
        self._angles: AngleTable | None = None
        if pool.k.is_cuda:
            (self._rotary,) = {layer.rotary for layer in geometry.layers}
            limit = geometry.max_positions
            self._angles = AngleTable.build(self._rotary, limit, pool.k.device)

    def move(self, moves: torch.Tensor) -> None:
        """One launch for all layers on a GPU.

        Args:
            moves: int64 [3, tokens] on the host: slot to copy from, slot to copy to, positions to
                turn on by (may be negative). No slot is both.
        """
        pool = self._pool
        if self._angles is not None:
            from lazyrag.bench.relocate import relocate

            where = moves.pin_memory().to(pool.k.device, non_blocking=True)
            relocate(pool.k, pool.v, where, self._rotary, self._angles)
            return
        source, target, turn = moves.to(pool.k.device)
        for index, layer in enumerate(self._layers):
            cos, sin = cos_sin(layer.rotary, turn[:, None])
            keys = pool.k[index, source]
            pool.k[index, target] = rotate(keys, cos, sin, layer.rotary.interleaved)
            pool.v[index, target] = pool.v[index, source]
