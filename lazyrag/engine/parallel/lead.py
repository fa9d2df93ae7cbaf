"""Rank 0: whatever touches the model or the pool is done by the others as well."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from weakref import WeakKeyDictionary, finalize

import torch
from lazyrag_kernels.attention import Pages
from torch import Tensor

from lazyrag.engine.attention import PagedAttention
from lazyrag.engine.encode import Encoder
from lazyrag.engine.fill import PageFiller
from lazyrag.engine.forward import Forward, Launched, NextTokens
from lazyrag.engine.mass import measure
from lazyrag.engine.pool import PagePool
from lazyrag.engine.sequence import PagedSequence
from lazyrag.model.load import LoadedModel
from lazyrag.model.ranks import Message, Ranks


class LeadingForward:
    """See `lazyrag.engine.forward.Forward`.

    Args:
        ranks: the group.
        inner: runs the part of this rank.
    """

    asynchronous = False

    def __init__(self, ranks: Ranks, inner: Forward) -> None:
        self._ranks = ranks
        self._inner = inner
        self._numbers: WeakKeyDictionary[PagedSequence, int] = WeakKeyDictionary()
        self._next = 0
        self._gone: deque[int] = deque()

    @property
    def shared_tokens(self) -> int:
        """See `Forward`."""
        return self._inner.shared_tokens

    def launch(self, batch: Sequence[NextTokens]) -> Launched:
        """See `Forward`."""
        new: list[Message] = []
        rows = [self._described(one, new) for one in batch]
        gone = [self._gone.popleft() for _ in range(len(self._gone))]
        with self._ranks.together({"do": "launch", "gone": gone, "new": new, "rows": rows}):
            return self._inner.launch(batch)

    def warm_up(self) -> None:
        """See `Forward`: passes are not captured."""

    def _described(self, one: NextTokens, new: list[Message]) -> Message:
        sequence = one.sequence
        assert isinstance(sequence, PagedSequence), "it lies in the pool"
        assert one.ids is not None, "passes do not overlap"
        number = self._numbers.get(sequence)
        if number is None:
            number = self._numbers[sequence] = self._next
            self._next += 1
            new.append({"number": number, **describe(sequence)})
            finalize(sequence, self._gone.append, number).atexit = False
        return {
            "number": number,
            "first": sequence.length,
            "ids": list(one.ids),
            "positions": list(one.positions),
            "wanted": one.wanted,
        }


class LeadingEncoder(Encoder):
    """See `Encoder`; what it returns has all heads."""

    def compute(
        self, nodes: Sequence[Sequence[int]], behind: Sequence[Sequence[int]] = ()
    ) -> list[Tensor]:
        """See `Encoder.compute`."""
        ranks = self._model.ranks
        assert ranks is not None, "the model is shared"
        message = {
            "do": "encode",
            "nodes": [list(ids) for ids in nodes],
            "behind": [list(ids) for ids in behind],
        }
        with ranks.together(message):
            whole = [ranks.gather_heads(kv) for kv in super().compute(nodes, behind)]
        return [kv for kv in whole if kv is not None]


class Leader:
    """What rank 0 does with all ranks besides passes and encoding. One worker owns it.

    Args:
        model: shared by several ranks.
        pool: of this rank; those of the others have the same pages.
        sink: ids that nodes are encoded behind.
        kv_dtype: of stored K and V.
    """

    def __init__(
        self, model: LoadedModel, pool: PagePool, sink: tuple[int, ...], kv_dtype: torch.dtype
    ) -> None:
        assert model.ranks is not None, "the model is shared"
        self._model, self._ranks, self._pool = model, model.ranks, pool
        self._filler = PageFiller(pool, model.geometry)
        message = {
            "do": "open",
            "pages": pool.total_pages,
            "page_size": pool.page_size,
            "sink": list(sink),
            "kv_dtype": dtype_name(kv_dtype),
        }
        with self._ranks.together(message):
            pass

    def forward(self, inner: Forward) -> Forward:
        """Passes of all ranks, ``inner`` being that of this one."""
        return LeadingForward(self._ranks, inner)

    def fill(self, k: Tensor, v: Tensor, pages: Pages, first: int) -> None:
        """See `PageFiller.fill`; of all heads, each rank gets its own."""
        message = {
            "do": "fill",
            "pages": list(pages),
            "tokens": k.shape[1],
            "dtype": dtype_name(k.dtype),
            "first": first,
        }
        with self._ranks.together(message):
            fill_heads(self._model, self._filler, torch.stack((k, v)), message)

    def look(
        self,
        attention: PagedAttention,
        sequence: PagedSequence,
        ids: Sequence[int],
        positions: Sequence[int],
        layers: Collection[int],
    ) -> dict[int, Tensor]:
        """See `measure`; of all heads."""
        message = {
            "do": "look",
            "sequence": describe(sequence),
            "ids": list(ids),
            "positions": list(positions),
            "layers": sorted(layers),
        }
        with self._ranks.together(message):
            return measure(self._model, attention, self._pool, sequence, ids, positions, layers)


def describe(sequence: PagedSequence) -> Message:
    """A sequence in plain values, as far as it was computed; see `follow.made`."""
    return {
        "nodes": [
            [list(node.pages), node.length, node.offset, node.first_row] for node in sequence.nodes
        ],
        "pages": list(sequence.live_pages),
        "capacity": sequence.capacity,
        "positions": sequence.positions,
    }


def fill_heads(model: LoadedModel, filler: PageFiller, kv: Tensor | None, message: Message) -> None:
    """The part of every rank in `Leader.fill`.

    Args:
        model, filler: of this rank.
        kv: raw K and V [2, layers, tokens, all heads, head_dim] on rank 0; None on the others.
        message: what `Leader.fill` says.
    """
    assert model.ranks is not None, "the model is shared"
    here = model.geometry
    shape = (2, len(here.layers), message["tokens"], here.kv_heads, here.head_dim)
    k, v = model.ranks.scatter_heads(kv, shape, getattr(torch, message["dtype"]))
    filler.fill(k, v, tuple(message["pages"]), message["first"])


def dtype_name(dtype: torch.dtype) -> str:
    """``float32``, ..."""
    return str(dtype).removeprefix("torch.")
