"""Bringing a prompt's nodes into the pool: resident, from host memory, from disk, or computed now.

Never wrong KV: whatever cannot be read for certain is computed anew, and the report says so.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent import futures
from concurrent.futures import Future
from dataclasses import dataclass, field

import torch
from lazyrag_kernels.attention import Pages
from lazyrag_kernels.kv_write import write_kv
from lazyrag_kernels.rope import cos_sin
from torch import Tensor

from lazyrag.engine.costs import Costs
from lazyrag.engine.encode import Encoder
from lazyrag.engine.fetch import Fetch, Fetcher
from lazyrag.engine.library import Library
from lazyrag.engine.live import LiveKey
from lazyrag.engine.pool import PageKey, PagePool, Resident
from lazyrag.engine.report import Origin, Reason, Tier
from lazyrag.engine.send import Sender, Sent
from lazyrag.errors import StoreError
from lazyrag.model.geometry import Geometry
from lazyrag.prompt.segments import NodeRun, NodeSource
from lazyrag.store import KVStore, LoadFailure, NewNode, StoredKV
from lazyrag.types import NodeKey

logger = logging.getLogger("lazyrag")


class NodeComputer:
    """Computes nodes that the store does not have, and stores them.

    Args:
        store: on disk.
        encoding: digest of the encoding.
        encoder: computes K and V.
        library: makes a text given with a request findable once it is stored.
        fetcher: writes beside the forward passes.
    """

    def __init__(
        self,
        store: KVStore,
        encoding: bytes,
        encoder: Encoder,
        library: Library,
        fetcher: Fetcher,
    ) -> None:
        self._store = store
        self._encoding = encoding
        self._encoder = encoder
        self._library = library
        self._fetcher = fetcher

    def stored(self, key: NodeKey) -> bool:
        """Whether the store lists the node."""
        try:
            return self._store.has(key)
        except StoreError:
            return False

    def compute(self, run: NodeRun) -> tuple[StoredKV, Future[None]]:
        """Raw KV of a node, and when it is stored: that is done beside what follows.

        Raises:
            ModelError: a value does not fit the KV dtype.
        """
        (kv,) = self._encoder.encode([run.ids])
        return kv, self._fetcher.write(lambda: self._store_node(run, kv))

    def _store_node(self, run: NodeRun, kv: StoredKV) -> None:
        try:
            self._store.publish(self._encoding, [NewNode(run.key, kv, run.text)])
            if run.text is not None and run.source is NodeSource.GIVEN:
                self._library.register([self._library.describe(run.text, None, alias=False)])
            self._store.sweep([run.key])  # its text may have been released since it was found
        except (StoreError, OSError, MemoryError) as error:
            logger.warning("node %s is used but not stored: %r", run.key, error)
        self._fetcher.keep(run, kv)


def reason_of(failure: LoadFailure, source: NodeSource) -> Reason:
    """Why a node was computed, from why it could not be read."""
    if failure is LoadFailure.ABSENT:
        return {
            NodeSource.INGESTED: Reason.MISSING,
            NodeSource.ALIAS: Reason.FIRST_USE,
            NodeSource.GIVEN: Reason.NOT_STORED,
        }[source]
    return {
        LoadFailure.MISSING: Reason.MISSING,
        LoadFailure.DAMAGED: Reason.DAMAGED,
        LoadFailure.UNREADABLE: Reason.UNREADABLE,
    }[failure]


@dataclass(slots=True, eq=False)
class Arrival:
    """A node that requests wait for: it is read, or computed for ``reason``, then sent.

    Attributes:
        run: which node.
        fetch: on its way from the store or host memory; None once it is to be computed.
        reason: why it is to be computed.
        sent: on its way to the device.
        stored: done when a node that was computed is in the store.
        origin: where it came from, once its pages are filled.
        error: why it cannot be had at all.
    """

    run: NodeRun
    fetch: Fetch | None = None
    reason: Reason | None = None
    sent: Sent | None = None
    stored: Future[None] | None = None
    origin: Origin | None = None
    error: BaseException | None = None


@dataclass(slots=True, eq=False)
class Placed:
    """What a request holds in the pool.

    Attributes:
        nodes: resident, all in use; those of ``arriving`` have no KV yet.
        resident: where those that were here came from.
        arriving: the others.
        live_names: of the leading live pages that were computed before.
        live_pages: of all live text, the shared ones first.
    """

    nodes: dict[NodeKey, Resident] = field(default_factory=dict)
    resident: dict[NodeKey, Origin] = field(default_factory=dict)
    arriving: dict[NodeKey, Arrival] = field(default_factory=dict)
    live_names: list[LiveKey] = field(default_factory=list)
    live_pages: Pages = ()

    @property
    def ready(self) -> bool:
        """Whether all KV is in place."""
        return all(arrival.origin is not None for arrival in self.arriving.values())

    @property
    def error(self) -> BaseException | None:
        """Why it never will be."""
        return next((a.error for a in self.arriving.values() if a.error is not None), None)

    @property
    def origins(self) -> dict[NodeKey, Origin]:
        """Where each node came from, once all are here."""
        arrived = {key: a.origin for key, a in self.arriving.items() if a.origin is not None}
        return {**self.resident, **arrived}

    def when_stored(self, then: Callable[[], None]) -> None:
        """Call ``then`` once every node that was computed is in the store; from any thread."""
        _after([a.stored for a in self.arriving.values() if a.stored is not None], then)


def _after(waits: Sequence[Future[None]], then: Callable[[], None]) -> None:
    if waits:
        waits[0].add_done_callback(lambda _: _after(waits[1:], then))
    else:
        then()


class NodePlacer:
    """Makes nodes resident: raw keys are rotated at their local position, once, into pages.

    A node is read once however many requests wait for it. Not thread-safe: the worker owns it.
    """

    def __init__(
        self,
        pool: PagePool,
        geometry: Geometry,
        fetcher: Fetcher,
        computer: NodeComputer,
        costs: Costs,
    ) -> None:
        self._pool = pool
        self._geometry = geometry
        self._fetcher = fetcher
        self._computer = computer
        self._costs = costs
        self._sender = Sender(pool.k.device, costs)
        self._arriving: dict[NodeKey, Arrival] = {}

    @property
    def sending(self) -> bool:
        """Whether a node is on its way to the device."""
        return any(arrival.sent is not None for arrival in self._arriving.values())

    def acquire(
        self, runs: Iterable[NodeRun], live_names: Sequence[LiveKey], live_tokens: int
    ) -> Placed | None:
        """Pages for everything a request needs, all marked in use; what is missing is on its way.

        Args:
            runs: the nodes; one may occur more than once.
            live_names: of the leading full pages of live text, which may have been computed before.
            live_tokens: to make room for, those included.

        Returns:
            None, with nothing held, when the pool has no room.
        """
        pool = self._pool
        placed = Placed()
        missing: dict[NodeKey, NodeRun] = {}
        complete = False
        try:
            for name in live_names:  # what is here first, so that making room cannot evict it
                if (page := pool.acquire(name)) is None:
                    break
                placed.live_names.append(name)
                placed.live_pages += page.pages
            for run in runs:
                if run.key in placed.nodes or run.key in missing:
                    continue
                if (resident := pool.acquire(run.key)) is None:
                    missing[run.key] = run
                    continue
                placed.nodes[run.key] = resident
                if (arrival := self._arriving.get(run.key)) is not None:
                    placed.arriving[run.key] = arrival
                else:
                    nbytes = resident.tokens * self._geometry.kv_bytes_per_token(pool.k.dtype)
                    placed.resident[run.key] = Origin(Tier.DEVICE, nbytes)
            own_tokens = live_tokens - len(placed.live_names) * pool.page_size
            tokens = (own_tokens, *(len(run.ids) for run in missing.values()))
            if sum(map(pool.pages_for, tokens)) > pool.free_pages + pool.evictable_pages:
                return None
            for run in missing.values():
                pages = pool.allocate(len(run.ids))
                assert pages is not None
                placed.nodes[run.key] = pool.admit(run.key, pages, len(run.ids), ready=False)
                placed.arriving[run.key] = self._arriving[run.key] = Arrival(run)
            own_pages = pool.allocate(own_tokens)
            assert own_pages is not None
            placed.live_pages += own_pages
            complete = True
        finally:
            if not complete:
                self.leave(placed)
        for key in missing:
            self._begin(placed.arriving[key])
        self.touch(placed)
        return placed

    def touch(self, placed: Placed) -> None:
        """Count one use of everything a request holds."""
        keys: list[PageKey] = [*placed.nodes, *placed.live_names]
        self._pool.touch(keys)
        for key in placed.nodes:
            self._fetcher.touch(key)

    def leave(self, placed: Placed) -> None:
        """A request needs its nodes no more; one that is still awaited by nobody is given up."""
        for key in placed.nodes:
            self._pool.leave(key)
            if key not in self._pool:
                self._arriving.pop(key, None)
        for name in reversed(placed.live_names):  # the first pages serve the most requests
            self._pool.leave(name)

    def ahead(self, run: NodeRun) -> None:
        """Begin to read a node that a waiting request will need; from any thread."""
        if run.key not in self._pool and not self._computing_is_faster(run):
            self._fetcher.ahead(run)

    def _begin(self, arrival: Arrival) -> None:
        """Have a node read, or computed where that is faster by this machine's own speeds."""
        run = arrival.run
        try:
            if self._computing_is_faster(run) and self._computer.stored(run.key):
                self._costs.read.hope()
                arrival.reason = Reason.FASTER
            else:
                arrival.fetch = self._fetcher.fetch(run)
        except Exception as error:  # no thread can be started, say
            logger.warning("node %s is computed anew: %r", run.key, error)
            arrival.reason = Reason.UNREADABLE

    def _computing_is_faster(self, run: NodeRun) -> bool:
        if self._fetcher.in_reach(run.key):
            return False
        before = sum(len(a.run.ids) for a in list(self._arriving.values()) if a.reason)
        read_s = self._fetcher.expected_s(run)
        return self._costs.encoding_is_faster(len(run.ids), before, read_s)

    def place(self, until: float) -> bool:
        """Send and write what has been read, at least one node, others until a point in time.

        Args:
            until: of ``time.perf_counter``.

        Returns:
            Whether anything came of it.
        """
        moved = False
        for arrival in list(self._arriving.values()):
            if arrival.error is None and self._advance(arrival):
                moved = True
                if time.perf_counter() > until:
                    break
        return moved

    def compute_next(self) -> bool:
        """Compute the node that waits longest for it; False when there is none."""
        arrival = next((a for a in self._arriving.values() if a.reason and not a.sent), None)
        if arrival is None:
            return False
        try:
            kv, arrival.stored = self._computer.compute(arrival.run)
            arrival.sent = self._sender.send(kv)
            arrival.sent.wait()
            self._advance(arrival)
        except Exception as error:
            self._fail(arrival, error)
        return True

    def wait_for_read(self) -> None:
        """Return when a node that is being read is here."""
        reading = [a.fetch.outcome for a in self._arriving.values() if a.fetch and not a.sent]
        futures.wait(reading, return_when=futures.FIRST_COMPLETED)

    def wait_for_sent(self) -> None:
        """Return when a node that is on its way to the device is there."""
        for arrival in self._arriving.values():
            if arrival.sent is not None:
                arrival.sent.wait()
                return

    def _advance(self, arrival: Arrival) -> bool:
        """One step of a node's way: read, sent, written; False when there is nothing to do yet."""
        try:
            if arrival.sent is None:
                if arrival.fetch is None or not arrival.fetch.outcome.done():
                    return False
                outcome = arrival.fetch.outcome.result()
                if isinstance(outcome, LoadFailure):
                    arrival.reason = reason_of(outcome, arrival.run.source)
                    arrival.fetch = None
                    return True
                arrival.sent = self._sender.send(outcome)
            if not arrival.sent.here:
                return False
            self._write(arrival, arrival.sent)
        except Exception as error:
            self._fail(arrival, error)
        return True

    def _write(self, arrival: Arrival, sent: Sent) -> None:
        run, fetch = arrival.run, arrival.fetch
        entry = self._pool.entry(run.key)
        write_node_kv(self._pool, self._geometry, sent.k, sent.v, entry.pages)
        self._sender.received(sent)
        entry.ready = True
        if fetch is None:
            arrival.origin = Origin(Tier.NONE, 0, arrival.reason)
        else:
            arrival.origin = Origin(fetch.tier, fetch.nbytes)
        del self._arriving[run.key]
        self._fetcher.settled(run.key)

    def _fail(self, arrival: Arrival, error: Exception) -> None:
        """Nobody can have this node now; those who wait for it learn why, and it is forgotten."""
        arrival.error = error


def write_node_kv(pool: PagePool, geometry: Geometry, k: Tensor, v: Tensor, pages: Pages) -> None:
    """Fill a node's pages: raw keys rotated at their local position (invariant 2), values as is.

    Args:
        k, v: [layers, tokens, kv_heads, head_dim].
    """
    device = pool.k.device
    tokens = k.shape[1]
    slots = pool.slots(pages, 0, tokens)
    positions = torch.arange(tokens, device=device)
    k, v = k.to(device, pool.k.dtype), v.to(device, pool.v.dtype)
    tables = {
        rotary: cos_sin(rotary, positions) for rotary in {layer.rotary for layer in geometry.layers}
    }
    for index, layer in enumerate(geometry.layers):
        cos, sin = tables[layer.rotary]
        write_kv(pool.k[index], pool.v[index], k[index], v[index], slots, cos, sin)
