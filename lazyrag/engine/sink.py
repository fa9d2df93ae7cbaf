"""The sink: the text every node is encoded behind; it acts on hidden states, its KV is dropped."""

from __future__ import annotations

from lazyrag.prompt.template import template_opening
from lazyrag.prompt.tokenise import PromptTokenizer

TEMPLATE = "template"
"""What the chat template renders before the first user content when no system message is given."""
NONE = "none"
"""Nodes are encoded alone."""


def sink_ids(sink: str, tokenizer: PromptTokenizer) -> tuple[int, ...]:
    """Token ids of a sink: `TEMPLATE`, `NONE`, or any other text, taken as it is."""
    if sink == NONE:
        return ()
    if sink == TEMPLATE:
        opening = template_opening(tokenizer.tokenizer)
        return tuple(tokenizer.encode_control(opening)) or tokenizer.bos_ids
    return (*tokenizer.bos_ids, *tokenizer.encode_text(sink))
