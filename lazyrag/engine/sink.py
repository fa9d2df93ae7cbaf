"""The sink: the text every node is encoded behind; it acts on hidden states, its KV is dropped."""

from __future__ import annotations

from lazyrag.errors import RequestError
from lazyrag.prompt.template import template_opening
from lazyrag.prompt.tokenise import PromptTokenizer

TEMPLATE = "template"
"""What the chat template renders before the first user content when no system message is given."""
DOCUMENTS = "documents"
"""A neutral system message, then a user message that begins with "Documents:"."""
PASSAGES = "passages"
"""As `DOCUMENTS`, then neutral passages: a node begins as if others stood before it."""
NONE = "none"
"""Nodes are encoded alone."""

_SYSTEM = "Answer the question with the help of the documents."
_HEADING = "Documents:\n\n"
_NEUTRAL = (
    "Notes on this collection\nThe passages below were taken from reference works and news "
    "reports. Each one begins with its title and can be read on its own. They differ in age, "
    "subject and length, and only some of them bear on the question.\n\n"
    "How to read them\nA passage may repeat what another one says, or contradict it. Names, dates "
    "and places are given as the source has them. What a passage leaves out is not known here.\n\n"
    "Where they come from\nThe collection was put together over several years by people who did "
    "not know what would be asked. Some passages were cut from longer articles, so that the first "
    "or the last sentence may refer to something outside. Numbers were not converted.\n\n"
    "On the order\nThe order of the passages has no meaning. The first is not the most important "
    "one, and passages on one subject need not stand together.\n\n"
)


def sink_ids(sink: str, tokenizer: PromptTokenizer) -> tuple[int, ...]:
    """Token ids of a sink: a name of this module, or any other text, taken as it is."""
    if sink == NONE:
        return ()
    if sink == TEMPLATE:
        return _opening(tokenizer, None)
    if sink == DOCUMENTS:
        return (*_opening(tokenizer, _SYSTEM), *tokenizer.encode_text(_HEADING))
    if sink == PASSAGES:
        return (*sink_ids(DOCUMENTS, tokenizer), *tokenizer.encode_text(_NEUTRAL))
    return (*tokenizer.bos_ids, *tokenizer.encode_text(sink))


def _opening(tokenizer: PromptTokenizer, system: str | None) -> tuple[int, ...]:
    try:
        opening = template_opening(tokenizer.tokenizer, system)
    except RequestError:
        if system is None:
            raise
        opening = template_opening(tokenizer.tokenizer)  # the template knows no system message
    return tuple(tokenizer.encode_control(opening)) or tokenizer.bos_ids
