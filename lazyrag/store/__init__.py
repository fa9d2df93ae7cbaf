"""KV on disk: one safetensors file a node, one sqlite index."""

from lazyrag.store.format import StoredKV
from lazyrag.store.index import NewText, Released, TextRow
from lazyrag.store.key import Encoding, node_key
from lazyrag.store.store import KVStore, LoadFailure, NewNode, Problem, StoreStats

__all__ = [
    "Encoding",
    "KVStore",
    "LoadFailure",
    "NewNode",
    "NewText",
    "Problem",
    "Released",
    "StoreStats",
    "StoredKV",
    "TextRow",
    "node_key",
]
