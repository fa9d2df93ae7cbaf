"""From the engine's generations to LangChain's results.

A stream yields one chunk per delta as it comes and, when the report is known, a last chunk without
new text.
"""

from __future__ import annotations

from typing import Any

from langchain_core.messages import AIMessage, AIMessageChunk
from langchain_core.messages.ai import InputTokenDetails, UsageMetadata
from langchain_core.outputs import ChatGenerationChunk, GenerationChunk
from langchain_core.outputs import Generation as TextGeneration

from lazyrag import Generation
from lazyrag.adapter.reports import Collectors

PROVIDER = "lazyrag"


def message(generation: Generation, model: str, collectors: Collectors) -> AIMessage:
    """A whole answer."""
    return AIMessage(
        content=generation.text,
        response_metadata=metadata(generation, model, collectors),
        usage_metadata=usage(generation),
    )


def message_chunk(
    item: str | Generation, model: str, collectors: Collectors
) -> ChatGenerationChunk:
    """One delta, or the last chunk of an answer."""
    if isinstance(item, str):
        return ChatGenerationChunk(message=AIMessageChunk(content=item))
    return ChatGenerationChunk(
        message=AIMessageChunk(
            content="",
            response_metadata=metadata(item, model, collectors),
            usage_metadata=usage(item),
            chunk_position="last",
        )
    )


def text(generation: Generation, model: str, collectors: Collectors) -> TextGeneration:
    """A whole answer of the text model."""
    info = metadata(generation, model, collectors)
    return TextGeneration(text=generation.text, generation_info=info)


def text_chunk(item: str | Generation, model: str, collectors: Collectors) -> GenerationChunk:
    """One delta, or the last chunk of an answer of the text model."""
    if isinstance(item, str):
        return GenerationChunk(text=item)
    return GenerationChunk(text="", generation_info=metadata(item, model, collectors))


def usage(generation: Generation) -> UsageMetadata:
    """Tokens of prompt and answer; ``cache_read`` are those whose KV was reused."""
    report = generation.report
    output = len(generation.token_ids)
    reused = report.tokens_reused + report.live_tokens_reused
    return UsageMetadata(
        input_tokens=report.prompt_tokens,
        output_tokens=output,
        total_tokens=report.prompt_tokens + output,
        input_token_details=InputTokenDetails(cache_read=reused),
    )


def metadata(generation: Generation, model: str, collectors: Collectors) -> dict[str, Any]:
    """What stands beside the text; the report is also handed to who collects reports."""
    for reports in collectors:
        reports.append(generation.report)
    return {
        "model_name": model,
        "model_provider": PROVIDER,
        "finish_reason": generation.finish_reason,
        "lazyrag": generation.report.to_dict(),
    }
