"""`LazyKVLLM`: a LlamaIndex LLM that reuses the KV of every ingested node it finds in a prompt."""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
from llama_index.core.bridge.pydantic import Field
from llama_index.core.llms.callbacks import llm_chat_callback, llm_completion_callback
from llama_index.core.llms.custom import CustomLLM
from llama_index.core.llms.llm import default_completion_to_prompt
from llama_index.llms.lazyrag import responses
from llama_index.llms.lazyrag.calls import IGNORED, engine_messages

from lazyrag import Engine
from lazyrag.adapter.background import iterate_in_thread, run_in_thread
from lazyrag.adapter.fields import EngineFields, Messages, Pathlike
from lazyrag.adapter.reports import collectors
from lazyrag.errors import RequestError

F = TypeVar("F", bound=Callable[..., Any])


def _chat_call(method: F) -> F:
    return cast(F, llm_chat_callback()(method))


def _completion_call(method: F) -> F:
    return cast(F, llm_completion_callback()(method))


class LazyKVLLM(EngineFields, CustomLLM):
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

    context_window: int | None = Field(
        default=None,
        description="Tokens LlamaIndex may plan with; None = the model's own, which is the most.",
    )

    _ignored = IGNORED
    _not_pickled = frozenset({"callback_manager", "rate_limiter"})

    def __init__(
        self,
        model: Pathlike | None = None,
        store: Pathlike | None = None,
        *,
        engine: Engine | None = None,
        **options: Any,
    ) -> None:
        super().__init__(**self._arguments(model, store, engine, options))
        self._hold(engine)
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
        stream = self._begin(self._completion(prompt, formatted), kwargs)
        return responses.completion_chunks(stream, collectors())

    @_completion_call
    async def acomplete(
        self, prompt: str, formatted: bool = False, **kwargs: Any
    ) -> CompletionResponse:
        """As `complete`; the event loop stays free, cancelling stops the work."""
        collected = collectors()
        generation = await run_in_thread(
            lambda: self._begin(self._completion(prompt, formatted), kwargs)
        )
        return responses.completion(generation, collected)

    @_completion_call
    async def astream_complete(
        self, prompt: str, formatted: bool = False, **kwargs: Any
    ) -> CompletionResponseAsyncGen:
        """As `stream_complete`; the event loop stays free, leaving the stream stops the work."""
        deltas = iterate_in_thread(lambda: self._begin(self._completion(prompt, formatted), kwargs))
        return responses.acompletion_chunks(deltas, collectors())

    @_chat_call
    def chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        """Answer the last of ``messages``."""
        generation = self._run(self._conversation(messages), kwargs)
        return responses.chat(generation, collectors())

    @_chat_call
    def stream_chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponseGen:
        """As `chat`, piece by piece; the last chunk has no new text and the report."""
        stream = self._begin(self._conversation(messages), kwargs)
        return responses.chat_chunks(stream, collectors())

    @_chat_call
    async def achat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        """As `chat`; the event loop stays free, cancelling stops the work."""
        collected = collectors()
        generation = await run_in_thread(lambda: self._begin(self._conversation(messages), kwargs))
        return responses.chat(generation, collected)

    @_chat_call
    async def astream_chat(
        self, messages: Sequence[ChatMessage], **kwargs: Any
    ) -> ChatResponseAsyncGen:
        """As `stream_chat`; the event loop stays free, leaving the stream stops the work."""
        deltas = iterate_in_thread(lambda: self._begin(self._conversation(messages), kwargs))
        return responses.achat_chunks(deltas, collectors())

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
