"""Every whole node is reused in every kind of chain, or the report says why not."""

from __future__ import annotations

import asyncio
import json
from typing import Any, TypedDict

import pytest
from langchain_classic.chains import create_history_aware_retriever, create_retrieval_chain
from langchain_classic.chains.combine_documents import create_stuff_documents_chain
from langchain_core.documents import Document
from langchain_core.embeddings import Embeddings
from langchain_core.example_selectors import SemanticSimilarityExampleSelector
from langchain_core.messages import AIMessage, AnyMessage, HumanMessage
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import (
    ChatPromptTemplate,
    FewShotChatMessagePromptTemplate,
    FewShotPromptTemplate,
    MessagesPlaceholder,
    PromptTemplate,
)
from langchain_core.retrievers import BaseRetriever
from langchain_core.runnables import RunnableLambda, RunnablePassthrough
from langchain_core.vectorstores import InMemoryVectorStore
from langchain_lazyrag import (
    ChatLazyKV,
    LazyKVVectorStore,
    collect_reports,
    format_docs,
    precompute_documents,
    precompute_examples,
)
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import END, START, StateGraph

from lazyrag import RequestError, ReuseReport

QUESTION = "Who keeps the lighthouse?"
PROMPT = ChatPromptTemplate.from_messages(
    [
        ("system", "Answer from these documents only.\n\n{context}"),
        ("human", "{input}"),
    ]
)


@pytest.fixture
def vectors(
    chat: ChatLazyKV, documents: list[Document], embeddings: Embeddings
) -> LazyKVVectorStore:
    store = LazyKVVectorStore(InMemoryVectorStore(embeddings), chat, owner="chains")
    store.add_documents(documents)
    return store


@pytest.fixture
def retriever(vectors: LazyKVVectorStore) -> BaseRetriever:
    """Every document for every question."""
    return vectors.as_retriever(search_kwargs={"k": 3})


def counts(report: ReuseReport) -> tuple[int, int]:
    return report.nodes_reused, report.nodes_recomputed


def reasons(report: ReuseReport) -> set[str]:
    return {str(node.reason) for node in report.nodes if node.reason is not None}


def lcel(retriever: BaseRetriever, chat: ChatLazyKV) -> Any:
    """The chain of LangChain's own tutorial."""
    inputs = {"context": retriever | format_docs, "input": RunnablePassthrough()}
    return inputs | PROMPT | chat | StrOutputParser()


@pytest.mark.parametrize("form", ["invoke", "stream", "batch", "ainvoke", "astream"])
def test_lcel_chain(retriever: BaseRetriever, chat: ChatLazyKV, form: str) -> None:
    chain = lcel(retriever, chat)

    async def astream() -> str:
        return "".join([delta async for delta in chain.astream(QUESTION)])

    with collect_reports() as reports:
        if form == "invoke":
            answer = chain.invoke(QUESTION)
        elif form == "stream":
            answer = "".join(chain.stream(QUESTION))
        elif form == "batch":
            (answer,) = chain.batch([QUESTION])
        elif form == "ainvoke":
            answer = asyncio.run(chain.ainvoke(QUESTION))
        else:
            answer = asyncio.run(astream())
    assert answer
    assert [counts(report) for report in reports] == [(3, 0)]


def test_order_of_documents_is_free(
    retriever: BaseRetriever, chat: ChatLazyKV, documents: list[Document]
) -> None:
    before = chat.engine.store.stats()
    for order in ((0, 1, 2), (2, 1, 0), (1, 2, 0)):
        backwards = RunnableLambda(lambda _, order=order: [documents[n] for n in order])
        with collect_reports() as reports:
            lcel(backwards, chat).invoke(QUESTION)
        assert counts(reports[0]) == (3, 0)
    assert chat.engine.store.stats() == before


def test_stuff_and_retrieval_chains(retriever: BaseRetriever, chat: ChatLazyKV) -> None:
    chain = create_retrieval_chain(retriever, create_stuff_documents_chain(chat, PROMPT))
    with collect_reports() as reports:
        result = chain.invoke({"input": QUESTION})
    assert len(result["context"]) == 3 and result["answer"]
    assert [counts(report) for report in reports] == [(3, 0)]


def test_stuff_chain_whose_documents_have_a_header(
    chat: ChatLazyKV, documents: list[Document]
) -> None:
    """The header may be part of the node, or stand before the bare content."""
    with_source = PromptTemplate.from_template("Source: {source}\n{page_content}")
    chain = create_stuff_documents_chain(chat, PROMPT, document_prompt=with_source)
    precompute_documents(documents, chat)
    with collect_reports() as bare:
        chain.invoke({"context": documents, "input": QUESTION})
    keys = precompute_documents(documents, chat, document_prompt=with_source)
    with collect_reports() as whole:
        chain.invoke({"context": documents, "input": QUESTION})
    assert counts(bare[0]) == counts(whole[0]) == (3, 0)
    assert [node.key for node in whole[0].nodes] == keys
    assert whole[0].tokens_reused > bare[0].tokens_reused


def test_conversation_with_rewritten_questions(retriever: BaseRetriever, chat: ChatLazyKV) -> None:
    rewrite = ChatPromptTemplate.from_messages(
        [MessagesPlaceholder("chat_history"), ("human", "Say it in one sentence: {input}")]
    )
    answer = ChatPromptTemplate.from_messages(
        [
            ("system", "Answer from these documents.\n\n{context}"),
            MessagesPlaceholder("chat_history"),
            ("human", "{input}"),
        ]
    )
    chain = create_retrieval_chain(
        create_history_aware_retriever(chat, retriever, rewrite),
        create_stuff_documents_chain(chat, answer),
    )
    history: list[AnyMessage] = []
    for question in (QUESTION, "Since when?", "And the ferry?"):
        with collect_reports() as reports:
            result = chain.invoke({"input": question, "chat_history": history})
        history += [HumanMessage(question), AIMessage(result["answer"])]
        assert counts(reports[-1]) == (3, 0)


class RagState(TypedDict):
    """A RAG loop: retrieve, answer, and once more when the answer is not good."""

    question: str
    documents: list[Document]
    answer: str
    rounds: int


@pytest.mark.parametrize("asynchronous", [False, True])
def test_langgraph_loop(retriever: BaseRetriever, chat: ChatLazyKV, asynchronous: bool) -> None:
    def retrieve(state: RagState) -> dict[str, Any]:
        found = retriever.invoke(state["question"])
        return {"documents": found[::-1] if state["rounds"] else found}

    def answer(state: RagState) -> dict[str, Any]:
        prompt = PROMPT.invoke(
            {"context": format_docs(state["documents"]), "input": state["question"]}
        )
        return {"answer": chat.invoke(prompt).text, "rounds": state["rounds"] + 1}

    graph = StateGraph(RagState)
    graph.add_node("retrieve", retrieve)
    graph.add_node("respond", answer)
    graph.add_edge(START, "retrieve")
    graph.add_edge("retrieve", "respond")
    graph.add_conditional_edges(
        "respond", lambda state: "retrieve" if state["rounds"] < 3 else END, ["retrieve", END]
    )
    app = graph.compile(checkpointer=InMemorySaver())
    begin = RagState(question=QUESTION, documents=[], answer="", rounds=0)
    config: Any = {"configurable": {"thread_id": "1"}}
    with collect_reports() as reports:
        if asynchronous:
            state = asyncio.run(app.ainvoke(begin, config))
        else:
            state = app.invoke(begin, config)
    assert state["rounds"] == 3 and state["answer"]
    assert [counts(report) for report in reports] == [(3, 0)] * 3


def test_langgraph_streams_tokens_and_stops(retriever: BaseRetriever, chat: ChatLazyKV) -> None:
    def answer(state: RagState) -> dict[str, Any]:
        prompt = PROMPT.invoke({"context": format_docs(retriever.invoke("x")), "input": QUESTION})
        return {"answer": chat.invoke(prompt).text}

    graph = StateGraph(RagState)
    graph.add_node("respond", answer)
    graph.add_edge(START, "respond")
    begin = RagState(question=QUESTION, documents=[], answer="", rounds=0)
    streamed = [part for part, _ in graph.compile().stream(begin, stream_mode="messages")]
    assert len(streamed) > 2
    assert streamed[-1].response_metadata["lazyrag"]["nodes_reused"] == 3


EXAMPLES = [
    {
        "question": f"How many legs do {count} {animal} have together, counted one by one?",
        "answer": f"{count} {animal} have {count * legs} legs together, {legs} each.",
    }
    for count, animal, legs in ((2, "dogs", 4), (3, "hens", 2), (5, "beetles", 6), (4, "cats", 4))
]


def selector(embeddings: Embeddings, count: int) -> SemanticSimilarityExampleSelector:
    return SemanticSimilarityExampleSelector.from_examples(
        EXAMPLES, embeddings, InMemoryVectorStore, k=count, input_keys=["question"]
    )


def test_few_shot_examples_are_nodes(chat: ChatLazyKV, embeddings: Embeddings) -> None:
    """Chosen per question, in any order; the text before and after them changes."""
    one = PromptTemplate.from_template("Question: {question}\nAnswer: {answer}")
    precompute_examples(EXAMPLES, one, chat)
    prompt = FewShotPromptTemplate(
        example_selector=selector(embeddings, 3),
        example_prompt=one,
        prefix="Answer as in these examples about {topic}.",
        suffix="Question: {question}\nAnswer:",
        input_variables=["question", "topic"],
    )
    chosen = set()
    for number in range(4):
        with collect_reports() as reports:
            question = f"How many legs do {number} spiders have?"
            (prompt | chat).invoke({"question": question, "topic": f"animals, part {number}"})
        assert counts(reports[0]) == (3, 0)
        chosen.add(tuple(node.key for node in reports[0].nodes))
    assert len(chosen) > 1


def test_few_shot_messages_are_nodes(chat: ChatLazyKV, embeddings: Embeddings) -> None:
    one = ChatPromptTemplate.from_messages([("human", "{question}"), ("ai", "{answer}")])
    precompute_examples(EXAMPLES, one, chat)
    shots = FewShotChatMessagePromptTemplate(
        example_selector=selector(embeddings, 2), example_prompt=one, input_variables=["question"]
    )
    prompt = ChatPromptTemplate.from_messages(
        [("system", "Count."), shots, ("human", "{question}")]
    )
    with collect_reports() as reports:
        (prompt | chat).invoke({"question": "How many legs do seven cows have?"})
    assert counts(reports[0]) == (4, 0)


LINES = Document(
    page_content='The keeper\'s list:\n- oil for the lamp\n- "red" paint\n- bread, salt and tea\n',
    metadata={"source": "list.md"},
)


@pytest.mark.parametrize("how", ["repr", "json", "repr of texts"])
def test_forgotten_format_docs_is_reported(
    chat: ChatLazyKV, documents: list[Document], how: str
) -> None:
    """A list put into a prompt is its repr: line ends are spelled out, texts stand in a line."""
    given = [*documents, LINES]
    precompute_documents(given, chat)
    context: Any = given
    if how == "json":
        context = json.dumps([{"text": document.page_content} for document in given])
    elif how == "repr of texts":
        context = [document.page_content for document in given]
    with collect_reports() as reports:
        (PROMPT | chat).invoke({"context": context, "input": QUESTION})
    (report,) = reports
    assert len(report.nodes) == 4
    by_key = {node.key: node for node in report.nodes}
    missed = by_key[chat.engine.key_of(LINES.page_content.strip())]
    assert (str(missed.status), str(missed.reason)) == ("recomputed", "quoted")
    assert any("format" in warning for warning in report.warnings)
    assert "quoted" in report.summary()
    with pytest.raises(RequestError, match="quoted"):
        (PROMPT | chat.bind(strict=True)).invoke({"context": context, "input": QUESTION})


def test_formatted_prompt_has_no_warning(chat: ChatLazyKV) -> None:
    precompute_documents([LINES], chat)
    with collect_reports() as reports:
        (PROMPT | chat).invoke({"context": format_docs([LINES]), "input": "Say 'red' or \"blue\"."})
    assert counts(reports[0]) == (1, 0)
    assert reports[0].warnings == []


def test_changed_document_is_told_and_strict_refuses_it(
    chat: ChatLazyKV, documents: list[Document]
) -> None:
    pier = Document(
        page_content="The pier of Norrhamn was rebuilt in 1931, after a winter storm had taken it."
    )
    precompute_documents([pier, *documents], chat)
    changed = Document(page_content=pier.page_content.replace("1931", "1932"))
    context = format_docs([changed, *documents[1:]])
    with collect_reports() as reports:
        (PROMPT | chat).invoke({"context": context, "input": QUESTION})
    assert counts(reports[0]) == (2, 1)
    assert reasons(reports[0]) == {"changed"}
    with pytest.raises(RequestError, match="strict"):
        (PROMPT | chat.bind(strict=True)).invoke({"context": context, "input": QUESTION})
