"""From LlamaIndex's messages and keyword arguments to those of the engine."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

from llama_index.core.base.llms.types import CachePoint, ChatMessage, MessageRole, TextBlock

from lazyrag.errors import RequestError
from lazyrag.types import GenerationOptions, Quality

RENAMED = {"max_tokens": "max_new_tokens"}
IGNORED = frozenset({"extra_headers"})
"""What LlamaIndex passes to every LLM and what has no meaning here: its `DocumentContextExtractor`
sends a header that switches on prompt caching at a remote service."""

_ROLES = {
    MessageRole.DEVELOPER: "system",
    MessageRole.CHATBOT: "assistant",
    MessageRole.MODEL: "assistant",
}
_NAMES = tuple(field.name for field in fields(GenerationOptions))
_NEVER_NONE = frozenset({"temperature", "repetition_penalty", "quality", "strict"})


def with_arguments(options: GenerationOptions, arguments: Mapping[str, Any]) -> GenerationOptions:
    """``options`` with one call's keyword arguments on top.

    None switches an option off that may be None, and leaves any other as it is.

    Raises:
        RequestError: an argument no option is named after, or a value of the wrong kind.
    """
    changes: dict[str, Any] = {}
    for given, value in arguments.items():
        if given in IGNORED:
            continue
        name = RENAMED.get(given, given)
        if name not in _NAMES:
            known = ", ".join(sorted((*_NAMES, *RENAMED)))
            raise RequestError(f"LazyKVLLM knows no argument {given!r}; it takes {known}.")
        if name in changes:
            raise RequestError(f"{given} is given twice, once as {name}; give one of them.")
        if value is None and name in _NEVER_NONE:
            continue
        changes[name] = value
    if "stop" in changes:
        changes["stop"] = stop_strings(changes["stop"])
    if "quality" in changes:
        changes["quality"] = parse_quality(changes["quality"])
    return replace(options, **changes)


def stop_strings(stop: str | Iterable[str] | None) -> tuple[str, ...]:
    """One string, several or none, as a tuple."""
    if stop is None:
        return ()
    return (stop,) if isinstance(stop, str) else tuple(stop)


def parse_quality(quality: str) -> Quality:
    """A `Quality` by its name.

    Raises:
        RequestError: there is none of that name.
    """
    try:
        return Quality(quality)
    except ValueError:
        raise RequestError(f"quality is {quality!r}; use 'fast' or 'full'.") from None


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
