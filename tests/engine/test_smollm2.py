"""Real weights, real questions: SmolLM2-135M-Instruct on Natural Questions with ten passages."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lazyrag import Engine

DATA = Path(__file__).parents[1] / "data" / "nq_open_20.jsonl"
EXAMPLES = [json.loads(line) for line in DATA.read_text(encoding="utf-8").splitlines()]


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    with Engine.from_pretrained("smollm2", store=tmp_path_factory.mktemp("kv")) as engine:
        yield engine


def passages(example: dict[str, Any]) -> list[str]:
    return [f"{one['title']}\n{one['text']}".strip() for one in example["documents"]]


def messages(example: dict[str, Any], order: slice = slice(None)) -> list[dict[str, str]]:
    context = "\n\n".join(passages(example)[order])
    question = f"Question: {example['question']}\nAnswer briefly."
    return [{"role": "user", "content": f"Documents:\n\n{context}\n\n{question}"}]


def check(engine: Engine, example: dict[str, Any]) -> None:
    engine.precompute(passages(example))
    before = engine.store.stats()
    for order in (slice(None), slice(None, None, -1)):
        prompt = messages(example, order)
        lazy = engine.chat(prompt, max_new_tokens=12)
        oracle = engine.chat(prompt, max_new_tokens=12, quality="materialized")
        assert lazy.token_ids == oracle.token_ids
        assert lazy.text == oracle.text
        assert lazy.report.nodes_reused == len(set(passages(example)))
        assert lazy.report.nodes_recomputed == 0
        assert lazy.report.tokens_computed < 120
    assert engine.store.stats() == before
    engine._runner._raw.clear()


@pytest.mark.parametrize("number", range(3))
def test_lazy_answers_equal_materialised_ones(engine: Engine, number: int):
    """Greedy text identical, in two orders, all ten passages reused, nothing written."""
    check(engine, EXAMPLES[number])


@pytest.mark.heavy
@pytest.mark.parametrize("number", range(3, len(EXAMPLES)))
def test_lazy_answers_equal_materialised_ones_for_all(engine: Engine, number: int):
    check(engine, EXAMPLES[number])


def test_the_default_model_says_what_it_is(engine: Engine):
    assert engine.model_note is not None and "Q4_1" in engine.model_note
    assert engine.context_window == 8192
    assert engine.kv_bytes_per_token == 2 * 30 * 3 * 64 * 4 == 46_080
