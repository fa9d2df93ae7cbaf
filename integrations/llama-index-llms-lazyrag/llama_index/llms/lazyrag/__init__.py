"""LlamaIndex integration: an LLM and a transform; a node's KV is computed once, reused anywhere."""

from llama_index.llms.lazyrag.llm import LazyKVLLM
from llama_index.llms.lazyrag.nodes import node_text, node_texts
from llama_index.llms.lazyrag.transform import LazyKVTransform

from lazyrag.adapter.reports import collect_reports

__all__ = ["LazyKVLLM", "LazyKVTransform", "collect_reports", "node_text", "node_texts"]
