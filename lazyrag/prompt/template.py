"""Chat templates, rendered so that what a message says stays apart from what the template writes.

Every content is replaced by a random word, the template is rendered, and the rendering is cut at
those words. The rendering of the real messages then has to be the same literals with the
contents, as they are or trimmed by the template, between them.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime

import jinja2
from transformers import PreTrainedTokenizerBase

from lazyrag.errors import RequestError
from lazyrag.prompt.tokenise import find_chat_template

_ROLE = re.compile(r"[A-Za-z][\w-]*")
_SINK_DATE = datetime(2024, 7, 26)
_SINK_CLOCK = (
    "{% macro strftime_now(format) %}{{ format"
    + "".join(f" | replace('%{code}', '{_SINK_DATE:%{code}}')" for code in "aAbBdHIjmMpSyY")
    + " }}{% endmacro %}"
)


@dataclass(frozen=True, slots=True)
class TemplateText:
    """Written by the template; its control tokens are meant."""

    text: str


@dataclass(frozen=True, slots=True)
class Content:
    """What the template put there of the content of message number ``message``; mere text."""

    text: str
    message: int


Piece = TemplateText | Content


def render_chat(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[Mapping[str, str]]
) -> list[Piece]:
    """The messages as the template writes them, opened for the assistant's answer.

    The texts of the pieces, joined, are exactly what the template renders. An empty content has
    no piece; a template may leave out a content, or put it elsewhere than in message order. A
    template that insists on turns gets neighbours of one role as one message.

    Raises:
        RequestError: no messages, a malformed one, no template, the template refuses the
            messages, or it rewrites a content so that it cannot be found again.
    """
    _check(messages)
    try:
        return _pieces(tokenizer, messages)
    except RequestError:
        turns = _turns(messages)
        if len(turns) == len(messages):
            raise
        return _pieces(tokenizer, turns)


def _turns(messages: Sequence[Mapping[str, str]]) -> list[dict[str, str]]:
    """Neighbours of one role as one message, a blank line between their contents."""
    turns: list[dict[str, str]] = []
    for message in messages:
        role, content = message["role"], message["content"]
        if turns and turns[-1]["role"] == role:
            turns[-1]["content"] += f"\n\n{content}"
        else:
            turns.append({"role": role, "content": content})
    return turns


def _pieces(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[Mapping[str, str]]
) -> list[Piece]:
    contents = [message["content"] for message in messages]
    real = _render(tokenizer, messages, contents)
    words = _words(len(contents), absent_from=contents)
    marked = _render(
        tokenizer,
        messages,
        [word if content else "" for word, content in zip(words, contents, strict=True)],
    )
    pieces = _align(re.split(f"({'|'.join(words)})", marked), words, contents, real)
    if pieces is None:
        pieces = _search(contents, real)
    if pieces is None:
        raise RequestError(
            f"the chat template of {_name(tokenizer)} rewrites a message, so that its text cannot "
            "be told from the template's own. Change the message (control tokens in it?), or "
            "write the prompt yourself and use generate()."
        )
    return pieces


def template_opening(tokenizer: PreTrainedTokenizerBase, system: str | None = None) -> str:
    """What stands before the first user content; "" if there is no template.

    The same every day: a template that writes the date gets a fixed one here.

    Args:
        tokenizer: whose template is rendered.
        system: content of a system message before the user's; None = none is given.

    Raises:
        RequestError: the template refuses these messages.
    """
    chat_template = find_chat_template(tokenizer)
    if chat_template is None:
        return ""
    [word] = _words(1, absent_from=[system or ""])
    if "strftime_now" in chat_template:
        chat_template = _SINK_CLOCK + chat_template
    roles = [{"role": "user"}] if system is None else [{"role": "system"}, {"role": "user"}]
    contents = [word] if system is None else [system, word]
    rendered = _render(tokenizer, roles, contents, chat_template)
    return rendered.split(word)[0] if word in rendered else ""


def _check(messages: Sequence[Mapping[str, str]]) -> None:
    if not messages:
        raise RequestError("chat() needs at least one message, got none.")
    for number, message in enumerate(messages):
        role, content = message.get("role"), message.get("content")
        if not isinstance(role, str) or not _ROLE.fullmatch(role):
            raise RequestError(
                f"message {number} has the role {role!r}; a role is one word, such as "
                "'system', 'user' or 'assistant'."
            )
        if not isinstance(content, str):
            raise RequestError(
                f"the content of message {number} ({role}) is {type(content).__name__}; "
                "give it as a string."
            )


def _words(count: int, absent_from: Sequence[str]) -> list[str]:
    while True:
        stem = f"x{secrets.token_hex(12)}x"
        if not any(stem in text for text in absent_from):
            return [f"{stem}{number}x" for number in range(count)]


def _render(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Mapping[str, str]],
    contents: Sequence[str],
    chat_template: str | None = None,
) -> str:
    if find_chat_template(tokenizer) is None:
        raise RequestError(
            f"{_name(tokenizer)} has no chat template, so messages cannot become a prompt. "
            "Write the prompt yourself and use generate()."
        )
    chat = [
        {"role": message["role"], "content": content}
        for message, content in zip(messages, contents, strict=True)
    ]
    try:
        return str(
            tokenizer.apply_chat_template(
                chat,
                chat_template=chat_template,
                tokenize=False,
                add_generation_prompt=True,
            )
        )
    except (jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError) as error:
        roles = ", ".join(message["role"] for message in messages)
        raise RequestError(
            f"the chat template of {_name(tokenizer)} refuses these messages ({roles}): {error}"
        ) from error


def _name(tokenizer: PreTrainedTokenizerBase) -> str:
    return str(tokenizer.name_or_path) or "this model"


def _align(
    parts: Sequence[str], words: Sequence[str], contents: Sequence[str], real: str
) -> list[Piece] | None:
    """Find ``real`` as the literals of ``parts`` with the contents, or parts of them, between.

    Args:
        parts: literal, word, literal, word, .. literal.
    """
    if not real.startswith(parts[0]):
        return None
    pieces: list[Piece] = [TemplateText(parts[0])]
    rest = real[len(parts[0]) :]
    last = len(parts) - 2
    for place in range(1, len(parts), 2):
        message, literal = words.index(parts[place]), parts[place + 1]
        text = _standing(contents[message], literal, rest, place == last)
        if text is None:
            return None
        pieces += [Content(text, message), TemplateText(literal)]
        rest = rest[len(text) + len(literal) :]
    return None if rest else [piece for piece in pieces if piece.text]


def _standing(content: str, literal: str, rest: str, is_last: bool) -> str | None:
    """What of ``content`` stands at the beginning of ``rest``, before ``literal``."""
    if is_last:
        text = rest.removesuffix(literal)
        return text if rest.endswith(literal) and text in content else None
    for text in (content, content.strip()):
        if rest.startswith(text + literal):
            return text
    # The template kept a part only (say, what follows the reasoning). The longest one is taken:
    # too much of what a message spells does no harm as mere text, too little would.
    stop = rest.rfind(literal, 0, len(content) + len(literal))
    while stop >= 0 and rest[:stop] not in content:
        stop = rest.rfind(literal, 0, stop + len(literal) - 1)
    return rest[:stop] if stop >= 0 else None


def _search(contents: Sequence[str], real: str) -> list[Piece] | None:
    """Find the contents in ``real``, in order; each must stand there once, as it is or trimmed."""
    pieces: list[Piece] = []
    rest = real
    for message, content in enumerate(contents):
        text = content if content in real else content.strip()
        if not text:
            continue
        if real.count(text) != 1 or text not in rest:
            return None
        literal, _, rest = rest.partition(text)
        pieces += [TemplateText(literal), Content(text, message)]
    return [piece for piece in [*pieces, TemplateText(rest)] if piece.text]
