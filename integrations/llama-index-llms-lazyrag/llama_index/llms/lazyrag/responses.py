"""From the engine's generations to LlamaIndex's responses.

A stream yields one chunk per delta as it comes and, when the report is known, a last chunk without
new text; so no delta is held back and an empty answer is a stream of one chunk.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from typing import Any

from llama_index.core.base.llms.types import (
    ChatMessage,
    ChatResponse,
    ChatResponseAsyncGen,
    ChatResponseGen,
    CompletionResponse,
    CompletionResponseAsyncGen,
    CompletionResponseGen,
    MessageRole,
)

from lazyrag import Generation, GenerationStream
from lazyrag.adapter.reports import Collectors

Deltas = AsyncGenerator[str | Generation, None]


def completion(generation: Generation, collectors: Collectors) -> CompletionResponse:
    """A whole answer to a prompt."""
    return CompletionResponse(
        text=generation.text, raw=_raw(generation), additional_kwargs=_extra(generation, collectors)
    )


def chat(generation: Generation, collectors: Collectors) -> ChatResponse:
    """A whole answer to a conversation."""
    return ChatResponse(
        message=_assistant(generation.text),
        raw=_raw(generation),
        additional_kwargs=_extra(generation, collectors),
    )


def completion_chunks(stream: GenerationStream, collectors: Collectors) -> CompletionResponseGen:
    """An answer to a prompt as it comes."""
    for text, item in _joined(stream):
        yield _completion_chunk(text, item, collectors)


def chat_chunks(stream: GenerationStream, collectors: Collectors) -> ChatResponseGen:
    """An answer to a conversation as it comes."""
    for text, item in _joined(stream):
        yield _chat_chunk(text, item, collectors)


async def acompletion_chunks(deltas: Deltas, collectors: Collectors) -> CompletionResponseAsyncGen:
    """As `completion_chunks`, from a worker thread."""
    text = ""
    async with aclosing(deltas):
        async for item in deltas:
            text += item if isinstance(item, str) else ""
            yield _completion_chunk(text, item, collectors)


async def achat_chunks(deltas: Deltas, collectors: Collectors) -> ChatResponseAsyncGen:
    """As `chat_chunks`, from a worker thread."""
    text = ""
    async with aclosing(deltas):
        async for item in deltas:
            text += item if isinstance(item, str) else ""
            yield _chat_chunk(text, item, collectors)


def _joined(stream: GenerationStream) -> Iterator[tuple[str, str | Generation]]:
    text = ""
    with stream:
        for delta in stream:
            text += delta
            yield text, delta
        yield text, stream.result


def _completion_chunk(
    text: str, item: str | Generation, collectors: Collectors
) -> CompletionResponse:
    if isinstance(item, str):
        return CompletionResponse(text=text, delta=item)
    return completion(item, collectors).model_copy(update={"delta": ""})


def _chat_chunk(text: str, item: str | Generation, collectors: Collectors) -> ChatResponse:
    if isinstance(item, str):
        return ChatResponse(message=_assistant(text), delta=item)
    return chat(item, collectors).model_copy(update={"delta": ""})


def _assistant(text: str) -> ChatMessage:
    return ChatMessage(role=MessageRole.ASSISTANT, content=text)


def _raw(generation: Generation) -> dict[str, Any]:
    return {"finish_reason": generation.finish_reason, "token_ids": list(generation.token_ids)}


def _extra(generation: Generation, collectors: Collectors) -> dict[str, Any]:
    for reports in collectors:
        reports.append(generation.report)
    return {"lazyrag": generation.report.to_dict()}
