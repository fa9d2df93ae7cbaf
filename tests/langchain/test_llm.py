"""LazyKVLLM, the text model of LangChain."""

from __future__ import annotations

import asyncio
import pickle
from typing import Any

import pytest
from langchain_core.caches import InMemoryCache
from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.documents import Document
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import PromptTemplate
from langchain_lazyrag import ChatLazyKV, LazyKVLLM, collect_reports, precompute_documents

from lazyrag import RequestError

PROMPT = "Say the days of the week."


def test_all_forms_of_a_call_give_the_chat_models_answer(llm: LazyKVLLM, chat: ChatLazyKV) -> None:
    async def asynchronous() -> list[str]:
        streamed = [delta async for delta in llm.astream(PROMPT)]
        return [await llm.ainvoke(PROMPT), "".join(streamed), *await llm.abatch([PROMPT])]

    texts = [llm.invoke(PROMPT), "".join(llm.stream(PROMPT)), *llm.batch([PROMPT])]
    texts += asyncio.run(asynchronous())
    assert texts == [chat.invoke(PROMPT).text] * 6


def test_raw_prompt_is_continued_without_the_template(llm: LazyKVLLM) -> None:
    raw = LazyKVLLM(engine=llm.engine, raw=True, max_tokens=8)
    text = "The days of the week are Monday, Tuesday,"
    assert raw.invoke(text) == llm.engine.generate(text, max_new_tokens=8).text
    assert raw.invoke(text) != llm.invoke(text)


def test_generations_carry_report_and_usage(llm: LazyKVLLM, documents: list[Document]) -> None:
    precompute_documents(documents, llm)
    prompts = [f"{document.page_content}\n\nIs it so?" for document in documents[:2]]
    result = llm.generate(prompts)
    for (generation,) in result.generations:
        assert generation.generation_info is not None
        assert generation.generation_info["lazyrag"]["nodes_reused"] == 1
        assert generation.generation_info["finish_reason"] in {"stop", "length"}
    assert result.llm_output is not None
    counted = result.llm_output["token_usage"]
    assert counted["prompt_tokens"] == sum(
        len(llm.engine.token_ids([{"role": "user", "content": prompt}])) for prompt in prompts
    )
    assert counted["total_tokens"] == counted["prompt_tokens"] + counted["completion_tokens"]


def test_string_chain_reuses(llm: LazyKVLLM, documents: list[Document]) -> None:
    precompute_documents(documents, llm)
    prompt = PromptTemplate.from_template("{context}\n\nQuestion: {question}\nAnswer:")
    chain = prompt | llm.bind(stop=["\n"]) | StrOutputParser()
    context = "\n\n".join(document.page_content for document in documents)
    with collect_reports() as reports:
        answer = chain.invoke({"context": context, "question": "Who keeps the lighthouse?"})
    assert "\n" not in answer
    assert (reports[0].nodes_reused, reports[0].nodes_recomputed) == (3, 0)


def test_callbacks_see_every_token_of_a_stream(llm: LazyKVLLM) -> None:
    seen: list[str] = []

    class Watch(BaseCallbackHandler):
        def on_llm_new_token(self, token: str, **_: Any) -> None:
            seen.append(token)

    async def astream() -> str:
        parts = llm.astream(PROMPT, {"callbacks": [Watch()]})
        return "".join([part async for part in parts])

    text = "".join(llm.stream(PROMPT, {"callbacks": [Watch()]}))
    assert "".join(seen) == text and len(seen) > 2
    assert asyncio.run(astream()) == text
    assert "".join(seen) == 2 * text


def test_cache_of_answers_tells_raw_prompts_apart(llm: LazyKVLLM) -> None:
    cache = InMemoryCache()
    plain = LazyKVLLM(engine=llm.engine, max_tokens=4, cache=cache)
    raw = LazyKVLLM(engine=llm.engine, max_tokens=4, cache=cache, raw=True)
    assert plain.invoke(PROMPT) != raw.invoke(PROMPT)


def test_refusals_and_copies(llm: LazyKVLLM) -> None:
    arguments: dict[str, Any] = {"top_x": 1}
    with pytest.raises(RequestError, match="LazyKVLLM knows no argument 'top_x'"):
        llm.invoke(PROMPT, **arguments)
    with pytest.raises(RequestError, match="empty"):
        LazyKVLLM(engine=llm.engine, raw=True).invoke(" ")
    assert pickle.loads(pickle.dumps(llm)).engine is llm.engine
