"""Which ids stand before a node while it is encoded."""

from __future__ import annotations

import pytest

from lazyrag.engine.sink import _NEUTRAL, sink_ids
from lazyrag.prompt.tokenise import PromptTokenizer
from tests.support.tiny import CHATML, tiny_tokenizer

NO_SYSTEM = (
    "{% for m in messages %}{% if m['role'] == 'system' %}{{ raise_exception('no system') }}"
    "{% endif %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>{% endfor %}"
)
SYSTEM = "Answer the question with the help of the documents."
HEADING = "Documents:\n\n"


@pytest.mark.parametrize(
    ("template", "sink", "expected"),
    [
        (CHATML, "none", ""),
        (CHATML, "template", "system\nBe brief.\nuser\n"),
        (
            CHATML,
            "documents",
            "system\nAnswer the question with the help of the documents.\nuser\n" + HEADING,
        ),
        (CHATML, "passages", f"system\n{SYSTEM}\nuser\n{HEADING}{_NEUTRAL}"),
        (NO_SYSTEM, "passages", f"user\n{HEADING}{_NEUTRAL}"),
        (CHATML, "My own <|im_start|> text", "My own <|im_start|> text"),
        (NO_SYSTEM, "documents", "user\n" + HEADING),
        (NO_SYSTEM, "template", "user\n"),
        (None, "documents", HEADING),
        (None, "template", ""),
    ],
)
def test_sinks(template: str | None, sink: str, expected: str):
    tokenizer = PromptTokenizer(tiny_tokenizer(template))
    ids = sink_ids(sink, tokenizer)
    assert tokenizer.decode(ids) == expected
    if sink.startswith("My own"):
        assert not set(ids) & tokenizer.control_ids


DATED = (
    "<|im_start|>{{ strftime_now('%d %b %Y') }}{% for m in messages %}{{ m['role'] }}\n"
    "{{ m['content'] }}<|im_end|>{% endfor %}"
)


@pytest.mark.parametrize("sink", ["template", "documents", "passages"])
def test_a_sink_is_the_same_every_day(sink: str, monkeypatch):
    """A template that writes the date must not change every key of a store at midnight."""
    import datetime

    tokenizer = PromptTokenizer(tiny_tokenizer(DATED))
    today = sink_ids(sink, tokenizer)

    class Later(datetime.datetime):
        @classmethod
        def now(cls, tz=None):
            return cls(2031, 1, 2, tzinfo=tz)

    monkeypatch.setattr("transformers.utils.chat_template_utils.datetime", Later)
    assert sink_ids(sink, PromptTokenizer(tiny_tokenizer(DATED))) == today
    assert "2024" in tokenizer.decode(today)
