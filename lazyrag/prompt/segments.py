"""A prompt as token ids: an ordered list of live runs and nodes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum, auto

from lazyrag.types import NodeKey


@dataclass(frozen=True, slots=True)
class LiveRun:
    """Tokens computed with the request; ``offset`` moves it and all that follows."""

    ids: tuple[int, ...]
    offset: int | None = None


class NodeSource(Enum):
    """How a node came to be known."""

    INGESTED = auto()
    ALIAS = auto()
    """Registered only (as another form of an ingested node, say), encoded at its first use."""
    GIVEN = auto()
    """Handed over with this request."""


@dataclass(frozen=True, slots=True)
class NodeIdentity:
    """A text as a node.

    Attributes:
        key: of the node.
        ids: of its text.
        behind: ids that it is encoded behind, besides the sink; they are no part of it.
    """

    key: NodeKey
    ids: tuple[int, ...]
    behind: tuple[int, ...] = ()

    @property
    def tokens_to_compute(self) -> int:
        """Tokens through the model to encode it."""
        return len(self.behind) + len(self.ids)


@dataclass(frozen=True, slots=True)
class NodeRun:
    """Tokens whose KV is reused.

    Attributes:
        key: identity of the whole node.
        ids: ids of the whole node.
        offset: explicit S_d, or None.
        used: how many leading tokens this prompt uses (a causal prefix of a node is valid).
        text: what it was made from, if known.
        source: how it came to be known.
        behind: see `NodeIdentity`.
    """

    key: NodeKey
    ids: tuple[int, ...]
    used: int
    offset: int | None = None
    text: str | None = None
    source: NodeSource = NodeSource.INGESTED
    behind: tuple[int, ...] = ()

    @property
    def tokens_to_compute(self) -> int:
        """Tokens through the model to encode the whole node."""
        return len(self.behind) + len(self.ids)


Run = LiveRun | NodeRun


@dataclass(frozen=True, slots=True)
class PlacedNode:
    """A node at its place: ``first_row`` live tokens stand before it."""

    run: NodeRun
    offset: int
    first_row: int


@dataclass(frozen=True, slots=True)
class PlacedPrompt:
    """Every token's position.

    Attributes:
        live_ids: all live tokens in order.
        live_positions: their final positions.
        nodes: in prompt order.
        next_position: of the first generated token.
    """

    live_ids: tuple[int, ...]
    live_positions: tuple[int, ...]
    nodes: tuple[PlacedNode, ...]
    next_position: int

    @property
    def tokens(self) -> int:
        """Length of the prompt in tokens."""
        return len(self.live_ids) + sum(node.run.used for node in self.nodes)


def end_live(runs: list[Run]) -> list[Run]:
    """Make the last token live: the first new token is predicted from a computed row.

    A prompt that ends with a node keeps all of it but the last token as the node's causal prefix.
    """
    runs = [run for run in runs if isinstance(run, NodeRun) or run.ids]
    if runs and isinstance(last := runs[-1], NodeRun):
        head = replace(last, used=last.used - 1)
        offset = None if last.offset is None else last.offset + head.used
        tail = LiveRun((last.ids[head.used],), offset)
        return [*runs[:-1], *([head] if head.used else []), tail]
    return runs


def place(runs: list[Run]) -> PlacedPrompt:
    """Give every token its position (invariant 3: S_d is the sum of lengths before, or free)."""
    cursor = 0
    live_ids: list[int] = []
    live_positions: list[int] = []
    nodes: list[PlacedNode] = []
    for run in runs:
        if isinstance(run, LiveRun):
            cursor = cursor if run.offset is None else run.offset
            live_ids += run.ids
            live_positions += range(cursor, cursor + len(run.ids))
            cursor += len(run.ids)
        else:
            offset = cursor if run.offset is None else run.offset
            nodes.append(PlacedNode(run, offset, len(live_ids)))
            cursor += run.used
    return PlacedPrompt(tuple(live_ids), tuple(live_positions), tuple(nodes), cursor)


def as_live(runs: list[Run]) -> list[Run]:
    """The same prompt with nothing reused, every token at the same position."""
    live: list[Run] = []
    cursor = 0
    for run in runs:
        if isinstance(run, LiveRun):
            cursor = cursor if run.offset is None else run.offset
            live.append(LiveRun(run.ids, cursor))
            cursor += len(run.ids)
        else:  # its own offset moves a node alone
            offset = cursor if run.offset is None else run.offset
            live.append(LiveRun(run.ids[: run.used], offset))
            cursor += run.used
    return live
