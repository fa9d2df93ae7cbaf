"""`LazyKVLLM`: a LlamaIndex LLM that reuses the KV of every ingested node it finds in a prompt."""

from __future__ import annotations

import os
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Any, TypeVar, cast

from llama_index.core.base.llms.generic_utils import (
    messages_to_prompt as generic_messages_to_prompt,
)
from llama_index.core.base.llms.types import (
    ChatMessage,
    ChatResponse,
    ChatResponseAsyncGen,
    ChatResponseGen,
    CompletionResponse,
    CompletionResponseAsyncGen,
    CompletionResponseGen,
    LLMMetadata,
)
from llama_index.core.bridge.pydantic import BaseModel, Field, PrivateAttr
from llama_index.core.llms.callbacks import llm_chat_callback, llm_completion_callback
from llama_index.core.llms.custom import CustomLLM
from llama_index.core.llms.llm import default_completion_to_prompt
from llama_index.llms.lazyrag import responses
from llama_index.llms.lazyrag.background import iterate_in_thread
from llama_index.llms.lazyrag.calls import engine_messages, with_arguments
from llama_index.llms.lazyrag.reports import collectors

from lazyrag import Engine, Generation, GenerationStream
from lazyrag.errors import RequestError
from lazyrag.types import DEFAULT_SINK, GenerationOptions

DEFAULT_MAX_TOKENS = 256

Messages = list[dict[str, str]]
_NEW_TOKENS = frozenset({"max_tokens", "max_new_tokens"})

F = TypeVar("F", bound=Callable[..., Any])


def _chat_call(method: F) -> F:
    return cast(F, llm_chat_callback()(method))


def _completion_call(method: F) -> F:
    return cast(F, llm_completion_callback()(method))


class _Held:
    """Keeps an engine out of deep copies: a copied LLM uses the same weights and store."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    def __deepcopy__(self, memo: dict[int, Any]) -> _Held:
        return self


class LazyKVLLM(CustomLLM):
    """Answers with a local model; ingested nodes in the prompt are reused wherever they stand.

    Give ``model`` and ``store``, or an ``engine``. The same model, store and settings in one
    process share one engine. ``response.additional_kwargs["lazyrag"]`` is the reuse report of the
    answer (`ReuseReport.to_dict`), on the last chunk of a stream; `collect_reports` catches it
    behind a query or chat engine.

    Every call takes ``max_tokens`` (or ``max_new_tokens``), ``temperature``, ``top_k``, ``top_p``,
    ``min_p``, ``repetition_penalty``, ``seed``, ``stop``, ``quality`` and ``strict``; any other
    argument is refused.

    Args:
        model: hub id, local folder, ``.gguf`` file or the alias ``smollm2``.
        store: directory of the KV store.
        engine: a ready engine, instead of ``model`` and ``store``.
        **options: the fields below, and those of LlamaIndex's LLM.

    Raises:
        ModelError: the checkpoint cannot be loaded or is not supported.
        StoreError: the store cannot be opened.
        RequestError: an option has no sense.

    Examples:
        >>> llm = LazyKVLLM(model="smollm2", store="kv")
        >>> splitter = SentenceSplitter(chunk_size=384, tokenizer=llm.tokenizer)
        >>> index = VectorStoreIndex.from_documents(
        ...     documents, transformations=[splitter, LazyKVTransform(llm)]
        ... )
        >>> index.as_query_engine(llm=llm).query("What does PEP 20 say?")
    """

    model: str = Field(description="Hub id, local folder, .gguf file, or the alias smollm2.")
    store: str | None = Field(default=None, description="Directory of the KV store.")
    device: str = Field(default="auto", description="auto, cpu or cuda.")
    dtype: str = Field(default="auto", description="What the model computes in.")
    kv_dtype: str = Field(default="model", description="How K and V are kept on disk.")
    sink: str = Field(
        default=DEFAULT_SINK,
        description="What nodes see before them while encoded: documents, template, none, a text.",
    )
    quality: str = Field(
        default="fast", description="fast reuses every known node, full computes everything."
    )
    temperature: float = Field(default=0.0, description="0 = greedy.", ge=0.0)
    max_tokens: int = Field(
        default=DEFAULT_MAX_TOKENS,
        description="At most this many new tokens; fewer where the context window ends.",
        gt=0,
    )
    top_k: int | None = Field(default=None, description="Sample among so many tokens; None = all.")
    top_p: float | None = Field(
        default=None, description="Sample within this probability mass; None = all."
    )
    seed: int | None = Field(default=None, description="Of the sampling; None = a fresh one.")
    stop: list[str] = Field(
        default_factory=list, description="Strings that end an answer and are no part of it."
    )
    context_window: int | None = Field(
        default=None,
        description="Tokens LlamaIndex may plan with; None = the model's own, which is the most.",
    )
    additional_kwargs: dict[str, Any] = Field(
        default_factory=dict,
        description="Other generation options for every call: min_p, repetition_penalty, strict.",
    )

    _held: _Held = PrivateAttr()

    def __init__(
        self,
        model: str | os.PathLike[str] | None = None,
        store: str | os.PathLike[str] | None = None,
        *,
        engine: Engine | None = None,
        **options: Any,
    ) -> None:
        if engine is not None:
            if model is not None or store is not None:
                raise RequestError("LazyKVLLM takes model and store, or an engine, not both.")
            model, store = engine.model_name, engine.store.path
            options.update(
                dtype=engine.encoding.compute_dtype,
                kv_dtype=engine.encoding.dtype.value,
                sink=engine.sink,
            )
        elif model is None:
            raise RequestError("LazyKVLLM needs a model (with a store), or an engine.")
        if isinstance(options.get("stop"), str):
            options["stop"] = [options["stop"]]
        super().__init__(
            model=os.fspath(model), store=None if store is None else os.fspath(store), **options
        )
        self._options({})
        self._held = _Held(
            engine
            or Engine.shared(
                self.model,
                store=self.store,
                device=self.device,
                dtype=self.dtype,
                kv_dtype=self.kv_dtype,
                sink=self.sink,
            )
        )
        window = self.engine.context_window
        if self.context_window is not None and not 0 < self.context_window <= window:
            raise RequestError(
                f"context_window is {self.context_window}, but {self.model} reads 1 to {window} "
                "tokens; give a number within that, or leave it out."
            )
        if self.engine.has_chat_template and not (
            self.messages_to_prompt is generic_messages_to_prompt
            and self.completion_to_prompt is default_completion_to_prompt
        ):
            raise RequestError(
                f"{self.model} has a chat template of its own, which is what LazyKVLLM uses; leave "
                "messages_to_prompt and completion_to_prompt out."
            )

    @classmethod
    def class_name(cls) -> str:
        """Name in serialised form."""
        return "LazyKVLLM"

    @property
    def engine(self) -> Engine:
        """The engine behind this LLM, possibly shared."""
        return self._held.engine

    @property
    def metadata(self) -> LLMMetadata:
        """What LlamaIndex plans prompts with."""
        return LLMMetadata(
            context_window=self.context_window or self.engine.context_window,
            num_output=self.max_tokens,
            is_chat_model=self.engine.has_chat_template,
            is_function_calling_model=False,
            model_name=self.model,
        )

    def tokenizer(self, text: str) -> list[int]:
        """As many items as ``text`` has tokens, for LlamaIndex's splitters and prompt helpers.

        They only ask for the length; without it they count with another model's tokenizer.
        """
        return list(range(self.engine.count_tokens(text)))

    @_completion_call
    def complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponse:
        """Answer one prompt; on a chat model it becomes one user message unless ``formatted``."""
        generation = self._run(self._completion(prompt, formatted), kwargs)
        return responses.completion(generation, collectors())

    @_completion_call
    def stream_complete(
        self, prompt: str, formatted: bool = False, **kwargs: Any
    ) -> CompletionResponseGen:
        """As `complete`, piece by piece; the last chunk has no new text and the report."""
        stream = self._stream(self._completion(prompt, formatted), kwargs)
        return responses.completion_chunks(stream, collectors())

    @_completion_call
    async def acomplete(
        self, prompt: str, formatted: bool = False, **kwargs: Any
    ) -> CompletionResponse:
        """As `complete`; the event loop stays free, cancelling stops the work."""
        collected = collectors()
        generation = await self._arun(self._completion(prompt, formatted), kwargs)
        return responses.completion(generation, collected)

    @_completion_call
    async def astream_complete(
        self, prompt: str, formatted: bool = False, **kwargs: Any
    ) -> CompletionResponseAsyncGen:
        """As `stream_complete`; the event loop stays free, leaving the stream stops the work."""
        deltas = self._astream(self._completion(prompt, formatted), kwargs)
        return responses.acompletion_chunks(deltas, collectors())

    @_chat_call
    def chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        """Answer the last of ``messages``."""
        generation = self._run(self._conversation(messages), kwargs)
        return responses.chat(generation, collectors())

    @_chat_call
    def stream_chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponseGen:
        """As `chat`, piece by piece; the last chunk has no new text and the report."""
        stream = self._stream(self._conversation(messages), kwargs)
        return responses.chat_chunks(stream, collectors())

    @_chat_call
    async def achat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        """As `chat`; the event loop stays free, cancelling stops the work."""
        collected = collectors()
        generation = await self._arun(self._conversation(messages), kwargs)
        return responses.chat(generation, collected)

    @_chat_call
    async def astream_chat(
        self, messages: Sequence[ChatMessage], **kwargs: Any
    ) -> ChatResponseAsyncGen:
        """As `stream_chat`; the event loop stays free, leaving the stream stops the work."""
        deltas = self._astream(self._conversation(messages), kwargs)
        return responses.achat_chunks(deltas, collectors())

    def __getstate__(self) -> dict[str, Any]:
        """The fields only; unpickling finds or loads the engine again."""
        state = dict(BaseModel.__getstate__(self))
        state["__pydantic_private__"] = None
        left_out = {"callback_manager", "rate_limiter"}
        state["__dict__"] = {k: v for k, v in state["__dict__"].items() if k not in left_out}
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Make the LLM anew from its fields."""
        self.__init__(**state["__dict__"])  # type: ignore[misc]

    def _options(self, arguments: Mapping[str, Any]) -> GenerationOptions:
        """The fields, ``additional_kwargs`` on top of them, one call's arguments on top of both."""
        own = {
            "max_new_tokens": self.max_tokens,
            "temperature": self.temperature,
            "top_k": self.top_k,
            "top_p": self.top_p,
            "seed": self.seed,
            "stop": self.stop,
            "quality": self.quality,
        }
        options = with_arguments(GenerationOptions(), own)
        return with_arguments(with_arguments(options, self.additional_kwargs), arguments)

    def _completion(self, prompt: str, formatted: bool) -> str | Messages:
        if formatted:
            return prompt
        if self.engine.has_chat_template:
            return [{"role": "user", "content": prompt}]
        return self.completion_to_prompt(prompt) if self.completion_to_prompt else prompt

    def _conversation(self, messages: Sequence[ChatMessage]) -> str | Messages:
        texts = engine_messages(messages)
        if self.engine.has_chat_template or self.messages_to_prompt is None:
            return texts
        return self.messages_to_prompt(messages)

    def _run(self, prompt: str | Messages, arguments: Mapping[str, Any]) -> Generation:
        with self._stream(prompt, arguments) as stream:
            for _ in stream:
                pass
            return stream.result

    def _stream(self, prompt: str | Messages, arguments: Mapping[str, Any]) -> GenerationStream:
        """Begin a generation; no work is done yet, but what cannot be served is refused.

        ``max_tokens`` of a call is binding. That of the LLM is a limit, which gives way when
        LlamaIndex has filled the context window but for a few tokens of the chat template.
        """
        options = self._options(arguments)
        start = self.engine.stream if isinstance(prompt, str) else self.engine.stream_chat
        try:
            return start(prompt, options)  # type: ignore[arg-type]
        except RequestError:
            if not _NEW_TOKENS.isdisjoint(arguments):
                raise
            return start(prompt, replace(options, max_new_tokens=None))  # type: ignore[arg-type]

    def _astream(
        self, prompt: str | Messages, arguments: Mapping[str, Any]
    ) -> AsyncGenerator[str | Generation, None]:
        return iterate_in_thread(lambda: self._stream(prompt, arguments))

    async def _arun(self, prompt: str | Messages, arguments: Mapping[str, Any]) -> Generation:
        async with aclosing(self._astream(prompt, arguments)) as items:
            async for item in items:
                if not isinstance(item, str):
                    return item
        raise RuntimeError("a generation ended without a result")
