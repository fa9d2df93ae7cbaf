"""The packed plan, as the attention kernel reads it, and the columns it is made from.

Everything is packed into one int32 array. Records point at others by their place in it, so that
the kernel takes few dependent loads to its first key, and one captured launch serves every plan.

    head     [HEAD]              places of tokens, live, merge, nodes; number of rows to merge
    workers  [classes, W + 1]    place of each worker's first item
    items    [items, 6]          place of its rows, rows, place of its blocks, blocks,
                                 1 = walking, 1 = its rows have no other part
    rows     [rows, 4]           query token, rank, base, slot of the partial result
    blocks   [blocks, 4]         slot of the first key (or place of its page number, where a block
                                 spans pages), bits, base, place of the run
    runs     [runs, 8]           place of its page numbers, first key, end of keys, base, rank,
                                 causal, live text, scale of scores
    pages    [pages]             page numbers
    tokens   [tokens]            position of every query token
    live     [live slots]        position of every live slot; windows and ALiBi need it
    merge    [merged rows, 4]    query token, first slot, slots, log-sum-exp scale
    nodes    [slots]             1 = a part over nodes; needed for the log-sum-exp scale

The bits of a block are its keys (8 bits), 1 = opens a run, 1 = some rows do not see all of it, and
the number of the block in its segment.

A row of rank r sees key i of a run if ``r >= rank + causal * i``: nodes have causal 0 and their
first visible row as rank, live text has causal 1 and minus its first slot.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from lazyrag_kernels.attention.columns import Ints

HEAD = 8
ITEM_FIELDS = 6
ROW_FIELDS = 4
RUN_FIELDS = 8
BLOCK_FIELDS = 4
OPENS = 1 << 8
MASKED = 1 << 9
NUMBER = 10  # bits before the number
MERGE_FIELDS = 4


class Head(IntEnum):
    """Entries of the head of the table."""

    TOKENS = 0
    LIVE = 1
    MERGE = 2
    NODES = 3
    MERGED_ROWS = 4


class Run(IntEnum):
    """Columns of a run, and of the segments it is cut from."""

    PAGES = 0
    START = 1
    STOP = 2
    BASE = 3
    RANK = 4
    CAUSAL = 5
    LIVE = 6
    SCALE = 7


class PlanError(ValueError):
    """The batch cannot be planned; the message says why and what would help."""


@dataclass(frozen=True, slots=True)
class Heads:
    """Attention heads of a model: ``q_heads`` share ``kv_heads``, each ``dim`` wide."""

    q_heads: int
    kv_heads: int
    dim: int

    @property
    def group(self) -> int:
        return self.q_heads // self.kv_heads

    @property
    def partial_bytes(self) -> int:
        """Of one row's partial result: fp32 values and a log-sum-exp a head."""
        return self.q_heads * (self.dim + 1) * 4


@dataclass(frozen=True, slots=True)
class TileClass:
    """One launch: all its items have row tiles of one size.

    Attributes:
        rows: tile height, query tokens times group.
        block: keys a step; runs are cut at multiples of it.
        workers: resident programs a kv head.
        least_blocks: no piece of a cut unit is shorter.
        overhead: what starting an item costs, in blocks.
        whole: from this many units a worker on, units stay whole and are dealt, the heaviest
            first; row tiles of one request then walk over its keys side by side.
        warps, stages: of the launch.
    """

    rows: int
    block: int
    workers: int
    least_blocks: int = 2
    overhead: int = 2
    whole: float = float("inf")
    warps: int = 4
    stages: int = 3


@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """What `TritonStep` loads onto the device.

    Attributes:
        table: int32, see the module.
        classes, page_size: what it was made for.
        rows: query tokens, padding included.
        partials: slots used in the workspace.
        merged_rows: rows that the merge writes, padding included.
        growing: int64 [2, entries], places of the table that one decode step changes, and by how
            much; see `TritonStep.advance`.
        steps: how many decode steps the plan lasts, 0 for other batches.
        items: a tile class.
        joined: row tiles of joined items.
        window: of the layers this plan is for.
        temperature, lse_scale, positions: whether the kernel needs that feature or section.
    """

    table: NDArray[np.int32]
    classes: tuple[TileClass, ...]
    page_size: int
    rows: int
    partials: int
    merged_rows: int
    growing: Ints
    steps: int
    items: tuple[int, ...]
    joined: int
    window: int | None
    temperature: bool
    lse_scale: bool
    positions: bool

    @property
    def launches(self) -> tuple[bool, ...]:
        """Which launches it takes: one a tile class, then the merge."""
        return (*(items > 0 for items in self.items), self.merged_rows > 0)


@dataclass(frozen=True, slots=True, eq=False)
class Units:
    """Row tiles and the runs they attend to, before they are cut into items."""

    tile_class: Ints  # [units]
    walking: Ints  # [units]
    scaled: Ints  # [units], 1 = over nodes only
    entries: Ints  # [units], rows of the unit
    rows: Ints  # [sum(entries), 3]: token, rank, base
    runs: Ints  # [pairs, RUN_FIELDS], unit-major
    unit_of_run: Ints  # [pairs]


@dataclass(frozen=True, slots=True, eq=False)
class Items:
    """Units of one class cut into items."""

    unit: Ints  # [items]
    chunk: Ints  # [items], number within the unit
    runs: Ints  # [runs, RUN_FIELDS], item-major
    run_count: Ints  # [items]
    blocks: Ints  # [items]
    workers: Ints  # [W + 1], first item of each worker
    per_unit: Ints  # [units of the class], items cut from it


@dataclass(slots=True, eq=False)
class Gathered:
    """The batch as columns."""

    rows: Ints  # [requests]
    first_token: Ints  # [requests]
    lse_scale: NDArray[np.float64]  # [requests]
    node_request: Ints  # [nodes]
    node: Ints  # [nodes], equal for uses of the same keys
    nodes: Ints  # [nodes, RUN_FIELDS]
    live: Ints  # [requests, RUN_FIELDS]
    pages: Ints
    positions: Ints  # [tokens]
    live_positions: Ints
