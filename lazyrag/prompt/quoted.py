r"""Texts that stand in a prompt the way a program writes a string: quoted, line ends as ``\n``.

``str()`` of a list of documents, or their JSON, is what a chain sends when its formatting step was
forgotten. Such a text cannot be reused; this finds it so that the miss can be explained.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass

_OPENING = re.compile(r"(?:\A|[=\[({:,] ?)(?=['\"])")
_DOCUMENT = "page_content="
_LITERAL = re.compile(r"(?:'(?:[^'\\\n]|\\.)*+'|\"(?:[^\"\\\n]|\\.)*+\")(?=[,\])}:\s]|$)")
_ESCAPE = re.compile(r"\\(?:x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|.)")
_LETTERS = {"n": "\n", "r": "\r", "t": "\t", "f": "\f", "b": "\b"}


@dataclass(frozen=True, slots=True)
class Quoted:
    """``content[start:stop]`` is a string literal that spells ``text``.

    Attributes:
        telling: it is spelled otherwise than it reads, or is the content of a LangChain document:
            not a word in quotes that happens to be a text.
    """

    start: int
    stop: int
    text: str
    telling: bool


def quoted_strings(content: str, shortest: int) -> Iterator[Quoted]:
    """String literals that spell at least ``shortest`` characters, in order, without overlap.

    A literal opens behind ``=``, ``:``, a comma or a bracket, as in Python and JSON, or begins the
    content; it has no line end of its own, and is followed by a comma, a colon, a bracket, white
    space or the end.
    """
    cursor = 0
    while opening := _OPENING.search(content, cursor):
        cursor = opening.end()
        literal = _LITERAL.match(content, cursor)
        if literal is None:
            continue
        cursor = literal.end()
        text = _spelled(literal[0])
        if len(text) >= shortest:
            telling = "\\" in literal[0] or content.endswith(_DOCUMENT, 0, literal.start())
            yield Quoted(literal.start(), literal.end(), text, telling)


def _spelled(literal: str) -> str:
    text = _ESCAPE.sub(_unescape, literal[1:-1])
    # JSON writes characters beyond the BMP as two escapes
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _unescape(escape: re.Match[str]) -> str:
    code = escape[1] or escape[2] or escape[3]
    if code is None:
        return _LETTERS.get(escape[0][1], escape[0][1])
    value = int(code, 16)
    return chr(value) if value <= sys.maxunicode else escape[0]
