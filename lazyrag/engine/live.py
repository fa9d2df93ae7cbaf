"""Live text that was computed before: pages reused while everything before them is the same.

The KV of live text depends on all it has seen. So a full page of it has a name, a digest of every
(id, position) up to its end and of every (node, offset) in between, chained page by page, and is
reused only under an equal name: a repeated system text, an unchanged chat history. Text behind
nodes has seen them through a `Scale`, which is part of its name; text before any node has not.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

from lazyrag.prompt.segments import PlacedNode, PlacedPrompt
from lazyrag.quality.scale import PLAIN, Scale


@dataclass(frozen=True, slots=True)
class LiveKey:
    """Name of one full page of live text: digest of all that shaped its K and V."""

    digest: bytes


class LiveNames:
    """Names the full pages of one request's live text, in order.

    Args:
        nodes: of the prompt, in order.
        page_size: tokens a page.
        scale: of attention to the nodes.
    """

    def __init__(self, nodes: Sequence[PlacedNode], page_size: int, scale: Scale = PLAIN) -> None:
        self._nodes = nodes
        self._scale = struct.pack("<2d", *scale)
        self._next_node = 0
        self._page_size = page_size
        self._row = 0
        self._ids = array("q")
        self._positions = array("q")
        self._before = b""

    def extend(self, ids: Sequence[int], positions: Sequence[int]) -> list[LiveKey]:
        """Names of the pages that the next tokens fill."""
        self._ids.extend(ids)
        self._positions.extend(positions)
        names: list[LiveKey] = []
        size = self._page_size
        full = len(self._ids) // size * size
        for first in range(0, full, size):
            page = slice(first, first + size)
            digest = blake2b(self._before, digest_size=32)
            digest.update(self._ids[page].tobytes())
            digest.update(self._positions[page].tobytes())
            self._row += size
            while self._next_node < len(self._nodes):
                node = self._nodes[self._next_node]
                if node.first_row >= self._row:
                    break
                digest.update(node.run.key.digest)
                digest.update(struct.pack("<3q", node.first_row, node.offset, node.run.used))
                digest.update(self._scale)
                self._next_node += 1
            self._before = digest.digest()
            names.append(LiveKey(self._before))
        del self._ids[:full], self._positions[:full]
        return names


def reusable_names(prompt: PlacedPrompt, page_size: int, scale: Scale = PLAIN) -> list[LiveKey]:
    """Names of the prompt's full live pages; its last token, which must be computed, is in none."""
    most = len(prompt.live_ids) - 1
    names = LiveNames(prompt.nodes, page_size, scale)
    return names.extend(prompt.live_ids[:most], prompt.live_positions[:most])
