"""Passes as CUDA graphs: the answers of the eager pass and of the oracles, whatever the plan."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from lazyrag_kernels.attention.step import TritonStep

from lazyrag import Engine, Live, Node
from lazyrag.bench.modes import (
    Bed,
    BlockAttention,
    Full,
    Lazy,
    Mode,
    Prefix,
    ask,
    decode,
    read,
)
from lazyrag.bench.shape import random_model
from lazyrag.engine.forward import EagerForward, NextTokens
from lazyrag.engine.sequence import PagedSequence, SeenNode
from lazyrag.model.fused import FusedDecoder
from tests.support.close import assert_close, rms_ratio
from tests.support.tiny import save_tiny

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

SHAPE: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 300,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 8192,
    "initializer_range": 0.1,
}
TEXTS = [
    " ".join(f"Line {row} of text {n} counts {row * n} ships." for row in range(9 + n))
    for n in range(3)
]


def make_bed(dtype: torch.dtype = torch.float32, **changes: Any) -> Bed:
    """Four nodes of 128 tokens; what nobody has written is NaN."""
    bed = Bed(random_model({**SHAPE, **changes}, torch.device("cuda"), dtype), 4, 128, 16_384)
    page = bed.pool.page_size
    unwritten = torch.ones(bed.pool.k.shape[1], dtype=torch.bool)
    for pages in bed.pages:
        for number in pages:
            unwritten[number * page : (number + 1) * page] = False
    bed.pool.k[:, unwritten] = float("nan")
    bed.pool.v[:, unwritten] = float("nan")
    return bed


@pytest.fixture
def bed() -> Iterator[Bed]:
    with torch.inference_mode():
        yield make_bed()


def answer(bed: Bed, mode: Mode, orders: list[tuple[int, ...]], tokens: int) -> list[list[int]]:
    asked = [ask(bed, mode, order, tokens) for order in orders]
    for one, id in zip(asked, read(bed, [one.reading for one in asked]), strict=True):
        one.tokens.append(id)
    decode(bed, asked, tokens)
    for one in asked:
        one.end(bed)
    return [one.tokens for one in asked]


ORDERS = [(2, 0, 3), (1, 3, 2), (2, 0, 1), (0,)]


def eager(bed: Bed) -> EagerForward:
    return EagerForward(bed.model, bed.forward._attention)  # type: ignore[attr-defined]


@pytest.mark.parametrize("compiled", [False, True], ids=["plain", "compiled"])
def test_answers_are_those_of_the_eager_pass_and_of_copies(bed: Bed, compiled: bool) -> None:
    """Twice: the second time everything is captured. 90 tokens cross pages at different steps."""
    if compiled:
        bed.forward.warm_up()
    first = answer(bed, Lazy(bed), ORDERS, 90)
    again = answer(bed, Lazy(bed), ORDERS, 90)
    assert bed.forward._graphs  # type: ignore[attr-defined]
    copied = answer(bed, BlockAttention(bed), ORDERS, 90)
    bed.forward = eager(bed)
    expected = answer(bed, Lazy(bed), ORDERS, 90)
    assert first == again == copied == expected
    assert len({tuple(tokens) for tokens in expected}) == len(ORDERS)


def test_a_prefix_that_was_kept_gives_the_full_answers(bed: Bed) -> None:
    expected = answer(bed, Full(bed), ORDERS, 20)
    prefix = Prefix(bed)
    for _ in range(2):
        assert answer(bed, prefix, ORDERS, 20) == expected
    alone = [answer(bed, Full(bed), [order], 20)[0] for order in ORDERS]
    assert alone == expected


@pytest.mark.parametrize(
    "dtype, most",
    [(torch.float32, 2e-5), (torch.bfloat16, 4e-2)],
    ids=["float32", "bfloat16"],
)
@pytest.mark.parametrize("window", [None, 100])
def test_logits_of_mixed_passes(dtype: torch.dtype, most: float, window: int | None) -> None:
    """Prompts and answers of seven requests in one pass, some passes longer than any bucket."""
    changes = {} if window is None else {"model_type": "mistral", "sliding_window": window}
    rng = random.Random(7)
    with torch.inference_mode():
        bed = make_bed(dtype, **changes)
        forwards = (bed.forward, eager(bed))
        pairs = []
        for number in range(7):
            order = rng.sample(range(4), number % 4)
            nodes = [SeenNode(bed.pages[n], 128, 128 * i, 0) for i, n in enumerate(order)]
            pairs.append([PagedSequence(bed.pool, nodes, bed.take(900), 900) for _ in range(2)])
        used = [[128 * (number % 4), 0] for number in range(7)]  # next position, live tokens
        for step in range(40):
            chosen = range(7) if step % 8 > 3 else rng.sample(range(7), rng.randrange(1, 8))
            counts = {n: 1 if step % 8 > 3 else rng.choice((1, 1, 5, 64, 130)) for n in chosen}
            counts = {n: count for n, count in counts.items() if used[n][1] + count < 900}
            if not counts:
                continue
            logits = []
            ids = {n: [rng.randrange(300) for _ in range(count)] for n, count in counts.items()}
            wanted = {n: rng.randrange(count + 1) for n, count in counts.items()}
            for which, forward in enumerate(forwards):
                batch = [
                    NextTokens(
                        pairs[n][which],
                        ids[n],
                        range(used[n][0], used[n][0] + count),
                        wanted[n],
                    )
                    for n, count in counts.items()
                ]
                logits.append(forward.launch(batch).logits.double())
            for n, count in counts.items():
                used[n] = [used[n][0] + count, used[n][1] + count]
            # Two forward passes take turns over one attention: neither advances the other's plans.
            if len(logits[0]):
                assert_close(f"step {step}", logits[1], logits[0], most)
            assert len(logits[0]) == len(logits[1]) == sum(wanted.values())


def test_other_positions_would_be_seen(bed: Bed) -> None:
    """The twin: a node one position further on changes the logits by far more."""
    logits = []
    for shift in (0, 1):
        nodes = [SeenNode(bed.pages[0], 128, 0, 0), SeenNode(bed.pages[1], 128, 128 + shift, 0)]
        sequence = PagedSequence(bed.pool, nodes, bed.take(64), 64)
        batch = [NextTokens(sequence, bed.question[:9], range(257, 266))]
        logits.append(bed.forward.launch(batch).logits.double())
    assert rms_ratio(*logits) > 100 * 2e-5


def test_ids_on_the_device_are_those_of_the_request(bed: Bed) -> None:
    """Requests change places, and some are fed from the host now and then."""
    expected = answer(bed, Lazy(bed), ORDERS, 12)
    asked = [ask(bed, Lazy(bed), order, 12) for order in ORDERS]
    firsts = read(bed, [one.reading for one in asked])
    for one, id in zip(asked, firsts, strict=True):
        one.tokens.append(id)
    order = [0, 1, 2, 3]
    for step in range(11):
        from_host = step % 3 == 0
        batch = [
            NextTokens(
                asked[n].reading.sequence,
                asked[n].tokens[-1:] if from_host and n % 2 == 0 else None,
                [asked[n].next_position + step],
            )
            for n in order
        ]
        if step == 0:
            batch = [
                NextTokens(one.sequence, asked[n].tokens[-1:], one.positions)
                for n, one in zip(order, batch, strict=True)
            ]
        launched = bed.forward.launch(batch)
        for n, id in zip(order, launched.fetch()[0], strict=True):
            asked[n].tokens.append(id)
        if step % 4 == 2:
            order = order[1:] + order[:1]
    assert [one.tokens for one in asked] == expected


def test_warming_up_leaves_the_pool_alone(bed: Bed) -> None:
    before = bed.pool.k.clone(), bed.pool.v.clone()
    bed.forward.warm_up()
    for old, new in zip(before, (bed.pool.k, bed.pool.v), strict=True):
        assert torch.equal(old.nan_to_num(9.0), new.nan_to_num(9.0))


def test_without_captures_and_compiler_the_answers_are_the_same(
    bed: Bed, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = answer(bed, Lazy(bed), ORDERS, 12)
    other = make_bed()

    def fail(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("no such thing here")

    compile_layers = FusedDecoder.compile
    monkeypatch.setattr(torch.cuda, "graph", fail)
    monkeypatch.setattr(FusedDecoder, "compile", lambda self: compile_layers(self, fail))
    other.forward.warm_up()
    assert answer(other, Lazy(other), ORDERS, 12) == expected
    assert not other.forward._graphs  # type: ignore[attr-defined]


def test_plans_too_large_for_captured_passes_run_as_they_are(
    bed: Bed, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = answer(bed, Lazy(bed), ORDERS, 12)
    monkeypatch.setattr(TritonStep, "fits", lambda self, plan: plan.rows < 4)
    assert answer(bed, Lazy(bed), ORDERS, 12) == expected
    assert answer(bed, Lazy(bed), ORDERS[:3], 12) == expected[:3]


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    def get(name: str) -> Path:
        return save_tiny(tmp_path_factory.mktemp(name) / name, name, head_dim=64)

    return get


@pytest.mark.parametrize("name", ["llama3-scaled", "yarn", "qwen3", "qwen2-window"])
def test_compiled_engine_answers_are_the_oracles(
    wide: Callable[[str], Path], tmp_path: Path, name: str
) -> None:
    with Engine.from_pretrained(
        wide(name), store=tmp_path / "kv", device="cuda", dtype="float32"
    ) as engine:
        engine.precompute(TEXTS)
        engine._worker.call(engine._runner.warm_up)
        for first, second in ((0, 1), (2, 0)):
            asked = [Node(text=TEXTS[first]), Live(text="\n\n"), Node(text=TEXTS[second])]
            asked.append(Live(text="\n\nHow many ships are there?"))
            lazy = engine.generate(asked, max_new_tokens=40)
            copied = engine.generate(asked, max_new_tokens=40, quality="materialized")
            assert lazy.token_ids == copied.token_ids
