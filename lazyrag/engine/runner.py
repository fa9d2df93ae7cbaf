"""Forward passes over the pool: the next tokens of several requests in one pass."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

import torch
from torch import Tensor

from lazyrag.engine.attention import paged_attention
from lazyrag.engine.fetch import Fetcher
from lazyrag.engine.live import LiveKey, LiveNames, reusable_names
from lazyrag.engine.mass import LayersDone, MassStep
from lazyrag.engine.materialized import MaterializedSequence
from lazyrag.engine.nodes import NodeComputer, NodePlacer, Placed, reason_of
from lazyrag.engine.pool import PagePool
from lazyrag.engine.report import Origin, Tier
from lazyrag.engine.request import Request
from lazyrag.engine.sequence import PagedSequence, SeenNode
from lazyrag.errors import RequestError
from lazyrag.model import seam
from lazyrag.model.load import LoadedModel
from lazyrag.prompt.segments import NodeRun, PlacedPrompt
from lazyrag.store import StoredKV
from lazyrag.types import NodeKey, Quality

RAW_NODES = 64
"""Nodes whose raw KV the oracle keeps in memory between requests."""

RunningSequence = PagedSequence | MaterializedSequence


@dataclass(frozen=True, slots=True)
class Rows:
    """The next tokens of a request.

    Attributes:
        sequence: whose.
        ids, positions: of each token.
        wanted: of how many of the last tokens the logits are needed.
    """

    sequence: RunningSequence
    ids: Sequence[int]
    positions: Sequence[int]
    wanted: int


class Started:
    """A request that has its pages; its nodes may still be on their way.

    Args:
        sequence: what forward passes run over.
        placed: what it holds in the pool; nothing for `Quality.MATERIALIZED`.
        origins: of nodes that are not in the pool.
    """

    def __init__(
        self,
        sequence: RunningSequence,
        placed: Placed,
        origins: Mapping[NodeKey, Origin] | None = None,
    ) -> None:
        self.sequence = sequence
        self.placed = placed
        self._origins = origins or {}

    @property
    def ready(self) -> bool:
        """Whether all its KV is in place."""
        return self.placed.ready

    @property
    def error(self) -> BaseException | None:
        """Why it never will be."""
        return self.placed.error

    @property
    def origins(self) -> dict[NodeKey, Origin]:
        """Where each node came from, once ready."""
        return {**self._origins, **self.placed.origins}

    @property
    def reused(self) -> int:
        """Leading live tokens that were computed before."""
        return self.sequence.reused if isinstance(self.sequence, PagedSequence) else 0


class Runner:
    """The model and the pool. Not thread-safe but where it is said: one worker owns it.

    Args:
        model: loaded.
        pool: of pages.
        placer: brings nodes.
        fetcher: reads nodes.
        computer: computes nodes.
        reuse_live: whether live text that was computed before is reused.
    """

    def __init__(
        self,
        model: LoadedModel,
        pool: PagePool,
        placer: NodePlacer,
        fetcher: Fetcher,
        computer: NodeComputer,
        *,
        reuse_live: bool = True,
    ) -> None:
        self.model = model
        self.pool = pool
        self._placer = placer
        self._fetcher = fetcher
        self._computer = computer
        self._reuse_live = reuse_live
        self._paged = paged_attention(pool, model.geometry)
        self._raw: dict[NodeKey, StoredKV] = {}
        self._named: tuple[PlacedPrompt | None, Sequence[LiveKey]] = None, ()

    def check_fits(self, request: Request) -> None:
        """Refuse what the pool could not hold even when nothing else runs; from any thread.

        Raises:
            RequestError: says what is needed and what there is.
        """
        if request.options.quality is Quality.MATERIALIZED:
            return
        pool, size = self.pool, self.pool.page_size
        nodes = {node.run.key: len(node.run.ids) for node in request.prompt.nodes}
        tokens = [n for key, n in nodes.items() if not pool.is_pinned(key)]
        tokens.append(len(request.prompt.live_ids) + request.new_tokens)
        pages = sum(map(pool.pages_for, tokens))
        if pages > pool.total_pages - pool.pinned_pages:
            pinned = pool.pinned_pages * size
            raise RequestError(
                f"the request needs KV of {pages * size:,} tokens, the pool holds "
                f"{pool.capacity:,}{f', {pinned:,} of them pinned' if pinned else ''}. "
                "Retrieve fewer nodes or give the engine more pool_bytes."
            )

    def prefetch(self, request: Request) -> None:
        """Begin to read what the request will need; from any thread."""
        if request.options.quality is Quality.MATERIALIZED:
            return
        for node in request.prompt.nodes:
            self._placer.ahead(node.run)

    def rest(self) -> None:
        """Nothing runs or waits: give up what was read for requests that left."""
        self._fetcher.rest()

    def drop(self, keys: Iterable[NodeKey]) -> None:
        """Forget nodes that are in memory and not in use."""
        self._fetcher.flush()  # what is being stored was perhaps released
        for key in keys:
            self.pool.drop(key)
            self._fetcher.forget(key)
            self._raw.pop(key, None)

    def begin(self, request: Request) -> Started | None:
        """Take pages for all of a request and have its nodes brought, or None: no room now."""
        if request.options.quality is Quality.MATERIALIZED:
            return self._begin_materialized(request)
        prompt, pool = request.prompt, self.pool
        capacity = len(prompt.live_ids) + request.new_tokens
        runs = (node.run for node in prompt.nodes)
        placed = self._placer.acquire(runs, self._reusable(prompt), capacity)
        if placed is None:
            return None
        nodes = [
            SeenNode(placed.nodes[node.run.key].pages, node.run.used, node.offset, node.first_row)
            for node in prompt.nodes
        ]
        shared = len(placed.live_names)
        reused = shared * pool.page_size
        names = LiveNames(prompt.nodes, pool.page_size) if self._reuse_live else None
        sequence = PagedSequence(
            pool, nodes, placed.live_pages, capacity, names, shared, prompt.live_positions[:reused]
        )
        if names is not None:
            names.extend(prompt.live_ids[:reused], prompt.live_positions[:reused])
        return Started(sequence, placed)

    def _reusable(self, prompt: PlacedPrompt) -> Sequence[LiveKey]:
        if not self._reuse_live:
            return ()
        if self._named[0] is not prompt:  # one that waits for room asks again and again
            self._named = prompt, reusable_names(prompt, self.pool.page_size)
        return self._named[1]

    def end(self, started: Started) -> None:
        """Give everything back that a request held."""
        if isinstance(started.sequence, PagedSequence):
            started.sequence.release()
        self._placer.leave(started.placed)

    def place(self, until: float) -> bool:
        """See `NodePlacer.place`."""
        return self._placer.place(until)

    def compute_next(self) -> bool:
        """See `NodePlacer.compute_next`."""
        return self._placer.compute_next()

    def wait_for_sent(self) -> bool:
        """Wait for a node that is on its way to the device; False when there is none."""
        if not self._placer.sending:
            return False
        self._placer.wait_for_sent()
        return True

    def pin(self, runs: Sequence[NodeRun]) -> None:
        """Bring nodes and hold them until `unpin`; a pin counts as one more user.

        Raises:
            RequestError: no room for them; nothing was pinned.
        """
        placed = self._placer.acquire(runs, (), 0)
        if placed is None:
            tokens = sum(len(run.ids) for run in runs)
            raise RequestError(
                f"no room to pin nodes of {tokens:,} tokens: the pool holds "
                f"{self.pool.capacity:,} tokens, {self.pool.pinned_pages * self.pool.page_size:,} "
                "of them pinned, and others are in use."
            )
        try:
            self.settle(placed)
        except BaseException:
            self._placer.leave(placed)
            raise
        for key in placed.nodes:
            self.pool.pin(key)

    def unpin(self, keys: Iterable[NodeKey]) -> None:
        """Take one pin of each node back.

        Raises:
            RequestError: one is not pinned; nothing changed.
        """
        chosen = list(keys)
        for key in chosen:
            if not self.pool.is_pinned(key):
                raise RequestError(f"node {key} is not pinned.")
        for key in chosen:
            self.pool.unpin(key)
            self.pool.leave(key)

    def settle(self, placed: Placed) -> None:
        """Return when every node is in place; nothing else runs meanwhile.

        Raises:
            Exception: why one cannot be had.
        """
        while not placed.ready:
            if placed.error is not None:
                raise placed.error
            if self.place(math.inf) or self.compute_next() or self.wait_for_sent():
                continue
            self._placer.wait_for_read()

    def _begin_materialized(self, request: Request) -> Started:
        origins: dict[NodeKey, Origin] = {}
        raw: dict[NodeKey, StoredKV] = {}
        for node in request.prompt.nodes:
            key = node.run.key
            if key in raw:
                continue
            kept = self._raw.pop(key, None)
            if kept is None:
                raw[key], origins[key] = self._bring(node.run)
            else:
                raw[key], origins[key] = kept, Origin(Tier.DEVICE, kept.nbytes)
        self._raw = dict(list({**self._raw, **raw}.items())[-RAW_NODES:])
        sequence = MaterializedSequence(
            self.model.geometry,
            request.prompt,
            [raw[node.run.key] for node in request.prompt.nodes],
            request.new_tokens,
            self.model.dtype,
            self.model.device,
        )
        return Started(sequence, Placed(), origins)

    def _bring(self, run: NodeRun) -> tuple[StoredKV, Origin]:
        outcome = self._fetcher.load(run)
        if isinstance(outcome, StoredKV):
            return outcome, Origin(Tier.DISK, outcome.nbytes)
        kv, stored = self._computer.compute(run)
        stored.result()
        return kv, Origin(Tier.NONE, 0, reason_of(outcome, run.source))

    @torch.inference_mode()
    def look(self, prompt: PlacedPrompt, layers: Collection[int]) -> dict[int, Tensor] | None:
        """How much the last rows of a prompt attend to each of its nodes; nothing else runs.

        Only the layers up to the last of ``layers`` are run.

        Args:
            prompt: with `MAX_ROWS` live tokens at most.
            layers: whose attention is measured.

        Returns:
            By layer fp32 [q_heads, rows, nodes], see `MassStep`; None: no room in the pool now.
        """
        live = len(prompt.live_ids)
        placed = self._placer.acquire((node.run for node in prompt.nodes), (), live)
        if placed is None:
            return None
        nodes = [
            SeenNode(placed.nodes[node.run.key].pages, node.run.used, node.offset, node.first_row)
            for node in prompt.nodes
        ]
        sequence = PagedSequence(self.pool, nodes, placed.live_pages, live)
        try:
            self.settle(placed)
            step = MassStep(
                self._paged.step([sequence.rows(prompt.live_positions)]),
                [(sequence, prompt.live_ids, prompt.live_positions)],
                self.pool,
                self.model.geometry,
                layers,
                stop=True,
            )
            ids = torch.tensor([prompt.live_ids], dtype=torch.int64, device=self.model.device)
            with suppress(LayersDone):
                seam.hidden_states(self.model.model, ids, step)
            return step.masses[0]
        finally:
            sequence.release()
            self._placer.leave(placed)

    @torch.inference_mode()
    def forward(self, batch: Sequence[Rows]) -> list[Tensor]:
        """One pass over the next tokens of several requests.

        Args:
            batch: a request stands in it once; one of `Quality.MATERIALIZED` stands alone.

        Returns:
            Of each request fp32 [wanted, vocab].
        """
        ids = [id for rows in batch for id in rows.ids]
        tokens = torch.tensor([ids], dtype=torch.int64, device=self.model.device)
        hidden = seam.hidden_states(self.model.model, tokens, self._attention(batch))[0]
        wanted: list[int] = []
        end = 0
        for rows in batch:
            end += len(rows.ids)
            wanted += range(end - rows.wanted, end)
        index = torch.tensor(wanted, dtype=torch.int64, device=hidden.device)
        logits = seam.logits(self.model.model, hidden[index])
        for rows in batch:
            if isinstance(rows.sequence, PagedSequence):
                rows.sequence.computed(rows.ids, rows.positions)
        return list(logits.split([rows.wanted for rows in batch]))

    def _attention(self, batch: Sequence[Rows]) -> seam.AttentionStep:
        first = batch[0]
        if isinstance(first.sequence, MaterializedSequence):
            return first.sequence.step(first.positions)
        return self._paged.step(
            [
                rows.sequence.rows(rows.positions)
                for rows in batch
                if isinstance(rows.sequence, PagedSequence)
            ]
        )
