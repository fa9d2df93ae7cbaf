"""The texts one encoding knows: registered at ingestion, found again in prompts."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache

from lazyrag.prompt.anchors import TextSignature, sign
from lazyrag.prompt.read import FoundNear, FoundNode, FoundTexts
from lazyrag.prompt.recognise import Recogniser
from lazyrag.prompt.segments import NodeIdentity, NodeSource
from lazyrag.prompt.tokenise import PromptTokenizer
from lazyrag.store import KVStore, NewText, Released, TextRow, node_key
from lazyrag.types import NodeKey, Reference, TextId

REMEMBERED_TEXTS = 512
"""Texts whose ids are kept in memory (about 20 KB for a node of 400 tokens)."""
MOST_BEHIND = 128
"""Tokens that a node is encoded behind, at most, besides the sink: its share of ingestion."""


class Library:
    """Registered texts of one store and encoding; follows what other processes do to them.

    Args:
        store: whose index holds the texts.
        encoding: digest of the encoding; texts of other encodings are not seen.
        tokenizer: turns a text into the ids its key is made of.
        longest_node: most tokens a node may have, with those it is encoded behind.
    """

    def __init__(
        self, store: KVStore, encoding: bytes, tokenizer: PromptTokenizer, longest_node: int
    ) -> None:
        self._store = store
        self._index = store.index
        self._encoding = encoding
        self._tokenizer = tokenizer
        self._longest = longest_node
        self._recogniser = Recogniser(self._text)
        self._last = 0
        self._lock = threading.Lock()
        # a retrieved node is retrieved again: its tokens need not be found again
        self._ids = lru_cache(maxsize=REMEMBERED_TEXTS)(self._tokenise)

    def identify(self, text: str, behind: str = "") -> NodeIdentity:
        """A text as a node: as it is registered, else as it would be behind ``behind``.

        Raises:
            StoreError: the index cannot be read.
        """
        row = self._index.find_text(self._encoding, text)
        return self._new(text, behind) if row is None else self._known(row)

    def _tokenise(self, text: str) -> tuple[int, ...]:
        return tuple(self._tokenizer.encode_text(text))

    def _new(self, text: str, behind: str) -> NodeIdentity:
        ids = self._ids(text)
        before = last_ids(self._ids(behind), self._longest - len(ids)) if behind else ()
        return NodeIdentity(node_key(self._encoding, ids, before), ids, before)

    def _known(self, row: TextRow) -> NodeIdentity:
        ids = self._ids(row.text)
        return NodeIdentity(node_key(self._encoding, ids, row.behind), ids, row.behind)

    def describe(
        self, text: str, reference: Reference | None, *, alias: bool, behind: str = ""
    ) -> NewText:
        """A text as `register` takes it."""
        node = self._new(text, behind)
        signature = sign(text).to_bytes()
        return NewText(text, node.key, len(node.ids), alias, signature, reference, node.behind)

    def register(self, texts: Iterable[NewText]) -> None:
        """Make texts findable.

        Raises:
            StoreError: the index cannot be written.
        """
        self._index.add_texts(self._encoding, texts)

    def release(self, kept: Mapping[Reference, Iterable[str]]) -> Released:
        """Drop references, see `KVStore.release`."""
        released = self._store.release(self._encoding, kept)
        with self._lock:
            self._recogniser.discard(released.texts)
        return released

    def some_texts(self, most: int) -> list[str]:
        """Texts of encoded nodes, at most so many, from all over the index."""
        rows = self._index.signatures_after(self._encoding, 0)
        step = max(1, -(-len(rows) // most))
        found = (self._index.text(id) for id, _ in rows[::step])
        return [row.text for row in found if row is not None and not row.alias]

    def knows(self, text: str) -> bool:
        """Whether a text is registered."""
        return self._index.find_text(self._encoding, text) is not None

    def source_of(self, text: str) -> NodeSource:
        """Whether a text was ingested, is an alias, or is not known."""
        row = self._index.find_text(self._encoding, text)
        return NodeSource.GIVEN if row is None else _source(row)

    def text_of(self, key: NodeKey) -> str | None:
        """The registered text of a node."""
        row = self._index.text_of(self._encoding, key)
        return None if row is None else row.text

    def find(self, content: str) -> FoundTexts:
        """Every registered text that stands verbatim in ``content``, and near misses."""
        with self._lock:
            self._refresh()
            recognition = self._recogniser.find(content)
        nodes, near = [], []
        for match in recognition.matches:
            if (row := self._index.text(match.text_id)) is None:
                continue
            node = self._known(row)
            if node.key == row.key:  # else it was registered by another build
                nodes.append(FoundNode(match.start, match.stop, node, _source(row)))
        for miss in recognition.near:
            if (row := self._index.text(miss.text_id)) is not None:
                near.append(FoundNear(miss.start, miss.stop, miss.kind, row.key, row.tokens))
        return FoundTexts(nodes, near)

    def _refresh(self) -> None:
        rows = self._index.signatures_after(self._encoding, self._last)
        if rows:
            self._recogniser.add(self._signature(id, data) for id, data in rows)
            self._last = rows[-1][0]

    def _signature(self, id: TextId, data: bytes) -> tuple[TextId, TextSignature]:
        """A signature that cannot be read (damaged, another version) is made again."""
        try:
            return id, TextSignature.from_bytes(data)
        except ValueError:
            return id, sign(self._text(id) or "")

    def _text(self, id: TextId) -> str | None:
        row = self._index.text(id)
        return None if row is None else row.text


def last_ids(behind: Sequence[int], room: int) -> tuple[int, ...]:
    """The end of what stands before a node that it is encoded behind.

    Args:
        behind: ids of what stands before it.
        room: tokens that the context window leaves for them.
    """
    return tuple(behind[max(0, len(behind) - max(0, min(MOST_BEHIND, room))) :])


def _source(row: TextRow) -> NodeSource:
    return NodeSource.ALIAS if row.alias else NodeSource.INGESTED
