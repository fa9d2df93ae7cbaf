"""Which idle nodes a tier keeps: cost-aware eviction with admission.

The value of a node is what keeping it is expected to save: how often it is used (`Popularity`)
times the seconds it takes to bring it back. The victim is the node of the smallest value per byte,
as in GreedyDual-Size-Frequency (Cherkasova, HPL-98-69, 1998). A newcomer enters a full tier only if
its value well exceeds the sum of the values of those that would have to go: TinyLFU (Einziger,
Friedman and Manes, ACM ToS 2017) with the aggregated victims of its size-aware successor (Einziger,
Eytan, Friedman and Manes 2021, arXiv 2105.08770). Hence a scan of once-used nodes displaces
once-used nodes only.

TinyLFU counts absent keys in a sketch. A node takes 10^6 to 10^9 bytes, so exact counts of a few
thousand absent keys cost nothing beside it and never collide.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Generic, TypeVar

from lazyrag.engine.popularity import Popularity

K = TypeVar("K", bound=Hashable)

_EXCHANGE = math.log2(1.2)
"""A newcomer must be worth a fifth more than what goes: moving bytes is work, and in a loop over
more nodes than fit, where each in turn was used last, an exchange at every use hits nothing."""


@dataclass(frozen=True, slots=True)
class Admission(Generic[K]):
    """What became of a newcomer.

    Attributes:
        admitted: the tier keeps it. If not, the caller gives its memory up.
        evicted: the nodes that went for it, the least valuable first; empty for a refusal.
    """

    admitted: bool
    evicted: tuple[K, ...] = ()


@dataclass(slots=True)
class _Resident:
    """A node of the tier; ``version`` tells its heap entry from earlier ones."""

    size: int
    log_cost: float
    version: int = 0


class EvictionPolicy(Generic[K]):
    """The idle nodes of one tier, within ``budget_bytes``. Not thread-safe.

    It decides and remembers; moving bytes is the caller's. A node that a request takes into use is
    removed (`remove` keeps its count) and offered again when the last request leaves it (`add`), or
    it stays within the budget and is pinned for as long. Equal calls give equal answers.

    Every call is O(log n) in the number of nodes, amortised, times the nodes evicted. Memory: the
    nodes of the tier, at most ``history`` absent keys, and the pins.

    Args:
        budget_bytes: what the nodes may take together.
        history: how many absent keys are remembered. Fewer than a prompt has nodes is of no use.
    """

    def __init__(self, budget_bytes: int, *, history: int = 8192) -> None:
        if budget_bytes < 0 or history < 1:
            raise ValueError("budget_bytes must not be negative, history must be at least 1")
        self.budget_bytes = budget_bytes
        self._used_bytes = 0
        self._resident: dict[K, _Resident] = {}
        self._popularity: Popularity[K] = Popularity(history)
        self._pins: Counter[K] = Counter()
        self._heap: list[tuple[float, int, K]] = []  # log2 of value per byte, version, key
        self._versions = 0

    @property
    def used_bytes(self) -> int:
        """Bytes of the nodes in the tier."""
        return self._used_bytes

    def __len__(self) -> int:
        return len(self._resident)

    def __contains__(self, key: K) -> bool:
        return key in self._resident

    def touch(self, key: K) -> None:
        """A request uses ``key``, be it in the tier or not."""
        if self._popularity.use(key):
            self._heap.clear()
            for resident in self._resident:
                self._rank(resident)
        elif key in self._resident:
            self._rank(key)

    def add(self, key: K, size_bytes: int, cost_s: float) -> Admission[K]:
        """Offer an idle node; not a use. One that is here is offered anew, with its present cost.

        A node never touched is worth nothing yet and gets free room only. A pinned one is not
        weighed against others, it only needs room.

        Args:
            key: the node.
            size_bytes: what it takes in this tier.
            cost_s: seconds to bring it back once it is gone.

        Raises:
            ValueError: the size is not positive, or the cost is negative or not finite.
        """
        if size_bytes <= 0:
            raise ValueError(f"size_bytes must be positive, got {size_bytes}")
        if not 0 <= cost_s < math.inf:
            raise ValueError(f"cost_s must be finite and not negative, got {cost_s}")
        self.remove(key)
        node = _Resident(size_bytes, math.log2(cost_s) if cost_s else -math.inf)
        worth = math.inf if self._pins[key] else self._log_value(key, node) - _EXCHANGE
        victims = self._victims(size_bytes - (self.budget_bytes - self._used_bytes), worth)
        if victims is None:
            return Admission(False)
        for victim in victims:
            self.remove(victim)
        self._resident[key] = node
        self._used_bytes += size_bytes
        self._popularity.hold(key)
        self._rank(key)
        return Admission(True, victims)

    def remove(self, key: K) -> None:
        """``key`` left the tier, or never was in it; how often it was used stays known."""
        node = self._resident.pop(key, None)
        if node is not None:
            self._used_bytes -= node.size
            self._popularity.release(key)

    def forget(self, key: K) -> None:
        """``key`` left the tier and will not come back: nothing of it stays but its pins."""
        self.remove(key)
        self._popularity.forget(key)

    def evict(self, size_bytes: int) -> tuple[K, ...]:
        """Give up nodes of ``size_bytes`` together, the least valuable first.

        Returns:
            The nodes that went: all that are not pinned when those do not suffice.
        """
        victims = self._victims(size_bytes) or ()
        for victim in victims:
            self.remove(victim)
        return victims

    def pin(self, key: K) -> None:
        """``key`` is not evicted until as many calls of `unpin`; it need not be here yet."""
        self._pins[key] += 1

    def unpin(self, key: K) -> None:
        """Take one pin back.

        Raises:
            ValueError: ``key`` is not pinned.
        """
        if not self._pins[key]:
            raise ValueError(f"{key!r} is not pinned")
        self._pins[key] -= 1
        if not self._pins[key]:
            del self._pins[key]
            if key in self._resident:
                self._rank(key)

    def _victims(self, needed: int, worth: float | None = None) -> tuple[K, ...] | None:
        """Nodes of ``needed`` bytes whose values add up to less than ``worth`` (log2).

        Returns:
            None when there are none such. With ``worth`` None: any nodes, as many as there are.
        """
        taken: list[tuple[float, int, K]] = []
        share = 0.0  # of worth
        while needed > 0 and share < 1 and (least := self._pop()) is not None:
            taken.append(least)
            node = self._resident[least[2]]
            needed -= node.size
            if worth is not None:
                value = self._log_value(least[2], node)
                share += 2 ** (value - worth) if value < worth else 1
        if worth is not None and (needed > 0 or share >= 1):
            for entry in taken:
                heapq.heappush(self._heap, entry)
            return None
        return tuple(key for _, _, key in taken)

    def _log_value(self, key: K, node: _Resident) -> float:
        return self._popularity.log_count(key) + node.log_cost

    def _rank(self, key: K) -> None:
        """Put a node on the heap anew; what stands there for its former state is void."""
        node = self._resident[key]
        self._versions += 1
        node.version = self._versions
        value_per_byte = self._log_value(key, node) - math.log2(node.size)
        heapq.heappush(self._heap, (value_per_byte, node.version, key))
        if len(self._heap) > 2 * len(self._resident) + 16:
            self._heap = [entry for entry in self._heap if self._may_go(entry)]
            heapq.heapify(self._heap)

    def _pop(self) -> tuple[float, int, K] | None:
        """Take the least valuable node that may go off the heap."""
        while self._heap:
            entry = heapq.heappop(self._heap)
            if self._may_go(entry):
                return entry
        return None

    def _may_go(self, entry: tuple[float, int, K]) -> bool:
        _, version, key = entry
        node = self._resident.get(key)
        return node is not None and node.version == version and not self._pins[key]
