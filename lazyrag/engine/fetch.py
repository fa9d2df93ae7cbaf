"""Reading nodes beside the forward passes: a few threads, no device.

What an admitted request needs is read by threads that do nothing else; what a waiting request will
need is read ahead by others, within a bound, in the order in which requests are admitted.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import Executor, Future, InvalidStateError, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field

from lazyrag.engine.costs import Costs
from lazyrag.engine.host import HostTier
from lazyrag.engine.report import Tier
from lazyrag.prompt.segments import NodeRun
from lazyrag.store import KVStore, LoadFailure, StoredKV
from lazyrag.types import NodeKey

READ_THREADS = 4
AHEAD_THREADS = 2
AHEAD_BYTES = 2**30
"""KV read for requests that wait in line, at most."""

logger = logging.getLogger("lazyrag")


@dataclass(slots=True, eq=False)
class Fetch:
    """A node on its way into host memory.

    Attributes:
        run: which node.
        tier: where it was found.
        nbytes: of K and V.
        outcome: its raw KV, or why there is none; set by another thread, exactly once.
        released: whether it was released meanwhile; then it is not kept.
    """

    run: NodeRun
    tier: Tier
    nbytes: int
    outcome: Future[StoredKV | LoadFailure] = field(default_factory=Future)
    released: bool = False


class Fetcher:
    """Brings nodes from the store into host memory. Thread-safe.

    Args:
        store: on disk.
        host: keeps what was read.
        costs: learns how fast the store is read.
        bytes_per_token: of K and V as stored.
        notify: called, from any thread, whenever a node has arrived.
    """

    def __init__(
        self,
        store: KVStore,
        host: HostTier,
        costs: Costs,
        bytes_per_token: int,
        notify: Callable[[], None] = lambda: None,
    ) -> None:
        self._store = store
        self._host = host
        self._costs = costs
        self._bytes_per_token = bytes_per_token
        self.notify = notify
        self._start_anew()

    def _start_anew(self) -> None:
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._executors: dict[int, Executor] = {}  # by their number of threads
        self._reading: set[Fetch] = set()
        self._ahead: dict[NodeKey, Fetch] = {}
        self._closed = False

    def _check_process(self) -> None:
        """A fork leaves threads behind, and what they were at."""
        if self._pid != os.getpid():
            self._start_anew()

    def nbytes(self, run: NodeRun) -> int:
        """Bytes of a node's K and V as stored."""
        return len(run.ids) * self._bytes_per_token

    def expected_s(self, run: NodeRun) -> float:
        """Seconds until a node would be here, beside what is being read already."""
        self._check_process()
        with self._lock:
            reading = [fetch.nbytes for fetch in self._reading]
        threads = min(READ_THREADS, 1 + len(reading))
        return self._costs.read.seconds((self.nbytes(run) + sum(reading)) / threads)

    def in_reach(self, key: NodeKey) -> bool:
        """Whether the node is in host memory or on its way there."""
        return key in self._host or key in self._ahead

    def touch(self, key: NodeKey) -> None:
        """A request uses the node, wherever it is."""
        self._host.touch(key)

    def ahead(self, run: NodeRun) -> bool:
        """Begin to read a node that a waiting request will need.

        Returns:
            False when there is no room for more.
        """
        self._check_process()
        if self.in_reach(run.key):
            return True
        fetch = Fetch(run, Tier.DISK, self.nbytes(run))
        with self._lock:
            held = sum(one.nbytes for one in self._ahead.values())
            if self._closed or (held and held + fetch.nbytes > AHEAD_BYTES):
                return False
            if self._ahead.setdefault(run.key, fetch) is not fetch:
                return True
        self._read(fetch, AHEAD_THREADS)
        return True

    def fetch(self, run: NodeRun) -> Fetch:
        """A node that a request needs now: here already, on its way, or begun to be read."""
        self._check_process()
        begun = self._take_ahead(run.key)
        if begun is not None and not begun.outcome.cancel():  # else it is still in line: read now
            return begun
        if (kept := self._host.get(run.key)) is not None:
            here = Fetch(run, Tier.HOST, kept.nbytes)
            here.outcome.set_result(kept)
            return here
        fetch = Fetch(run, Tier.DISK, self.nbytes(run))
        self._read(fetch, READ_THREADS)
        return fetch

    def settled(self, key: NodeKey) -> None:
        """The node is on the device: nobody needs it read ahead."""
        if key in self._ahead and (begun := self._take_ahead(key)) is not None:
            begun.outcome.cancel()

    def rest(self) -> None:
        """Nobody waits any more: drop what was read ahead and not fetched."""
        for key in list(self._ahead):
            self.settled(key)

    def forget(self, key: NodeKey) -> None:
        """The node was released: nothing of it is kept, now or when it has been read."""
        self._check_process()
        self.settled(key)
        with self._lock:
            for fetch in self._reading:
                if fetch.run.key == key:
                    fetch.released = True
        self._host.forget(key)

    def load(self, run: NodeRun) -> StoredKV | LoadFailure:
        """Raw KV, checked, in this thread; whatever goes wrong is a `LoadFailure`."""
        started = time.perf_counter()
        try:
            stored = self._store.load(run.key, run.ids, run.behind)
        except Exception as error:
            logger.warning("node %s is computed anew: %r", run.key, error)
            return LoadFailure.UNREADABLE
        if isinstance(stored, StoredKV):
            self._costs.was_read(stored.nbytes, time.perf_counter() - started)
        return stored

    def close(self) -> None:
        """End the threads when what they read is read."""
        self._check_process()
        with self._lock:
            self._closed = True
            executors, self._executors = self._executors, {}
        for executor in executors.values():
            executor.shutdown(wait=True, cancel_futures=True)

    def _take_ahead(self, key: NodeKey) -> Fetch | None:
        with self._lock:
            return self._ahead.pop(key, None)

    def _read(self, fetch: Fetch, threads: int) -> None:
        with self._lock:
            self._reading.add(fetch)
        try:
            self._executor(threads).submit(self._run, fetch)
        except Exception as error:  # no thread can be started; the job may be in line all the same
            logger.warning("node %s is computed anew: %r", fetch.run.key, error)
            self._end(fetch, LoadFailure.UNREADABLE)

    def _executor(self, threads: int) -> Executor:
        with self._lock:
            if self._closed:
                raise RuntimeError("the engine is closed")
            if threads not in self._executors:
                pool = ThreadPoolExecutor(threads, thread_name_prefix="lazyrag-read")
                self._executors[threads] = pool
            return self._executors[threads]

    def _run(self, fetch: Fetch) -> None:
        if fetch.outcome.done() or not fetch.outcome.set_running_or_notify_cancel():
            self._end(fetch, LoadFailure.UNREADABLE)
            return
        outcome = self.load(fetch.run)
        if isinstance(outcome, StoredKV):
            run, nbytes = fetch.run, outcome.nbytes
            bring_s = self._costs.bring_s(run.tokens_to_compute, nbytes, in_host_memory=False)
            outcome = self._host.keep(run.key, outcome, bring_s)
            if fetch.released:  # `forget` marks it, then clears the host tier: one of us does
                self._host.forget(run.key)
        self._end(fetch, outcome)

    def _end(self, fetch: Fetch, outcome: StoredKV | LoadFailure) -> None:
        with self._lock:
            self._reading.discard(fetch)
        with suppress(InvalidStateError):  # it was cancelled, or has ended
            fetch.outcome.set_result(outcome)
        self.notify()
