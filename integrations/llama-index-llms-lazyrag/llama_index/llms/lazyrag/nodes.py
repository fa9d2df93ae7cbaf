"""The text of a LlamaIndex node in the exact form in which it reaches the model."""

from __future__ import annotations

from collections.abc import Iterable

from llama_index.core.schema import BaseNode, MetadataMode, NodeRelationship, RelatedNodeInfo

from lazyrag.adapter.passages import following
from lazyrag.types import NodeText


def node_text(node: BaseNode) -> NodeText:
    """What to encode for ``node``: its text with the metadata meant for the LLM, stripped.

    LlamaIndex's synthesizers and chat engines put this form into the prompt. The body alone is an
    alias: `CitationQueryEngine` writes its own header between metadata and body. The text is empty
    when the node has none (an image, say).
    """
    text = node.get_content(metadata_mode=MetadataMode.LLM).strip()
    body = node.get_content(metadata_mode=MetadataMode.NONE).strip()
    aliases = (body,) if body and body != text else ()
    label = node.metadata.get("file_name") or node.node_id
    return NodeText(text=text, aliases=aliases, label=str(label))


def node_texts(nodes: Iterable[BaseNode], *, behind_previous: bool = True) -> list[NodeText]:
    """`node_text` of every node that has any text of its own.

    Args:
        nodes: as a splitter made them, say.
        behind_previous: encode a node behind the one before it in its document, if that is among
            ``nodes``; the splitter says which it is.
    """
    having = [node for node in nodes if node.get_content(metadata_mode=MetadataMode.NONE).strip()]
    texts = [node_text(node) for node in having]
    if not behind_previous:
        return texts
    by_id = {node.node_id: text for node, text in zip(having, texts, strict=True)}
    return [
        following(text, by_id.get(_previous(node)))
        for node, text in zip(having, texts, strict=True)
    ]


def _previous(node: BaseNode) -> str:
    related = node.relationships.get(NodeRelationship.PREVIOUS)
    return related.node_id if isinstance(related, RelatedNodeInfo) else ""
