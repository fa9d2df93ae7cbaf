"""`LazyKVVectorStore`: any vector store, with the KV of its documents kept in step."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar
from uuid import uuid4

from langchain_core.documents import Document
from langchain_core.embeddings import Embeddings
from langchain_core.vectorstores import VectorStore

from langchain_lazyrag.documents import (
    DocumentPrompt,
    HasEngine,
    Progress,
    document_text,
    document_texts,
)
from lazyrag import NodeText, Reference
from lazyrag.errors import RequestError, StoreError

logger = logging.getLogger("lazyrag")

Found = TypeVar("Found", bound="list[Document] | list[tuple[Document, float]]")


class LazyKVVectorStore(VectorStore):
    """Wraps a vector store: what is added to it is precomputed, what is deleted loses its KV.

    Every document holds a reference to its KV under its id. Documents of equal text share one copy,
    which goes when the last of them is deleted or changed; so LangChain's ``index()`` with a record
    manager keeps the KV in step with the sources. What a search returns and the KV store does not
    know (documents added past the wrapper, another model, an emptied KV store) is registered then
    and computed at its first use in a prompt (for good, if it comes without an id). Everything else
    is the wrapped store's own, under ``store``.

    Args:
        store: the vector store to wrap, Chroma for example.
        chat: the model that will read the documents.
        owner: name of this collection in the KV store; None = the kind of the store and the name
            of its collection. Two collections of one name over one KV store need different ones.
        document_prompt: see `document_text`.
        behind_previous: see `document_texts`.
        progress: a progress bar on stderr while documents are computed, or a function for it.

    Examples:
        >>> vectors = LazyKVVectorStore(Chroma("docs", embeddings), chat, progress=True)
        >>> index(documents, record_manager, vectors, cleanup="full", source_id_key="source")
        >>> retriever = vectors.as_retriever(search_kwargs={"k": 5})
    """

    def __init__(
        self,
        store: VectorStore,
        chat: HasEngine,
        *,
        owner: str | None = None,
        document_prompt: DocumentPrompt | None = None,
        behind_previous: bool = True,
        progress: Progress = False,
    ) -> None:
        if owner == "":
            raise RequestError("the owner of a LazyKVVectorStore is a name, not an empty string.")
        self.store = store
        self.owner = _name_of(store) if owner is None else owner
        self._chat = chat
        self._document_prompt = document_prompt
        self._behind_previous = behind_previous
        self._progress = progress

    @classmethod
    def from_texts(
        cls,
        texts: list[str],
        embedding: Embeddings,
        metadatas: list[dict[str, Any]] | None = None,
        *,
        ids: list[str] | None = None,
        **kwargs: Any,
    ) -> LazyKVVectorStore:
        """Make the wrapped store of ``texts`` and wrap it.

        Args:
            texts, embedding, metadatas, ids: as for the wrapped store.
            **kwargs: ``store_class``, the class to make; those of `LazyKVVectorStore`; all others
                go to ``store_class.from_texts``.

        Raises:
            RequestError: ``store_class`` or ``chat`` is missing.
        """
        try:
            store_class, chat = kwargs.pop("store_class"), kwargs.pop("chat")
        except KeyError as missing:
            raise RequestError(
                f"LazyKVVectorStore.from_texts needs {missing}: the class of the vector store to "
                "wrap as store_class, and the chat model as chat."
            ) from None
        own = {
            name: kwargs.pop(name)
            for name in ("owner", "document_prompt", "behind_previous", "progress")
            if name in kwargs
        }
        texts = list(texts)
        ids = _text_ids(ids or [None] * len(texts))
        store = store_class.from_texts(texts, embedding, metadatas, ids=ids, **kwargs)
        made = cls(store, chat, **own)
        parts = zip(texts, metadatas or [{}] * len(texts), strict=True)
        nodes = made._nodes([Document(page_content=text, metadata=m) for text, m in parts], ids)
        made._precompute(nodes)
        made._settle(ids, nodes)
        return made

    @property
    def embeddings(self) -> Embeddings | None:
        """Those of the wrapped store."""
        return self.store.embeddings

    # writing

    def add_documents(self, documents: list[Document], **kwargs: Any) -> list[str]:
        """Compute and store the KV first, then add to the wrapped store.

        A document whose id is known already replaces the KV it had. If this fails on the way, KV of
        new texts stays under ids that were given until they are added again or deleted.

        Args:
            documents: one without an id gets a new one.
            **kwargs: ``ids`` instead of those of the documents; others go to the wrapped store.

        Raises:
            RequestError: a document is longer than the context window; the wrapped store holds
                none of them.
            StoreError: the disk cannot hold the KV; the wrapped store holds none of them.
        """
        adding = self._adding(documents, kwargs.pop("ids", None))
        try:
            self._precompute(adding.nodes)
            added = self.store.add_documents(adding.documents, ids=adding.ids, **kwargs)
        except BaseException:
            self._settle(adding.new_ids, [])
            raise
        self._conclude(adding, added)
        return added

    async def aadd_documents(self, documents: list[Document], **kwargs: Any) -> list[str]:
        """As `add_documents`; the event loop stays free."""
        adding = self._adding(documents, kwargs.pop("ids", None))
        try:
            await asyncio.to_thread(self._precompute, adding.nodes)
            added = await self.store.aadd_documents(adding.documents, ids=adding.ids, **kwargs)
        except BaseException:
            await asyncio.to_thread(self._settle, adding.new_ids, [])
            raise
        await asyncio.to_thread(self._conclude, adding, added)
        return added

    def add_texts(
        self, texts: Iterable[str], metadatas: list[dict[str, Any]] | None = None, **kwargs: Any
    ) -> list[str]:
        """As `add_documents`."""
        return super().add_texts(list(texts), metadatas, **kwargs)

    async def aadd_texts(
        self, texts: Iterable[str], metadatas: list[dict[str, Any]] | None = None, **kwargs: Any
    ) -> list[str]:
        """As `aadd_documents`."""
        return await super().aadd_texts(list(texts), metadatas, **kwargs)

    def delete(self, ids: list[str] | None = None, **kwargs: Any) -> bool | None:
        """Delete from the wrapped store, then drop what these documents held of the KV store.

        Raises:
            RequestError: no ids; what a filter deletes is not known to the KV store.
        """
        wanted = _some(ids)
        deleted = self.store.delete(wanted, **kwargs)
        if deleted is not False:
            self._settle(wanted, [])
        return deleted

    async def adelete(self, ids: list[str] | None = None, **kwargs: Any) -> bool | None:
        """As `delete`; the event loop stays free."""
        wanted = _some(ids)
        deleted = await self.store.adelete(wanted, **kwargs)
        if deleted is not False:
            await asyncio.to_thread(self._settle, wanted, [])
        return deleted

    def _adding(self, documents: Iterable[Document], given: Sequence[str | None] | None) -> _Adding:
        documents = list(documents)
        if given is not None and len(given) != len(documents):
            raise RequestError(f"{len(documents)} documents came with {len(given)} ids.")
        wanted = [document.id for document in documents] if given is None else list(given)
        ids = _text_ids(wanted)
        new_ids = [id for id, asked in zip(ids, wanted, strict=True) if id != str(asked)]
        return _Adding(documents, ids, new_ids, self._nodes(documents, ids))

    def _nodes(self, documents: Sequence[Document], ids: Sequence[str]) -> list[NodeText]:
        """One a document with content; of documents with one id the last."""
        by_id: dict[str, Document] = {}
        for id, document in zip(ids, documents, strict=True):
            by_id.pop(id, None)  # the last one counts, where it stands
            by_id[id] = document
        return list(
            document_texts(
                by_id.values(),
                self._document_prompt,
                [Reference(self.owner, id) for id in by_id],
                behind_previous=self._behind_previous,
            )
        )

    def _precompute(self, nodes: list[NodeText]) -> None:
        self._chat.engine.precompute(nodes, progress=self._progress)

    def _conclude(self, adding: _Adding, added: Sequence[str]) -> None:
        """References as the wrapped store has it, which may give ids of its own."""
        ids, nodes = list(added), adding.nodes
        if len(ids) == len(adding.ids) and ids != adding.ids:
            nodes = self._nodes(adding.documents, ids)
            self._precompute(nodes)
            self._settle(adding.ids, nodes)
        self._settle(ids, nodes)

    def _node(self, document: Document, id: str | None) -> NodeText:
        reference = Reference(self.owner, id) if id else None
        return document_text(document, self._document_prompt, reference)

    def _settle(self, ids: Iterable[str], keep: list[NodeText]) -> None:
        """These ids hold what is kept and nothing else."""
        self._chat.engine.release([Reference(self.owner, id) for id in ids], keep=keep)

    # reading: the wrapped store's answers, with every document made known

    def _known(self, found: Found) -> Found:
        documents = [hit if isinstance(hit, Document) else hit[0] for hit in found]
        try:
            self._chat.engine.register(self._node(one, one.id) for one in documents)
        except (StoreError, ValueError) as error:  # the search itself has not failed
            logger.warning("retrieved documents are not registered for reuse: %s", error)
        return found

    async def _aknown(self, found: Found) -> Found:
        return await asyncio.to_thread(self._known, found)

    def get_by_ids(self, ids: Sequence[str], /) -> list[Document]:
        """The wrapped store's."""
        return self._known(self.store.get_by_ids(ids))

    async def aget_by_ids(self, ids: Sequence[str], /) -> list[Document]:
        """The wrapped store's."""
        return await self._aknown(await self.store.aget_by_ids(ids))

    def similarity_search(self, *args: Any, **kwargs: Any) -> list[Document]:
        """The wrapped store's."""
        return self._known(self.store.similarity_search(*args, **kwargs))

    async def asimilarity_search(self, *args: Any, **kwargs: Any) -> list[Document]:
        """The wrapped store's."""
        return await self._aknown(await self.store.asimilarity_search(*args, **kwargs))

    def similarity_search_with_score(
        self, *args: Any, **kwargs: Any
    ) -> list[tuple[Document, float]]:
        """The wrapped store's."""
        return self._known(self.store.similarity_search_with_score(*args, **kwargs))

    async def asimilarity_search_with_score(
        self, *args: Any, **kwargs: Any
    ) -> list[tuple[Document, float]]:
        """The wrapped store's."""
        return await self._aknown(await self.store.asimilarity_search_with_score(*args, **kwargs))

    def similarity_search_with_relevance_scores(
        self, *args: Any, **kwargs: Any
    ) -> list[tuple[Document, float]]:
        """The wrapped store's."""
        return self._known(self.store.similarity_search_with_relevance_scores(*args, **kwargs))

    async def asimilarity_search_with_relevance_scores(
        self, *args: Any, **kwargs: Any
    ) -> list[tuple[Document, float]]:
        """The wrapped store's."""
        return await self._aknown(
            await self.store.asimilarity_search_with_relevance_scores(*args, **kwargs)
        )

    def similarity_search_by_vector(self, *args: Any, **kwargs: Any) -> list[Document]:
        """The wrapped store's."""
        return self._known(self.store.similarity_search_by_vector(*args, **kwargs))

    async def asimilarity_search_by_vector(self, *args: Any, **kwargs: Any) -> list[Document]:
        """The wrapped store's."""
        return await self._aknown(await self.store.asimilarity_search_by_vector(*args, **kwargs))

    def max_marginal_relevance_search(self, *args: Any, **kwargs: Any) -> list[Document]:
        """The wrapped store's."""
        return self._known(self.store.max_marginal_relevance_search(*args, **kwargs))

    async def amax_marginal_relevance_search(self, *args: Any, **kwargs: Any) -> list[Document]:
        """The wrapped store's."""
        return await self._aknown(await self.store.amax_marginal_relevance_search(*args, **kwargs))

    def max_marginal_relevance_search_by_vector(self, *args: Any, **kwargs: Any) -> list[Document]:
        """The wrapped store's."""
        return self._known(self.store.max_marginal_relevance_search_by_vector(*args, **kwargs))

    async def amax_marginal_relevance_search_by_vector(
        self, *args: Any, **kwargs: Any
    ) -> list[Document]:
        """The wrapped store's."""
        return await self._aknown(
            await self.store.amax_marginal_relevance_search_by_vector(*args, **kwargs)
        )


@dataclass(frozen=True, slots=True)
class _Adding:
    """Documents on their way in; ``new_ids`` are those that were made here."""

    documents: list[Document]
    ids: list[str]
    new_ids: list[str]
    nodes: list[NodeText]


def _text_ids(ids: Sequence[str | None]) -> list[str]:
    return [str(uuid4()) if id is None or id == "" else str(id) for id in ids]


def _name_of(store: VectorStore) -> str:
    """The kind of a store and the name of its collection, where it has one."""
    names = ("_collection_name", "collection_name", "index_name")
    found = next((name for n in names if isinstance(name := getattr(store, n, None), str)), "")
    return f"{type(store).__name__} {found}".strip()


def _some(ids: list[str] | None) -> list[str]:
    if ids is None:
        raise RequestError(
            "delete needs ids: what a filter deletes is not known to the KV store. Look the ids up "
            "and delete them, or delete in the wrapped store (.store) and keep their KV."
        )
    if isinstance(ids, str) or not all(ids):
        raise RequestError(f"delete takes a list of ids, none of them empty, not {ids!r}.")
    return [str(id) for id in ids]
