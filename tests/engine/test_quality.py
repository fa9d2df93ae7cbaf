"""The rungs between fast and full, through the engine; tiny random models in fp32."""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import partial

import pytest
import torch
from torch import Tensor

from lazyrag.engine import engine as engine_module
from lazyrag.engine.calibrate import NODES, WORDS, riddles
from lazyrag.engine.engine import Engine
from lazyrag.engine.generation import Looked
from lazyrag.engine.report import NodeStatus, Reason
from lazyrag.engine.request import Request
from lazyrag.errors import RequestError
from lazyrag.prompt.read import ReadPrompt
from lazyrag.prompt.segments import NodeRun, PlacedPrompt, end_live, place
from lazyrag.quality.calibration import Calibration, recall
from lazyrag.quality.choice import Head, by_heads
from lazyrag.quality.ladder import Rung
from lazyrag.quality.moves import Offsets
from lazyrag.types import Live, Node, Quality, Segment

HEADS = (Head(1, 2), Head(0, 1))
ANSWER = "an answer"
LENGTHS = (60, 75, 33, 48, 90, 70)


def text(length: int, seed: int) -> str:
    letters = random.Random(seed)
    return "".join(letters.choice("abcdefghij klmno.,\n") for _ in range(length - 1)) + "z"


TEXTS = [text(length, seed) for seed, length in enumerate(LENGTHS)]
PROMPT = "Read:\n" + "\n\n".join(TEXTS) + "\nWhy is it?"


@pytest.fixture(scope="module", params=["llama", "mistral-window"])
def engine(request, checkpoint, tmp_path_factory) -> Iterator[Engine]:
    with Engine.from_pretrained(
        checkpoint(request.param), store=tmp_path_factory.mktemp("kv"), dtype="float32"
    ) as made:
        made.precompute(TEXTS)
        made._calibration = Calibration(HEADS, (0.5, 0.4), 8)
        yield made


def look(engine: Engine, prompt: PlacedPrompt, layers: set[int]) -> dict[int, Tensor]:
    """Through the line, as the engine itself does it."""
    request = Request.of_nodes(ReadPrompt([node.run for node in prompt.nodes]))
    found = engine._wait(partial(engine._worker.look, request, prompt, layers))
    assert isinstance(found, Looked) and found.masses is not None
    return found.masses


def as_segments(engine: Engine, quality: str) -> list[Segment]:
    """The prompt of a rung, spelled out."""
    climbed = engine._climb(engine._read(PROMPT), Quality(quality))
    assert climbed is not None
    return [
        Node(text=run.text, offset=run.offset)
        if isinstance(run, NodeRun)
        else Live(ids=run.ids, offset=run.offset)
        for run in climbed.runs
    ]


@pytest.mark.parametrize("quality", ["balanced", "best"])
def test_a_rung_is_the_prompt_it_says(engine: Engine, quality: str):
    segments = as_segments(engine, quality)
    reused = sum(isinstance(one, Node) for one in segments)
    assert 0 < reused < len(TEXTS)
    expected = engine.score(segments, ANSWER)
    assert engine.score(PROMPT, ANSWER, quality=quality) == pytest.approx(expected, abs=1e-5)
    if "window" not in engine.model_name:  # the question hardly sees the nodes there
        assert engine.score(PROMPT, ANSWER) != pytest.approx(expected, abs=1e-3)


def test_everything_chosen_is_full_attention_in_that_order(engine: Engine, monkeypatch):
    monkeypatch.setitem(engine_module.RUNGS, Quality.BEST, Rung(9.0, Offsets.IN_LINE))
    climbed = engine._climb(engine._read(PROMPT), Quality.BEST)
    assert climbed is not None
    order = [one.given for one in climbed.nodes]
    assert all(one.anew for one in climbed.nodes)
    assert order != sorted(order)
    moved = "Read:\n" + "\n\n".join(TEXTS[number] for number in order) + "\nWhy is it?"
    expected = engine.score(moved, ANSWER, quality="full")
    assert engine.score(PROMPT, ANSWER, quality="best") == pytest.approx(expected, abs=1e-5)


def test_full_is_full_attention_as_given(engine: Engine):
    """Whatever the ladder does, `full` has nothing of it: the very bits of a prompt of ids."""
    ids = engine.token_ids(PROMPT)
    plain = engine.score([Live(ids=tuple(ids))], ANSWER, quality="full")
    assert engine.score(PROMPT, ANSWER, quality="full") == plain


def test_the_most_attended_nodes_are_chosen(engine: Engine):
    runs = end_live(engine._read(PROMPT).runs)
    ranking = by_heads(look(engine, place(runs), {0, 1}), HEADS)
    report = engine.generate(PROMPT, max_new_tokens=1, quality="balanced").report
    chosen = [node.given for node in report.nodes if node.reason is Reason.CHOSEN]
    live = report.prompt_tokens - sum(LENGTHS)
    room = 0.25 * report.prompt_tokens - live - report.tokens_looked
    fitting = [number for number in ranking if LENGTHS[number] <= room]
    assert chosen == fitting[:1]


def test_the_report_says_what_was_done(engine: Engine):
    report = engine.generate(PROMPT, max_new_tokens=1, quality="balanced", strict=True).report
    assert sorted(node.given for node in report.nodes) == list(range(len(TEXTS)))
    anew = [node for node in report.nodes if node.status is NodeStatus.RECOMPUTED]
    assert {node.reason for node in anew} == {Reason.CHOSEN}
    assert anew == report.nodes[-len(anew) :]
    reused = report.nodes[: -len(anew)]
    offsets = {node.offset for node in reused}
    assert len(offsets) == (len(reused) if "window" in engine.model_name else 1)
    live = report.prompt_tokens - sum(LENGTHS)
    live_tokens = report.tokens_computed + report.live_tokens_reused
    assert live_tokens == live + sum(node.tokens for node in anew)
    assert report.tokens_looked == pytest.approx(live * 2 / 3)  # two of three layers
    assert report.work <= 0.25
    assert report.to_dict()["work"] == report.work
    assert not report.warnings
    fast = engine.generate(PROMPT, max_new_tokens=1).report
    assert [node.given for node in fast.nodes] == [None] * len(TEXTS)
    assert fast.tokens_looked == 0


def test_looking_leaves_nothing_behind(engine: Engine):
    engine.generate(PROMPT, max_new_tokens=1, quality="balanced")
    free = engine._pool.free_pages + engine._pool.evictable_pages
    for _ in range(3):
        engine.generate(PROMPT, max_new_tokens=1, quality="balanced")
    assert engine._pool.free_pages + engine._pool.evictable_pages == free


def test_without_calibration_the_first_nodes_are_chosen_and_it_is_said(engine: Engine, monkeypatch):
    monkeypatch.setattr(engine, "_calibration", None)
    monkeypatch.setattr(engine_module, "recall", lambda model: None)
    report = engine.generate(PROMPT, max_new_tokens=1, quality="balanced").report
    assert any("calibrate" in warning for warning in report.warnings)
    assert [node.given for node in report.nodes if node.reason is Reason.CHOSEN] == [0]
    assert report.tokens_looked == 0


def test_nodes_do_not_cross_messages(engine: Engine):
    messages = [
        {"role": "user", "content": f"{TEXTS[0]}\n\n{TEXTS[2]}"},
        {"role": "assistant", "content": "I see."},
        {"role": "user", "content": f"{TEXTS[3]}\n\n{TEXTS[1]}\n\nWhy?"},
    ]
    for quality in ("balanced", "best"):
        report = engine.chat(messages, max_new_tokens=1, quality=quality).report
        order = [node.given for node in report.nodes]
        assert set(order[:2]) == {0, 1}
        assert set(order[2:]) == {2, 3}


def test_a_node_that_stands_twice(engine: Engine):
    twice = f"Read:\n{TEXTS[2]}\n\n{TEXTS[4]}\n\n{TEXTS[2]}\nWhy is it?"
    report = engine.generate(twice, max_new_tokens=1, quality="best").report
    assert sorted(node.given for node in report.nodes) == [0, 1, 2]
    anew = [node for node in report.nodes if node.reason is Reason.CHOSEN]
    assert len(anew) == 1
    live_tokens = report.tokens_computed + report.live_tokens_reused
    assert report.tokens_reused == report.prompt_tokens - live_tokens


def test_a_prompt_without_nodes_or_with_small_room(engine: Engine):
    assert engine.generate("Nothing here.", max_new_tokens=1, quality="balanced").report.work <= 1
    long = f"{TEXTS[0]}\n\n{TEXTS[1]}\n" + "Why is it so? " * 20
    report = engine.generate(long, max_new_tokens=1, quality="balanced").report
    assert report.tokens_looked == 0
    assert all(node.status is NodeStatus.REUSED for node in report.nodes)


# calibration

PASSAGES = [
    " ".join(random.Random(seed).choices([f"word{n}" for n in range(300)], k=30))
    for seed in range(NODES + 2)
]


def test_riddles_ask_for_words_of_the_right_node():
    made = riddles(PASSAGES, count=10)
    assert made == riddles(PASSAGES, count=10)
    for one in made:
        assert len(one.texts) == NODES == len(set(one.texts))
        assert len(one.words) == WORDS
        assert set(one.words) <= set(one.texts[one.answer].split())
    many = riddles([f"{text} {n}" for text in PASSAGES for n in range(3)], count=3)
    assert len({text for one in many for text in one.texts}) == 3 * NODES
    assert len({one.answer for one in made}) > 2
    with pytest.raises(RequestError, match="too few"):
        riddles(PASSAGES[: NODES - 1])


def test_a_calibration_is_kept_for_the_weights(checkpoint, tmp_path):
    with Engine.from_pretrained(checkpoint("qwen3"), store=tmp_path / "a") as engine:
        engine.precompute(PASSAGES)
        free = engine._pool.free_pages
        seen = []
        found = engine.calibrate(progress=lambda done, whole: seen.append((done, whole)))
        assert seen[-1] == (found.questions, found.questions)
        assert engine._pool.free_pages == free
        assert list(found.shares) == sorted(found.shares, reverse=True)
        assert len(set(found.heads)) == len(found.heads) == 4
    with Engine.from_pretrained(checkpoint("qwen3"), store=tmp_path / "b") as other:
        assert recall(other._model) == found
        other.precompute(TEXTS)
        report = other.generate(PROMPT, max_new_tokens=1, quality="balanced").report
        assert not report.warnings
        assert report.tokens_looked > 0
        with pytest.raises(RequestError, match="too few"):
            Engine.calibrate(other, texts=PASSAGES[:3])
    with Engine.from_pretrained(checkpoint("qwen2"), store=tmp_path / "c") as another:
        assert recall(another._model) is None


def test_shares_are_those_of_attention_to_the_right_node(checkpoint):
    """By hand: encoded, placed, looked at, for one made-up question."""
    from lazyrag.engine.calibrate import calibrate
    from lazyrag.model.load import load_model

    model = load_model(str(checkpoint("llama")), device="cpu", dtype="float32")
    found = calibrate(model, (), PASSAGES, questions=1)
    (riddle,) = riddles(PASSAGES, count=1)
    with Engine(model, sink="none") as engine:
        engine.precompute(riddle.texts)
        segments: list[Segment] = []
        for one in riddle.texts:
            segments += [Node(text=one), Live(text="\n\n")]
        asked = f"Question: Which of the documents is about {' '.join(riddle.words)}?\nAnswer:"
        runs = engine._reader.read_segments([*segments, Live(text=asked)]).runs
        masses = look(engine, place(runs), {0, 1, 2})
    weights = torch.stack([masses[layer].double().mean(dim=1) for layer in range(3)])
    shares = weights[..., riddle.answer] / weights.sum(dim=-1)
    best = shares.flatten().argsort(descending=True)[:4].tolist()
    assert [divmod(index, 4) for index in best] == list(found.heads)
    assert found.shares == pytest.approx(shares.flatten()[best].tolist(), abs=1e-5)
