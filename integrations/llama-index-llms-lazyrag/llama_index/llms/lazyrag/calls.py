"""From LlamaIndex's messages to those of the engine."""

from __future__ import annotations

from collections.abc import Sequence

from llama_index.core.base.llms.types import CachePoint, ChatMessage, MessageRole, TextBlock

from lazyrag.errors import RequestError

IGNORED = frozenset({"extra_headers"})
"""What LlamaIndex passes to every LLM and what has no meaning here: its `DocumentContextExtractor`
sends a header that switches on prompt caching at a remote service."""

_ROLES = {
    MessageRole.DEVELOPER: "system",
    MessageRole.CHATBOT: "assistant",
    MessageRole.MODEL: "assistant",
}


def engine_messages(messages: Sequence[ChatMessage]) -> list[dict[str, str]]:
    """The messages as the engine takes them: a role and one text each.

    Raises:
        RequestError: a message holds something that is not text.
    """
    return [
        {"role": _ROLES.get(message.role, message.role.value), "content": message_text(message)}
        for message in messages
    ]


def message_text(message: ChatMessage) -> str:
    """The text blocks of ``message``, a line end between them, as LlamaIndex joins them.

    Raises:
        RequestError: it holds an image, a sound, a tool call or any other block that is not text.
    """
    texts = []
    for block in message.blocks:
        if isinstance(block, TextBlock):
            texts.append(block.text)
        elif not isinstance(block, CachePoint):
            raise RequestError(
                f"a {message.role.value} message holds a {type(block).__name__}; LazyKVLLM reads "
                "text only, so give it TextBlocks."
            )
    return "\n".join(texts)
