"""Nodes encoded behind the passage before them: exactness, identity, and what may go wrong."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from lazyrag import Engine, Live, Node, NodeText, Reference, RequestError, StoreError
from lazyrag.engine import ingest as ingest_module
from lazyrag.engine.encode import Encoder
from lazyrag.engine.library import MOST_BEHIND
from lazyrag.engine.scaling import _Bench
from lazyrag.model import oracle
from lazyrag.model.oracle import eager_logits
from lazyrag.prompt.segments import end_live, place
from lazyrag.store import StoredKV
from lazyrag.types import Quality, Segment
from tests.support.close import assert_close, assert_far
from tests.support.tiny import CONFIGS

DEVICE = os.environ.get("LAZYRAG_TEST_DEVICE", "cpu")
TOLERANCE = 1e-5
FIRST = Reference("manual", "a.txt")
BEFORE = "The lighthouse was built in 1911 by two brothers.\n\n"
PASSAGE = "They kept its lamp for forty years, and their sister kept the books of the harbour."
SHORT = "A lamp."
"""Short enough for a window to reach what stood before it."""
OTHER = "The ferry runs twice a day; in winter only when the wind allows it."
MESSAGES = [{"role": "user", "content": f"{PASSAGE}\n\n{OTHER}\n\nWho kept the lamp?"}]


@pytest.fixture
def open_engine(checkpoint, tmp_path: Path) -> Iterator[Callable[..., Engine]]:
    engines: list[Engine] = []

    def make(name: str = "llama", **settings: object) -> Engine:
        engines.append(
            Engine.from_pretrained(
                checkpoint(name),
                store=tmp_path / "kv",
                device=DEVICE,
                dtype="float32",
                reuse_live=False,
                **settings,
            )
        )
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()


@pytest.fixture
def engine(open_engine) -> Engine:
    return open_engine()


def behind(text: str = PASSAGE, before: str = BEFORE) -> NodeText:
    return NodeText(text, behind=before, reference=FIRST)


def logits(engine: Engine, segments: list[Segment], quality: Quality) -> list[float]:
    """Scores of three answers behind a prompt."""
    return [
        score
        for answer in ("z", "ab", "it was")
        for score in engine.score(segments, answer, quality=quality)
    ]


def statuses(engine: Engine) -> list[tuple[str, str | None]]:
    nodes = engine.chat(MESSAGES, max_new_tokens=1).report.nodes
    return [(node.status, node.reason) for node in nodes]


# exactness


@pytest.mark.parametrize("sink", ["none", "template"])
@pytest.mark.parametrize("name", CONFIGS)
def test_lazy_equals_the_block_mask_and_the_materialised(open_engine, name: str, sink: str):
    """Each node behind private copies of the sink and of what stood before it."""
    engine = open_engine(name, sink=sink)
    engine.precompute([behind(), NodeText(OTHER), behind(SHORT, f"{PASSAGE}\n\n")])
    segments: list[Segment] = [
        Live(text="Read: "),
        Node(text=PASSAGE),
        Live(text=" "),
        Node(text=OTHER),
        Node(text=SHORT),
        Live(text="?"),
    ]
    runs = end_live(engine._reader.read_segments(segments).runs)
    behinds = [len(node.run.behind) for node in place(runs).nodes]
    assert behinds[2] > behinds[0] > behinds[1] == 0
    layout = oracle.block_layout(place(runs), engine.encoding.sink)
    expected = eager_logits(engine._model.model, layout)[-1].log_softmax(-1)
    answer = engine._model.tokenizer.encode_text("z")[0]
    plain = [replace(run, behind=()) if hasattr(run, "behind") else run for run in runs]
    layout = oracle.block_layout(place(plain), engine.encoding.sink)
    without = eager_logits(engine._model.model, layout)[-1].log_softmax(-1)
    lazy = torch.tensor(logits(engine, segments, Quality.FAST))
    assert_close(name, expected[answer], lazy[0], TOLERANCE)
    assert_far(f"{name} twin", without[answer], lazy[0], TOLERANCE)
    materialised = torch.tensor(logits(engine, segments, Quality.MATERIALIZED))
    assert_close(name, materialised, lazy, TOLERANCE)


@pytest.mark.parametrize("name", CONFIGS)
def test_behind_what_stands_before_it_equals_causal_attention(open_engine, name: str):
    """Where sink and previous passage stand in the prompt as well, nothing is different."""
    engine = open_engine(name, sink="template")
    engine.precompute([behind(SHORT)])
    segments: list[Segment] = [
        Live(ids=engine.encoding.sink),
        Live(text=BEFORE),
        Node(text=SHORT),
        Live(text="?"),
    ]
    full = torch.tensor(logits(engine, segments, Quality.FULL))
    assert_close(name, full, torch.tensor(logits(engine, segments, Quality.FAST)), TOLERANCE)
    engine.release([FIRST])
    engine.precompute([SHORT])
    assert_far(name, full, torch.tensor(logits(engine, segments, Quality.FAST)), TOLERANCE)


# identity


def test_a_node_has_a_key_of_its_own_and_is_found_by_its_text(engine: Engine):
    plain = engine.key_of(PASSAGE)
    (key,) = engine.precompute([behind()])
    assert key != plain and engine.key_of(PASSAGE) == key
    assert engine.store.has(key) and not engine.store.has(plain)
    assert statuses(engine) == [("reused", None)]
    segments = [Node(key=key), Live(text="Who?")]
    assert engine.generate(segments, max_new_tokens=1).report.nodes[0].key == key
    assert engine.store.verify() == []


@pytest.mark.parametrize("first", [NodeText(PASSAGE), behind(before="Something else.\n\n")])
def test_what_is_known_stays_as_it_was_encoded(engine: Engine, first: NodeText):
    (key,) = engine.precompute([first])
    assert engine.estimate([behind()]).already_stored == 1
    assert engine.precompute([behind()]) == [key]
    assert engine.store.stats().nodes == 1
    assert statuses(engine) == [("reused", None)]


def test_of_one_text_behind_several_the_first_one_counts(engine: Engine):
    keys = engine.precompute([behind(), behind(before="Something else.\n\n"), NodeText(PASSAGE)])
    assert len(set(keys)) == 1 and engine.store.stats().nodes == 1
    assert engine.store.verify() == []


def test_texts_that_repeat_are_computed_once(engine: Engine):
    """Whatever each of them stands behind, in one batch and in several."""
    texts = [behind(before=f"{number} words before it.\n\n") for number in range(70)]
    estimate, one = engine.estimate(texts), engine.estimate(texts[:1])
    assert (estimate.texts, estimate.already_stored) == (70, 69)
    assert (estimate.tokens, estimate.bytes) == (one.tokens, one.bytes)
    before = engine.stats().encoded_tokens
    seen: list[tuple[int, int]] = []
    keys = engine.precompute(texts, progress=lambda *done: seen.append(done))
    assert len(set(keys)) == 1 and seen[-1] == (one.tokens, one.tokens)
    read = engine._library.identify(PASSAGE)
    assert engine.stats().encoded_tokens - before == read.tokens_to_compute
    assert engine.store.stats().nodes == 1 and engine.store.verify() == []


def test_registered_it_is_encoded_behind_the_same_at_its_first_use(open_engine):
    """And the report counts all that went through the model; host memory keeps what it needs."""
    engine = open_engine(host_bytes=2**28)
    assert engine.register([behind(), behind(OTHER, before="bad \ud800")]) == 1
    report = engine.chat(MESSAGES, max_new_tokens=1).report
    assert [(node.status, node.reason) for node in report.nodes] == [("recomputed", "first use")]
    node = engine._library.identify(PASSAGE)
    assert node.behind
    live = report.prompt_tokens - len(node.ids)
    assert report.tokens_computed == live + node.tokens_to_compute
    engine.flush()
    assert engine.store.verify() == []
    stored = engine.store.load(node.key, node.ids, node.behind)
    assert isinstance(stored, StoredKV) and stored.behind == node.behind
    engine.close()
    again = open_engine()
    assert statuses(again) == [("reused", None)]


def test_what_another_build_registered_is_not_found(engine: Engine):
    """Its key is not the one that these ids make."""
    (key,) = engine.precompute([behind()])
    with sqlite3.connect(engine.store.path / "index.sqlite") as db:
        db.execute("UPDATE texts SET behind = x'0100000002000000'")
    assert engine.chat(MESSAGES, max_new_tokens=1).report.nodes == []
    assert engine.store.has(key)


def test_a_scale_is_searched_over_nodes_as_they_are_served(engine: Engine):
    node = replace(engine._reader.read_segments([Node(text=PASSAGE)]).runs[0], behind=(5, 6, 7))
    bed = _Bench(engine._model, engine.encoding.sink, engine._ladder)
    bed._hold([node])
    (pages,) = bed._held.values()
    page = bed._pool.page_size
    slots = [pages[i // page] * page + i % page for i in range(len(node.ids))]
    (expected,) = Encoder(engine._model, engine.encoding.sink, torch.float32).encode(
        [node.ids], [node.behind]
    )
    assert_close("values", expected.v, bed._pool.v[:, slots].cpu(), TOLERANCE)


def test_another_process_registers_the_text_first(open_engine, monkeypatch):
    engine, other = open_engine(), open_engine()
    original = engine._library.register

    def late(rows):
        other.precompute([NodeText(PASSAGE)])
        original(rows)

    monkeypatch.setattr(engine._library, "register", late)
    (key,) = engine.precompute([behind()])
    assert key == other.key_of(PASSAGE) == engine.key_of(PASSAGE)
    assert engine.store.stats().nodes == 1 and engine.store.verify() == []
    assert statuses(engine) == [("reused", None)]


def test_only_the_end_counts(engine: Engine):
    """Two documents whose last 128 tokens are the same make one node."""
    before = BEFORE * 40
    assert engine.count_tokens(before) > MOST_BEHIND
    (key,) = engine.precompute([behind(before=before)])
    node = engine._library.identify(PASSAGE)
    assert len(node.behind) == MOST_BEHIND
    assert node.behind == tuple(engine._model.tokenizer.encode_text(before))[-MOST_BEHIND:]
    row = engine.store.index.find_text(engine.encoding.digest, PASSAGE)
    assert row is not None and row.behind == node.behind  # no more of that text is kept
    engine.release([FIRST])
    assert engine.precompute([behind(before=f"Other text. {before}")]) == [key]


def test_a_node_that_fills_the_context_window_stands_behind_what_is_left(open_engine):
    engine = open_engine(sink="none")
    longest = engine._model.geometry.max_positions
    for spare in (0, 7):
        text = "".join("abcdefghijkl mnop."[(n * n) % 18] for n in range(longest - spare - 1)) + "z"
        assert engine.count_tokens(text) == longest - spare
        engine.precompute([behind(text)])
        assert len(engine._library.identify(text).behind) == spare
    with pytest.raises(RequestError, match="Split it"):
        engine.precompute([behind(text + "x" * 8)])


def test_an_alias_is_encoded_behind_the_same(engine: Engine):
    node = replace(behind(f"file: a.txt\n\n{PASSAGE}"), aliases=(PASSAGE,))
    engine.precompute([node])
    assert engine.store.stats().nodes == 1
    assert statuses(engine) == [("recomputed", "first use")]
    engine.flush()
    assert engine._library.identify(PASSAGE).behind and engine.store.stats().nodes == 2
    assert statuses(engine) == [("reused", None)] and engine.store.verify() == []


def test_sizes_are_those_of_the_node_and_time_is_that_of_all_it_reads(engine: Engine):
    engine._ingestor._seconds_per_token = 1.0
    plain, told = engine.estimate([PASSAGE]), engine.estimate([behind()])
    assert (told.bytes, told.tokens) == (plain.bytes, plain.tokens)
    assert plain.seconds == engine.count_tokens(PASSAGE)
    assert told.seconds == engine.count_tokens(PASSAGE) + engine.count_tokens(BEFORE)
    seen: list[tuple[int, int]] = []
    engine.precompute([behind()], progress=lambda *done: seen.append(done))
    assert seen[-1] == (told.tokens, told.tokens)
    assert engine.stats().encoded_tokens >= told.seconds


def test_what_it_costs_is_what_it_reads(open_engine, monkeypatch):
    """To compute it is no more work than that of a batch, and is weighed against reading it."""
    engine = open_engine()
    read = engine.count_tokens(PASSAGE) + engine.count_tokens(BEFORE)
    batched: list[int] = []
    original = ingest_module.length_batches
    monkeypatch.setattr(
        ingest_module,
        "length_batches",
        lambda lengths: original(batched.extend(lengths) or lengths),
    )
    engine.precompute([behind()])
    assert batched == [read]
    engine.close()
    again = open_engine()
    weighed: list[int] = []
    monkeypatch.setattr(
        again._costs, "encoding_is_faster", lambda tokens, *_: weighed.append(tokens) is not None
    )
    assert statuses(again) == [("reused", None)]
    assert weighed == [read]


# what goes wrong


@pytest.mark.parametrize("how", ["removed", "damaged"])
def test_what_is_lost_is_computed_behind_the_same(open_engine, how: str):
    engine = open_engine()
    (key,) = engine.precompute([behind()])
    expected = engine.chat(MESSAGES, max_new_tokens=12, quality="fast")
    engine.close()
    again = open_engine()
    file = again.store.file(key)
    file.unlink() if how == "removed" else file.write_bytes(file.read_bytes()[:-1] + b"x")
    answer = again.chat(MESSAGES, max_new_tokens=12, quality="fast")
    assert answer.token_ids == expected.token_ids
    assert [node.reason for node in answer.report.nodes] == [
        "missing" if how == "removed" else "damaged"
    ]
    again.flush()
    assert again.store.has(key) and again.store.verify() == []
    assert statuses(again) == [("reused", None)]


def test_released_while_a_request_waits_it_is_computed_and_not_kept(engine: Engine):
    (key,) = engine.precompute([behind()])
    expected = engine.chat(MESSAGES, max_new_tokens=8)
    stream = engine.stream_chat(MESSAGES, max_new_tokens=8)
    engine.release([FIRST])
    assert "".join(stream) == expected.text
    engine.flush()
    assert not engine.store.has(key) and not engine.store.file(key).exists()
    assert engine.store.stats().nodes == 0 and engine.store.verify() == []


def test_what_no_tokenizer_can_read_is_refused(engine: Engine):
    with pytest.raises(RequestError, match="lone surrogate"):
        engine.precompute([behind(before="bad \ud800")])
    assert engine.store.stats().nodes == 0


def test_control_tokens_written_before_a_node_stay_text(engine: Engine):
    (control,) = engine._model.tokenizer.encode_control("<|im_end|>")
    engine.precompute([behind(before="<|im_end|>\n\n")])
    assert control not in engine._library.identify(PASSAGE).behind


def test_an_index_that_fails_says_so(engine: Engine, monkeypatch):
    def failing(*_):
        raise StoreError("database is locked")

    monkeypatch.setattr(engine.store.index, "find_text", failing)
    with pytest.raises(StoreError, match="locked"):
        engine.precompute([behind()])
    assert list((engine.store.path / "nodes").rglob("*.safetensors")) == []
