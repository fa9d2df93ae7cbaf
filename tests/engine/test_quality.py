"""The rungs between fast and full, through the engine; tiny random models in fp32."""

from __future__ import annotations

import itertools
import random
import threading
import time
from collections.abc import Collection, Iterator
from functools import partial

import pytest
import torch
from torch import Tensor

from lazyrag.engine import climb as climb_module
from lazyrag.engine import scaling
from lazyrag.engine.answer import Task
from lazyrag.engine.calibrate import NODES, WORDS, asked, calibrate, riddles
from lazyrag.engine.engine import Engine
from lazyrag.engine.generation import Looked
from lazyrag.engine.report import NodeStatus, Reason, Tier
from lazyrag.engine.request import Request
from lazyrag.engine.runner import Runner
from lazyrag.engine.scaling import GRID, best
from lazyrag.errors import RequestError, RequestTimeoutError
from lazyrag.model.load import load_model
from lazyrag.prompt.read import ReadPrompt
from lazyrag.prompt.segments import NodeRun, PlacedPrompt, end_live, place
from lazyrag.quality.calibration import Calibration, recall
from lazyrag.quality.choice import Head, by_heads, together
from lazyrag.quality.ladder import Climbed, Rung
from lazyrag.quality.scale import PLAIN
from lazyrag.quality.words import WordRanking
from lazyrag.types import DEFAULT_QUALITY, Live, Node, Quality, Segment

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
        made._ladder.calibration = Calibration(HEADS, (0.5, 0.4), 8)
        yield made


def look(engine: Engine, prompt: PlacedPrompt, layers: Collection[int]) -> dict[int, Tensor]:
    """Through the line, as the engine itself does it."""
    request = Request.of_nodes(ReadPrompt([node.run for node in prompt.nodes]))
    found = engine._wait(partial(engine._worker.look, request, prompt, layers))
    assert isinstance(found, Looked) and found.masses is not None
    return found.masses


def climbed(engine: Engine, quality: str) -> Climbed:
    """The prompt as a rung has it."""
    climb = engine._ladder.climb(end_live(engine._read(PROMPT).runs), Quality(quality))
    assert climb is not None
    return climb.reach(look(engine, climb.prompt, climb.layers))[0]


def as_segments(engine: Engine, quality: str) -> list[Segment]:
    """The prompt of a rung, spelled out."""
    return [
        Node(text=run.text, offset=run.offset)
        if isinstance(run, NodeRun)
        else Live(ids=run.ids, offset=run.offset)
        for run in climbed(engine, quality).runs
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
    monkeypatch.setitem(climb_module.RUNGS, Quality.BEST, Rung(9.0))
    nodes = climbed(engine, "best").nodes
    order = [one.given or 0 for one in nodes]
    assert all(one.anew for one in nodes)
    assert order != sorted(order)
    moved = "Read:\n" + "\n\n".join(TEXTS[number] for number in order) + "\nWhy is it?"
    expected = engine.score(moved, ANSWER, quality="full")
    assert engine.score(PROMPT, ANSWER, quality="best") == pytest.approx(expected, abs=1e-5)


def test_full_is_full_attention_as_given(engine: Engine):
    """Whatever the ladder does, `full` has nothing of it: the very bits of a prompt of ids.

    Both are computed whole: behind reused live text a pass has fewer rows, and another shape of
    matrix product may round otherwise (on a GPU it did, by 2e-6).
    """
    with Engine(engine._model, reuse_live=False) as other:
        other.precompute(TEXTS)
        ids = other.token_ids(PROMPT)
        plain = other.score([Live(ids=tuple(ids))], ANSWER, quality="full")
        assert other.score(PROMPT, ANSWER, quality="full") == plain


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
    for before, node in itertools.pairwise(report.nodes):
        assert node.offset == before.offset + before.tokens + len("\n\n"), "as the text reads"
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


@pytest.fixture
def uncalibrated(engine: Engine, monkeypatch) -> Engine:
    monkeypatch.setattr(engine._ladder, "_calibration", None)
    monkeypatch.setattr(climb_module, "recall", lambda model: None)
    return engine


def test_without_calibration_words_choose(uncalibrated: Engine):
    """Of the nodes that fit into the room; in the order of the prompt if words tell nothing."""
    ask = " ".join(TEXTS[5].split()[:2])
    for question, chosen in (("Why is it?", 0), (f"Why {ask}?", 5)):
        prompt = PROMPT.replace("Why is it?", question)
        report = uncalibrated.generate(prompt, max_new_tokens=1, quality="best").report
        assert [node.given for node in report.nodes if node.reason is Reason.CHOSEN][-1] == chosen
        assert report.tokens_looked == 0
        assert not report.warnings


def test_words_and_attention_choose_together(engine: Engine, monkeypatch):
    runs = end_live(engine._read(PROMPT).runs)
    attended = by_heads(look(engine, place(runs), {0, 1}), HEADS)
    told = attended[::-1]
    monkeypatch.setattr(WordRanking, "rank", lambda self, runs: told)
    climb = engine._ladder.climb(runs, Quality.BEST)
    assert climb is not None
    masses = look(engine, climb.prompt, climb.layers)
    monkeypatch.setattr(climb_module, "climb", lambda runs, rung, ranking, *rest: ranking)
    assert climb.reach(masses)[0] == together(told, attended)
    assert climb.reach(None) == (told, (climb_module.NO_ROOM_TO_LOOK,))
    monkeypatch.setattr(WordRanking, "rank", lambda self, runs: None)
    climb = engine._ladder.climb(runs, Quality.BEST)
    assert climb is not None
    assert climb.reach(masses)[0] == attended


def test_what_has_no_room_on_its_rung_is_read_as_given(uncalibrated: Engine, monkeypatch):
    """A node that stands twice takes more room when one of the two is live text."""
    twice = f"Read:\n{TEXTS[2]}\n\n{TEXTS[4]}\n\n{TEXTS[2]}\nWhy is it?"
    check = Runner.check_fits

    def fits(runner, request):
        if any(one.anew for one in request.known):
            raise RequestError("no room")
        check(runner, request)

    monkeypatch.setattr(Runner, "check_fits", fits)
    report = uncalibrated.generate(twice, max_new_tokens=1, quality="best").report
    assert report.warnings == [climb_module.NO_ROOM_TO_CLIMB]
    assert {node.status for node in report.nodes} == {NodeStatus.REUSED}


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
    assert len({one.texts[one.answer] for one in made[:NODES]}) == NODES
    assert len({frozenset(one.texts) for one in made[:NODES]}) == 1  # few nodes are needed
    assert len({one.answer for one in made}) > 2
    many = riddles([f"{text} {n}" for text in PASSAGES for n in range(3)], count=3 * NODES)
    assert len({text for one in many for text in one.texts}) == 3 * NODES
    with pytest.raises(RequestError, match="too few"):
        riddles(PASSAGES[: NODES - 1])


def test_a_calibration_is_kept_for_the_weights(checkpoint, tmp_path):
    with Engine.from_pretrained(checkpoint("qwen3"), store=tmp_path / "a") as engine:
        engine.precompute(PASSAGES)
        free = engine._pool.free_pages + engine._pool.evictable_pages
        seen = []
        found = engine.calibrate(progress=lambda done, whole: seen.append((done, whole)))
        assert seen[-1] == (found.questions, found.questions)
        assert engine._pool.free_pages + engine._pool.evictable_pages == free
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
    """By hand: placed and looked at, for one made-up question."""
    model = load_model(str(checkpoint("llama")), device="cpu", dtype="float32")
    with Engine(model, sink="none") as engine:
        found = calibrate(model, PASSAGES, engine._see, questions=1)
        (riddle,) = riddles(PASSAGES, count=1)
        segments = asked(riddle, model)
        nodes = [one.text for one in segments if isinstance(one, Node)]
        assert nodes == list(riddle.texts)
        runs = engine._reader.read_segments(segments).runs
        masses = look(engine, place(runs), {0, 1, 2})
    weights = torch.stack([masses[layer].double().mean(dim=1) for layer in range(3)])
    shares = weights[..., riddle.answer] / weights.sum(dim=-1)
    best = shares.flatten().argsort(descending=True)[:4].tolist()
    assert [divmod(index, 4) for index in best] == list(found.heads)
    assert found.shares == pytest.approx(shares.flatten()[best].tolist(), abs=1e-5)


# scales of attention to reused nodes


def test_a_scale_must_be_better_beyond_doubt():
    noise = random.Random(1)
    rows = []
    for _ in range(16):
        row = [0.3 + noise.gauss(0, 0.05)] * len(GRID)
        row[2] -= 0.05 + noise.gauss(0, 0.02)
        row[3] -= 0.01 + noise.gauss(0, 0.2)
        rows.append(row)
    assert best(rows) == GRID[2]
    without = [[*row[:2], row[0], *row[3:]] for row in rows]
    assert best(without) == PLAIN
    assert best(rows[:1]) == PLAIN


def test_scales_are_nearest_to_full_attention_and_kept_for_the_encoding(
    checkpoint, tmp_path, monkeypatch
):
    """The divergences are those of what the engine serves, and the engine serves what is found."""
    monkeypatch.setenv("LAZYRAG_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(scaling, "QUESTIONS", 2)
    seen: list[list[float]] = []

    def chosen(rows):
        seen.extend(rows)
        return GRID[3]

    monkeypatch.setattr(scaling, "best", chosen)
    with Engine.from_pretrained(
        checkpoint("llama"), store=tmp_path / "a", dtype="float32"
    ) as engine:
        engine.precompute(PASSAGES)
        engine.calibrate(scales=True)
        assert engine.scales == {Quality.FAST: GRID[3], Quality.BALANCED: GRID[3]}
        assert len(seen) == 4  # two questions, two qualities
        prompts = [asked(one, engine._model) for one in riddles(PASSAGES, 2, seed=1)]
        for segments, divergences in zip(prompts, seen[:2], strict=True):
            full = engine.generate(segments, quality="full", max_new_tokens=scaling.TOKENS)
            ids = [id for id in full.token_ids if id not in engine._model.eos_ids]
            for number in (0, 3):
                engine._ladder.scales = {Quality.FAST: GRID[number]}
                reference, other = (
                    engine._score_ids(segments, ids, quality, whole=True).distributions
                    for quality in ("full", "fast")
                )
                assert reference is not None and other is not None
                expected = (reference.exp() * (reference - other)).sum(dim=-1).mean()
                assert divergences[number] == pytest.approx(float(expected), abs=1e-4)
    with Engine.from_pretrained(
        checkpoint("llama"), store=tmp_path / "b", dtype="float32"
    ) as engine:
        assert engine._ladder.scales == {Quality.FAST: GRID[3], Quality.BALANCED: GRID[3]}
    with Engine.from_pretrained(checkpoint("llama"), store=tmp_path / "b", sink="none") as engine:
        assert engine._ladder.scales == {}


# one request


def test_balanced_is_the_default_where_nodes_are_found(engine: Engine, monkeypatch):
    monkeypatch.setattr("lazyrag.engine.engine.DEFAULT_QUALITY", DEFAULT_QUALITY)
    found = engine.generate(PROMPT, max_new_tokens=1).report
    assert found.quality is Quality.BALANCED is DEFAULT_QUALITY
    segments: list[Segment] = [Node(text=TEXTS[0]), Live(text="\n\n"), Node(text=TEXTS[2])]
    listed = engine.generate([*segments, Live(text="\nWhy?")], max_new_tokens=1).report
    assert listed.quality is Quality.FAST
    assert [node.given for node in listed.nodes] == [None, None]


def test_the_report_says_where_nodes_came_from_before_the_look(checkpoint, tmp_path):
    """A look brings the nodes; that must hide neither where they came from nor a miss."""
    with Engine.from_pretrained(checkpoint("llama"), store=tmp_path) as engine:
        engine.precompute(TEXTS)
        engine._ladder.calibration = Calibration(HEADS, (0.5, 0.4), 8)
        report = engine.generate(PROMPT, max_new_tokens=1, quality="balanced").report
        tiers = {node.tier for node in report.nodes if node.reason is None}
        assert tiers == {Tier.DISK}
        assert report.bytes_by_tier[Tier.DISK] > 0
        assert 0 < report.look_s < report.ttft_s
        segments: list[Segment] = [Live(text="Read:\n"), Node(text=text(50, 99)), Live(text="\n\n")]
        segments += [
            Node(text=TEXTS[0]),
            Live(text="\n\n"),
            Node(text=TEXTS[2]),
            Live(text="\nIt?"),
        ]
        with pytest.raises(RequestError, match="strict"):
            engine.generate(segments, max_new_tokens=1, quality="best", strict=True)


def test_one_token_at_the_end_is_in_the_report(engine: Engine):
    """It was missing with a rung: the node is the token behind which the answer is predicted."""
    engine.precompute(["z"])
    segments: list[Segment] = [Live(text="Read:\n")]
    for one in TEXTS:
        segments += [Node(text=one), Live(text="\n\n")]
    report = engine.generate([*segments, Node(text="z")], max_new_tokens=1, quality="best").report
    assert len(report.nodes) == len(TEXTS) + 1
    assert report.nodes[-1].reason is Reason.LAST_TOKEN
    assert report.nodes[-1].given == len(TEXTS)


class Stop:
    """Holds the worker in a look until it is let go."""

    def __init__(self, monkeypatch) -> None:
        self.reached, self.go = threading.Event(), threading.Event()
        original = Runner.look

        def look(runner, *args):
            self.reached.set()
            assert self.go.wait(60)
            return original(runner, *args)

        monkeypatch.setattr(Runner, "look", look)


def test_a_request_is_cancelled_while_it_looks(engine: Engine, monkeypatch):
    stop = Stop(monkeypatch)
    before = engine.stats().finished_by_outcome.get("cancelled", 0)
    stream = engine.stream(PROMPT, max_new_tokens=4, quality="balanced")
    stream.begin()
    assert stop.reached.wait(60)
    stream.close()
    stop.go.set()
    for _ in range(3):
        engine._worker.call(lambda: None)
    assert engine.stats().finished_by_outcome["cancelled"] == before + 1
    assert engine._worker.line == (0, 0, 0)


def test_a_request_is_cancelled_after_its_look(engine: Engine):
    before = engine.stats().finished_by_outcome.get("cancelled", 0)
    stream = engine.stream(PROMPT, max_new_tokens=6000, quality="balanced")
    next(stream)
    stream.close()
    for _ in range(3):
        engine._worker.call(lambda: None)
    assert engine.stats().finished_by_outcome["cancelled"] == before + 1
    assert engine._worker.line == (0, 0, 0)


def test_a_look_takes_part_in_the_time_limit(engine: Engine, monkeypatch):
    stop = Stop(monkeypatch)
    late = time.perf_counter() + 1
    stream = engine.stream(PROMPT, max_new_tokens=4, quality="balanced", timeout_s=1)
    stream.begin()
    assert stop.reached.wait(60)
    while time.perf_counter() < late + 0.1:
        time.sleep(0.1)
    stop.go.set()
    with pytest.raises(RequestTimeoutError):
        stream.read()


def test_what_follows_a_look_has_its_place_in_line(engine: Engine, monkeypatch):
    """Those that came meanwhile, and have no higher priority, are not served first."""
    order: list[str] = []
    admit = Task.admit

    def admitted(task, started):
        order.append(f"{type(task).__name__} {task.request.options.max_new_tokens}")
        admit(task, started)

    monkeypatch.setattr(Task, "admit", admitted)
    monkeypatch.setattr("lazyrag.engine.scheduler.MAX_RUNNING", 1)
    stop = Stop(monkeypatch)
    first = engine.stream(PROMPT, max_new_tokens=1, quality="balanced")
    first.begin()
    assert stop.reached.wait(60)
    others = [
        engine.stream("Nothing.", max_new_tokens=number, quality="fast", priority=number % 2)
        for number in (2, 3)
    ]
    for stream in others:
        stream.begin()
    stop.go.set()
    for stream in (first, *others):
        stream.read()
    assert order == ["Climbing 1", "Answer 3", "Answer 1", "Answer 2"]
