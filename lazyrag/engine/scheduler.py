"""Which requests run, and what goes into each forward pass: continuous batching.

Requests are admitted in order of priority, then of arrival; one that finds no room waits, and
nobody overtakes it. Pages for nodes and the whole answer are taken at admission, so nothing that
runs is ever put back. Nodes that are not resident are read meanwhile, and a request takes part as
soon as its own are here; a node that must be computed is, between two passes. A step holds one
token of every answer that is being written and, within a budget, the next part of prompts that are
still read; priority, then the first prompt in, gets the budget first.

Where passes are asynchronous, one is launched before what came of the one before it is fetched: the
device never waits for the host. An answer that turns out to have ended with a token of the pass
before then has a row too many in this one, which nobody reads.
"""

from __future__ import annotations

import heapq
import itertools
import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError

from lazyrag.engine.answer import PassTask, Task
from lazyrag.engine.forward import NextTokens
from lazyrag.engine.generation import Outcome
from lazyrag.engine.runner import Runner, UnderWay
from lazyrag.engine.sequence import PagedSequence
from lazyrag.errors import EngineBusyError, LazyRagError, RequestError

STEP_TOKENS = 2048
"""Prompt tokens of one forward pass when no answer is being written."""
MAX_RUNNING = 256
"""Requests that run at once."""
MAX_WAITING = 4096
"""Requests that wait; more are refused."""
READ_AHEAD = 8
"""Waiting requests whose nodes are read."""
PLACE_S = 0.05
"""Seconds after which no further node is written into pages before a forward pass."""

Pass = list[tuple[PassTask, NextTokens]]
"""Requests and their next tokens."""

logger = logging.getLogger("lazyrag")


class Scheduler:
    """The requests of one engine. Not thread-safe: one worker owns it."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self._waiting: list[tuple[int, int, Task]] = []
        self._running: list[Task] = []
        self._under_way: tuple[Pass, UnderWay] | None = None
        self._arrival = itertools.count()

    @property
    def waiting(self) -> int:
        """Requests that wait for room; from any thread."""
        return len(self._waiting)

    @property
    def running(self) -> tuple[int, int]:
        """Requests that wait for their nodes, and those that take part in passes; any thread."""
        begun = [task.begun for task in list(self._running)]
        return begun.count(False), begun.count(True)

    @property
    def idle(self) -> bool:
        """Whether there is nothing to do."""
        return not self._waiting and not self._running

    def add(self, task: Task) -> None:
        """Put a request in line."""
        if len(self._waiting) >= MAX_WAITING:
            task.conclude(
                EngineBusyError(
                    f"{MAX_WAITING:,} requests are waiting already; ask again later, or use "
                    "another engine."
                )
            )
            return
        if task.arrival is None:
            task.arrival = next(self._arrival)
        place = (-task.request.options.priority, task.arrival, task)
        heapq.heappush(self._waiting, place)

    def step(self) -> bool:
        """Admit what fits, take in what has arrived, run one forward pass, deliver what came of it.

        Returns:
            False when nothing could be done: every request waits for nodes that are being read.
        """
        delivered = self._deliver(wait=False)
        self._drop(self._given_up)
        admitted = self._admit()
        if admitted:
            self._read_ahead()
        arrived = self._take_in()
        passes = _passes(self._next_tokens())
        for batch in passes:
            self._launch(batch)
        if not passes:
            delivered |= self._deliver()
        moved = bool(delivered or admitted or arrived or passes)
        return moved or self._runner.wait_for_sent()

    def _next_tokens(self) -> Pass:
        ready = [
            task
            for task in self._running
            if isinstance(task, PassTask) and task.begun and not task.exhausted
        ]
        shared = any(task.decoding for task in ready)
        budget = self._runner.shared_tokens if shared else STEP_TOKENS
        batch: Pass = []
        for task in sorted(ready, key=lambda task: -task.request.options.priority):
            if task.decoding:
                batch.append((task, task.take(1)))
            elif budget:
                rows = task.take(budget)
                budget -= len(rows.positions)
                batch.append((task, rows))
        return batch

    def _launch(self, batch: Pass) -> None:
        """Begin a pass, then deliver what came of the one before."""
        try:
            launched = self._runner.launch([rows for _, rows in batch])
        except BaseException as error:
            self._deliver()
            self._fail(batch, error)
            return
        self._deliver()
        if all(task.started is None for task, _ in batch):
            return  # it is of nobody
        self._under_way = batch, launched
        if not launched.asynchronous:
            self._deliver()

    def _deliver(self, *, wait: bool = True) -> bool:
        """Deliver what came of the pass under way; False: there is none, or it still runs."""
        if self._under_way is None or not (wait or self._under_way[1].done):
            return False
        (batch, launched), self._under_way = self._under_way, None
        try:
            results = self._runner.fetch(launched)
        except BaseException as error:
            self._fail(batch, error)
            return True
        for (task, _), result in zip(batch, results, strict=True):
            if result is None or task.started is None:  # it has ended since
                continue
            try:
                if isinstance(result, Exception):
                    self._runner.distrust(task.started)
                    raise result
                outcome = task.advance(result)
            except Exception as error:
                self._end(task, error)
                continue
            if outcome is not None:
                self._end(task, outcome)
        return True

    def _fail(self, batch: Pass, error: BaseException) -> None:
        """A pass has failed; raises what is no `Exception`."""
        for task, _ in batch:
            if task.started is not None:
                self._end(task, error)
        if not isinstance(error, Exception):
            raise error

    def fail_all(self, error: BaseException) -> None:
        """End every request with ``error``, whatever else fails."""
        self._under_way = None
        while not self.idle:
            try:
                self._drop(lambda task: error)
            except Exception:
                logger.exception("what a request held could not be given back")

    def _admit(self) -> bool:
        admitted = False
        while self._waiting and len(self._running) < MAX_RUNNING:
            *_, task = self._waiting[0]
            try:
                started = self._runner.begin(task.request)
                if started is None:
                    if self._running:
                        return admitted
                    self._runner.check_fits(task.request)  # since then nodes may have been pinned
                    raise LazyRagError(
                        "the pool has no room although nothing runs: pages are missing. Open "
                        "another engine, and please report this."
                    )
                heapq.heappop(self._waiting)
                self._running.append(task)
                task.admit(started)
            except Exception as error:
                if self._waiting and self._waiting[0][-1] is task:
                    heapq.heappop(self._waiting)
                self._end(task, error)
            admitted = True
        return admitted

    def _read_ahead(self) -> None:
        """Have nodes read for those who are admitted next."""
        for *_, task in heapq.nsmallest(READ_AHEAD, self._waiting):
            self._runner.prefetch(task.request)

    def _take_in(self) -> bool:
        """Nodes that have arrived, at most one that must be computed, requests that have all."""
        moved = self._runner.place(time.perf_counter() + PLACE_S)
        if self._runner.must_compute:  # which takes its time
            self._deliver()
            moved |= self._runner.compute_next()
        for task in [task for task in self._running if not task.begun]:
            assert task.started is not None, "it was admitted"
            try:
                if (error := task.started.error) is not None:
                    raise error
                if task.started.ready:
                    moved = True
                    if (outcome := task.begin()) is not None:
                        self._end(task, outcome)
            except Exception as error:
                self._end(task, error)
                moved = True
        return moved

    @staticmethod
    def _given_up(task: Task) -> BaseException | None:
        """Why a request need not go on: its reader has left, or its time is up."""
        if task.cancelled:
            return CancelledError()
        try:
            task.request.check_time()
        except RequestError as error:
            return error
        return None

    def _drop(self, reason_of: Callable[[Task], BaseException | None]) -> None:
        for task in list(self._running):
            if (reason := reason_of(task)) is not None:
                self._end(task, reason)
        reasons = [(place, reason_of(place[-1])) for place in self._waiting]
        for (*_, task), reason in reasons:
            if reason is not None:
                task.conclude(reason)
        if any(reason is not None for _, reason in reasons):
            self._waiting = [place for place, reason in reasons if reason is None]
            heapq.heapify(self._waiting)

    def _end(self, task: Task, outcome: Outcome | BaseException) -> None:
        """Give back what a request held, then tell its reader in any case."""
        if task in self._running:
            self._running.remove(task)
        if not self._running:
            self._under_way = None  # of nobody
        started, task.started = task.started, None
        try:
            if started is not None:
                self._runner.end(started)
        finally:
            task.conclude(outcome)


def _passes(batch: Pass) -> Sequence[Pass]:
    """What is computed together: all over the pool in one pass, each with copies in its own."""
    paged = [entry for entry in batch if isinstance(entry[1].sequence, PagedSequence)]
    copied = [[entry] for entry in batch if not isinstance(entry[1].sequence, PagedSequence)]
    return [paged, *copied] if paged else copied
