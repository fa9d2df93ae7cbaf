"""Find ingested texts verbatim in a string, and explain those that almost stand there.

All windows of the string are looked up at once among the windows of all texts (see `anchors`); what
is reported as a match was compared with the text itself, character by character.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np

from lazyrag.prompt.anchors import (
    MIN_INLINE_LENGTH,
    MIN_LENGTH,
    SIGNATURE_VERSION,
    U64,
    WIDTHS,
    Bool,
    Hashed,
    Run,
    TextSignature,
    sign,
    window_width,
)
from lazyrag.prompt.exact import Match, find_matches
from lazyrag.prompt.near import NearMatch, Suspect, near_matches, suspects_of
from lazyrag.prompt.quoted import quoted_strings
from lazyrag.types import TextId

Fetch = Callable[[TextId], str | None]

__all__ = [
    "SIGNATURE_VERSION",
    "Match",
    "NearMatch",
    "Recogniser",
    "Recognition",
    "TextSignature",
    "sign",
]


@dataclass(frozen=True, slots=True)
class Recognition:
    """Both in order of ``start`` and without overlap, also between the two.

    Several texts spelled by one string literal share its span.
    """

    matches: tuple[Match, ...]
    near: tuple[NearMatch, ...]


class Recogniser:
    """The texts of a store, to be found in prompts. Not thread-safe: the caller holds a lock.

    About 300 bytes a text are held; the texts themselves stay where ``fetch`` gets them.
    """

    def __init__(self, fetch: Fetch) -> None:
        """Begin empty.

        Args:
            fetch: the text of an id, None if it is gone (then the id is forgotten); asked once for
                each match found and at most 64 times more for near matches.
        """
        self._fetch = fetch
        self._known: set[TextId] = set()
        self._pending: list[tuple[TextId, TextSignature]] = []
        self._runs: dict[int, list[Run]] = {width: [] for width in WIDTHS}

    def __len__(self) -> int:
        return len(self._known)

    def add(self, rows: Iterable[tuple[TextId, TextSignature]]) -> None:
        """Register texts; an id that is known already is left as it is."""
        for text_id, signature in rows:
            if text_id not in self._known:
                self._known.add(text_id)
                self._pending.append((text_id, signature))

    def discard(self, ids: Iterable[TextId]) -> None:
        """Forget texts; ids that are not known are ignored."""
        gone = self._known.intersection(ids)
        if not gone:
            return
        self._known -= gone
        self._settle()
        gone_ids = np.fromiter(gone, np.int64, len(gone))
        for runs in self._runs.values():
            for run in runs:
                run.discard(gone_ids)
            runs[:] = [
                run if 2 * np.count_nonzero(run.alive) > len(run) else Run.merged([run])
                for run in runs
                if run.alive.any()
            ]

    def find(self, content: str) -> Recognition:
        """Every registered text that stands in ``content``, the longest first, without overlap.

        Of texts of equal length the one that begins first wins, of equal texts the lowest id.
        Texts of fewer than 8 characters are never looked for; one of fewer than 64 counts only
        where it has its lines to itself, spaces and tabs aside.

        A near match is a text of at least 64 characters without a match, of which outside the
        matches one piece of at least half stands in ``content``, or all but a hole of at most a
        quarter. At most 64 texts are compared, and each is reported at most once. A text that is
        spelled by a string literal (of a list or JSON put into the prompt) is a near match, too.
        """
        self._settle()
        if len(content) < MIN_LENGTH or not any(self._runs.values()):
            return Recognition((), ())
        hashed = Hashed(content)
        windows = {width: hashed.windows(width) for width, runs in self._runs.items() if runs}
        gone: list[TextId] = []

        def fetch(id: TextId) -> str | None:
            text = self._fetch(id)
            if text is None:
                gone.append(id)
            return text

        matches, free = self._verbatim(content, hashed, windows, fetch)
        quoted = self._quoted(content, matches, fetch)
        for literal in quoted:
            free[literal.start : literal.stop] = False
        known = {found.text_id for found in matches} | {found.text_id for found in quoted}
        near = near_matches(self._suspects(windows, free, known), fetch, hashed.codes, free)
        self.discard(gone)
        by_place = sorted((*near, *quoted), key=lambda found: found.start)
        return Recognition(matches, tuple(by_place))

    def _verbatim(
        self, content: str, hashed: Hashed, windows: dict[int, U64], fetch: Fetch
    ) -> tuple[tuple[Match, ...], Bool]:
        searched = [(run, windows[width]) for width, runs in self._runs.items() for run in runs]
        return find_matches(content, hashed, searched, fetch)

    def _quoted(
        self, content: str, matches: Sequence[Match], fetch: Fetch
    ) -> tuple[NearMatch, ...]:
        """Texts that string literals spell and that stand nowhere verbatim.

        A short one counts only where it is the whole of a literal that is no mere word in quotes.
        """
        literals = [
            literal
            for literal in quoted_strings(content, MIN_LENGTH)
            if not any(
                found.start < literal.stop and literal.start < found.stop for found in matches
            )
        ]
        verbatim = {found.text_id for found in matches}
        spelled = "\n".join(literal.text for literal in literals)
        if len(spelled) < MIN_LENGTH:
            return ()
        hashed = Hashed(spelled)
        windows = {width: hashed.windows(width) for width, runs in self._runs.items() if runs}
        stops = list(accumulate(len(literal.text) + 1 for literal in literals))
        found = []
        for match in self._verbatim(spelled, hashed, windows, fetch)[0]:
            number = bisect_right(stops, match.start)
            literal, length = literals[number], match.stop - match.start
            inside = match.stop < stops[number]
            whole = literal.telling and length == len(literal.text.strip())
            if inside and match.text_id not in verbatim and (whole or length >= MIN_INLINE_LENGTH):
                found.append(NearMatch(match.text_id, literal.start, literal.stop, "quoted"))
        return tuple(found)

    def _settle(self) -> None:
        """Turn pending rows into runs; each run stays more than four times the next one's size."""
        pending, self._pending = self._pending, []
        by_width: dict[int, list[tuple[TextId, TextSignature]]] = {}
        for row in pending:
            if row[1].windows:
                by_width.setdefault(window_width(row[1].length), []).append(row)
        for width, rows in by_width.items():
            runs = self._runs[width]
            runs.append(Run.of(width, rows))
            first = len(runs) - 1
            while first and len(runs[first - 1]) <= 4 * sum(map(len, runs[first:])):
                first -= 1
            if first < len(runs) - 1:
                runs[first:] = [Run.merged(runs[first:])]

    def _suspects(self, windows: dict[int, U64], free: Bool, matched: set[TextId]) -> list[Suspect]:
        taken = np.concatenate([[0], np.cumsum(~free)])
        suspects: list[Suspect] = []
        for width, values in windows.items():
            places = np.flatnonzero(taken[width:] == taken[: len(values)])
            for run in self._runs[width]:
                if run.near:
                    suspects += suspects_of(run, values[places], places, matched)
        return suspects
