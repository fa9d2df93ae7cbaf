"""The sink: the text every node is encoded behind; it acts on hidden states, its KV is dropped."""

from __future__ import annotations

from lazyrag.errors import RequestError
from lazyrag.prompt.template import Content, render_chat, template_opening
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
        opening = template_opening(tokenizer.tokenizer)
        return tuple(tokenizer.encode_control(opening)) or tokenizer.bos_ids
    if sink == DOCUMENTS:
        return _documents(tokenizer)
    return (*tokenizer.bos_ids, *tokenizer.encode_text(sink))


def _documents(tokenizer: PromptTokenizer) -> tuple[int, ...]:
    """Everything up to and including the heading; without a template the heading alone."""
    heading = tokenizer.encode_text(_HEADING)
    if tokenizer.chat_template is None:
        return (*tokenizer.bos_ids, *heading)
    user = {"role": "user", "content": _HEADING + "x"}
    try:
        pieces = render_chat(tokenizer.tokenizer, [{"role": "system", "content": _SYSTEM}, user])
    except RequestError:  # the template knows no system message
        pieces = render_chat(tokenizer.tokenizer, [user])
    ids: list[int] = []
    for piece in pieces:
        if not isinstance(piece, Content):
            ids += tokenizer.encode_control(piece.text)
        elif piece.text.startswith(_HEADING):
            return (*ids, *heading)
        else:
            ids += tokenizer.encode_text(piece.text)
    return tuple(ids)
