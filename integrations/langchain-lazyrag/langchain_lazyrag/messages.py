"""From LangChain's messages to those of the engine."""

from __future__ import annotations

from collections.abc import Sequence

from langchain_core.messages import AIMessage, BaseMessage, ChatMessage, HumanMessage, SystemMessage

from lazyrag.errors import RequestError

_ROLES: tuple[tuple[type[BaseMessage], str], ...] = (
    (HumanMessage, "user"),
    (AIMessage, "assistant"),
    (SystemMessage, "system"),
)
_NOT_SAID = frozenset({"reasoning", "thinking", "redacted_thinking"})
"""Blocks of an answer that were not meant for the reader; other models leave them in a history."""


def engine_messages(messages: Sequence[BaseMessage]) -> list[dict[str, str]]:
    """The messages as the engine takes them: a role and one text each.

    Raises:
        RequestError: a message of a kind, or with a content, that a text model cannot read.
    """
    return [{"role": _role(message), "content": message_text(message)} for message in messages]


def _role(message: BaseMessage) -> str:
    if isinstance(message, ChatMessage):
        return message.role
    for kind, role in _ROLES:
        if isinstance(message, kind):
            return role
    raise RequestError(
        f"the prompt holds a {type(message).__name__}; a local text model has no tools, so say "
        "what it says in a HumanMessage."
    )


def message_text(message: BaseMessage) -> str:
    """The text blocks of ``message``; a line end between those of a prompt.

    Raises:
        RequestError: it holds an image, a sound, a file, or nothing but calls of tools.
    """
    if isinstance(message, AIMessage) and message.tool_calls:
        raise RequestError(
            "an AIMessage holds calls of tools; a local text model has no tools, so leave the "
            "message out or say in its content what was called."
        )
    if isinstance(message.content, str):
        return message.content
    texts = []
    for block in message.content:
        if isinstance(block, str):
            texts.append(block)
        elif block.get("type") == "text" and isinstance(block.get("text"), str):
            texts.append(block["text"])
        elif block.get("type") not in _NOT_SAID:
            raise RequestError(
                f"a {message.type} message holds a block of type {block.get('type')!r}; a local "
                "text model reads text only."
            )
    return ("" if isinstance(message, AIMessage) else "\n").join(texts)
