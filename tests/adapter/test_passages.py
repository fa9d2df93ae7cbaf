"""What a passage is encoded behind: the one before it, without what both have."""

from __future__ import annotations

import pytest

from lazyrag import NodeText
from lazyrag.adapter.passages import following

ONE = "The lighthouse was built in 1911. Two brothers kept it."
HEADER = "file_name: a.md\n\n"


def test_the_first_passage_stands_alone():
    assert following(NodeText(ONE), None) == NodeText(ONE)


@pytest.mark.parametrize(
    ("text", "before"),
    [
        ("Their sister kept the books.", ONE),
        ("Two brothers kept it. Their sister kept the books.", "The lighthouse was built in 1911."),
        ("it. Their sister kept the books.", ONE),  # too short to be an overlap
        (ONE, ""),
        (f"{ONE} And then?", ""),
        ("The lighthouse was painted red.", ONE),  # begins alike, does not end it
        ("kept it kept it", ONE),
        ("it.", ONE),
    ],
)
def test_the_overlap_stands_in_the_passage_alone(text: str, before: str):
    behind = before and f"{before}\n\n"
    assert following(NodeText(text), NodeText(ONE)) == NodeText(text, behind=behind)
    headed = NodeText(f"{HEADER}{text}", aliases=(text,), label="a.md")
    made = following(headed, NodeText(f"{HEADER}{ONE}", aliases=(ONE,)))
    assert made.behind == (before and f"{HEADER}{before}\n\n")
    assert (made.text, made.aliases, made.label) == (headed.text, headed.aliases, "a.md")


@pytest.mark.parametrize("unit", ["ab", "na na na na ", "x"])
def test_of_a_text_that_repeats_itself_the_longest_overlap_is_taken(unit: str):
    before, after = unit * 40, unit * 20
    assert following(NodeText(f"{after}."), NodeText(f"Start {before}")).behind == (
        f"Start {unit * 20}".rstrip() + "\n\n"
    )
