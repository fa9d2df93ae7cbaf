"""Lay a plan out in one array, see `table`."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from lazyrag_kernels.attention.columns import Ints, before, float_bits, none, ranges
from lazyrag_kernels.attention.table import (
    BLOCK_FIELDS,
    HEAD,
    ITEM_FIELDS,
    MASKED,
    MERGE_FIELDS,
    NUMBER,
    OPENS,
    ROW_FIELDS,
    RUN_FIELDS,
    Gathered,
    Head,
    Items,
    Plan,
    Run,
    TileClass,
    Units,
)


def pack(
    gathered: Gathered,
    units: Units,
    cut: Sequence[Items],
    classes: tuple[TileClass, ...],
    page_size: int,
    padded_rows: int,
    window: int | None,
    positions: bool,
) -> Plan:
    tokens = len(gathered.positions)
    parts = np.zeros(len(units.entries), np.int64)  # items a unit
    for tile_class, items in enumerate(cut):
        parts[units.tile_class == tile_class] = items.per_unit
    entry_parts = parts.repeat(units.entries)
    token = units.rows[:, 0]
    per_token = np.bincount(token, weights=entry_parts, minlength=tokens).astype(np.int64)
    merged = per_token > 1
    first_slot = before(np.where(merged, per_token, 0))
    order = np.argsort(token, kind="stable")
    earlier = np.empty(len(token), np.int64)
    earlier[order] = before(entry_parts[order])
    # Parts of earlier tokens, written straight or not, lie before: leave them out.
    ordinal = earlier - before(per_token)[token]
    slot = np.where(merged[token], first_slot[token] + ordinal, -1)
    slots = int(per_token[merged].sum())

    unit = np.concatenate([items.unit for items in cut])
    chunk = np.concatenate([items.chunk for items in cut])
    run_count = np.concatenate([items.run_count for items in cut])
    item_rows = units.entries[unit]
    entry = before(units.entries)[unit].repeat(item_rows) + ranges(item_rows)
    row_table = np.empty((len(entry), ROW_FIELDS), np.int64)
    row_table[:, :3] = units.rows[entry]
    row_table[:, 3] = slot[entry] + chunk.repeat(item_rows)
    direct = slot[before(units.entries)[unit]] < 0  # rows of a unit have the same parts
    runs = np.concatenate([items.runs for items in cut])

    lse_scale = bool((gathered.lse_scale != 1.0).any())
    merge_tokens = np.flatnonzero(merged)
    padding = np.arange(tokens, padded_rows)
    merge_table = np.zeros((len(merge_tokens) + len(padding), MERGE_FIELDS), np.int64)
    merge_table[:, 0] = np.concatenate((merge_tokens, padding))
    merge_table[: len(merge_tokens), 1] = first_slot[merged]
    merge_table[: len(merge_tokens), 2] = per_token[merged]
    merge_table[:, 3] = float_bits(1.0)
    node_parts = none()
    if lse_scale:
        per_row = gathered.lse_scale.repeat(gathered.rows)
        merge_table[: len(merge_tokens), 3] = float_bits(per_row[merged])
        node_parts = np.zeros(slots, np.int64)
        used = ~direct.repeat(item_rows)
        node_parts[row_table[used, 3]] = units.scaled[unit].repeat(item_rows)[used]

    blocks = np.concatenate([items.blocks for items in cut])
    items_at = HEAD + sum(len(items.workers) for items in cut)
    rows_at = items_at + len(unit) * ITEM_FIELDS
    blocks_at = rows_at + row_table.size
    runs_at = blocks_at + int(blocks.sum()) * BLOCK_FIELDS
    pages_at = runs_at + runs.size
    least_rank = row_table[before(item_rows), 1]
    block_table = _blocks(
        runs,
        units.tile_class[unit].repeat(run_count),
        least_rank.repeat(run_count),
        gathered.pages,
        runs_at,
        pages_at,
        classes,
        page_size,
    )
    runs[:, Run.PAGES] += pages_at
    item_table = np.empty((len(unit), ITEM_FIELDS), np.int64)
    item_table[:, 0] = rows_at + before(item_rows) * ROW_FIELDS
    item_table[:, 2] = blocks_at + before(blocks) * BLOCK_FIELDS
    item_table[:, 3] = blocks
    item_table[:, 1] = item_rows
    item_table[:, 4] = units.walking[unit]
    item_table[:, 5] = direct
    first_item = before(np.array([len(items.unit) for items in cut]))
    workers = [
        items_at + (first + items.workers) * ITEM_FIELDS
        for first, items in zip(first_item.tolist(), cut, strict=True)
    ]

    sections = (
        np.concatenate((gathered.positions, np.zeros(len(padding), np.int64))),
        gathered.live_positions,
        merge_table,
        node_parts,
    )
    tokens_at = pages_at + gathered.pages.size
    head = np.zeros(HEAD, np.int64)
    sizes = np.array([section.size for section in sections])
    head[: len(sections)] = tokens_at + before(sizes)
    head[Head.MERGED_ROWS] = len(merge_table)
    growing, steps = _growing(
        gathered,
        runs,
        block_table,
        blocks_at,
        runs_at,
        tokens_at,
        sections[1].size > 0,
        classes,
        page_size,
    )
    parts_of_table = (
        *(head, *workers, item_table, row_table, block_table, runs, gathered.pages),
        *sections,
    )
    return Plan(
        table=np.concatenate(
            [part.reshape(-1) for part in parts_of_table], dtype=np.int32, casting="same_kind"
        ),
        classes=classes,
        page_size=page_size,
        rows=padded_rows,
        partials=slots,
        merged_rows=len(merge_table),
        growing=growing,
        steps=steps,
        items=tuple(len(items.unit) for items in cut),
        joined=int(np.count_nonzero(units.walking == 0)),
        window=window,
        temperature=bool((runs[:, Run.SCALE] != float_bits(1.0)).any()),
        lse_scale=lse_scale,
        positions=window is not None or positions,
    )


def _blocks(
    runs: Ints,
    tile_class: Ints,
    least_rank: Ints,
    pages: Ints,
    runs_at: int,
    pages_at: int,
    classes: Sequence[TileClass],
    page_size: int,
) -> Ints:
    """The blocks of all runs, in order.

    Args:
        runs: of all items.
        tile_class, least_rank: of the item of each run.
        pages: page numbers.
        runs_at, pages_at: places of both sections in the table.
        classes, page_size: of the launch and the pool.
    """
    size = np.array([c.block for c in classes])[tile_class]
    start = runs[:, Run.START]
    keys = runs[:, Run.STOP] - start
    count = -(-keys // size)
    first = before(count)  # block that opens each run
    index = np.arange(int(count.sum()))
    table = np.empty((len(index), BLOCK_FIELDS), np.int64)
    bits = (index << NUMBER) + (size + ((start // size - first) << NUMBER)).repeat(count)
    bits[first] += OPENS
    bits[first + count - 1] += keys - count * size
    # Keys that every row of the item sees, from the first of the run on.
    to_all = np.where(
        runs[:, Run.CAUSAL] == 1,
        least_rank - runs[:, Run.RANK] - start + 1,
        np.where(runs[:, Run.RANK] > least_rank, 0, keys),
    )
    whole = np.clip(np.minimum(to_all, keys) // size, 0, count)
    bits[(first + whole).repeat(count - whole) + ranges(count - whole)] += MASKED
    table[:, 1] = bits
    per_page = page_size // size  # blocks a page, 0 where a block spans pages
    page = runs[:, Run.PAGES] + start // page_size
    if (per_page == 1).all():
        table[:, 0] = pages[index + (page - first).repeat(count)] * page_size
    else:
        inside = (start % page_size).repeat(count) + (index - first.repeat(count)) * size.repeat(
            count
        )
        page = page.repeat(count) + inside // page_size
        table[:, 0] = np.where(
            (per_page == 0).repeat(count),
            pages_at + page,
            pages[page] * page_size + inside % page_size,
        )
    table[:, 2] = runs[:, Run.BASE].repeat(count)
    table[:, 3] = (runs_at + np.arange(len(runs)) * RUN_FIELDS).repeat(count)
    return table


def _growing(
    gathered: Gathered,
    runs: Ints,
    blocks: Ints,
    blocks_at: int,
    runs_at: int,
    tokens_at: int,
    positions: bool,
    classes: Sequence[TileClass],
    page_size: int,
) -> tuple[Ints, int]:
    """What a decode step changes: every request has one more live key and asks from one later.

    Returns:
        Places and increments, and for how many steps that is all: until a block is full.
    """
    requests = len(gathered.rows)
    if positions or not requests or len(gathered.positions) != requests:
        return np.zeros((2, 0), np.int64), 0
    live = np.flatnonzero(runs[:, Run.CAUSAL] == 1)
    last = live[runs[live, Run.STOP] == 1 - runs[live, Run.RANK]]
    if len(last) != requests:
        return np.zeros((2, 0), np.int64), 0
    ends = np.flatnonzero(np.append(blocks[1:, 3] != blocks[:-1, 3], True))
    block = ends[last]
    least = min(page_size, *(c.block for c in classes))
    steps = int((-(blocks[block, 1] & 255) % least).min())
    run_at = runs_at + RUN_FIELDS * last
    places = (
        tokens_at + np.arange(requests),
        blocks_at + BLOCK_FIELDS * block + 1,
        run_at + int(Run.STOP),
        runs_at + RUN_FIELDS * live + int(Run.RANK),
    )
    change = np.repeat([1, 1, 1, -1], [len(some) for some in places])
    return np.stack((np.concatenate(places), change)), steps
