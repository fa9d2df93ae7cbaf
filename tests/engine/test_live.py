"""Live text that was computed before is reused behind exactly the same, and only there."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from lazyrag import Engine, Live, Node
from lazyrag.engine.live import LiveKey, LiveNames, reusable_names
from lazyrag.engine.pool import PagePool
from lazyrag.prompt.segments import LiveRun, NodeRun, end_live, place
from lazyrag.quality.scale import PLAIN, Scale
from lazyrag.types import NodeKey, Quality, Segment
from tests.support.close import assert_far, rms_ratio

PAGE = 16
SYSTEM = "You answer from the documents below, in one sentence, and say when they do not tell."
TOLERANCE = 1e-5


def text(number: int, length: int = 90) -> str:
    words = f"Document {number}: the {number * 7 % 11} lamps of harbour {number * 5 % 13} are lit. "
    return (words * (length // len(words) + 1))[:length].strip()


OpenEngine = Callable[..., Engine]


@pytest.fixture
def open_engine(checkpoint, tmp_path: Path) -> Iterator[OpenEngine]:
    opened: list[Engine] = []

    def open_(family: str = "llama", **settings) -> Engine:
        engine = Engine.from_pretrained(
            checkpoint(family), store=tmp_path / family, dtype="float32", **settings
        )
        engine._pool.k.fill_(float("nan"))
        engine._pool.v.fill_(float("nan"))
        opened.append(engine)
        return engine

    yield open_
    for engine in opened:
        engine.close()


def distributions(engine: Engine, parts: list[Segment], quality: str = "fast") -> torch.Tensor:
    scores = engine._score(parts, "The lamps are lit at dusk.", quality, whole=True)
    assert scores.distributions is not None
    return scores.distributions


# what is reused


def prompt(*parts: str | int | tuple[int, int]) -> list[Segment]:
    """Live texts, nodes by number, nodes with an offset."""
    made: list[Segment] = []
    for part in parts:
        if isinstance(part, str):
            made.append(Live(text=part))
        elif isinstance(part, int):
            made.append(Node(text=text(part)))
        else:
            made.append(Node(text=text(part[0]), offset=part[1]))
    return made


ASK = "And which harbour is it that has the most lamps of all? " * 2
FIRST = prompt(SYSTEM, 1, "\n\n", 2, ASK)
HEAD = len(SYSTEM) // PAGE * PAGE
"""Of the tiny tokenizer a character is a token."""
WHOLE = (len(SYSTEM) + 2 + len(ASK) - 1) // PAGE * PAGE

CASES = {
    "the same again": (FIRST, WHOLE),
    "another question": (prompt(SYSTEM, 1, "\n\n", 2, "Why " + ASK), HEAD),
    "longer": (prompt(SYSTEM, 1, "\n\n", 2, ASK + "Tell me." * 9), (WHOLE // PAGE) * PAGE),
    "no node": (prompt(SYSTEM, ASK), HEAD),
    "another node": (prompt(SYSTEM, 1, "\n\n", 3, ASK), HEAD),
    "nodes in another order": (prompt(SYSTEM, 2, "\n\n", 1, ASK), HEAD),
    "one node less": (prompt(SYSTEM, 1, "\n\n", ASK), HEAD),
    "one node more": (prompt(SYSTEM, 1, "\n\n", 2, 3, ASK), HEAD),
    "a node earlier": (prompt(SYSTEM[:40], 1, SYSTEM[40:], "\n\n", 2, ASK), 32),
    "a node elsewhere": (prompt(SYSTEM, (1, len(SYSTEM) + 5), "\n\n", 2, ASK), HEAD),
    "another system text": (prompt("Now " + SYSTEM, 1, "\n\n", 2, ASK), 0),
    "one letter of the first page": (prompt("X" + SYSTEM[1:], 1, "\n\n", 2, ASK), 0),
    "moved as a whole": ([Live(text=SYSTEM, offset=3), *FIRST[1:]], 0),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("family", ["llama", "qwen2-window"])
def test_exactly_what_stands_behind_the_same(open_engine: OpenEngine, case: str, family: str):
    engine = open_engine(family)
    engine.generate(FIRST, max_new_tokens=1)
    parts, expected = CASES[case]
    report = engine.generate(parts, max_new_tokens=1).report
    assert report.live_tokens_reused == expected
    live = sum(len(part.text) for part in parts if isinstance(part, Live))
    recomputed = [n for n in report.nodes if n.status == "recomputed"]
    assert report.tokens_computed == live - expected + sum(n.tokens for n in recomputed)
    ours = distributions(engine, parts)
    oracle = distributions(engine, parts, "materialized")
    assert rms_ratio(oracle, ours) < TOLERANCE


def test_a_wrong_name_would_be_seen(open_engine: OpenEngine, monkeypatch):
    """The twin: when order and offsets of nodes are left out of the names, the answer is wrong."""
    engine = open_engine()

    def blind(self, ids, positions):
        self._nodes = ()
        return extend(self, ids, positions)

    extend = LiveNames.extend
    monkeypatch.setattr(LiveNames, "extend", blind)
    engine.generate(FIRST, max_new_tokens=1)
    parts = prompt(SYSTEM, 2, "\n\n", 1, ASK)
    wrong = engine._score(parts, "The lamps are lit.", "fast", whole=True)
    right = engine._score(parts, "The lamps are lit.", "materialized", whole=True)
    assert wrong.report.live_tokens_reused == WHOLE
    assert wrong.distributions is not None and right.distributions is not None
    assert_far("blind names", right.distributions, wrong.distributions, TOLERANCE)


def test_the_last_token_is_computed(open_engine: OpenEngine):
    """A prompt of whole pages that was there before still needs its last row."""
    engine = open_engine()
    for _ in range(2):
        answer = engine.generate("x" * (PAGE * 3), max_new_tokens=2)
    assert answer.report.live_tokens_reused == PAGE * 2
    assert answer.report.tokens_computed == PAGE


def test_written_answers_are_reused_in_the_next_turn(open_engine: OpenEngine):
    engine = open_engine()
    first = [Live(text=SYSTEM), Node(text=text(1)), Live(text=ASK)]
    answer = engine.generate(first, max_new_tokens=70, temperature=0.0, seed=1)
    written = Live(ids=tuple(answer.token_ids))
    again = engine.generate([*first, written, Live(text="Go on.")], max_new_tokens=1)
    live = len(SYSTEM) + len(ASK) + len(answer.token_ids) - 1  # the last one was never computed
    assert again.report.live_tokens_reused == live // PAGE * PAGE


def test_off_means_off(open_engine: OpenEngine):
    engine = open_engine(reuse_live=False)
    for _ in range(2):
        report = engine.generate(FIRST, max_new_tokens=2).report
    assert report.live_tokens_reused == 0
    assert set(map(type, engine._pool._resident)) == {NodeKey}


def test_full_attention_reuses_its_own_text_only(open_engine: OpenEngine):
    engine = open_engine()
    fast = [engine.generate(FIRST, max_new_tokens=4).report for _ in range(2)]
    full = [engine.generate(FIRST, quality="full", max_new_tokens=4).report for _ in range(2)]
    assert fast[1].live_tokens_reused == WHOLE
    assert full[0].live_tokens_reused == HEAD, "before the first node both are the same"
    assert full[1].live_tokens_reused > WHOLE
    single = open_engine("llama", reuse_live=False).generate(FIRST, quality="full")
    assert engine.generate(FIRST, quality="full").token_ids == single.token_ids


def test_requests_at_once_share_what_one_has_computed(open_engine: OpenEngine):
    """The second comes while the first is being written; both end, nothing is lost."""
    engine = open_engine()
    schema = '{"type": "string", "minLength": 4000}'
    first = engine.stream(FIRST, max_new_tokens=200, json_schema=schema)
    next(first)
    pool: PagePool = engine._pool
    second = engine.stream(FIRST, max_new_tokens=4)
    report = second.read().report
    assert report.live_tokens_reused == WHOLE
    first.close()
    engine._worker.call(lambda: None)
    assert pool.free_pages + pool.evictable_pages == pool.total_pages


# names


def names_of(*runs: LiveRun | NodeRun) -> list[bytes]:
    return [key.digest for key in reusable_names(place(end_live(list(runs))), PAGE)]


def test_names_do_not_depend_on_how_tokens_come_in():
    """One token at a time, or in chunks of any size: the pages have the same names."""
    choose = random.Random(4)
    ids = tuple(choose.choices(range(250), k=150))
    node = NodeRun(NodeKey(bytes(32)), ids[:20], 20)
    prompt_ = place([LiveRun(ids[:50]), node, LiveRun(ids[50:])])
    whole = LiveNames(prompt_.nodes, PAGE).extend(prompt_.live_ids, prompt_.live_positions)
    assert len(whole) == len(set(whole)) == 9
    for most in (1, 7, 16, 33):
        names = LiveNames(prompt_.nodes, PAGE)
        parts = []
        for first in range(0, 150, most):
            part = slice(first, first + most)
            parts += names.extend(prompt_.live_ids[part], prompt_.live_positions[part])
        assert parts == whole


def test_names_change_from_the_first_difference_on():
    ids = tuple(range(100))
    node = NodeRun(NodeKey(bytes(32)), ids[:20], 20)
    other = NodeRun(NodeKey(bytes(31) + b"x"), ids[:20], 20)
    base = names_of(LiveRun(ids[:40]), node, LiveRun(ids[40:]))
    assert len(base) == 6
    changed = names_of(LiveRun(ids[:40]), other, LiveRun(ids[40:]))
    assert [one == two for one, two in zip(base, changed, strict=True)] == [True] * 2 + [False] * 4
    at_the_border = names_of(LiveRun(ids[:32]), node, LiveRun(ids[32:]))
    assert base[:2] == at_the_border[:2] and base[2] != at_the_border[2]
    shorter = names_of(LiveRun(ids[:40]), NodeRun(node.key, ids[:20], 19), LiveRun(ids[40:]))
    assert base[2] != shorter[2]


# conversations


@pytest.mark.parametrize("family", ["llama", "llama3-scaled"])
def test_fifty_turns(open_engine: OpenEngine, family: str):
    """Nodes enter, leave and change places; the error at turn 50 is that of turn 1."""
    engine = open_engine(family)
    choose = random.Random(11)
    nodes = [1, 2, 3]
    history: list[Segment] = []
    errors, reused = [], []
    for turn in range(50):
        if turn % 5 == 4:
            nodes = choose.sample(range(12), choose.randint(1, 4))
        elif turn % 5 == 2:
            choose.shuffle(nodes)
        parts: list[Segment] = [Live(text=SYSTEM)]
        parts += [part for n in nodes for part in (Node(text=text(n)), Live(text="\n\n"))]
        parts += [*history, Live(text=f"\nTurn {turn}: which harbour?")]
        report = engine.generate(parts, max_new_tokens=1).report
        reused.append(report.live_tokens_reused)
        oracle = distributions(engine, parts, "materialized")
        errors.append(rms_ratio(oracle, distributions(engine, parts)))
        answer = engine.generate(parts, max_new_tokens=6)
        history += [parts[-1], Live(ids=tuple(answer.token_ids))]
        history = history[-24:]
    print(f"turn 1: {errors[0]:.2e}, turn 50: {errors[-1]:.2e}, worst {max(errors):.2e}")
    assert max(errors) < TOLERANCE
    assert errors[-1] < 5 * max(errors[:5]), "it must not grow"
    assert sum(count > 200 for count in reused) >= 5, "history was hardly ever reused"
    assert all(count >= HEAD for count in reused[1:])


# which pages stay


def live_names(engine: Engine) -> list[LiveKey]:
    """Of the pool's live pages, in the order of the prompt that wrote them."""
    return [key for key in engine._pool._resident if isinstance(key, LiveKey)]


def evict(engine: Engine, pages: int) -> None:
    """Need so many pages more than are free, for a moment."""
    pool = engine._pool

    def need() -> None:
        taken = pool.allocate((pool.free_pages + pages) * PAGE)
        assert taken is not None
        pool.release(taken)

    engine._worker.call(need)


def test_the_last_pages_of_a_text_go_first(open_engine: OpenEngine):
    """Without its first page a text is of no use."""
    engine = open_engine()
    engine.generate("y" * (PAGE * 6 + 1), max_new_tokens=1)
    names = live_names(engine)
    assert len(names) == 6
    for left in (5, 4, 3):
        evict(engine, 1)
        assert live_names(engine) == names[:left]
    report = engine.generate("y" * (PAGE * 6 + 1), max_new_tokens=1).report
    assert report.live_tokens_reused == 3 * PAGE


def test_text_that_came_again_stays_longer_than_newer_text_that_did_not(open_engine: OpenEngine):
    engine = open_engine()
    for _ in range(2):
        engine.generate("z" * (PAGE * 4 + 1), max_new_tokens=1)
    again = live_names(engine)
    engine.generate("w" * (PAGE * 4 + 1), max_new_tokens=1)
    assert len(live_names(engine)) == 8
    evict(engine, 4)
    assert live_names(engine) == again


# scaled attention to nodes


def test_a_scale_is_part_of_names_behind_nodes_only():
    runs = [LiveRun(tuple(range(40))), NodeRun(NodeKey(b"k" * 32), (7,) * 9, 9)]
    placed = place([*runs, LiveRun(tuple(range(60)))])
    plain, *others = (
        reusable_names(placed, PAGE, scale) for scale in (PLAIN, Scale(0.9, 1.0), Scale(1.0, 0.9))
    )
    for names in others:
        assert names[:2] == plain[:2]  # 32 tokens before the node
        assert not set(names[2:]) & set(plain[2:])
    assert others[0][2:] != others[1][2:]
    assert reusable_names(placed, PAGE) == plain


def test_text_behind_scaled_nodes_is_shared_with_its_like_only(open_engine: OpenEngine):
    scale = Scale(0.8, 0.7)
    engine = open_engine()
    alone = open_engine(reuse_live=False)
    expected = {}
    for name, scales in (("plain", {}), ("scaled", {Quality.FAST: scale})):
        alone._ladder.scales = scales
        expected[name] = distributions(alone, FIRST)
    assert_far("scaled", expected["plain"], expected["scaled"], TOLERANCE)
    reused = []
    for name in ("plain", "scaled", "plain", "scaled"):
        engine._ladder.scales = {Quality.FAST: scale} if name == "scaled" else {}
        report = engine.generate(FIRST, max_new_tokens=1, quality="fast").report
        assert report.node_lse_scale == (0.7 if name == "scaled" else 1.0)
        reused.append(report.live_tokens_reused)
        assert rms_ratio(distributions(engine, FIRST), expected[name]) < TOLERANCE
    assert reused == [0, HEAD, WHOLE, WHOLE]
