"""`LazyKVTransform`: computes and stores the KV of every node that passes through an ingestion."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from llama_index.core.bridge.pydantic import Field, PrivateAttr
from llama_index.core.schema import BaseNode, TransformComponent
from llama_index.llms.lazyrag.llm import LazyKVLLM
from llama_index.llms.lazyrag.nodes import node_texts


class LazyKVTransform(TransformComponent):
    """Put it behind the splitter; the nodes come out as they went in.

    Nodes must not change afterwards: later transformations that add metadata meant for the LLM make
    another text of them. ``index.insert_nodes`` and ``VectorStoreIndex(nodes=...)`` run no
    transformations; call the transform on the nodes yourself there.

    Args:
        llm: the LLM whose engine encodes and stores.
        show_progress: a progress bar on stderr.
        behind_previous: see `node_texts`: answers are nearer to full attention's, encoding takes up
            to 128 tokens a node more.

    Examples:
        >>> IngestionPipeline(transformations=[splitter, LazyKVTransform(llm), embed_model])
    """

    show_progress: bool = Field(default=False, description="A progress bar on stderr.")
    behind_previous: bool = Field(
        default=True, description="Encode nodes behind the one before them in their document."
    )

    _llm: LazyKVLLM = PrivateAttr()

    def __init__(
        self, llm: LazyKVLLM, *, show_progress: bool = False, behind_previous: bool = True
    ) -> None:
        fields = {"show_progress": show_progress, "behind_previous": behind_previous}
        super().__init__(**fields)
        self._llm = llm

    @classmethod
    def class_name(cls) -> str:
        """Name in serialised form."""
        return "LazyKVTransform"

    def __call__(self, nodes: Sequence[BaseNode], **kwargs: Any) -> Sequence[BaseNode]:
        """Encode what the store does not hold yet and return ``nodes`` themselves."""
        texts = node_texts(nodes, behind_previous=self.behind_previous)
        if texts:
            self._llm.engine.precompute(texts, progress=self.show_progress)
        return nodes

    async def acall(self, nodes: Sequence[BaseNode], **kwargs: Any) -> Sequence[BaseNode]:
        """As a call, in a worker thread."""
        return await asyncio.to_thread(self, nodes, **kwargs)

    def to_dict(self, **kwargs: Any) -> dict[str, Any]:
        """What the stored KV depends on.

        `IngestionPipeline` makes its cache key of this, so that a pipeline with other weights,
        another store, sink or dtype does not skip the encoding.
        """
        engine = self._llm.engine
        return {
            "class_name": self.class_name(),
            "model": engine.model_name,
            "weights_digest": engine.weights_digest,
            "store": str(engine.store.path),
            "sink": engine.sink,
            "kv_dtype": engine.encoding.dtype.value,
            "encoding": engine.encoding.digest.hex(),
            "behind_previous": self.behind_previous,
        }
