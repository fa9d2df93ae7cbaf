"""References: a node is there as long as somebody needs it, and then it is gone everywhere."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from lazyrag import Engine, Generation, Live, Node, NodeText, Reference, RequestError, StoreError
from lazyrag.store import StoredKV

FIRST, SECOND = Reference("manual", "a.txt"), Reference("manual", "b.txt")
PAGE_BYTES = 768 * 16


def text(number: int, lines: int = 3) -> str:
    return "\n".join(
        f"Fox {number}.{line} jumps over the lazy dog, and then it sleeps all day long."
        for line in range(lines)
    )


def question(*texts: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": "\n\n".join((*texts, "Which fox sleeps?"))}]


def statuses(generation: Generation) -> list[tuple[str, str | None]]:
    return [(node.status, node.reason) for node in generation.report.nodes]


def remembered(engine: Engine) -> int:
    """Texts its recogniser holds."""
    return len(engine._library._recogniser)


def poison_free_pages(engine: Engine) -> None:
    pool = engine._pool
    for page in pool._allocator._is_free.nonzero()[0].tolist():
        slots = slice(page * pool.page_size, (page + 1) * pool.page_size)
        pool.k[:, slots] = pool.v[:, slots] = float("nan")


@pytest.fixture
def open_engine(checkpoint, tmp_path: Path) -> Iterator[Callable[..., Engine]]:
    """Opens engines over one store, each as a process of its own would."""
    engines: list[Engine] = []

    def make(**settings: int) -> Engine:
        engines.append(
            Engine.from_pretrained(checkpoint("llama"), store=tmp_path / "kv", **settings)
        )
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()


@pytest.fixture
def engine(open_engine) -> Engine:
    return open_engine()


# who keeps what


def test_a_shared_text_goes_with_its_last_reference(engine: Engine):
    """Bug log 20: equal chunks share KV, and it is dropped when nobody refers to it any more."""
    first, second = (NodeText(text(1), reference=one) for one in (FIRST, SECOND))
    keys = engine.precompute([first, second, NodeText(text(2), reference=SECOND)])
    assert keys[0] == keys[1]
    assert engine.release([FIRST]) == 0
    assert statuses(engine.chat(question(text(1)), max_new_tokens=1)) == [("reused", None)]
    assert engine.release([SECOND]) == 2
    assert engine.chat(question(text(1), text(2)), max_new_tokens=1).report.nodes == []
    stats = engine.store.stats()
    assert (stats.nodes, stats.tokens, stats.bytes, stats.texts) == (0, 0, 0, 0)
    assert list(engine.store.path.rglob("*.safetensors")) == []
    assert engine.store.verify() == []
    assert remembered(engine) == 0
    with pytest.raises(RequestError, match="not in this store"):
        engine.generate([Node(key=keys[0]), Live(text="?")])


def test_two_documents_of_one_name_are_not_mixed_up(engine: Engine):
    other = Reference("another collection", FIRST.name)
    engine.precompute([NodeText(text(1), reference=FIRST), NodeText(text(2), reference=other)])
    assert engine.release([FIRST]) == 1
    answer = engine.chat(question(text(1), text(2)), max_new_tokens=1)
    assert [node.key for node in answer.report.nodes] == [engine.key_of(text(2))]


def test_a_reference_is_added_to_what_is_stored_already(engine: Engine):
    engine.precompute([NodeText(text(1), reference=FIRST)])
    before = {path: path.stat().st_mtime_ns for path in engine.store.path.rglob("*.safetensors")}
    engine.precompute([NodeText(text(1), reference=SECOND)])
    assert engine.release([FIRST]) == 0
    after = {path: path.stat().st_mtime_ns for path in engine.store.path.rglob("*.safetensors")}
    assert after == before
    assert engine.release([FIRST, SECOND]) == 1


def test_precompute_removes_no_reference(engine: Engine):
    """Ingesting the new version of a document drops nothing of the old one by itself."""
    engine.precompute([NodeText(text(1), reference=FIRST)])
    engine.precompute([NodeText(text(2), reference=FIRST)])
    assert engine.chat(question(text(1), text(2)), max_new_tokens=1).report.nodes_reused == 2
    assert engine.release([FIRST]) == 2


def test_aliases_have_the_reference_of_their_node(engine: Engine):
    """Stored or not yet, they go with it; one that another document shares stays."""
    node = NodeText("a.txt\n\n" + text(1), aliases=(text(1), text(2), text(3)), reference=FIRST)
    engine.precompute([node, NodeText("b.txt\n\n" + text(2), (text(2),), reference=SECOND)])
    for form in (text(1), text(2)):
        assert statuses(engine.chat(question(form), max_new_tokens=1)) == [
            ("recomputed", "first use")
        ]
    engine.flush()
    assert engine.store.stats().nodes == 4
    assert engine.release([FIRST]) == 2
    assert engine.chat(question(text(1), text(3)), max_new_tokens=1).report.nodes == []
    assert statuses(engine.chat(question(text(2)), max_new_tokens=1)) == [("reused", None)]
    assert engine.release([SECOND]) == 2
    assert engine.store.stats().texts == 0 and engine.store.verify() == []


@pytest.mark.parametrize("for_good", ["before", "after", "given"])
def test_what_was_registered_without_a_reference_is_never_dropped(engine: Engine, for_good: str):
    if for_good == "before":
        engine.precompute([text(1)])
    elif for_good == "given":
        engine.generate([Node(text=text(1)), Live(text="?")], max_new_tokens=1)
        engine.flush()
    engine.precompute([NodeText(text(1), reference=FIRST)])
    if for_good == "after":
        engine.precompute([text(1)])
    assert engine.release([FIRST]) == 0
    assert statuses(engine.chat(question(text(1)), max_new_tokens=1)) == [("reused", None)]


def test_using_a_node_by_its_text_does_not_keep_it(engine: Engine):
    engine.precompute([NodeText(text(1), reference=FIRST)])
    engine.generate([Node(text=text(1)), Live(text="?")], max_new_tokens=1)
    assert engine.release([FIRST]) == 1


def test_a_changed_document_keeps_what_it_still_consists_of(engine: Engine):
    def nodes(header: str, *bodies: str) -> list[NodeText]:
        return [NodeText(f"{header}\n\n{body}", (body,), reference=FIRST) for body in bodies]

    old = nodes("dated 1 May", text(1), text(2)) + nodes("undated", text(3))
    new = nodes("dated 2 May", text(1)) + nodes("undated", text(3), text(4))
    engine.precompute([*old, NodeText(text(9), reference=SECOND)])
    for number in (1, 2):  # aliases become nodes
        engine.chat(question(text(number)), max_new_tokens=1)
    engine.flush()
    engine.precompute(new)
    ignored = [text(2), NodeText(text(2)), NodeText(text(2), reference=SECOND)]
    assert engine.release([FIRST], keep=[*new, *ignored]) == 3
    for gone in (old[0].text, old[1].text, text(2)):
        assert engine.store.index.find_text(engine.encoding.digest, gone) is None
    kept = engine.chat(question(*(node.text for node in new), text(9)), max_new_tokens=1)
    assert statuses(kept) == [("reused", None)] * 4
    assert statuses(engine.chat(question(text(1)), max_new_tokens=1)) == [("reused", None)]
    assert engine.store.verify() == []
    assert engine.release([FIRST]) == 4


def test_keep_gives_no_reference(engine: Engine):
    """It names what stays; a text that had no such reference gets none."""
    engine.precompute([NodeText(text(1), reference=SECOND)])
    engine.release([FIRST], keep=[NodeText(text(1), reference=FIRST)])
    assert engine.release([SECOND]) == 1


def test_an_unknown_reference_is_ignored(engine: Engine):
    engine.precompute([NodeText(text(1), reference=FIRST)])
    before = engine.store.stats()
    assert engine.release([SECOND, Reference("manual", "A.TXT")]) == 0
    assert engine.release([]) == 0
    assert engine.store.stats() == before


BAD = [Reference("", "a"), Reference("a", ""), Reference("a", "\ud800"), ("manual", "a.txt")]


@pytest.mark.parametrize("bad", BAD, ids=ascii)
def test_a_bad_reference_is_refused(engine: Engine, bad):
    good = NodeText(text(1), reference=FIRST)
    texts = [good, NodeText(text(2), label="b.txt", reference=bad)]
    for method in (engine.precompute, engine.estimate, engine.register):
        with pytest.raises(RequestError, match=r"the reference of text 1 \(b\.txt\)"):
            method(texts)
    assert engine.store.stats().nodes == 0
    engine.precompute([good])
    with pytest.raises(RequestError, match="a reference to release"):
        engine.release([FIRST, bad])
    with pytest.raises(RequestError, match=r"the reference of text 1 \(b\.txt\)"):
        engine.release([FIRST], keep=texts)
    assert engine.release([FIRST]) == 1


# requests meanwhile, and afterwards


def test_what_was_released_can_be_ingested_again(engine: Engine):
    node = NodeText(text(1), reference=FIRST)
    (key,) = engine.precompute([node])
    expected = engine.chat(question(text(1)), max_new_tokens=8)
    stored = engine.store.load(key, ids := engine.token_ids([Live(text=text(1))]))
    assert engine.release([FIRST]) == 1
    assert key not in engine._pool
    assert engine.precompute([node]) == [key]
    again = engine.store.load(key, ids)
    assert isinstance(stored, StoredKV) and isinstance(again, StoredKV)
    assert torch.equal(again.k, stored.k) and torch.equal(again.v, stored.v)
    answer = engine.chat(question(text(1)), max_new_tokens=8)
    assert statuses(answer) == [("reused", None)]
    assert answer.report.nodes[0].tier == "disk"
    assert answer.token_ids == expected.token_ids


def test_an_idle_node_leaves_the_memory(engine: Engine):
    (key,) = engine.precompute([NodeText(text(1), reference=FIRST)])
    engine.chat(question(text(1)), max_new_tokens=1)
    engine.chat(question(text(1)), max_new_tokens=1, quality="materialized")
    assert key in engine._pool and engine._runner._raw
    engine.release([FIRST])
    assert key not in engine._pool
    assert engine._runner._raw == {}


def test_a_node_in_use_stays_until_its_requests_end(open_engine):
    engine = open_engine(pool_bytes=PAGE_BYTES * 60)
    pool, node = engine._pool, NodeText(text(1), reference=FIRST)
    (key,) = engine.precompute([node])
    options = {"max_new_tokens": 200, "json_schema": '{"type": "string", "minLength": 1000}'}
    expected = engine.chat(question(text(1)), **options)
    streams = [engine.stream_chat(question(text(1)), **options) for _ in range(2)]
    begun = [next(stream) for stream in streams]
    assert engine.release([FIRST]) == 1
    assert not engine.store.file(key).exists()
    poison_free_pages(engine)
    engine.generate("x" * 200, max_new_tokens=2)
    assert key in pool
    for first, stream in zip(begun, streams, strict=True):
        assert first + "".join(stream) == expected.text
    assert pool.free_pages + pool.evictable_pages == 60
    assert engine.chat(question(text(1)), max_new_tokens=1).report.nodes == []
    engine.precompute([node])
    again = engine.chat(question(text(1)), **options)
    assert again.token_ids == expected.token_ids
    assert engine.release([FIRST]) == 1
    assert key not in pool


@pytest.mark.parametrize("quality", ["fast", "materialized"])
def test_a_node_released_before_its_request_begins_is_computed_and_not_kept(
    engine: Engine, quality: str
):
    """The prompt was read while the text was registered."""
    (key,) = engine.precompute([NodeText(text(1), reference=FIRST)])
    expected = engine.chat(question(text(1)), max_new_tokens=8)
    stream = engine.stream_chat(question(text(1)), max_new_tokens=8, quality=quality)
    engine.release([FIRST])
    assert "".join(stream) == expected.text
    assert statuses(stream.result) == [("recomputed", "missing")]
    engine.flush()
    assert not engine.store.has(key) and not engine.store.file(key).exists()
    assert engine.store.stats().texts == 0 and engine.store.verify() == []


def test_a_waiting_request_reports_what_was_released_meanwhile(open_engine):
    """Its node was in memory when it first looked for room."""
    engine = open_engine(pool_bytes=PAGE_BYTES * 60)
    key, other = engine.precompute([NodeText(text(1), reference=FIRST), text(2)])
    expected = engine.chat(question(text(1), text(2)), max_new_tokens=20)
    assert key in engine._pool
    long = '{"type": "string", "minLength": 1000}'
    holder = engine.stream("Once upon", max_new_tokens=16 * 26 - 9, json_schema=long)
    next(holder)  # 26 pages
    answers: list[Generation] = []
    waiting = threading.Thread(
        target=lambda: answers.append(
            engine.chat(question(text(1), text(2)), max_new_tokens=20 + 16 * 8)
        )
    )
    waiting.start()
    while not engine._worker._scheduler._waiting:
        time.sleep(0.001)
    assert engine.release([FIRST]) == 1
    assert key not in engine._pool and not answers
    holder.close()
    waiting.join(timeout=60)
    (answer,) = answers
    assert statuses(answer) == [("recomputed", "missing"), ("reused", None)]
    assert answer.token_ids[:20] == expected.token_ids
    engine.flush()
    assert engine.store.stats().nodes == 1
    assert engine.store.has(other)


def test_precompute_outlives_a_release_between_its_look_and_its_registration(
    engine: Engine, monkeypatch
):
    """What it found stored is deleted before its own reference is there."""
    (key,) = engine.precompute([NodeText(text(1), reference=FIRST)])
    original = engine._library.register

    def late(rows):
        engine.release([FIRST])
        original(rows)

    monkeypatch.setattr(engine._library, "register", late)
    engine.precompute([NodeText(text(1), reference=SECOND)])
    assert engine.store.has(key) and engine.store.verify() == []
    assert statuses(engine.chat(question(text(1)), max_new_tokens=1)) == [("reused", None)]


def test_release_is_atomic_in_the_index(engine: Engine, monkeypatch):
    (key,) = engine.precompute([NodeText(text(1), reference=FIRST)])
    engine.chat(question(text(1)), max_new_tokens=1)

    def failing(*_):
        raise StoreError("database is locked")

    with monkeypatch.context() as patch:
        patch.setattr(engine.store.index, "release", failing)
        with pytest.raises(StoreError, match="locked"):
            engine.release([FIRST])
    assert key in engine._pool
    assert statuses(engine.chat(question(text(1)), max_new_tokens=1)) == [("reused", None)]


# other processes


def test_what_another_engine_releases_is_not_matched(open_engine):
    writer, reader = open_engine(), open_engine()
    short = text(1, 1)
    (key, _) = writer.precompute([NodeText(text(1), reference=FIRST), short])
    plain = reader.chat(question(text(7)), max_new_tokens=8)
    assert statuses(reader.chat(question(text(1)), max_new_tokens=1)) == [("reused", None)]
    assert remembered(reader) == 2
    assert writer.release([FIRST]) == 1
    answer = reader.chat(question(text(1)), max_new_tokens=8)
    assert [node.key for node in answer.report.nodes] == [reader.key_of(short)]
    changed = text(1).replace("lazy", "busy", 1)
    assert key not in [node.key for node in reader.chat(question(changed)).report.nodes]
    assert remembered(reader) == 1
    assert reader.chat(question(text(7)), max_new_tokens=8).token_ids == plain.token_ids
    writer.precompute([NodeText(text(1), reference=FIRST)])
    assert statuses(reader.chat(question(text(1)), max_new_tokens=1)) == [("reused", None)]


@pytest.mark.parametrize("resident", [True, False])
def test_what_another_engine_releases_between_reading_and_beginning(open_engine, resident: bool):
    writer, reader = open_engine(), open_engine()
    writer.precompute([NodeText(text(1), reference=FIRST)])
    expected = writer.chat(question(text(1)), max_new_tokens=8)
    if resident:
        reader.chat(question(text(1)), max_new_tokens=1)
    stream = reader.stream_chat(question(text(1)), max_new_tokens=8)
    writer.release([FIRST])
    assert "".join(stream) == expected.text
    assert statuses(stream.result) == [
        ("reused", None) if resident else ("recomputed", "missing"),
    ]
    reader.flush()
    assert reader.store.stats().nodes == 0 and reader.store.verify() == []


def test_answers_stay_right_while_others_release_and_ingest(open_engine):
    """Whatever the moment: a node counted as known gives the lazy answer, else the plain one."""
    engine, writer = open_engine(), open_engine()
    nodes = [NodeText(text(number), reference=FIRST) for number in range(2)]
    prompt = question(*(node.text for node in nodes))
    plain = engine.chat(prompt, max_new_tokens=6).token_ids
    writer.precompute(nodes)
    lazy = engine.chat(prompt, max_new_tokens=6).token_ids
    assert lazy != plain
    done = threading.Event()
    failures: list[BaseException] = []

    def churn(other: Engine) -> None:
        try:
            while not done.is_set():
                other.release([FIRST])
                other.precompute(nodes)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=churn, args=(other,)) for other in (engine, writer)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(30):
            answer = engine.chat(prompt, max_new_tokens=6)
            known = len(answer.report.nodes)
            if known != 1:
                assert answer.token_ids == (lazy if known == 2 else plain)
    finally:
        done.set()
        for thread in threads:
            thread.join()
    assert failures == []
    assert engine._pool.free_pages + engine._pool.evictable_pages == engine._pool._allocator.total
    engine.release([FIRST])
    stats = engine.store.stats()
    assert (stats.nodes, stats.texts) == (0, 0)
    assert engine.store.verify() == []


# register


def test_a_registered_text_is_encoded_at_its_first_use(engine: Engine):
    node = NodeText("a.txt\n\n" + text(1), aliases=(text(1),), reference=FIRST)
    assert engine.register([node, text(2), text(2)]) == 3
    assert engine.store.stats().nodes == 0
    first = engine.chat(question(node.text, text(2)), max_new_tokens=4)
    assert statuses(first) == [("recomputed", "first use")] * 2
    again = engine.chat(question(node.text, text(2)), max_new_tokens=4)
    assert statuses(again) == [("reused", None)] * 2
    assert again.token_ids == first.token_ids
    assert statuses(engine.chat(question(text(1)), max_new_tokens=1)) == [
        ("recomputed", "first use")
    ]
    engine.flush()
    assert engine.release([FIRST]) == 2
    assert statuses(engine.chat(question(text(2)), max_new_tokens=1)) == [("reused", None)]


def test_registering_leaves_what_is_known_as_it_is(engine: Engine):
    """It stays an ingested text, and gets no reference that would keep it alive."""
    (key,) = engine.precompute([NodeText(text(1), reference=FIRST)])
    assert engine.register([text(1), NodeText(text(1), (text(2),), reference=SECOND)]) == 1
    engine.store.file(key).unlink()
    assert statuses(engine.chat(question(text(1)), max_new_tokens=1)) == [("recomputed", "missing")]
    engine.flush()
    assert engine.release([FIRST]) == 1
    assert engine.chat(question(text(1)), max_new_tokens=1).report.nodes == []
    assert engine.release([SECOND]) == 0
    assert engine.store.stats().texts == 0


def test_ingesting_what_is_registered(engine: Engine):
    engine.register([NodeText(text(1), reference=FIRST)])
    engine.precompute([NodeText(text(1), reference=SECOND)])
    assert statuses(engine.chat(question(text(1)), max_new_tokens=1)) == [("reused", None)]
    assert engine.release([FIRST]) == 0
    assert engine.release([SECOND]) == 1


def test_texts_that_cannot_be_nodes_are_passed_over(engine: Engine):
    texts = ["", " \n", "x" * 9_000, "a \ud800 b", NodeText("", (" ", "y" * 9_000, text(1)))]
    assert engine.register(texts) == 1
    assert engine.store.stats().texts == 1


def test_registering_known_texts_costs_a_look(engine: Engine, monkeypatch):
    texts = [NodeText(text(number, 20), reference=FIRST) for number in range(50)]
    assert engine.register(texts) == 50
    monkeypatch.setattr(engine.store.index, "add_texts", None)
    monkeypatch.setattr(engine._model.tokenizer, "encode_text", None)
    begun = time.perf_counter()
    assert engine.register(texts) == 0
    assert time.perf_counter() - begun < 0.05


def test_a_closed_engine_and_one_string_are_refused(engine: Engine):
    for call in (
        lambda: engine.register("Hello"),
        lambda: engine.release([FIRST], keep="Hello"),
    ):
        with pytest.raises(RequestError, match="not one string"):
            call()
    engine.close()
    for call in (lambda: engine.register([text(1)]), lambda: engine.release([FIRST])):
        with pytest.raises(RequestError, match="closed"):
            call()
