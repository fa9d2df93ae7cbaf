"""Device, host memory, store: loads beside forward passes, load or compute, prefetch, pins."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from lazyrag import Engine, Live, ModelError, Node, NodeText, Reference, RequestError
from lazyrag.engine import fetch as fetch_module
from lazyrag.engine import host as host_module
from lazyrag.engine import worker as worker_module
from lazyrag.engine.costs import Costs, Speed
from lazyrag.engine.generation import GenerationStream
from lazyrag.engine.host import HostTier
from lazyrag.engine.report import Reason, Tier
from lazyrag.engine.request import Request
from lazyrag.engine.send import Sender, Sent
from lazyrag.engine.write import Writer
from lazyrag.prompt.segments import NodeRun
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

        def held(store, key, *ids):
            self.read.append(key)
            assert self.held.get(key, self.open).wait(30)
            return load(store, key, *ids)

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


def held_stores(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Nothing is stored until the event is set."""
    go, publish = threading.Event(), KVStore.publish

    def held(store, encoding, nodes):
        assert go.wait(30)
        publish(store, encoding, nodes)

    monkeypatch.setattr(KVStore, "publish", held)
    return go


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


def runs_of(engine: Engine, *numbers: int) -> list[NodeRun]:
    read = engine._read([Node(text=text(n)) for n in numbers])
    return [node.run for node in Request.of_nodes(read).prompt.nodes]


def full_pool(engine: Engine, disk: Disk) -> GenerationStream:
    """A request that holds the pages of node 0 and of 330 tokens until it is closed."""
    disk.hold(key(engine, 0))
    stream = engine.stream(prompt(0), max_new_tokens=330)
    stream.begin()
    wait_for(lambda: bool(engine._worker._scheduler._running))
    return stream


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


def test_io_threads_that_cannot_start_mean_computing(open_engine, monkeypatch):
    engine = open_engine()

    def refused(*_):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(fetch_module.Fetcher, "_executor", refused)
    monkeypatch.setattr(Writer, "_executor", refused)
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
    engine.flush()
    assert key(engine, 70) in engine._host
    engine._worker.call(lambda: engine._pool.drop(key(engine, 70)))
    answer = engine.generate(prompt(70), max_new_tokens=5)
    assert answer.report.nodes[0].tier == Tier.HOST and answer.token_ids == expected


def test_a_released_node_is_not_served_from_host_memory(open_engine: OpenEngine):
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
    kept = tier.keep(node, original, 1.0)
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
        original = kv(5)
        assert tier.keep(node, original, 1.0) is original
    assert (tier.used_bytes, len(tier), node in tier) == (0, 0, False)
    tier.touch(node)
    assert tier.keep(node, kv(5), 1.0) and node in tier


def test_what_is_forgotten_while_it_is_copied_is_not_kept(monkeypatch):
    tier, node = HostTier(2**16), NodeKey(bytes(32))
    tier.touch(node)
    copied = host_module._copied

    def meanwhile(tensor, device):
        tier.forget(node)
        return copied(tensor, device)

    monkeypatch.setattr(host_module, "_copied", meanwhile)
    kept = tier.keep(node, kv(5), 1.0)
    assert torch.equal(kept.k, kv(5).k), "its reader gets it"
    assert node not in tier and tier.used_bytes == 0


# load or compute


@pytest.fixture
def by_speed(monkeypatch: pytest.MonkeyPatch, stored_nodes_are_read: None) -> None:
    """The choice as it is."""
    monkeypatch.setattr("lazyrag.engine.costs._CLEARLY", 0.8)


def test_the_faster_way_by_measured_speeds(by_speed):
    costs = Costs()
    assert not costs.encoding_is_faster(100, 0, 10.0), "nothing was measured"
    costs.read.record(1000, 1.0)
    costs.encode.record(100, 1.0)
    assert not costs.encoding_is_faster(100, 0, 1.0), "equal: the device is for others"
    assert costs.encoding_is_faster(100, 0, 1.3)
    assert not costs.encoding_is_faster(100, 100, 1.3), "others are to be computed first"
    costs.encode = Speed(1e6)
    costs.encode.record(1_000_000, 1.0)
    assert not costs.encoding_is_faster(100, 0, 0.019), "it would not be worth it"


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
def test_the_report_says_which(open_engine: OpenEngine, by_speed, read_s: float, tier: str):
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


def test_a_node_the_store_does_not_have_has_its_own_reason(open_engine: OpenEngine, by_speed):
    engine = open_engine()
    engine._costs.read.record(1, 1e9)
    engine._costs.encode.record(1, 1e-9)
    report = engine.generate(prompt(90), max_new_tokens=1).report
    assert [node.reason for node in report.nodes] == [Reason.NOT_STORED]


# prefetch


def test_nodes_are_read_while_their_request_waits_for_room(open_engine, disk: Disk):
    engine = open_engine(pool_bytes=PAGE_BYTES * 32)
    running = full_pool(engine, disk)
    waiting = engine.stream(prompt(1), max_new_tokens=330)
    waiting.begin()
    wait_for(lambda: key(engine, 1) in disk.read)
    wait_for(lambda: engine._fetcher._ahead[key(engine, 1)].outcome.done())
    assert engine.stats().now.waiting == 1, "it has no pages yet"
    running.close()
    answer = waiting.read()
    assert [node.tier for node in answer.report.nodes] == [Tier.DISK]
    assert disk.read.count(key(engine, 1)) == 1
    assert not engine._fetcher._ahead
    check_all_back(engine)


def test_what_is_read_ahead_is_bounded(open_engine, disk: Disk, monkeypatch):
    node_bytes = 110 * 768
    monkeypatch.setattr(fetch_module, "AHEAD_BYTES", 2 * node_bytes)
    engine = open_engine(pool_bytes=PAGE_BYTES * 32)
    running = full_pool(engine, disk)
    streams = [engine.stream(prompt(n), max_new_tokens=330) for n in range(1, 6)]
    for stream in streams:
        stream.begin()
    assert set(engine._fetcher._ahead) == {key(engine, 1), key(engine, 2)}, "who is next"
    running.close()
    for stream in streams:
        assert stream.read().report.nodes[0].tier == Tier.DISK
    assert sorted(disk.read[1:], key=str) == sorted((key(engine, n) for n in range(1, 6)), key=str)
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
    with pytest.raises(RequestError, match="needs KV of 336 tokens, the pool holds 320"):
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
    """The pages stay until unpinned, by text or by key; then the node is gone."""
    engine = open_engine()
    reference = Reference("files", "b.txt")
    engine.precompute([NodeText(text(81), reference=reference)])
    engine.pin([text(81)])
    engine.release([reference])
    assert key(engine, 81) in engine._pool
    engine.unpin([key(engine, 81)])
    assert key(engine, 81) not in engine._pool
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


def test_busy_and_late_have_errors_of_their_own(open_engine: OpenEngine, disk, monkeypatch):
    from lazyrag import EngineBusyError, RequestTimeoutError
    from lazyrag.engine import scheduler as scheduler_module

    monkeypatch.setattr(scheduler_module, "MAX_WAITING", 1)
    engine = open_engine(pool_bytes=PAGE_BYTES * 32)
    running = full_pool(engine, disk)
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


# what goes wrong beside the passes


def test_a_pin_of_a_node_that_cannot_be_computed_ends(open_engine: OpenEngine, monkeypatch):
    """It hangs nobody, neither the pin nor those who wait for the same node."""
    engine = open_engine()
    bad = text(70, 125)
    encode = engine._ingestor._encoder.encode

    def failing(nodes, behind):
        if any(len(ids) == len(bad) for ids in nodes):
            raise ModelError("does not fit")
        return encode(nodes, behind)

    monkeypatch.setattr(engine._ingestor._encoder, "encode", failing)
    stream = engine.stream([Node(text=bad), Live(text="?")], max_new_tokens=2)
    stream.begin()
    with pytest.raises(ModelError, match="does not fit"):
        engine.pin([bad, text(1)])
    with pytest.raises(ModelError, match="does not fit"):
        stream.read()
    assert engine.generate(prompt(1), max_new_tokens=2).token_ids
    assert engine._pool.pinned_pages == 0
    check_all_back(engine)


def test_pinning_does_not_stop_answers_being_written(open_engine: OpenEngine, disk: Disk):
    engine = open_engine()
    running = engine.stream(prompt(0), max_new_tokens=3_000, json_schema=ENDLESS)
    next(running)
    gate = disk.hold(key(engine, 1))
    pinning = threading.Thread(target=engine.pin, args=([text(1)],))
    pinning.start()
    wait_for(lambda: key(engine, 1) in disk.read)
    for _ in range(10):
        assert next(running)
    assert pinning.is_alive() and not engine._pool.is_pinned(key(engine, 1))
    gate.set()
    pinning.join(20)
    assert engine._pool.is_pinned(key(engine, 1))
    running.close()
    engine.unpin([text(1)])
    check_all_back(engine)


@pytest.mark.parametrize("kind", [RuntimeError, ValueError, KeyError, MemoryError])
def test_whatever_goes_wrong_in_a_read_is_computed(open_engine, monkeypatch, kind):
    engine = open_engine()
    expected = engine.generate(prompt(1), max_new_tokens=4).token_ids
    engine._worker.call(lambda: engine._runner.drop([key(engine, 1)]))

    def broken(store, *node):
        raise kind("a fault nobody thought of")

    monkeypatch.setattr(KVStore, "load", broken)
    answer = engine.generate(prompt(1), max_new_tokens=4)
    assert [node.reason for node in answer.report.nodes] == [Reason.UNREADABLE]
    assert answer.token_ids == expected


def test_no_memory_to_send_waits_for_those_on_the_way(open_engine, monkeypatch):
    """A first failure is tried again once others have arrived; one alone is an error."""
    engine = open_engine()
    send, failures = Sender.send, [1]

    def failing(self, kv):
        if len(engine._runner._placer._arriving) > 1 and failures:
            failures.pop()
            raise MemoryError("no memory to send")
        sent = send(self, kv)
        return sent

    monkeypatch.setattr(Sender, "send", failing)
    monkeypatch.setattr(Sent, "here", property(lambda self: self.k.sum() is not None))
    with pytest.raises(MemoryError, match="no memory to send"):
        engine.generate(prompt(1, 2), max_new_tokens=2)
    assert engine.generate(prompt(1, 2), max_new_tokens=2).token_ids
    check_all_back(engine)


def test_what_fails_after_pages_were_taken_gives_them_back(open_engine, monkeypatch):
    engine = open_engine()
    with monkeypatch.context() as patch:

        def broken(self, *_, **__):
            raise MemoryError("no room for a table")

        patch.setattr("lazyrag.engine.runner.PagedSequence.__init__", broken)
        with pytest.raises(MemoryError, match="no room for a table"):
            engine.generate(prompt(1, 2), max_new_tokens=2)
    check_all_back(engine)
    assert engine.generate(prompt(1, 2), max_new_tokens=2).token_ids


def test_storing_does_not_hold_reading_up(open_engine: OpenEngine, monkeypatch):
    engine = open_engine()
    go = held_stores(monkeypatch)
    many = engine.stream(prompt(*range(60, 70)), max_new_tokens=1)
    many.begin()
    wait_for(lambda: len(engine._writer._waiting) == 10)
    assert tiers(engine, 1) == ["disk"], "while nothing could be stored"
    go.set()
    many.read()


def test_the_urgent_are_computed_first_and_one_of_each_request_in_turn(open_engine):
    engine = open_engine()
    computed: list[int] = []
    computer = engine._runner._computer
    compute, hold = computer.compute, threading.Event()

    def noted(run):
        assert hold.wait(20)
        computed.append(next(n for n in range(50, 80) if text(n) == run.text))
        return compute(run)

    computer.compute = noted
    streams = [
        engine.stream(prompt(50), max_new_tokens=1),  # holds the worker until all are in line
        engine.stream(prompt(51, 52, 53), max_new_tokens=1),
        engine.stream(prompt(61, 62), max_new_tokens=1),
        engine.stream(prompt(71, 72), max_new_tokens=1, priority=5),
    ]
    streams[0].begin()
    wait_for(lambda: not engine._worker._arrived)
    for stream in streams[1:]:
        stream.begin()
    hold.set()
    for stream in streams:
        stream.read()
    assert computed == [50, 71, 72, 51, 61, 52, 62, 53]


@pytest.mark.parametrize("where", ["reading", "writing"])
def test_what_is_released_on_its_way_is_not_kept(open_engine, disk: Disk, monkeypatch, where):
    """Not in host memory, not in the pool, not in the store."""
    engine = open_engine(host_bytes=2**20)
    reference = Reference("files", "c.txt")
    node = NodeText(text(82), reference=reference)
    go = threading.Event()
    if where == "reading":
        engine.precompute([node])
        gate = disk.hold(key(engine, 82))
    else:
        engine.register([node])
        publish = KVStore.publish

        def slow(store, encoding, nodes):
            assert go.wait(20)
            publish(store, encoding, nodes)

        monkeypatch.setattr(KVStore, "publish", slow)
    stream = engine.stream("See: " + text(82) + " Where?", max_new_tokens=2)
    stream.begin()
    if where == "reading":
        wait_for(lambda: key(engine, 82) in disk.read)
    else:
        wait_for(lambda: bool(engine._writer._waiting))
    engine.release([reference])
    go.set()
    if where == "reading":
        gate.set()
    assert stream.read().token_ids
    wait_for(lambda: not engine._fetcher._reading and not engine._writer._waiting)
    engine._worker.call(lambda: engine._runner.place(0.0))
    assert key(engine, 82) not in engine._host
    assert key(engine, 82) not in engine._pool
    assert not engine.store.has(key(engine, 82))
    check_all_back(engine)


def test_what_is_released_once_it_has_been_read_is_not_kept(open_engine, monkeypatch):
    """The file was whole when it was read; it is released before it is kept."""
    engine = open_engine(host_bytes=2**20)
    reference = Reference("files", "d.txt")
    engine.precompute([NodeText(text(83), reference=reference)])
    read, go, load = threading.Event(), threading.Event(), KVStore.load

    def slow(store, *node):
        stored = load(store, *node)
        read.set()
        assert go.wait(20)
        return stored

    monkeypatch.setattr(KVStore, "load", slow)
    stream = engine.stream(prompt(83), max_new_tokens=2)
    stream.begin()
    assert read.wait(20)
    wait_for(lambda: key(engine, 83) in engine._pool)
    assert engine.release([reference]) == 1
    go.set()
    assert stream.read().report.nodes[0].tier == Tier.DISK
    engine._worker.call(lambda: None)
    assert key(engine, 83) not in engine._host
    assert key(engine, 83) not in engine._pool
    check_all_back(engine)


def test_who_waits_for_a_node_is_woken(open_engine: OpenEngine, disk: Disk, monkeypatch):
    monkeypatch.setattr(worker_module, "STALLED_S", 60.0)
    engine = open_engine()
    gate = disk.hold(key(engine, 1))
    stream = engine.stream(prompt(1), max_new_tokens=2, timeout_s=20)
    stream.begin()
    wait_for(lambda: engine._worker._stalled)
    time.sleep(0.1)
    gate.set()
    assert stream.read().token_ids


def test_a_read_that_was_given_up_is_not_kept_for_later(open_engine: OpenEngine, disk: Disk):
    """What was read ahead for a request that left is dropped when nothing runs any more."""
    engine = open_engine(pool_bytes=PAGE_BYTES * 32)
    running = full_pool(engine, disk)
    waiting = engine.stream(prompt(1), max_new_tokens=330)
    waiting.begin()
    wait_for(lambda: key(engine, 1) in engine._fetcher._ahead)
    waiting.close()
    running.close()
    wait_for(lambda: engine._worker._scheduler.idle)
    engine._runner.rest()
    assert not engine._fetcher._ahead


def test_what_is_needed_now_is_not_behind_what_is_read_ahead(open_engine, disk: Disk, monkeypatch):
    engine = open_engine()
    disk.open.clear()
    runs = runs_of(engine, *range(8))
    for run in runs[:6]:
        assert engine._fetcher.ahead(run)
    wait_for(lambda: len(disk.read) == fetch_module.AHEAD_THREADS)
    disk.held[runs[7].key] = threading.Event()
    disk.held[runs[7].key].set()
    assert isinstance(engine._fetcher.fetch(runs[7]).outcome.result(timeout=10), StoredKV)
    disk.held[runs[5].key] = disk.held[runs[7].key]
    promoted = engine._fetcher.fetch(runs[5])  # was in line to be read ahead
    assert isinstance(promoted.outcome.result(timeout=10), StoredKV)
    disk.open.set()


def test_expected_time_counts_what_is_being_read(open_engine: OpenEngine, disk: Disk):
    engine = open_engine()
    engine._costs.read.record(1_000_000, 1.0)
    runs = runs_of(engine, *range(8))
    alone = engine._fetcher.expected_s(runs[7])
    disk.open.clear()
    fetches = [engine._fetcher.fetch(run) for run in runs[:7]]
    assert engine._fetcher.expected_s(runs[7]) == pytest.approx(2 * alone)
    disk.open.set()
    for fetch in fetches:
        fetch.outcome.result(timeout=10)
    wait_for(lambda: not engine._fetcher._reading)


def test_nodes_in_host_memory_are_cheaper_to_bring_back(open_engine: OpenEngine):
    costs = Costs()
    near, far = (costs.bring_s(100, 10**6, in_host_memory=here) for here in (True, False))
    assert near < far
    engine = open_engine(host_bytes=2**20)
    engine.generate(prompt(1), max_new_tokens=1)
    engine.generate(prompt(2), max_new_tokens=1)
    engine._host.forget(key(engine, 2))
    asked = engine._pool._bring_s
    assert asked(key(engine, 1), 110) < asked(key(engine, 2), 110)


def test_a_forked_process_has_an_engine_that_works(open_engine: OpenEngine, disk: Disk):
    """What was read or running in the parent is nobody's in the child."""
    engine = open_engine()
    expected = engine.generate(prompt(1, 2), max_new_tokens=4).token_ids
    disk.hold(key(engine, 3))
    stream = engine.stream(prompt(3), max_new_tokens=4)
    stream.begin()
    wait_for(lambda: key(engine, 3) in disk.read)
    engine._fetcher.ahead(runs_of(engine, 4)[0])
    (other,) = runs_of(engine, 6)
    assert isinstance(engine._fetcher.fetch(other).outcome.result(20), StoredKV)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            disk.held.clear()
            engine._fetcher.fetch(other).outcome.result(20)  # not in line for the parent's threads
            answers = [engine.generate(prompt(1, 2), max_new_tokens=4) for _ in range(2)]
            more = [engine.generate(prompt(n), max_new_tokens=1).report for n in (3, 4, 5, 90)]
            same = all(answer.token_ids == expected for answer in answers)
            code = 0 if same and [len(report.nodes) for report in more] == [1] * 4 else 2
        finally:
            os._exit(code)
    until = time.monotonic() + 60
    while (ended := os.waitpid(child, os.WNOHANG))[0] == 0:
        if time.monotonic() > until:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            raise AssertionError("the child hangs")
        time.sleep(0.01)
    assert os.waitstatus_to_exitcode(ended[1]) == 0
    disk.held[key(engine, 3)].set()
    assert stream.read().token_ids


def test_a_closed_engine_starts_no_threads(open_engine: OpenEngine):
    engine = open_engine()
    engine.generate(prompt(1), max_new_tokens=1)
    stream = engine.stream(prompt(2), max_new_tokens=1)
    engine.close()
    with pytest.raises(RequestError, match="closed"):
        stream.read()
    assert not any("lazyrag-read" in thread.name for thread in threading.enumerate())


def test_warming_up_changes_no_answer(open_engine: OpenEngine):
    engine = open_engine()
    expected = engine.generate(prompt(1, 2), max_new_tokens=6).token_ids
    engine.warm_up()
    assert engine.generate(prompt(1, 2), max_new_tokens=6).token_ids == expected
    check_all_back(engine)


def test_reading_is_tried_again_after_a_bad_time(open_engine: OpenEngine, by_speed):
    """A speed that nobody measures any more is not believed for ever."""
    engine = open_engine()
    engine.generate(prompt(1), max_new_tokens=1)
    engine._costs.read.record(1, 1e-4)  # a stall of the disk
    seen = []
    for _ in range(80):
        engine._worker.call(lambda: engine._pool.drop(key(engine, 1)))
        engine._costs.encode = Speed(2e4)
        engine._costs.encode.record(2, 1e-4)
        seen += tiers(engine, 1)
        if seen[-1] == "disk":
            break
    assert seen[0] == "none" and seen[-1] == "disk", seen


def test_a_node_on_the_device_is_not_held_ahead_as_well(open_engine: OpenEngine, disk: Disk):
    """Two requests of one node: one has it read, one reads it ahead; it is held once."""
    engine = open_engine()
    gate = disk.hold(key(engine, 1))
    stream = engine.stream(prompt(1), max_new_tokens=2)
    stream.begin()
    fetcher = engine._fetcher
    wait_for(lambda: key(engine, 1) in engine._pool and key(engine, 1) not in fetcher._ahead)
    assert fetcher.ahead(runs_of(engine, 1)[0]) and key(engine, 1) in fetcher._ahead
    gate.set()
    stream.read()
    wait_for(lambda: not engine._fetcher._reading)
    assert not engine._fetcher._ahead
