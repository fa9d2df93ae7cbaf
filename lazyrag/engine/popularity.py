"""How often nodes are used, in a window that is as long as popularity stands still.

A use adds one to the count of its key, and all counts halve together once per half-life:

    count(t) = Σ 2^(t_i − t)        t in half-lives, t_i = uses of the key

So ``log2 Σ 2^t_i`` orders keys for as long as they are not used, at any half-life and also while
the half-life changes: forward decay (Cormode, Shkapenyuk, Srivastava and Xu, ICDE 2009), the count
of LRFU (Lee et al., IEEE ToC 2001). Time is counted in uses, no clock is read.

A long half-life tells keys of similar popularity apart, a short one follows a change. Every key has
a second count with a short one. Each use of a known key asks which of the two predicted it better;
the logarithms of the ratios are added up, never below zero (the CUSUM test of Page, Biometrika
1954). Past a threshold popularity has changed: the short count becomes the count, and the half-life
grows again from there, as the window of ADWIN does (Bifet and Gavaldà, SDM 2007).
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)

_SHORTEST, _LONGEST = 1, 16
"""Half-lives in uses per known key: the sample that ranks keys grows with their number."""
_GROWTH = 4
"""Half-life in uses since the last change."""
_ALLOWANCE, _CHANGED = 0.2, 15.0
"""In nats: how much better the short count may predict a use by chance, and the sum above it that
means a change. 3 million independent draws of 20 to 1,000 keys, Zipf 0 to 2.1, never got there."""
_UNSEEN = 0.5
"""Added to every count for a prediction (Krichevsky and Trofimov)."""
_FADED = 8.0
"""A key unused for so many short half-lives is forgotten (later if it was used often)."""


@dataclass(slots=True)
class _Count:
    """Logarithms to base 2."""

    long: float = -math.inf
    short: float = -math.inf


class Popularity(Generic[K]):
    """Counts of the keys held and of at most ``history`` others, those used last.

    Every call is O(1), amortised. Equal calls give equal counts.
    """

    def __init__(self, history: int) -> None:
        self._history = history
        self._counts: dict[K, _Count] = {}
        self._loose: OrderedDict[K, None] = OrderedDict()  # not held, oldest first
        self._held: set[K] = set()
        self._total = _Count()
        self._now = _Count(0.0, 0.0)
        self._evidence = 0.0
        self._since_change = 0

    def __len__(self) -> int:
        return len(self._counts)

    def log_count(self, key: K) -> float:
        """log2 of the count, of use in comparisons only; −∞ for an unknown key."""
        count = self._counts.get(key)
        return -math.inf if count is None else count.long

    def use(self, key: K) -> bool:
        """Count a use.

        Returns:
            Whether popularity has changed and with it the counts of all keys.
        """
        self._since_change += 1
        keys = max(1, len(self._counts))
        grown = _GROWTH * self._since_change
        self._now.long += 1 / min(max(grown, _SHORTEST * keys), _LONGEST * keys)
        self._now.short += 1 / (_SHORTEST * keys)
        count = self._counts.get(key)
        if count is None:
            count = self._counts[key] = _Count()
        else:
            self._evidence = max(0.0, self._evidence + self._surprise(count, keys) - _ALLOWANCE)
        for each in (count, self._total):
            each.long = _plus_one_use(each.long, self._now.long)
            each.short = _plus_one_use(each.short, self._now.short)
        if key not in self._held:
            self._loose[key] = None
            self._loose.move_to_end(key)
            self._trim()
        if self._evidence < _CHANGED or self._since_change < keys:
            return False
        self._start_anew()
        return True

    def hold(self, key: K) -> None:
        """Keep the count of ``key`` until `release`."""
        self._held.add(key)
        self._loose.pop(key, None)

    def release(self, key: K) -> None:
        """``key`` is one of many again."""
        self._held.discard(key)
        if key in self._counts:
            self._loose[key] = None
            self._trim()

    def forget(self, key: K) -> None:
        """As if ``key`` had never been used."""
        self._held.discard(key)
        self._loose.pop(key, None)
        self._counts.pop(key, None)

    def _surprise(self, count: _Count, keys: int) -> float:
        """ln of how much better the short counts predicted the use of a known key."""
        now, total = self._now, self._total
        short = 2 ** (count.short - now.short) + _UNSEEN
        long = 2 ** (count.long - now.long) + _UNSEEN
        all_short = 2 ** (total.short - now.short) + _UNSEEN * keys
        all_long = 2 ** (total.long - now.long) + _UNSEEN * keys
        return math.log(short / long * all_long / all_short)

    def _start_anew(self) -> None:
        ahead = self._now.long - self._now.short
        for count in (*self._counts.values(), self._total):
            count.long = count.short + ahead
        self._evidence = 0.0
        self._since_change = 0

    def _trim(self) -> None:
        while self._loose:
            oldest = next(iter(self._loose))
            faded = self._counts[oldest].short < self._now.short - _FADED
            if len(self._loose) <= self._history and not faded:
                return
            self.forget(oldest)


def _plus_one_use(log_count: float, now: float) -> float:
    """log2(2^log_count + 2^now), without leaving the range of a float."""
    high, low = max(log_count, now), min(log_count, now)
    return high + math.log1p(2 ** (low - high)) / math.log(2)
