"""Traces through the whole engine: modes answer alike where they must, and their counts add up."""

from __future__ import annotations

import csv
import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

import pytest
import torch

from lazyrag.bench.hit_ratio import Workload
from lazyrag.bench.positioned import PositionedKey
from lazyrag.bench.shape import random_model
from lazyrag.bench.table import write_csv
from lazyrag.bench.trace import Timer, Trace
from lazyrag.bench.trace_engine import TraceEngine
from lazyrag.bench.trace_run import (
    Ask,
    AtOnce,
    Closed,
    Poisson,
    Row,
    asks,
    random_texts,
    row_of,
    send,
)
from lazyrag.bench.trace_settings import Mode, Part, Settings, Start
from tests.bench.shape import SHAPE
from tests.support.interpreter import run_interpreted

TOKEN_BYTES = 2 * 2 * 2 * 16 * 4
NODE_BYTES = 32 * TOKEN_BYTES
SETTINGS = Settings(
    seconds=0.3,
    rate=20.0,
    alphas=(0.0, 2.1),
    zipf_alphas=(1.1, 2.1),
    idle_gb=(3 * NODE_BYTES / 1e9,),
    clients=3,
    question_tokens=5,
    few=(6, 5, 3, 32, 4),
    full_requests=2,
    many=Workload(documents=8, tokens=32, per_prompt=3, requests=6),
    new_tokens=3,
    pool_bytes=60 * NODE_BYTES,
    zipf_bytes=12 * NODE_BYTES,
    host_bytes=20 * NODE_BYTES,
)


@pytest.fixture
def engine() -> Iterator[TraceEngine]:
    model = random_model(SHAPE, torch.device("cpu"), torch.float32)
    with TraceEngine(
        model, pool_bytes=SETTINGS.pool_bytes, host_bytes=SETTINGS.host_bytes
    ) as engine:
        yield engine


def rows_of(engine: TraceEngine, *parts: Part) -> list[Row]:
    trace = Trace(engine, SETTINGS, Timer(lambda text: None))
    return [row for part in parts for row in trace.run(part)]


def test_every_part_runs_and_its_counts_add_up(engine: TraceEngine) -> None:
    rows = rows_of(engine, *Part)
    for row in rows:
        reused = row.device + row.host + row.disk + row.live
        assert reused + row.computed == row.prompt_tokens, row.label
        assert row.requests_per_s == row.requests / row.seconds
        assert 0 < row.ttft_p50_ms <= row.ttft_p99_ms and row.token_ms > 0
        assert (row.copied > 0) <= (row.mode == Mode.BLOCK_ATTENTION), row.label
        assert (row.live > 0) <= (row.mode == Mode.PREFIX), row.label
    made = Counter((row.part, row.mode, row.start) for row in rows)
    few = {
        (Mode.LAZY, Start.DEVICE), (Mode.BLOCK_ATTENTION, Start.DEVICE), (Mode.PREFIX, Start.COLD),
        (Mode.FULL, Start.COLD), (Mode.LAZY, Start.AGAIN), (Mode.BLOCK_ATTENTION, Start.AGAIN),
        (Mode.PREFIX, Start.AGAIN),
    }  # fmt: skip
    assert {key[1:]: n for key, n in made.items() if key[0] == Part.AT_ONCE} == dict.fromkeys(
        few, 1
    )
    assert {key[1:]: n for key, n in made.items() if key[0] == Part.ALONE} == {
        (Mode.LAZY, Start.DEVICE): 1, (Mode.BLOCK_ATTENTION, Start.DEVICE): 1,
    }  # fmt: skip
    assert {key[1:]: n for key, n in made.items() if key[0] == Part.ZIPF} == {
        (Mode.LAZY, Start.COLD): 2, (Mode.LAZY, Start.DISK): 2, (Mode.LAZY, Start.HOST): 2,
        (Mode.BLOCK_ATTENTION, Start.HOST): 2, (Mode.PREFIX, Start.COLD): 2,
        (Mode.FULL, Start.COLD): 1,
    }  # fmt: skip
    assert {key[1:]: n for key, n in made.items() if key[0] == Part.COMPARE} == {
        (Mode.LAZY, Start.HOST): 4, (Mode.BLOCK_ATTENTION, Start.HOST): 4,
    }  # fmt: skip
    start = {row.start: row for row in rows if row.mode == Mode.LAZY and row.part == Part.ZIPF}
    assert start[Start.COLD].disk == start[Start.COLD].host == 0
    assert start[Start.DISK].disk > 0
    assert start[Start.HOST].host > 0 == start[Start.HOST].disk
    assert start[Start.HOST].computed == 6 * SETTINGS.question_tokens
    again = {row.mode: row for row in rows if row.start == Start.AGAIN}
    assert again[Mode.BLOCK_ATTENTION].copied == 0 < again[Mode.BLOCK_ATTENTION].device
    assert again[Mode.PREFIX].live > 0
    assert all(row.device_gb == SETTINGS.zipf_bytes / 1e9 for row in rows if row.part == Part.ZIPF)


def ask_all(engine: TraceEngine, mode: Mode, orders: list[tuple[int, ...]], **budget: int):
    """Answers, and reports, of requests at once over nodes of 32 tokens in a mode."""
    texts = random_texts("few", 5, 32)
    trace = asks(texts, orders, seed="q", question_tokens=7, new_tokens=8, vocabulary=300)
    engine.precompute(texts)
    engine.start_anew(mode, **budget)
    return [one.answer for one in send(engine, trace, AtOnce(len(trace)))]


ORDERS = [(0, 1, 2), (2, 1, 0), (1, 1, 4), (4, 3, 1), (0, 1, 2), (3, 0, 3)]


@pytest.mark.parametrize("nodes", [None, 4, 5], ids=["all", "least room", "little room"])
def test_copies_at_their_places_answer_as_lazy_does(engine: TraceEngine, nodes) -> None:
    """Also when a copy is the only one left and is evicted for its own copy at another place."""
    budget = {} if nodes is None else {"device_bytes": nodes * NODE_BYTES}
    lazy = ask_all(engine, Mode.LAZY, ORDERS)
    block = ask_all(engine, Mode.BLOCK_ATTENTION, ORDERS, **budget)
    assert [one.token_ids for one in block] == [one.token_ids for one in lazy]
    for one, other in zip(block, lazy, strict=True):
        places = [(node.tokens, node.offset, node.status) for node in one.report.nodes]
        assert places == [(node.tokens, node.offset, node.status) for node in other.report.nodes]
    assert engine.copied_tokens > 0


def test_a_copy_is_read_once_and_turned_on(engine: TraceEngine) -> None:
    """Two places of one node: one is brought, the other copied; turned back it is the same."""
    ask_all(engine, Mode.BLOCK_ATTENTION, [(0, 1, 0), (1, 0, 2)])
    pool, key = engine._pool, engine.key_of(random_texts("few", 5, 32)[0])
    entries = {at: pool.entry(PositionedKey.of(key, at)) for at in (0, 32, 64)}
    assert engine.copied_tokens == 3 * 32  # 0 at two more places, 1 at one
    for at, entry in entries.items():
        slots, first = (pool.slots(one.pages, 0, 32) for one in (entry, entries[0]))
        torch.testing.assert_close(pool.v[:, slots], pool.v[:, first], rtol=0, atol=0)
        if at:
            assert not torch.allclose(pool.k[:, slots], pool.k[:, first], atol=1e-2)
    movements = {(m.source, m.target): m.moves for m in engine.stats().movements}
    assert movements["host", "device"] == 3


def test_copies_that_are_not_the_only_one_go_first(engine: TraceEngine) -> None:
    """And the last one is worth what the node is worth."""
    budget = 3 * NODE_BYTES
    ask_all(engine, Mode.BLOCK_ATTENTION, [(0, 1), (1, 0), (0, 1), (2,), (2,)], idle_bytes=budget)
    keys = [engine.key_of(text) for text in random_texts("few", 5, 32)[:3]]
    left = [key for key in engine._pool._resident if isinstance(key, PositionedKey)]
    assert sorted(key.node for key in left) == sorted(keys)
    for key in left:
        assert engine._bring_s(key, 32) == super(TraceEngine, engine)._bring_s(key.node, 32)
    ask_all(engine, Mode.BLOCK_ATTENTION, [(0, 1), (1, 0)], idle_bytes=budget)
    costs = {key: engine._bring_s(key, 32) for key in engine._pool._resident}
    twice = [key for key in costs if len(engine._placer.others(key))]
    assert twice and len(costs) == 3
    assert max(costs[key] for key in twice) < min(costs[key] for key in costs if key not in twice)


def test_in_every_mode_all_pages_come_back(engine: TraceEngine) -> None:
    for mode in Mode:
        ask_all(engine, mode, ORDERS)
        pool = engine._pool
        assert pool.free_pages + pool.evictable_pages == pool.total_pages
        engine.start_anew(mode)  # refuses when KV is in use
        assert pool.free_pages == pool.total_pages and not len(pool)


def test_prefix_and_full_answer_alike(engine: TraceEngine) -> None:
    full = ask_all(engine, Mode.FULL, ORDERS)
    prefix = ask_all(engine, Mode.PREFIX, ORDERS)
    assert [one.token_ids for one in prefix] == [one.token_ids for one in full]
    assert not any(one.report.live_tokens_reused for one in full)


def test_the_kernel_moves_nodes_as_plain_torch_does() -> None:
    run_interpreted(Path(__file__).with_name("interpreted_cases.py"))


@pytest.mark.parametrize("alpha", [0.0, 2.0])
def test_popularity_is_that_of_the_zipf_law(alpha: float) -> None:
    workload = Workload(documents=5, tokens=1, per_prompt=1, requests=10_000)
    counts = Counter(node for (node,) in workload.prompts(alpha, seed=3))
    weights = [(node + 1) ** -alpha for node in range(5)]
    for node, weight in enumerate(weights):
        expected = weight / sum(weights)
        assert counts[node] / 20_000 == pytest.approx(expected, abs=4 * (expected / 20_000) ** 0.5)


def test_equal_seeds_give_equal_requests_and_no_question_twice() -> None:
    texts = random_texts("a", 4, 10)
    assert texts == random_texts("a", 4, 10) != random_texts("b", 4, 10)
    assert [len(text) for text in texts] == [10] * 4 and len(set(texts)) == 4

    def made(seed: str) -> list[Ask]:
        orders = [(0, 1)] * 50
        return asks(texts, orders, seed=seed, question_tokens=8, new_tokens=1, vocabulary=300)

    assert made("a") == made("a") != made("b")
    assert len({ask.question for ask in made("a")}) == 50
    arrivals = [Poisson(50.0, 20.0, seed)._arrivals for seed in ("a", "a", "b")]
    assert arrivals[0] == arrivals[1] != arrivals[2]
    assert len(arrivals[0]) == pytest.approx(1000, abs=4 * 1000**0.5)


def test_loads_say_when_the_next_request_is_due() -> None:
    closed = Closed(2, 10.0)
    assert [closed.due(n, 0, 3.0) for n in range(3)] == [3.0, 3.0, math.inf]
    assert closed.due(2, 1, 9.9) == 9.9 and closed.due(2, 2, 10.0) == math.inf
    assert [AtOnce(2).due(n, 0, 5.0) for n in range(3)] == [0.0, 0.0, math.inf]
    poisson = Poisson(3.0, 4.0, "a")
    last = len(poisson._arrivals)
    assert 0 < poisson.due(0, 0, 0.0) <= poisson.due(last - 1, 0, 0.0) <= 4.0
    assert poisson.due(last, last, 0.0) == math.inf


def test_a_row_is_a_line_of_the_table(engine: TraceEngine, tmp_path: Path) -> None:
    engine.start_anew(Mode.LAZY)
    texts = random_texts("few", 2, 32)
    trace = asks(texts, [(0, 1)], seed="", question_tokens=4, new_tokens=2, vocabulary=300)
    row = row_of(
        send(engine, trace, AtOnce(1)), AtOnce(1), part="zipf", mode="lazy", alpha=1.1,
        device_bytes=5, idle_bytes=3, start="cold", copied=0, seed=4,
    )  # fmt: skip
    write_csv([row], tmp_path / "rows.csv")
    with (tmp_path / "rows.csv").open() as file:
        (line,) = csv.DictReader(file)
    names = [field.name for field in fields(Row)]
    assert list(line)[: len(names)] == names
    assert (line["mode"], line["alpha"], line["start"], line["computed"]) == (
        "lazy", "1.1", "cold", "68",
    )  # fmt: skip
    assert str(row).startswith("zipf, alpha 1.1, idle 3e-09 GB, at once, from cold, lazy: 1 in ")
