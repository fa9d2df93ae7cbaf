"""What one step attends to: the input shared by the reference and every fast path.

A request's prompt is an ordered list of segments. Its live text (everything computed with the
request, generated tokens included) lies in order in pages of its own; nodes lie in shared pages.

    pool      [ A A A | B B . | L L L | L . . ]      pages of `page_size` slots
    prompt    live(2)  node A  live(1)  node B  live(1)
    position  0 1      2 3 4   5        6 7     8
    rows      0 1              2                3    <- the live tokens are the query rows

Two things are kept apart. The *order* of segments decides what a row sees: `NodeSpan.first_row`
and the slot order of live text. The *offset* decides rotation and window: row at position n meets
key i of a node at n - (offset + i). Visibility is never derived from positions.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from lazyrag_kernels.rope import Rotary

Pages = tuple[int, ...]
"""Page numbers of one segment, in token order; the last page may be partly filled."""


@dataclass(frozen=True, slots=True)
class NodeSpan:
    """A node as one request sees it.

    Attributes:
        pages: where its K (rotated at the local position) and V lie.
        length: tokens, 0 or more; slots beyond it in the last page are never read.
        offset: S_d, the position of its first token in this request.
        first_row: rows of this step from this one on see the whole node, rows before see nothing.
        temperature: the scores of its keys are divided by it.
    """

    pages: Pages
    length: int
    offset: int
    first_row: int = 0
    temperature: float = 1.0


@dataclass(frozen=True, slots=True, eq=False)
class LiveSpan:
    """The live text of a request, causal by slot order.

    Attributes:
        pages: where its K (rotated at the final position) and V lie.
        positions: int64 [slots used after this step], the final position of each live slot.
        first_slot: slot of this step's first row; row r sees slots 0 .. first_slot + r.
    """

    pages: Pages
    positions: Tensor
    first_slot: int

    @property
    def length(self) -> int:
        return self.positions.numel()


@dataclass(frozen=True, slots=True, eq=False)
class RequestRows:
    """The query tokens of one request in this step and what they may see.

    Attributes:
        live: its live text.
        nodes: its nodes, in the order of the prompt.
        lse_scale: the nodes are merged among themselves first; the log-sum-exp of the result is
            multiplied by it before live text joins (APE, arXiv 2502.05431).
    """

    live: LiveSpan
    nodes: tuple[NodeSpan, ...] = ()
    lse_scale: float = 1.0

    @property
    def rows(self) -> int:
        return self.live.length - self.live.first_slot

    @property
    def positions(self) -> Tensor:
        """int64 [rows], final positions of the query tokens."""
        return self.live.positions[self.live.first_slot :]


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """All requests of a step; their query tokens are packed in this order."""

    requests: tuple[RequestRows, ...]
    page_size: int

    @property
    def rows(self) -> int:
        return sum(request.rows for request in self.requests)


@dataclass(frozen=True, slots=True, eq=False)
class AttentionLayer:
    """What attention needs to know of one layer.

    Attributes:
        scale: factor on q . k.
        rotary: its frequency table; an empty one = no rotation.
        window: a key at position p is seen from n only if n - p < window; None = no window.
        softcap: scores are bent to softcap * tanh(score / softcap), before bias and mask.
        sinks: fp32 [q_heads], a logit a head that takes weight and has no value.
        alibi: fp32 [q_heads], slopes: slope * (p - n) is added to the score (arXiv 2108.12409).
    """

    scale: float
    rotary: Rotary
    window: int | None = None
    softcap: float | None = None
    sinks: Tensor | None = None
    alibi: Tensor | None = None

    def refuse_unless_plain(self, path: str) -> None:
        """For paths that know scale, rotary and window only.

        Raises:
            ValueError: names the feature that ``path`` lacks.
        """
        for name in ("softcap", "sinks", "alibi"):
            if getattr(self, name) is not None:
                raise ValueError(f"{path} does not support {name}")


def slot_ranges(pages: Pages, length: int, page_size: int) -> list[tuple[int, int]]:
    """The slots of a segment as few contiguous ranges [start, stop) as its pages allow, in order.

    Raises:
        ValueError: ``pages`` are fewer than ``length`` tokens need.
    """
    if length > len(pages) * page_size:
        raise ValueError(f"{length} tokens do not fit {len(pages)} pages of {page_size}")
    ranges: list[tuple[int, int]] = []
    left = length
    for page in pages:
        if left <= 0:
            break
        start, stop = page * page_size, page * page_size + min(left, page_size)
        if ranges and ranges[-1][1] == start:
            ranges[-1] = (ranges[-1][0], stop)
        else:
            ranges.append((start, stop))
        left -= page_size
    return ranges
