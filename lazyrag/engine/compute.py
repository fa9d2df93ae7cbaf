"""Computing nodes that cannot be had from the store, and storing them."""

from __future__ import annotations

from collections.abc import Iterator

from lazyrag.engine.costs import Costs
from lazyrag.engine.encode import Encoder
from lazyrag.engine.library import Library
from lazyrag.engine.report import Reason
from lazyrag.engine.write import Write, Writer
from lazyrag.errors import StoreError
from lazyrag.prompt.segments import NodeRun, NodeSource
from lazyrag.store import KVStore, LoadFailure, NewNode, StoredKV
from lazyrag.types import NodeKey


class NodeComputer:
    """Computes nodes in the worker's thread; they are kept and stored beside what follows.

    Args:
        store: on disk.
        encoding: digest of the encoding.
        encoder: computes K and V.
        library: makes a text given with a request findable once it is stored.
        writer: keeps and stores what was computed, as far as it has room for that.
        costs: says what a node is worth.
    """

    def __init__(
        self,
        store: KVStore,
        encoding: bytes,
        encoder: Encoder,
        library: Library,
        writer: Writer,
        costs: Costs,
    ) -> None:
        self._store = store
        self._encoding = encoding
        self._encoder = encoder
        self._library = library
        self._writer = writer
        self._costs = costs

    def stored(self, key: NodeKey) -> bool:
        """Whether the store lists the node."""
        try:
            return self._store.has(key)
        except StoreError:
            return False

    def forget(self, key: NodeKey) -> None:
        """The node was released: what of it is on its way is not kept; before the host forgets."""
        self._writer.forget(key)

    def released(self) -> Iterator[NodeKey]:
        """Nodes that were computed and then found to be released; each is told once."""
        released = self._writer.released
        while released:
            yield released.popleft()

    def compute(self, run: NodeRun) -> StoredKV:
        """Raw KV of a node, which is on its way into the store or is not stored this time.

        Raises:
            ModelError: a value does not fit the KV dtype.
        """
        (kv,) = self._encoder.encode([run.ids], [run.behind])
        bring_s = self._costs.bring_s(run.tokens_to_compute, kv.nbytes, in_host_memory=False)
        written = self._writer.write(run.key, kv, bring_s, lambda write: self._put(run, write))
        if not written and self._was_released(run):
            self._writer.released.append(run.key)
        return kv

    def _put(self, run: NodeRun, write: Write) -> None:
        self._store.publish(self._encoding, [NewNode(run.key, write.kv, run.text)])
        if run.text is not None and run.source is NodeSource.GIVEN:
            self._library.register([self._library.describe(run.text, None, alias=False)])
        self._store.sweep([run.key])  # its text may have been released since it was found
        write.released |= not self._store.has(run.key)

    def _was_released(self, run: NodeRun) -> bool:
        """Whether the text of a node that is not stored has gone since it was found."""
        try:
            return run.source is not NodeSource.GIVEN and self._library.text_of(run.key) is None
        except StoreError:
            return False


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
