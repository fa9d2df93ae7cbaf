"""Texts that stand verbatim in a string: hashes propose, a comparison of characters decides."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from lazyrag.prompt.anchors import (
    MIN_INLINE_LENGTH,
    U64,
    Bool,
    Codes,
    Hashed,
    Int,
    Run,
    expand,
)
from lazyrag.types import TextId

_PAIRS_AT_ONCE = 1 << 18


@dataclass(frozen=True, slots=True)
class Match:
    """``content[start:stop]`` is the text, compared character by character."""

    text_id: TextId
    start: int
    stop: int


def find_matches(
    content: str,
    hashed: Hashed,
    searched: Sequence[tuple[Run, U64]],
    fetch: Callable[[TextId], str | None],
) -> tuple[tuple[Match, ...], Bool]:
    """The matches, by start, and which characters of ``content`` none of them covers.

    Args:
        hashed: of ``content``.
        searched: the runs, each with the hash of the window at each place of ``content``.
        fetch: asked once for each text whose hash stands in ``content``.
    """
    texts: dict[TextId, str | None] = {}
    matches: list[Match] = []
    covered = bytearray(len(content))
    cover = np.frombuffer(covered, np.bool_)
    for owners, starts, lengths in _Pairs(searched).blocks(cover):
        for start, stop, text_id in _agreeing(hashed, searched, cover, owners, starts, lengths):
            # Longer ones came first: a match that overlaps this span covers one of its ends.
            if covered[start] or covered[stop - 1]:
                continue
            if text_id not in texts:
                texts[text_id] = fetch(text_id)
            if texts[text_id] == content[start:stop]:
                covered[start:stop] = b"\1" * (stop - start)
                matches.append(Match(text_id, start, stop))
    matches.sort(key=lambda match: match.start)
    return tuple(matches), ~cover


class _Pairs:
    """Places of the string crossed with the texts that may stand there, the longest texts first."""

    def __init__(self, searched: Sequence[tuple[Run, U64]]) -> None:
        hits = [run.anchor_hits(windows) for run, windows in searched]
        sizes = [int(hit.groups.max(initial=-1)) + 1 for hit in hits]
        bases = np.cumsum(sizes) - sizes
        self._group_count = sum(sizes)
        places = np.concatenate([hit.places for hit in hits])
        groups = np.concatenate([hit.groups + base for hit, base in zip(hits, bases, strict=True)])
        by_group = np.argsort(groups, kind="stable")
        self._places, self._groups = places[by_group], groups[by_group]

        lengths = np.concatenate([hit.entry_lengths for hit in hits])
        longest = np.argsort(-lengths, kind="stable")
        self._lengths = lengths[longest]
        self._offsets = np.concatenate([hit.entry_places for hit in hits])[longest]
        self._owners = np.repeat(np.arange(len(hits)), [len(hit.entry_groups) for hit in hits])
        self._owners = self._owners[longest]
        entry_groups = [hit.entry_groups + base for hit, base in zip(hits, bases, strict=True)]
        self._entry_groups = np.concatenate(entry_groups)[longest]

    def blocks(self, cover: Bool) -> Iterator[tuple[Int, Int, Int]]:
        """(number of the run, start, length) of bounded batches, each with all texts of a length.

        Args:
            cover: which characters are taken; what the caller takes meanwhile is not crossed again.
        """
        done = 0
        while done < len(self._lengths):
            left = ~cover[self._places]
            self._places, self._groups = self._places[left], self._groups[left]
            sizes = np.bincount(self._groups, minlength=self._group_count)
            begins = np.cumsum(sizes) - sizes
            totals = np.cumsum(sizes[self._entry_groups[done:]])
            last = done + max(int(np.searchsorted(totals, _PAIRS_AT_ONCE, "right")) - 1, 0)
            stop = int(np.searchsorted(-self._lengths, -self._lengths[last], "right"))
            block = slice(done, stop)
            groups = self._entry_groups[block]
            count = sizes[groups]
            starts = self._places[expand(begins[groups], count)]
            starts = starts - np.repeat(self._offsets[block], count)
            owners, lengths = self._owners[block], self._lengths[block]
            yield np.repeat(owners, count), starts, np.repeat(lengths, count)
            done = stop


def _agreeing(
    hashed: Hashed,
    searched: Sequence[tuple[Run, U64]],
    cover: Bool,
    owners: Int,
    starts: Int,
    lengths: Int,
) -> Iterator[tuple[int, int, TextId]]:
    """(start, stop, id) of the spans whose hash is that of a text, in the order of their claims."""
    stops = starts + lengths
    good = np.flatnonzero((starts >= 0) & (stops <= len(cover)))
    good = good[~(cover[starts[good]] | cover[stops[good] - 1])]
    owners, starts, stops, lengths = owners[good], starts[good], stops[good], lengths[good]
    wholes = hashed.spans(starts, stops)
    found = []
    for number, (run, _) in enumerate(searched):
        mine = np.flatnonzero(owners == number)
        index, rows = run.rows_of(wholes[mine], lengths[mine])
        found.append(np.stack([starts[mine[index]], stops[mine[index]], run.ids[rows]]))
    starts, stops, ids = np.concatenate(found, axis=1)
    short = stops - starts < MIN_INLINE_LENGTH
    if short.any():
        good = ~short
        good[short] = _stand_alone(hashed.codes, starts[short], stops[short])
        starts, stops, ids = starts[good], stops[good], ids[good]
    order = np.lexsort((ids, starts, starts - stops))
    spans = zip(starts[order].tolist(), stops[order].tolist(), ids[order].tolist(), strict=True)
    return ((start, stop, TextId(text_id)) for start, stop, text_id in spans)


def _stand_alone(codes: Codes, starts: Int, stops: Int) -> Bool:
    """Whether only spaces and tabs part each span from line ends or the ends of the string."""
    size = len(codes)
    solid = (codes != ord(" ")) & (codes != ord("\t"))
    ends = np.ones(size + 2, np.bool_)  # one place before the string, one behind it
    ends[1:-1] = (codes == ord("\n")) | (codes == ord("\r"))
    index = np.arange(1, size + 1)
    before = np.zeros(size + 1, np.int64)
    before[1:] = np.maximum.accumulate(np.where(solid, index, 0))
    behind = np.full(size + 1, size + 1)
    behind[:-1] = np.minimum.accumulate(np.where(solid, index, size + 1)[::-1])[::-1]
    alone: Bool = ends[before[starts]] & ends[behind[stops]]
    return alone
