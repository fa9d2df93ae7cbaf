"""The sink: the text every node is encoded behind; it acts on hidden states, its KV is dropped."""

from __future__ import annotations

from lazyrag.errors import RequestError
from lazyrag.prompt.template import template_opening
from lazyrag.prompt.tokenise import PromptTokenizer

TEMPLATE = "template"
"""What the chat template renders before the first user content when no system message is given."""
DOCUMENTS = "documents"
"""A neutral system message, then a user message that begins with "Documents:"."""
NONE = "none"
"""Nodes are encoded alone."""

_SYSTEM = "Answer the question with the help of the documents."
_HEADING = "Documents:\n\n"


def sink_ids(sink: str, tokenizer: PromptTokenizer) -> tuple[int, ...]:
    """Token ids of a sink: `TEMPLATE`, `DOCUMENTS`, `NONE`, or any other text, taken as it is."""
    if sink == NONE:
        return ()
    if sink == TEMPLATE:
        return _opening(tokenizer, None)
    if sink == DOCUMENTS:
        return (*_opening(tokenizer, _SYSTEM), *tokenizer.encode_text(_HEADING))
    return (*tokenizer.bos_ids, *tokenizer.encode_text(sink))


def _opening(tokenizer: PromptTokenizer, system: str | None) -> tuple[int, ...]:
    try:
        opening = template_opening(tokenizer.tokenizer, system)
    except RequestError:
        if system is None:
            raise
        opening = template_opening(tokenizer.tokenizer)  # the template knows no system message
    return tuple(tokenizer.encode_control(opening)) or tokenizer.bos_ids
