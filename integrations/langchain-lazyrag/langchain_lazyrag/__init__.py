"""LangChain integration: models and a vector store; a document's KV is computed once."""

from langchain_lazyrag.chat import ChatLazyKV
from langchain_lazyrag.documents import (
    document_text,
    document_texts,
    format_docs,
    precompute_documents,
    precompute_examples,
)
from langchain_lazyrag.llm import LazyKVLLM
from langchain_lazyrag.vectorstore import LazyKVVectorStore
from lazyrag.adapter.reports import collect_reports

__all__ = [
    "ChatLazyKV",
    "LazyKVLLM",
    "LazyKVVectorStore",
    "collect_reports",
    "document_text",
    "document_texts",
    "format_docs",
    "precompute_documents",
    "precompute_examples",
]
