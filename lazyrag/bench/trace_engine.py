"""The engine in four modes, with tiers that can be emptied and filled between runs."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lazyrag.bench.positioned import PositionedKey, PositionedPlacer, positioned
from lazyrag.bench.trace_settings import Mode
from lazyrag.engine.compute import NodeComputer
from lazyrag.engine.engine import Engine
from lazyrag.engine.fetch import Fetcher
from lazyrag.engine.live import LiveKey
from lazyrag.engine.nodes import NodePlacer, Placed
from lazyrag.engine.pool import PageKey
from lazyrag.engine.request import Request
from lazyrag.prompt.segments import NodeRun
from lazyrag.types import GenerationOptions, NodeText, Prompt, Reference


class _Placer(PositionedPlacer):
    """Nodes in any mode."""

    mode = Mode.LAZY

    def acquire(
        self,
        runs: Sequence[NodeRun],
        live_names: Sequence[LiveKey],
        live_tokens: int,
        priority: int = 0,
    ) -> Placed | None:
        """See `NodePlacer`."""
        known = () if self.mode is Mode.FULL else live_names
        placed = super().acquire(runs, known, live_tokens, priority)
        if placed is not None and self.mode is Mode.PREFIX:
            # As with nodes: asked for is used, be it there or not. Else live text that is new never
            # takes the place of what was used, which suits questions, not documents.
            self._pool.touch(live_names[len(placed.live_names) :])
        return placed


COPIED_BYTES_PER_S = 4e12
"""Read and written when a copy is made within the device."""


class TraceEngine(Engine):
    """An engine whose mode and budgets change between runs. Arguments are those of `Engine`.

    Attributes:
        mode: of requests from now on; see `start_anew`.
    """

    mode = Mode.LAZY
    _placer: _Placer

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self._reserved: tuple[int, ...] = ()
        self._encode_speed: tuple[int, float] | None = None

    def start_anew(
        self,
        mode: Mode,
        *,
        device_bytes: int | None = None,
        idle_bytes: int | None = None,
        keep_host: bool = True,
    ) -> None:
        """Finish storing and empty the tiers; nothing may run or wait.

        Every mode begins with the same knowledge of the machine: the speed of encoding if it was
        measured, guesses of the others.

        Args:
            mode: of the requests that follow.
            device_bytes: of KV on the device, at most what the pool has; None = all of it.
            idle_bytes: of it, most that no running request uses; None = all.
            keep_host: whether nodes in host memory stay.
        """

        def job() -> None:
            pool = self._pool
            page_bytes = self.page_bytes
            pool.release(self._reserved)
            pool.clear(None if idle_bytes is None else idle_bytes // page_bytes)
            if pool.free_pages < pool.total_pages:
                raise RuntimeError("KV is in use between two runs: please report this")
            pages = pool.total_pages if device_bytes is None else device_bytes // page_bytes
            self._reserved = pool.allocate((pool.total_pages - pages) * pool.page_size) or ()
            self._fetcher.rest()
            if not keep_host:
                self._host.clear()
            self._costs.reset()
            if self._encode_speed is not None:
                self._costs.encode.record(*self._encode_speed)
            self.mode = self._placer.mode = mode

        self.flush()  # beside no run but the one that computed it
        self._worker.call(job)

    @property
    def page_bytes(self) -> int:
        """Of KV on the device."""
        per_token = self._model.geometry.kv_bytes_per_token(self._pool.k.dtype)
        return self._pool.page_size * per_token

    @property
    def budgets(self) -> tuple[int, int]:
        """Bytes of KV on the device, and of it, most that no running request uses."""
        pages = self._pool.total_pages - len(self._reserved)
        return pages * self.page_bytes, min(pages, self._pool.idle_budget) * self.page_bytes

    @property
    def vocabulary(self) -> int:
        """Token ids of the model."""
        return int(self._model.model.config.vocab_size)

    @property
    def copied_tokens(self) -> int:
        """Of nodes that were copied on the device so far."""
        return self._placer.copied_tokens

    def measure_encoding(self, texts: Sequence[str]) -> None:
        """Learn how fast nodes are computed, from some that are not kept."""
        reference = Reference("trace", "speed")
        nodes = [NodeText(text, reference=reference) for text in texts]
        self.precompute(nodes[:1])
        before = self.stats()
        self.precompute(nodes[1:])
        after = self.stats()
        tokens = after.encoded_tokens - before.encoded_tokens
        self._encode_speed = tokens, after.encode_s - before.encode_s
        self.release([reference])

    def fill_host(self, texts: Sequence[str]) -> None:
        """Read nodes into host memory.

        Raises:
            RuntimeError: it has no room for them all.
        """
        fetches = []
        for text in texts:
            node = self._library.identify(text)
            fetches.append(
                self._fetcher.fetch(NodeRun(node.key, node.ids, len(node.ids), behind=node.behind))
            )
        for fetch in fetches:
            fetch.outcome.result()
        here = sum(fetch.run.key in self._host for fetch in fetches)
        if here < len(fetches):
            raise RuntimeError(f"{here} of {len(fetches)} nodes are in host memory")

    def forget_file_cache(self) -> None:
        """Ask the system to drop the store's files from its memory, so that disk means disk."""
        for file in Path(self.store.path).rglob("*"):
            if file.is_file() and hasattr(os, "posix_fadvise"):
                descriptor = os.open(file, os.O_RDONLY)
                try:
                    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
                finally:
                    os.close(descriptor)

    def _make_placer(self, fetcher: Fetcher, computer: NodeComputer) -> NodePlacer:
        geometry = self._model.geometry
        self._placer = _Placer(self._pool, geometry, self._fill, fetcher, computer, self._costs)
        return self._placer

    def _bring_s(self, key: PageKey, tokens: int) -> float:
        if not isinstance(key, PositionedKey):
            return super()._bring_s(key, tokens)
        if self._placer.others(key):
            return 2 * tokens * self.kv_bytes_per_token / COPIED_BYTES_PER_S
        return super()._bring_s(key.node, tokens)

    def _evicted(self, key: PageKey, pages: int) -> None:
        super()._evicted(key, pages)
        if isinstance(key, PositionedKey):
            self._placer.goes(key)

    def _request(
        self,
        prompt: Prompt | Sequence[Mapping[str, str]],
        options: GenerationOptions | None,
        overrides: Mapping[str, Any],
    ) -> Request:
        request = super()._request(prompt, options, {"quality": self.mode.quality, **overrides})
        return positioned(request) if self.mode is Mode.BLOCK_ATTENTION else request
