"""Reading and writing nodes beside the forward passes: a few threads, no device."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import dataclass, field

from lazyrag.engine.costs import Costs
from lazyrag.engine.host import HostTier
from lazyrag.engine.report import Tier
from lazyrag.errors import StoreError
from lazyrag.prompt.segments import NodeRun
from lazyrag.store import KVStore, LoadFailure, StoredKV
from lazyrag.types import NodeKey

IO_THREADS = 4
AHEAD_BYTES = 2**30
"""KV read for requests that wait in line, at most; beyond it the oldest is dropped."""

logger = logging.getLogger("lazyrag")


@dataclass(slots=True, eq=False)
class Fetch:
    """A node on its way into host memory.

    Attributes:
        tier: where it was found.
        nbytes: of K and V.
        outcome: its raw KV, or why there is none; set by another thread.
    """

    tier: Tier
    nbytes: int
    outcome: Future[StoredKV | LoadFailure] = field(default_factory=Future)


class Fetcher:
    """Brings nodes from the store into host memory, and writes new ones. Thread-safe.

    Args:
        store: on disk.
        host: keeps what was read.
        costs: learns how fast the store is read.
        bytes_per_token: of K and V as stored.
        executor: where reading happens; None = threads of its own, started when first needed.
    """

    def __init__(
        self,
        store: KVStore,
        host: HostTier,
        costs: Costs,
        bytes_per_token: int,
        executor: Executor | None = None,
    ) -> None:
        self._store = store
        self._host = host
        self._costs = costs
        self._bytes_per_token = bytes_per_token
        self._given = executor
        self._own: tuple[int, Executor] | None = None
        self._lock = threading.Lock()
        self._ahead: OrderedDict[NodeKey, Fetch] = OrderedDict()
        self._ahead_bytes = 0
        self._reading_bytes = 0
        self._writing: set[Future[None]] = set()
        self.notify: Callable[[], None] = lambda: None
        """Called, from any thread, whenever a node has arrived."""

    def nbytes(self, run: NodeRun) -> int:
        """Bytes of a node's K and V as stored."""
        return len(run.ids) * self._bytes_per_token

    def expected_s(self, run: NodeRun) -> float:
        """Seconds until a node would be here, behind what is being read already."""
        busy = min(IO_THREADS, 1 + self._reading_bytes // max(1, self.nbytes(run)))
        return self._costs.read.seconds((self.nbytes(run) + self._reading_bytes) / busy)

    def in_reach(self, key: NodeKey) -> bool:
        """Whether the node is in host memory or on its way there."""
        return key in self._host or key in self._ahead

    def touch(self, key: NodeKey) -> None:
        """A request uses the node, wherever it is."""
        self._host.touch(key)

    def ahead(self, run: NodeRun) -> None:
        """Begin to read a node that a waiting request will need."""
        if self.in_reach(run.key):
            return
        fetch = Fetch(Tier.DISK, self.nbytes(run))
        with self._lock:
            if self._ahead.setdefault(run.key, fetch) is not fetch:
                return
            self._ahead_bytes += fetch.nbytes
            while self._ahead_bytes > AHEAD_BYTES:
                _, dropped = self._ahead.popitem(last=False)
                self._ahead_bytes -= dropped.nbytes
                dropped.outcome.cancel()
        try:
            self._read(run, fetch)
        except Exception as error:  # no thread can be started; it is read when it is needed
            logger.warning("node %s is not read ahead: %r", run.key, error)
            self._drop(run.key)

    def fetch(self, run: NodeRun) -> Fetch:
        """A node that a request needs now: here already, on its way, or begun to be read."""
        if (begun := self._drop(run.key)) is not None:
            return begun
        if (kept := self._host.get(run.key)) is not None:
            here = Fetch(Tier.HOST, kept.nbytes)
            here.outcome.set_result(kept)
            return here
        fetch = Fetch(Tier.DISK, self.nbytes(run))
        self._read(run, fetch)
        return fetch

    def keep(self, run: NodeRun, kv: StoredKV) -> StoredKV:
        """Offer a node that was read or computed to host memory; the same KV, perhaps there."""
        bring_s = self._costs.bring_s(len(run.ids), kv.nbytes, in_host_memory=False)
        try:
            return self._host.offer(run.key, kv, bring_s)
        except (OSError, MemoryError) as error:
            logger.warning("node %s is not kept in host memory: %r", run.key, error)
            return kv

    def forget(self, key: NodeKey) -> None:
        """The node was released: nothing of it is kept or awaited."""
        if (begun := self._drop(key)) is not None:
            begun.outcome.cancel()
        self._host.forget(key)

    def rest(self) -> None:
        """Nobody waits any more: drop what was read ahead and not fetched."""
        with self._lock:
            for fetch in self._ahead.values():
                fetch.outcome.cancel()
            self._ahead.clear()
            self._ahead_bytes = 0

    def settled(self, key: NodeKey) -> None:
        """The node is on the device: nobody needs it read ahead."""
        self._drop(key)

    def _drop(self, key: NodeKey) -> Fetch | None:
        """Take a node out of what is read ahead."""
        with self._lock:
            begun = self._ahead.pop(key, None)
            if begun is not None:
                self._ahead_bytes -= begun.nbytes
            return begun

    def write(self, job: Callable[[], None]) -> Future[None]:
        """Run ``job``, which stores a node, beside the forward passes; see `flush`."""
        try:
            future = self._executor().submit(job)
        except RuntimeError:  # no thread can be started
            future = Future()
            job()
            future.set_result(None)
        with self._lock:
            self._writing.add(future)
        future.add_done_callback(self._written)
        return future

    def flush(self) -> None:
        """Wait until what was to be stored is stored."""
        while True:
            with self._lock:
                future = next(iter(self._writing), None)
            if future is None:
                return
            future.exception()
            self._written(future)

    def close(self) -> None:
        """Finish what is being written and end the threads."""
        self.flush()
        own, self._own = self._own, None
        if own is not None and own[0] == os.getpid():
            own[1].shutdown(wait=True, cancel_futures=True)

    def _written(self, future: Future[None]) -> None:
        with self._lock:
            known = future in self._writing
            self._writing.discard(future)
        if known and (error := future.exception()) is not None:
            logger.warning("a node was not stored: %r", error)

    def _executor(self) -> Executor:
        if self._given is not None:
            return self._given
        with self._lock:
            if self._own is None or self._own[0] != os.getpid():
                if self._own is not None:  # a fork leaves threads behind, and what they were at
                    self._ahead.clear()
                    self._writing.clear()
                    self._ahead_bytes = self._reading_bytes = 0
                pool = ThreadPoolExecutor(IO_THREADS, thread_name_prefix="lazyrag-io")
                self._own = (os.getpid(), pool)
            return self._own[1]

    def _read(self, run: NodeRun, fetch: Fetch) -> None:
        with self._lock:
            self._reading_bytes += fetch.nbytes
        try:
            self._executor().submit(self._run, run, fetch)
        except BaseException:
            with self._lock:
                self._reading_bytes -= fetch.nbytes
            raise

    def _run(self, run: NodeRun, fetch: Fetch) -> None:
        try:
            if fetch.outcome.set_running_or_notify_cancel():
                fetch.outcome.set_result(self.load(run))
        except BaseException as error:
            fetch.outcome.set_exception(error)
        finally:
            with self._lock:
                self._reading_bytes -= fetch.nbytes
            self.notify()

    def load(self, run: NodeRun) -> StoredKV | LoadFailure:
        """Raw KV, checked, in this thread; whatever goes wrong is a `LoadFailure`."""
        started = time.perf_counter()
        try:
            stored = self._store.load(run.key, run.ids)
        except (StoreError, OSError, MemoryError) as error:
            logger.warning("node %s is computed anew: %r", run.key, error)
            return LoadFailure.UNREADABLE
        if isinstance(stored, StoredKV):
            self._costs.was_read(stored.nbytes, time.perf_counter() - started)
            return self.keep(run, stored)
        return stored
