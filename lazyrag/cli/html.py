"""Readable text out of an HTML page, with the standard library's forgiving parser."""

from __future__ import annotations

import re
from html.parser import HTMLParser

_is_unseen = re.compile("script|style|template|noscript|svg|math|object|select").fullmatch
_is_paragraph = re.compile(
    "article|blockquote|dl|figure|h[1-6]|ol|p|pre|section|table|title|ul"
).fullmatch
_is_line = re.compile(
    "address|aside|body|br|caption|d[dt]|details|dialog|div|fieldset|figcaption|footer|form|head|"
    "header|hr|html|legend|li|main|nav|option|summary|tbody|tfoot|thead|tr"
).fullmatch


class _Text(HTMLParser):
    """Collects what a reader would see; block elements end lines, paragraphs leave a blank one."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.pieces: list[str] = []
        self._unseen: list[str] = []
        self._preformatted = 0
        self._line_ends = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if _is_unseen(tag):
            self._unseen.append(tag)
        self._break(tag)
        if tag == "pre":
            self._preformatted += 1

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._break(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag in self._unseen:
            while self._unseen.pop() != tag:
                pass
        self._break(tag)
        if tag == "pre" and self._preformatted:
            self._preformatted -= 1

    def handle_data(self, data: str) -> None:
        if self._unseen:
            return
        text = data if self._preformatted else re.sub(r"\s+", " ", data)
        if self._line_ends and not self._preformatted:
            text = text.lstrip()
        if text:
            self.pieces.append("\n" * self._line_ends + text)
            self._line_ends = 0

    def _break(self, tag: str) -> None:
        if tag in {"td", "th"}:
            self.handle_data(" ")
        elif _is_paragraph(tag):
            self._line_ends = 2
        elif _is_line(tag):
            self._line_ends = max(self._line_ends, 1)


def html_to_text(page: str) -> str:
    """The visible text of ``page``: no tags, scripts or styles, entities resolved, ``pre`` kept."""
    parser = _Text()
    parser.feed(page)
    parser.close()
    lines = "".join(parser.pieces).split("\n")
    return "\n".join(line.rstrip() for line in lines).strip()
