"""LazyKVVectorStore: the KV keeps step with what a vector store holds."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import pytest
from langchain_chroma import Chroma
from langchain_classic.indexes import SQLRecordManager
from langchain_core.documents import Document
from langchain_core.embeddings import Embeddings
from langchain_core.indexing import InMemoryRecordManager, RecordManager, aindex, index
from langchain_core.prompts import PromptTemplate
from langchain_core.vectorstores import InMemoryVectorStore, VectorStore
from langchain_lazyrag import ChatLazyKV, LazyKVVectorStore

from lazyrag import Engine, RequestError, StoreError

TEXTS = (
    "The harbour of Vik has room for forty boats and a single crane.",
    "Every spring the crane of Vik is painted blue by the harbour master.",
    "The harbour master of Vik is called Olaf and has two dogs.",
)
CHANGED = "Every spring the crane of Vik is painted green by the harbour master."


@pytest.fixture
def vik(checkpoint: Any, tmp_path: Path) -> Iterator[ChatLazyKV]:
    """A small model with an empty store of its own, so that nodes can be counted."""
    with Engine.from_pretrained(checkpoint("llama"), store=tmp_path / "kv") as engine:
        yield ChatLazyKV(engine=engine, max_tokens=1)


@pytest.fixture
def chroma(embeddings: Embeddings, tmp_path: Path) -> Iterator[Chroma]:
    """A real Chroma on disk."""
    store = Chroma("vik", embedding_function=embeddings, persist_directory=str(tmp_path / "chroma"))
    yield store
    store.delete_collection()


@pytest.fixture
def vectors(vik: ChatLazyKV, chroma: Chroma) -> LazyKVVectorStore:
    return LazyKVVectorStore(chroma, vik)


def docs(*texts: str) -> list[Document]:
    """Documents named after the number of their text."""
    return [
        Document(page_content=text, metadata={"source": f"{number}.md"})
        for number, text in enumerate(texts)
    ]


def stored(chat: ChatLazyKV) -> set[str]:
    """Those of the texts whose KV is in the store."""
    engine = chat.engine
    assert not engine.store.verify()
    return {t for t in (*TEXTS, CHANGED) if engine.store.has(engine.key_of(t))}


def reuse_of(chat: ChatLazyKV, *texts: str) -> tuple[int, int]:
    """How many nodes of a prompt with these texts are reused, and how many computed."""
    answer = chat.invoke("\n\n".join([*texts, "What of it?"]))
    report = answer.response_metadata["lazyrag"]
    return report["nodes_reused"], report["nodes_recomputed"]


def test_added_documents_are_reused_at_once(vectors: LazyKVVectorStore, vik: ChatLazyKV) -> None:
    ids = vectors.add_documents(docs(*TEXTS))
    assert len(set(ids)) == 3
    found = vectors.as_retriever(search_kwargs={"k": 3}).invoke("Vik")
    assert {document.page_content for document in found} == set(TEXTS)
    assert reuse_of(vik, *(document.page_content for document in found)) == (3, 0)


def test_add_texts_and_ids(vectors: LazyKVVectorStore, vik: ChatLazyKV) -> None:
    assert vectors.add_texts(TEXTS, [{"n": 1}, {"n": 2}, {"n": 3}], ids=["a", "b", "c"]) == [
        "a", "b", "c",
    ]  # fmt: skip
    assert [document.id for document in vectors.get_by_ids(["a"])] == ["a"]
    vectors.delete(["a"])
    assert stored(vik) == set(TEXTS[1:])
    assert vectors.get_by_ids(["a"]) == []


def test_equal_texts_share_one_node_until_the_last_is_deleted(
    vectors: LazyKVVectorStore, vik: ChatLazyKV
) -> None:
    vectors.add_texts([TEXTS[0], TEXTS[0]], ids=["a", "b"])
    assert vik.engine.store.stats().nodes == 1
    vectors.delete(["a"])
    assert stored(vik) == {TEXTS[0]}
    vectors.delete(["b"])
    assert vik.engine.store.stats().nodes == 0


def test_changed_text_under_one_id_replaces_the_node(
    vectors: LazyKVVectorStore, vik: ChatLazyKV
) -> None:
    vectors.add_texts([TEXTS[1]], [{"n": 1}], ids=["a"])
    vectors.add_texts([CHANGED], [{"n": 2}], ids=["a"])
    assert stored(vik) == {CHANGED}
    assert [found.page_content for found in vectors.get_by_ids(["a"])] == [CHANGED]


def test_owners_do_not_touch_each_other(
    vik: ChatLazyKV, chroma: Chroma, embeddings: Embeddings
) -> None:
    one = LazyKVVectorStore(chroma, vik, owner="one")
    two = LazyKVVectorStore(InMemoryVectorStore(embeddings), vik, owner="two")
    one.add_texts([TEXTS[0]], ids=["a"])
    two.add_texts([TEXTS[0]], ids=["a"])
    one.delete(["a"])
    assert reuse_of(vik, TEXTS[0]) == (1, 0)
    two.delete(["a"])
    assert stored(vik) == set()


@pytest.mark.parametrize("kind", ["memory", "sqlite"])
@pytest.mark.parametrize("cleanup", ["full", "incremental"])
@pytest.mark.parametrize("asynchronous", [False, True])
def test_index_keeps_the_kv_in_step(
    vectors: LazyKVVectorStore,
    vik: ChatLazyKV,
    tmp_path: Path,
    kind: str,
    cleanup: Literal["full", "incremental"],
    asynchronous: bool,
) -> None:
    manager: RecordManager
    if kind == "memory":
        manager = InMemoryRecordManager("vik")
    else:
        place = f"sqlite+aiosqlite:///{tmp_path}/r" if asynchronous else f"sqlite:///{tmp_path}/r"
        if asynchronous:
            pytest.importorskip("aiosqlite")
        manager = SQLRecordManager("vik", db_url=place, async_mode=asynchronous)

    async def run_async(documents: list[Document]) -> Any:
        await manager.acreate_schema()
        return await aindex(
            documents, manager, vectors, cleanup=cleanup, source_id_key="source",
            key_encoder="sha256",
        )  # fmt: skip

    def run(documents: list[Document]) -> tuple[int, int, int]:
        if asynchronous:
            result = asyncio.run(run_async(documents))
        else:
            manager.create_schema()
            result = index(
                documents, manager, vectors, cleanup=cleanup, source_id_key="source",
                key_encoder="sha256",
            )  # fmt: skip
        return result["num_added"], result["num_skipped"], result["num_deleted"]

    assert run(docs(*TEXTS)) == (3, 0, 0)
    assert stored(vik) == set(TEXTS)
    before = vik.engine.store.stats()
    assert run(docs(*TEXTS)) == (0, 3, 0)
    assert vik.engine.store.stats() == before
    changed = docs(TEXTS[0], CHANGED, TEXTS[2])
    assert run(changed) == (1, 2, 1)
    assert stored(vik) == {TEXTS[0], CHANGED, TEXTS[2]}
    assert reuse_of(vik, TEXTS[2], CHANGED) == (2, 0)
    gone = run(changed[:2])
    if cleanup == "full":  # the third source is gone; incremental cleanup does not look for that
        assert gone == (0, 2, 1)
        assert stored(vik) == {TEXTS[0], CHANGED}
        assert run([]) == (0, 0, 2)
        assert vik.engine.store.stats().nodes == 0
    else:
        assert gone == (0, 2, 0)
        assert stored(vik) == {TEXTS[0], CHANGED, TEXTS[2]}


def test_documents_added_past_the_wrapper_are_computed_at_first_use(
    vectors: LazyKVVectorStore, vik: ChatLazyKV
) -> None:
    vectors.store.add_texts(list(TEXTS), ids=["a", "b", "c"])
    vectors.similarity_search("Vik", k=3)
    assert stored(vik) == set()
    answer = vik.invoke(f"{TEXTS[0]}\n\nWhat of it?")
    (node,) = answer.response_metadata["lazyrag"]["nodes"]
    assert (node["status"], node["reason"]) == ("recomputed", "first use")
    vik.engine.flush()
    assert reuse_of(vik, TEXTS[0]) == (1, 0)
    vectors.delete(["a"])
    assert stored(vik) == set()


def test_documents_of_one_source_are_encoded_behind_the_one_before(
    vectors: LazyKVVectorStore, vik: ChatLazyKV
) -> None:
    """And go with their ids like others; the wrapper can be told not to."""
    sourced = [
        Document(page_content=text, metadata={"source": "vik.md"}, id=str(number))
        for number, text in enumerate(TEXTS)
    ]
    alone = [vik.engine.key_of(text) for text in TEXTS]
    vectors.add_documents(sourced)
    keys = [vik.engine.key_of(text) for text in TEXTS]
    assert keys[0] == alone[0] and not set(keys[1:]) & set(alone)
    assert stored(vik) == set(TEXTS)
    assert reuse_of(vik, "\n\n".join(TEXTS[1:])) == (len(TEXTS) - 1, 0)
    vectors.delete([document.id for document in sourced])
    assert stored(vik) == set()
    twice = [sourced[0], sourced[1], sourced[2].model_copy(update={"id": "0"})]
    nodes = vectors._nodes(twice, ["0", "1", "0"])
    assert [(node.text, node.behind) for node in nodes] == [
        (TEXTS[1].strip(), ""),
        (TEXTS[2].strip(), f"{TEXTS[1].strip()}\n\n"),
    ]
    plain = LazyKVVectorStore(vectors.store, vik, owner="plain", behind_previous=False)
    plain.add_documents(sourced)
    assert [vik.engine.key_of(text) for text in TEXTS] == alone


READS = {
    "similarity_search": ("Vik",),
    "similarity_search_with_score": ("Vik",),
    "similarity_search_with_relevance_scores": ("Vik",),
    "similarity_search_by_vector": ([0.1] * 32,),
    "max_marginal_relevance_search": ("Vik",),
    "max_marginal_relevance_search_by_vector": ([0.1] * 32,),
}


@pytest.mark.parametrize("name", READS)
@pytest.mark.filterwarnings("ignore:Relevance scores must be between")
def test_every_search_is_the_wrapped_stores_and_makes_texts_known(
    vectors: LazyKVVectorStore, vik: ChatLazyKV, name: str
) -> None:
    vectors.store.add_texts(list(TEXTS))
    found = getattr(vectors, name)(*READS[name], k=2)
    assert found == getattr(vectors.store, name)(*READS[name], k=2)
    assert asyncio.run(getattr(vectors, f"a{name}")(*READS[name], k=2)) == found
    texts = [(hit if isinstance(hit, Document) else hit[0]).page_content for hit in found]
    assert reuse_of(vik, *texts) == (0, 2)
    assert reuse_of(vik, *texts) == (2, 0)


def test_asynchronous_writing(vectors: LazyKVVectorStore, vik: ChatLazyKV) -> None:
    async def work() -> None:
        ids = await vectors.aadd_documents(docs(*TEXTS))
        assert len(await vectors.aget_by_ids(ids)) == 3
        await vectors.adelete(ids[:1])

    asyncio.run(work())
    assert stored(vik) == set(TEXTS[1:])


@pytest.mark.parametrize("kind", ["search_type", "kwargs"])
def test_retrievers_of_every_kind(vectors: LazyKVVectorStore, kind: str) -> None:
    vectors.add_texts(list(TEXTS))
    if kind == "search_type":
        found = vectors.as_retriever(search_type="mmr", search_kwargs={"k": 2}).invoke("Vik")
        assert len(found) == 2
    else:
        found = vectors.as_retriever(search_kwargs={"k": 1, "filter": {"n": 9}}).invoke("Vik")
        assert found == []


@pytest.mark.parametrize("store_class", [Chroma, InMemoryVectorStore])
def test_made_from_documents(
    vik: ChatLazyKV, embeddings: Embeddings, store_class: type[VectorStore]
) -> None:
    made = LazyKVVectorStore.from_documents(
        docs(*TEXTS), embeddings, store_class=store_class, chat=vik, owner="made"
    )
    assert isinstance(made.store, store_class)
    assert made.embeddings is embeddings
    assert stored(vik) == set(TEXTS)
    ids = [document.id for document in made.similarity_search("Vik", k=3)]
    made.delete([id for id in ids if id])
    assert stored(vik) == set()
    with pytest.raises(RequestError, match="chat"):
        LazyKVVectorStore.from_texts(["x"], embeddings, store_class=InMemoryVectorStore)


def test_failing_kv_adds_nothing(
    vectors: LazyKVVectorStore, vik: ChatLazyKV, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(needed: int) -> None:
        raise StoreError("not enough space")

    manager = InMemoryRecordManager("vik")
    with monkeypatch.context() as patch:
        patch.setattr(vik.engine.store, "check_space", full)
        with pytest.raises(StoreError, match="space"):
            index(docs(*TEXTS), manager, vectors, cleanup="full", key_encoder="sha256")
    assert vectors.similarity_search("Vik") == []
    result = index(docs(*TEXTS), manager, vectors, cleanup="full", key_encoder="sha256")
    assert result["num_added"] == 3
    assert stored(vik) == set(TEXTS)


def test_failing_vector_store_is_settled_by_the_next_run(
    vectors: LazyKVVectorStore, vik: ChatLazyKV, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any, **__: Any) -> Any:
        raise OSError("the vector store is down")

    vectors.add_texts([TEXTS[1]], ids=["a"])
    with monkeypatch.context() as patch:
        patch.setattr(vectors.store, "add_texts", broken)
        with pytest.raises(OSError, match="down"):
            vectors.add_texts([CHANGED], ids=["a"])
    assert TEXTS[1] in stored(vik)
    vectors.add_texts([CHANGED], ids=["a"])
    assert stored(vik) == {CHANGED}


def test_failure_leaves_nothing_under_ids_that_nobody_knows(
    vectors: LazyKVVectorStore, vik: ChatLazyKV, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any, **__: Any) -> Any:
        raise OSError("the vector store is down")

    with monkeypatch.context() as patch:
        patch.setattr(vectors.store, "add_texts", broken)
        with pytest.raises(OSError, match="down"):
            vectors.add_texts(list(TEXTS))
        with pytest.raises(OSError, match="down"):
            asyncio.run(vectors.aadd_documents(docs(*TEXTS)))
    assert vik.engine.store.stats().nodes == 0
    many = [f"{TEXTS[0]} Number {number}." for number in range(70)]
    with pytest.raises(RequestError, match="context window"):
        vectors.add_texts([*many, "long " * 9000])
    assert vik.engine.store.stats().nodes == 0
    assert vectors.similarity_search("Vik") == []


def test_ids_of_the_wrapped_stores_own(vik: ChatLazyKV, embeddings: Embeddings) -> None:
    class Stubborn(InMemoryVectorStore):
        def add_documents(self, documents: list[Document], **kwargs: Any) -> list[str]:
            ids = [f"own-{number}" for number in range(len(documents))]
            return super().add_documents(documents, ids=ids)

    vectors = LazyKVVectorStore(Stubborn(embeddings), vik)
    ids = vectors.add_texts(list(TEXTS))
    assert ids == ["own-0", "own-1", "own-2"]
    vectors.delete(ids)
    assert vik.engine.store.stats().nodes == 0


def test_of_documents_with_one_id_the_last_counts(vik: ChatLazyKV, embeddings: Embeddings) -> None:
    vectors = LazyKVVectorStore(InMemoryVectorStore(embeddings), vik)
    vectors.add_texts(list(TEXTS[:2]), ids=["a", "a"])
    assert stored(vik) == {TEXTS[1]}
    vectors.add_texts((text for text in TEXTS), ids=["a", "b", "c"])
    assert stored(vik) == set(TEXTS)


def test_two_collections_do_not_touch_each_other_without_names(
    vik: ChatLazyKV, embeddings: Embeddings
) -> None:
    one = LazyKVVectorStore(Chroma("one", embedding_function=embeddings), vik)
    two = LazyKVVectorStore(Chroma("two", embedding_function=embeddings), vik)
    for vectors in (one, two):
        index(
            docs(*TEXTS), InMemoryRecordManager(vectors.owner), vectors, cleanup="full",
            key_encoder="sha256",
        )  # fmt: skip
    two.delete([document.id or "" for document in two.similarity_search("Vik", k=3)])
    assert stored(vik) == set(TEXTS)
    assert reuse_of(vik, *TEXTS) == (3, 0)


def test_search_result_without_the_metadata_of_the_prompt(
    vik: ChatLazyKV, embeddings: Embeddings
) -> None:
    inner = InMemoryVectorStore(embeddings)
    inner.add_texts([TEXTS[0]])
    header = PromptTemplate.from_template("{source}: {page_content}")
    assert LazyKVVectorStore(inner, vik, document_prompt=header).similarity_search("Vik")


def test_unregistered_search_results_do_not_fail_the_search(
    vectors: LazyKVVectorStore,
    vik: ChatLazyKV,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def broken(_: Any) -> int:
        raise StoreError("the index is locked")

    vectors.add_texts(list(TEXTS))
    monkeypatch.setattr(vik.engine, "register", broken)
    assert len(vectors.similarity_search("Vik", k=2)) == 2
    assert "the index is locked" in caplog.text


def test_bad_arguments(vectors: LazyKVVectorStore, vik: ChatLazyKV, chroma: Chroma) -> None:
    with pytest.raises(RequestError, match="delete needs ids"):
        vectors.delete()
    with pytest.raises(RequestError, match="3 documents came with 1 ids"):
        vectors.add_documents(docs(*TEXTS), ids=["a"])
    with pytest.raises(RequestError, match="owner"):
        LazyKVVectorStore(chroma, vik, owner="")
    for ids in ("abc", ["a", ""], [None]):
        with pytest.raises(RequestError, match="list of ids"):
            vectors.delete(ids)  # type: ignore[arg-type]
    vectors.add_texts(list(TEXTS), ids=["a", "b", "c"])
    vectors.delete(["not there", "a"])
    assert stored(vik) == set(TEXTS[1:])


def test_empty_documents_reach_the_vector_store(
    vectors: LazyKVVectorStore, vik: ChatLazyKV
) -> None:
    vectors.add_texts([" ", TEXTS[0]], ids=["a", "b"])
    assert vik.engine.store.stats().nodes == 1
    vectors.delete(["a", "b"])
    assert vik.engine.store.stats().nodes == 0
