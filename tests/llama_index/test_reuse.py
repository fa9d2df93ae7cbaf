"""Ingested nodes are reused in every engine of LlamaIndex, or the report says why not."""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import Sequence
from typing import Any

import pytest
from llama_index.core import Document, MockEmbedding, Settings, SummaryIndex, VectorStoreIndex
from llama_index.core.chat_engine import CondensePlusContextChatEngine, ContextChatEngine
from llama_index.core.ingestion import IngestionCache, IngestionPipeline
from llama_index.core.node_parser import SentenceSplitter
from llama_index.core.query_engine import CitationQueryEngine
from llama_index.core.schema import ImageNode, MetadataMode, TextNode
from llama_index.llms.lazyrag import (
    LazyKVLLM,
    LazyKVTransform,
    collect_reports,
    node_text,
    node_texts,
)

from lazyrag import Engine, NodeText, RequestError

QUESTION = "Who keeps the lighthouse?"
STATUSES = {"reused", "recomputed"}


@pytest.fixture
def index(llm: LazyKVLLM, nodes: list[TextNode]) -> SummaryIndex:
    """Every node is retrieved for every question."""
    LazyKVTransform(llm)(nodes)
    return SummaryIndex(nodes)


def test_text_of_a_node_is_what_reaches_the_model(nodes: list[TextNode]) -> None:
    body = nodes[0].text
    assert node_text(nodes[0]) == NodeText(
        text=f"file_name: 0.md\n\n{body}", aliases=(body,), label="0.md"
    )
    bare = TextNode(text=f"  {body}\n", id_="x")
    assert node_text(bare) == NodeText(text=body, aliases=(), label="x")


SPLITTER = SentenceSplitter(chunk_size=24, chunk_overlap=0)


def split(text: str, count: int) -> list[TextNode]:
    """A document of the splitter's; more than ``count`` nodes of it."""
    nodes: Any = SPLITTER.get_nodes_from_documents(
        [Document(text=text, metadata={"file_name": "keepers.md"})]
    )
    assert len(nodes) > count
    return list(nodes)


def test_nodes_of_a_document_are_encoded_behind_the_one_before(nodes: list[TextNode]) -> None:
    """As the splitter says; a node without one, or whose one is not there, stands alone."""
    first, second, third, *_ = split(f"{nodes[0].text} {nodes[1].text} {nodes[2].text}", 2)
    empty = TextNode(text=" ", id_=first.node_id)
    cases: list[tuple[list[Any], list[str]]] = [
        ([first, second, third], ["", node_text(first).text, node_text(second).text]),
        ([nodes[0], third, second], ["", node_text(second).text, ""]),
        ([empty, second], [""]),
        ([third], [""]),
    ]
    same_id = [TextNode(text=word, id_="x") for word in ("one text", "two text")]
    assert [text.text for text in node_texts(same_id)] == ["one text", "two text"]
    for given, before in cases:
        made = node_texts(given)
        assert [text.behind for text in made] == [text and f"{text}\n\n" for text in before]
        plain = node_texts(given, behind_previous=False)
        assert plain == [node_text(node) for node in given if node is not empty]


def test_transform_encodes_behind_the_one_before_unless_told_not_to(
    llm: LazyKVLLM, nodes: list[TextNode]
) -> None:
    first, second, *_ = split(" ".join(node.text for node in nodes[:3]), 1)
    alone = llm.engine.key_of(node_text(second).text)
    pipeline = IngestionPipeline(transformations=[SPLITTER, LazyKVTransform(llm)])
    text = " ".join(node.text for node in nodes[:3])
    pipeline.run(documents=[Document(text=text, metadata={"file_name": "keepers.md"})])
    key = llm.engine.key_of(node_text(second).text)
    assert key != alone and llm.engine.store.has(key)
    assert llm.engine.store.has(llm.engine.key_of(node_text(first).text))
    plain = LazyKVTransform(llm, behind_previous=False)
    assert plain.to_dict() != LazyKVTransform(llm).to_dict()
    third = split("Other " + text, 2)[1]
    alone = llm.engine.key_of(node_text(third).text)
    plain(split("Other " + text, 2))
    assert llm.engine.key_of(node_text(third).text) == alone and llm.engine.store.has(alone)


def test_transform_returns_the_nodes_and_passes_over_empty_ones(
    llm: LazyKVLLM, nodes: list[TextNode]
) -> None:
    mixed: Sequence[Any] = [*nodes, TextNode(text=" \n"), ImageNode(image_url="http://x/y.png")]
    before = [node.model_dump() for node in mixed]
    transform = LazyKVTransform(llm)
    assert transform(mixed) is mixed
    assert asyncio.run(transform.acall(mixed)) is mixed
    assert [node.model_dump() for node in mixed] == before
    assert transform([]) == []
    missing = llm.engine.estimate([node_text(node) for node in nodes])
    assert missing.already_stored == missing.texts == len(nodes)


@pytest.mark.parametrize("mode", ["compact", "refine", "tree_summarize", "accumulate"])
@pytest.mark.parametrize("streaming", [False, True])
def test_query_engines_reuse_every_node(
    llm: LazyKVLLM, index: SummaryIndex, mode: str, streaming: bool
) -> None:
    if streaming and mode == "accumulate":
        pytest.skip("LlamaIndex does not stream accumulate")
    engine = index.as_query_engine(llm=llm, response_mode=mode, streaming=streaming)
    with collect_reports() as reports:
        assert str(engine.query(QUESTION))
    assert sum(report.nodes_reused for report in reports) == 3
    assert sum(report.nodes_recomputed for report in reports) == 0
    assert len(reports) == (3 if mode in {"refine", "accumulate"} else 1)


def test_async_query_reuses_every_node(llm: LazyKVLLM, index: SummaryIndex) -> None:
    engine = index.as_query_engine(llm=llm, response_mode="tree_summarize")
    with collect_reports() as reports:
        assert str(asyncio.run(engine.aquery(QUESTION)))
    assert [report.nodes_reused for report in reports] == [3]


@pytest.mark.parametrize("kind", [ContextChatEngine, CondensePlusContextChatEngine])
@pytest.mark.parametrize("streaming", [False, True])
def test_chat_engines_reuse_every_node_in_every_turn(
    llm: LazyKVLLM, index: SummaryIndex, kind: Any, streaming: bool
) -> None:
    chat = kind.from_defaults(retriever=index.as_retriever(), llm=llm)
    with collect_reports() as reports:
        for question in (QUESTION, "Since when?"):
            if streaming:
                assert "".join(chat.stream_chat(question).response_gen)
            else:
                assert str(chat.chat(question))
    assert all(report.nodes_recomputed == 0 for report in reports)
    assert [report.nodes_reused for report in reports if report.nodes] == [3, 3]


def test_order_of_nodes_is_free(llm: LazyKVLLM, index: SummaryIndex, nodes: list[TextNode]) -> None:
    before = llm.engine.store.stats()
    with collect_reports() as reports:
        SummaryIndex(nodes[::-1]).as_query_engine(llm=llm).query(QUESTION)
    assert reports[0].nodes_reused == 3
    assert llm.engine.store.stats() == before


def test_citation_engine_encodes_the_bare_body_once(
    llm: LazyKVLLM, index: SummaryIndex, nodes: list[TextNode]
) -> None:
    bare = [
        TextNode(text=f"{node.text} It is so.", metadata={"file_name": "c.md"}) for node in nodes
    ]
    LazyKVTransform(llm)(bare)
    engine = CitationQueryEngine.from_args(
        VectorStoreIndex(bare, embed_model=MockEmbedding(embed_dim=4)),
        llm=llm,
        retriever=SummaryIndex(bare).as_retriever(),
    )
    statuses = []
    for _ in range(2):
        with collect_reports() as reports:
            engine.query(QUESTION)
        statuses.append([(str(n.status), n.reason and str(n.reason)) for n in reports[0].nodes])
    assert statuses[0] == [("recomputed", "first use")] * 3
    assert statuses[1] == [("reused", None)] * 3


def test_changed_node_is_told_and_strict_refuses_it(
    llm: LazyKVLLM, index: SummaryIndex, nodes: list[TextNode]
) -> None:
    changed = [nodes[0].model_copy(update={"text": nodes[0].text[:-1] + "!"}), *nodes[1:]]
    query = SummaryIndex(changed).as_query_engine(llm=llm)
    with collect_reports() as reports:
        query.query(QUESTION)
    assert reports[0].nodes_reused == 2
    assert [str(n.reason) for n in reports[0].nodes if n.reason] == ["changed"]
    strict = llm.model_copy(update={"strict": True})
    with pytest.raises(RequestError):
        SummaryIndex(changed).as_query_engine(llm=strict).query(QUESTION)
    SummaryIndex(nodes).as_query_engine(llm=strict).query(QUESTION)


def test_node_cut_by_a_full_window_is_told(llm: LazyKVLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """`compact` fills the window and cuts where it is full, in the middle of a node."""
    flocks = [
        " ".join(f"Gull {n} of flock {flock} has eaten {n * flock} fish." for n in range(12))
        for flock in (7, 11, 13)
    ]
    nodes = [TextNode(text=text) for text in flocks]
    LazyKVTransform(llm)(nodes)
    monkeypatch.setattr("llama_index.core.global_tokenizer", llm.tokenizer)
    small = llm.model_copy(update={"context_window": 900})
    with collect_reports() as reports:
        SummaryIndex(nodes).as_query_engine(llm=small).query("How many fish?")
    assert len(reports) > 1
    statuses = [str(node.reason or node.status) for report in reports for node in report.nodes]
    assert "reused" in statuses
    assert set(statuses) == {"reused", "cut"}


def test_from_documents_and_settings(llm: LazyKVLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    text = " ".join(f"Lamp number {n} of the pier shines {n} nights a year." for n in range(40))
    monkeypatch.setattr(Settings, "_llm", llm)
    monkeypatch.setattr(Settings, "_embed_model", MockEmbedding(embed_dim=4))
    splitter = SentenceSplitter(chunk_size=100, chunk_overlap=0, tokenizer=llm.tokenizer)
    index = VectorStoreIndex.from_documents(
        [Document(text=text, metadata={"file_name": "lamps.md"})],
        transformations=[splitter, LazyKVTransform(llm)],
    )
    stored = list(index.docstore.docs.values())
    assert len(stored) > 3
    for node in stored:
        assert llm.engine.count_tokens(node.get_content(MetadataMode.LLM)) <= 110
    with collect_reports() as reports:
        index.as_query_engine(similarity_top_k=4).query("How many nights?")
    assert (reports[0].nodes_reused, reports[0].nodes_recomputed) == (4, 0)


def test_pipeline_cache_depends_on_what_the_kv_depends_on(
    llm: LazyKVLLM, engine: Engine, nodes: list[TextNode], tmp_path: Any
) -> None:
    transform = LazyKVTransform(llm)
    data = transform.to_dict()
    assert data == LazyKVTransform(llm, show_progress=True).to_dict()
    for name, value in {
        "model": engine.model_name,
        "weights_digest": engine.weights_digest,
        "store": str(engine.store.path),
        "sink": engine.sink,
        "kv_dtype": "float32",
    }.items():
        assert data[name] == value
    other = LazyKVLLM(model="smollm2", store=tmp_path / "kv", kv_dtype="float16", sink="none")
    changed = LazyKVTransform(other).to_dict()
    assert {name for name in data if data[name] != changed[name]} == {
        "store", "sink", "kv_dtype", "encoding",
    }  # fmt: skip

    cache = IngestionCache()
    for made in (transform, LazyKVTransform(other)):
        pipeline = IngestionPipeline(transformations=[made], cache=cache)
        assert list(pipeline.run(nodes=nodes)) == nodes
    assert other.engine.store.stats().nodes == len(nodes)


def test_pickled_transform_finds_its_llm(llm: LazyKVLLM) -> None:
    shared = LazyKVLLM.from_dict(llm.to_dict())
    again = pickle.loads(pickle.dumps(LazyKVTransform(shared)))
    assert again.to_dict() == LazyKVTransform(shared).to_dict()
