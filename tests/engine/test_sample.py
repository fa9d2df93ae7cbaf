"""Several answers to one prompt: the prompt is computed once, each has its own random stream."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from lazyrag import Engine, Live, Node, RequestError

TEXT = "Seven cranes stand at the quay of the old harbour, and three of them are painted red. " * 2
PROMPT = [Live(text="Document:\n\n"), Node(text=TEXT), Live(text="\n\nWhich cranes are red? " * 4)]


@pytest.fixture
def engine(checkpoint, tmp_path: Path) -> Iterator[Engine]:
    with Engine.from_pretrained(checkpoint("llama"), store=tmp_path / "kv") as engine:
        yield engine


def check_all_back(engine: Engine) -> None:
    engine._worker.call(lambda: None)
    pool = engine._pool
    assert pool.free_pages + pool.evictable_pages == pool.total_pages


def test_each_is_the_single_answer_of_its_seed(engine: Engine):
    options = {"max_new_tokens": 12, "temperature": 1.5, "top_k": 50}
    answers = engine.sample(PROMPT, 5, seed=40, **options)
    single = [engine.generate(PROMPT, seed=40 + n, **options) for n in range(5)]
    assert [a.token_ids for a in answers] == [a.token_ids for a in single]
    assert len({tuple(a.token_ids) for a in answers}) == 5
    check_all_back(engine)


def test_the_prompt_is_computed_once(engine: Engine):
    answers = engine.sample(PROMPT, 4, max_new_tokens=3, temperature=1.0, seed=1)
    first, *others = [answer.report for answer in answers]
    live = sum(len(part.text) for part in PROMPT if isinstance(part, Live))
    assert (first.live_tokens_reused, first.nodes[0].tier) == (0, "none")
    for report in others:
        assert report.live_tokens_reused == (live - 1) // 16 * 16
        assert report.nodes[0].tier == "device"
        assert report.tokens_computed <= 16


def test_without_a_seed_they_differ_and_differ_again(engine: Engine):
    texts = [
        tuple(answer.token_ids)
        for _ in range(2)
        for answer in engine.sample(PROMPT, 3, max_new_tokens=16, temperature=2.0)
    ]
    assert len(set(texts)) == 6


def test_a_conversation_and_a_schema(engine: Engine):
    messages = [{"role": "user", "content": TEXT + "How many are red?"}]
    schema = '{"type": "object", "properties": {"red": {"enum": [1, 2, 3, 4, 5, 6, 7]}}, '
    schema += '"required": ["red"], "additionalProperties": false}'
    answers = engine.sample(
        messages, 3, json_schema=schema, temperature=3.0, seed=5, max_new_tokens=40
    )
    assert all(json.loads(answer.text)["red"] in range(1, 8) for answer in answers)


def test_greedy_answers_are_equal(engine: Engine):
    answers = engine.sample(PROMPT, 3, max_new_tokens=6)
    assert len({tuple(answer.token_ids) for answer in answers}) == 1


def test_one_is_as_generate(engine: Engine):
    (answer,) = engine.sample(PROMPT, 1, max_new_tokens=6, seed=3, temperature=1.0)
    expected = engine.generate(PROMPT, max_new_tokens=6, seed=3, temperature=1.0)
    assert answer.token_ids == expected.token_ids


@pytest.mark.parametrize("n", [0, -1, 1.5, True, "2", None])
def test_a_wrong_n_is_refused(engine: Engine, n):
    with pytest.raises(RequestError, match="n must be a whole number"):
        engine.sample(PROMPT, n)


def test_an_error_of_one_ends_all(engine: Engine, monkeypatch):
    from lazyrag.engine.sampling import Sampler

    accept = Sampler.accept

    def failing(self, token, top):
        if self.seed == 12:
            raise ValueError("broken")
        return accept(self, token, top)

    monkeypatch.setattr(Sampler, "accept", failing)
    with pytest.raises(ValueError, match="broken"):
        engine.sample(PROMPT, 5, seed=10, temperature=1.0, max_new_tokens=2_000)
    check_all_back(engine)


def test_more_than_the_pool_holds_at_once(checkpoint, tmp_path: Path):
    """They take turns."""
    with Engine.from_pretrained(
        checkpoint("llama"), store=tmp_path / "kv", pool_bytes=768 * 16 * 40
    ) as engine:
        answers = engine.sample(PROMPT, 8, max_new_tokens=150, temperature=1.0, seed=2)
        assert len({tuple(answer.token_ids) for answer in answers}) == 8
        check_all_back(engine)
