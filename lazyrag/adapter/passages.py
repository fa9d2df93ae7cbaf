"""Passages of one document: what each is encoded behind."""

from __future__ import annotations

from dataclasses import replace

from lazyrag.types import NodeText

SHORTEST_OVERLAP = 8
"""Characters; what two passages share of less is chance."""


def following(text: NodeText, previous: NodeText | None) -> NodeText:
    """The same passage, encoded behind the one before it in its document.

    Args:
        text: a passage.
        previous: what a splitter made before it; None = it is the first. What the two share, the
            splitter's overlap, stands in ``text`` alone.
    """
    if previous is None:
        return text
    shared = max(_overlap(previous.text, form) for form in text.forms)
    before = previous.text[: len(previous.text) - shared].rstrip()
    return replace(text, behind=f"{before}\n\n") if before else text


def _overlap(before: str, after: str) -> int:
    """Length of the longest end of ``before`` that ``after`` begins with."""
    start = before.find(after[:SHORTEST_OVERLAP], max(0, len(before) - len(after)))
    while 0 <= start <= len(before) - SHORTEST_OVERLAP:
        if after.startswith(before[start:]):
            return len(before) - start
        start = before.find(after[:SHORTEST_OVERLAP], start + 1)
    return 0
