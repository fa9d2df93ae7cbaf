"""An opened index: engine, LLM and retriever, ready for questions."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lazyrag.cli.documents import printable
from lazyrag.cli.index import Index, IndexSettings, check_weights
from lazyrag.cli.output import plural, quiet_libraries, say
from lazyrag.errors import RequestError, StoreError

if TYPE_CHECKING:
    from llama_index.core import VectorStoreIndex
    from llama_index.core.schema import NodeWithScore
    from llama_index.llms.lazyrag import LazyKVLLM

    from lazyrag import Engine

AROUND = 256
"""Tokens kept free for chat template, instructions and the answer prompt around a question."""


@dataclass(slots=True)
class Session:
    """What ``ask`` and ``chat`` work with."""

    settings: IndexSettings
    engine: Engine
    llm: LazyKVLLM
    index: VectorStoreIndex

    @property
    def room(self) -> int:
        """Tokens of the context window left for passages, history and question."""
        return self.engine.context_window - self.llm.max_tokens - AROUND

    def check_question(self, question: str) -> None:
        """Refuse a question that cannot fit.

        Raises:
            RequestError: it is longer than the context window leaves.
        """
        tokens = self.engine.count_tokens(question)
        if tokens > self.room:
            raise RequestError(
                f"the question has {plural(tokens, 'token')}, but the context window of "
                f"{self.settings.model} ({self.engine.context_window:,}) leaves "
                f"{max(self.room, 0):,} for it beside the answer ({self.llm.max_tokens:,}); "
                "shorten the question or lower --max-new-tokens."
            )


@contextmanager
def open_session(
    path: Path, *, device: str, quality: str, max_new_tokens: int
) -> Iterator[Session]:
    """Open an index with the very model and embedding it was made with.

    Raises:
        StoreError: there is no index, or nothing in it.
        ModelError: the model is missing, or its weights are others now.
    """
    place = Index(path)
    settings = place.settings()
    quiet_libraries()

    from llama_index.core import VectorStoreIndex
    from llama_index.llms.lazyrag import LazyKVLLM

    from lazyrag import Engine
    from lazyrag.cli.vectors import Vectors, load_embedding

    vectors = Vectors(place.chroma_path) if place.chroma_path.exists() else None
    if vectors is None or not vectors.count():
        if stored := _stored_nodes(place):
            raise StoreError(
                f"no file is in the index {place.path} as a whole yet ({stored:,} passages are "
                "stored): its ingestion is still running, or was interrupted. The same "
                "`lazyrag ingest` again does the rest."
            )
        raise StoreError(f"the index {place.path} is empty; fill it with `lazyrag ingest`.")
    embedding = load_embedding(settings.embedding, settings.embedding_dim)
    with Engine.from_pretrained(
        settings.model,
        store=place.kv_path,
        device=device,
        dtype=settings.compute_dtype,
        kv_dtype=settings.kv_dtype,
        sink=settings.sink,
    ) as engine:
        check_weights(place, settings, engine.weights_digest)
        if not engine.store.stats().nodes:
            say(f"Nothing can be reused: {place.kv_path} is empty. Run `lazyrag ingest` again.")
        llm = LazyKVLLM(engine=engine, quality=quality, max_tokens=max_new_tokens)
        index = VectorStoreIndex.from_vector_store(vectors.store(), embed_model=embedding)
        with _counting(llm.tokenizer):
            yield Session(settings, engine, llm, index)


def _stored_nodes(place: Index) -> int:
    from lazyrag.store import KVStore

    try:
        store = KVStore.open(place.kv_path, create=False)
    except StoreError:
        return 0
    try:
        return store.stats().nodes
    finally:
        store.close()


@contextmanager
def _counting(tokenizer: Callable[[str], list[int]]) -> Iterator[None]:
    """LlamaIndex counts with the model's tokenizer, not with the one it has built in."""
    import llama_index.core

    before = llama_index.core.global_tokenizer
    llama_index.core.global_tokenizer = tokenizer
    try:
        yield
    finally:
        llama_index.core.global_tokenizer = before


def source_of(node: NodeWithScore) -> dict[str, Any]:
    """A retrieved passage as ``--json`` gives it."""
    return {
        "file": str(node.metadata.get("file_name", node.node_id)),
        "score": None if node.score is None else round(node.score, 4),
        "text": node.text,
    }


def source_lines(nodes: list[NodeWithScore]) -> Iterator[str]:
    """One line a retrieved passage: file, score, how it begins."""
    for number, node in enumerate(nodes, 1):
        source = source_of(node)
        score = "" if source["score"] is None else f" ({source['score']:.2f})"
        first = next((line.strip() for line in source["text"].splitlines() if line.strip()), "")
        first = first if len(first) <= 72 else f"{first[:71]}…"
        yield printable(f"  {number}. {source['file']}{score}  {first}")
