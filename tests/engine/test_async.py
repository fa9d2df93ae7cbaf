"""The engine on asyncio: same answers, a loop that stays free, nothing left behind."""

from __future__ import annotations

import asyncio
import functools
import gc
import random
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from lazyrag import (
    AsyncEngine,
    AsyncGenerationStream,
    Engine,
    Generation,
    LazyRagError,
    Live,
    Node,
    NodeText,
    Reference,
    RequestError,
)
from lazyrag.engine import ingest as ingest_module
from lazyrag.engine import scheduler as scheduler_module
from lazyrag.engine.async_engine import READERS
from lazyrag.engine.generation import GenerationStream
from lazyrag.engine.runner import Runner
from lazyrag.engine.scheduler import Scheduler

PAGE_BYTES = 768 * 16
ENDLESS = {"max_new_tokens": 3_000, "json_schema": '{"type": "string", "minLength": 4000}'}
"""Options of a greedy answer that does not end by itself."""
CHAT = [{"role": "user", "content": "Which fox sleeps?"}]


def text(number: int) -> str:
    return f"Node {number} says that fox {number * 7 % 11} sleeps near tree {number * 5 % 13}."


def prompt(*numbers: int, ask: str = "Which fox sleeps?") -> list[Live | Node]:
    nodes = [part for n in numbers for part in (Node(text=text(n)), Live(text="\n\n"))]
    return [Live(text="Documents:\n\n"), *nodes, Live(text=ask)]


@pytest.fixture(scope="module")
def stored(checkpoint, tmp_path_factory) -> Path:
    """A store of llama's nodes 0 to 7."""
    path = tmp_path_factory.mktemp("stored") / "kv"
    with Engine.from_pretrained(checkpoint("llama"), store=path) as engine:
        engine.precompute([text(n) for n in range(8)])
    return path


@pytest.fixture
def open_engine(checkpoint, stored, tmp_path: Path) -> Iterator[Callable[..., Engine]]:
    """Opens engines of llama over a copy of the store; they are closed at the end."""
    opened: list[Engine] = []

    def open_(**settings: Any) -> Engine:
        shutil.copytree(stored, tmp_path / "kv", dirs_exist_ok=True)
        engine = Engine.from_pretrained(checkpoint("llama"), store=tmp_path / "kv", **settings)
        opened.append(engine)
        return engine

    yield open_
    for engine in opened:
        engine.close()


@pytest.fixture
def engine(open_engine) -> Engine:
    return open_engine()


@pytest.fixture
def serving(engine) -> AsyncEngine:
    return AsyncEngine(engine)


@pytest.fixture
def slowly(monkeypatch) -> None:
    """An endless answer takes longer than any test waits: it is over only when it is stopped."""
    launch = Runner.launch

    def slow(*arguments: Any, **named: Any) -> Any:
        time.sleep(0.01)
        return launch(*arguments, **named)

    monkeypatch.setattr(Runner, "launch", slow)


@pytest.fixture
def narrow(open_engine) -> AsyncEngine:
    """Its pool holds one request of 330 tokens, not two."""
    return AsyncEngine(open_engine(pool_bytes=PAGE_BYTES * 32))


def run(work: Any) -> Any:
    async def limited() -> Any:
        async with asyncio.timeout(30):
            return await work

    return asyncio.run(limited())


def requests(engine: Engine) -> int:
    scheduler = engine._worker._scheduler
    return len(scheduler._running) + len(scheduler._waiting)


def check_all_back(engine: Engine) -> None:
    until = time.monotonic() + 10
    while requests(engine):
        assert time.monotonic() < until, "a request goes on"
        time.sleep(0.001)
    engine._worker.call(lambda: None)
    pool = engine._pool
    assert pool.free_pages + pool.evictable_pages == pool._allocator.total


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.001)


class Ticks:
    """A task that counts as long as the event loop is free."""

    async def __aenter__(self) -> Ticks:
        self.count = 0
        self._task = asyncio.create_task(self._tick())
        return self

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(0.001)
            self.count += 1

    async def __aexit__(self, *_: object) -> None:
        self._task.cancel()

    def beside(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, but it takes as long as the loop takes for three ticks."""

        @functools.wraps(function)
        def slow(*arguments: Any, **named: Any) -> Any:
            enough, limit = self.count + 3, time.monotonic() + 5
            while self.count < enough:
                assert time.monotonic() < limit, f"the loop waits for {function.__name__}"
                time.sleep(0.001)
            return function(*arguments, **named)

        return slow


# the same answers


def test_every_method_answers_as_the_engine_does(engine, serving):
    ask = prompt(0, 3)
    expected = engine.generate(ask, max_new_tokens=8)
    chatted = engine.chat(CHAT, max_new_tokens=8)
    scores = engine.score(ask, "The fox.")

    async def all_() -> None:
        assert (await serving.generate(ask, max_new_tokens=8)).token_ids == expected.token_ids
        assert (await serving.chat(CHAT, max_new_tokens=8)).token_ids == chatted.token_ids
        for stream, whole in (
            (serving.stream(ask, max_new_tokens=8), expected),
            (serving.stream_chat(CHAT, max_new_tokens=8), chatted),
        ):
            assert isinstance(stream, AsyncGenerationStream)
            with pytest.raises(RequestError, match="no result yet"):
                _ = stream.result
            pieces = [piece async for piece in stream]
            assert all(pieces) and "".join(pieces) == stream.result.text == whole.text
            assert [piece async for piece in stream] == []
        assert await serving.score(ask, "The fox.") == pytest.approx(scores, abs=1e-5)

    run(all_())
    assert expected.report.nodes_reused == 2
    assert serving.engine is engine
    check_all_back(engine)


def test_a_stream_may_be_read_in_part_and_then_to_its_end(engine, serving):
    expected = engine.generate(prompt(1), max_new_tokens=12)

    async def both() -> Generation:
        async with serving.stream(prompt(1), max_new_tokens=12) as stream:
            first = await anext(stream)
            assert expected.text.startswith(first)
            return await stream.read()

    assert run(both()).text == expected.text


def test_nodes_are_ingested_registered_and_released(engine, serving):
    reference = Reference("tests", "one")
    done: list[tuple[int, int]] = []

    async def life() -> None:
        given = [NodeText("A new text about an owl.", reference=reference)]
        keys = await serving.precompute(given, progress=lambda *state: done.append(state))
        assert keys == [engine.key_of(given[0].text)]
        assert await serving.register(["Another one about a crow."]) == 1
        asked = [Node(text=given[0].text), Live(text=" Who?")]
        answer = await serving.generate(asked, max_new_tokens=2)
        assert answer.report.nodes_reused == 1
        assert await serving.release([reference]) == 1
        with pytest.raises(RequestError, match="is empty"):
            await serving.precompute([" "])
        with pytest.raises(RequestError, match="not one string"):
            await serving.precompute("one string")

    run(life())
    assert done[0][0] == 0 and done[-1][0] == done[-1][1] > 0


def test_nodes_are_pinned_and_unpinned(engine, serving):
    async def life() -> None:
        await serving.warm_up()
        await serving.pin([text(1), text(2)])
        assert serving.stats().now.pinned_bytes > 0
        answer = await serving.generate(prompt(1, 2), max_new_tokens=2)
        assert [node.tier for node in answer.report.nodes] == ["device", "device"]
        await serving.unpin([text(2), text(1)])
        assert serving.stats().now.pinned_bytes == 0
        with pytest.raises(RequestError, match="not pinned"):
            await serving.unpin([text(1)])

    run(life())


def test_samples_are_those_of_the_engine(engine, serving):
    options = {"max_new_tokens": 6, "temperature": 2.0, "seed": 9}
    answers = run(serving.sample(prompt(0), 3, **options))
    expected = engine.sample(prompt(0), 3, **options)
    assert [answer.token_ids for answer in answers] == [one.token_ids for one in expected]
    assert len({tuple(answer.token_ids) for answer in answers}) == 3


def test_loading_leaves_the_loop_free(checkpoint, tmp_path, monkeypatch):
    load, store = Engine.from_pretrained.__func__, tmp_path / "kv"

    async def open_() -> None:
        async with Ticks() as ticks:
            monkeypatch.setattr(Engine, "from_pretrained", classmethod(ticks.beside(load)))
            first = await AsyncEngine.shared(checkpoint("llama"), store=store)
            second = await AsyncEngine.shared(checkpoint("llama"), store=store)
            assert first.engine is second.engine
            async with await AsyncEngine.from_pretrained(checkpoint("llama")) as own:
                assert own.engine is not first.engine
                assert (await own.generate("Hello", max_new_tokens=2)).token_ids
        with pytest.raises(RequestError, match="engine is closed"):
            await own.generate("Hello")
        await first.close()
        with pytest.raises(RequestError, match="engine is closed"):
            await second.generate("Hello")

    run(open_())


# many


def test_64_at_once_get_their_single_answers(engine, serving):
    choose = random.Random(3)
    prompts = [prompt(*choose.sample(range(8), 3), ask=f"Question {n}?") for n in range(16)]
    expected = [engine.generate(one, max_new_tokens=6).token_ids for one in prompts]

    async def stream(number: int) -> list[int]:
        stream = serving.stream(prompts[number % 16], max_new_tokens=6)
        text = "".join([piece async for piece in stream])
        assert text == stream.result.text
        return stream.result.token_ids

    async def whole(number: int) -> list[int]:
        return (await serving.generate(prompts[number % 16], max_new_tokens=6)).token_ids

    async def all_() -> list[list[int]]:
        return await asyncio.gather(*((stream, whole)[n % 2](n) for n in range(64)))

    assert run(all_()) == [expected[n % 16] for n in range(64)]
    check_all_back(engine)


def test_1000_at_once_need_no_thread_each(engine, serving):
    before = threading.active_count()
    expected = engine.generate("Which fox", max_new_tokens=2).token_ids
    threads = []

    async def one() -> list[int]:
        answer = await serving.generate("Which fox", max_new_tokens=2)
        threads.append(threading.active_count())
        return answer.token_ids

    async def all_() -> list[list[int]]:
        return await asyncio.gather(*(one() for _ in range(1000)))

    assert run(all_()) == [expected] * 1000
    assert max(threads) <= before + READERS + 1, "the worker and those that read prompts"
    check_all_back(engine)


def test_a_whole_answer_wakes_the_loop_once(serving, monkeypatch):
    woken: list[str] = []
    put = asyncio.Queue.put_nowait

    def counted(self, item):
        woken.append(item)
        put(self, item)

    monkeypatch.setattr(asyncio.Queue, "put_nowait", counted)
    bare = GenerationStream.hand_over
    delivered: list[Any] = []

    def noted(self, deliver):
        def both(delivery):
            delivered.append(delivery)
            deliver(delivery)

        return bare(self, both)

    monkeypatch.setattr(GenerationStream, "hand_over", noted)
    run(serving.generate(prompt(0), max_new_tokens=30, json_schema=ENDLESS["json_schema"]))
    assert len(delivered) > 10
    assert not any(isinstance(item, str) for item in woken)


def test_two_loops_in_two_threads(engine, serving):
    prompts = [prompt(n, n + 1) for n in range(6)]
    expected = [engine.generate(one, max_new_tokens=8).text for one in prompts]

    async def one(ask: Any) -> str:
        async with serving.stream(ask, max_new_tokens=8) as stream:
            return "".join([piece async for piece in stream])

    async def all_() -> list[str]:
        return list(await asyncio.gather(*map(one, prompts * 3)))

    with ThreadPoolExecutor(2) as threads:
        answers = [threads.submit(run, all_()) for _ in range(2)]
        assert [one.result() for one in answers] == [expected * 3] * 2
    check_all_back(engine)


# leaving


@pytest.mark.parametrize("method", ["generate", "chat", "stream"])
def test_a_cancelled_task_stops_the_work(engine, serving, slowly, method):
    async def leave() -> None:
        held = serving.stream(prompt(0), **ENDLESS)

        async def read() -> None:
            async for _ in held:
                pass

        other = asyncio.create_task(serving.generate(prompt(1), max_new_tokens=40))
        asked = {
            "generate": lambda: serving.generate(prompt(0), **ENDLESS),
            "chat": lambda: serving.chat(CHAT, **ENDLESS),
            "stream": read,
        }[method]
        task = asyncio.create_task(asked())
        await until(lambda: requests(engine) == 2)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert (await other).token_ids
        await until(lambda: not requests(engine))

    run(leave())
    check_all_back(engine)


def test_cancelled_while_its_prompt_is_read(engine, serving, slowly, monkeypatch):
    """There is nothing to cancel yet; what is put in line afterwards ends at once."""
    reading, go = threading.Event(), threading.Event()
    read = engine._reader.read_segments

    def slow(segments):
        reading.set()
        go.wait(10)
        return read(segments)

    monkeypatch.setattr(engine._reader, "read_segments", slow)
    handed: list[Any] = []
    bare = GenerationStream.hand_over

    def noted(self, deliver):
        handed.append(bare(self, deliver))
        return handed[-1]

    monkeypatch.setattr(GenerationStream, "hand_over", noted)

    async def leave() -> None:
        task = asyncio.create_task(serving.generate(prompt(0), **ENDLESS))
        await until(reading.is_set)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        go.set()
        await until(lambda: bool(handed))

    run(leave())
    check_all_back(engine)


def test_cancelled_before_a_thread_reads_it(engine, serving, monkeypatch):
    go, read = threading.Event(), engine._reader.read_segments
    prompts = []

    def slow(segments):
        prompts.append(segments)
        go.wait(10)
        return read(segments)

    monkeypatch.setattr(engine._reader, "read_segments", slow)

    async def leave() -> None:
        tasks = [
            asyncio.create_task(serving.generate(prompt(0), max_new_tokens=2))
            for _ in range(READERS + 3)
        ]
        await until(lambda: len(prompts) == READERS)
        for task in tasks[READERS:]:
            task.cancel()
        await asyncio.wait(tasks[READERS:])
        go.set()
        await asyncio.gather(*tasks[:READERS])

    run(leave())
    assert len(prompts) == READERS
    check_all_back(engine)


def test_cancelled_while_it_waits_for_room(narrow):
    async def leave() -> None:
        async with narrow.stream(prompt(0), **ENDLESS | {"max_new_tokens": 330}) as first:
            await anext(first)
            waiting = asyncio.create_task(narrow.generate(prompt(1), max_new_tokens=330))
            await until(lambda: requests(narrow.engine) == 2)
            waiting.cancel()
            await until(lambda: requests(narrow.engine) == 1)
            assert await anext(first)

    run(leave())
    check_all_back(narrow.engine)


def test_time_runs_out(engine, serving, slowly):
    async def late() -> None:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.1):
                await serving.generate(prompt(0), **ENDLESS)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.1):
                async for _ in serving.stream(prompt(0), **ENDLESS):
                    pass
        with pytest.raises(RequestError, match=r"timeout of 0\.1 s"):
            await serving.generate(prompt(0), timeout_s=0.1, **ENDLESS)
        await until(lambda: not requests(engine))

    run(late())
    check_all_back(engine)


@pytest.mark.parametrize("how", ["aclose", "leave", "raise"])
def test_closing_a_stream_stops_the_work(engine, serving, slowly, how):
    async def close() -> None:
        stream = serving.stream(prompt(0), **ENDLESS)
        if how == "aclose":
            assert await anext(stream)
            await stream.aclose()
            await stream.aclose()
        else:
            with suppress(ValueError):
                async with stream:
                    async for _ in stream:
                        if how == "raise":
                            raise ValueError("a mistake of the reader")
                        break
        await until(lambda: not requests(engine))
        assert [piece async for piece in stream] == []
        with pytest.raises(RequestError, match="no result yet"):
            await stream.read()

    run(close())
    check_all_back(engine)


def test_closed_before_it_began(engine, serving):
    async def close() -> None:
        async with serving.stream(prompt(0), **ENDLESS) as stream:
            pass
        assert [piece async for piece in stream] == []

    run(close())
    assert not engine._worker._arrived and engine._worker._thread is None


def test_a_reader_that_just_leaves(engine, serving, slowly):
    """No ``async with``: the stream goes with the last reference to it."""

    async def leave() -> None:
        async for _ in serving.stream(prompt(0), **ENDLESS):
            break
        gc.collect()
        await until(lambda: not requests(engine))

    run(leave())
    check_all_back(engine)


def test_closing_wakes_a_task_that_reads(narrow):
    async def close() -> None:
        async with narrow.stream(prompt(0), **ENDLESS | {"max_new_tokens": 330}) as first:
            await anext(first)
            second = narrow.stream(prompt(1), max_new_tokens=330)
            reader = asyncio.create_task(anext(second, "the end"))
            await until(lambda: requests(narrow.engine) == 2)
            await second.aclose()
            assert await reader == "the end"

    run(close())
    check_all_back(narrow.engine)


def test_two_tasks_read_one_stream(engine, serving):
    expected = engine.generate(prompt(2), max_new_tokens=12)

    async def both() -> None:
        stream = serving.stream(prompt(2), max_new_tokens=12)
        pieces: list[str] = []

        async def read() -> None:
            async for piece in stream:
                pieces.append(piece)

        await asyncio.gather(read(), read(), read())
        assert "".join(pieces) == stream.result.text == expected.text

    run(both())


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # asyncio's own
@pytest.mark.parametrize("whole", [True, False])
def test_a_loop_that_is_closed_breaks_nothing(engine, serving, slowly, whole, caplog):
    expected = engine.generate(prompt(1), max_new_tokens=4).token_ids
    loop = asyncio.new_event_loop()

    async def begin() -> Any:
        stream = serving.stream(prompt(0), **ENDLESS)
        reader = asyncio.ensure_future(stream.read() if whole else anext(stream))
        await until(lambda: requests(engine) == 1)
        return stream, reader

    held = loop.run_until_complete(begin())
    loop.close()
    check_all_back(engine)
    assert engine.generate(prompt(1), max_new_tokens=4).token_ids == expected
    assert not [r for r in caplog.records if r.name == "lazyrag"], "the worker logged nothing"
    del held
    gc.collect()


def test_ingestion_stops_after_a_batch(engine, serving, monkeypatch):
    monkeypatch.setattr(
        ingest_module, "length_batches", lambda ones: [[n] for n in range(len(ones))]
    )
    texts = [f"Text {n} is about a heron and {n * n} fish." for n in range(20)]
    began, go = threading.Event(), threading.Event()
    publish = engine.store.publish

    def slow(*arguments):
        began.set()
        go.wait(10)
        publish(*arguments)

    monkeypatch.setattr(engine.store, "publish", slow)

    async def leave() -> None:
        task = asyncio.create_task(serving.precompute(texts))
        await until(began.is_set)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        go.set()

    run(leave())
    assert sum(engine.store.has(engine.key_of(one)) for one in texts) == 1
    monkeypatch.setattr(engine.store, "publish", publish)
    assert len(run(serving.precompute(texts))) == 20


# errors


def test_a_request_that_cannot_be_served(engine, serving):
    async def refused() -> None:
        with pytest.raises(RequestError, match="empty"):
            await serving.generate("")
        with pytest.raises(RequestError, match="context window"):
            await serving.generate("Hello", max_new_tokens=10**6)
        with pytest.raises(RequestError, match="not a string"):
            await serving.chat("Hello")
        stream = serving.stream("Hello", temperature=-1)
        with pytest.raises(RequestError, match="temperature"):
            await anext(stream)
        with pytest.raises(RequestError, match="strict"):
            await serving.generate(prompt(90), strict=True, max_new_tokens=2)

    run(refused())
    check_all_back(engine)


def test_too_many_waiting_are_refused(narrow, monkeypatch):
    monkeypatch.setattr(scheduler_module, "MAX_WAITING", 2)

    async def ask() -> list[Any]:
        async with narrow.stream(prompt(0), **ENDLESS | {"max_new_tokens": 330}) as first:
            await anext(first)
            waits = [
                asyncio.create_task(narrow.generate(prompt(0), max_new_tokens=330))
                for _ in range(5)
            ]
            await until(lambda: sum(task.done() for task in waits) == 3)
        return await asyncio.gather(*waits, return_exceptions=True)

    outcomes = run(ask())
    refused = [one for one in outcomes if isinstance(one, RequestError)]
    assert len(refused) == 3 and all("waiting already" in str(one) for one in refused)
    assert sum(isinstance(one, Generation) for one in outcomes) == 2
    check_all_back(narrow.engine)


def test_a_failing_worker_reaches_every_await(engine, serving, monkeypatch):
    failing, step = threading.Event(), Scheduler.step

    def fails(self) -> None:
        if failing.is_set():
            failing.clear()
            raise KeyError("a mistake of ours")
        step(self)

    monkeypatch.setattr(Scheduler, "step", fails)

    async def drain() -> None:
        async for _ in serving.stream(prompt(1), **ENDLESS):
            pass

    async def ask() -> None:
        tasks = [asyncio.create_task(serving.generate(prompt(0), **ENDLESS)) for _ in range(4)]
        tasks += [asyncio.create_task(drain()) for _ in range(4)]
        await until(lambda: requests(engine) == 8)
        failing.set()
        outcomes = await asyncio.gather(*tasks, return_exceptions=True)
        assert [type(one) for one in outcomes] == [LazyRagError] * 8
        assert all(isinstance(one.__cause__, KeyError) for one in outcomes)
        assert (await serving.generate(prompt(0), max_new_tokens=2)).token_ids

    run(ask())
    check_all_back(engine)


def test_closing_reaches_every_await(engine, serving, monkeypatch):
    before = set(threading.enumerate())

    async def close() -> None:
        tasks = [asyncio.create_task(serving.generate(prompt(0), **ENDLESS)) for _ in range(3)]
        await until(lambda: requests(engine) == 3)
        async with Ticks() as ticks:
            with monkeypatch.context() as patch:
                patch.setattr(engine, "close", ticks.beside(engine.close))
                await serving.close()
        for task in tasks:
            with pytest.raises(RequestError, match="closed"):
                await task
        for ask in (serving.generate(prompt(0)), serving.chat(CHAT), serving.precompute(["x"])):
            with pytest.raises(RequestError, match="engine is closed"):
                await ask
        await serving.close()

    run(close())
    for thread in set(threading.enumerate()) - before:
        thread.join(timeout=10)
        assert not thread.is_alive(), "those that read prompts end, too"


# the loop


def test_the_loop_stays_free(engine, serving, monkeypatch):
    """While prompts are read and put in line, while the model computes, while nodes are stored."""

    async def ask() -> None:
        async with Ticks() as ticks:
            for owner, name in (
                (engine._reader, "read_segments"),
                (engine._worker, "submit"),
                (engine._runner, "launch"),
                (engine.store, "publish"),
                (engine, "register"),
                (engine, "release"),
            ):
                monkeypatch.setattr(owner, name, ticks.beside(getattr(owner, name)))
            await asyncio.gather(
                *(serving.generate(prompt(n), max_new_tokens=3) for n in range(3)),
                serving.score(prompt(0), "A fox."),
                serving.precompute(["A text about a badger."]),
                serving.register(["A text about a stoat."]),
                serving.release([Reference("nobody", "nothing")]),
            )
            stream = serving.stream(prompt(4), **ENDLESS)
            await anext(stream)
            await stream.aclose()

    run(ask())
    check_all_back(engine)


def test_a_thread_that_cannot_start_is_an_error(engine, serving, monkeypatch):
    def refuses(thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuses)
        with pytest.raises(RuntimeError, match="can't start"):
            run(serving.generate(prompt(0), max_new_tokens=2))
    assert run(serving.generate(prompt(0), max_new_tokens=2)).token_ids
    check_all_back(engine)
