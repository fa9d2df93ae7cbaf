"""Continuous batching: single answers in every batch, nothing lost, everything given back."""

from __future__ import annotations

import gc
import logging
import math
import random
import shutil
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, Executor, Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from lazyrag import Engine, LazyRagError, Live, Node, RequestError
from lazyrag.engine import choose as choose_module
from lazyrag.engine import fetch as fetch_module
from lazyrag.engine import scheduler as scheduler_module
from lazyrag.engine import worker as worker_module
from lazyrag.engine.answer import Answer
from lazyrag.engine.costs import Costs
from lazyrag.engine.fetch import Fetch
from lazyrag.engine.fill import PageFiller
from lazyrag.engine.forward import EagerForward, EagerLaunched, NextTokens, packed_rows
from lazyrag.engine.generation import Generation
from lazyrag.engine.nodes import NodePlacer
from lazyrag.engine.pool import PagePool
from lazyrag.engine.report import NodeStatus, Reason, Tier
from lazyrag.engine.runner import Runner, UnderWay
from lazyrag.engine.scheduler import Scheduler
from lazyrag.engine.sequence import PagedSequence
from lazyrag.store import LoadFailure, StoredKV
from lazyrag.store import store as store_module
from lazyrag.types import NodeKey
from tests.support.close import assert_close, assert_far

PAGE = 16
PAGE_BYTES = 768 * PAGE
ENDLESS = '{"type": "string", "minLength": 4000}'
"""A schema that keeps a greedy answer from ending by itself."""


def text(number: int, length: int = 120) -> str:
    words = f"Node {number} says that fox {number * 7 % 11} sleeps near tree {number * 5 % 13}. "
    return (words * (length // len(words) + 1))[:length].strip()


def prompt(*numbers: int, ask: str = "Which fox sleeps?") -> list[Live | Node]:
    nodes = [part for n in numbers for part in (Node(text=text(n)), Live(text="\n\n"))]
    return [Live(text="Documents:\n\n"), *nodes, Live(text=ask)]


class Reader:
    """Takes what is delivered."""

    def __init__(self, raises: bool = False) -> None:
        self.text = ""
        self.outcomes: list[Generation | BaseException] = []
        self.raises = raises

    def __call__(self, delivery: str | Generation | BaseException) -> None:
        if isinstance(delivery, str):
            self.text += delivery
        else:
            self.outcomes.append(delivery)
        if self.raises:
            raise ValueError("a reader that breaks")

    @property
    def outcome(self) -> Any:
        (outcome,) = self.outcomes
        return outcome


class AtOnce(Executor):
    """Runs what it is given before it returns: nodes are read in the step that asks for them."""

    def submit(self, job, /, *args, **kwargs):
        future = Future()
        try:
            future.set_result(job(*args, **kwargs))
        except BaseException as error:
            future.set_exception(error)
        return future


class Bench:
    """A scheduler over an engine's runner, driven by the test itself; nodes are read at once."""

    def __init__(self, engine: Engine) -> None:
        at_once = engine._fetcher._executors
        at_once |= dict.fromkeys((fetch_module.READ_THREADS, fetch_module.AHEAD_THREADS), AtOnce())
        self.engine = engine
        self.runner = engine._runner
        self.scheduler = Scheduler(engine._runner)
        self.ended: list[str] = []

    def add(self, parts, name: str = "", reader: Reader | None = None, **options):
        request = self.engine._request(parts, None, options)
        reader = reader or Reader()

        def deliver(delivery):
            if not isinstance(delivery, str):
                self.ended.append(name)
            reader(delivery)

        answer = Answer(request, self.engine._model, deliver, self.engine._metrics)
        self.scheduler.add(answer)
        return answer, reader

    @torch.inference_mode()
    def step(self, count: int = 1) -> None:
        for _ in range(count):
            self.scheduler.step()

    def finish(self) -> None:
        for _ in range(5_000):
            if self.scheduler.idle:
                self.engine._writer.close()  # outcomes wait until what was computed is stored
                return
            self.step()
        raise AssertionError("it never ends")


def check_all_back(engine: Engine) -> None:
    pool = engine._pool
    assert pool.free_pages + pool.evictable_pages == pool._allocator.total
    assert not any(node.users for node in pool._resident.values())


def check_pages(pool: PagePool, running: list[Answer]) -> None:
    """Every page is free, a node's, or a running request's; users are those that run."""
    paged = [a.started.sequence for a in running if a.started is not None]
    live = [page for s in paged if isinstance(s, PagedSequence) for page in s._own]
    resident = [page for node in pool._resident.values() for page in node.pages]
    free = pool._allocator._is_free.nonzero()[0].tolist()
    assert sorted(live + resident + free) == list(range(pool._allocator.total))
    assert len(free) == pool.free_pages
    users = Counter(
        key
        for answer in running
        if answer.started is not None and isinstance(answer.started.sequence, PagedSequence)
        for key in (
            *{node.run.key for node in answer.request.prompt.nodes},
            *answer.started.placed.live_names,
            *answer.started.sequence._published,
        )
    )
    assert {key: node.users for key, node in pool._resident.items() if node.users} == users


@contextmanager
def time_limit(seconds: float) -> Iterator[Callable[[Callable[[], bool]], None]]:
    """Gives a function that waits for a condition, within one limit for the whole block."""
    until = time.monotonic() + seconds

    def wait(condition: Callable[[], bool]) -> None:
        while not condition():
            assert time.monotonic() < until, "it took too long"
            time.sleep(0.001)

    yield wait


@pytest.fixture(scope="module")
def stored(checkpoint, tmp_path_factory) -> Path:
    """A store of llama's nodes 0 to 9."""
    path = tmp_path_factory.mktemp("stored") / "kv"
    with Engine.from_pretrained(checkpoint("llama"), store=path) as engine:
        engine.precompute([text(n) for n in range(10)])
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
def bench(open_engine) -> Bench:
    return Bench(open_engine(pool_bytes=PAGE_BYTES * 400))


@pytest.fixture
def overlapping(monkeypatch) -> None:
    """Passes as on a GPU: nothing is done before it is waited for."""
    monkeypatch.setattr(EagerForward, "asynchronous", True)
    monkeypatch.setattr(EagerLaunched, "done", False)


@pytest.fixture(params=["in turn", "overlapping"])
def passes(request) -> None:
    """Passes of both kinds."""
    if request.param == "overlapping":
        request.getfixturevalue("overlapping")


@pytest.fixture
def small(open_engine) -> Bench:
    """Its pool holds two requests of one node and 100 live tokens, not three."""
    return Bench(open_engine(pool_bytes=PAGE_BYTES * 32))


# the same answers


@pytest.mark.parametrize("family", ["llama", "qwen2-window", "yarn"])
@pytest.mark.usefixtures("passes")
def test_200_requests_get_their_single_answers(checkpoint, tmp_path: Path, monkeypatch, family):
    """32 at a time over overlapping nodes, in a pool that holds a few of them."""
    choose = random.Random(7)
    prompts = [
        prompt(*choose.sample(range(12), choose.randint(1, 4)), ask=f"Question {n}?")
        for n in range(40)
    ]
    tokens = [choose.randint(2, 9) for _ in prompts]
    with Engine.from_pretrained(checkpoint(family), store=tmp_path / "kv") as engine:
        engine.precompute([text(n) for n in range(12)])
        expected = [
            engine.generate(one, max_new_tokens=most).token_ids
            for one, most in zip(prompts, tokens, strict=True)
        ]
    widths: list[int] = []
    launch = Runner.launch

    def counted(self, batch):
        widths.append(len(batch))
        return launch(self, batch)

    monkeypatch.setattr(Runner, "launch", counted)
    pages = 72  # the nodes alone take 96
    with Engine.from_pretrained(
        checkpoint(family), store=tmp_path / "kv", pool_bytes=PAGE_BYTES * pages
    ) as engine:
        engine._pool.k.fill_(float("nan"))
        engine._pool.v.fill_(float("nan"))

        def ask(number: int) -> list[int]:
            most = tokens[number % 40]
            return engine.generate(prompts[number % 40], max_new_tokens=most).token_ids

        with ThreadPoolExecutor(32) as threads:
            answers = list(threads.map(ask, range(200), timeout=300))
        check_all_back(engine)
        assert engine._pool._allocator.total == pages
    assert answers == [expected[number % 40] for number in range(200)]
    assert max(widths) >= 4, "nothing was computed together"


def test_a_packed_pass_equals_single_passes(bench: Bench):
    """Prompts of several lengths, then a chunk and single tokens: the same logits, alone or not."""
    bench.runner._reuse_live = False
    parts = [prompt(0, 1), prompt(1, ask="So?"), prompt(2, 0, 1), prompt(ask="x" * 150)]
    requests = [bench.engine._request(one, None, {"max_new_tokens": 8}) for one in parts]

    def logits(together: bool, requests=requests) -> list[torch.Tensor]:
        begun = [bench.runner.begin(request) for request in requests]
        while not all(started.ready for started in begun):
            assert bench.runner.place(math.inf) or bench.runner.compute_next()
        passes = []
        for stretch in (slice(0, -5), slice(-5, None)):
            rows = [
                NextTokens(
                    started.sequence,
                    r.prompt.live_ids[stretch],
                    r.prompt.live_positions[stretch],
                    1,
                )
                for started, r in zip(begun, requests, strict=True)
            ]
            passes += [rows] if together else [[row] for row in rows]
        rows = [
            NextTokens(started.sequence, [65], [request.prompt.next_position], 1)
            for started, request in zip(begun, requests, strict=True)
        ]
        passes += [rows] if together else [[row] for row in rows]
        found = [one for batch in passes for one in bench.runner.launch(batch).results()]
        for started in begun:
            bench.runner.end(started)
        return found

    with torch.inference_mode():
        single, packed = logits(together=False), logits(together=True)
        shifted_parts = prompt(0, 1)
        shifted_parts[1] = Node(text=text(0), offset=len("Documents:\n\n") + 1)
        shifted = bench.engine._request(shifted_parts, None, {"max_new_tokens": 8})
        moved = logits(together=True, requests=[shifted, *requests[1:]])
    for number, (one, other) in enumerate(zip(single, packed, strict=True)):
        assert_close(f"pass {number // 4}, request {number % 4}", one, other, 1e-5)
    assert_far("a node shifted by one", single[4], moved[4], 1e-5)
    assert_close("its neighbour", single[5], moved[5], 1e-5)
    check_all_back(bench.engine)


MIXED: list[tuple[list[Live | Node], dict[str, Any]]] = [
    (prompt(0, 1), {"quality": "full"}),
    (prompt(0, 1), {"quality": "fast"}),
    (prompt(0, 1), {"quality": "materialized"}),
    (prompt(1, 2), {"seed": 3, "temperature": 1.3}),
    (prompt(1, 2), {"seed": 4, "temperature": 1.3}),
    (prompt(2), {"json_schema": '{"type": "object", "properties": {"fox": {"type": "integer"}}}'}),
    (prompt(2), {"json_schema": '{"enum": ["sleeps", "runs"]}', "seed": 5, "temperature": 2.0}),
    (prompt(2, 0), {"repetition_penalty": 1.5, "seed": 6, "temperature": 1.0, "top_k": 20}),
    (prompt(0), {"quality": "materialized", "seed": 9, "temperature": 1.0}),
    (prompt(3), {"stop": ["e"], "seed": 8, "temperature": 1.0}),
]


@pytest.mark.usefixtures("passes")
def test_all_kinds_in_one_batch_get_their_single_answers(bench: Bench):
    def texts_of(readers: list[Reader]) -> list[tuple[str, list[int], str]]:
        return [(r.outcome.text, r.outcome.token_ids, r.outcome.finish_reason) for r in readers]

    single = []
    for parts, options in MIXED:
        single.append(bench.add(parts, max_new_tokens=24, **options)[1])
        bench.finish()
    batch = []
    for parts, options in MIXED:
        batch.append(bench.add(parts, max_new_tokens=24, **options)[1])
        bench.step()  # each comes in while those before it are being written
    bench.finish()
    assert texts_of(batch) == texts_of(single)
    assert all(reader.text == reader.outcome.text for reader in batch)
    assert len({tuple(ids) for _, ids, _ in texts_of(batch)}) >= 7, "they hardly differ"
    assert batch[3].outcome.token_ids != batch[4].outcome.token_ids, "another seed"
    assert all(
        r.outcome.report.quality == o.get("quality", "fast")
        for r, (_, o) in zip(batch, MIXED, strict=True)
    )
    check_all_back(bench.engine)


# passes that overlap


@pytest.fixture
def order(bench: Bench, monkeypatch) -> list[tuple[str, int]]:
    """What was done with which pass."""
    done: list[tuple[str, int]] = []
    numbers: dict[UnderWay, int] = {}
    launch, fetch = bench.runner.launch, bench.runner.fetch

    def launched(batch):
        pass_ = launch(batch)
        numbers[pass_] = len(numbers)
        done.append(("launch", numbers[pass_]))
        return pass_

    def fetched(pass_):
        done.append(("fetch", numbers[pass_]))
        return fetch(pass_)

    monkeypatch.setattr(bench.runner, "launch", launched)
    monkeypatch.setattr(bench.runner, "fetch", fetched)
    return done


@pytest.mark.usefixtures("overlapping")
@pytest.mark.parametrize("options", [{}, {"temperature": 0.8, "seed": 3, "top_p": 0.9}])
def test_a_pass_is_launched_before_the_one_before_is_fetched(bench: Bench, order, options):
    _, reader = bench.add(prompt(0), max_new_tokens=3, **options)
    bench.finish()
    launches = [("launch", 0), ("launch", 1), ("fetch", 0), ("launch", 2), ("fetch", 1)]
    assert order == [*launches, ("fetch", 2)]
    assert len(reader.outcome.token_ids) == 3


@pytest.mark.usefixtures("overlapping")
@pytest.mark.parametrize("options", [{"json_schema": ENDLESS}, {"repetition_penalty": 1.3}])
def test_what_is_chosen_on_the_host_is_waited_for(bench: Bench, order, options):
    bench.add(prompt(0), max_new_tokens=3)
    bench.add(prompt(0), max_new_tokens=3, **options)
    bench.finish()
    assert order == [(what, number) for number in range(3) for what in ("launch", "fetch")]


DRAWN = {"max_new_tokens": 40, "temperature": 1.5, "seed": 1}


def ending_early(bench: Bench, monkeypatch) -> Generation:
    """A drawn answer; from now on its 21st token ends answers."""
    _, reader = bench.add(prompt(0), **DRAWN)
    bench.finish()
    ending = replace(bench.engine._model, eos_ids=frozenset(reader.outcome.token_ids[20:21]))
    monkeypatch.setattr(bench.engine, "_model", ending)
    return reader.outcome


@pytest.mark.usefixtures("overlapping")
def test_an_answer_that_ended_has_a_row_that_nobody_reads(bench: Bench, monkeypatch):
    """Its pages go to the next request while the pass still runs; nothing of it gets a name."""
    whole = ending_early(bench, monkeypatch)
    ids = whole.token_ids
    end = ids.index(ids[20])
    assert end > 3
    bench.runner.drop([node.key for node in whole.report.nodes])
    first, reader = bench.add(prompt(0), **DRAWN)
    _, other = bench.add(prompt(1), max_new_tokens=40)
    while not reader.outcomes:
        bench.step()
    assert bench.scheduler._under_way is not None
    assert first in [task for task, _ in bench.scheduler._under_way[0]]
    check_pages(bench.engine._pool, bench.scheduler._running)
    _, again = bench.add(prompt(0), **DRAWN)
    bench.finish()
    assert reader.outcome.token_ids == again.outcome.token_ids == ids[: end + 1]
    assert reader.outcome.finish_reason == "stop"
    assert isinstance(other.outcome, Generation)
    check_all_back(bench.engine)


@pytest.mark.usefixtures("overlapping")
def test_a_pass_of_nobody_is_not_kept(bench: Bench, monkeypatch):
    ending_early(bench, monkeypatch)
    _, reader = bench.add(prompt(0), **DRAWN)
    bench.finish()
    assert reader.outcome.finish_reason == "stop"
    assert bench.scheduler._under_way is None


@pytest.mark.usefixtures("overlapping")
def test_parts_of_a_prompt_are_waited_for_as_well(bench: Bench, monkeypatch):
    """Nothing is chosen in them; no more than two passes are under way all the same."""
    monkeypatch.setattr(scheduler_module, "STEP_TOKENS", 16)
    launched: list[EagerLaunched] = []
    waited: set[int] = set()
    ahead: list[int] = []
    launch, fetch = bench.runner._packed.launch, EagerLaunched.fetch

    def counted(batch):
        launched.append(launch(batch))
        ahead.append(sum(id(one) not in waited for one in launched))
        return launched[-1]

    def fetched(self):
        waited.add(id(self))
        return fetch(self)

    monkeypatch.setattr(bench.runner._packed, "launch", counted)
    monkeypatch.setattr(EagerLaunched, "fetch", fetched)
    _, reader = bench.add(prompt(0, ask="x" * 300), max_new_tokens=2)
    bench.finish()
    assert isinstance(reader.outcome, Generation)
    assert len(launched) > 15
    assert max(ahead) == 2


@pytest.mark.usefixtures("passes")
def test_a_part_of_a_prompt_that_fails_late_is_that_request_s_failure(bench: Bench, monkeypatch):
    monkeypatch.setattr(scheduler_module, "STEP_TOKENS", 48)
    error, fetch = RuntimeError("broken"), EagerLaunched.fetch

    def failing(self):
        monkeypatch.setattr(EagerLaunched, "fetch", fetch)
        raise error

    monkeypatch.setattr(EagerLaunched, "fetch", failing)
    _, reader = bench.add(prompt(0, ask="x" * 200), max_new_tokens=2)
    bench.finish()
    assert reader.outcome is error
    assert all(isinstance(name, NodeKey) for name in bench.engine._pool._resident)
    check_all_back(bench.engine)


@pytest.mark.usefixtures("overlapping")
@pytest.mark.parametrize("where", ["launch", "draw"])
def test_a_launch_that_fails_leaves_the_pass_before_alone(bench: Bench, monkeypatch, where: str):
    """What that one ended is delivered: its next row was one too many."""
    whole = ending_early(bench, monkeypatch)
    ids = whole.token_ids
    passes = 0
    owner, name = (
        (bench.runner._packed, "launch") if where == "launch" else (choose_module, "draw_rows")
    )
    original = getattr(owner, name)

    def failing(*arguments):
        nonlocal passes
        passes += 1
        if passes == ids.index(ids[20]) + 2:
            raise RuntimeError("broken")
        return original(*arguments)

    monkeypatch.setattr(owner, name, failing)
    _, reader = bench.add(prompt(0), **DRAWN)
    bench.finish()
    assert reader.outcome.token_ids == ids[: ids.index(ids[20]) + 1]
    assert passes == ids.index(ids[20]) + 2
    check_all_back(bench.engine)


@pytest.mark.usefixtures("passes")
def test_what_came_out_wrong_is_not_shared(bench: Bench, monkeypatch):
    """K and V of a prompt became no numbers: the next request with this text computes it anew."""
    ask = "x" * 100
    embed = bench.engine._model.model.get_input_embeddings()
    broken = embed.register_forward_hook(lambda module, inputs, out: out * float("nan"))
    monkeypatch.setattr(scheduler_module, "STEP_TOKENS", 48)
    _, first = bench.add(prompt(0, ask=ask), max_new_tokens=2)
    bench.finish()
    broken.remove()
    assert "finite" in str(first.outcome)
    _, second = bench.add(prompt(0, ask=ask), max_new_tokens=2)
    bench.finish()
    assert isinstance(second.outcome, Generation), second.outcome
    assert second.outcome.report.live_tokens_reused == 0
    _, third = bench.add(prompt(0, ask=ask), max_new_tokens=2)
    bench.finish()
    assert third.outcome.report.live_tokens_reused > 0
    assert third.outcome.token_ids == second.outcome.token_ids
    check_all_back(bench.engine)


@pytest.mark.parametrize("held", [False, True], ids=["idle", "in use elsewhere"])
def test_reused_text_that_came_out_wrong_is_not_reused_again(bench: Bench, held: bool):
    """Its pages were damaged since; that another request still holds them changes nothing."""
    pool, ask = bench.engine._pool, "x" * 100
    _, first = bench.add(prompt(0, ask=ask), max_new_tokens=2)
    bench.finish()
    names = [name for name in pool._resident if not isinstance(name, NodeKey)]
    assert names
    for name in names:
        pool.v[:, pool.slots(pool.entry(name).pages, 0, PAGE)] = float("nan")
        if held:
            pool.acquire(name)
    _, second = bench.add(prompt(0, ask=ask), max_new_tokens=2)
    bench.finish()
    assert "finite" in str(second.outcome)
    _, third = bench.add(prompt(0, ask=ask), max_new_tokens=2)
    bench.finish()
    assert third.outcome.report.live_tokens_reused == 0
    assert third.outcome.token_ids == first.outcome.token_ids
    for name in names if held else ():
        pool.leave(name)
    check_all_back(bench.engine)


@pytest.mark.usefixtures("overlapping")
def test_an_answer_that_is_there_is_not_too_late(bench: Bench, monkeypatch):
    answer, reader = bench.add(prompt(0), max_new_tokens=3, timeout_s=3600)
    while not (answer.begun and answer.exhausted):
        bench.step()
    assert bench.scheduler._under_way is not None and not reader.outcomes
    monkeypatch.setattr(EagerLaunched, "done", True)
    object.__setattr__(answer.request, "deadline", time.perf_counter() - 1)
    bench.finish()
    assert isinstance(reader.outcome, Generation)


@pytest.mark.usefixtures("overlapping")
def test_a_pass_that_fails_late_ends_the_requests_in_it_alone(bench: Bench, monkeypatch):
    _, expected = bench.add(prompt(1), max_new_tokens=6)
    bench.finish()
    _, broken = bench.add(prompt(0), max_new_tokens=6)
    bench.step()
    error, fetch = RuntimeError("broken"), bench.runner.fetch

    def failing(pass_):
        monkeypatch.setattr(bench.runner, "fetch", fetch)
        raise error

    monkeypatch.setattr(bench.runner, "fetch", failing)
    _, late = bench.add(prompt(1), max_new_tokens=6)
    bench.finish()
    assert broken.outcome is error
    assert late.outcome.token_ids == expected.outcome.token_ids
    check_all_back(bench.engine)


@pytest.mark.usefixtures("overlapping")
def test_tokens_are_delivered_before_a_node_is_computed(bench: Bench, order, monkeypatch):
    bench.add(prompt(0), max_new_tokens=30)
    bench.step(3)
    compute = bench.runner.compute_next

    def computing():
        if bench.runner.must_compute:
            order.append(("compute", 0))
        return compute()

    monkeypatch.setattr(bench.runner, "compute_next", computing)
    bench.add([Node(text=text(77)), Live(text="What?")], max_new_tokens=2)
    bench.finish()
    at = order.index(("compute", 0))
    assert order[at - 1][0] == "fetch"
    assert sum(what == "launch" for what, _ in order[:at]) == sum(
        what == "fetch" for what, _ in order[:at]
    )


# 10,000 random steps


class _Fetcher:
    """Nodes without a store: zeros, now or later, or what the machine wants to go wrong."""

    def __init__(self, engine: Engine) -> None:
        geometry = engine._model.geometry
        self._shape = (len(geometry.layers), -1, geometry.kv_heads, geometry.head_dim)
        self.failure: BaseException | LoadFailure | None = None
        self.slow = False
        self.begun: list[tuple[Any, Fetch]] = []

    def ahead(self, run) -> bool:
        return True

    def zeros(self, run) -> StoredKV:
        layers, _, heads, dim = self._shape
        zeros = torch.zeros(layers, len(run.ids), heads, dim)
        return StoredKV(run.ids, zeros, zeros)

    def fetch(self, run) -> Fetch:
        fetch = Fetch(run, Tier.DISK, 1)
        self.begun.append((run, fetch))
        if not self.slow:
            self.deliver()
        return fetch

    def deliver(self) -> None:
        for run, fetch in self.begun:
            failure, self.failure = self.failure, None
            if isinstance(failure, BaseException):
                fetch.outcome.set_exception(failure)
            else:
                fetch.outcome.set_result(failure or self.zeros(run))
        self.begun.clear()

    def load(self, run):
        failure, self.failure = self.failure, None
        if isinstance(failure, BaseException):
            raise failure
        return failure or self.zeros(run)

    def in_reach(self, key) -> bool:
        return False

    def expected_s(self, run) -> float:
        return 1.0

    def touch(self, key) -> None:
        pass

    def settled(self, key) -> None:
        pass

    def forget(self, key) -> None:
        pass


class _Computer:
    """Computes zeros, or fails."""

    def __init__(self, fetcher: _Fetcher) -> None:
        self._fetcher = fetcher
        self.failure: BaseException | None = None

    def forget(self, key) -> None:
        pass

    def stored(self, key) -> bool:
        return True

    def compute(self, run):
        if self.failure is not None:
            failure, self.failure = self.failure, None
            raise failure
        return self._fetcher.zeros(run)

    def released(self):
        return iter(())


class _Pass(EagerLaunched):
    """One that is done when it is waited for, and may fail then."""

    done = False
    failure: BaseException | None = None

    def fetch(self):
        if self.failure is not None:
            raise self.failure
        return super().fetch()


class _Forward:
    """Passes without a model; a request's rows are still laid out, and every id is 65."""

    shared_tokens = 24

    def __init__(self, asynchronous: bool) -> None:
        self.asynchronous = asynchronous
        self.failure: BaseException | None = None
        self.late_failure: BaseException | None = None
        self._wanted: set[PagedSequence] = set()

    def launch(self, batch) -> _Pass:
        assert batch
        for rows in batch:
            assert len(rows.positions) > 0
            assert rows.ids is not None or rows.sequence in self._wanted
        for request_rows, slots in packed_rows(batch):
            assert set((slots // PAGE).tolist()) <= set(request_rows.live.pages)
        self._wanted = {rows.sequence for rows in batch if rows.wanted}
        return self.answer(batch)

    def answer(self, batch) -> _Pass:
        failure, self.failure = self.failure, None
        if failure is not None:
            raise failure
        launched = _Pass(torch.eye(66)[[65] * sum(rows.wanted for rows in batch)])
        launched.failure, self.late_failure = self.late_failure, None
        return launched


class _Runner(Runner):
    """Passes without a model."""

    def launch(self, batch):
        if isinstance(batch[0].sequence, PagedSequence):
            return super().launch(batch)
        assert len(batch) == 1 and batch[0].ids is not None
        return UnderWay(batch, self._packed.answer(batch), asynchronous=False)


class SchedulerMachine(RuleBasedStateMachine):
    """Random requests, cancellations, failures and evictions."""

    engine: Engine
    requests: list[Any]
    steps = 0

    @initialize(
        pages=st.integers(24, 60),
        running=st.sampled_from([2, 5, 256]),
        asynchronous=st.booleans(),
    )
    def begin(self, pages: int, running: int, asynchronous: bool) -> None:
        model = self.engine._model
        self.pool = PagePool(
            model.geometry,
            pages=pages,
            page_size=PAGE,
            dtype=torch.float32,
            device=torch.device("cpu"),
        )
        self.fetcher = _Fetcher(self.engine)
        self.computer = _Computer(self.fetcher)
        self.costs = Costs()
        write = PageFiller(self.pool, model.geometry).fill
        placer = NodePlacer(
            self.pool, model.geometry, write, self.fetcher, self.computer, self.costs
        )
        self.runner = _Runner(model, self.pool, placer, self.fetcher, self.computer)
        self.forward = self.runner._packed = _Forward(asynchronous)
        self.scheduler = Scheduler(self.runner)
        self.answers: list[tuple[Answer, Reader]] = []
        scheduler_module.MAX_RUNNING = running

    def open(self) -> list[tuple[Answer, Reader]]:
        return [(answer, reader) for answer, reader in self.answers if not reader.outcomes]

    def step_once(self) -> None:
        with torch.inference_mode():
            try:
                self.scheduler.step()
            except SystemExit as error:  # as the worker does
                self.scheduler.fail_all(error)
                assert self.scheduler.idle

    @rule(number=st.integers(0, 39), raises=st.sampled_from([False] * 7 + [True]))
    def admit(self, number: int, raises: bool) -> None:
        request = self.requests[number]
        reader = Reader(raises)
        with suppress(RequestError):
            self.runner.check_fits(request)
            self.answers.append(
                (Answer(request, self.engine._model, reader, self.engine._metrics), reader)
            )
            self.scheduler.add(self.answers[-1][0])

    @rule()
    def step(self) -> None:
        self.step_once()

    @rule()
    def step_again(self) -> None:
        self.step_once()

    @precondition(lambda self: self.open())
    @rule(data=st.data())
    def cancel(self, data) -> None:
        data.draw(st.sampled_from(self.open()))[0].cancelled = True

    @precondition(lambda self: self.open())
    @rule(data=st.data())
    def time_out(self, data) -> None:
        answer, _ = data.draw(st.sampled_from(self.open()))
        answer.request = replace(answer.request, deadline=-math.inf)

    @rule(failure=st.sampled_from([*LoadFailure, MemoryError("read"), RuntimeError("read")]))
    def fail_a_read(self, failure) -> None:
        self.fetcher.failure = failure
        self.step_once()

    @rule(kind=st.sampled_from([MemoryError, RuntimeError]))
    def fail_a_computation(self, kind) -> None:
        self.fetcher.failure = LoadFailure.ABSENT
        self.computer.failure = kind("computation")
        self.step_once()

    @rule(slow=st.booleans())
    def change_the_disk(self, slow: bool) -> None:
        self.fetcher.slow = slow

    @rule()
    def read_on(self) -> None:
        self.fetcher.deliver()

    @rule(seconds=st.sampled_from([1e-9, 1e9]))
    def change_speeds(self, seconds: float) -> None:
        self.costs.read.record(1, 1.0)
        self.costs.encode.record(1, seconds)

    @rule(kind=st.sampled_from([MemoryError, RuntimeError, SystemExit]), late=st.booleans())
    def fail_a_pass(self, kind, late: bool) -> None:
        setattr(self.forward, "late_failure" if late else "failure", kind("pass"))
        self.step_once()
        self.forward.failure = self.forward.late_failure = None

    @rule(numbers=st.sets(st.integers(0, 39), max_size=4))
    def release_nodes(self, numbers: set[int]) -> None:
        for number in numbers:
            self.runner.drop(node.run.key for node in self.requests[number].prompt.nodes)

    @precondition(lambda self: len(self.open()) > 8)
    @rule()
    def finish(self) -> None:
        self.run_to_the_end()

    def run_to_the_end(self) -> None:
        for _ in range(1_000):
            if self.scheduler.idle:
                break
            self.fetcher.deliver()
            self.step_once()
        assert self.scheduler.idle and not self.open(), "somebody waits for ever"
        assert all(len(reader.outcomes) == 1 for _, reader in self.answers)
        assert self.pool.free_pages + self.pool.evictable_pages == self.pool._allocator.total

    @invariant()
    def pages_and_outcomes(self) -> None:
        type(self).steps += 1
        if not hasattr(self, "scheduler"):
            return
        running = self.scheduler._running
        check_pages(self.pool, running)
        waiting = [place[-1] for place in self.scheduler._waiting]
        assert Counter(map(id, running + waiting)) == Counter(id(a) for a, _ in self.open())
        assert all(len(reader.outcomes) <= 1 for _, reader in self.answers)
        assert all(a.started is None for a, reader in self.answers if reader.outcomes)

    def teardown(self) -> None:
        if hasattr(self, "scheduler"):
            self.run_to_the_end()


def test_10_000_random_steps_keep_the_invariants(open_engine, monkeypatch):
    """Pages, users and outcomes after every step; nobody hangs; all pages back at the end."""
    engine = open_engine(pool_bytes=PAGE_BYTES * 200)
    choose = random.Random(3)
    requests = []
    for number in range(40):
        quality = choose.choice(["fast"] * 6 + ["full", "materialized"])
        parts = prompt(*choose.sample(range(10), choose.randint(0, 3)), ask="?" * (1 + number * 2))
        options = {
            "quality": quality,
            "max_new_tokens": choose.randint(1, 12),
            "priority": choose.choice([-1, 0, 0, 0, 2]),
            "strict": choose.random() < 0.1,
            "timeout_s": 1e6,
        }
        requests.append(engine._request(parts, None, options))
    for name in ("MAX_RUNNING", "STEP_TOKENS", "MAX_WAITING"):
        monkeypatch.setattr(scheduler_module, name, getattr(scheduler_module, name))
    scheduler_module.STEP_TOKENS = 64
    scheduler_module.MAX_WAITING = 12
    SchedulerMachine.engine, SchedulerMachine.requests, SchedulerMachine.steps = engine, requests, 0
    monkeypatch.setattr(logging.getLogger("lazyrag"), "disabled", True)
    chosen = settings(
        max_examples=140,
        stateful_step_count=100,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    run_state_machine_as_test(SchedulerMachine, settings=chosen)
    assert SchedulerMachine.steps >= 10_000


# failures


def _io_error(file: Path) -> None:
    raise OSError(5, "Input/output error")


def _short_read(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-3])


def _no_memory(file: Path) -> None:
    raise MemoryError


@pytest.mark.parametrize(
    ("fail", "reason"),
    [
        (_io_error, Reason.UNREADABLE),
        (_short_read, Reason.DAMAGED),
        (_no_memory, Reason.UNREADABLE),
    ],
)
def test_a_node_that_cannot_be_loaded_is_computed(bench: Bench, monkeypatch, fail, reason):
    """Node 3 of 5; want of memory too: computing it needs less than reading and checking it."""
    parts = prompt(0, 1, 2, 3, 4)
    _, before = bench.add(parts, max_new_tokens=8)
    bench.finish()
    keys = [node.key for node in before.outcome.report.nodes]
    bench.runner.drop(keys)
    assert len(bench.engine._pool) == 0
    read = store_module.read_node

    def failing(path, key, size):
        if key == keys[2]:
            fail(path)
            size = path.stat().st_size if fail is _short_read else size
        return read(path, key, size)

    monkeypatch.setattr(store_module, "read_node", failing)
    _, reader = bench.add(parts, max_new_tokens=8)
    bench.finish()
    nodes = reader.outcome.report.nodes
    assert [node.reason for node in nodes] == [None, None, reason, None, None]
    assert nodes[2].status is NodeStatus.RECOMPUTED
    assert reader.outcome.token_ids == before.outcome.token_ids
    check_all_back(bench.engine)


def test_a_node_that_cannot_be_computed_ends_its_request_alone(bench: Bench, monkeypatch):
    _, other = bench.add(prompt(0), max_new_tokens=8)
    bench.step()

    def failing(path, key, size):
        raise OSError(5, "Input/output error")

    def no_memory(nodes, behind):
        raise MemoryError("no memory")

    monkeypatch.setattr(store_module, "read_node", failing)
    monkeypatch.setattr(bench.engine._ingestor._encoder, "encode", no_memory)
    _, reader = bench.add(prompt(0, 1), max_new_tokens=8)
    bench.finish()
    assert isinstance(reader.outcome, MemoryError)
    assert isinstance(other.outcome, Generation)
    check_all_back(bench.engine)


def test_a_failing_pass_ends_the_requests_in_it_alone(bench: Bench, monkeypatch):
    """One is in the pass, one has no budget in it, one has a pass of its own."""
    monkeypatch.setattr(scheduler_module, "STEP_TOKENS", 16)
    _, single = bench.add(prompt(1), max_new_tokens=6)
    bench.finish()
    _, inside = bench.add(prompt(0), max_new_tokens=6)
    _, outside = bench.add(prompt(1), max_new_tokens=6)
    launch, error = bench.runner.launch, RuntimeError("broken")

    def broken(batch):
        raise error

    monkeypatch.setattr(bench.runner, "launch", broken)
    bench.step()
    assert inside.outcome is error and not outside.outcomes
    monkeypatch.setattr(bench.runner, "launch", launch)
    _, copied = bench.add(prompt(2), max_new_tokens=6, quality="materialized")

    def broken_alone(batch):
        if not isinstance(batch[0].sequence, PagedSequence):
            raise error
        return launch(batch)

    monkeypatch.setattr(bench.runner, "launch", broken_alone)
    bench.finish()
    assert copied.outcome is error
    assert outside.outcome.token_ids == single.outcome.token_ids
    check_all_back(bench.engine)


def test_a_reader_that_breaks_is_nobody_elses_trouble(bench: Bench):
    broken = Reader(raises=True)
    bench.add(prompt(0), reader=broken, max_new_tokens=12)
    _, other = bench.add(prompt(0), max_new_tokens=12)
    bench.finish()
    assert isinstance(broken.outcome, ValueError)
    assert isinstance(other.outcome, Generation)
    check_all_back(bench.engine)


def test_pages_that_cannot_be_given_back_are_no_readers_wait(bench: Bench, monkeypatch):
    _, first = bench.add(prompt(0), max_new_tokens=40, json_schema=ENDLESS)
    _, second = bench.add(prompt(1), max_new_tokens=40, json_schema=ENDLESS)
    bench.step(3)

    def broken(started):
        raise ValueError("page 3 is not in use")

    monkeypatch.setattr(bench.runner, "end", broken)
    error = LazyRagError("all ends")
    bench.scheduler.fail_all(error)
    assert first.outcome is second.outcome is error and bench.scheduler.idle


def test_missing_pages_are_an_error_and_no_wait_for_ever(small: Bench):
    assert small.engine._pool.allocate(PAGE * 28)
    _, reader = small.add(prompt(0), max_new_tokens=4)
    small.step()
    assert "pages are missing" in str(reader.outcome)


def test_a_failing_worker_ends_every_reader_and_job_and_goes_on(open_engine, monkeypatch):
    engine = open_engine()
    expected = engine.generate(prompt(0), max_new_tokens=4).token_ids
    held, step = threading.Event(), Scheduler.step
    outcomes: list[BaseException] = []

    def failing(self) -> None:
        if held.is_set():
            held.clear()
            raise KeyError("a mistake of ours")
        step(self)

    monkeypatch.setattr(Scheduler, "step", failing)
    running = engine.stream(prompt(1), max_new_tokens=3_000, json_schema=ENDLESS)
    next(running)
    go = threading.Event()

    def caught(work: Callable[[], Any]) -> None:
        try:
            work()
        except BaseException as error:
            outcomes.append(error)

    works = [lambda: engine._worker.call(go.wait)]
    works += [lambda: engine._worker.call(lambda: None)] * 3
    works += [lambda: engine.generate(prompt(2), max_new_tokens=3_000, json_schema=ENDLESS)] * 3
    works += [lambda: list(running)]
    threads = [threading.Thread(target=caught, args=(work,)) for work in works]
    threads[0].start()
    with time_limit(30) as wait:
        wait(lambda: not engine._worker._jobs)
        for thread in threads[1:]:
            thread.start()
        wait(lambda: len(engine._worker._jobs) == 3 and len(engine._worker._arrived) == 3)
        held.set()
        go.set()
        for thread in threads:
            thread.join(timeout=30)
    assert len(outcomes) == 7, "all but the job that was run"
    assert all("worker failed" in str(error) for error in outcomes)
    assert all(isinstance(error.__cause__, KeyError) for error in outcomes)
    check_all_back(engine)
    assert engine.generate(prompt(0), max_new_tokens=4).token_ids == expected


def test_while_a_failed_worker_tells_its_readers_no_second_one_starts(open_engine, monkeypatch):
    """Two threads in one scheduler would lose requests and pages."""
    engine = open_engine()
    workers: list[int] = []
    began = threading.Event()

    def slow(delivery) -> None:
        if isinstance(delivery, str):
            return
        began.set()
        time.sleep(0.1)
        workers.append(sum(t.name == "lazyrag-worker" for t in mine()))

    before = set(threading.enumerate())

    def mine() -> set[threading.Thread]:
        return set(threading.enumerate()) - before

    request = engine._request(prompt(0), None, {"max_new_tokens": 400, "json_schema": ENDLESS})
    engine._worker.submit(request, slow)
    engine._worker.call(lambda: None)
    step = Scheduler.step

    def failing(self) -> None:
        monkeypatch.setattr(Scheduler, "step", step)
        raise KeyError("a mistake of ours")

    monkeypatch.setattr(Scheduler, "step", failing)
    assert began.wait(10)
    assert engine.generate(prompt(1), max_new_tokens=3).token_ids
    assert workers == [1]
    check_all_back(engine)


@pytest.mark.parametrize("kind", [ValueError, SystemExit, KeyboardInterrupt])
def test_a_failing_job_reaches_its_caller_alone(open_engine, kind):
    engine = open_engine()
    stream = engine.stream(prompt(0), max_new_tokens=12)
    next(stream)

    def job() -> None:
        raise kind("job")

    with pytest.raises(kind, match="job"):
        engine._worker.call(job)
    assert "".join(stream) and stream.result


def test_a_thread_that_cannot_start_leaves_nothing_behind(open_engine, monkeypatch):
    engine = open_engine()

    def refuses(thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuses)
        with pytest.raises(RuntimeError, match="can't start"):
            engine.generate(prompt(0), max_new_tokens=2)
    assert not engine._worker._arrived
    assert engine.generate(prompt(0), max_new_tokens=2).token_ids


# leaving early


def test_cancelled_while_waiting(small: Bench):
    _, running = small.add(prompt(0), max_new_tokens=330)
    waiting, reader = small.add(prompt(1), max_new_tokens=330)
    _, behind = small.add(prompt(2), max_new_tokens=4)
    small.step()
    assert waiting.started is None and not behind.text
    waiting.cancelled = True
    small.step()
    assert isinstance(reader.outcome, CancelledError)
    check_pages(small.engine._pool, small.scheduler._running)
    assert not running.outcomes
    small.finish()
    assert isinstance(behind.outcome, Generation)


@pytest.mark.parametrize("how", ["cancelled", "timeout"])
def test_leaving_during_a_long_prefill(bench: Bench, monkeypatch, how):
    monkeypatch.setattr(scheduler_module, "STEP_TOKENS", 32)
    monkeypatch.setattr(EagerForward, "shared_tokens", 32)
    answer, reader = bench.add(prompt(0, ask="long " * 100), max_new_tokens=4, timeout_s=1e6)
    bench.step(3)
    assert answer.started is not None and not answer.decoding and answer._computed == 96
    if how == "cancelled":
        answer.cancelled = True
    else:
        answer.request = replace(answer.request, deadline=0.0)
    bench.step()
    assert answer._computed == 96, "no pass after it"
    assert isinstance(reader.outcome, CancelledError if how == "cancelled" else RequestError)
    check_all_back(bench.engine)


def test_cancelled_while_decoding(bench: Bench):
    answer, reader = bench.add(prompt(0), max_new_tokens=300, json_schema=ENDLESS)
    _, other = bench.add(prompt(0), max_new_tokens=6)
    bench.step(4)
    assert len(answer._token_ids) == 4
    answer.cancelled = True
    bench.step()
    assert isinstance(reader.outcome, CancelledError) and len(answer._token_ids) == 4
    bench.finish()
    assert isinstance(other.outcome, Generation)
    check_all_back(bench.engine)


def test_time_is_up_while_waiting_for_room(open_engine):
    engine = open_engine(pool_bytes=PAGE_BYTES * 32)
    holder = engine.stream(prompt(0), max_new_tokens=330, json_schema=ENDLESS)
    next(holder)
    with pytest.raises(RequestError, match=r"timeout of 0\.05 s"):
        engine.generate(prompt(1), max_new_tokens=330, timeout_s=0.05)
    holder.close()
    engine._worker.call(lambda: None)
    engine._worker.call(lambda: None)
    check_all_back(engine)


def test_a_collected_stream_stops(open_engine):
    engine = open_engine()
    stream = engine.stream(prompt(0), max_new_tokens=3_000, json_schema=ENDLESS)
    next(stream)
    (answer,) = engine._worker._scheduler._running
    del stream
    gc.collect()
    assert answer.cancelled
    with time_limit(10) as wait:
        wait(lambda: engine._worker._scheduler.idle)
    check_all_back(engine)


def test_an_interrupted_reader_stops_the_work(open_engine):
    engine = open_engine()
    stream = engine.stream(prompt(0), max_new_tokens=3_000, json_schema=ENDLESS)
    with pytest.raises(KeyboardInterrupt), stream:
        for _ in stream:
            raise KeyboardInterrupt
    with time_limit(10) as wait:
        wait(lambda: engine._worker._scheduler.idle)
    check_all_back(engine)


# who comes first


def test_priority_comes_before_arrival(small: Bench):
    assert small.engine._pool.allocate(PAGE * 18)  # room for one
    small.add(prompt(0), "running", max_new_tokens=4)
    small.step()
    for name, priority in (("low", -1), ("first", 0), ("second", 0), ("high", 5)):
        small.add(prompt(0), name, max_new_tokens=4, priority=priority)
    small.finish()
    assert small.ended == ["running", "high", "first", "second", "low"]


def test_nobody_overtakes_one_that_waits_for_room(small: Bench):
    """A small one would fit beside the running one; it comes after the large one all the same."""
    small.add(prompt(0), "running", max_new_tokens=200)
    small.step()
    small.add(prompt(1), "large", max_new_tokens=330)
    _, reader = small.add(prompt(2), "small", max_new_tokens=1)
    while not small.ended:
        assert not reader.text and not reader.outcomes
        assert len(small.scheduler._running) == 1
        small.step()
    small.finish()
    assert small.ended[0] == "running" and set(small.ended[1:]) == {"large", "small"}


def test_a_prompt_of_higher_priority_is_read_first(bench: Bench, monkeypatch):
    monkeypatch.setattr(scheduler_module, "STEP_TOKENS", 32)
    low, _ = bench.add(prompt(0, ask="long " * 100), max_new_tokens=2)
    bench.step()
    high, _ = bench.add(prompt(1, ask="long " * 100), max_new_tokens=2, priority=1)
    bench.step(3)
    assert (low._computed, high._computed) == (32, 96)
    bench.finish()


def test_a_long_prompt_does_not_stop_answers_being_written(bench: Bench, monkeypatch):
    monkeypatch.setattr(EagerForward, "shared_tokens", 16)
    written, _ = bench.add(prompt(0), max_new_tokens=100, json_schema=ENDLESS)
    bench.step()
    long, reader = bench.add(prompt(1, ask="long " * 60), max_new_tokens=2)
    second, _ = bench.add(prompt(2, ask="long " * 20), max_new_tokens=2)
    passes, launch = [], bench.runner.launch

    def counted(batch):
        passes.append([len(rows.ids) for rows in batch])
        return launch(batch)

    monkeypatch.setattr(bench.runner, "launch", counted)
    steps = 0
    while not long.decoding:
        bench.step()
        steps += 1
        assert len(written._token_ids) == 1 + steps
        assert sum(passes[-1]) <= 1 + 16
    live = len(long.request.prompt.live_ids)
    assert steps == -(-live // 16) > 15
    assert not second.decoding, "the first in is read first"
    bench.finish()
    assert isinstance(reader.outcome, Generation)


def test_bringing_nodes_in_does_not_stop_answers_being_written(bench: Bench, monkeypatch):
    """Between two loads that take long there is a forward pass."""
    monkeypatch.setattr(scheduler_module, "PLACE_S", 0.0)
    written, _ = bench.add(prompt(0), max_new_tokens=100, json_schema=ENDLESS)
    bench.step()
    others = [bench.add(prompt(n), max_new_tokens=20)[0] for n in range(1, 5)]
    for count in range(1, 5):
        bench.step()
        assert sum(other.begun for other in others) == count
        assert len(written._token_ids) == 1 + count
    bench.finish()


def test_too_many_waiting_are_refused(small: Bench, monkeypatch):
    monkeypatch.setattr(scheduler_module, "MAX_WAITING", 2)
    readers = [small.add(prompt(0), max_new_tokens=330)[1] for _ in range(3)]
    assert "2 requests are waiting already" in str(readers[2].outcome)
    small.finish()
    assert all(isinstance(reader.outcome, Generation) for reader in readers[:2])


# the thread


def test_closing_ends_readers_and_jobs(open_engine):
    engine = open_engine(pool_bytes=PAGE_BYTES * 32)
    outcomes: list[str] = []
    go = threading.Event()

    def caught(work: Callable[[], Any]) -> None:
        try:
            work()
        except RequestError as error:
            outcomes.append(str(error))

    running = engine.stream(prompt(0), max_new_tokens=330, json_schema=ENDLESS)
    next(running)
    works = [
        lambda: engine._worker.call(go.wait),
        lambda: engine._worker.call(lambda: None),
        lambda: engine.generate(prompt(1), max_new_tokens=330),
        lambda: list(running),
    ]
    threads = [threading.Thread(target=caught, args=(work,)) for work in works]
    threads[0].start()
    with time_limit(20) as wait:
        wait(lambda: not engine._worker._jobs)
        for thread in threads[1:]:
            thread.start()
        wait(lambda: len(engine._worker._jobs) == 1 and len(engine._worker._arrived) == 1)
        closing = threading.Thread(target=engine.close)
        closing.start()
        wait(lambda: engine._worker._closed)
        go.set()
        for thread in [*threads, closing]:
            thread.join(timeout=20)
    assert outcomes == ["this engine was closed."] * 3
    check_all_back(engine)
    engine.close()
    with pytest.raises(RequestError, match="engine is closed"):
        engine.generate(prompt(0))


def test_the_thread_ends_when_idle_and_another_one_starts(open_engine, monkeypatch):
    monkeypatch.setattr(worker_module, "IDLE_S", 0.01)
    engine = open_engine()
    for _ in range(3):
        assert engine.generate(prompt(0), max_new_tokens=2).token_ids
        with time_limit(10) as wait:
            wait(lambda: engine._worker._thread is None)


def test_no_request_is_lost_to_a_thread_that_just_ends(open_engine, monkeypatch):
    """It has found nothing to do, and is slow to end."""
    monkeypatch.setattr(worker_module, "IDLE_S", 0.001)
    engine = open_engine()
    wait_for_work = worker_module.Worker._wait

    def slow_to_end(self) -> bool:
        work = wait_for_work(self)
        if not work:
            time.sleep(0.005)
        return work

    monkeypatch.setattr(worker_module.Worker, "_wait", slow_to_end)
    choose = random.Random(5)

    def many() -> None:
        for number in range(100):
            assert engine._worker.call(lambda number=number: number) == number
            time.sleep(choose.choice([0, 0.001, 0.002, 0.004]))

    with ThreadPoolExecutor(2) as threads:
        for one in [threads.submit(many) for _ in range(2)]:
            one.result(timeout=60)


def test_an_engine_nobody_holds_is_collected(checkpoint, monkeypatch):
    """Its thread ends, and model and pool go with it."""
    monkeypatch.setattr(worker_module, "IDLE_S", 0.01)
    engine = Engine.from_pretrained(checkpoint("llama"))
    engine.generate("Hello", max_new_tokens=2)
    gone = weakref.ref(engine), weakref.ref(engine._worker)
    del engine
    with time_limit(10) as wait:
        wait(lambda: gc.collect() >= 0 and all(one() is None for one in gone))


def test_time_is_looked_at_between_nodes(open_engine, monkeypatch):
    """Nodes that must be computed first take longer than the request may."""
    engine = open_engine()
    computer, computed = engine._runner._computer, []
    compute = computer.compute

    def slow(run):
        computed.append(run.key)
        time.sleep(0.1)
        return compute(run)

    monkeypatch.setattr(computer, "compute", slow)
    with pytest.raises(RequestError, match="timeout"):
        engine.generate(prompt(90, 91, 92, 93, 94), max_new_tokens=1, timeout_s=0.25)
    assert 1 <= len(computed) < 5
    engine._worker.call(lambda: None)
    check_all_back(engine)
