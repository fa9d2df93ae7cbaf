"""The one thread that owns the device: everything that touches model or pool happens in it."""

from __future__ import annotations

import atexit
import logging
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, TypeVar

import torch

from lazyrag.engine.answer import Answer, Pinning, Scoring, Task
from lazyrag.engine.calls import Calls
from lazyrag.engine.generation import Deliver
from lazyrag.engine.looking import Climbing, Looking
from lazyrag.engine.metrics import Metrics
from lazyrag.engine.request import Request
from lazyrag.engine.runner import Runner
from lazyrag.engine.scheduler import READ_AHEAD, Scheduler
from lazyrag.errors import LazyRagError, RequestError
from lazyrag.prompt.segments import PlacedPrompt

T = TypeVar("T")

STALLED_S = 0.02
"""Seconds between looks at time limits while every request waits for nodes that are being read."""
IDLE_S = 5.0
"""Seconds without work after which the thread ends; the next request starts another one."""
EXIT_S = 10.0
"""Seconds at the program's end that threads have to leave their calls of the engine, at most."""

logger = logging.getLogger("lazyrag")


class Worker:
    """Runs requests together and jobs between their forward passes. Thread-safe.

    An error of a request reaches its reader. One of the worker itself reaches every reader and
    every waiting job at once; the next request is served.
    """

    def __init__(
        self, runner: Runner, metrics: Metrics | None = None, calls: Calls | None = None
    ) -> None:
        self._runner = runner
        self._metrics = metrics or Metrics()
        self._calls = calls or Calls()
        self._scheduler = Scheduler(runner)
        self._pid = os.getpid()
        self._woken = threading.Condition()
        self._arrived: deque[Task] = deque()
        self._stalled = False
        self._jobs: deque[tuple[Callable[[], Any], Future[Any]]] = deque()
        self._thread: threading.Thread | None = None
        self._closed = False
        self._at_exit = partial(_close_at_exit, weakref.ref(self))
        atexit.register(self._at_exit)

    def submit(self, request: Request, deliver: Deliver) -> Task:
        """Put a request in line; ``deliver`` is called in threads of the engine.

        Raises:
            RequestError: the worker is closed.
        """
        return self._put_climbing(
            request,
            deliver,
            lambda made: Answer(made, self._runner.model, deliver, self._metrics),
        )

    def score(self, request: Request, answer: Sequence[int], whole: bool, deliver: Deliver) -> Task:
        """Put a request in line whose answer is given; see `Scoring`.

        Raises:
            RequestError: the worker is closed.
        """
        return self._put_climbing(
            request,
            deliver,
            lambda made: Scoring(made, answer, whole, deliver, self._metrics),
        )

    def pin(self, request: Request, deliver: Deliver) -> Task:
        """Put nodes in line that are to stay in the pool; see `Pinning`.

        Raises:
            RequestError: the worker is closed.
        """
        return self._put(Pinning(request, self._runner, deliver, self._metrics))

    def look(
        self, request: Request, prompt: PlacedPrompt, layers: Collection[int], deliver: Deliver
    ) -> Task:
        """Put a look at a prompt in line that nothing follows from; see `Looking`.

        Raises:
            RequestError: the worker is closed.
        """
        return self._put(Looking(request, prompt, layers, self._runner, deliver, self._metrics))

    def _put_climbing(
        self, request: Request, deliver: Deliver, make: Callable[[Request], Task]
    ) -> Task:
        """Put a request in line, behind a look at its prompt if it has to climb yet."""
        if request.climb is None:
            return self._put(make(request))
        return self._put(
            Climbing(request, self._runner, deliver, self._metrics, make, self._put_following)
        )

    def _put_following(self, task: Task) -> None:
        """Put what follows from another task in line; its nodes are here."""
        with self._woken:
            self._check_open()
            self._wake()
            self._arrived.append(task)

    def _put(self, task: Task) -> Task:
        self._check_process()
        with self._woken:
            self._check_open()
            behind = sum(self.line)
        if behind < READ_AHEAD:
            self._runner.prefetch(task.request)  # at once: a pass may be under way
        with self._woken:
            self._check_open()
            self._wake()
            self._arrived.append(task)
        return task

    def _check_process(self) -> None:
        """A fork leaves the thread behind; what it was at is nobody's here."""
        if self._pid != os.getpid():
            self._pid = os.getpid()
            self._woken = threading.Condition()
            self._thread = None
            self._arrived.clear()
            self._jobs.clear()
            self._scheduler.fail_all(RequestError("this process was forked from the engine's."))

    def node_arrived(self) -> None:
        """A node was read: requests that wait for it may go on. From any thread."""
        with self._woken:
            self._stalled = False
            self._woken.notify_all()

    def call(self, job: Callable[[], T], /) -> T:
        """Run ``job`` in the worker's thread, between two forward passes, and wait for it.

        Raises:
            RequestError: the worker is closed.
        """
        if threading.current_thread() is self._thread:
            return job()
        self._check_process()
        outcome: Future[T] = Future()
        with self._woken:
            self._check_open()
            self._wake()
            self._jobs.append((job, outcome))
        return outcome.result()

    @property
    def line(self) -> tuple[int, int, int]:
        """Requests that wait for room, that wait for their nodes, and that run; any thread."""
        scheduler = self._scheduler
        return (len(self._arrived) + scheduler.waiting, *scheduler.running)

    def close(self) -> None:
        """End what runs and waits, and the thread. Safe to call more than once."""
        atexit.unregister(self._at_exit)
        with self._woken:
            self._closed = True
            thread = self._thread
            self._woken.notify_all()
        if thread is not None and thread is not threading.current_thread():
            thread.join()

    def _check_open(self) -> None:
        if self._closed:
            raise RequestError("this engine is closed.")

    def _wake(self) -> None:
        """Have a thread; nothing is put in line when none can be started."""
        if self._thread is None or not self._thread.is_alive():
            thread = threading.Thread(target=self._run, name="lazyrag-worker", daemon=True)
            thread.start()
            self._thread = thread
        self._woken.notify_all()

    def _run(self) -> None:
        with torch.inference_mode():
            while self._wait():
                try:
                    self._turn()
                except BaseException as error:
                    logger.exception("the engine's worker failed")
                    failure = LazyRagError(f"the engine's worker failed: {error}")
                    failure.__cause__ = error
                    self._end_all(failure)
        # Not after an idle end: another thread may own the scheduler by now.
        if threading.current_thread() is self._thread:
            over = SystemExit() if self._calls.ending else RequestError("this engine was closed.")
            self._end_all(over)

    def _wait(self) -> bool:
        """Wait for work; False: there is none, or the worker was closed, and the thread ends."""
        with self._woken:
            if self._scheduler.idle and not self._woken.wait_for(self._news, timeout=IDLE_S):
                self._thread = None
                self._runner.rest()
                return False
            if self._stalled:
                self._woken.wait_for(lambda: self._news() or not self._stalled, timeout=STALLED_S)
            return not self._closed

    def _news(self) -> bool:
        return bool(self._closed or self._arrived or self._jobs)

    def _turn(self) -> None:
        """Take what has arrived, one job, one step."""
        with self._woken:
            self._stalled = True  # unless a node arrives from here on, or the step finds work
            while self._arrived:
                self._scheduler.add(self._arrived.popleft())
            job, outcome = self._jobs.popleft() if self._jobs else (None, None)
        if job is not None and outcome is not None:
            try:
                outcome.set_result(job())
            except BaseException as error:
                outcome.set_exception(error)
        if self._scheduler.step():
            self._stalled = False

    def _end_all(self, error: BaseException) -> None:
        with self._woken:
            arrived, self._arrived = self._arrived, deque()
            jobs, self._jobs = self._jobs, deque()
        self._scheduler.fail_all(error)
        for task in arrived:
            task.conclude(error)
        for _, outcome in jobs:
            outcome.set_exception(error)


def _close_at_exit(worker: weakref.ref[Worker]) -> None:
    """Of an engine that nobody has closed; see `lazyrag.engine.calls`."""
    if (here := worker()) is not None and here._pid == os.getpid():
        here._calls.end()
        here.close()
        here._calls.wait(EXIT_S)
