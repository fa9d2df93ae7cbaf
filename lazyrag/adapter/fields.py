"""The fields every adapter class has, and the engine behind them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

from pydantic import BaseModel, Field, PrivateAttr

from lazyrag.adapter.options import NEW_TOKENS, with_arguments
from lazyrag.engine.engine import Engine
from lazyrag.engine.generation import Generation, GenerationStream
from lazyrag.engine.request import DEFAULT_NEW_TOKENS
from lazyrag.errors import RequestError
from lazyrag.types import DEFAULT_QUALITY, DEFAULT_SINK, GenerationOptions

_OF_THE_ENGINE = ("device", "dtype", "kv_dtype", "sink", "tenant")

Messages = list[dict[str, str]]
Pathlike = str | os.PathLike[str]


class HeldEngine:
    """Keeps an engine out of deep copies: a copied LLM uses the same weights and store."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    def __deepcopy__(self, memo: dict[int, Any]) -> HeldEngine:
        return self


class EngineFields(BaseModel):
    """Which engine, and how it decodes unless a call says otherwise.

    Made from its fields again (pickled, serialised, reconfigured by a framework), an object finds
    the same engine as long as that one lives in this process, however it was made.
    """

    model: str = Field(description="Hub id, local folder, .gguf file, or the alias smollm2.")
    store: str | None = Field(default=None, description="Directory of the KV store.")
    device: str = Field(default="auto", description="auto, cpu or cuda.")
    dtype: str = Field(default="auto", description="What the model computes in.")
    kv_dtype: str = Field(default="model", description="How K and V are kept on disk.")
    sink: str = Field(
        default=DEFAULT_SINK,
        description="What nodes see before them: passages, documents, template, none, or a text.",
    )
    tenant: str = Field(default="", description="Nodes of one tenant never serve another.")
    quality: str = Field(
        default=DEFAULT_QUALITY.value,
        description="fast reuses every known node, full none; balanced and best lie between.",
    )
    temperature: float = Field(default=0.0, description="0 = greedy.", ge=0.0)
    max_tokens: int = Field(
        default=DEFAULT_NEW_TOKENS,
        description="At most this many new tokens; fewer where the context window ends.",
        gt=0,
    )
    top_k: int | None = Field(default=None, description="Sample among so many tokens; None = all.")
    top_p: float | None = Field(
        default=None, description="Sample within this probability mass; None = all."
    )
    min_p: float | None = Field(
        default=None, description="Leave out tokens less likely than this share of the likeliest."
    )
    repetition_penalty: float = Field(default=1.0, description="Above 1 repeats less; 1 = off.")
    seed: int | None = Field(default=None, description="Of the sampling; None = a fresh one.")
    stop: list[str] = Field(
        default_factory=list, description="Strings that end an answer and are no part of it."
    )
    strict: bool = Field(
        default=False, description="Raise when a known node would have to be computed again."
    )
    timeout: float | None = Field(
        default=None, description="Seconds a call may take; then it is stopped with an error."
    )

    _ignored: ClassVar[frozenset[str]] = frozenset()
    """Arguments that the framework passes to every model and that mean nothing here."""
    _not_pickled: ClassVar[frozenset[str]] = frozenset()
    """Fields of the framework that hold locks or handlers."""
    _held: HeldEngine = PrivateAttr()

    @property
    def engine(self) -> Engine:
        """The engine behind this object, possibly shared with others."""
        return self._held.engine

    @classmethod
    def _arguments(
        cls,
        model: Pathlike | None,
        store: Pathlike | None,
        engine: Engine | None,
        options: Mapping[str, Any],
    ) -> dict[str, Any]:
        """What a constructor got, as fields.

        Raises:
            RequestError: neither a model nor an engine, or both; a setting that does not exist.
        """
        known = {alias for field in cls.model_fields.values() if (alias := field.alias)}
        known |= cls.model_fields.keys()
        if unknown := sorted(options.keys() - known):
            raise RequestError(
                f"{cls.__name__} has no setting {', '.join(unknown)}; it has "
                f"{', '.join(sorted(EngineFields.model_fields))} and those of its framework."
            )
        fields = dict(options)
        if engine is not None:
            if model is not None or store is not None:
                raise RequestError(f"{cls.__name__} takes model and store, or an engine, not both.")
            model, store = engine.model_name, engine.store.path
            if given := sorted(fields.keys() & set(_OF_THE_ENGINE)):
                raise RequestError(
                    f"{cls.__name__} got an engine and {', '.join(given)}, which the engine has "
                    "already; leave them out."
                )
            fields |= {
                "device": engine.device,
                "dtype": engine.encoding.compute_dtype,
                "kv_dtype": engine.encoding.dtype.value,
                "sink": engine.sink,
                "tenant": engine.encoding.tenant,
            }
        elif model is None:
            raise RequestError(f"{cls.__name__} needs a model (with a store), or an engine.")
        if isinstance(fields.get("stop"), str):
            fields["stop"] = [fields["stop"]]
        store = None if store is None else os.fspath(store)
        return {"model": os.fspath(model), "store": store, **fields}

    def _hold(self, engine: Engine | None) -> None:
        """Check the options, then take the engine, or find or load it.

        Raises:
            RequestError: an option has no sense.
            ModelError, StoreError: as `Engine.from_pretrained`.
        """
        self._options({})
        if engine is None:
            settings = {name: getattr(self, name) for name in _OF_THE_ENGINE}
            engine = Engine.shared(self.model, store=self.store, **settings)
        else:
            engine.share()
        self._held = HeldEngine(engine)

    def _options(self, arguments: Mapping[str, Any]) -> GenerationOptions:
        """The fields with one call's arguments on top.

        Raises:
            RequestError: as `with_arguments`.
        """
        names: tuple[str, ...] = ("max_tokens", "temperature", "top_k", "top_p", "min_p")
        names += ("repetition_penalty", "seed", "stop", "quality", "strict", "timeout")
        own = {name: getattr(self, name) for name in names}
        caller = type(self).__name__
        options = with_arguments(GenerationOptions(), own, caller=caller)
        meant = {name: value for name, value in arguments.items() if name not in self._ignored}
        return with_arguments(options, meant, caller=caller)

    def _begin(self, prompt: str | Messages, arguments: Mapping[str, Any]) -> GenerationStream:
        """Begin a generation; no work is done yet, but what cannot be served is refused.

        ``max_tokens`` of a call is binding. That of the object is a limit, which gives way when
        the prompt has filled the context window but for less than it.
        """
        options = replace(self._options(arguments), shorten=NEW_TOKENS.isdisjoint(arguments))
        if isinstance(prompt, str):
            return self.engine.stream(prompt, options)
        return self.engine.stream_chat(prompt, options)

    def _run(self, prompt: str | Messages, arguments: Mapping[str, Any]) -> Generation:
        with self._begin(prompt, arguments) as stream:
            return stream.read()

    def __getstate__(self) -> dict[str, Any]:
        """The fields only; unpickling finds or loads the engine again."""
        state = dict(BaseModel.__getstate__(self))  # LlamaIndex would try to pickle the engine
        state["__pydantic_private__"] = None
        kept = type(self).model_fields.keys() - self._not_pickled
        state["__dict__"] = {name: state["__dict__"][name] for name in kept}
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Make the object anew from its fields."""
        self.__init__(**state["__dict__"])  # type: ignore[misc]
