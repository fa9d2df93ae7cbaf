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
    document_texts,
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


def test_documents_of_one_source_stand_behind_the_one_before() -> None:
    """In the order given; where the source is not said, or is another, a document stands alone."""

    def document(text: str, source: str | None) -> Document:
        return Document(page_content=text, metadata={} if source is None else {"source": source})

    given = [
        document("one", "a.md"),
        document(" two ", "a.md"),
        document("  ", "b.md"),
        document("three", "a.md"),
        document("four", "b.md"),
        document("five", None),
        document("six", None),
        document("seven", ""),
        document("eight", ""),
    ]
    made = list(document_texts(given))
    assert [text.behind for text in made] == ["", "one\n\n", "two\n\n", "", "", "", "", ""]
    plain = list(document_texts(given, behind_previous=False))
    assert plain == [document_text(one) for one in given if one.page_content.strip()]
    named = list(document_texts(given[:2], WITH_SOURCE, [Reference("d", "1"), Reference("d", "2")]))
    assert named[1].behind == "Source: a.md\none\n\n" and named[1].aliases == ("two",)
    assert [text.reference for text in named] == [Reference("d", "1"), Reference("d", "2")]
    with pytest.raises(ValueError, match="shorter"):
        list(document_texts(given[:2], None, [Reference("d", "1")]))
    for strange in (["a.md"], {"name": "a.md"}, 7, b"a.md"):
        both = [Document(page_content=word, metadata={"source": strange}) for word in ("x", "y")]
        assert [text.behind for text in document_texts(both)] == ["", ""]


def test_precompute_encodes_behind_the_one_before(chat: ChatLazyKV) -> None:
    given = [
        Document(page_content=f"{word} of the pier shines.", metadata={"source": "pier.md"})
        for word in ("Lamp", "Bell")
    ]
    engine = chat.engine
    lamp, bell = (engine.key_of(one.page_content) for one in given)
    assert precompute_documents(given[1:], chat) == [bell]
    assert precompute_documents(given, chat) == [lamp, bell]  # what is known stays as it is
    given[1].page_content += " It rings."
    alone = engine.key_of(given[1].page_content)
    assert precompute_documents(given, chat, behind_previous=False) == [lamp, alone]
    given[1].page_content += " It rings again."
    alone = engine.key_of(given[1].page_content)
    first, second = precompute_documents(given, chat)
    assert first == lamp and second != alone
    assert chat.engine.key_of(given[1].page_content) == second


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
