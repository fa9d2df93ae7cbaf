"""The texts of LangChain documents and examples in the exact form in which they reach the model."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import repeat
from typing import Any, Protocol

from langchain_core.documents import Document
from langchain_core.prompts import (
    BaseChatPromptTemplate,
    BasePromptTemplate,
    StringPromptTemplate,
    format_document,
)
from langchain_core.prompts.message import BaseMessagePromptTemplate

from langchain_lazyrag.messages import message_text
from lazyrag import Engine, NodeKey, NodeText, Reference
from lazyrag.adapter.passages import following
from lazyrag.errors import RequestError

Progress = Callable[[int, int], None] | bool
DocumentPrompt = BasePromptTemplate[str]


class HasEngine(Protocol):
    """A `ChatLazyKV` or a `LazyKVLLM`."""

    @property
    def engine(self) -> Engine:
        """The engine that encodes and stores."""
        ...


def format_docs(documents: Iterable[Document]) -> str:
    """The contents with a blank line between; every ingested one is found again in it."""
    return "\n\n".join(document.page_content for document in documents)


def document_text(
    document: Document,
    document_prompt: DocumentPrompt | None = None,
    reference: Reference | None = None,
) -> NodeText:
    """What to encode for ``document``: its content, stripped.

    Args:
        document: its ``page_content`` is what chains put into prompts.
        document_prompt: of the chain (`create_stuff_documents_chain` takes one), if it writes
            metadata beside the content: then the whole of it is the node, and the content alone an
            alias, encoded at its first use.
        reference: who needs the node; None keeps it for good.

    Raises:
        ValueError: the document lacks metadata that ``document_prompt`` asks for.
    """
    body = document.page_content.strip()
    text = body if document_prompt is None else format_document(document, document_prompt).strip()
    aliases = (body,) if body and body != text else ()
    label = document.id or document.metadata.get("source")
    return NodeText(
        text=text,
        aliases=aliases,
        label=None if label is None else str(label),
        reference=reference,
    )


def document_texts(
    documents: Iterable[Document],
    document_prompt: DocumentPrompt | None = None,
    references: Sequence[Reference] = (),
    *,
    behind_previous: bool = True,
) -> Iterator[NodeText]:
    """`document_text` of every document that has content; read as a stream.

    Args:
        documents: in the order in which they were split.
        document_prompt: see `document_text`.
        references: as many as documents; none = they are kept for good.
        behind_previous: encode a document behind the one before it, if both name the same
            ``source`` in their metadata. Of those that an update brings that is the one before it
            among what has changed.

    Raises:
        ValueError: see `document_text`.
    """
    last: tuple[object, NodeText] | None = None
    for document, reference in zip(documents, references or repeat(None), strict=bool(references)):
        if not document.page_content.strip():
            continue
        text = document_text(document, document_prompt, reference)
        source = document.metadata.get("source")
        named = isinstance(source, str) and source != ""
        previous = last[1] if named and last is not None and source == last[0] else None
        yield following(text, previous) if behind_previous else text
        last = source, text


def precompute_documents(
    documents: Iterable[Document],
    chat: HasEngine,
    *,
    document_prompt: DocumentPrompt | None = None,
    behind_previous: bool = True,
    progress: Progress = False,
) -> list[NodeKey]:
    """Compute and store the KV of every document that is not stored yet; read as a stream.

    Documents without content are passed over. `LazyKVVectorStore` does this on its own.

    Args:
        documents: as they will be retrieved, after splitting.
        chat: the model that will read them.
        document_prompt: see `document_text`.
        behind_previous: see `document_texts`: answers are nearer to full attention's, encoding
            takes up to 128 tokens a document more.
        progress: called with (tokens done, tokens in all; 0 = not known), or True for a bar.

    Returns:
        One key a document with content, in order.

    Raises:
        RequestError: a document is longer than the context window; names which.
        StoreError: the disk cannot hold it.
    """
    texts = document_texts(documents, document_prompt, behind_previous=behind_previous)
    given = list(texts) if isinstance(documents, list | tuple) else texts
    return chat.engine.precompute(given, progress=progress)


def precompute_examples(
    examples: Iterable[Mapping[str, Any]],
    example_prompt: StringPromptTemplate | BaseChatPromptTemplate | BaseMessagePromptTemplate,
    chat: HasEngine,
    *,
    progress: Progress = False,
) -> list[NodeKey]:
    """Compute and store the KV of few-shot examples, so that a selector may choose any of them.

    Args:
        examples: as `FewShotPromptTemplate` or its example selector takes them.
        example_prompt: of the same template. One that makes messages has a node a message.
        chat: the model that will read them.
        progress: as in `precompute_documents`.

    Returns:
        One key a text, in order.

    Raises:
        RequestError, StoreError: as `precompute_documents`.
        KeyError: an example lacks what ``example_prompt`` asks for.
    """
    texts = [text for example in examples for text in _example_texts(example_prompt, example)]
    return chat.engine.precompute(texts, progress=progress)


def _example_texts(prompt: Any, example: Mapping[str, Any]) -> Iterator[str]:
    if isinstance(prompt, BaseChatPromptTemplate | BaseMessagePromptTemplate):
        texts = [message_text(message) for message in prompt.format_messages(**example)]
    elif isinstance(prompt, StringPromptTemplate):
        texts = [prompt.format(**example)]
    else:
        raise RequestError(
            f"example_prompt is a {type(prompt).__name__}; give a PromptTemplate or a "
            "ChatPromptTemplate."
        )
    yield from (stripped for text in texts if (stripped := text.strip()))
