"""The pool of KV pages, and which nodes are resident in it.

    k, v   [layers, pages * page_size, kv_heads, head_dim]

A segment occupies whole pages; pages need not be contiguous, but neighbours are preferred, since a
contiguous run of slots is one matrix product on the CPU.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from lazyrag_kernels.attention import Pages

from lazyrag.engine.eviction import EvictionPolicy
from lazyrag.model.geometry import Geometry
from lazyrag.types import NodeKey


def page_size_on(device: torch.device) -> int:
    """Tokens a page: a block of keys is one page in the GPU kernel; small ones waste less."""
    return 64 if device.type == "cuda" else 16


class PageAllocator:
    """Hands out page numbers; keeps free pages as extents so that runs stay contiguous."""

    def __init__(self, pages: int) -> None:
        self.total = pages
        self._free: dict[int, int] = {0: pages} if pages else {}  # first page -> length
        self.free = pages

    def allocate(self, count: int) -> Pages | None:
        """``count`` pages, from the smallest extent that holds them all, else from the largest.

        Returns:
            None when fewer than ``count`` are free.
        """
        if count > self.free:
            return None
        taken: list[int] = []
        while len(taken) < count:
            wanted = count - len(taken)
            fitting = [(length, first) for first, length in self._free.items() if length >= wanted]
            length, first = (
                min(fitting)
                if fitting
                else max((length, -first) for first, length in self._free.items())
            )
            first = abs(first)
            take = min(wanted, length)
            del self._free[first]
            if take < length:
                self._free[first + take] = length - take
            taken += range(first, first + take)
        self.free -= count
        return tuple(sorted(taken))

    def release(self, pages: Pages) -> None:
        """Give pages back; neighbouring extents join.

        Raises:
            ValueError: a page is already free.
        """
        for page in sorted(pages):
            self._release_one(page)

    def _release_one(self, page: int) -> None:
        before = next(
            (first for first, length in self._free.items() if first <= page < first + length), None
        )
        if before is not None or not 0 <= page < self.total:
            raise ValueError(f"page {page} is not in use")
        first, length = page, 1
        left = next((f for f, n in self._free.items() if f + n == page), None)
        if left is not None:
            first, length = left, self._free.pop(left) + 1
        if page + 1 in self._free:
            length += self._free.pop(page + 1)
        self._free[first] = length
        self.free += 1


@dataclass(slots=True)
class ResidentNode:
    """A node in the pool; ``users`` running requests see it."""

    pages: Pages
    tokens: int
    users: int = 0


class PagePool:
    """Pages and resident nodes. Not thread-safe: the worker owns it.

    Idle nodes stay until their pages are needed; `EvictionPolicy` decides which go. Bringing a node
    back takes as long as it is large, so that the least often used goes first. A node in use is
    never evicted.
    """

    def __init__(
        self,
        geometry: Geometry,
        *,
        pages: int,
        page_size: int,
        dtype: torch.dtype,
        device: torch.device,
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
        self._allocator = PageAllocator(pages)
        self._resident: dict[NodeKey, ResidentNode] = {}
        self._idle: EvictionPolicy[NodeKey] = EvictionPolicy(max(1, pages))  # sizes in pages

    @property
    def capacity(self) -> int:
        """Tokens the pool can hold."""
        return self._allocator.total * self.page_size

    @property
    def free_pages(self) -> int:
        return self._allocator.free

    @property
    def evictable_pages(self) -> int:
        return sum(len(node.pages) for node in self._resident.values() if not node.users)

    def pages_for(self, tokens: int) -> int:
        """Pages that ``tokens`` tokens occupy."""
        return -(-tokens // self.page_size)

    def allocate(self, tokens: int) -> Pages | None:
        """Pages for ``tokens`` tokens, evicting idle nodes if need be; None when impossible."""
        count = self.pages_for(tokens)
        if count > self.free_pages + self.evictable_pages:
            return None
        while self.free_pages < count:
            for key in self._idle.evict(count - self.free_pages):
                self._give_up(key)
        return self._allocator.allocate(count)

    def release(self, pages: Pages) -> None:
        """Give a request's own pages back."""
        self._allocator.release(pages)

    def acquire(self, key: NodeKey) -> ResidentNode | None:
        """A resident node, marked in use; None when it is not in the pool."""
        node = self._resident.get(key)
        if node is not None:
            self._idle.remove(key)
            self._idle.touch(key)
            node.users += 1
        return node

    def admit(self, key: NodeKey, pages: Pages, tokens: int) -> ResidentNode:
        """Make a node resident and mark it in use; ``pages`` already hold its KV."""
        node = ResidentNode(pages, tokens, users=1)
        self._resident[key] = node
        self._idle.touch(key)
        return node

    def leave(self, key: NodeKey) -> None:
        """One request less uses the node."""
        node = self._resident[key]
        if node.users < 1:
            raise ValueError(f"node {key} is not in use")
        node.users -= 1
        if not node.users:
            offer = self._idle.add(key, max(1, len(node.pages)), node.tokens)
            for gone in offer.evicted if offer.admitted else (key,):
                self._give_up(gone)

    def drop(self, key: NodeKey) -> None:
        """Give up a node's place; one in use stays, and is an idle node like any other later."""
        node = self._resident.get(key)
        if node is not None and not node.users:
            self._idle.forget(key)
            self._give_up(key)

    def __contains__(self, key: NodeKey) -> bool:
        return key in self._resident

    def _give_up(self, key: NodeKey) -> None:
        self._allocator.release(self._resident.pop(key).pages)

    def slots(self, pages: Pages, first: int, count: int) -> torch.Tensor:
        """int64 [count]: slots of the tokens ``first .. first + count`` of a segment."""
        index = torch.arange(first, first + count)
        table = torch.tensor(pages, dtype=torch.int64)
        slots = table[index // self.page_size] * self.page_size + index % self.page_size
        return slots.to(self.k.device)
