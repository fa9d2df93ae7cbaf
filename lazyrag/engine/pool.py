"""The pool of KV pages, and what is resident in it: nodes, and live text that may come again.

    k, v   [layers, pages * page_size, kv_heads, head_dim]

A segment occupies whole pages; pages need not be contiguous, but neighbours are preferred, since a
contiguous run of slots is one matrix product on the CPU.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
import torch
from lazyrag_kernels.attention import Pages
from numpy.typing import NDArray

from lazyrag.engine.eviction import EvictionPolicy
from lazyrag.engine.live import LiveKey
from lazyrag.model.geometry import Geometry
from lazyrag.types import NodeKey


def page_size_on(device: torch.device) -> int:
    """Tokens a page: a block of keys is one page in the GPU kernel; small ones waste less."""
    return 64 if device.type == "cuda" else 16


class PageAllocator:
    """Hands out page numbers, contiguous ones as far as there are any.

    Allocating and giving back takes some array operations over all pages, whatever their state.
    """

    def __init__(self, pages: int) -> None:
        self.total = pages
        self.free = pages
        self._is_free = np.ones(pages, dtype=np.bool_)

    def allocate(self, count: int, *, high: bool = False) -> Pages | None:
        """``count`` pages, from the smallest extent that holds them all, else from the largest.

        Args:
            count: how many.
            high: take the last free pages instead, wherever they lie: for what comes and goes page
                by page, so that the other end stays whole.

        Returns:
            None when fewer than ``count`` are free.
        """
        if count > self.free:
            return None
        pages = np.flatnonzero(self._is_free)[-count:] if high else self._extents_of(count)
        pages = pages if count else pages[:0]
        self._is_free[pages] = False
        self.free -= count
        return tuple(sorted(pages.tolist()))

    def _extents_of(self, count: int) -> NDArray[np.int64]:
        edges = np.flatnonzero(np.diff(self._is_free.astype(np.int8), prepend=0, append=0))
        firsts, lengths = edges[::2], edges[1::2] - edges[::2]
        fitting = np.flatnonzero(lengths >= count)
        if fitting.size:
            first = firsts[fitting[lengths[fitting].argmin()]]
            return np.arange(first, first + count)
        by_length = np.argsort(-lengths, kind="stable")
        taken = [np.arange(firsts[i], firsts[i] + lengths[i]) for i in by_length]
        return np.concatenate(taken)[:count]

    def release(self, pages: Pages) -> None:
        """Give pages back.

        Raises:
            ValueError: a page is free already, or not of this pool; nothing was given back.
        """
        for page in pages:
            if not 0 <= page < self.total or self._is_free[page]:
                raise ValueError(f"page {page} is not in use")
        self._is_free[list(pages)] = True
        self.free += len(pages)


PageKey = NodeKey | LiveKey
"""Whose KV it is: a node's, or that of one page of live text."""


@dataclass(slots=True)
class Resident:
    """KV in the pool that running requests share.

    Attributes:
        pages: where it lies.
        tokens: how many.
        users: requests (and pins) that hold it.
        ready: whether the pages hold it already.
        released: whether it goes with its last user.
    """

    pages: Pages
    tokens: int
    users: int = 0
    ready: bool = True
    released: bool = False


class PagePool:
    """Pages, and what is resident in them. Not thread-safe: the worker owns it.

    What nobody uses stays until its pages are needed, at most ``idle_pages`` of it;
    `EvictionPolicy` decides what goes. What is in use is never evicted.

    Args:
        geometry: of the model.
        pages: in all.
        page_size: tokens a page.
        dtype, device: of the KV.
        idle_pages: most pages that idle entries may keep; None = all there are.
        bring_s: seconds to bring an entry back once it is gone, from its key and its tokens; by
            default it takes as long as it is large.
        evicted: called with every entry that goes for want of room, and its pages.
    """

    def __init__(
        self,
        geometry: Geometry,
        *,
        pages: int,
        page_size: int,
        dtype: torch.dtype,
        device: torch.device,
        idle_pages: int | None = None,
        bring_s: Callable[[PageKey, int], float] | None = None,
        evicted: Callable[[PageKey, int], None] | None = None,
    ) -> None:
        shape = (
            len(geometry.layers),
            pages * page_size,
            geometry.kv_heads,
            geometry.head_dim,
        )
        self.page_size = page_size
        self.k = torch.empty(shape, dtype=dtype, device=device)
        self.v = torch.empty(shape, dtype=dtype, device=device)
        self.pinned_pages = 0
        self._bring_s = bring_s or (lambda key, tokens: float(tokens))
        self._tell_evicted = evicted or (lambda key, pages: None)
        self._allocator = PageAllocator(pages)
        self._resident: dict[PageKey, Resident] = {}
        self._idle = _idle_policy(pages, idle_pages)
        self._pins: Counter[PageKey] = Counter()

    @property
    def capacity(self) -> int:
        """Tokens the pool can hold."""
        return self._allocator.total * self.page_size

    @property
    def free_pages(self) -> int:
        return self._allocator.free

    @property
    def evictable_pages(self) -> int:
        """Pages of idle entries."""
        return self._idle.used_bytes

    @property
    def total_pages(self) -> int:
        return self._allocator.total

    @property
    def idle_budget(self) -> int:
        """Most pages that idle entries may keep."""
        return self._idle.budget_bytes

    def pages_for(self, tokens: int) -> int:
        """Pages that ``tokens`` tokens occupy."""
        return -(-tokens // self.page_size)

    def idle_pages_of(self, keys: Iterable[PageKey]) -> int:
        """Of the evictable pages, those of these resident entries."""
        entries = [self._resident[key] for key in keys]
        return sum(len(entry.pages) for entry in entries if not entry.users)

    def allocate(self, tokens: int, *, live: bool = False) -> Pages | None:
        """Pages for ``tokens`` tokens, evicting idle entries if need be; None when impossible.

        Args:
            tokens: how many.
            live: whether they are live text, which comes and goes page by page.
        """
        count = self.pages_for(tokens)
        if count > self.free_pages + self.evictable_pages:
            return None
        while self.free_pages < count:
            self._evicted(self._idle.evict(count - self.free_pages))
        return self._allocator.allocate(count, high=live)

    def release(self, pages: Pages) -> None:
        """Give a request's own pages back."""
        self._allocator.release(pages)

    def touch(self, keys: Iterable[PageKey]) -> None:
        """A request uses these, be they in the pool or not: what is used often stays longer."""
        for key in keys:
            self._idle.touch(key)

    def acquire(self, key: PageKey) -> Resident | None:
        """A resident entry, marked in use; None when it is not in the pool."""
        entry = self._resident.get(key)
        if entry is not None:
            self._idle.remove(key)
            entry.users += 1
        return entry

    def admit(self, key: PageKey, pages: Pages, tokens: int, *, ready: bool = True) -> Resident:
        """Make an entry resident and mark it in use.

        Args:
            key: not resident yet.
            pages: allocated; they become the entry's.
            tokens: how many it has.
            ready: whether the pages hold its KV already.
        """
        entry = Resident(pages, tokens, users=1, ready=ready)
        self._resident[key] = entry
        return entry

    def entry(self, key: PageKey) -> Resident:
        """A resident entry.

        Raises:
            KeyError: it is not in the pool.
        """
        return self._resident[key]

    def leave(self, key: PageKey) -> None:
        """One request less uses the entry.

        What never became ready, or was dropped meanwhile, is given up with the last.
        """
        entry = self._resident[key]
        if entry.users < 1:
            raise ValueError(f"{key} is not in use")
        entry.users -= 1
        if entry.users:
            return
        if entry.released or not entry.ready:
            self._idle.forget(key)
            self._give_up(key)
            return
        self._offer(key, entry)

    def reprice(self, key: PageKey) -> None:
        """Weigh an idle entry anew: the seconds to bring it back have changed."""
        if key in self._idle:
            self._offer(key, self._resident[key])

    def _offer(self, key: PageKey, entry: Resident) -> None:
        size = max(1, len(entry.pages))
        offer = self._idle.add(key, size, self._bring_s(key, entry.tokens))
        self._evicted(offer.evicted if offer.admitted else (key,))

    def drop(self, key: PageKey) -> None:
        """Give up an entry's place, at once or, if it is in use, with its last user."""
        entry = self._resident.get(key)
        if entry is None:
            return
        entry.released = True
        if not entry.users:
            self._idle.forget(key)
            self._give_up(key)

    def clear(self, idle_pages: int | None = None) -> None:
        """Give up all idle entries and forget how often anything was used.

        Args:
            idle_pages: most pages that idle entries may keep from here on; None = all there are.
        """
        for key in [key for key, entry in self._resident.items() if not entry.users]:
            self._give_up(key)
        self._idle = _idle_policy(self.total_pages, idle_pages)

    def pin(self, key: PageKey) -> None:
        """Count an entry that is in use as pinned: its pages are there for no other."""
        if not self._pins[key]:
            self.pinned_pages += len(self._resident[key].pages)
        self._pins[key] += 1

    def unpin(self, key: PageKey) -> None:
        """Take one pin back.

        Raises:
            ValueError: it is not pinned.
        """
        if not self._pins[key]:
            raise ValueError(f"{key} is not pinned")
        self._pins[key] -= 1
        if not self._pins[key]:
            del self._pins[key]
            self.pinned_pages -= len(self._resident[key].pages)

    def is_pinned(self, key: PageKey) -> bool:
        return key in self._pins

    def __contains__(self, key: PageKey) -> bool:
        return key in self._resident

    def __len__(self) -> int:
        """Resident nodes; pages of live text are not counted."""
        return sum(isinstance(key, NodeKey) for key in list(self._resident))

    def _evicted(self, keys: Iterable[PageKey]) -> None:
        for key in keys:
            self._tell_evicted(key, len(self._resident[key].pages))
            self._give_up(key)

    def _give_up(self, key: PageKey) -> None:
        self._allocator.release(self._resident.pop(key).pages)

    def slots(self, pages: Pages, first: int, count: int) -> torch.Tensor:
        """int64 [count]: slots of the tokens ``first .. first + count`` of a segment."""
        return self.host_slots(pages, first, count).to(self.k.device)

    def host_slots(self, pages: Pages, first: int, count: int) -> torch.Tensor:
        """As `slots`, on the host."""
        index = torch.arange(first, first + count)
        table = torch.tensor(pages, dtype=torch.int64)
        return table[index // self.page_size] * self.page_size + index % self.page_size


def _idle_policy(pages: int, idle_pages: int | None) -> EvictionPolicy[PageKey]:
    """Sizes are in pages."""
    return EvictionPolicy(pages if idle_pages is None else min(idle_pages, pages))
