"""LazyKVLLM alone: every form of a call, its options, copies and refusals."""

from __future__ import annotations

import asyncio
import copy
import json
import pickle
from collections.abc import AsyncIterator, Iterable
from typing import Any

import pytest
from llama_index.core.base.llms.types import (
    AudioBlock,
    CacheControl,
    CachePoint,
    ChatMessage,
    CompletionResponse,
    ImageBlock,
    MessageRole,
    TextBlock,
)
from llama_index.core.callbacks import CallbackManager, CBEventType, LlamaDebugHandler
from llama_index.llms.lazyrag import LazyKVLLM, collect_reports
from llama_index.llms.lazyrag.calls import engine_messages

from lazyrag import Engine, RequestError

PROMPT = "Say the days of the week."
MESSAGES = [ChatMessage(role="user", content=PROMPT)]


def token_count(answer: CompletionResponse) -> int:
    """How many tokens an answer has."""
    assert isinstance(answer.raw, dict)
    return len(answer.raw["token_ids"])


async def collected(stream: AsyncIterator[Any]) -> list[Any]:
    return [chunk async for chunk in stream]


def check_stream(chunks: Iterable[Any], text_of: Any, expected: str) -> None:
    """Deltas are new text, texts grow with them, and the report comes last."""
    *parts, last = chunks
    text = ""
    for part in parts:
        assert part.delta
        text += part.delta
        assert text_of(part) == text
        assert "lazyrag" not in part.additional_kwargs
    assert text_of(last) == text == expected
    assert last.delta == ""
    assert last.additional_kwargs["lazyrag"]["version"] == 1


def test_all_eight_calls_give_one_answer(llm: LazyKVLLM) -> None:
    answer = llm.complete(PROMPT)
    assert answer.text
    assert llm.chat(MESSAGES).message.content == answer.text
    assert llm.chat(MESSAGES).message.role is MessageRole.ASSISTANT
    check_stream(llm.stream_complete(PROMPT), lambda c: c.text, answer.text)
    check_stream(llm.stream_chat(MESSAGES), lambda c: c.message.content or "", answer.text)

    async def in_a_loop() -> None:
        assert (await llm.acomplete(PROMPT)).text == answer.text
        assert (await llm.achat(MESSAGES)).message.content == answer.text
        chunks = await collected(await llm.astream_complete(PROMPT))
        check_stream(chunks, lambda c: c.text, answer.text)
        chunks = await collected(await llm.astream_chat(MESSAGES))
        check_stream(chunks, lambda c: c.message.content or "", answer.text)

    asyncio.run(in_a_loop())


def test_report_and_raw_are_plain_json(llm: LazyKVLLM) -> None:
    answer = llm.complete(PROMPT)
    report = json.loads(json.dumps(answer.additional_kwargs["lazyrag"]))
    assert report["quality"] == "balanced"
    assert report["nodes"] == []
    assert report["tokens_computed"] > 0
    assert report["ttft_s"] > 0
    assert answer.raw is not None
    assert answer.raw["finish_reason"] == "length"
    assert token_count(answer) == 8


def test_formatted_prompt_gets_no_template(llm: LazyKVLLM, engine: Engine) -> None:
    assert (
        llm.complete(PROMPT, formatted=True).text == engine.generate(PROMPT, max_new_tokens=8).text
    )
    assert llm.complete(PROMPT, formatted=True).text != llm.complete(PROMPT).text


def test_two_human_turns_in_a_row(llm: LazyKVLLM) -> None:
    assert llm.chat(
        [*MESSAGES, ChatMessage(role="user", content="Begin with Monday.")]
    ).message.content


def test_arguments_of_a_call_win(llm: LazyKVLLM) -> None:
    assert token_count(llm.complete(PROMPT, max_tokens=3)) == 3
    assert token_count(llm.complete(PROMPT, max_new_tokens=2, extra_headers={"a": "b"})) == 2
    full = llm.complete(PROMPT, quality="full", max_tokens=2)
    assert full.additional_kwargs["lazyrag"]["quality"] == "full"


def test_seeded_sampling_repeats(llm: LazyKVLLM) -> None:
    sampled = [llm.complete(PROMPT, temperature=1.5, seed=seed).text for seed in (3, 3, 4)]
    assert sampled[0] == sampled[1] != sampled[2]


def test_stop_strings_end_every_form_and_never_show(engine: Engine) -> None:
    whole = LazyKVLLM(engine=engine, max_tokens=12).complete(PROMPT).text
    stop = whole[4:9]
    llm = LazyKVLLM(engine=engine, max_tokens=12, stop=stop)
    assert llm.stop == [stop]
    expected = whole[: whole.index(stop)]
    stopped = llm.complete(PROMPT)
    assert stopped.text == expected
    assert stopped.raw is not None
    assert stopped.raw["finish_reason"] == "stop"
    assert "".join(chunk.delta or "" for chunk in llm.stream_complete(PROMPT)) == expected
    assert llm.complete(PROMPT, stop=[]).text == whole


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"functions": []}, "knows no argument 'functions'"),
        ({"max_tokens": 1, "max_new_tokens": 2}, "given twice"),
        ({"quality": "good"}, "'fast', 'balanced', 'best' or 'full'"),
        ({"temperature": -1.0}, "temperature"),
        ({"max_tokens": 100_000}, "context window"),
    ],
)
def test_wrong_arguments_are_refused(llm: LazyKVLLM, arguments: Any, words: str) -> None:
    with pytest.raises(RequestError, match=words):
        llm.complete(PROMPT, **arguments)
    with pytest.raises(RequestError, match=words):
        llm.stream_chat(MESSAGES, **arguments)
    with pytest.raises(RequestError, match=words):
        asyncio.run(llm.achat(MESSAGES, **arguments))


def test_full_window_shortens_the_answer_of_the_llms_own_limit(engine: Engine) -> None:
    """LlamaIndex fills the window up to ``num_output`` without counting the chat template."""
    llm = LazyKVLLM(engine=engine, max_tokens=engine.context_window - 10)
    assert llm.complete("Say: yes", stop=["y", "Y", "."]).text is not None
    with pytest.raises(RequestError, match="context window"):
        llm.complete(PROMPT, max_tokens=engine.context_window - 10)


def test_blocks_that_are_not_text_are_refused_by_name(llm: LazyKVLLM) -> None:
    text = ChatMessage(
        role="user",
        blocks=[
            TextBlock(text="a"),
            CachePoint(cache_control=CacheControl(type="x")),
            TextBlock(text="b"),
        ],
    )
    assert engine_messages([text]) == [{"role": "user", "content": "a\nb"}]
    assert engine_messages([ChatMessage(role="chatbot", content="x")])[0]["role"] == "assistant"
    for block in (ImageBlock(image=b"x" * 20), AudioBlock(audio=b"x" * 20)):
        with pytest.raises(RequestError, match=type(block).__name__):
            llm.chat([ChatMessage(role="user", blocks=[TextBlock(text="a"), block])])


def test_metadata_is_the_engines(llm: LazyKVLLM, engine: Engine) -> None:
    assert llm.metadata.context_window == engine.context_window == 8192
    assert llm.metadata.num_output == 8
    assert llm.metadata.is_chat_model
    assert not llm.metadata.is_function_calling_model
    assert llm.metadata.model_name == "smollm2"
    assert LazyKVLLM(engine=engine, context_window=2048).metadata.context_window == 2048
    with pytest.raises(RequestError, match="8192"):
        LazyKVLLM(engine=engine, context_window=10_000)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({}, "needs a model"),
        ({"model": "smollm2", "quality": "good"}, "'fast', 'balanced', 'best' or 'full'"),
        ({"model": "smollm2", "tools": 1}, "tools"),
    ],
)
def test_wrong_settings_are_refused_before_a_model_is_loaded(arguments: Any, words: str) -> None:
    with pytest.raises(RequestError, match=words):
        LazyKVLLM(**arguments)


def test_engine_and_model_together_are_refused(engine: Engine) -> None:
    with pytest.raises(RequestError, match="not both"):
        LazyKVLLM(model="smollm2", engine=engine)
    with pytest.raises(RequestError, match="chat template of its own"):
        LazyKVLLM(engine=engine, messages_to_prompt=lambda messages: "x")


def test_copies_and_serialised_forms_do_not_carry_the_engine(llm: LazyKVLLM) -> None:
    assert copy.deepcopy(llm).engine is llm.engine
    assert llm.model_copy(deep=True, update={"max_tokens": 3}).engine is llm.engine
    data = json.loads(json.dumps(llm.to_dict()))
    assert data["class_name"] == "LazyKVLLM"
    assert data["model"] == "smollm2"
    assert data["store"] == str(llm.engine.store.path)
    assert "engine" not in data
    assert len(pickle.dumps(llm)) < 10_000


def test_same_model_and_store_share_one_engine(llm: LazyKVLLM) -> None:
    first = LazyKVLLM.from_dict(llm.to_dict())
    second = pickle.loads(pickle.dumps(first))
    assert first.engine is second.engine
    assert first.engine.encoding == llm.engine.encoding
    assert second.max_tokens == 8
    assert LazyKVLLM(
        model=first.model, store=first.store, dtype="float32", kv_dtype="float32"
    ).engine is (first.engine)


def test_callbacks_see_start_and_end(engine: Engine) -> None:
    seen = LlamaDebugHandler(print_trace_on_end=False)
    llm = LazyKVLLM(engine=engine, max_tokens=2, callback_manager=CallbackManager([seen]))
    llm.chat(MESSAGES)
    list(llm.stream_complete(PROMPT))
    pairs = seen.get_event_pairs(CBEventType.LLM)
    assert [len(pair) for pair in pairs] == [2, 2]


def test_reports_are_collected_where_the_call_began(llm: LazyKVLLM) -> None:
    with collect_reports() as outer:
        llm.complete(PROMPT, max_tokens=1)
        with collect_reports() as inner:
            stream = llm.stream_chat(MESSAGES, max_tokens=1)
        assert not inner
        list(stream)
    llm.complete(PROMPT, max_tokens=1)
    assert (len(outer), len(inner)) == (2, 1)


def test_event_loop_stays_free(llm: LazyKVLLM) -> None:
    async def ticks_during(work: Any) -> int:
        ticks, task = 0, asyncio.ensure_future(work)
        while not task.done():
            await asyncio.sleep(0.01)
            ticks += 1
        await task
        return ticks

    async def both() -> None:
        long = PROMPT + " word" * 300
        assert await ticks_during(llm.acomplete(long, quality="full")) >= 5
        assert await ticks_during(llm.achat([ChatMessage(role="user", content=long)])) >= 5

    asyncio.run(both())


def test_leaving_an_async_stream_stops_the_work(llm: LazyKVLLM, monkeypatch: Any) -> None:
    closed: set[int] = set()
    start = llm.engine.stream_chat

    def watched(*args: Any, **kwargs: Any) -> Any:
        stream = start(*args, **kwargs)
        close = stream.close

        def close_and_tell() -> None:
            close()
            closed.add(id(stream))

        monkeypatch.setattr(stream, "close", close_and_tell)
        return stream

    monkeypatch.setattr(llm.engine, "stream_chat", watched)

    async def leave() -> None:
        task = asyncio.ensure_future(llm.achat(MESSAGES, max_tokens=2000))
        await asyncio.sleep(0.5)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        stream = await llm.astream_chat(MESSAGES, max_tokens=2000)
        async for _ in stream:
            break
        await stream.aclose()
        await asyncio.sleep(1.0)

    asyncio.run(leave())
    assert len(closed) == 2
    assert llm.complete(PROMPT, max_tokens=1).text is not None
