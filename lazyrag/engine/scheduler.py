"""Which requests run, and what goes into each forward pass: continuous batching.

Requests are admitted in order of priority, then of arrival; one that finds no room waits, and
nobody overtakes it. Pages for the whole answer are taken at admission, so nothing that runs is ever
put back. A step holds one token of every answer that is being written and, within a budget, the
next part of prompts that are still read; priority, then the first prompt in, gets the budget first.
"""

from __future__ import annotations

import heapq
import itertools
import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError

from lazyrag.engine.answer import Answer
from lazyrag.engine.generation import Generation
from lazyrag.engine.runner import Rows, Runner
from lazyrag.engine.sequence import PagedSequence
from lazyrag.errors import LazyRagError, RequestError

STEP_TOKENS = 2048
"""Prompt tokens of one forward pass when no answer is being written."""
SHARED_STEP_TOKENS = 256
"""The same when answers are being written, which wait for the pass."""
MAX_RUNNING = 256
"""Requests that run at once."""
MAX_WAITING = 4096
"""Requests that wait; more are refused."""
ADMIT_S = 0.05
"""Seconds after which no further request is admitted (its nodes loaded) before a forward pass."""

Pass = list[tuple[Answer, Rows]]
"""Requests and their next tokens."""

logger = logging.getLogger("lazyrag")


class Scheduler:
    """The requests of one engine. Not thread-safe: one worker owns it."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self._waiting: list[tuple[int, int, Answer]] = []
        self._running: list[Answer] = []
        self._arrival = itertools.count()

    @property
    def idle(self) -> bool:
        """Whether there is nothing to do."""
        return not self._waiting and not self._running

    def add(self, answer: Answer) -> None:
        """Put a request in line."""
        if len(self._waiting) >= MAX_WAITING:
            answer.conclude(
                RequestError(
                    f"{MAX_WAITING:,} requests are waiting already; ask again later, or use "
                    "another engine."
                )
            )
            return
        place = (-answer.request.options.priority, next(self._arrival), answer)
        heapq.heappush(self._waiting, place)

    def step(self) -> None:
        """Admit what fits, run one forward pass, deliver what came of it."""
        self._drop(self._given_up)
        self._admit()
        for batch in _passes(self._next_tokens()):
            self._forward(batch)

    def _next_tokens(self) -> Pass:
        budget = SHARED_STEP_TOKENS if any(a.decoding for a in self._running) else STEP_TOKENS
        batch: Pass = []
        for answer in sorted(self._running, key=lambda answer: -answer.request.options.priority):
            if answer.decoding:
                batch.append((answer, answer.take(1)))
            elif budget:
                rows = answer.take(budget)
                budget -= len(rows[1])
                batch.append((answer, rows))
        return batch

    def _forward(self, batch: Pass) -> None:
        try:
            logits = self._runner.forward([rows for _, rows in batch])
        except BaseException as error:
            for answer, _ in batch:
                self._end(answer, error)
            if not isinstance(error, Exception):
                raise
            return
        for (answer, _), scores in zip(batch, logits, strict=True):
            if not answer.decoding:
                continue
            try:
                generation = answer.advance(scores)
            except Exception as error:
                self._end(answer, error)
                continue
            if generation is not None:
                self._end(answer, generation)

    def fail_all(self, error: BaseException) -> None:
        """End every request with ``error``, whatever else fails."""
        while not self.idle:
            try:
                self._drop(lambda answer: error)
            except Exception:
                logger.exception("what a request held could not be given back")

    def _admit(self) -> None:
        until = time.perf_counter() + ADMIT_S
        while self._waiting and len(self._running) < MAX_RUNNING:
            *_, answer = self._waiting[0]
            try:
                started = self._runner.begin(answer.request)
                if started is None:
                    if self._running:
                        return
                    raise LazyRagError(
                        "the pool has no room although nothing runs: pages are missing. Open "
                        "another engine, and please report this."
                    )
                heapq.heappop(self._waiting)
                self._running.append(answer)
                answer.begin(started)
            except Exception as error:
                if self._waiting and self._waiting[0][-1] is answer:
                    heapq.heappop(self._waiting)
                self._end(answer, error)
            if time.perf_counter() > until:
                return

    @staticmethod
    def _given_up(answer: Answer) -> BaseException | None:
        """Why a request need not go on: its reader has left, or its time is up."""
        if answer.cancelled:
            return CancelledError()
        try:
            answer.request.check_time()
        except RequestError as error:
            return error
        return None

    def _drop(self, reason_of: Callable[[Answer], BaseException | None]) -> None:
        for answer in list(self._running):
            if (reason := reason_of(answer)) is not None:
                self._end(answer, reason)
        reasons = [(place, reason_of(place[-1])) for place in self._waiting]
        for (*_, answer), reason in reasons:
            if reason is not None:
                answer.conclude(reason)
        if any(reason is not None for _, reason in reasons):
            self._waiting = [place for place, reason in reasons if reason is None]
            heapq.heapify(self._waiting)

    def _end(self, answer: Answer, outcome: Generation | BaseException) -> None:
        """Give back what a request held, then tell its reader in any case."""
        if answer in self._running:
            self._running.remove(answer)
        started, answer.started = answer.started, None
        try:
            if started is not None:
                self._runner.end(started)
        finally:
            answer.conclude(outcome)


def _passes(batch: Pass) -> Sequence[Pass]:
    """What is computed together: all over the pool in one pass, each with copies in its own."""
    paged = [entry for entry in batch if isinstance(entry[1][0], PagedSequence)]
    copied = [[entry] for entry in batch if not isinstance(entry[1][0], PagedSequence)]
    return [paged, *copied] if paged else copied
