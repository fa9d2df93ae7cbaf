"""Ingestion: texts to stored KV, streaming, in bounded memory."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

import torch

from lazyrag.engine.encode import Encoder, length_batches
from lazyrag.engine.library import Library
from lazyrag.errors import RequestError
from lazyrag.model.geometry import Geometry
from lazyrag.prompt.read import check_unicode
from lazyrag.store import KVStore, NewNode
from lazyrag.types import NodeKey, NodeText

READ_AHEAD = 64
"""Texts looked at together, so that batches hold texts of similar length."""

Progress = Callable[[int, int], None]
"""Called with (tokens done, tokens in all; 0 = not known)."""


@dataclass(frozen=True, slots=True)
class IngestEstimate:
    """What `precompute` would do.

    Attributes:
        texts: how many were looked at.
        already_stored: of them, how many need nothing.
        tokens: to compute.
        bytes: to write.
        seconds: measured on this machine with a short run of the model; None if nothing to do.
    """

    texts: int
    already_stored: int
    tokens: int
    bytes: int
    seconds: float | None


@dataclass(frozen=True, slots=True)
class _Item:
    text: str
    aliases: tuple[str, ...]
    key: NodeKey
    ids: tuple[int, ...]


class Ingestor:
    """Encodes what the store does not have and registers every text.

    Args:
        store, encoding: where, under which encoding.
        library: registers texts.
        encoder: computes KV.
        geometry: of the model, for sizes.
        kv_dtype: how K and V are kept.
        longest_node: most tokens a node may have.
        lock: held during each forward pass.
    """

    def __init__(
        self,
        store: KVStore,
        encoding: bytes,
        library: Library,
        encoder: Encoder,
        geometry: Geometry,
        kv_dtype: torch.dtype,
        longest_node: int,
        lock: threading.RLock,
    ) -> None:
        self._store = store
        self._encoding = encoding
        self._library = library
        self._encoder = encoder
        self._longest = longest_node
        self._bytes_per_token = geometry.kv_bytes_per_token(kv_dtype)
        self._lock = lock
        self._seconds_per_token: float | None = None

    def precompute(
        self, texts: Iterable[str | NodeText], progress: Progress | None
    ) -> list[NodeKey]:
        """See `lazyrag.Engine.precompute`."""
        total = 0
        if progress is not None and isinstance(texts, Sequence):
            total = self.estimate(texts, measure=False).tokens
            progress(0, total)
        keys: list[NodeKey] = []
        done = 0
        for items in self._windows(texts):
            missing = self._missing(items)
            for indices in length_batches([len(item.ids) for item in missing]):
                batch = [missing[index] for index in indices]
                self._store.check_space(
                    sum(len(item.ids) for item in batch) * self._bytes_per_token
                )
                with self._lock:
                    encoded = self._encoder.encode([item.ids for item in batch])
                nodes = [
                    NewNode(item.key, kv, item.text)
                    for item, kv in zip(batch, encoded, strict=True)
                ]
                self._store.publish(self._encoding, nodes)
                done += sum(len(item.ids) for item in batch)
                if progress is not None:
                    progress(done, total)
            self._register(items)
            keys += [item.key for item in items]
        return keys

    def estimate(self, texts: Iterable[str | NodeText], *, measure: bool = True) -> IngestEstimate:
        """See `lazyrag.Engine.estimate`."""
        count = tokens = missing = 0
        seen: set[NodeKey] = set()
        for items in self._windows(texts):
            count += len(items)
            for item in self._missing(items):
                if item.key not in seen:
                    seen.add(item.key)
                    missing += 1
                    tokens += len(item.ids)
        seconds = tokens * self._measure() if measure and tokens else None
        return IngestEstimate(
            count, count - missing, tokens, tokens * self._bytes_per_token, seconds
        )

    def _windows(self, texts: Iterable[str | NodeText]) -> Iterator[list[_Item]]:
        if isinstance(texts, str):
            raise RequestError("texts must be a list of texts, not one string.")
        numbered = enumerate(texts)
        while window := list(islice(numbered, READ_AHEAD)):
            yield [self._item(number, text) for number, text in window]

    def _item(self, number: int, text: str | NodeText) -> _Item:
        node = NodeText(text) if isinstance(text, str) else text
        name = f"text {number}" + (f" ({node.label})" if node.label else "")
        for form in (node.text, *node.aliases):
            check_unicode(name, form)
        if not node.text.strip():
            raise RequestError(f"{name} is empty: there is nothing to ingest.")
        key, ids = self._library.identify(node.text)
        if len(ids) > self._longest:
            raise RequestError(
                f"{name} has {len(ids):,} tokens, the model's context window leaves "
                f"{self._longest:,} for one node. Split it into smaller chunks."
            )
        aliases = tuple(alias for alias in node.aliases if alias.strip() and alias != node.text)
        return _Item(node.text, aliases, key, ids)

    def _missing(self, items: list[_Item]) -> list[_Item]:
        unique = {item.key: item for item in items}
        return [item for item in unique.values() if not self._store.has(item.key)]

    def _register(self, items: list[_Item]) -> None:
        rows: dict[str, tuple[NodeKey, int, bool]] = {}
        for item in items:
            for alias in item.aliases:
                key, ids = self._library.identify(alias)
                if len(ids) <= self._longest:
                    rows.setdefault(alias, (key, len(ids), True))
        rows |= {item.text: (item.key, len(item.ids), False) for item in items}
        self._library.register((text, *row) for text, row in rows.items())

    def _measure(self) -> float:
        """Seconds a token, from one short batch."""
        if self._seconds_per_token is None:
            ids = [[1] * 128] * 4
            with self._lock:
                self._encoder.encode([[1] * 8])
                start = time.perf_counter()
                self._encoder.encode(ids)
                self._seconds_per_token = (time.perf_counter() - start) / 512
        return self._seconds_per_token
