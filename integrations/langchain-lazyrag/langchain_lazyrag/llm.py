"""`LazyKVLLM`: a LangChain text model over the same engine."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import aclosing
from functools import partial
from typing import Any

from langchain_core.callbacks import AsyncCallbackManagerForLLMRun, CallbackManagerForLLMRun
from langchain_core.language_models import LLM
from langchain_core.outputs import GenerationChunk, LLMResult

from langchain_lazyrag import results
from langchain_lazyrag.fields import LangChainFields
from lazyrag import Engine, Generation, GenerationStream
from lazyrag.adapter.background import iterate_in_thread, run_in_thread
from lazyrag.adapter.fields import Messages, Pathlike
from lazyrag.adapter.reports import Collectors, collectors


class LazyKVLLM(LangChainFields, LLM):
    """Continues or answers a text; ingested texts in it are reused wherever they stand.

    As `ChatLazyKV`, for chains made of strings. On a model with a chat template a prompt becomes
    one user message, unless ``raw`` is set; then, and on other models, it is continued as it is.
    The report is in ``generation_info["lazyrag"]`` of what ``generate`` returns, and on the last
    chunk of a stream; `collect_reports` catches it behind a chain.

    Args:
        model: hub id, local folder, ``.gguf`` file or the alias ``smollm2``.
        store: directory of the KV store.
        engine: a ready engine, instead of ``model`` and ``store``.
        **options: the fields below, and those of LangChain's LLMs.

    Raises:
        ModelError: the checkpoint cannot be loaded or is not supported.
        StoreError: the store cannot be opened.
        RequestError: an option has no sense.
    """

    raw: bool = False
    """Leave the chat template out."""

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

    @property
    def _llm_type(self) -> str:
        return "lazyrag"

    @property
    def _identifying_params(self) -> dict[str, Any]:
        return {**super()._identifying_params, "raw": self.raw}

    def _call(
        self,
        prompt: str,
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> str:
        return self._run(self._prompt(prompt), self._call_arguments(stop, kwargs)).text

    def _generate(
        self,
        prompts: list[str],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> LLMResult:
        arguments = self._call_arguments(stop, kwargs)
        generations = [self._run(self._prompt(prompt), arguments) for prompt in prompts]
        return self._result(generations, collectors())

    async def _agenerate(
        self,
        prompts: list[str],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> LLMResult:
        collected = collectors()
        generations = [
            await run_in_thread(partial(self._open, prompt, stop, kwargs)) for prompt in prompts
        ]
        return self._result(generations, collected)

    def _stream(
        self,
        prompt: str,
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> Iterator[GenerationChunk]:
        collected = collectors()
        with self._open(prompt, stop, kwargs) as stream:
            for delta in stream:
                chunk = results.text_chunk(delta, self.model, collected)
                if run_manager is not None:
                    run_manager.on_llm_new_token(delta, chunk=chunk)
                yield chunk
            yield results.text_chunk(stream.result, self.model, collected)

    async def _astream(
        self,
        prompt: str,
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> AsyncIterator[GenerationChunk]:
        collected = collectors()
        deltas = iterate_in_thread(lambda: self._open(prompt, stop, kwargs))
        async with aclosing(deltas) as items:
            async for item in items:
                chunk = results.text_chunk(item, self.model, collected)
                if run_manager is not None and isinstance(item, str):
                    await run_manager.on_llm_new_token(item, chunk=chunk)
                yield chunk

    def _open(
        self, prompt: str, stop: list[str] | None, arguments: Mapping[str, Any]
    ) -> GenerationStream:
        return self._begin(self._prompt(prompt), self._call_arguments(stop, arguments))

    def _prompt(self, prompt: str) -> str | Messages:
        if self.raw or not self.engine.has_chat_template:
            return prompt
        return [{"role": "user", "content": prompt}]

    def _result(self, generations: list[Generation], collected: Collectors) -> LLMResult:
        usages = [results.usage(generation) for generation in generations]
        tokens = {
            "prompt_tokens": sum(usage["input_tokens"] for usage in usages),
            "completion_tokens": sum(usage["output_tokens"] for usage in usages),
            "total_tokens": sum(usage["total_tokens"] for usage in usages),
        }
        return LLMResult(
            generations=[[results.text(one, self.model, collected)] for one in generations],
            llm_output={"token_usage": tokens, "model_name": self.model},
        )
