"""lazyrag: RAG answers without reading the same documents again for every question."""

from __future__ import annotations

import importlib
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lazyrag.engine.async_engine import AsyncEngine
    from lazyrag.engine.async_stream import AsyncGenerationStream
    from lazyrag.engine.engine import Engine
    from lazyrag.engine.generation import Generation, GenerationStream
    from lazyrag.engine.ingest import IngestEstimate
    from lazyrag.engine.metrics import EngineStats
    from lazyrag.engine.report import NodeReport, ReuseReport
    from lazyrag.errors import (
        EngineBusyError,
        LazyRagError,
        ModelError,
        RequestError,
        RequestTimeoutError,
        StoreError,
    )
    from lazyrag.types import (
        GenerationOptions,
        KVDType,
        Live,
        Node,
        NodeKey,
        NodeText,
        Quality,
        Reference,
    )

_HOME = {
    "AsyncEngine": "lazyrag.engine.async_engine",
    "AsyncGenerationStream": "lazyrag.engine.async_stream",
    "Engine": "lazyrag.engine.engine",
    "Generation": "lazyrag.engine.generation",
    "GenerationStream": "lazyrag.engine.generation",
    "IngestEstimate": "lazyrag.engine.ingest",
    "EngineStats": "lazyrag.engine.metrics",
    "NodeReport": "lazyrag.engine.report",
    "ReuseReport": "lazyrag.engine.report",
    "EngineBusyError": "lazyrag.errors",
    "LazyRagError": "lazyrag.errors",
    "ModelError": "lazyrag.errors",
    "RequestError": "lazyrag.errors",
    "RequestTimeoutError": "lazyrag.errors",
    "StoreError": "lazyrag.errors",
    "GenerationOptions": "lazyrag.types",
    "KVDType": "lazyrag.types",
    "Live": "lazyrag.types",
    "Node": "lazyrag.types",
    "NodeKey": "lazyrag.types",
    "NodeText": "lazyrag.types",
    "Quality": "lazyrag.types",
    "Reference": "lazyrag.types",
}

__version__ = version("lazyrag")

__all__ = [
    "AsyncEngine",
    "AsyncGenerationStream",
    "Engine",
    "EngineBusyError",
    "EngineStats",
    "Generation",
    "GenerationOptions",
    "GenerationStream",
    "IngestEstimate",
    "KVDType",
    "LazyRagError",
    "Live",
    "ModelError",
    "Node",
    "NodeKey",
    "NodeReport",
    "NodeText",
    "Quality",
    "Reference",
    "RequestError",
    "RequestTimeoutError",
    "ReuseReport",
    "StoreError",
    "__version__",
]


def __getattr__(name: str) -> Any:
    """Import on first use, so that ``lazyrag --help`` does not wait for torch."""
    if name not in _HOME:
        raise AttributeError(f"module 'lazyrag' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)
