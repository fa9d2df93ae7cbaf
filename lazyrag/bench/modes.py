"""Four ways to answer over the same nodes in the same engine: what is reused, and where it lies.

    lazy             a node's KV at any place, as it is
    block_attention  a copy of a node for every place it was ever asked at; a miss copies and turns
                     its keys (arXiv 2409.15355)
    prefix           the KV of the longest run of nodes from the start that was asked before
    full             nothing

All four run through the same forward pass, kernels, graphs and pool; a mode only says which spans a
request sees, and which tokens it has to compute before its question.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from lazyrag_kernels.attention import Pages
from lazyrag_kernels.rope import AngleTable

from lazyrag.engine.attention import paged_attention
from lazyrag.engine.forward import Launched, NextTokens, packed_forward
from lazyrag.engine.pool import PagePool, page_size_on
from lazyrag.engine.sequence import PagedSequence, SeenNode
from lazyrag.model.load import LoadedModel

PASS_TOKENS = 2048
"""Tokens of a pass that reads prompts."""


class Bed:
    """A model, a pool, and nodes computed into it.

    Args:
        model: on a GPU.
        nodes, node_tokens: how many nodes of which length (whole pages).
        tokens: that the pool holds.
    """

    def __init__(self, model: LoadedModel, nodes: int, node_tokens: int, tokens: int) -> None:
        page_size = page_size_on(model.device)
        self.model, self.node_tokens = model, node_tokens
        self.pool = PagePool(
            model.geometry,
            pages=tokens // page_size,
            page_size=page_size,
            dtype=model.dtype,
            device=model.device,
        )
        self.forward = packed_forward(model, paged_attention(self.pool, model.geometry))
        generator = torch.Generator().manual_seed(1)
        vocab = model.model.config.vocab_size
        self.ids = torch.randint(vocab, (nodes, node_tokens), generator=generator).tolist()
        self.question = torch.randint(vocab, (64,), generator=generator).tolist()
        self.pages: list[Pages] = []
        for ids in self.ids:
            pages = self.take(node_tokens)
            sequence = PagedSequence(self.pool, (), pages, node_tokens)
            read(self, [Reading(sequence, ids, range(node_tokens))])
            self.pages.append(pages)

    def take(self, tokens: int) -> Pages:
        """Pages for some tokens; nothing is evicted.

        Raises:
            RuntimeError: the pool is full: the benchmark needs a larger one.
        """
        pages = self.pool.allocate(tokens)
        if pages is None:
            raise RuntimeError(f"the pool of {self.pool.capacity:,} tokens is full")
        return pages


@dataclass(slots=True)
class Reading:
    """What a request has to compute before its first token."""

    sequence: PagedSequence
    ids: Sequence[int]
    positions: Sequence[int]


@dataclass(slots=True)
class Placed:
    """What a mode made of a prompt.

    Attributes:
        seen: spans that are there already.
        computed: nodes whose tokens come before the question.
        keep: told the request's own pages at its end; True = they stay in use.
    """

    seen: list[SeenNode]
    computed: list[int]
    keep: Callable[[Pages], bool] = lambda pages: False


class Lazy:
    """Every node once."""

    def __init__(self, bed: Bed) -> None:
        self._bed = bed

    def place(self, order: Sequence[int]) -> Placed:
        """See `Placed`; ``order`` are numbers of nodes."""
        length = self._bed.node_tokens
        return Placed(
            [SeenNode(self._bed.pages[n], length, i * length, 0) for i, n in enumerate(order)], []
        )


class BlockAttention:
    """Every node once for each place."""

    def __init__(self, bed: Bed) -> None:
        self._bed = bed
        (self._rotary,) = {layer.rotary for layer in bed.model.geometry.layers}
        limit = bed.model.geometry.max_positions
        self._angles = AngleTable.build(self._rotary, limit, bed.model.device)
        self._copies: dict[tuple[int, int], Pages] = {}

    def place(self, order: Sequence[int]) -> Placed:
        """See `Placed`; ``order`` are numbers of nodes."""
        missing = [(n, i) for i, n in enumerate(order) if (n, i) not in self._copies]
        if missing:
            self._copy(missing)
        # Keys lie rotated at their place already, so that the offset is 0.
        length = self._bed.node_tokens
        return Placed([SeenNode(self._copies[n, i], length, 0, 0) for i, n in enumerate(order)], [])

    def forget(self) -> None:
        """Give the copies back."""
        for pages in self._copies.values():
            self._bed.pool.release(pages)
        self._copies.clear()

    def _copy(self, missing: Sequence[tuple[int, int]]) -> None:
        from lazyrag.bench.relocate import relocate

        bed, length, page = self._bed, self._bed.node_tokens, self._bed.pool.page_size
        inside = torch.arange(page)
        moves = []
        for node, place in missing:
            pages = self._copies[node, place] = bed.take(length)
            source, target = (
                (torch.tensor(some)[:, None] * page + inside).flatten()
                for some in (bed.pages[node], pages)
            )
            moves.append(torch.stack((source, target, torch.full_like(source, place * length))))
        pinned = torch.cat(moves, dim=1).pin_memory()
        pool = bed.pool
        where = pinned.to(pool.k.device, non_blocking=True)
        relocate(pool.k, pool.v, where, self._rotary, self._angles)


class Prefix:
    """Runs of nodes from the start of a prompt, in the order they were asked in."""

    def __init__(self, bed: Bed) -> None:
        self._bed = bed
        self._known: dict[tuple[int, ...], Pages] = {}
        self._owned: list[Pages] = []

    def place(self, order: Sequence[int]) -> Placed:
        """See `Placed`; ``order`` are numbers of nodes."""
        bed, length = self._bed, self._bed.node_tokens
        hit = 0
        while hit < len(order) and tuple(order[: hit + 1]) in self._known:
            hit += 1
        seen = [
            SeenNode(self._known[tuple(order[: i + 1])], length, 0, 0) for i in range(hit)
        ]  # rotated at their place

        def keep(pages: Pages) -> bool:
            size = length // bed.pool.page_size
            for i in range(hit, len(order)):
                first = (i - hit) * size
                self._known[tuple(order[: i + 1])] = pages[first : first + size]
            if hit == len(order):
                return False
            self._owned.append(pages)
            return True

        return Placed(seen, list(order[hit:]), keep)

    def forget(self) -> None:
        """Give back what was kept."""
        for pages in self._owned:
            self._bed.pool.release(pages)
        self._owned.clear()
        self._known.clear()


class Full:
    """Nothing is reused."""

    def __init__(self, bed: Bed) -> None:
        pass

    def place(self, order: Sequence[int]) -> Placed:
        """See `Placed`; ``order`` are numbers of nodes."""
        return Placed([], list(order))


Mode = Lazy | BlockAttention | Prefix | Full


@dataclass(slots=True)
class Asked:
    """A request on its way.

    Attributes:
        reading: its prompt.
        pages: of its own; ``kept`` by its mode, or given back at its end.
        tokens: chosen so far.
    """

    reading: Reading
    pages: Pages
    kept: bool
    tokens: list[int] = field(default_factory=list)

    @property
    def next_position(self) -> int:
        return self.reading.positions[-1] + 1

    def end(self, bed: Bed) -> None:
        """Give its pages back, unless its mode keeps them."""
        if not self.kept:
            bed.pool.release(self.pages)


def ask(bed: Bed, mode: Mode, order: Sequence[int], new_tokens: int) -> Asked:
    """Place a prompt of nodes and the question; nothing is computed but what the mode copies.

    What the mode keeps of it may be seen at once by requests that are computed later, or in the
    same pass: a layer writes all keys before it attends.
    """
    placed = mode.place(order)
    ids = [id for node in placed.computed for id in bed.ids[node]] + bed.question
    end = len(order) * bed.node_tokens + len(bed.question)
    capacity = len(ids) + new_tokens
    pages = bed.take(capacity)
    sequence = PagedSequence(bed.pool, placed.seen, pages, capacity)
    reading = Reading(sequence, ids, range(end - len(ids), end))
    return Asked(reading, pages, placed.keep(pages))


def read(bed: Bed, readings: Sequence[Reading]) -> list[int]:
    """Compute prompts, packed into passes; the first token of each."""
    parts = [
        (number, part)
        for number, reading in enumerate(readings)
        for part in _parts(len(reading.ids), PASS_TOKENS)
    ]
    passes: list[list[tuple[int, slice]]] = [[]]
    room = PASS_TOKENS
    for number, part in parts:
        count = part.stop - part.start
        if count > room:
            passes.append([])
            room = PASS_TOKENS
        passes[-1].append((number, part))
        room -= count
    first_ids = [0] * len(readings)
    launched = []
    for some in passes:
        batch = []
        for number, part in some:
            reading = readings[number]
            batch.append(NextTokens(reading.sequence, reading.ids[part], reading.positions[part]))
        launched.append(bed.forward.launch(batch))
    for some, result in zip(passes, launched, strict=True):
        for (number, _), id in zip(some, result.fetch()[0], strict=True):
            first_ids[number] = id  # that of the last part stays
    return first_ids


def _parts(count: int, most: int) -> list[slice]:
    return [slice(first, min(first + most, count)) for first in range(0, count, most)]


def decode(bed: Bed, requests: Sequence[Asked], new_tokens: int) -> None:
    """Write answers together, each pass launched before the one before it has been fetched."""
    before: Launched | None = None
    for step in range(new_tokens - 1):
        launched = bed.forward.launch(
            [
                NextTokens(
                    one.reading.sequence,
                    one.tokens[-1:] if step == 0 else None,
                    [one.next_position + step],
                )
                for one in requests
            ]
        )
        if before is not None:
            _note(requests, before)
        before = launched
    if before is not None:
        _note(requests, before)


def _note(requests: Sequence[Asked], launched: Launched) -> None:
    for one, id in zip(requests, launched.fetch()[0], strict=True):
        one.tokens.append(id)
