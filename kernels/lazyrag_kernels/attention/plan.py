"""From a batch to the item tables of the attention kernel.

The work of a step is cut in three stages, all in numpy over whole columns:

    units   a tile of query rows and the segments its rows attend to. Two kinds, one mechanism:
            walking  rows of one request, all its segments one after the other
            joined   one node, rows of every request that uses it, each row with its own offset
    items   a unit's keys cut where one worker's share ends. The shares are equal to a block of
            keys, whatever the lengths of the requests, so no worker waits for another.
    parts   a row whose keys lie in more than one item gets one partial result an item; the merge
            adds them up in this order. A row with a single item is written where it belongs.

A worker is one resident program a kv head. Offsets are kept apart from positions: row r meets key i
of a run at distance ``position[r] - (row_base[r] + run_base) - i``; walking items use the second
base, joined items the first.

How the result is laid out for the kernel is `table`'s matter, where units are cut is `cut`'s.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lazyrag_kernels.attention.batch import Batch, NodeSpan, Pages
from lazyrag_kernels.attention.columns import (
    Ints,
    before,
    concatenate,
    float_bits,
    none,
    ranges,
)
from lazyrag_kernels.attention.cut import cut
from lazyrag_kernels.attention.lone import lone_plan
from lazyrag_kernels.attention.pack import pack
from lazyrag_kernels.attention.table import (
    RUN_FIELDS,
    Gathered,
    Heads,
    Plan,
    PlanError,
    Run,
    TileClass,
    Units,
)

WORKSPACE_BYTES = 256 * 2**20


@dataclass(slots=True)
class Planner:
    """Plans steps for one model and one pool.

    A request whose `RequestRows.nodes` is the same object as in the last plan costs no Python per
    node; keep that tuple from step to step.

    Args:
        heads: of the model.
        page_size: of the pool, in tokens.
        classes: tile classes, by rising height; the last takes every longer request.
        element_bytes: of the pool, weighs joining against the traffic of partial results.
        limit: distances from a row to the start of a segment must stay below it, see `AngleTable`.
        workspace_bytes: bound on partial results.
        join: whether rows of several requests may share an item.
    """

    heads: Heads
    page_size: int
    classes: tuple[TileClass, ...]
    element_bytes: int = 2
    limit: int = 2**20
    workspace_bytes: int = WORKSPACE_BYTES
    join: bool = True
    _seen: dict[int, tuple[tuple[NodeSpan, ...], Ints, Ints]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.heads.q_heads % self.heads.kv_heads:
            raise PlanError(
                f"{self.heads.q_heads} query heads are no multiple of "
                f"{self.heads.kv_heads} kv heads"
            )
        if self.heads.group > self.classes[-1].rows:
            raise PlanError(
                f"{self.heads.group} query heads a kv head exceed the tallest tile of "
                f"{self.classes[-1].rows} rows"
            )

    def plan(
        self,
        batch: Batch,
        window: int | None = None,
        *,
        padded_rows: int | None = None,
        positions: bool = False,
    ) -> Plan:
        """Tables for one step and one kind of layer.

        Args:
            batch: what each request's rows see.
            window: of the layers the plan is for.
            padded_rows: query rows of the captured launch; those beyond the batch become zeros.
            positions: also list the positions of live keys although there is no window (ALiBi).

        Raises:
            PlanError: a segment is longer than its pages, a distance lies outside the angle table,
                a temperature is not positive, or the workspace cannot hold the step.
        """
        if batch.page_size != self.page_size:
            raise PlanError(f"pages of {batch.page_size} tokens, planner made for {self.page_size}")
        gathered = self._gather(batch, window is not None or positions)
        tokens = len(gathered.positions)
        rows = tokens if padded_rows is None else padded_rows
        if tokens > rows:
            raise PlanError(f"{tokens} query rows do not fit a launch of {rows}")
        capacity = self.workspace_bytes // self.heads.partial_bytes
        if len(gathered.rows) == 1 and tokens > 1 and window is None and not positions:
            lone = self._lone_plan(gathered, rows)
            if lone is not None and lone.partials <= capacity:
                return lone
        # The workspace is kept by longer shares first, then by not joining.
        for join in (True, False) if self.join and window is None else (False,):
            units = self._units(gathered, window, join)
            for shrink in (1, 2, 4, 0):
                items = [cut(units, index, spec, shrink) for index, spec in enumerate(self.classes)]
                plan = pack(
                    gathered, units, items, self.classes, self.page_size, rows, window, positions
                )
                if plan.partials <= capacity:
                    return plan
        raise PlanError(
            f"{plan.partials} partial results of {self.heads.partial_bytes} bytes exceed the "
            f"workspace of {self.workspace_bytes} bytes; prefill fewer rows in one step"
        )

    def _lone_plan(self, gathered: Gathered, rows: int) -> Plan | None:
        segments = np.concatenate((gathered.nodes, gathered.live))
        if gathered.lse_scale[0] != 1.0 or (segments[:, Run.SCALE] != float_bits(1.0)).any():
            return None
        return lone_plan(
            segments,
            gathered.pages,
            gathered.positions,
            self.heads,
            self.classes,
            self.page_size,
            rows,
        )

    def _gather(self, batch: Batch, with_positions: bool) -> Gathered:
        nodes, pages = [], []
        live_pages: list[int] = []
        live_positions: list[Tensor] = []
        columns: list[tuple[int, int, int]] = []
        lse_scale: list[float] = []
        seen, page_size = self._seen, self.page_size
        if len(seen) > 4 * len(batch.requests) + 64:
            seen.clear()
        for request in batch.requests:
            spans, live = request.nodes, request.live
            where = live.positions
            length = where.numel()
            if length == live.first_slot:
                continue
            known = seen.get(id(spans))
            if known is None or known[0] is not spans:
                known = (spans, *_node_columns(spans, page_size))
                seen[id(spans)] = known
            nodes.append(known[1])
            pages.append(known[2])
            used = -(-length // page_size)
            if used > len(live.pages):
                raise PlanError(
                    f"{length} tokens do not fit {len(live.pages)} pages of {page_size}"
                )
            live_pages += live.pages[:used]
            live_positions.append(where)
            columns.append((live.first_slot, length, used))
            lse_scale.append(request.lse_scale)
        count = len(columns)
        first_slot, lengths, live_count = np.array(columns, np.int64).reshape(count, 3).T
        rows = lengths - first_slot
        every = torch.cat(live_positions).numpy() if live_positions else none()
        node_count = np.array([column.shape[0] for column in nodes], np.int64)
        page_count = np.array([column.shape[0] for column in pages], np.int64)
        node_request = np.arange(count).repeat(node_count)
        table = concatenate(nodes, RUN_FIELDS + 1)
        table[:, Run.PAGES] += before(page_count)[node_request]
        live_table = np.zeros((count, RUN_FIELDS), np.int64)
        live_table[:, Run.PAGES] = page_count.sum() + before(live_count)
        live_table[:, Run.STOP] = lengths
        live_table[:, Run.RANK] = -first_slot
        live_table[:, Run.CAUSAL] = 1
        live_table[:, Run.LIVE] = before(lengths) if with_positions else 0
        live_table[:, Run.SCALE] = float_bits(1.0)
        gathered = Gathered(
            rows=rows,
            first_token=before(rows),
            lse_scale=np.array(lse_scale, np.float64),
            node_request=node_request,
            node=table[:, RUN_FIELDS],
            nodes=table[:, :RUN_FIELDS],
            live=live_table,
            pages=np.concatenate([*pages, np.array(live_pages, np.int64)]),
            positions=every[(before(lengths) + first_slot).repeat(rows) + ranges(rows)],
            live_positions=every if with_positions else none(),
        )
        self._check_distances(gathered)
        return gathered

    def _check_distances(self, gathered: Gathered) -> None:
        """Every n, S_d and n - S_d lies inside the angle table."""
        if not gathered.positions.size:
            return
        low = np.minimum.reduceat(gathered.positions, gathered.first_token)
        high = np.maximum.reduceat(gathered.positions, gathered.first_token)
        base = gathered.nodes[:, Run.BASE]
        far = max(
            int(high.max()),
            int(-low.min()),
            int(np.abs(base).max(initial=0)),
            int((high[gathered.node_request] - base).max(initial=0)),
            int((base - low[gathered.node_request]).max(initial=0)),
        )
        if far >= self.limit:
            raise PlanError(
                f"a query or the start of a segment lies {far} positions from 0 or from the other, "
                f"the angle table ends at {self.limit}; build it with a higher limit"
            )

    def _units(self, gathered: Gathered, window: int | None, join: bool) -> Units:
        joined = self._joined(gathered) if join else np.zeros(len(gathered.nodes), bool)
        walking = self._walking_units(gathered, ~joined, window)
        if not joined.any():
            return walking
        shared = self._joined_units(gathered, joined)
        least = int(shared.tile_class.max())  # few rows go along with many: one launch less
        return Units(
            *(
                np.concatenate((ours, theirs))
                for ours, theirs in (
                    (shared.tile_class.clip(least), walking.tile_class.clip(least)),
                    (shared.walking, walking.walking),
                    (shared.scaled, walking.scaled),
                    (shared.entries, walking.entries),
                    (shared.rows, walking.rows),
                    (shared.runs, walking.runs),
                    (shared.unit_of_run, walking.unit_of_run + len(shared.entries)),
                )
            )
        )

    def _joined(self, gathered: Gathered) -> NDArray[np.bool_]:
        """Which node uses are cheaper together: a read of the node saved against partials."""
        rows = gathered.rows[gathered.node_request]
        nodes = gathered.nodes
        able = (
            (rows * self.heads.group <= self._joined_class.rows)
            & (nodes[:, Run.RANK] <= 0)
            & (nodes[:, Run.SCALE] == float_bits(1.0))
        )
        if np.count_nonzero(able) < 2:
            return np.zeros(len(nodes), bool)
        chosen = np.flatnonzero(able)
        _, group, uses = np.unique(gathered.node[chosen], return_inverse=True, return_counts=True)
        if uses.max() < 2:
            return np.zeros(len(nodes), bool)
        together = np.bincount(group, weights=rows[chosen])[group]  # rows at the node
        tiles = np.ceil(together * self.heads.group / self._joined_class.rows)
        kv_bytes = 2 * self.heads.kv_heads * self.heads.dim * self.element_bytes
        saved = nodes[chosen, Run.STOP] * kv_bytes * (uses[group] - tiles)
        joined = np.zeros(len(nodes), bool)
        joined[chosen] = saved > 2 * self.heads.partial_bytes * together
        return joined

    @property
    def _joined_class(self) -> TileClass:
        """The class below the tallest: joined items are bound by memory."""
        return self.classes[max(0, len(self.classes) - 2)]

    def _joined_units(self, gathered: Gathered, joined: NDArray[np.bool_]) -> Units:
        uses = np.flatnonzero(joined)
        uses = uses[np.argsort(gathered.node[uses], kind="stable")]
        request = gathered.node_request[uses]
        rows = gathered.rows[request]
        within = ranges(rows)
        use = np.arange(len(uses)).repeat(rows)
        name = gathered.node[uses]
        is_first = np.concatenate(([True], name[1:] != name[:-1]))
        node = np.cumsum(is_first) - 1  # [uses]
        at_node = np.bincount(node, weights=rows).astype(np.int64)  # rows a node
        tile_rows = self._joined_class.rows // self.heads.group
        tiles = -(-at_node // tile_rows)
        entries = np.minimum(tile_rows, at_node.repeat(tiles) - ranges(tiles) * tile_rows)
        node_rows = gathered.nodes[uses][is_first].copy()
        node_rows[:, Run.BASE] = 0
        node_rows[:, Run.RANK] = 0
        tile_class = np.searchsorted(
            [c.rows for c in self.classes], entries * self.heads.group, side="left"
        )
        runs = np.repeat(node_rows, tiles, axis=0)
        base = gathered.nodes[uses, Run.BASE][use]
        token = gathered.first_token[request][use] + within
        return Units(
            tile_class=tile_class,
            walking=np.zeros(len(entries), np.int64),
            scaled=np.ones(len(entries), np.int64),
            entries=entries,
            rows=np.stack((token, within, base), axis=1),
            runs=runs,
            unit_of_run=np.arange(len(entries)),
        )

    def _walking_units(
        self, gathered: Gathered, walks: NDArray[np.bool_], window: int | None
    ) -> Units:
        requests = len(gathered.rows)
        group = self.heads.group
        heights = np.array([c.rows for c in self.classes])
        of_request = np.searchsorted(
            heights, np.minimum(gathered.rows * group, heights[-1]), side="left"
        )
        # Segments of each request, live text last.
        owner = gathered.node_request[walks]
        segment_count = np.bincount(owner, minlength=requests) + 1
        segments = np.empty((len(owner) + requests, RUN_FIELDS), np.int64)
        segments[np.arange(len(owner)) + owner] = gathered.nodes[walks]
        segments[np.cumsum(segment_count) - 1] = gathered.live

        tile_tokens = heights[of_request] // group
        tiles = -(-gathered.rows // tile_tokens)
        request = np.arange(requests).repeat(tiles)
        first_row = ranges(tiles) * tile_tokens[request]
        entries = np.minimum(tile_tokens[request], gathered.rows[request] - first_row)
        pairs = segment_count[request]
        tile = np.arange(len(request)).repeat(pairs)
        runs = segments[before(segment_count)[request][tile] + ranges(pairs)]
        end_row = (first_row + entries)[tile]
        causal = runs[:, Run.CAUSAL] == 1
        rank = runs[:, Run.RANK]
        runs[:, Run.STOP] = np.where(
            causal, end_row - rank, np.where(rank < end_row, runs[:, Run.STOP], 0)
        )
        token = (gathered.first_token[request] + first_row).repeat(entries) + ranges(entries)
        if window is not None:
            lowest = np.minimum.reduceat(gathered.positions[token], before(entries))
            self._skip_hidden(runs, tile, lowest - window, gathered, of_request[request])
        kept = runs[:, Run.STOP] > runs[:, Run.START]
        runs, tile, causal = runs[kept], tile[kept], causal[kept]

        # Nodes under a log-sum-exp scale are units of their own.
        apart = (gathered.lse_scale[request][tile] != 1.0) & ~causal
        opens = np.ones(len(tile), bool)
        opens[1:] = (tile[1:] != tile[:-1]) | (apart[1:] != apart[:-1])
        of_unit = tile[opens]
        unit_entries = entries[of_unit]
        within = ranges(unit_entries)
        rank = first_row[of_unit].repeat(unit_entries) + within
        token = (gathered.first_token[request[of_unit]]).repeat(unit_entries) + rank
        return Units(
            tile_class=of_request[request[of_unit]],
            walking=np.ones(len(of_unit), np.int64),
            scaled=apart[opens].astype(np.int64),
            entries=unit_entries,
            rows=np.stack((token, rank, np.zeros_like(rank)), axis=1),
            runs=runs,
            unit_of_run=np.cumsum(opens) - 1,
        )

    def _skip_hidden(
        self, runs: Ints, tile: Ints, hidden: Ints, gathered: Gathered, tile_class: Ints
    ) -> None:
        """Start runs behind the keys that the window hides from every row of the tile.

        Args:
            runs: changed in place.
            tile: of each run.
            hidden: last hidden position of each tile.
            gathered, tile_class: of the batch and of each tile.
        """
        causal = runs[:, Run.CAUSAL] == 1
        start = hidden[tile] + 1 - runs[:, Run.BASE]
        for index in np.flatnonzero(causal):
            first = runs[index, Run.LIVE]
            where = gathered.live_positions[first : first + runs[index, Run.STOP]]
            ascending = bool((where[1:] >= where[:-1]).all())
            start[index] = (
                np.searchsorted(where, hidden[tile[index]], side="right") if ascending else 0
            )
        block = np.array([c.block for c in self.classes])[tile_class][tile]
        runs[:, Run.START] = np.maximum(start, 0) // block * block


def _node_columns(spans: tuple[NodeSpan, ...], page_size: int) -> tuple[Ints, Ints]:
    """Columns of a request's nodes (`Run`, then what tells nodes apart) and their pages."""
    spans = tuple(span for span in spans if span.length)
    table = np.zeros((len(spans), RUN_FIELDS + 1), np.int64)
    used: list[Pages] = []
    for span in spans:
        if span.length > len(span.pages) * page_size:
            raise PlanError(
                f"{span.length} tokens do not fit {len(span.pages)} pages of {page_size}"
            )
        if not span.temperature > 0:
            raise PlanError(f"a temperature must be positive, got {span.temperature}")
        used.append(span.pages[: -(-span.length // page_size)])
    if spans:
        table[:, Run.PAGES] = before(np.array([len(pages) for pages in used]))
        table[:, Run.STOP] = [span.length for span in spans]
        table[:, Run.BASE] = [span.offset for span in spans]
        table[:, Run.RANK] = [span.first_row for span in spans]
        table[:, Run.SCALE] = float_bits(np.array([1 / span.temperature for span in spans]))
        # A page belongs to one node, of which a request may use only the head.
        table[:, RUN_FIELDS] = [
            (pages[0] << 32) + span.length for pages, span in zip(used, spans, strict=True)
        ]
    return table, np.array([page for pages in used for page in pages], np.int64)
