"""One real engine with real weights for all tests of the integration."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from llama_index.core.schema import TextNode
from llama_index.llms.lazyrag import LazyKVLLM

from lazyrag import Engine
from tests.support.facts import FACTS


@pytest.fixture(scope="session")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """SmolLM2 with a float32 store."""
    store: Path = tmp_path_factory.mktemp("llama-index") / "kv"
    with Engine.from_pretrained("smollm2", store=store, kv_dtype="float32") as engine:
        yield engine


@pytest.fixture
def llm(engine: Engine) -> LazyKVLLM:
    """A fresh LLM with short answers over the shared engine."""
    return LazyKVLLM(engine=engine, max_tokens=8)


@pytest.fixture
def nodes() -> list[TextNode]:
    """Three small nodes with a file name for the model and a path hidden from it."""
    return [
        TextNode(
            text=text,
            id_=f"node-{number}",
            metadata={"file_name": f"{number}.md", "file_path": f"/somewhere/{number}.md"},
            excluded_llm_metadata_keys=["file_path"],
            excluded_embed_metadata_keys=["file_path"],
        )
        for number, text in enumerate(FACTS)
    ]
