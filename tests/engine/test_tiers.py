"""Device, host memory, store: loads beside forward passes, load or compute, prefetch, pins."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from lazyrag import Engine, Live, Node, RequestError
from lazyrag.engine import fetch as fetch_module
from lazyrag.engine.costs import Costs, Speed
from lazyrag.engine.host import HostTier
from lazyrag.engine.report import Reason, Tier
from lazyrag.store import KVStore, StoredKV
from lazyrag.types import NodeKey, Segment

PAGE_BYTES = 768 * 16
ENDLESS = '{"type": "string", "minLength": 4000}'


def text(number: int, length: int = 110) -> str:
    words = f"Note {number} tells that crane {number * 7 % 11} stands at quay {number * 5 % 13}. "
    return (words * (length // len(words) + 1))[:length].strip()


def prompt(*numbers: int, ask: str = "Where?") -> list[Segment]:
    return [*(Node(text=text(n)) for n in numbers), Live(text=ask)]


class Disk:
    """Reads of the store, held back, counted, made to fail."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.open = threading.Event()
        self.open.set()
        self.held: dict[NodeKey, threading.Event] = {}
        self.read: list[NodeKey] = []
        load = KVStore.load

        def held(store, key, ids):
            self.read.append(key)
            assert self.held.get(key, self.open).wait(30)
            return load(store, key, ids)

        monkeypatch.setattr(KVStore, "load", held)

    def hold(self, key: NodeKey) -> threading.Event:
        self.held[key] = threading.Event()
        return self.held[key]


@pytest.fixture
def disk(monkeypatch) -> Iterator[Disk]:
    disk = Disk(monkeypatch)
    yield disk
    for event in (disk.open, *disk.held.values()):
        event.set()


OpenEngine = Callable[..., Engine]


@pytest.fixture
def open_engine(checkpoint, tmp_path: Path) -> Iterator[OpenEngine]:
    """Engines of llama over one store that holds nodes 0 to 9."""
    opened: list[Engine] = []

    def open_(**settings) -> Engine:
        engine = Engine.from_pretrained(checkpoint("llama"), store=tmp_path / "kv", **settings)
        opened.append(engine)
        return engine

    with open_() as engine:
        engine.precompute([text(n) for n in range(10)])
    yield open_
    for engine in opened:
        engine.close()


def key(engine: Engine, number: int) -> NodeKey:
    return engine.key_of(text(number))


def wait_for(condition: Callable[[], bool], seconds: float = 20) -> None:
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, "it took too long"
        time.sleep(0.002)


def tiers(engine: Engine, *numbers: int) -> list[str]:
    report = engine.generate(prompt(*numbers), max_new_tokens=1).report
    return [node.tier.value for node in report.nodes]


def check_all_back(engine: Engine) -> None:
    pool = engine._pool
    engine._worker.call(lambda: None)
    assert pool.free_pages + pool.evictable_pages == pool.total_pages
    assert not engine._runner._placer._arriving


# loads beside forward passes


def test_others_go_on_while_a_node_is_read(open_engine: OpenEngine, disk: Disk):
    """One answer is written, and one that comes later is answered, before node 1 is here."""
    engine = open_engine()
    expected = engine.generate(prompt(1), max_new_tokens=4).token_ids
    engine._worker.call(lambda: engine._runner.drop([key(engine, 1)]))
    running = engine.stream(prompt(0), max_new_tokens=3_000, json_schema=ENDLESS)
    next(running)
    gate = disk.hold(key(engine, 1))
    waiting = engine.stream(prompt(1), max_new_tokens=4)
    waiting.begin()
    wait_for(lambda: disk.read.count(key(engine, 1)) == 2)
    for _ in range(20):
        assert next(running)
    assert engine.generate(prompt(2), max_new_tokens=2).token_ids
    assert not gate.is_set()
    gate.set()
    answer = waiting.read()
    assert answer.token_ids == expected
    assert [node.tier for node in answer.report.nodes] == [Tier.DISK]
    running.close()
    check_all_back(engine)


def test_a_node_is_read_once_for_all_who_wait(open_engine: OpenEngine, disk: Disk):
    engine = open_engine()
    gate = disk.hold(key(engine, 1))
    streams = [engine.stream(prompt(1, n, ask=f"{n}?"), max_new_tokens=3) for n in (2, 3, 4)]
    for stream in streams:
        stream.begin()
    wait_for(lambda: len(engine._worker._scheduler._running) == 3)
    gate.set()
    reports = [stream.read().report for stream in streams]
    assert disk.read.count(key(engine, 1)) == 1
    assert all(node.reason is None for report in reports for node in report.nodes)
    assert len(engine._pool) == 4
    check_all_back(engine)


@pytest.mark.parametrize("how", ["close", "timeout"])
def test_one_that_leaves_while_its_node_is_read(open_engine: OpenEngine, disk: Disk, how: str):
    """Its pages are free at once; what is read later is nobody's."""
    engine = open_engine()
    gate = disk.hold(key(engine, 1))
    stream = engine.stream(prompt(1), max_new_tokens=4, timeout_s=0.2 if how == "timeout" else None)
    stream.begin()
    wait_for(lambda: bool(engine._worker._scheduler._running))
    if how == "close":
        stream.close()
    else:
        with pytest.raises(RequestError, match="timeout"):
            stream.read()
    wait_for(lambda: engine._worker._scheduler.idle)
    assert engine._pool.free_pages == engine._pool.total_pages
    gate.set()
    assert tiers(engine, 1) == ["disk"]
    check_all_back(engine)


def test_a_second_one_still_gets_the_node_a_first_one_gave_up(open_engine, disk: Disk):
    engine = open_engine()
    gate = disk.hold(key(engine, 1))
    first, second = (engine.stream(prompt(1, ask=ask), max_new_tokens=3) for ask in "ab")
    first.begin()
    second.begin()
    wait_for(lambda: len(engine._worker._scheduler._running) == 2)
    first.close()
    wait_for(lambda: len(engine._worker._scheduler._running) == 1)
    gate.set()
    assert [node.tier for node in second.read().report.nodes] == [Tier.DISK]
    assert disk.read.count(key(engine, 1)) == 1
    check_all_back(engine)


def test_closing_while_a_node_is_read(open_engine: OpenEngine, disk: Disk):
    engine = open_engine()
    disk.hold(key(engine, 1))
    stream = engine.stream(prompt(1), max_new_tokens=4)
    stream.begin()
    wait_for(lambda: bool(engine._worker._scheduler._running))
    closing = threading.Thread(target=engine.close)
    closing.start()
    with pytest.raises(RequestError, match="closed"):
        stream.read()
    disk.held[key(engine, 1)].set()
    closing.join(20)
    assert not closing.is_alive()


def test_computing_many_nodes_does_not_stop_answers_being_written(open_engine: OpenEngine):
    """Between two nodes that are computed there is a pass."""
    engine = open_engine()
    running = engine.stream(prompt(0), max_new_tokens=3_000, json_schema=ENDLESS)
    next(running)
    (writing,) = engine._worker._scheduler._running
    computed: list[int] = []
    computer = engine._runner._computer
    compute = computer.compute

    def counted(run):
        computed.append(len(writing._token_ids))
        return compute(run)

    computer.compute = counted
    engine.generate(prompt(50, 51, 52, 53, 54), max_new_tokens=1)
    running.close()
    assert len(computed) == 5 and sorted(set(computed)) == computed, "one pass after each"


def test_a_computed_node_is_in_the_store_when_its_answer_is(open_engine, monkeypatch):
    engine = open_engine()
    publish = KVStore.publish

    def slow(store, encoding, nodes):
        time.sleep(0.3)
        publish(store, encoding, nodes)

    monkeypatch.setattr(KVStore, "publish", slow)
    stream = engine.stream(prompt(60), max_new_tokens=8)
    first = next(stream)
    assert first and not engine.store.has(key(engine, 60)), "the answer begins before"
    stream.read()
    assert engine.store.has(key(engine, 60))


def test_io_threads_that_cannot_start_mean_computing(open_engine, monkeypatch):
    engine = open_engine()

    def refused(self):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(fetch_module.Fetcher, "_executor", refused)
    report = engine.generate(prompt(1), max_new_tokens=1).report
    assert [node.reason for node in report.nodes] == [Reason.UNREADABLE]
    assert engine.generate(prompt(61), max_new_tokens=1).token_ids
    assert engine.store.has(key(engine, 61)), "it is stored all the same"
    check_all_back(engine)


# host memory


def test_a_node_comes_back_from_host_memory(open_engine: OpenEngine, disk: Disk):
    engine = open_engine(host_bytes=2**20)
    answers = [engine.generate(prompt(1, 2), max_new_tokens=6)]
    engine._worker.call(lambda: [engine._pool.drop(key(engine, n)) for n in (1, 2)])
    answers.append(engine.generate(prompt(1, 2), max_new_tokens=6))
    found = [[node.tier.value for node in answer.report.nodes] for answer in answers]
    assert found == [["disk", "disk"], ["host", "host"]]
    assert answers[0].token_ids == answers[1].token_ids
    assert len(disk.read) == 2
    assert answers[1].report.bytes_by_tier == {Tier.HOST: answers[0].report.bytes_by_tier["disk"]}
    engine.release([])
    engine._worker.call(lambda: engine._runner.drop([key(engine, 1)]))
    assert tiers(engine, 1, 2) == ["disk", "device"]


def test_host_memory_stays_within_its_budget(open_engine: OpenEngine):
    node_bytes = 110 * 768
    engine = open_engine(host_bytes=3 * node_bytes + 100)
    for number in (0, 1, 2, 3, 4, 5, 1, 1, 1):
        engine.generate(prompt(number), max_new_tokens=1)
        assert engine._host.used_bytes <= engine._host.budget_bytes
        assert engine._host.used_bytes == sum(kv.nbytes for kv in engine._host._kept.values())
    assert 1 <= len(engine._host) <= 3


def test_a_computed_node_is_kept_in_host_memory(open_engine: OpenEngine):
    engine = open_engine(host_bytes=2**20)
    expected = engine.generate(prompt(70), max_new_tokens=5).token_ids
    assert key(engine, 70) in engine._host
    engine._worker.call(lambda: engine._pool.drop(key(engine, 70)))
    answer = engine.generate(prompt(70), max_new_tokens=5)
    assert answer.report.nodes[0].tier == Tier.HOST and answer.token_ids == expected


def test_a_released_node_is_not_served_from_host_memory(open_engine: OpenEngine):
    from lazyrag import NodeText, Reference

    engine = open_engine(host_bytes=2**20)
    reference = Reference("files", "a.txt")
    engine.precompute([NodeText(text(80), reference=reference)])
    assert tiers(engine, 80) == ["disk"]
    assert engine.release([reference]) == 1
    assert key(engine, 80) not in engine._host
    assert tiers(engine, 80) == ["none"]


def kv(tokens: int, fill: float = 1.0) -> StoredKV:
    tensor = torch.full((2, tokens, 1, 4), fill)
    return StoredKV(tuple(range(tokens)), tensor, tensor.clone())


def test_host_memory_holds_copies():
    """What was read maps its file; what is kept must not change with it."""
    tier, node = HostTier(2**16), NodeKey(bytes(32))
    tier.touch(node)
    original = kv(5)
    kept = tier.offer(node, original, 1.0)
    original.k.fill_(7)
    assert kept.k is not original.k and torch.equal(kept.k, torch.ones(2, 5, 1, 4))
    assert tier.get(node) is kept


def test_no_memory_for_a_copy_leaves_nothing_behind(monkeypatch):
    tier, node = HostTier(2**16), NodeKey(bytes(32))
    tier.touch(node)

    def none(*_):
        raise OSError(12, "Cannot allocate memory")

    with monkeypatch.context() as patch:
        patch.setattr("lazyrag.engine.host.mmap.mmap", none)
        with pytest.raises(OSError, match="allocate"):
            tier.offer(node, kv(5), 1.0)
    assert (tier.used_bytes, len(tier), node in tier) == (0, 0, False)
    tier.touch(node)
    assert tier.offer(node, kv(5), 1.0) and node in tier


# load or compute


def test_the_faster_way_by_measured_speeds():
    costs = Costs()
    assert not costs.encoding_is_faster(100, 0, 10.0), "nothing was measured"
    costs.read.record(1000, 1.0)
    costs.encode.record(100, 1.0)
    assert not costs.encoding_is_faster(100, 0, 1.0), "equal: the device is for others"
    assert costs.encoding_is_faster(100, 0, 1.3)
    assert not costs.encoding_is_faster(100, 100, 1.3), "others are to be computed first"


def test_a_speed_follows_what_is_measured_and_one_that_loses_is_tried_again():
    speed = Speed(100.0)
    assert speed.seconds(100) == pytest.approx(1.0) and speed.per_second is None
    speed.record(10, 1.0)
    assert speed.per_second == pytest.approx(10.0), "the first measurement replaces the guess"
    for _ in range(30):
        speed.record(100, 1.0)
    assert speed.per_second == pytest.approx(100.0, rel=0.02)
    before = speed.seconds(1)
    speed.record(0, 1.0)
    speed.record(5, 0.0)
    assert speed.seconds(1) == before
    speed.hope()
    assert speed.seconds(1) < before


@pytest.mark.parametrize(("read_s", "tier"), [(1e-9, "disk"), (1e9, "none")])
def test_the_report_says_which(open_engine: OpenEngine, read_s: float, tier: str):
    engine = open_engine()
    expected = engine.generate(prompt(1), max_new_tokens=6).token_ids
    engine._worker.call(lambda: engine._runner.drop([key(engine, 1)]))
    for _ in range(100):
        engine._costs.read.record(1, read_s)
        engine._costs.encode.record(1, 1e-3)
    answer = engine.generate(prompt(1), max_new_tokens=6, strict=True)
    (node,) = answer.report.nodes
    assert node.tier.value == tier
    assert node.reason == (None if tier == "disk" else Reason.FASTER)
    assert answer.token_ids == expected
    assert answer.report.tokens_reused == (110 if tier == "disk" else 0)


def test_a_node_the_store_does_not_have_has_its_own_reason(open_engine: OpenEngine):
    engine = open_engine()
    engine._costs.read.record(1, 1e9)
    engine._costs.encode.record(1, 1e-9)
    report = engine.generate(prompt(90), max_new_tokens=1).report
    assert [node.reason for node in report.nodes] == [Reason.NOT_STORED]


# prefetch


def test_nodes_are_read_while_their_request_waits_for_room(open_engine, disk: Disk):
    engine = open_engine(pool_bytes=PAGE_BYTES * 32)
    running = engine.stream(prompt(0), max_new_tokens=330, json_schema=ENDLESS)
    next(running)
    waiting = engine.stream(prompt(1), max_new_tokens=330)
    waiting.begin()
    wait_for(lambda: key(engine, 1) in disk.read)
    wait_for(lambda: engine._fetcher._ahead[key(engine, 1)].outcome.done())
    assert len(engine._worker._scheduler._waiting) == 1, "it has no pages yet"
    running.close()
    answer = waiting.read()
    assert [node.tier for node in answer.report.nodes] == [Tier.DISK]
    assert disk.read.count(key(engine, 1)) == 1
    assert not engine._fetcher._ahead and engine._fetcher._ahead_bytes == 0
    check_all_back(engine)


def test_what_is_read_ahead_is_bounded(open_engine, disk: Disk, monkeypatch):
    node_bytes = 110 * 768
    monkeypatch.setattr(fetch_module, "AHEAD_BYTES", 2 * node_bytes)
    engine = open_engine(pool_bytes=PAGE_BYTES * 32)
    running = engine.stream(prompt(0), max_new_tokens=330, json_schema=ENDLESS)
    next(running)
    streams = [engine.stream(prompt(n), max_new_tokens=330) for n in range(1, 6)]
    for stream in streams:
        stream.begin()
        assert engine._fetcher._ahead_bytes <= 2 * node_bytes
    assert set(engine._fetcher._ahead) == {key(engine, 4), key(engine, 5)}
    for stream in streams[1:]:
        stream.close()
    running.close()
    assert streams[0].read().report.nodes[0].tier == Tier.DISK
    check_all_back(engine)


# pins


def test_a_pinned_node_stays(open_engine: OpenEngine):
    engine = open_engine(pool_bytes=PAGE_BYTES * 40)
    engine.pin([text(1), key(engine, 2)])
    for number in (3, 4, 5, 6, 7, 3, 4, 5, 6, 7):
        engine.generate(prompt(number), max_new_tokens=1)
    assert tiers(engine, 1, 2) == ["device", "device"]
    assert engine._pool.pinned_pages == 14
    engine.unpin([key(engine, 1), text(2)])
    assert engine._pool.pinned_pages == 0
    check_all_back(engine)


def test_pins_are_counted_a_call(open_engine: OpenEngine):
    engine = open_engine()
    engine.pin([text(1), text(1)])
    engine.pin([text(1)])
    engine.unpin([text(1)])
    assert engine._pool.is_pinned(key(engine, 1))
    engine.unpin([text(1)])
    with pytest.raises(RequestError, match="is not pinned"):
        engine.unpin([text(1)])
    check_all_back(engine)


def test_pinning_what_has_no_room_pins_nothing(open_engine: OpenEngine):
    engine = open_engine(pool_bytes=PAGE_BYTES * 20)
    with pytest.raises(RequestError, match="no room to pin"):
        engine.pin([text(n) for n in (1, 2, 3)])
    assert engine._pool.pinned_pages == 0
    engine.pin([text(1), text(2)])
    with pytest.raises(RequestError, match="224 of them pinned"):
        engine.generate(prompt(3), max_new_tokens=1)
    assert engine.generate(prompt(1, 2), max_new_tokens=4).token_ids
    engine.unpin([text(1), text(2)])
    assert engine.generate(prompt(3), max_new_tokens=1).token_ids
    check_all_back(engine)


@pytest.mark.parametrize(
    ("nodes", "match"),
    [("text", "not one string"), ([NodeKey(bytes(32))], "not in this store"), ([""], "segment 0")],
)
def test_what_cannot_be_pinned_is_refused(open_engine: OpenEngine, nodes, match):
    engine = open_engine()
    with pytest.raises(RequestError, match=match):
        engine.pin(nodes)
    assert engine._pool.pinned_pages == 0


def test_a_pin_survives_a_release_of_its_text(open_engine: OpenEngine):
    """The pages stay until unpinned; then the node is gone."""
    from lazyrag import NodeText, Reference

    engine = open_engine()
    reference = Reference("files", "b.txt")
    engine.precompute([NodeText(text(81), reference=reference)])
    engine.pin([text(81)])
    engine.release([reference])
    assert key(engine, 81) in engine._pool
    engine.unpin([text(81)])
    check_all_back(engine)


@pytest.mark.parametrize("name", ["idle_bytes", "host_bytes"])
def test_negative_sizes_are_refused(checkpoint, name: str):
    with pytest.raises(RequestError, match=f"{name} must not be negative"):
        Engine.from_pretrained(checkpoint("llama"), **{name: -1})


def test_idle_bytes_bound_what_nobody_uses(open_engine: OpenEngine):
    engine = open_engine(idle_bytes=PAGE_BYTES * 8)
    for number in range(6):
        engine.generate(prompt(number), max_new_tokens=1)
        engine._worker.call(lambda: None)
        assert engine._pool.evictable_pages <= 8
    assert tiers(engine, 1, 2, 3) != ["device"] * 3
    none = open_engine(idle_bytes=0)
    none.generate(prompt(1), max_new_tokens=1)
    assert tiers(none, 1) == ["disk"]
    check_all_back(none)


def test_a_cancelled_stream_raises_nothing(open_engine: OpenEngine, disk: Disk):
    engine = open_engine()
    disk.hold(key(engine, 1))
    stream = engine.stream(prompt(1), max_new_tokens=4)
    stream.begin()
    stream.close()
    assert list(stream) == []
    disk.held[key(engine, 1)].set()
    wait_for(lambda: engine._worker._scheduler.idle)
    check_all_back(engine)


# what the engine says of itself


def test_stats_tell_what_happened(open_engine: OpenEngine):
    engine = open_engine(host_bytes=2**20, idle_bytes=PAGE_BYTES * 8)
    node_bytes = 110 * 768
    first = engine.generate(prompt(1), max_new_tokens=4)
    engine.generate(prompt(1), max_new_tokens=3)
    engine.generate(prompt(2, 40), max_new_tokens=1)
    with pytest.raises(RequestError, match="timeout"):
        engine.generate(prompt(1), max_new_tokens=4, timeout_s=1e-9)
    stream = engine.stream(prompt(1), max_new_tokens=3_000, json_schema=ENDLESS)
    next(stream)
    now = engine.stats().now
    assert (now.waiting, now.loading, now.running) == (0, 0, 1)
    stream.close()
    engine._worker.call(lambda: None)
    wait_for(lambda: engine.stats().finished_by_outcome["cancelled"] == 1)
    stats = engine.stats()
    assert stats.requests == 4
    assert stats.nodes_by_tier["disk"] == 2 and stats.nodes_by_tier["none"] == 1
    assert sum(stats.nodes_by_tier.values()) == 5 and stats.computed_by_reason["not stored"] == 1
    assert stats.tokens_reused == 4 * 110
    assert stats.finished_by_outcome["timeout"] == 1
    assert stats.finished_by_outcome["length"] + stats.finished_by_outcome["stop"] == 3
    assert stats.first_token.count == 4 and stats.queue.count == 4
    assert stats.next_token.count >= len(first.token_ids) - 1
    moved = {(one.source, one.target): one for one in stats.movements}
    assert moved["disk", "host"].nbytes == 2 * node_bytes
    assert moved["host", "device"].moves >= 3
    assert stats.evicted_nodes_by_tier["device"] >= 1 and stats.encoded_tokens >= 110
    assert stats.now.idle_bytes <= stats.now.idle_budget_bytes == PAGE_BYTES * 8
    assert stats.now.host_bytes == stats.now.host_nodes * node_bytes
    assert stats.now.running == 0 and stats.now.pool_free_pages > 0
    assert "hit" in stats.summary() and stats.to_dict()["requests"] == 4


def test_busy_and_late_have_errors_of_their_own(open_engine: OpenEngine, monkeypatch):
    from lazyrag import EngineBusyError, RequestTimeoutError
    from lazyrag.engine import scheduler as scheduler_module

    monkeypatch.setattr(scheduler_module, "MAX_WAITING", 1)
    engine = open_engine(pool_bytes=PAGE_BYTES * 32)
    running = engine.stream(prompt(0), max_new_tokens=330, json_schema=ENDLESS)
    next(running)
    waiting = engine.stream(prompt(1), max_new_tokens=330, timeout_s=0.5)
    waiting.begin()
    wait_for(lambda: engine.stats().now.waiting == 1)
    with pytest.raises(EngineBusyError, match="are waiting already"):
        engine.generate(prompt(2), max_new_tokens=1)
    with pytest.raises(RequestTimeoutError):
        waiting.read()
    running.close()
    outcomes = engine.stats().finished_by_outcome
    assert (outcomes["refused"], outcomes["timeout"]) == (1, 1)
