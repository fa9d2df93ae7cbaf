"""Documents and examples become exactly the texts that reach the model."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from langchain_core.documents import Document
from langchain_core.prompts import (
    ChatPromptTemplate,
    HumanMessagePromptTemplate,
    PromptTemplate,
)
from langchain_lazyrag import (
    ChatLazyKV,
    document_text,
    format_docs,
    precompute_documents,
    precompute_examples,
)

from lazyrag import NodeText, Reference, RequestError

WITH_SOURCE = PromptTemplate.from_template("Source: {source}\n{page_content}")


def test_text_of_a_document_is_its_content_stripped() -> None:
    document = Document(page_content="\n One fact. \n", metadata={"source": "a.md"})
    assert document_text(document) == NodeText("One fact.", label="a.md")
    reference = Reference("docs", "1")
    assert document_text(document, WITH_SOURCE, reference) == NodeText(
        "Source: a.md\n\n One fact.", aliases=("One fact.",), label="a.md", reference=reference
    )
    assert document_text(Document(page_content="x", id="7")).label == "7"


def test_document_prompt_that_asks_for_more_than_there_is() -> None:
    with pytest.raises(ValueError, match="source"):
        document_text(Document(page_content="x"), WITH_SOURCE)


def test_precompute_streams_and_passes_over_what_is_empty(
    chat: ChatLazyKV, documents: list[Document]
) -> None:
    taken: list[int] = []

    def stream() -> Iterator[Document]:
        for number, document in enumerate([documents[0], Document(page_content=" \n"), *documents]):
            taken.append(number)
            yield document

    keys = precompute_documents(stream(), chat)
    assert taken == [0, 1, 2, 3, 4]
    assert len(keys) == 4 and keys[0] == keys[1] and len(set(keys)) == 3
    assert precompute_documents([], chat) == []
    seen: list[tuple[int, int]] = []
    precompute_documents(documents, chat, progress=lambda done, total: seen.append((done, total)))
    assert seen == [(0, 0)]  # nothing is left to compute


def test_document_longer_than_the_window_is_named(chat: ChatLazyKV) -> None:
    long = Document(page_content="word " * 9000, metadata={"source": "long.md"})
    with pytest.raises(RequestError, match=r"long\.md.*8,192|long\.md.*window"):
        precompute_documents([long], chat)


def test_format_docs_keeps_every_text_verbatim(documents: list[Document]) -> None:
    text = format_docs(documents)
    assert all(document.page_content in text for document in documents)
    assert text.count("\n\n") == 2


def test_examples_are_nodes_one_a_message(chat: ChatLazyKV) -> None:
    examples = [{"question": "What is two plus two?", "answer": "Two plus two is four."}]
    as_text = PromptTemplate.from_template("Q: {question}\nA: {answer}")
    (key,) = precompute_examples(examples, as_text, chat)
    assert key == chat.engine.key_of("Q: What is two plus two?\nA: Two plus two is four.")
    as_messages = ChatPromptTemplate.from_messages([("human", "{question}"), ("ai", "{answer}")])
    assert precompute_examples(examples, as_messages, chat) == [
        chat.engine.key_of("What is two plus two?"),
        chat.engine.key_of("Two plus two is four."),
    ]
    as_message = HumanMessagePromptTemplate.from_template("{question}")
    assert precompute_examples(examples, as_message, chat) == [
        chat.engine.key_of("What is two plus two?")
    ]
    with pytest.raises(RequestError, match="example_prompt"):
        precompute_examples(examples, "Q: {question}", chat)  # type: ignore[arg-type]
    with pytest.raises(KeyError, match="answer"):
        precompute_examples([{"question": "x"}], as_text, chat)
