"""What LangChain wants of the chat model and the text model alike."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from langchain_core.language_models.base import LangSmithParams

from langchain_lazyrag.results import PROVIDER
from lazyrag import Engine
from lazyrag.adapter.fields import EngineFields, Pathlike

OF_REMOTE_MODELS = frozenset({"api_key", "base_url", "max_retries"})
"""LangChain's standard settings that mean nothing where nothing is remote."""


class LangChainFields(EngineFields):
    """`EngineFields`, and what tracing, caching and counting ask of a LangChain model."""

    _not_pickled = frozenset({"callbacks", "cache", "rate_limiter"})

    @classmethod
    def _arguments(
        cls,
        model: Pathlike | None,
        store: Pathlike | None,
        engine: Engine | None,
        options: Mapping[str, Any],
    ) -> dict[str, Any]:
        meant = {name: value for name, value in options.items() if name not in OF_REMOTE_MODELS}
        return super()._arguments(model, store, engine, meant)

    @property
    def _identifying_params(self) -> dict[str, Any]:
        """What decides an answer; LangChain's answer cache makes its key of it."""
        own = {name: getattr(self, name) for name in EngineFields.model_fields}
        return {
            **own,
            "weights": self.engine.weights_digest,
            "encoding": self.engine.encoding.digest.hex(),
        }

    def _get_ls_params(self, stop: list[str] | None = None, **kwargs: Any) -> LangSmithParams:
        parameters: LangSmithParams = super()._get_ls_params(  # type: ignore[misc]
            stop=stop or self.stop, **kwargs
        )
        parameters["ls_provider"] = PROVIDER
        return parameters

    def get_token_ids(self, text: str) -> list[int]:
        """Ids of ``text`` by this model's own tokenizer."""
        return self.engine.text_ids(text)

    def _call_arguments(self, stop: list[str] | None, given: Mapping[str, Any]) -> dict[str, Any]:
        """One call's keywords; ``stop`` comes apart from them, and None leaves the field's."""
        return dict(given) if stop is None else {**given, "stop": stop}
