"""Texts that almost stand in a string: they explain a miss and are never served."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from lazyrag.prompt.anchors import U64, Bool, Codes, Int, Run, code_points, window_starts
from lazyrag.types import TextId

NearKind = Literal["changed", "cut", "quoted"]

_TEXTS = 64
_ALIGNMENTS = 6


@dataclass(frozen=True, slots=True)
class NearMatch:
    """A text that almost stands in the content; never served, it explains a miss.

    Attributes:
        start, stop: the longest piece of the text found, as a span of the content.
        kind: ``changed``: both ends of the text are there, or at most 5% of it is missing;
            ``cut``: an end of it is missing; ``quoted``: the span is a string literal that spells
            it (see `quoted`), perhaps beside others.
    """

    text_id: TextId
    start: int
    stop: int
    kind: NearKind


@dataclass(frozen=True, slots=True)
class Suspect:
    """A text of which several windows stand in the string.

    Attributes:
        windows: how many different ones.
        places: where they were found, in code points.
        origins: where the text would begin, were it whole there; [places].
    """

    text_id: TextId
    length: int
    windows: int
    places: Int
    origins: Int


@dataclass(frozen=True, slots=True)
class _Overlay:
    """A text laid over one stretch of the string: where they agree.

    Attributes:
        start, stop: the longest common piece, as a span of the string.
        prefix, suffix: length of the common piece that begins, or ends, the text; 0 if none.
        head, tail: most of the first, or last, characters of the text agree.
    """

    origin: int
    gap: int
    start: int
    stop: int
    prefix: int
    suffix: int
    head: bool
    tail: bool


def suspects_of(
    run: Run, windows: U64, places: Int, excluded: Iterable[TextId]
) -> Sequence[Suspect]:
    """At most 64 texts of ``run``, those with the most windows among ``windows``.

    Args:
        windows: hashes of the windows that begin at ``places`` of the string.
        excluded: texts that need no explanation.
    """
    rows, numbers, places = run.near_hits(windows, places)
    if not len(rows):
        return []
    first = np.flatnonzero(np.diff(rows, prepend=-1))
    new = (np.diff(rows, prepend=-1) != 0) | (np.diff(numbers, prepend=-1) != 0)
    distinct = np.add.reduceat(new.astype(np.int64), first)
    ids, lengths = run.ids[rows[first]], run.lengths[rows[first]]
    # Any half of a text holds two windows: one alone is a shared header or a common phrase.
    good = (distinct > 1) & ~np.isin(ids, np.fromiter(excluded, np.int64))
    best = np.lexsort((ids, -lengths, -distinct))
    best = best[good[best]][:_TEXTS]
    last = np.append(first[1:], len(rows))
    origins = places - window_starts(run.lengths[rows], numbers, run.width)
    return [
        Suspect(
            TextId(int(ids[entry])),
            int(lengths[entry]),
            int(distinct[entry]),
            places[first[entry] : last[entry]],
            origins[first[entry] : last[entry]],
        )
        for entry in best
    ]


def near_matches(
    suspects: list[Suspect],
    fetch: Callable[[TextId], str | None],
    content: Codes,
    free: Bool,
) -> tuple[NearMatch, ...]:
    """The suspects that are near matches, the longest piece first, without overlap; by start.

    Args:
        fetch: asked for at most 64 texts, those with the most windows in the string.
        free: which characters of ``content`` no match covers.
    """
    gaps = np.flatnonzero(np.diff(free.astype(np.int8), prepend=0, append=0)).reshape(-1, 2)
    suspects.sort(key=lambda suspect: (-suspect.windows, -suspect.length, suspect.text_id))
    found = []
    for suspect in suspects[:_TEXTS]:
        text = fetch(suspect.text_id)
        near = _judge(suspect, code_points(text), content, gaps) if text else None
        if near is not None:
            found.append((near.start - near.stop, suspect.length, suspect.text_id, near))
    found.sort(key=lambda entry: entry[:3])
    chosen: list[NearMatch] = []
    for *_, near in found:
        if all(near.stop <= other.start or other.stop <= near.start for other in chosen):
            chosen.append(near)
    return tuple(sorted(chosen, key=lambda near: near.start))


def _judge(suspect: Suspect, text: Codes, content: Codes, gaps: Int) -> NearMatch | None:
    gap_of = np.searchsorted(gaps[:, 0], suspect.places, "right") - 1
    pairs, count = np.unique(np.stack([suspect.origins, gap_of]), axis=1, return_counts=True)
    likeliest = np.argsort(-count, kind="stable")[:_ALIGNMENTS]
    overlays = [
        _lay(text, content, int(origin), int(gap), gaps[gap])
        for origin, gap in pairs[:, likeliest].T
    ]
    best = max(overlays, key=lambda overlay: (overlay.stop - overlay.start, -overlay.origin))
    size, piece = len(text), best.stop - best.start
    nearby = [
        overlay
        for overlay in overlays
        if overlay.gap == best.gap and abs(overlay.origin - best.origin) <= size // 4 + 64
    ]
    if piece < size // 2:
        prefix = max(overlay.prefix for overlay in nearby)
        suffix = max(overlay.suffix for overlay in nearby)
        if not prefix or not suffix or 4 * (prefix + suffix) < 3 * size:
            return None
    ends = any(overlay.head for overlay in nearby) and any(overlay.tail for overlay in nearby)
    changed = ends or 20 * (size - piece) <= size
    return NearMatch(suspect.text_id, best.start, best.stop, "changed" if changed else "cut")


def _lay(text: Codes, content: Codes, origin: int, gap: int, limits: Int) -> _Overlay:
    size = len(text)
    start, stop = max(origin, int(limits[0])), min(origin + size, int(limits[1]))
    equal = text[start - origin : stop - origin] == content[start:stop]
    breaks = np.concatenate([[-1], np.flatnonzero(~equal), [len(equal)]])
    pieces = np.diff(breaks) - 1
    longest = int(pieces.argmax())
    end = min(64, max(8, size // 20))
    head = np.count_nonzero(equal[: max(0, end - (start - origin))])
    tail = np.count_nonzero(equal[max(0, size - end - (start - origin)) :])
    return _Overlay(
        origin,
        gap,
        start + int(breaks[longest]) + 1,
        start + int(breaks[longest + 1]),
        int(pieces[0]) if start == origin else 0,
        int(pieces[-1]) if stop == origin + size else 0,
        bool(2 * head > end),
        bool(2 * tail > end),
    )
