"""Forward passes over the pool: the next tokens of several requests in one pass."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lazyrag.engine.attention import paged_attention
from lazyrag.engine.forward import Launched, NextTokens, packed_forward, run
from lazyrag.engine.materialized import MaterializedSequence
from lazyrag.engine.nodes import NodeLoader, NodePlacer
from lazyrag.engine.pool import PagePool
from lazyrag.engine.report import Origin, Tier
from lazyrag.engine.request import Request
from lazyrag.engine.sequence import PagedSequence, SeenNode
from lazyrag.errors import RequestError
from lazyrag.model.load import LoadedModel
from lazyrag.store import StoredKV
from lazyrag.types import NodeKey, Quality

RAW_NODES = 64
"""Nodes whose raw KV the oracle keeps in memory between requests."""

SCORE_TOKENS = 2048
"""Tokens of one pass when an answer is scored."""

RunningSequence = PagedSequence | MaterializedSequence
Rows = tuple[RunningSequence, Sequence[int], Sequence[int]]
"""The next tokens of a request and their positions."""


@dataclass(slots=True)
class Started:
    """A request whose KV is in place, where its nodes came from, and how to give it all back."""

    sequence: RunningSequence
    origins: dict[NodeKey, Origin]
    release: Callable[[], None]


class Runner:
    """The model and the pool. Not thread-safe: one worker owns it."""

    def __init__(
        self, model: LoadedModel, pool: PagePool, placer: NodePlacer, loader: NodeLoader
    ) -> None:
        self.model = model
        self._pool = pool
        self._placer = placer
        self._loader = loader
        self._paged = paged_attention(pool, model.geometry)
        self._packed = packed_forward(model, self._paged)
        self._raw: dict[NodeKey, StoredKV] = {}

    def check_fits(self, request: Request) -> None:
        """Refuse what the pool could not hold even when empty; from any thread.

        Raises:
            RequestError: says what is needed and what there is.
        """
        if request.options.quality is Quality.MATERIALIZED:
            return
        nodes = {node.run.key: len(node.run.ids) for node in request.prompt.nodes}
        live = len(request.prompt.live_ids) + request.new_tokens
        pages = sum(self._pool.pages_for(tokens) for tokens in (live, *nodes.values()))
        if pages * self._pool.page_size > self._pool.capacity:
            raise RequestError(
                f"the request needs KV of {pages * self._pool.page_size:,} tokens, the pool holds "
                f"{self._pool.capacity:,}. Retrieve fewer nodes or give the engine more pool_bytes."
            )

    def drop(self, keys: Iterable[NodeKey]) -> None:
        """Forget nodes that are in memory and not in use."""
        for key in keys:
            self._pool.drop(key)
            self._raw.pop(key, None)

    def begin(self, request: Request) -> Started | None:
        """Bring a request's nodes and take pages for all of its live text, or None: no room now."""
        if request.options.quality is Quality.MATERIALIZED:
            return self._begin_materialized(request)
        prompt, pool = request.prompt, self._pool
        capacity = len(prompt.live_ids) + request.new_tokens
        placed = self._placer.acquire(
            (node.run for node in prompt.nodes), capacity, request.check_time
        )
        if placed is None:
            return None
        held, origins, live_pages = placed
        nodes = [
            SeenNode(held[node.run.key].pages, node.run.used, node.offset, node.first_row)
            for node in prompt.nodes
        ]
        sequence = PagedSequence(pool, nodes, live_pages, capacity)

        def release() -> None:
            pool.release(live_pages)
            for key in held:
                pool.leave(key)

        return Started(sequence, origins, release)

    def end(self, started: Started) -> None:
        """Give everything back that a request held."""
        started.release()

    def _begin_materialized(self, request: Request) -> Started:
        origins: dict[NodeKey, Origin] = {}
        raw: dict[NodeKey, StoredKV] = {}
        for node in request.prompt.nodes:
            key = node.run.key
            if key in raw:
                continue
            kept = self._raw.pop(key, None)
            if kept is None:
                raw[key], origins[key] = self._loader.load(node.run)
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
        return Started(sequence, origins, lambda: None)

    @torch.inference_mode()
    def forward(self, batch: Sequence[Rows], last: int = 1) -> list[Tensor]:
        """One pass over the next tokens of several requests.

        Args:
            batch: a request stands in it once; one of `Quality.MATERIALIZED` stands alone.
            last: of how many last tokens of each the logits are wanted.

        Returns:
            Of each request [vocab], or [last, vocab] with ``last`` above 1.
        """
        first, ids, positions = batch[0]
        if isinstance(first, MaterializedSequence):
            wanted = range(len(ids) - last, len(ids))
            logits = run(self.model, ids, first.step(positions), wanted)
        else:
            logits = self.launch(batch, last).logits.clone()
        logits = logits.unflatten(0, (len(batch), last))
        return list(logits[:, 0] if last == 1 else logits)

    def launch(self, batch: Sequence[Rows], last: int = 1) -> Launched:
        """As `forward` for requests over the pool, without waiting for the device."""
        return self._packed.launch(
            [
                NextTokens(sequence, ids, positions, last)
                for sequence, ids, positions in batch
                if isinstance(sequence, PagedSequence)
            ]
        )

    def warm_up(self) -> None:
        """Do what makes later passes faster, where there is something; may take a minute."""
        self._packed.warm_up()

    def score(self, request: Request, answer: Sequence[int]) -> list[float] | None:
        """Log-probability of each id of ``answer``, given the prompt and the ids before it.

        Returns:
            None: no room in the pool now.
        """
        started = self.begin(request)
        if started is None:
            return None
        try:
            prompt, step = request.prompt, SCORE_TOKENS
            for first in range(0, len(prompt.live_ids), step):
                chunk = slice(first, first + step)
                ids: Sequence[int] = prompt.live_ids[chunk]
                rows: Rows = (started.sequence, ids, prompt.live_positions[chunk])
                (logits,) = self.forward([rows])
            parts = [logits[None]]
            for first in range(0, len(answer) - 1, step):
                ids = answer[first : min(first + step, len(answer) - 1)]
                start = prompt.next_position + first
                rows = (started.sequence, ids, range(start, start + len(ids)))
                (rest,) = self.forward([rows], len(ids))
                parts.append(rest.reshape(len(ids), -1))
            scores = torch.cat(parts)
            chosen = torch.tensor(answer, device=scores.device)[:, None]
            result: list[float] = scores.log_softmax(dim=-1).gather(1, chosen)[:, 0].tolist()
            return result
        finally:
            self.end(started)
