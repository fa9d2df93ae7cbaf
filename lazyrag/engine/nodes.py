"""Bringing a prompt's nodes into the pool: resident, from host memory, from disk, or computed now.

Never wrong KV: whatever cannot be read for certain is computed anew, and the report says so.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from lazyrag_kernels.attention import Pages
from torch import Tensor

from lazyrag.engine.compute import NodeComputer, reason_of
from lazyrag.engine.costs import Costs
from lazyrag.engine.fetch import Fetch, Fetcher
from lazyrag.engine.live import LiveKey
from lazyrag.engine.pool import PageKey, PagePool, Resident
from lazyrag.engine.report import Origin, Reason, Tier
from lazyrag.engine.send import Sender, Sent
from lazyrag.model.geometry import Geometry
from lazyrag.prompt.segments import NodeRun
from lazyrag.store import LoadFailure
from lazyrag.types import NodeKey

SENDING_BYTES = 2**30
"""KV on its way to the device at once, which takes device memory beside the pool."""

T = TypeVar("T")

logger = logging.getLogger("lazyrag")


@dataclass(slots=True, eq=False)
class Arrival:
    """A node that requests wait for: it is read, or computed for ``reason``, then sent.

    Attributes:
        key: under which the pool has it.
        run: which node, as the store knows it.
        urgency: of computing it, the smallest first: the highest priority that waits for it
            (negative), its rank among the missing nodes of its request.
        fetch: on its way from the store or host memory; None once it is to be computed.
        reason: why it is to be computed.
        sent: on its way to the device.
        origin: where it came from, once its pages are filled.
        error: why it cannot be had at all.
    """

    key: NodeKey
    run: NodeRun
    urgency: tuple[int, int]
    fetch: Fetch | None = None
    reason: Reason | None = None
    sent: Sent | None = None
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
    def own_pages(self) -> Pages:
        """Of live text, those that are this request's alone."""
        return self.live_pages[len(self.live_names) :]

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


NodeWrite = Callable[[Tensor, Tensor, Pages, int], None]
"""Fills pages with raw k and v [layers, tokens, kv_heads, dim]; last, the first one's position."""


class NodePlacer:
    """Makes nodes resident: raw keys are rotated at their local position, once, into pages.

    A node is read once however many requests wait for it. Not thread-safe but where it is said: the
    worker owns it.

    Args:
        pool, geometry: of the engine.
        write: fills pages, see `PageFiller.fill`.
        fetcher: reads nodes.
        computer: computes nodes.
        costs: says which of the two is faster.
    """

    def __init__(
        self,
        pool: PagePool,
        geometry: Geometry,
        write: NodeWrite,
        fetcher: Fetcher,
        computer: NodeComputer,
        costs: Costs,
    ) -> None:
        self._pool = pool
        self._write_kv = write
        self._geometry = geometry
        self._fetcher = fetcher
        self._computer = computer
        self._costs = costs
        self._sender = Sender(pool.k.device, costs)
        self._arriving: dict[NodeKey, Arrival] = {}
        self._left: list[Sent] = []  # nobody waits for them, but the copy goes on

    def acquire(
        self,
        runs: Sequence[NodeRun],
        live_names: Sequence[LiveKey],
        live_tokens: int,
        priority: int = 0,
    ) -> Placed | None:
        """Pages for everything a request needs, all marked in use; what is missing is on its way.

        Args:
            runs: the nodes; one may occur more than once.
            live_names: of the leading full pages of live text, which may have been computed before.
            live_tokens: to make room for, those included.
            priority: of the request.

        Returns:
            None, with nothing held, when the pool has no room.
        """
        self._drop_released()
        pool = self._pool
        known: list[LiveKey] = []
        for name in live_names:
            if name not in pool or pool.entry(name).released:
                break
            known.append(name)
        needed = {run.key: run for run in runs}
        missing = {key: run for key, run in needed.items() if key not in pool}
        own_tokens = live_tokens - len(known) * pool.page_size
        tokens_of = (own_tokens, *(len(run.ids) for run in missing.values()))
        here: list[PageKey] = [*known, *(key for key in needed if key not in missing)]
        room = pool.free_pages + pool.evictable_pages - pool.idle_pages_of(here)
        if sum(map(pool.pages_for, tokens_of)) > room:
            return None
        placed = Placed()
        try:
            for name in known:  # what is here first, so that making room cannot evict it
                placed.live_pages += _some(pool.acquire(name)).pages
                placed.live_names.append(name)
            for key in needed:
                if key not in missing:
                    self._hold(key, placed, priority)
            for rank, (key, run) in enumerate(missing.items()):
                tokens = len(run.ids)
                pages = _some(pool.allocate(tokens))
                placed.nodes[key] = pool.admit(key, pages, tokens, ready=False)
                arrival = Arrival(key, self._stored(run), (-priority, rank))
                placed.arriving[key] = self._arriving[key] = arrival
            placed.live_pages += _some(pool.allocate(own_tokens, live=True))
        except BaseException:
            self.leave(placed)
            raise
        pool.touch([*placed.nodes, *placed.live_names])
        for run in needed.values():
            self._fetcher.touch(self._stored(run).key)
        for key in missing:
            self._begin(placed.arriving[key])
        return placed

    def _hold(self, key: NodeKey, placed: Placed, priority: int) -> None:
        """Take a node into use that is in the pool, or on its way there."""
        resident = placed.nodes[key] = _some(self._pool.acquire(key))
        if (arrival := self._arriving.get(key)) is not None:
            arrival.urgency = min(arrival.urgency, (-priority, arrival.urgency[1]))
            placed.arriving[key] = arrival
        else:
            whole = self._geometry.all_heads
            nbytes = resident.tokens * whole.kv_bytes_per_token(self._pool.k.dtype)
            placed.resident[key] = Origin(Tier.DEVICE, nbytes)

    def leave(self, placed: Placed) -> None:
        """A request needs its nodes no more; one that is still awaited by nobody is given up."""
        for key in placed.nodes:
            self._leave(key)
        for name in reversed(placed.live_names):  # the first pages serve the most requests
            self._pool.leave(name)

    def _leave(self, key: NodeKey) -> None:
        self._pool.leave(key)
        if key in self._pool:
            return
        arrival = self._arriving.pop(key, None)
        if arrival is not None and arrival.sent is not None:
            self._left.append(arrival.sent)

    def ahead(self, run: NodeRun) -> bool:
        """Begin to read a node that a waiting request will need; from any thread.

        Returns:
            False when there is no room for more.
        """
        stored = self._stored(run)
        if run.key in self._pool or self._computing_is_faster(stored):
            return True
        return self._fetcher.ahead(stored)

    def forget(self, key: NodeKey) -> None:
        """The node was released: nothing of it stays but what running requests use."""
        self._drop(key)
        self._computer.forget(key)
        self._fetcher.forget(key)

    def _drop_released(self) -> None:
        for key in self._computer.released():
            self._drop(key)

    def _begin(self, arrival: Arrival) -> None:
        """Have a node read, or computed where that is faster by this machine's own speeds."""
        run = arrival.run
        try:
            if self._computing_is_faster(run) and self._computer.stored(run.key):
                self._costs.read.hope()
                arrival.reason = Reason.FASTER
            else:
                arrival.fetch = self._fetcher.fetch(run)
        except Exception as error:
            logger.warning("node %s is computed anew: %r", run.key, error)
            arrival.reason = Reason.UNREADABLE

    def _computing_is_faster(self, run: NodeRun) -> bool:
        if self._fetcher.in_reach(run.key):
            return False
        before = sum(a.run.tokens_to_compute for a in list(self._arriving.values()) if a.reason)
        read_s = self._fetcher.expected_s(run)
        return self._costs.encoding_is_faster(run.tokens_to_compute, before, read_s)

    def place(self, until: float) -> bool:
        """Send and write what has been read, at least one node, others until a point in time.

        Args:
            until: of ``time.perf_counter``.

        Returns:
            Whether anything came of it.
        """
        self._left = [sent for sent in self._left if not sent.here]
        self._drop_released()
        moved = False
        for arrival in list(self._arriving.values()):
            if arrival.error is None and self._advance(arrival):
                moved = True
                if time.perf_counter() > until:
                    break
        return moved

    @property
    def must_compute(self) -> bool:
        """Whether `compute_next` would compute a node."""
        return any(map(_is_due, self._arriving.values()))

    def compute_next(self) -> bool:
        """Compute the most urgent node that is to be; False when there is none."""
        if not self.must_compute:
            return False
        due = filter(_is_due, self._arriving.values())
        arrival = min(due, key=lambda arrival: arrival.urgency)
        try:
            arrival.sent = self._sender.send(self._computer.compute(arrival.run))
            arrival.sent.wait()
            self._write(arrival, arrival.sent)
        except Exception as error:  # who waits for it learns why
            arrival.error = error
        return True

    def wait_for_sent(self) -> bool:
        """Return when a node is there that is on its way to the device; False: none is."""
        for arrival in self._arriving.values():
            if arrival.sent is not None:
                arrival.sent.wait()
                return True
        return False

    def _advance(self, arrival: Arrival) -> bool:
        """One step of a node's way: read, sent, written; False when there is nothing to do yet."""
        begun = arrival.sent is None
        if begun and not self._send(arrival):
            return arrival.error is not None
        if arrival.sent is None or not arrival.sent.here:  # it could not be read, or takes a while
            return begun
        try:
            self._write(arrival, arrival.sent)
        except Exception as error:
            arrival.error = error
        return True

    def _send(self, arrival: Arrival) -> bool:
        """Send what has been read; False when that must wait."""
        if arrival.fetch is None or not arrival.fetch.outcome.done():
            return False
        try:
            outcome = arrival.fetch.outcome.result()
        except BaseException as error:  # none of those that `Fetcher.load` knows
            logger.warning("node %s is computed anew: %r", arrival.run.key, error)
            outcome = LoadFailure.UNREADABLE
        if isinstance(outcome, LoadFailure):
            arrival.reason = reason_of(outcome, arrival.run.source)
            arrival.fetch = None
            return True
        on_the_way = sum(a.sent.kv.nbytes for a in self._arriving.values() if a.sent is not None)
        if on_the_way and on_the_way + outcome.nbytes > SENDING_BYTES:
            return False
        try:
            arrival.sent = self._sender.send(outcome)
        except Exception as error:  # no memory, say: there will be more when others have arrived
            if on_the_way:
                return False
            arrival.error = error
            return False
        return True

    def _write(self, arrival: Arrival, sent: Sent) -> None:
        key, fetch = arrival.key, arrival.fetch
        entry = self._pool.entry(key)
        self._write_kv(sent.k, sent.v, entry.pages, self._first_position(key))
        self._sender.received(sent)
        entry.ready = True
        if fetch is None:
            arrival.origin = Origin(Tier.NONE, 0, arrival.reason)
        else:
            arrival.origin = Origin(fetch.tier, fetch.nbytes)
        del self._arriving[key]
        self._fetcher.settled(arrival.run.key)

    # what other ways to place nodes change

    def _stored(self, run: NodeRun) -> NodeRun:
        """The node as the store knows it, of one as a prompt and the pool do; from any thread."""
        return run

    def _drop(self, key: NodeKey) -> None:
        """A node of the store was released: the pool has it for those who use it only."""
        self._pool.drop(key)

    def _first_position(self, key: NodeKey) -> int:
        """Where the first key of a node in the pool is rotated to: its local position 0."""
        return 0


def _is_due(arrival: Arrival) -> bool:
    return bool(arrival.reason and not arrival.sent and not arrival.error)


def _some(found: T | None) -> T:
    assert found is not None, "it is there"
    return found
