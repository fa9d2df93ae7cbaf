"""Prompts read, scored and continued in packed passes: what the engine gives one by one."""

from __future__ import annotations

import random

import pytest
import torch

from lazyrag.engine import passes as passes_module
from lazyrag.engine.encode import Encoder
from lazyrag.engine.engine import Engine
from lazyrag.engine.fill import PageFiller
from lazyrag.engine.passes import Passes, Trial, write_nodes
from lazyrag.engine.pool import PagePool
from lazyrag.errors import RequestError
from lazyrag.prompt.segments import as_live, end_live, place

LENGTHS = (40, 17, 63)
ANSWERS = ("an answer", "z")


def text(length: int, seed: int) -> str:
    letters = random.Random(seed)
    return "".join(letters.choice("abcdefghij klmno.,\n") for _ in range(length - 1)) + "z"


@pytest.fixture(scope="module")
def world(checkpoint, tmp_path_factory):
    """An engine, prompts over its nodes, and the same as trials over a pool of their own."""
    engine = Engine.from_pretrained(
        checkpoint("llama"), store=tmp_path_factory.mktemp("kv"), dtype="float32"
    )
    texts = [text(length, seed) for seed, length in enumerate(LENGTHS)]
    engine.precompute(texts)
    prompts = [
        f"Read {number}:\n" + "\n\n".join(random.Random(number).sample(texts, 3)) + "\nWhy?"
        for number in range(3)
    ]
    model = engine._model
    pool = PagePool(
        model.geometry, pages=300, page_size=16, dtype=torch.float32, device=model.device
    )
    filler = PageFiller(pool, model.geometry)
    encoder = Encoder(model, engine.encoding.sink, torch.float32)
    held = {}
    for one in texts:
        node = engine._library.identify(one)
        encoded = encoder.encode([node.ids])
        pages = pool.allocate(len(node.ids))
        assert pages is not None
        write_nodes(filler, encoded, [pages])
        held[node.key] = pages

    def trial(prompt: str, quality: str) -> Trial:
        runs = end_live(engine._read(prompt).runs)
        placed = place(as_live(runs) if quality == "full" else runs)
        return Trial(placed, tuple(held[node.run.key] for node in placed.nodes))

    yield engine, prompts, Passes(model, pool), pool, trial
    engine.close()


@pytest.mark.parametrize("rows", [1024, 100], ids=["together", "in pieces"])
def test_packed_passes_give_what_the_engine_gives(world, rows: int):
    engine, prompts, passes, pool, trial = world
    passes._rows = rows
    free = pool.free_pages
    cases = [(prompt, quality) for prompt in prompts for quality in ("fast", "full")]
    readings = passes.read([trial(*case) for case in cases], 8)
    for _ in range(2):  # neither disturbs the other, nor itself
        written = passes.greedy(readings, 6, engine._model.eos_ids)
        for (prompt, quality), ids in zip(cases, written, strict=True):
            answer = engine.generate(prompt, max_new_tokens=6, quality=quality)
            assert ids == [id for id in answer.token_ids if id not in engine._model.eos_ids]
        answers = [ANSWERS[number % 2] for number in range(len(cases))]
        ids = [engine.text_ids(answer) for answer in answers]
        for (prompt, quality), answer, tokens, scores in zip(
            cases, answers, ids, passes.score(readings, ids), strict=True
        ):
            expected = engine.score(prompt, answer, quality=quality)
            actual = scores.gather(1, torch.tensor(tokens)[:, None])[:, 0].tolist()
            assert actual == pytest.approx(expected, abs=1e-4)
    passes.close(readings)
    assert pool.free_pages == free


def test_a_pool_that_is_too_small_keeps_nothing(world):
    _, prompts, passes, pool, trial = world
    free = pool.free_pages
    with pytest.raises(RequestError, match="no room"):
        passes.read([trial(prompts[0], "full")] * 30, 8)
    assert pool.free_pages == free


def test_packing():
    assert list(passes_module._packed([3, 3, 9, 1, 1], 6)) == [[0, 1], [2], [3, 4]]
    assert list(passes_module._packed([], 6)) == []
