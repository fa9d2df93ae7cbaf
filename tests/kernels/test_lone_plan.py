"""The short way to plan one request makes the table of the general way, number by number."""

from __future__ import annotations

import random
from dataclasses import fields

import numpy as np
import pytest
import torch
from lazyrag_kernels.attention import Batch, LiveSpan, NodeSpan, RequestRows
from lazyrag_kernels.attention import plan as planning
from lazyrag_kernels.attention.plan import Planner
from lazyrag_kernels.attention.table import Heads, Plan, TileClass


def classes_of(page: int) -> tuple[tuple[TileClass, ...], ...]:
    return (
        (TileClass(16, page, 3), TileClass(64, page, 2), TileClass(128, page, 2, whole=2)),
        (
            TileClass(16, page, 33),
            TileClass(64, page, 33),
            TileClass(128, page, 16, whole=8, overhead=4),
        ),
        (TileClass(64, page, 5), TileClass(128, page, 16, least_blocks=3)),
    )


def request(rng: random.Random, page: int) -> RequestRows:
    rows = rng.choice((2, 3, 16, 33, 64, 130, 300))
    live = rows + rng.randrange(90)
    nodes, offset = [], 0
    for _ in range(rng.randrange(8)):
        length = rng.choice((0, 1, page - 1, page, page + 1, rng.randrange(20 * page)))
        first = rng.randrange(rows) if rng.random() < 0.3 else 0
        pages = tuple(rng.randrange(999) for _ in range(20))
        nodes.append(NodeSpan(pages, length, offset, first))
        offset += length
    own = tuple(rng.randrange(999) for _ in range(-(-live // page)))
    positions = torch.arange(offset, offset + live)
    return RequestRows(LiveSpan(own, positions, live - rows), tuple(nodes))


@pytest.mark.parametrize("seed", range(8))
def test_tables_are_equal(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(seed)
    short = planning.lone_plan
    made: list[Plan | None] = []
    for _ in range(40):
        page, group = rng.choice((32, 64)), rng.choice((1, 4, 7))
        batch = Batch((request(rng, page),), page)
        planner = Planner(Heads(2 * group, 2, 64), page, rng.choice(classes_of(page)))
        padded = rng.choice((None, batch.rows + 5))

        def spy(*args: object) -> Plan | None:
            made.append(short(*args))  # type: ignore[arg-type]
            return made[-1]

        monkeypatch.setattr(planning, "lone_plan", spy)
        ours = planner.plan(batch, padded_rows=padded)
        monkeypatch.setattr(planning, "lone_plan", lambda *args: None)
        expected = planner.plan(batch, padded_rows=padded)
        for field in fields(Plan):
            one, other = getattr(ours, field.name), getattr(expected, field.name)
            if isinstance(other, np.ndarray):
                assert one.dtype == other.dtype and np.array_equal(one, other), field.name
            else:
                assert one == other, field.name
    assert sum(plan is not None for plan in made) > 25
