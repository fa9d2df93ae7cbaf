"""Computed nodes are stored beside the answers: none waits, nothing is lost or comes back."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from lazyrag import AsyncEngine, Engine, Generation, Live, Node, NodeText, Reference
from lazyrag.engine import host as host_module
from lazyrag.engine import write as write_module
from lazyrag.engine.host import HostTier
from lazyrag.engine.metrics import Gauges, Metrics
from lazyrag.engine.write import WRITE_THREADS, Write, Writer
from lazyrag.store import KVStore, StoredKV
from lazyrag.store import store as store_module
from lazyrag.types import NodeKey

FILE = Reference("files", "a.txt")
KEY, OTHER = NodeKey(bytes(32)), NodeKey(bytes([1]) * 32)


def text(number: int) -> str:
    return f"Note {number} tells that crane {number * 7 % 11} stands at quay {number * 5 % 13}."


def ask(engine: Engine, *numbers: int, **options) -> Generation:
    nodes = [Node(text=text(number)) for number in numbers]
    return engine.generate([*nodes, Live(text="Where?")], **{"max_new_tokens": 4, **options})


def tiers(engine: Engine, *numbers: int) -> list[str]:
    return [node.tier.value for node in ask(engine, *numbers).report.nodes]


def key(engine: Engine, number: int) -> NodeKey:
    return engine.key_of(text(number))


def evict(engine: Engine, *numbers: int) -> None:
    engine._worker.call(lambda: [engine._pool.drop(key(engine, number)) for number in numbers])


def wait_for(condition: Callable[[], bool], seconds: float = 20) -> None:
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, "it took too long"
        time.sleep(0.002)


class Disk:
    """Writes to the store, held back and noted."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.open = threading.Event()
        self.held: dict[NodeKey, threading.Event] = {}
        self.begun: list[NodeKey] = []
        publish = KVStore.publish

        def held(store, encoding, nodes):
            self.begun.extend(node.key for node in nodes)
            assert self.held.get(nodes[0].key, self.open).wait(30)
            publish(store, encoding, nodes)

        monkeypatch.setattr(KVStore, "publish", held)


@pytest.fixture
def disk(monkeypatch) -> Iterator[Disk]:
    """One that hangs."""
    disk = Disk(monkeypatch)
    yield disk
    disk.open.set()


@pytest.fixture
def open_engine(checkpoint, tmp_path: Path, disk: Disk) -> Iterator[Callable[..., Engine]]:
    """Engines of llama over one empty store."""
    opened: list[Engine] = []

    def open_(**settings) -> Engine:
        engine = Engine.from_pretrained(checkpoint("llama"), store=tmp_path / "kv", **settings)
        opened.append(engine)
        return engine

    yield open_
    disk.open.set()
    for engine in opened:
        engine.close()


@pytest.fixture
def engine(open_engine) -> Engine:
    return open_engine(host_bytes=0)


def in_thread(work: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=work)
    thread.start()
    return thread


# answers do not wait


@pytest.mark.parametrize("quality", ["fast", "materialized"])
def test_an_answer_does_not_wait_for_a_disk_that_hangs(engine: Engine, disk: Disk, quality: str):
    assert ask(engine, 1, 2, quality=quality).token_ids
    assert not engine.store.has(key(engine, 1))
    flushing = in_thread(engine.flush)
    wait_for(lambda: len(disk.begun) == 2)
    assert flushing.is_alive()
    disk.open.set()
    flushing.join(20)
    assert not flushing.is_alive()
    assert engine.store.has(key(engine, 1)) and engine.store.has(key(engine, 2))
    assert engine.store.verify() == []
    assert engine.stats().now.storing_bytes == 0


def test_flush_waits_for_what_was_computed_before_it_only(engine: Engine, disk, monkeypatch):
    first = disk.held[key(engine, 1)] = threading.Event()
    ask(engine, 1)
    waits, wait = threading.Event(), write_module.wait

    def noted(futures):
        waits.set()
        wait(futures)

    monkeypatch.setattr(write_module, "wait", noted)
    flushing = in_thread(engine.flush)
    assert waits.wait(20)
    ask(engine, 2)
    first.set()
    flushing.join(20)
    assert not flushing.is_alive()
    assert engine.store.has(key(engine, 1)) and not engine.store.has(key(engine, 2))


def test_what_waits_is_shown(engine: Engine, disk: Disk):
    ask(engine, 1)
    stats = engine.stats()
    tokens = len(engine.text_ids(text(1)))
    assert stats.now.storing_bytes == tokens * engine.kv_bytes_per_token
    assert stats.unstored_nodes == 0 and "not stored" not in stats.summary()


def test_closing_finishes_the_line(open_engine, disk: Disk):
    engine = open_engine(host_bytes=2**20)
    ask(engine, *range(8))
    closing = in_thread(engine.close)
    wait_for(lambda: len(disk.begun) == WRITE_THREADS)
    assert closing.is_alive()
    disk.open.set()
    closing.join(20)
    engine.flush()  # nothing is left to wait for
    again = open_engine()
    assert tiers(again, *range(8)) == ["disk"] * 8 and again.store.verify() == []


def test_a_program_that_ends_without_closing_has_stored(checkpoint, tmp_path: Path):
    program = textwrap.dedent(
        """
        import sys
        import time
        from lazyrag import Engine, Live, Node
        from lazyrag.engine.compute import NodeComputer

        put = NodeComputer._put

        def slow(*arguments):
            time.sleep(0.2)
            put(*arguments)

        NodeComputer._put = slow
        engine = Engine.from_pretrained(sys.argv[1], store=sys.argv[2])
        nodes = [Node(text=text) for text in sys.argv[3:]]
        engine.generate([*nodes, Live(text="?")], max_new_tokens=1)
        """
    )
    texts = [text(number) for number in range(6)]
    arguments = [str(checkpoint("llama")), str(tmp_path / "kv"), *texts]
    subprocess.run([sys.executable, "-c", program, *arguments], check=True, timeout=120)
    store = KVStore.open(tmp_path / "kv", create=False)
    assert store.stats().nodes == 6 and store.verify() == []
    store.close()


def test_flush_of_an_engine_that_computed_nothing_or_is_closed_returns(engine: Engine):
    engine.flush()
    engine.close()
    engine.flush()


def test_a_forked_process_waits_for_nothing_of_its_parent(engine: Engine, disk: Disk):
    ask(engine, 1)
    wait_for(lambda: bool(disk.begun))
    child = os.fork()
    if child == 0:
        code = 1
        signal.alarm(30)
        try:
            engine.flush()
            disk.open.set()
            ask(engine, 2)
            engine.flush()
            code = 0 if engine.store.has(key(engine, 2)) else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    disk.open.set()
    engine.flush()
    assert engine.store.has(key(engine, 1))


async def test_an_async_flush_can_be_left(engine: Engine, disk: Disk):
    serving = AsyncEngine(engine)
    await serving.generate([Node(text=text(1)), Live(text="?")], max_new_tokens=1)
    left = asyncio.create_task(serving.flush())
    await asyncio.sleep(0)
    left.cancel()
    with pytest.raises(asyncio.CancelledError):
        await left
    assert not engine.store.has(key(engine, 1))
    disk.open.set()
    await serving.flush()
    assert engine.store.has(key(engine, 1))


# host memory first


def test_a_computed_node_is_kept_before_it_is_written_and_written_from_there(open_engine, disk):
    engine = open_engine(host_bytes=2**20)
    expected = ask(engine, 1)
    wait_for(lambda: bool(disk.begun))
    (write,) = engine._writer._waiting
    assert engine._host.get(key(engine, 1)) is write.kv
    evict(engine, 1)
    answer = ask(engine, 1)
    assert [node.tier.value for node in answer.report.nodes] == ["host"]
    assert answer.token_ids == expected.token_ids


def test_a_node_that_is_computed_twice_is_in_line_once(engine: Engine, disk: Disk):
    ask(engine, 1)
    evict(engine, 1)
    assert tiers(engine, 1) == ["none"]
    assert len(engine._writer._waiting) == 1
    disk.open.set()
    engine.flush()
    assert disk.begun == [key(engine, 1)]


# a line that is full


def test_a_full_line_stops_no_answer_and_is_counted(engine: Engine, disk: Disk, caplog):
    engine._writer._most_bytes = 0
    expected = [ask(engine, number).token_ids for number in range(4)]  # the first one is in line
    assert engine.stats().unstored_nodes == 3
    told = [one for one in caplog.records if "faster than they are stored" in one.message]
    assert len(told) == 1
    assert "not stored   3 computed nodes" in engine.stats().summary()
    disk.open.set()
    engine.flush()
    assert [engine.store.has(key(engine, number)) for number in range(4)] == [True, *[False] * 3]
    assert tiers(engine, 0, 1) == ["device", "device"]
    evict(engine, 1)
    answer = ask(engine, 1)
    assert [node.tier.value for node in answer.report.nodes] == ["none"]
    assert answer.token_ids == expected[1]
    engine.flush()
    assert engine.store.has(key(engine, 1)) and engine.stats().unstored_nodes == 3


def test_what_host_memory_holds_fills_no_line(open_engine, disk: Disk):
    engine = open_engine(host_bytes=2**20)
    engine._writer._most_bytes = 0
    for number in range(WRITE_THREADS + 2):
        ask(engine, number)
        wait_for(lambda number=number: key(engine, number) in engine._host)
    assert engine.stats().unstored_nodes == 0
    engine._host.forget(key(engine, 0))  # evicted, say, and in line all the same
    ask(engine, 20)
    assert engine.stats().unstored_nodes == 1


# a disk that fails


def test_a_node_that_could_not_be_stored_is_once_it_can(engine: Engine, disk, monkeypatch, caplog):
    disk.open.set()
    with monkeypatch.context() as patch:

        def full(*_):
            raise OSError(28, "No space left on device")

        patch.setattr(store_module, "write_node", full)
        expected = ask(engine, 1).token_ids
        engine.flush()
    assert "not stored" in caplog.text and "No space left on device" in caplog.text
    assert engine.stats().unstored_nodes == 1 and not engine.store.has(key(engine, 1))
    evict(engine, 1)
    assert ask(engine, 1).token_ids == expected
    engine.flush()
    assert engine.store.has(key(engine, 1)) and engine.stats().unstored_nodes == 1


# released on its way


def test_what_is_released_in_line_is_never_written(open_engine, disk: Disk):
    engine = open_engine(host_bytes=2**20)
    ask(engine, *range(WRITE_THREADS))  # keeps all writers busy
    wait_for(lambda: len(disk.begun) == WRITE_THREADS)
    engine.register([NodeText(text(9), reference=FILE)])
    ask(engine, 9)
    wait_for(lambda: key(engine, 9) in engine._host)
    assert engine.release([FILE]) == 0, "it was not stored"
    assert key(engine, 9) not in engine._host and key(engine, 9) not in engine._pool
    disk.open.set()
    engine.flush()
    assert key(engine, 9) not in disk.begun
    assert key(engine, 9) not in engine._host and not engine.store.has(key(engine, 9))
    assert tiers(engine, 9) == ["none"]


def test_what_is_released_and_comes_again_is_stored(engine: Engine, disk: Disk):
    ask(engine, *range(WRITE_THREADS))
    for _ in range(2):
        engine.register([NodeText(text(9), reference=FILE)])
        ask(engine, 9)
        engine.release([FILE])
    engine.register([NodeText(text(9), reference=FILE)])
    ask(engine, 9)
    disk.open.set()
    engine.flush()
    assert engine.store.has(key(engine, 9)) and disk.begun.count(key(engine, 9)) == 1


@pytest.mark.parametrize("when", ["before it is computed", "after the answer"])
def test_what_is_released_and_found_no_room_in_line_leaves_the_pool(engine, monkeypatch, when):
    engine._writer._most_bytes = -1
    engine.register([NodeText(text(9), reference=FILE)])
    encode = engine._ingestor._encoder.encode

    def meanwhile(nodes, behind):
        if when.startswith("before"):
            engine._library.release({FILE: ()})  # by another process, say
        return encode(nodes, behind)

    monkeypatch.setattr(engine._ingestor._encoder, "encode", meanwhile)
    ask(engine, 9)
    assert engine.stats().unstored_nodes == 1
    if when.startswith("after"):
        assert key(engine, 9) in engine._pool
        engine.release([FILE])
    engine._worker.call(lambda: engine._runner.place(0.0))
    assert key(engine, 9) not in engine._pool


def kv(tokens: int = 5) -> StoredKV:
    tensor = torch.ones(2, tokens, 1, 4)
    return StoredKV(tuple(range(tokens)), tensor, tensor.clone())


@pytest.mark.parametrize("moment", ["copied", "kept", "stored", "found when it is stored"])
def test_a_release_at_any_moment_leaves_nothing(monkeypatch, moment: str):
    host = HostTier(2**16)
    host.touch(KEY)
    writer = Writer(host, 2**20, Metrics())
    stored: list[NodeKey] = []

    def release() -> None:
        writer.forget(KEY)
        host.forget(KEY)

    def put(write: Write) -> None:
        stored.append(write.key)
        if moment == "stored":
            release()
        write.released |= moment.startswith("found")  # no text stands for it: another process, say

    def hook(owner, name: str) -> None:
        original = getattr(owner, name)

        def hooked(*arguments):
            result = original(*arguments)
            release()
            return result

        monkeypatch.setattr(owner, name, hooked)

    if moment == "copied":
        hook(host_module, "_copied")
    elif moment == "kept":
        hook(host, "keep")
    assert writer.write(KEY, kv(), 1.0, put)
    writer.flush()
    assert KEY not in host and list(writer.released) == [KEY]
    assert stored == ([KEY] if "stored" in moment else [])
    writer.close()


def test_what_is_released_before_it_is_kept_does_not_stay_until_its_turn(monkeypatch):
    host = HostTier(2**16)
    host.touch(KEY)
    writer = Writer(host, 2**20, Metrics())
    keep, store, kept = host.keep, writer._store, []

    def late(*arguments):
        writer.forget(KEY)
        host.forget(KEY)
        host.touch(KEY)
        return keep(*arguments)

    def noted(write: Write) -> None:
        kept.append(KEY in host)
        store(write)

    monkeypatch.setattr(host, "keep", late)
    monkeypatch.setattr(writer, "_store", noted)
    writer.write(KEY, kv(), 1.0, lambda write: None)
    writer.flush()
    assert kept == [False] and KEY not in host
    writer.close()


# the line itself


class Refusing:
    """Takes a job, and says that no thread could be started."""

    def submit(self, step, write) -> None:
        step(write)
        raise RuntimeError("can't start new thread")

    def shutdown(self, wait: bool) -> None:
        pass


def test_a_job_that_is_in_line_all_the_same_is_done_once(monkeypatch):
    writer, stored = Writer(HostTier(0), 2**20, Metrics()), []
    monkeypatch.setattr(writer, "_executor", lambda threads: Refusing())
    writer.write(KEY, kv(), 1.0, stored.append)
    writer.flush()
    assert len(stored) == 1


def test_closing_waits_for_what_is_not_even_kept(monkeypatch):
    host, go, begun, stored = HostTier(0), threading.Event(), threading.Event(), threading.Event()
    writer, keep = Writer(host, 2**20, Metrics()), host.keep

    def slow(*arguments):
        assert go.wait(20)
        return keep(*arguments)

    def put(write: Write) -> None:
        begun.set()
        assert stored.wait(20)

    monkeypatch.setattr(host, "keep", slow)
    writer.write(KEY, kv(), 1.0, put)
    closing = in_thread(writer.close)
    go.set()
    assert begun.wait(20)
    closing.join(0.1)
    assert closing.is_alive()
    stored.set()
    closing.join(20)
    assert not closing.is_alive() and writer.nbytes == 0


def test_what_fails_holds_nobody_up(monkeypatch, caplog):
    """Neither in host memory nor in the store; flush returns, others are stored."""
    metrics, stored = Metrics(), []
    writer = Writer(HostTier(0), 2**20, metrics)

    def keep(key, kv, bring_s):
        raise ValueError("a fault nobody thought of")

    def put(write: Write) -> None:
        if write.key == KEY:
            raise KeyError("another one")
        stored.append(write.key)

    monkeypatch.setattr(writer._host, "keep", keep)
    with caplog.at_level(logging.WARNING, "lazyrag"):
        for one in (KEY, OTHER):
            writer.write(one, kv(), 1.0, put)
        writer.flush()
    assert stored == [OTHER] and metrics.snapshot(Gauges()).unstored_nodes == 1
    assert "not kept" in caplog.text and "not stored" in caplog.text
    writer.close()


def test_several_nodes_are_written_at_once():
    """As many as there are threads; each waits for the others."""
    writer, together = Writer(HostTier(0), 2**20, Metrics()), threading.Barrier(WRITE_THREADS)
    failed: list[BaseException] = []

    def put(write: Write) -> None:
        try:
            together.wait(20)
        except BaseException as error:
            failed.append(error)

    for number in range(2 * WRITE_THREADS):
        writer.write(NodeKey(bytes([number]) * 32), kv(), 1.0, put)
    writer.flush()
    assert not failed and writer.nbytes == 0
    writer.close()
