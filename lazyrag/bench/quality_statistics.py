"""Means, paired bootstrap intervals and the choice of settings of `lazyrag bench quality`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lazyrag.bench.quality_data import Half
from lazyrag.bench.quality_rows import Row
from lazyrag.bench.quality_settings import FULL, NO_DOCUMENTS

DRAWS = 2000
"""Resamplings of an interval."""
LEVEL = 0.95
"""Of every interval."""
Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Interval:
    """An estimate and its bootstrap interval; an infinite end is not known."""

    value: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Summary:
    """One setting over some examples.

    Attributes:
        setting: its name.
        examples: how many.
        nll: mean.
        gain: gain kept, sum of (NLL without documents - NLL) over sum of (the same - full's).
        behind: NLL minus full's, mean.
        kl, top1, work: means.
        same_text, em, f1, gold, ttft_s: means where known, else None.
    """

    setting: str
    examples: int
    nll: float
    gain: Interval
    behind: Interval
    kl: float
    top1: float
    work: float
    same_text: float | None
    em: float | None
    f1: float | None
    gold: float | None
    ttft_s: float | None


class Table:
    """Rows by setting and example; every setting has every example of its sets.

    Args:
        rows: of a run. Examples without a row for `FULL` and `NO_DOCUMENTS` are left out.
        seed: of the resampling.
    """

    def __init__(self, rows: Sequence[Row], seed: int = 0) -> None:
        self._rows = {(row.setting, row.set, row.id): row for row in rows}
        self.settings = list(dict.fromkeys(row.setting for row in rows))
        self.sets = list(dict.fromkeys(row.set for row in rows))
        self.examples = sorted(
            {
                (row.set, row.id)
                for row in rows
                if all(
                    (needed.name, row.set, row.id) in self._rows for needed in (FULL, NO_DOCUMENTS)
                )
            }
        )
        self._seed = seed

    def examples_of(self, name: str | None = None, half: Half | None = None) -> list[Key]:
        """Examples of a set (None = all) and of a half (None = both)."""
        return [
            key
            for key in self.examples
            if name in (None, key[0]) and half in (None, self._rows[(FULL.name, *key)].half)
        ]

    def having(self, settings: Sequence[str], examples: Sequence[Key]) -> list[Key]:
        """Those examples that every one of the settings was run on."""
        return [key for key in examples if all((name, *key) in self._rows for name in settings)]

    def column(self, setting: str, examples: Sequence[Key], what: str) -> Array:
        """One measured number of every example."""
        return np.array([getattr(self._rows[(setting, *key)], what) for key in examples], float)

    def summary(self, setting: str, examples: Sequence[Key]) -> Summary:
        """Of one setting on the examples it was run on."""
        return self.mixed(setting, {key: setting for key in self.having([setting], examples)})

    def mixed(self, name: str, chosen: dict[Key, str]) -> Summary:
        """Of a rung that is another setting on some examples than on others."""
        examples = list(chosen)

        def column(what: str) -> Array:
            return np.array(
                [getattr(self._rows[(chosen[key], *key)], what) for key in examples], float
            )

        def known(what: str) -> float | None:
            values = column(what)
            values = values[values >= 0]
            return float(values.mean()) if len(values) else None

        nll = column("nll")
        full = self.column(FULL.name, examples, "nll")
        none = self.column(NO_DOCUMENTS.name, examples, "nll")
        return Summary(
            setting=name,
            examples=len(examples),
            nll=float(nll.mean()),
            gain=self.interval(examples, lambda pick: _ratio(none - nll, none - full, pick)),
            behind=self.interval(examples, lambda pick: (nll - full)[pick].mean(axis=-1)),
            kl=float(column("kl").mean()),
            top1=float(column("top1").mean()),
            work=float(column("work").mean()),
            same_text=known("same_text"),
            em=known("em"),
            f1=known("f1"),
            gold=known("gold"),
            ttft_s=known("ttft_s"),
        )

    def difference(self, one: str, other: str, examples: Sequence[Key]) -> Interval:
        """Mean NLL of a setting minus that of another, on the examples of both."""
        both = self.having([one, other], examples)
        apart = self.column(one, both, "nll") - self.column(other, both, "nll")
        return self.interval(both, lambda pick: apart[pick].mean(axis=-1))

    def mixed_difference(self, chosen: dict[Key, str], other: str) -> Interval:
        """As `difference`, of a rung that is another setting on some examples than on others."""
        examples = list(chosen)
        mine = np.array([self._rows[(chosen[key], *key)].nll for key in examples])
        apart = mine - self.column(other, examples, "nll")
        return self.interval(examples, lambda pick: apart[pick].mean(axis=-1))

    def interval(
        self, examples: Sequence[Key], statistic: Callable[[NDArray[np.int64]], Array]
    ) -> Interval:
        """Percentile bootstrap over examples, resampled within each set.

        Args:
            examples: what is resampled.
            statistic: of index arrays [.., examples] the statistic [..].
        """
        count = len(examples)
        value = float(statistic(np.arange(count)[None])[0])
        generator = np.random.default_rng(self._seed)
        parts = []
        for name in dict.fromkeys(key[0] for key in examples):
            own = np.array([index for index, key in enumerate(examples) if key[0] == name])
            parts.append(own[generator.integers(len(own), size=(DRAWS, len(own)))])
        drawn = statistic(np.concatenate(parts, axis=1))
        outside = 100 * (1 - LEVEL) / 2
        unknown = np.isnan(drawn)  # counted as the worst at either end
        low = np.percentile(np.where(unknown, -np.inf, drawn), outside, method="lower")
        high = np.percentile(np.where(unknown, np.inf, drawn), 100 - outside, method="higher")
        return Interval(value, float(low), float(high))

    def tuned(
        self, candidates: Sequence[str], examples: Sequence[Key]
    ) -> tuple[dict[Key, str], dict[Half, str]]:
        """Settings chosen by NLL on one half for the examples of the other, both ways.

        Returns:
            The setting of every example, and the setting chosen *on* each half.
        """
        examples = self.having(candidates, examples)
        halves = {key: Half(self._rows[(FULL.name, *key)].half) for key in examples}
        best: dict[Half, str] = {}
        for half in Half:
            own = [key for key in examples if halves[key] is half]
            best[half] = min(candidates, key=lambda name: self._mean_nll(name, own))
        other = {Half.A: Half.B, Half.B: Half.A}
        return {key: best[other[halves[key]]] for key in examples}, best

    def _mean_nll(self, setting: str, examples: Sequence[Key]) -> float:
        return float(self.column(setting, examples, "nll").mean()) if examples else 0.0


Key = tuple[str, str]
"""Set and id of an example."""


def _ratio(gained: Array, possible: Array, pick: NDArray[np.int64]) -> Array:
    """Gain kept of each resampling; one in which documents bring nothing has none."""
    whole: Array = possible[pick].sum(axis=-1)
    kept: Array = gained[pick].sum(axis=-1)
    return np.divide(kept, whole, out=np.full_like(whole, np.nan), where=whole > 0)
