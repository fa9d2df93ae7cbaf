"""The benchmarks' ways to reuse answer alike where they must, and give everything back."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from xml.dom import minidom

import pytest
import torch
from typer.testing import CliRunner

from lazyrag.bench.bars import bars
from lazyrag.bench.modes import Bed, Full, Lazy, Mode, Prefix, ask, decode, read
from lazyrag.bench.shape import random_model
from lazyrag.bench.table import write_csv
from lazyrag.bench.ttft import weight_bytes
from lazyrag.cli.main import app
from lazyrag.engine.forward import NextTokens
from tests.bench.shape import SHAPE

ORDERS = [(2, 0), (1, 3), (2, 1), (0,)]


@pytest.fixture(scope="module")
def bed() -> Iterator[Bed]:
    with torch.inference_mode():
        yield Bed(random_model(SHAPE, torch.device("cpu"), torch.float32), 4, 32, 4096)


def answers(bed: Bed, mode: Mode, orders: list[tuple[int, ...]], tokens: int) -> list[list[int]]:
    with torch.inference_mode():
        asked = [ask(bed, mode, order, tokens) for order in orders]
        for one, id in zip(asked, read(bed, [one.reading for one in asked]), strict=True):
            one.tokens.append(id)
        decode(bed, asked, tokens)
    for one in asked:
        one.end(bed)
    return [one.tokens for one in asked]


@pytest.mark.parametrize("mode", [Lazy, Full])
def test_together_is_alone(bed: Bed, mode: type[Lazy] | type[Full]) -> None:
    free = bed.pool.free_pages
    together = answers(bed, mode(bed), ORDERS, 8)
    assert together == [answers(bed, mode(bed), [order], 8)[0] for order in ORDERS]
    assert bed.pool.free_pages == free


def test_a_prefix_is_computed_once_and_answers_as_all_of_it(bed: Bed) -> None:
    free, prefix = bed.pool.free_pages, Prefix(bed)
    for count in (2, 0, 1, 0):  # nodes computed of each order, the first time
        order = {2: (2, 0), 0: (2, 0), 1: (2, 1)}[count]
        assert len(prefix.place(order).computed) == count
        assert answers(bed, prefix, [order], 8) == answers(bed, Full(bed), [order], 8)
    prefix.forget()
    assert bed.pool.free_pages == free


def test_an_id_left_out_is_the_likeliest_of_the_pass_before(bed: Bed) -> None:
    (expected,) = answers(bed, Lazy(bed), [(3, 1)], 6)
    with torch.inference_mode():
        asked = ask(bed, Lazy(bed), (3, 1), 6)
        tokens = read(bed, [asked.reading])
        for step in range(5):
            rows = NextTokens(asked.reading.sequence, tokens[-1:], [asked.next_position + step])
            tokens += bed.forward.launch([rows]).fetch()[0]
    asked.end(bed)
    assert tokens == expected


def test_no_logits_are_made_where_none_are_wanted(bed: Bed) -> None:
    with torch.inference_mode():
        asked = ask(bed, Lazy(bed), (3,), 1)
        reading = asked.reading
        first = NextTokens(reading.sequence, reading.ids[:9], reading.positions[:9], 0)
        assert bed.forward.launch([first]).logits.shape == (0, 300)
        rest = NextTokens(reading.sequence, reading.ids[9:], reading.positions[9:], 3)
        assert bed.forward.launch([rest]).logits.shape == (3, 300)
    asked.end(bed)


def test_a_full_pool_is_said(bed: Bed) -> None:
    with pytest.raises(RuntimeError, match="4,096 tokens is full"):
        bed.take(5000)


def test_weights_that_a_pass_reads(bed: Bed) -> None:
    every = sum(one.numel() for one in bed.model.model.parameters())
    assert weight_bytes(bed.model) == 4 * (every - 300 * 64)


@dataclass
class Row:
    mode: str
    ms: float


def test_rows_and_bars(tmp_path: Path) -> None:
    rows = [Row("lazy", 1.23456), Row("full & slow", 155.0)]
    write_csv(rows, tmp_path / "rows.csv")
    with (tmp_path / "rows.csv").open() as file:
        read_back = list(csv.DictReader(file))
    assert [(row["mode"], row["ms"]) for row in read_back] == [
        ("lazy", "1.2346"),
        ("full & slow", "155.0"),
    ]
    assert {"gpu", "torch", "triton", "transformers", "date"} <= read_back[0].keys()
    drawn = minidom.parseString(bars("A < B", [(row.mode, row.ms) for row in rows], "ms"))
    assert len(drawn.getElementsByTagName("rect")) == 3


@pytest.mark.skipif(torch.cuda.is_available(), reason="asks what happens without a GPU")
@pytest.mark.parametrize("command", ["ttft", "throughput", "trace"])
def test_without_a_gpu_they_say_so(command: str) -> None:
    done = CliRunner().invoke(app, ["bench", command])
    assert done.exit_code != 0
    assert "needs an NVIDIA GPU" in done.output
