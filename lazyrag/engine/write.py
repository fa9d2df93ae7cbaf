"""Storing computed nodes beside the forward passes: one thread, a bounded line."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import dataclass, field

from lazyrag.types import NodeKey

BACKLOG_BYTES = 2**30
"""KV that waits to be stored; above it nothing more is computed."""

logger = logging.getLogger("lazyrag")


@dataclass(slots=True, eq=False)
class Write:
    """A node on its way into the store.

    Attributes:
        key: which node.
        nbytes: of K and V.
        done: set when it is stored, or could not be.
        released: whether it was released meanwhile.
    """

    key: NodeKey
    nbytes: int
    done: Future[None] = field(default_factory=Future)
    released: bool = False


class Writer:
    """Runs the jobs that store nodes, one after the other. Thread-safe.

    Args:
        notify: called, from any thread, whenever one has ended.
    """

    def __init__(self, notify: Callable[[], None] = lambda: None) -> None:
        self.notify = notify
        self._start_anew()

    def _start_anew(self) -> None:
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._executor: Executor | None = None
        self._waiting: set[Write] = set()

    def _check_process(self) -> None:
        """A fork leaves the thread behind, and what it was at."""
        if self._pid != os.getpid():
            self._start_anew()

    @property
    def full(self) -> bool:
        """Whether so much waits that nothing more should be computed."""
        with self._lock:
            return sum(one.nbytes for one in self._waiting) > BACKLOG_BYTES

    def write(self, key: NodeKey, nbytes: int, job: Callable[[Write], None]) -> Write:
        """Run ``job`` in the thread; without one that can be started, here."""
        self._check_process()
        write = Write(key, nbytes)
        with self._lock:
            self._waiting.add(write)
        try:
            self._thread().submit(self._run, write, job)
        except RuntimeError:
            self._run(write, job)
        return write

    def forget(self, key: NodeKey) -> None:
        """The node was released."""
        self._check_process()
        with self._lock:
            for write in self._waiting:
                if write.key == key:
                    write.released = True

    def close(self) -> None:
        """Finish what is in line and end the thread."""
        self._check_process()
        executor, self._executor = self._executor, None
        if executor is not None:
            executor.shutdown(wait=True)

    def _thread(self) -> Executor:
        with self._lock:
            if self._executor is None:
                self._executor = ThreadPoolExecutor(1, thread_name_prefix="lazyrag-write")
            return self._executor

    def _run(self, write: Write, job: Callable[[Write], None]) -> None:
        if not write.done.set_running_or_notify_cancel():
            return
        try:
            job(write)
        except Exception as error:
            logger.warning("node %s is used but not stored: %r", write.key, error)
        with self._lock:
            self._waiting.discard(write)
        write.done.set_result(None)
        self.notify()
