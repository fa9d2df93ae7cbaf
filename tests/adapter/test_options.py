"""Keyword arguments of any framework become options of the engine, or are refused by name."""

from __future__ import annotations

import pytest

from lazyrag import GenerationOptions, Quality, RequestError
from lazyrag.adapter.options import with_arguments

BASE = GenerationOptions(max_new_tokens=8, stop=("x",))


def test_every_argument_reaches_its_option() -> None:
    arguments = {
        "max_tokens": 3, "temperature": 0.5, "top_p": 0.9, "top_k": 5, "seed": 1, "stop": "a",
        "quality": "full", "strict": True,
    }  # fmt: skip
    assert with_arguments(BASE, arguments, caller="X") == GenerationOptions(
        max_new_tokens=3, temperature=0.5, top_p=0.9, top_k=5, seed=1, stop=("a",),
        quality=Quality.FULL, strict=True,
    )  # fmt: skip


def test_none_switches_off_what_can_be_off() -> None:
    assert with_arguments(BASE, {"stop": None, "temperature": None}, caller="X") == (
        GenerationOptions(max_new_tokens=8, stop=())
    )
    assert with_arguments(BASE, {"stop": ["a", "b"]}, caller="X").stop == ("a", "b")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"tools": []}, "X knows no argument 'tools'; it takes .*temperature"),
        ({"max_tokens": 3, "max_new_tokens": 3}, "given twice"),
        ({"quality": "good"}, "'fast', 'balanced', 'best' or 'full'"),
    ],
)
def test_others_are_refused(arguments: dict[str, object], words: str) -> None:
    with pytest.raises(RequestError, match=words):
        with_arguments(BASE, arguments, caller="X")
