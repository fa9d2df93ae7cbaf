"""LangChain's own standard suites for integrations.

Switched off by the suites' flags is what a local text model does not have: tools, media, another
model per call.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

import pytest
from langchain_chroma import Chroma
from langchain_core.vectorstores import InMemoryVectorStore, VectorStore
from langchain_lazyrag import ChatLazyKV, LazyKVVectorStore
from langchain_tests.integration_tests import (
    ChatModelIntegrationTests,
    VectorStoreIntegrationTests,
)
from langchain_tests.unit_tests import ChatModelUnitTests

from lazyrag import Engine


class _Flags:
    """What this model is, in the suites' terms."""

    @pytest.fixture(autouse=True)
    def _take_engine(self, engine: Engine) -> None:
        self._engine = engine

    @property
    def chat_model_class(self) -> type[ChatLazyKV]:
        return ChatLazyKV

    @property
    def chat_model_params(self) -> dict[str, Any]:
        # 135 million parameters, greedy, say one thing for ever inside a JSON string
        return {"engine": self._engine, "repetition_penalty": 1.15}

    @property
    def has_tool_calling(self) -> bool:
        return False

    @property
    def supports_model_override(self) -> bool:
        return False

    @property
    def supported_usage_metadata_details(self) -> dict[Literal["invoke", "stream"], list[Any]]:
        return {"invoke": [], "stream": []}


class TestChatUnit(_Flags, ChatModelUnitTests):  # type: ignore[misc]
    """The unit suite."""


class TestChatIntegration(_Flags, ChatModelIntegrationTests):  # type: ignore[misc]
    """The integration suite."""


class _Wrapped(VectorStoreIntegrationTests):
    """The suite over a wrapped store; its texts (foo, bar) are ingested like any other."""

    @pytest.fixture(autouse=True)
    def _take_chat(self, chat: ChatLazyKV) -> None:
        self._chat = chat

    def wrapped(self, store: VectorStore) -> LazyKVVectorStore:
        return LazyKVVectorStore(store, self._chat, owner=type(self).__name__)


class TestWrappedChroma(_Wrapped):
    """Chroma inside."""

    @pytest.fixture
    def vectorstore(self) -> Iterator[VectorStore]:
        chroma = Chroma("standard", embedding_function=self.get_embeddings())
        yield self.wrapped(chroma)
        chroma.delete_collection()


class TestWrappedInMemory(_Wrapped):
    """LangChain's own store inside."""

    @pytest.fixture
    def vectorstore(self) -> VectorStore:
        return self.wrapped(InMemoryVectorStore(self.get_embeddings()))
