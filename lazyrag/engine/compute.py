"""Computing nodes that cannot be had from the store, and storing them."""

from __future__ import annotations

import logging

from lazyrag.engine.costs import Costs
from lazyrag.engine.encode import Encoder
from lazyrag.engine.host import HostTier
from lazyrag.engine.library import Library
from lazyrag.engine.report import Reason
from lazyrag.engine.write import Write, Writer
from lazyrag.errors import StoreError
from lazyrag.prompt.segments import NodeRun, NodeSource
from lazyrag.store import KVStore, LoadFailure, NewNode, StoredKV
from lazyrag.types import NodeKey

logger = logging.getLogger("lazyrag")


class NodeComputer:
    """Computes nodes in the worker's thread; they are stored beside what follows.

    Args:
        store: on disk.
        encoding: digest of the encoding.
        encoder: computes K and V.
        library: makes a text given with a request findable once it is stored.
        host: keeps what was computed.
        writer: writes beside the forward passes.
        costs: says what a node is worth.
    """

    def __init__(
        self,
        store: KVStore,
        encoding: bytes,
        encoder: Encoder,
        library: Library,
        host: HostTier,
        writer: Writer,
        costs: Costs,
    ) -> None:
        self._store = store
        self._encoding = encoding
        self._encoder = encoder
        self._library = library
        self._host = host
        self._writer = writer
        self._costs = costs

    @property
    def must_wait(self) -> bool:
        """Whether what was computed has to be stored first, lest memory run out."""
        return self._writer.full

    def stored(self, key: NodeKey) -> bool:
        """Whether the store lists the node."""
        try:
            return self._store.has(key)
        except StoreError:
            return False

    def forget(self, key: NodeKey) -> None:
        """The node was released: it is not kept once it has been stored, and swept."""
        self._writer.forget(key)

    def compute(self, run: NodeRun) -> tuple[StoredKV, Write]:
        """Raw KV of a node, and its way into the store.

        Raises:
            ModelError: a value does not fit the KV dtype.
        """
        (kv,) = self._encoder.encode([run.ids])
        return kv, self._writer.write(run.key, kv.nbytes, lambda write: self._put(run, kv, write))

    def _put(self, run: NodeRun, kv: StoredKV, write: Write) -> None:
        try:
            self._store.publish(self._encoding, [NewNode(run.key, kv, run.text)])
            if run.text is not None and run.source is NodeSource.GIVEN:
                self._library.register([self._library.describe(run.text, None, alias=False)])
            self._store.sweep([run.key])  # its text may have been released since it was found
            write.released |= not self._store.has(run.key)
        finally:
            bring_s = self._costs.bring_s(len(run.ids), kv.nbytes, in_host_memory=False)
            self._host.keep(run.key, kv, bring_s)
            if write.released:  # `forget` marks it, then clears the host tier: one of us does
                self._host.forget(run.key)


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
