"""Storing computed nodes beside everything else: nobody waits for it but who asks to.

A node is kept in host memory first, where the next request finds it, and its file is written from
there.
"""

from __future__ import annotations

import logging
import os
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field

from lazyrag.engine.host import HostTier
from lazyrag.engine.metrics import Metrics
from lazyrag.store import StoredKV
from lazyrag.types import NodeKey

KEEP_THREADS = 2
WRITE_THREADS = 4

logger = logging.getLogger("lazyrag")


@dataclass(slots=True, eq=False)
class Write:
    """A node on its way into the store.

    Attributes:
        key: which node.
        kv: raw; in memory of the host tier if that keeps it.
        bring_s: seconds to bring it back into host memory.
        put: stores it; may find that it was released.
        done: set when it is stored, or will not be.
        released: whether it was released meanwhile.
        begun: how many of its two steps.
    """

    key: NodeKey
    kv: StoredKV
    bring_s: float
    put: Callable[[Write], None]
    done: Future[None] = field(default_factory=Future)
    released: bool = False
    begun: int = 0


class Writer:
    """A line of nodes, each kept in host memory and then stored, by a few threads. Thread-safe.

    Args:
        host: keeps nodes.
        most_bytes: of KV in line that host memory does not hold anyway; above it no more is taken.
        metrics: counts what is not stored.

    Attributes:
        released: nodes that were found to be released when they should have been stored.
    """

    def __init__(self, host: HostTier, most_bytes: int, metrics: Metrics) -> None:
        self._host = host
        self._most_bytes = most_bytes
        self._metrics = metrics
        self._start_anew()

    def _start_anew(self) -> None:
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._executors: dict[int, Executor] = {}  # by their number of threads
        self._waiting: set[Write] = set()
        self._was_full = False
        self.released: deque[NodeKey] = deque()

    def _check_process(self) -> None:
        """A fork leaves threads behind, and what they were at."""
        if self._pid != os.getpid():
            self._start_anew()

    @property
    def nbytes(self) -> int:
        """KV that is not stored yet."""
        with self._lock:
            return sum(one.kv.nbytes for one in self._waiting)

    def write(
        self, key: NodeKey, kv: StoredKV, bring_s: float, put: Callable[[Write], None]
    ) -> bool:
        """Have a node kept and stored; one that is in line already has its place.

        Args:
            key, kv, bring_s, put: see `Write`; ``put`` is called in another thread.

        Returns:
            False when the line is full: it is neither kept nor stored.
        """
        self._check_process()
        new = Write(key, kv, bring_s, put)
        with self._lock:
            if any(one.key == key and not one.released for one in self._waiting):
                return True
            held = (one for one in self._waiting if self._host.get(one.key) is not one.kv)
            full = sum(one.kv.nbytes for one in held) > self._most_bytes
            if not full:
                self._waiting.add(new)
            tell, self._was_full = full and not self._was_full, self._was_full or full
        if full:
            self._metrics.not_stored()
        else:
            self._submit(KEEP_THREADS, self._keep, new)
        if tell:
            logger.warning(
                "nodes are computed faster than they are stored: with more than %d MB in line they "
                "are used but not stored. From now on such nodes are only counted (unstored_nodes "
                "of Engine.stats()).",
                self._most_bytes // 10**6,
            )
        return not full

    def flush(self) -> None:
        """Return when everything that is in line now is stored, or could not be."""
        self._check_process()
        with self._lock:
            waiting = [write.done for write in self._waiting]
        wait(waiting)

    def forget(self, key: NodeKey) -> None:
        """The node was released; to be called before the host tier forgets it."""
        self._check_process()
        with self._lock:
            for write in self._waiting:
                if write.key == key:
                    write.released = True

    def close(self) -> None:
        """Finish what is in line and end the threads."""
        self._check_process()
        for threads in (KEEP_THREADS, WRITE_THREADS):  # what is kept goes on to be written
            with self._lock:
                executor = self._executors.pop(threads, None)
            if executor is not None:
                executor.shutdown(wait=True)

    def _submit(self, threads: int, step: Callable[[Write], None], write: Write) -> None:
        try:
            self._executor(threads).submit(step, write)
        except RuntimeError:  # no thread can be started: here; the job may be in line all the same
            step(write)

    def _executor(self, threads: int) -> Executor:
        with self._lock:
            if threads not in self._executors:
                pool = ThreadPoolExecutor(threads, thread_name_prefix="lazyrag-write")
                self._executors[threads] = pool
            return self._executors[threads]

    def _begins(self, write: Write, step: int) -> bool:
        """Whether nobody else has begun this step."""
        with self._lock:
            begins, write.begun = write.begun < step, max(write.begun, step)
            return begins

    def _keep(self, write: Write) -> None:
        if not self._begins(write, 1):
            return
        try:
            write.kv = self._host.keep(write.key, write.kv, write.bring_s)
        except Exception as error:
            logger.warning("node %s is not kept in host memory: %r", write.key, error)
        self._forget_released(write)
        self._submit(WRITE_THREADS, self._store, write)

    def _store(self, write: Write) -> None:
        if not self._begins(write, 2):
            return
        try:
            if not write.released:
                write.put(write)
        except Exception as error:
            self._metrics.not_stored()
            logger.warning("node %s is used but not stored: %r", write.key, error)
        if self._forget_released(write):
            self.released.append(write.key)
        with self._lock:
            self._waiting.discard(write)
        write.done.set_result(None)

    def _forget_released(self, write: Write) -> bool:
        """`forget` marks it, then the host tier is cleared: one of the two does."""
        if write.released:
            self._host.forget(write.key)
        return write.released
