"""`ChatLazyKV`: a LangChain chat model that reuses the KV of every ingested text in a prompt."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import aclosing
from typing import Any

from langchain_core.callbacks import AsyncCallbackManagerForLLMRun, CallbackManagerForLLMRun
from langchain_core.language_models import BaseChatModel, LanguageModelInput
from langchain_core.messages import AIMessage, BaseMessage
from langchain_core.outputs import ChatGeneration, ChatGenerationChunk, ChatResult
from langchain_core.runnables import Runnable

from langchain_lazyrag import results
from langchain_lazyrag.fields import LangChainFields
from langchain_lazyrag.messages import engine_messages
from langchain_lazyrag.structured import Method, Schema, structured_output, with_schema
from lazyrag import Engine, GenerationStream
from lazyrag.adapter.background import iterate_in_thread, run_in_thread
from lazyrag.adapter.fields import Pathlike
from lazyrag.adapter.reports import collectors
from lazyrag.errors import RequestError


class ChatLazyKV(LangChainFields, BaseChatModel):
    """Answers with a local model; ingested texts in the prompt are reused wherever they stand.

    Give ``model`` and ``store``, or an ``engine``. The same model, store and settings in one
    process share one engine, also with LlamaIndex's ``LazyKVLLM``. Of every answer
    ``response_metadata["lazyrag"]`` is the reuse report (`ReuseReport.to_dict`) and
    ``usage_metadata["input_token_details"]["cache_read"]`` the tokens that were reused; a stream
    has both on its last chunk. `collect_reports` catches the report behind a chain.

    Every call takes ``max_tokens`` (or ``max_new_tokens``), ``temperature``, ``top_k``, ``top_p``,
    ``min_p``, ``repetition_penalty``, ``seed``, ``stop``, ``json_schema``, ``quality``, ``strict``
    and ``timeout``; any other argument is refused.

    Args:
        model: hub id, local folder, ``.gguf`` file or the alias ``smollm2``.
        store: directory of the KV store.
        engine: a ready engine, instead of ``model`` and ``store``.
        **options: the fields below, and those of LangChain's chat models. ``api_key``,
            ``base_url`` and ``max_retries`` of remote models are taken and mean nothing.

    Raises:
        ModelError: the checkpoint cannot be loaded, is not supported, or has no chat template.
        StoreError: the store cannot be opened.
        RequestError: an option has no sense.

    Examples:
        >>> chat = ChatLazyKV(model="smollm2", store="kv")
        >>> precompute_documents(documents, chat)
        >>> chain = {"context": retriever | format_docs, "question": RunnablePassthrough()}
        >>> chain = chain | prompt | chat | StrOutputParser()
        >>> chain.invoke("What does PEP 20 say?")
    """

    streaming: bool = False
    """Whether ``invoke`` goes through the stream, so that callbacks see every token."""

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
        if not self.engine.has_chat_template:
            raise RequestError(
                f"{self.model} has no chat template, so it cannot read messages; use "
                "langchain_lazyrag.LazyKVLLM, which continues a text."
            )

    @property
    def _llm_type(self) -> str:
        return "lazyrag-chat"

    def get_num_tokens_from_messages(self, messages: list[BaseMessage], tools: Any = None) -> int:
        """Tokens of the prompt that the messages become, chat template included.

        Raises:
            RequestError: as for a call; tools are refused.
        """
        if tools:
            raise RequestError("a local text model has no tools.")
        return len(self.engine.token_ids(engine_messages(messages)))

    def with_structured_output(
        self,
        schema: Schema | None = None,
        *,
        method: Method = "json_schema",
        include_raw: bool = False,
        strict: bool | None = None,
        **kwargs: Any,
    ) -> Runnable[LanguageModelInput, Any]:
        """Answers that are JSON of a schema, parsed; every answer fits it, whatever the model.

        The schema is told to the model at the end of the last message, and decoding is constrained
        to it (``pip install 'lazyrag[structured]'``).

        Args:
            schema: a pydantic class (the answer is an instance), a TypedDict or a JSON schema (it
                is a dict). ``json_mode`` needs none.
            method: ``json_schema``; ``function_calling`` is the same here. ``json_mode`` allows any
                JSON object and adds nothing to the prompt: say there what you want.
            include_raw: a dict with ``raw``, ``parsed`` and ``parsing_error`` instead.
            strict: taken for other models' sake; always strict.
            **kwargs: refused.

        Raises:
            RequestError: an unknown method or argument, or no schema where one is needed.
            OutputParserException: when called, if ``max_tokens`` or a stop string ended the answer
                before its JSON was complete.
        """
        if kwargs:
            raise RequestError(f"with_structured_output knows no {', '.join(sorted(kwargs))}.")
        return structured_output(self, schema, method=method, include_raw=include_raw)

    def _generate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        with self._open(messages, stop, kwargs) as stream:
            generation = stream.read()
        return _result(results.message(generation, self.model, collectors()))

    async def _agenerate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        collected = collectors()
        generation = await run_in_thread(lambda: self._open(messages, stop, kwargs))
        return _result(results.message(generation, self.model, collected))

    def _stream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> Iterator[ChatGenerationChunk]:
        collected = collectors()
        with self._open(messages, stop, kwargs) as stream:
            for delta in stream:
                yield results.message_chunk(delta, self.model, collected)
            yield results.message_chunk(stream.result, self.model, collected)

    async def _astream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> AsyncIterator[ChatGenerationChunk]:
        collected = collectors()
        deltas = iterate_in_thread(lambda: self._open(messages, stop, kwargs))
        async with aclosing(deltas) as items:
            async for item in items:
                yield results.message_chunk(item, self.model, collected)

    def _open(
        self, messages: list[BaseMessage], stop: list[str] | None, arguments: Mapping[str, Any]
    ) -> GenerationStream:
        options = self._call_arguments(stop, arguments)
        if options.pop("tell_schema", False):
            messages = with_schema(messages, options["json_schema"])
        return self._begin(engine_messages(messages), options)


def _result(message: AIMessage) -> ChatResult:
    return ChatResult(generations=[ChatGeneration(message=message)])
