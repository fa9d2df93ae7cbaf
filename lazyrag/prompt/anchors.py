"""Hashes of texts and of all spans of a string, and the tables in which they meet.

With P[i] the sum of (c_j + 1) * B**j over j < i, modulo 2**64 and B odd, the hash of a span is
(P[stop] - P[start]) * B**-start, so every window and every candidate span costs O(1). A text
registers the hashes of eight windows at places that follow from its length alone; any half of a
text of at least 64 characters holds two of them whole. A hash only proposes, it never decides.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
import numpy.typing as npt

from lazyrag.types import TextId

SIGNATURE_VERSION = 1
MIN_LENGTH = 8
"""Shorter texts are never looked for."""
MIN_INLINE_LENGTH = 64
"""Shorter texts count only where they stand alone on their lines, and are never near matches."""
WIDTHS = (8, 16, 32)
"""Widths of windows, in characters; which one a text has follows from its length."""

U64 = npt.NDArray[np.uint64]
Int = npt.NDArray[np.int64]
Bool = npt.NDArray[np.bool_]
Codes = npt.NDArray[np.uint32]

_BASE = 0x9E3779B97F4A7C15
_INVERSE = pow(_BASE, -1, 1 << 64)
_POWER_BLOCK = 1 << 16
_WINDOWS = 8
_LAYOUT = struct.Struct(f"<IQQ{_WINDOWS}Q")
_SHORT_LAYOUT = struct.Struct("<IQQ")
_NEAR_PAIRS = 1 << 16
_NEAR_TEXTS_A_WINDOW = 1 << 10


@dataclass(frozen=True, slots=True)
class TextSignature:
    """What the index needs to know of a text; computed once, kept beside it in the store.

    Attributes:
        length: in code points.
        whole: 64-bit hash of the whole text.
        windows: hashes of its eight windows; empty for a text too short to be looked for.
    """

    length: int
    whole: int
    windows: tuple[int, ...]

    def to_bytes(self) -> bytes:
        """At most 84 bytes, little endian, the version first."""
        layout = _LAYOUT if self.windows else _SHORT_LAYOUT
        return layout.pack(SIGNATURE_VERSION, self.length, self.whole, *self.windows)

    @classmethod
    def from_bytes(cls, data: bytes) -> TextSignature:
        """Read what `to_bytes` wrote.

        Raises:
            ValueError: another size, another version, or a length that does not fit the windows.
        """
        if len(data) not in (_LAYOUT.size, _SHORT_LAYOUT.size):
            raise ValueError(f"a text signature cannot have {len(data)} bytes")
        layout = _LAYOUT if len(data) == _LAYOUT.size else _SHORT_LAYOUT
        version, length, whole, *windows = layout.unpack(data)
        if version != SIGNATURE_VERSION:
            raise ValueError(f"text signature of version {version}, expected {SIGNATURE_VERSION}")
        if (length >= MIN_LENGTH) != bool(windows) or length >= 1 << 48:
            raise ValueError(f"a text signature of {len(data)} bytes cannot have length {length}")
        return cls(length, whole, tuple(windows))


def sign(text: str) -> TextSignature:
    """The signature of ``text``."""
    hashed = Hashed(text)
    size = len(hashed.codes)
    whole = int(hashed.spans(np.zeros(1, np.int64), np.full(1, size))[0])
    if size < MIN_LENGTH:
        return TextSignature(size, whole, ())
    width = window_width(size)
    starts = window_starts(np.full(1, size), np.arange(_WINDOWS), width)
    windows = hashed.spans(starts, starts + width)
    return TextSignature(size, whole, tuple(windows.tolist()))


def window_width(length: int) -> int:
    """Width of the windows of a text; 128 is the least length of which any half holds two of 32."""
    return 8 if length < MIN_INLINE_LENGTH else 16 if length < 128 else 32


def window_starts(lengths: Int, numbers: Int, width: int) -> Int:
    """Where windows ``numbers`` (0 to 7) begin: evenly spread from the beginning to the end."""
    return numbers * (lengths - width) // (_WINDOWS - 1)


def code_points(text: str) -> Codes:
    return np.frombuffer(text.encode("utf-32-le", "surrogatepass"), "<u4")


@cache
def _first_powers(base: int) -> U64:
    powers = np.full(_POWER_BLOCK, base, np.uint64)
    powers[0] = 1
    return np.cumprod(powers)


def _powers(base: int, count: int) -> U64:
    """``base**0 .. base**(count - 1)`` modulo 2**64."""
    first = _first_powers(base)
    if count <= _POWER_BLOCK:
        return first[:count]
    steps = range(0, count, _POWER_BLOCK)
    blocks = np.array([pow(base, step, 1 << 64) for step in steps], np.uint64)
    return np.multiply.outer(blocks, first).ravel()[:count]


class Hashed:
    """A string with the hash of each of its spans."""

    def __init__(self, text: str) -> None:
        self.codes = code_points(text)
        size = len(self.codes)
        self._prefix = np.zeros(size + 1, np.uint64)
        terms = self.codes.astype(np.uint64) + np.uint64(1)
        np.cumsum(terms * _powers(_BASE, size), out=self._prefix[1:])
        self._inverse = _powers(_INVERSE, size + 1)

    def spans(self, starts: Int, stops: Int) -> U64:
        hashes: U64 = (self._prefix[stops] - self._prefix[starts]) * self._inverse[starts]
        return hashes

    def windows(self, width: int) -> U64:
        """Hash of the window that begins at each place; [len - width + 1], empty if too short."""
        count = max(0, len(self.codes) - width + 1)
        hashes: U64 = (self._prefix[width:] - self._prefix[:count]) * self._inverse[:count]
        return hashes


class _Table:
    """Sorted 64-bit keys, repeats allowed, behind a bit filter on their high bits."""

    def __init__(self, keys: U64) -> None:
        self._keys = keys
        bits = max(10, (16 * len(keys)).bit_length())
        self._shift = np.uint64(64 - bits)
        present = np.zeros(1 << bits, np.bool_)
        present[keys >> self._shift] = True
        self._filter = np.packbits(present, bitorder="little")

    def look_up(self, values: U64) -> tuple[Int, Int, Int]:
        """(index into values, first table row, number of rows) of each value that is a key."""
        slots = values >> self._shift
        masks = np.left_shift(1, (slots & np.uint64(7)).astype(np.uint8), dtype=np.uint8)
        index = np.flatnonzero(self._filter[slots >> np.uint64(3)] & masks)
        first = np.searchsorted(self._keys, values[index], "left")
        count = np.searchsorted(self._keys, values[index], "right") - first
        known = count > 0
        return index[known], first[known], count[known]


def expand(first: Int, count: Int) -> Int:
    """``first[0], first[0] + 1, .. first[1], ..``: ``count[i]`` numbers from ``first[i]`` each."""
    ends = np.cumsum(count)
    return np.arange(count.sum()) + np.repeat(first - ends + count, count)


@dataclass(frozen=True, slots=True)
class AnchorHits:
    """Windows of a string that are anchors, and the texts they may belong to.

    Attributes:
        places, groups: where such a window begins, and a number for each different window; [hits].
        entry_groups, entry_places, entry_lengths: a window, its place in texts that have it as
            their anchor, and the length of those texts; [entries].
    """

    places: Int
    groups: Int
    entry_groups: Int
    entry_places: Int
    entry_lengths: Int


class Run:
    """An immutable batch of texts that share a window width.

    Exact candidates come from one window a text, the one rarest in the batch, and from one entry
    for all texts of the same length that have it at the same place: a header shared by tens of
    thousands of texts costs no more than the number of their lengths.
    """

    def __init__(self, width: int, ids: Int, lengths: Int, wholes: U64, windows: U64) -> None:
        """Index a batch.

        Args:
            windows: hashes, [texts, 8].
        """
        self.width, self.ids, self.lengths = width, ids, lengths
        self.alive = np.ones(len(ids), np.bool_)
        self._wholes, self._windows = wholes, windows

        order = np.argsort(windows, axis=None, kind="stable")
        keys = windows.ravel()[order]
        rarity = np.empty(len(keys), np.int64)
        rarity[order] = np.searchsorted(keys, keys, "right") - np.searchsorted(keys, keys, "left")
        rarest = rarity.reshape(windows.shape).argmin(axis=1)

        anchors = windows[np.arange(len(ids)), rarest]
        places = window_starts(lengths, rarest, width)
        by_anchor = np.lexsort((lengths, places, anchors))
        anchors, places, spans = anchors[by_anchor], places[by_anchor], lengths[by_anchor]
        new = np.ones(len(ids), np.bool_)
        new[1:] = np.diff(anchors).astype(np.bool_)
        new[1:] |= (np.diff(places) != 0) | (np.diff(spans) != 0)
        self._anchors = _Table(anchors[new])
        self._anchor_places, self._anchor_lengths = places[new], spans[new]

        self._rows_by_whole = np.lexsort((ids, wholes))
        self._whole_table = _Table(wholes[self._rows_by_whole])
        self.near = width > WIDTHS[0]
        if self.near:
            self._postings = order.astype(np.int32)  # 8 * row + window number
            self._window_table = _Table(keys)

    @classmethod
    def of(cls, width: int, rows: Sequence[tuple[TextId, TextSignature]]) -> Run:
        """A run of texts that all have windows of ``width``."""
        windows = [value for _, signature in rows for value in signature.windows]
        return cls(
            width,
            np.array([text_id for text_id, _ in rows], np.int64),
            np.array([signature.length for _, signature in rows], np.int64),
            np.array([signature.whole for _, signature in rows], np.uint64),
            np.array(windows, np.uint64).reshape(-1, _WINDOWS),
        )

    @classmethod
    def merged(cls, runs: Sequence[Run]) -> Run:
        """One run of the texts that are still alive in ``runs``, which share a width."""
        return cls(
            runs[0].width,
            np.concatenate([run.ids[run.alive] for run in runs]),
            np.concatenate([run.lengths[run.alive] for run in runs]),
            np.concatenate([run._wholes[run.alive] for run in runs]),
            np.concatenate([run._windows[run.alive] for run in runs]),
        )

    def discard(self, ids: Int) -> None:
        self.alive &= ~np.isin(self.ids, ids)

    def __len__(self) -> int:
        return len(self.ids)

    def anchor_hits(self, windows: U64) -> AnchorHits:
        """Where the string may hold a text.

        Args:
            windows: hash of the window at each place of the string.
        """
        places, first, count = self._anchors.look_up(windows)
        first, where, groups = np.unique(first, return_index=True, return_inverse=True)
        count = count[where]
        entries = expand(first, count)
        entry_groups = np.repeat(np.arange(len(first)), count)
        return AnchorHits(
            places,
            groups,
            entry_groups,
            self._anchor_places[entries],
            self._anchor_lengths[entries],
        )

    def rows_of(self, wholes: U64, lengths: Int) -> tuple[Int, Int]:
        """(index into the arguments, row) of each text with that hash and length."""
        index, first, count = self._whole_table.look_up(wholes)
        rows = self._rows_by_whole[expand(first, count)]
        index = np.repeat(index, count)
        good = self.alive[rows] & (self.lengths[rows] == lengths[index])
        return index[good], rows[good]

    def near_hits(self, windows: U64, places: Int) -> tuple[Int, Int, Int]:
        """(row, window number, place in the string) of known windows, sorted in that order.

        Bounded: of a window that very many texts have, the first of them; of very many windows,
        those that fewest texts have.

        Args:
            windows: hashes of the windows that begin at ``places`` of the string.
        """
        index, first, count = self._window_table.look_up(windows)
        count = np.minimum(count, _NEAR_TEXTS_A_WINDOW)
        cheapest = np.argsort(count, kind="stable")
        cheapest = cheapest[: np.searchsorted(np.cumsum(count[cheapest]), _NEAR_PAIRS, "right")]
        index, first, count = index[cheapest], first[cheapest], count[cheapest]
        postings = self._postings[expand(first, count)].astype(np.int64)
        places = np.repeat(places[index], count)
        alive = self.alive[postings // _WINDOWS]
        postings, places = postings[alive], places[alive]
        order = np.lexsort((places, postings))
        rows, numbers = np.divmod(postings[order], _WINDOWS)
        return rows, numbers, places[order]
