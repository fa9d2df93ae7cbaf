"""String literals in a prompt, as Python and JSON write them."""

from __future__ import annotations

import json
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lazyrag.prompt.quoted import quoted_strings

TEXT = 'First line.\nIt\'s "second", with a \\ and a tab\t, é and 🤗.'


def spelled(content: str, shortest: int = 1) -> list[str]:
    found = list(quoted_strings(content, shortest))
    for literal in found:
        assert content[literal.start] == content[literal.stop - 1] in "'\""
    return [literal.text for literal in found]


@pytest.mark.parametrize(
    "content",
    [
        repr([TEXT]),
        json.dumps([TEXT]),
        json.dumps({"text": TEXT}, ensure_ascii=False),
        f"[Document(id='7', metadata={{}}, page_content={TEXT!r})]",
        f"don't, 'tis said: {TEXT!r}",
    ],
)
def test_literals_spell_the_text(content: str) -> None:
    assert TEXT in spelled(content)


@given(st.lists(st.text(min_size=1), min_size=1, max_size=4))
def test_every_list_is_read_back(texts: list[str]) -> None:
    for content in (repr(texts), json.dumps(texts)):
        assert spelled(f"Context: {content} and more") == [
            text.encode("utf-16", "surrogatepass").decode("utf-16", "replace") for text in texts
        ]


@pytest.mark.parametrize(
    "content",
    ["", "it's John's", "he said 'so'", "['never closed", "['over\ntwo lines']", "f('')"],
)
def test_prose_and_what_is_not_a_literal(content: str) -> None:
    assert spelled(content) == []


def test_short_ones_are_left_out() -> None:
    assert spelled("['1234567', '12345678']", 8) == ["12345678"]


@pytest.mark.parametrize("unit", [",'", ",'\\\\", ", '\\'", '="\\', ",'\\x", "'\\U00110000',"])
def test_hostile_content_takes_no_longer_than_its_length(unit: str) -> None:
    """Every unit could open a literal that never ends; linear: 0.1 s, quadratic: hours."""
    begun = time.monotonic()
    spelled(unit * (1_000_000 // len(unit)))
    assert time.monotonic() - begun < 60
