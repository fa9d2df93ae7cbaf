"""Ingestion: texts to stored KV, streaming, in bounded memory."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from typing import Protocol, TypeVar

import torch

from lazyrag.engine.calls import Calls
from lazyrag.engine.encode import Encoder, length_batches
from lazyrag.engine.library import Library
from lazyrag.errors import RequestError
from lazyrag.model.geometry import AllHeads
from lazyrag.prompt.read import check_unicode
from lazyrag.prompt.segments import NodeIdentity
from lazyrag.store import KVStore, NewNode, NewText
from lazyrag.types import NodeKey, NodeText, Reference

READ_AHEAD = 64
"""Texts looked at together, so that batches hold texts of similar length."""

T = TypeVar("T")


class OnDevice(Protocol):
    """Runs a job in the thread that owns the device."""

    def __call__(self, job: Callable[[], T], /) -> T:
        """The job's result."""
        ...


Progress = Callable[[int, int], None]
"""Called with (tokens done, tokens in all; 0 = not known)."""


@dataclass(frozen=True, slots=True)
class IngestEstimate:
    """What `precompute` would do.

    Attributes:
        texts: how many were looked at.
        already_stored: of them, how many need nothing.
        tokens: of nodes to compute.
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
    given: NodeText
    node: NodeIdentity


class Ingestor:
    """Encodes what the store does not have and registers every text.

    Args:
        store, encoding: where, under which encoding.
        library: registers texts.
        encoder: computes KV.
        heads: of the model, for sizes.
        kv_dtype: how K and V are kept.
        longest_node: most tokens a node may have.
        on_device: runs a forward pass where nothing else is in its way.
        calls: of the engine; those in here may end with any text.
    """

    def __init__(
        self,
        store: KVStore,
        encoding: bytes,
        library: Library,
        encoder: Encoder,
        heads: AllHeads,
        kv_dtype: torch.dtype,
        longest_node: int,
        on_device: OnDevice,
        calls: Calls,
    ) -> None:
        self._store = store
        self._encoding = encoding
        self._library = library
        self._encoder = encoder
        self._longest = longest_node
        self._bytes_per_token = heads.kv_bytes_per_token(kv_dtype)
        self._on_device = on_device
        self._calls = calls
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
            for tokens in self._store_missing(items):
                done += tokens
                if progress is not None:
                    progress(done, total)
            self._register(self._described(items))
            # Meanwhile another may have released a text, or registered it behind something else.
            registered = [replace(item, node=self._identify(item.given)) for item in items]
            for _ in self._store_missing(registered):
                pass
            keys += [item.node.key for item in registered]
            if others := {item.node.key for item in items}.difference(keys[-len(items) :]):
                self._store.sweep(others)
        return keys

    def register(self, texts: Iterable[str | NodeText]) -> int:
        """See `lazyrag.Engine.register`."""
        return self._register(
            self._library.describe(form, node.reference, alias=True, behind=node.behind)
            for _, node in self._calls.asked_for(_named(texts))
            for form in node.forms
            if form.strip() and not self._library.knows(form) and _is_unicode(form + node.behind)
        )

    def estimate(self, texts: Iterable[str | NodeText], *, measure: bool = True) -> IngestEstimate:
        """See `lazyrag.Engine.estimate`."""
        count = tokens = read = missing = 0
        seen: set[int] = set()  # by hashes, of 64 bits
        for items in self._windows(texts):
            count += len(items)
            for item in self._missing(items):
                if (text := hash(item.given.text)) not in seen:
                    seen.add(text)
                    missing += 1
                    tokens += len(item.node.ids)
                    read += item.node.tokens_to_compute
        seconds = read * self._measure() if measure and read else None
        return IngestEstimate(
            count, count - missing, tokens, tokens * self._bytes_per_token, seconds
        )

    def _windows(self, texts: Iterable[str | NodeText]) -> Iterator[list[_Item]]:
        named = self._calls.asked_for(_named(texts))
        while window := list(islice(named, READ_AHEAD)):
            first: dict[str, NodeIdentity] = {}  # others of equal text stand behind the same
            yield [self._item(name, node, first) for name, node in window]

    def _item(self, name: str, node: NodeText, first: dict[str, NodeIdentity]) -> _Item:
        for form in (*node.forms, node.behind):
            check_unicode(name, form)
        if not node.text.strip():
            raise RequestError(f"{name} is empty: there is nothing to ingest.")
        if node.text not in first:
            first[node.text] = self._identify(node)
        item = _Item(node, first[node.text])
        if len(item.node.ids) > self._longest:
            raise RequestError(
                f"{name} has {len(item.node.ids):,} tokens, the model's context window leaves "
                f"{self._longest:,} for one node. Split it into smaller chunks."
            )
        return item

    def _identify(self, node: NodeText) -> NodeIdentity:
        return self._library.identify(node.text, node.behind)

    def _missing(self, items: list[_Item]) -> list[_Item]:
        unique = {item.node.key: item for item in items}
        return [item for key, item in unique.items() if not self._store.has(key)]

    def _store_missing(self, items: list[_Item]) -> Iterator[int]:
        """Encode and store what the store does not have; yields the tokens of each batch."""
        missing = self._missing(items)
        for indices in length_batches([item.node.tokens_to_compute for item in missing]):
            batch = [missing[index] for index in indices]
            ids, behind = [item.node.ids for item in batch], [item.node.behind for item in batch]
            self._store.check_space(sum(map(len, ids)) * self._bytes_per_token)
            encoded = self._on_device(partial(self._encoder.encode, ids, behind))
            nodes = [
                NewNode(item.node.key, kv, item.given.text)
                for item, kv in zip(batch, encoded, strict=True)
            ]
            self._store.publish(self._encoding, nodes)
            yield sum(map(len, ids))

    def _described(self, items: list[_Item]) -> Iterator[NewText]:
        for item in items:
            given = item.given
            for form in given.forms:
                if form.strip():
                    alias = form != given.text
                    yield self._library.describe(
                        form, given.reference, alias=alias, behind=given.behind
                    )

    def _register(self, texts: Iterable[NewText]) -> int:
        """Register the texts that a node can hold; returns how many different ones."""
        rows = [text for text in texts if text.tokens <= self._longest]
        if rows:
            self._library.register(rows)
        return len({row.text for row in rows})

    def _measure(self) -> float:
        """Seconds a token, from one short batch."""
        if self._seconds_per_token is None:
            ids = [[1] * 128] * 4

            def timed() -> float:
                self._encoder.encode([[1] * 8])
                start = time.perf_counter()
                self._encoder.encode(ids)
                return time.perf_counter() - start

            self._seconds_per_token = self._on_device(timed) / 512
        return self._seconds_per_token


def kept_texts(
    references: Iterable[Reference], keep: Iterable[str | NodeText]
) -> dict[Reference, set[str]]:
    """The references to drop, each with the texts of ``keep`` that stay referred to by it.

    Raises:
        RequestError: a reference without owner or name.
    """
    kept: dict[Reference, set[str]] = {}
    for reference in references:
        _check_reference("a reference to release", reference)
        kept[reference] = set()
    for _, node in _named(keep):
        if node.reference in kept:
            kept[node.reference].update(node.forms)
    return kept


def _named(texts: Iterable[str | NodeText]) -> Iterator[tuple[str, NodeText]]:
    """Each text with what to call it in messages; its reference is checked."""
    if isinstance(texts, str):
        raise RequestError("texts must be a list of texts, not one string.")
    for number, text in enumerate(texts):
        node = NodeText(text) if isinstance(text, str) else text
        name = f"text {number}" + (f" ({node.label})" if node.label else "")
        if node.reference is not None:
            _check_reference(f"the reference of {name}", node.reference)
        yield name, node


def _check_reference(name: str, reference: Reference) -> None:
    if not isinstance(reference, Reference) or not reference.owner or not reference.name:
        raise RequestError(f"{name} needs an owner and a name: {reference!r}.")
    for part in (reference.owner, reference.name):
        check_unicode(name, part)


def _is_unicode(text: str) -> bool:
    return text.encode(errors="ignore").decode() == text
