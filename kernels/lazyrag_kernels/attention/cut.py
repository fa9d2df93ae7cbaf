"""Cut units of work into items: shares of equal cost for the workers of a launch."""

from __future__ import annotations

import numpy as np

from lazyrag_kernels.attention.columns import Ints, before, none, ranges
from lazyrag_kernels.attention.table import Items, Run, TileClass, Units


def cut(units: Units, tile_class: int, spec: TileClass, shrink: int) -> Items:
    """Cut the units of one class into shares of equal length.

    Args:
        units: of all classes.
        tile_class, spec: index of the class, and the class.
        shrink: divides the number of shares; 0 keeps every unit whole.
    """
    if (units.tile_class == tile_class).all():
        runs, owner = units.runs, units.unit_of_run
    else:
        mine = units.tile_class[units.unit_of_run] == tile_class
        runs, owner = units.runs[mine], units.unit_of_run[mine]
    if not len(runs):
        empty = none()
        return Items(empty, empty, runs, empty, empty, np.zeros(spec.workers + 1, np.int64), empty)
    blocks = -(-(runs[:, Run.STOP] - runs[:, Run.START]) // spec.block)
    first_block = before(blocks)
    total = int(blocks.sum())
    opens = np.ones(len(owner), bool)
    opens[1:] = owner[1:] != owner[:-1]
    unit, starts = owner[opens], first_block[opens]
    whole = shrink == 0 or len(unit) >= spec.whole * spec.workers
    ends = np.append(starts[1:], total)
    edges = equal_shares(starts, ends, spec, max(1, spec.workers // max(1, shrink)))
    cuts = starts
    if not whole:
        cuts = np.concatenate((starts, edges[edges < total]))
        cuts.sort()
        cuts = cuts[np.concatenate(([True], cuts[1:] != cuts[:-1]))]
    weight = np.concatenate((cuts[1:], (total,))) - cuts
    of_cut = starts.searchsorted(cuts, side="right") - 1

    first_item = cuts.searchsorted(first_block, side="right") - 1
    last_item = cuts.searchsorted(first_block + blocks, side="left") - 1
    pieces = last_item - first_item + 1
    run = np.arange(len(runs)).repeat(pieces)
    item = first_item[run] + ranges(pieces)
    cut_runs = runs[run]
    low = np.maximum(cuts[item] - first_block[run], 0) * spec.block
    high = (cuts[item] + weight[item] - first_block[run]) * spec.block
    cut_runs[:, Run.START] += low
    cut_runs[:, Run.STOP] = np.minimum(runs[run, Run.START] + high, cut_runs[:, Run.STOP])

    chunk = np.arange(len(cuts)) - cuts.searchsorted(starts)[of_cut]
    run_count = np.bincount(item, minlength=len(cuts))
    items = Items(
        unit=unit[of_cut],
        chunk=chunk,
        runs=cut_runs,
        run_count=run_count,
        blocks=weight,
        workers=cuts.searchsorted(edges, side="left"),
        per_unit=np.bincount(of_cut, minlength=len(unit)),
    )
    return deal(items, spec.workers) if whole else items


def equal_shares(starts: Ints, ends: Ints, spec: TileClass, workers: int) -> Ints:
    """Where each worker's share begins, on the axis of all blocks, and the end of the last.

    A unit costs its blocks and `TileClass.overhead` more. Pieces shorter than ``least_blocks`` go
    to the neighbour.

    Args:
        starts, ends: first block and end of each unit.
        spec: of the class; its workers beyond ``workers`` get nothing.
        workers: how many share the work.
    """
    cost_starts = starts + spec.overhead * np.arange(len(starts))
    cost = int(ends[-1]) + spec.overhead * len(starts)
    share = max(spec.least_blocks, -(-cost // workers))
    place = np.minimum(np.arange(spec.workers + 1) * share, cost)
    unit = cost_starts.searchsorted(place, side="right") - 1
    edges = starts[unit] + np.maximum(place - cost_starts[unit] - spec.overhead, 0)
    edges = np.where(edges - starts[unit] < spec.least_blocks, starts[unit], edges)
    tail = (ends[unit] - edges < spec.least_blocks) & (edges > starts[unit])
    edges = np.where(tail, ends[unit], edges)
    edges[place == cost] = ends[-1]
    return edges


def deal(items: Items, workers: int) -> Items:
    """Give whole units to workers, the heaviest first, back and forth."""
    order = np.argsort(-items.blocks, kind="stable")
    turn, place = np.divmod(np.arange(len(order)), workers)
    worker = np.where(turn % 2 == 0, place, workers - 1 - place)
    order = order[np.argsort(worker, kind="stable")]
    runs = before(items.run_count)[order].repeat(items.run_count[order])
    return Items(
        unit=items.unit[order],
        chunk=items.chunk[order],
        runs=items.runs[runs + ranges(items.run_count[order])],
        run_count=items.run_count[order],
        blocks=items.blocks[order],
        workers=np.searchsorted(np.sort(worker), np.arange(workers + 1), side="left"),
        per_unit=items.per_unit,
    )
