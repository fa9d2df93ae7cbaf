"""One real engine with real weights for all tests of the integration."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from langchain_core.documents import Document
from langchain_core.embeddings import DeterministicFakeEmbedding, Embeddings
from langchain_lazyrag import ChatLazyKV, LazyKVLLM

from lazyrag import Engine
from tests.support.facts import FACTS

logging.getLogger("chromadb").setLevel(logging.ERROR)


@pytest.fixture(scope="session")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """SmolLM2 with a float32 store."""
    store: Path = tmp_path_factory.mktemp("langchain") / "kv"
    with Engine.from_pretrained("smollm2", store=store, kv_dtype="float32") as engine:
        yield engine


@pytest.fixture
def chat(engine: Engine) -> ChatLazyKV:
    """A fresh chat model with short answers over the shared engine."""
    return ChatLazyKV(engine=engine, max_tokens=8)


@pytest.fixture
def llm(engine: Engine) -> LazyKVLLM:
    """A fresh text model with short answers over the shared engine."""
    return LazyKVLLM(engine=engine, max_tokens=8)


@pytest.fixture
def documents() -> list[Document]:
    """Three small documents with a source."""
    return [
        Document(page_content=text, id=f"fact-{number}", metadata={"source": f"{number}.md"})
        for number, text in enumerate(FACTS)
    ]


@pytest.fixture
def embeddings() -> Embeddings:
    """Equal texts are equal, others are apart; nothing more is needed of a search here."""
    return DeterministicFakeEmbedding(size=32)


@pytest.fixture
def nothing_held(engine: Engine) -> Callable[[], None]:
    """A check that every running request has given its pages back (within a few seconds)."""

    def check() -> None:
        deadline = time.monotonic() + 10
        pool = engine._pool
        while time.monotonic() < deadline:
            if pool.free_pages + pool.evictable_pages == pool.capacity // pool.page_size:
                return
            time.sleep(0.02)
        raise AssertionError("pages are still held")

    return check
