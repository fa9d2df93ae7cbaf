"""The plan of one request's prompt in few steps: it stands between a question and its first token.

The same table as `Planner` makes by its general way, number by number. That way costs some two
hundred calls into numpy whatever the batch holds; here what is small is done in plain numbers.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence

import numpy as np

from lazyrag_kernels.attention.columns import Ints, before, float_bits, none
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
    Heads,
    Plan,
    Run,
    TileClass,
)

MOST_RUNS = 96
"""Tiles times segments; more are quicker in the general way."""

_ONE = int(float_bits(1.0))


def lone_plan(
    segments: Ints,
    pages: Ints,
    positions: Ints,
    heads: Heads,
    classes: tuple[TileClass, ...],
    page_size: int,
    padded_rows: int,
) -> Plan | None:
    """A plan without windows, ALiBi, temperature and log-sum-exp scale.

    Args:
        segments: [segments, RUN_FIELDS] of one request, live text last.
        pages: their page numbers.
        positions: of the query tokens, two or more.
        heads, classes, page_size: of the planner.
        padded_rows: tokens of the launch.

    Returns:
        None where the general way is needed.
    """
    tokens = len(positions)
    heights = [spec.rows for spec in classes]
    number = bisect_left(heights, min(tokens * heads.group, heights[-1]))
    spec = classes[number]
    tile_tokens = spec.rows // heads.group
    tiles = -(-tokens // tile_tokens)
    if tiles * len(segments) > MOST_RUNS or tiles >= spec.whole * spec.workers:
        return None
    if spec.block != page_size:
        return None

    # Runs of every tile on one axis of blocks.
    uncut: list[tuple[int, list[int], int, int]] = []  # tile, segment, first block, end
    starts, end = [], 0
    for tile in range(tiles):
        starts.append(end)
        end_row = min((tile + 1) * tile_tokens, tokens)
        for segment in segments.tolist():
            if segment[Run.CAUSAL]:
                segment[Run.STOP] = end_row - segment[Run.RANK]
            elif segment[Run.RANK] >= end_row:
                continue
            first, end = end, end - (-segment[Run.STOP] // spec.block)
            uncut.append((tile, segment, first, end))
    edges = _shares(starts, end, spec)
    cuts = sorted({*starts, *(edge for edge in edges if edge < end)})
    ends = [*cuts[1:], end]
    tile_of = [bisect_right(starts, cut) - 1 for cut in cuts]
    runs, run_tiles = _pieces(uncut, cuts, ends, spec.block)

    items = len(cuts)
    parts = np.bincount(tile_of, minlength=tiles)
    first_rows = np.arange(tiles) * tile_tokens
    entries = np.minimum(tile_tokens, tokens - first_rows)
    slots_of = np.where(parts > 1, parts, 0)  # slots a token
    tile_slots = before(slots_of * entries)
    slots = int((slots_of * entries).sum())

    of_item = np.array(tile_of)
    item_rows = entries[of_item]
    item_starts = before(item_rows)
    rows = np.empty((int(item_rows.sum()), ROW_FIELDS), np.int64)
    within = np.arange(len(rows)) - item_starts.repeat(item_rows)
    rows[:, 0] = rows[:, 1] = within + first_rows[of_item].repeat(item_rows)
    rows[:, 2] = 0
    chunk = np.arange(items) - np.array([bisect_left(cuts, starts[t]) for t in tile_of])
    several = parts[of_item] > 1
    rows[:, 3] = within * slots_of[of_item].repeat(item_rows) + np.where(
        several, tile_slots[of_item] + chunk, -1
    ).repeat(item_rows)

    counts = np.array(ends) - np.array(cuts)
    items_at = HEAD + sum(one.workers + 1 for one in classes)
    rows_at = items_at + items * ITEM_FIELDS
    blocks_at = rows_at + rows.size
    runs_at = blocks_at + int(counts.sum()) * BLOCK_FIELDS
    pages_at = runs_at + runs.size
    blocks = _blocks(runs, first_rows[run_tiles], pages, runs_at, page_size)
    runs[:, Run.PAGES] += pages_at
    table_of_items = np.empty((items, ITEM_FIELDS), np.int64)
    table_of_items[:, 0] = rows_at + item_starts * ROW_FIELDS
    table_of_items[:, 1] = item_rows
    table_of_items[:, 2] = blocks_at + before(counts) * BLOCK_FIELDS
    table_of_items[:, 3] = counts
    table_of_items[:, 4] = 1
    table_of_items[:, 5] = ~several

    merged = np.flatnonzero((slots_of > 0).repeat(entries))
    merge = np.zeros((len(merged) + padded_rows - tokens, MERGE_FIELDS), np.int64)
    merge[:, 3] = _ONE
    merge[: len(merged), 0] = merged
    per_token = slots_of.repeat(entries)
    merge[: len(merged), 1] = before(per_token)[merged]
    merge[: len(merged), 2] = per_token[merged]
    merge[len(merged) :, 0] = range(tokens, padded_rows)

    tokens_at = pages_at + pages.size
    merge_at = tokens_at + padded_rows
    head = np.zeros(HEAD, np.int64)
    head[:5] = tokens_at, merge_at, merge_at, merge_at + merge.size, len(merge)
    workers = []
    for other, one in enumerate(classes):
        at = [0] * (one.workers + 1)
        if other == number:
            at = [bisect_left(cuts, edge) for edge in edges]
        elif other > number:
            at = [items] * (one.workers + 1)
        workers += [items_at + ITEM_FIELDS * place for place in at]
    padding = np.zeros(padded_rows - tokens, np.int64)
    parts_of_table = (
        *(head, np.array(workers), table_of_items.ravel(), rows.ravel(), blocks.ravel()),
        *(runs.ravel(), pages, positions, padding, merge.ravel()),
    )
    return Plan(
        table=np.concatenate(parts_of_table, dtype=np.int32, casting="same_kind"),
        classes=classes,
        page_size=page_size,
        rows=padded_rows,
        partials=slots,
        merged_rows=len(merge),
        growing=none().reshape(2, 0),
        steps=0,
        items=tuple(items if other == number else 0 for other in range(len(classes))),
        joined=0,
        window=None,
        temperature=False,
        lse_scale=False,
        positions=False,
    )


def _shares(starts: Sequence[int], total: int, spec: TileClass) -> list[int]:
    """As `cut.equal_shares`."""
    ends = [*starts[1:], total]
    cost_starts = [start + spec.overhead * unit for unit, start in enumerate(starts)]
    cost = total + spec.overhead * len(starts)
    share = max(spec.least_blocks, -(-cost // spec.workers))
    edges = []
    for worker in range(spec.workers + 1):
        place = min(worker * share, cost)
        if place == cost:
            edges.append(total)
            continue
        unit = bisect_right(cost_starts, place) - 1
        edge = starts[unit] + max(place - cost_starts[unit] - spec.overhead, 0)
        if edge - starts[unit] < spec.least_blocks:
            edge = starts[unit]
        elif ends[unit] - edge < spec.least_blocks:
            edge = ends[unit]
        edges.append(edge)
    return edges


def _pieces(
    uncut: Sequence[tuple[int, list[int], int, int]],
    cuts: Sequence[int],
    ends: Sequence[int],
    block: int,
) -> tuple[Ints, list[int]]:
    """Runs cut at ``cuts``, and the tile of each."""
    runs: list[list[int]] = []
    tiles: list[int] = []
    item = 0
    for tile, segment, first, end in uncut:
        while cuts[item] < end:
            if ends[item] > first:
                piece = segment.copy()
                piece[Run.START] = max(cuts[item] - first, 0) * block
                piece[Run.STOP] = min((ends[item] - first) * block, segment[Run.STOP])
                runs.append(piece)
                tiles.append(tile)
            if ends[item] > end or item + 1 == len(cuts):
                break
            item += 1
    return np.array(runs, np.int64).reshape(-1, RUN_FIELDS), tiles


def _blocks(runs: Ints, least_rank: Ints, pages: Ints, runs_at: int, page_size: int) -> Ints:
    """As `pack`'s, for one class whose blocks are pages."""
    start = runs[:, Run.START]
    keys = runs[:, Run.STOP] - start
    count = -(-keys // page_size)
    ends = count.cumsum()
    first = ends - count
    index = np.arange(int(ends[-1]))
    numbers = start // page_size - first
    bits = (index << NUMBER) + (page_size + (numbers << NUMBER)).repeat(count)
    bits[first] += OPENS
    bits[ends - 1] += keys - count * page_size
    causal, rank = runs[:, Run.CAUSAL] == 1, runs[:, Run.RANK]
    to_all = np.where(causal, least_rank - rank - start + 1, np.where(rank > least_rank, 0, keys))
    whole = (np.minimum(to_all, keys) // page_size).clip(0, count)
    masked = count - whole
    bits[(first + whole - before(masked)).repeat(masked) + np.arange(int(masked.sum()))] += MASKED
    table = np.empty((len(index), BLOCK_FIELDS), np.int64)
    table[:, 0] = pages[index + (runs[:, Run.PAGES] + numbers).repeat(count)] * page_size
    table[:, 1] = bits
    table[:, 2] = runs[:, Run.BASE].repeat(count)
    table[:, 3] = (runs_at + np.arange(len(runs)) * RUN_FIELDS).repeat(count)
    return table
