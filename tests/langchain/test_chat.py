"""ChatLazyKV alone: every form of a call, its options, messages, copies and refusals."""

from __future__ import annotations

import asyncio
import copy
import json
import pickle
import time
from collections.abc import Callable
from typing import Any

import pytest
from langchain_core.caches import InMemoryCache
from langchain_core.callbacks import BaseCallbackHandler, get_usage_metadata_callback
from langchain_core.documents import Document
from langchain_core.messages import (
    AIMessage,
    AIMessageChunk,
    BaseMessage,
    ChatMessage,
    HumanMessage,
    SystemMessage,
    ToolMessage,
)
from langchain_core.output_parsers import StrOutputParser
from langchain_core.runnables import ConfigurableField
from langchain_core.tools import tool
from langchain_lazyrag import ChatLazyKV, collect_reports, precompute_documents
from langchain_lazyrag.messages import engine_messages
from llama_index.llms.lazyrag import LazyKVLLM as LlamaIndexLLM

from lazyrag import Engine, LazyRagError, RequestError

PROMPT = "Say the days of the week."


def merged(chunks: list[AIMessageChunk]) -> AIMessageChunk:
    """All chunks of a stream as one."""
    whole = chunks[0]
    for chunk in chunks[1:]:
        whole = whole + chunk
    return whole


def test_all_forms_of_a_call_give_one_answer(chat: ChatLazyKV) -> None:
    answer = chat.invoke(PROMPT)
    assert isinstance(answer, AIMessage) and answer.text

    async def asynchronous() -> list[str]:
        streamed = [chunk async for chunk in chat.astream(PROMPT)]
        events = [event async for event in chat.astream_events(PROMPT, version="v2")]
        parts = [e["data"]["chunk"].text for e in events if e["event"] == "on_chat_model_stream"]
        (batched,) = await chat.abatch([PROMPT])
        return [
            (await chat.ainvoke(PROMPT)).text,
            merged(streamed).text,
            "".join(parts),
            batched.text,
        ]

    chunks = list(chat.stream(PROMPT))
    assert len(chunks) > 2
    texts = [merged(chunks).text, chat.batch([PROMPT])[0].text, *asyncio.run(asynchronous())]
    assert texts == [answer.text] * 6


@pytest.mark.parametrize("streaming", [False, True])
def test_answer_has_only_new_text_its_usage_and_its_report(
    chat: ChatLazyKV, documents: list[Document], streaming: bool
) -> None:
    keys = precompute_documents(documents, chat)
    texts = [document.page_content for document in documents]
    prompt = "\n\n".join([*texts[::-1], "Who keeps the lighthouse?"])
    answer = merged(list(chat.stream(prompt))) if streaming else chat.invoke(prompt)
    assert not answer.text.startswith(prompt[:20])
    report = answer.response_metadata["lazyrag"]
    assert json.loads(json.dumps(report)) == report
    assert [node["key"] for node in report["nodes"]] == [str(key) for key in keys[::-1]]
    assert (report["nodes_reused"], report["nodes_recomputed"]) == (3, 0)
    usage = answer.usage_metadata
    assert usage is not None
    reused = sum(chat.engine.count_tokens(text) for text in texts)
    live = report["live_tokens_reused"]  # the template's opening may have been there before
    assert usage["input_token_details"] == {"cache_read": reused + live}
    assert usage["input_tokens"] == len(
        chat.engine.token_ids([{"role": "user", "content": prompt}])
    )
    assert usage["input_tokens"] == reused + live + report["tokens_computed"]
    assert 0 < usage["output_tokens"] <= 8
    assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]
    assert answer.response_metadata["model_name"] == "smollm2"
    assert answer.response_metadata["finish_reason"] in {"stop", "length"}


def test_only_the_last_chunk_speaks_of_the_whole(chat: ChatLazyKV) -> None:
    *parts, last = list(chat.stream(PROMPT))
    assert all(part.content and not part.usage_metadata for part in parts)
    assert all("lazyrag" not in part.response_metadata for part in parts)
    assert last.content == "" and last.chunk_position == "last"
    assert last.response_metadata["lazyrag"]["version"] == 1


def test_usage_is_counted_by_langchains_own_callback(chat: ChatLazyKV) -> None:
    with get_usage_metadata_callback() as counted:
        answer = chat.invoke(PROMPT)
        list(chat.stream(PROMPT))
    assert answer.usage_metadata is not None
    assert counted.usage_metadata["smollm2"]["input_tokens"] == (
        2 * answer.usage_metadata["input_tokens"]
    )


@pytest.mark.parametrize("streaming", [False, True])
def test_callbacks_see_every_token_once(engine: Engine, streaming: bool) -> None:
    seen: list[str] = []

    class Watch(BaseCallbackHandler):
        def on_llm_new_token(self, token: Any, **_: Any) -> None:
            seen.append(token)

    chat = ChatLazyKV(engine=engine, max_tokens=6, streaming=streaming)
    answer = chat.invoke(PROMPT, {"callbacks": [Watch()]})
    assert "".join(seen) == (answer.text if streaming else "")


def test_stop_and_sampling_per_call(chat: ChatLazyKV) -> None:
    whole = chat.invoke(PROMPT, max_tokens=30).text
    word = whole.split()[3]
    for stopped in (
        chat.invoke(PROMPT, max_tokens=30, stop=[word]).text,
        merged(list(chat.bind(stop=[word]).stream(PROMPT, max_tokens=30))).text,
        ChatLazyKV(engine=chat.engine, max_tokens=30, stop=word).invoke(PROMPT).text,
    ):
        assert stopped == whole[: whole.index(word)]
    answer = chat.invoke(PROMPT, max_tokens=3)
    assert answer.usage_metadata is not None and answer.usage_metadata["output_tokens"] == 3
    assert answer.response_metadata["finish_reason"] == "length"
    sampled = [chat.invoke(PROMPT, temperature=1.5, seed=seed).text for seed in (3, 3, 4)]
    assert sampled[0] == sampled[1] != sampled[2]
    full = chat.invoke(PROMPT, quality="full", max_tokens=2)
    assert full.response_metadata["lazyrag"]["quality"] == "full"


def test_stop_of_a_call_replaces_that_of_the_model(engine: Engine) -> None:
    chat = ChatLazyKV(engine=engine, max_tokens=30, stop=["e"])
    assert "e" not in chat.invoke(PROMPT).text
    assert "e" in chat.invoke(PROMPT, stop=["§"]).text


def test_timeout_stops_the_work(chat: ChatLazyKV, nothing_held: Callable[[], None]) -> None:
    begun = time.monotonic()
    with pytest.raises(RequestError, match=r"timeout of 0\.3 s"):
        chat.invoke(PROMPT, max_tokens=2000, temperature=3.0, seed=1, timeout=0.3)
    assert time.monotonic() - begun < 20
    nothing_held()


@pytest.mark.parametrize("name", ["tools", "frequency_penalty", "model", "do_sample"])
def test_unknown_argument_of_a_call_is_refused_by_name(chat: ChatLazyKV, name: str) -> None:
    for call in (chat.invoke, lambda *a, **k: list(chat.stream(*a, **k))):
        with pytest.raises(RequestError, match=f"ChatLazyKV knows no argument '{name}'"):
            call(PROMPT, **{name: 1})


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({}, "needs a model"),
        ({"model": "smollm2", "quality": "good"}, "'fast', 'balanced', 'best' or 'full'"),
        ({"model": "smollm2", "n_ctx": 1}, "no setting n_ctx; it has .*temperature"),
        ({"model": "smollm2", "top_p": 7}, "top_p must be"),
        ({"model": "smollm2", "stop": [""]}, "stop must be"),
        ({"model": "smollm2", "timeout": -1}, "timeout_s must be"),
    ],
)
def test_wrong_settings_are_refused_before_a_model_is_loaded(arguments: Any, words: str) -> None:
    with pytest.raises(RequestError, match=words):
        ChatLazyKV(**arguments)


def test_standard_settings_of_remote_models_are_taken(engine: Engine) -> None:
    chat = ChatLazyKV(engine=engine, api_key="none", base_url="http://x", max_retries=3)
    assert chat.engine is engine
    with pytest.raises(RequestError, match="not both"):
        ChatLazyKV("smollm2", engine=engine)
    with pytest.raises(RequestError, match="kv_dtype, sink, which the engine has"):
        ChatLazyKV(engine=engine, kv_dtype="float16", sink="none")


def test_tools_are_refused(chat: ChatLazyKV) -> None:
    @tool
    def add(a: int, b: int) -> int:
        """Add."""
        return a + b

    with pytest.raises(NotImplementedError):
        chat.bind_tools([add])


def test_messages_become_roles_and_texts() -> None:
    messages: list[BaseMessage] = [
        SystemMessage("a"),
        HumanMessage([{"type": "text", "text": "b"}, "c"]),
        AIMessage([{"type": "reasoning", "reasoning": "hm"}, {"type": "text", "text": "d"}]),
        ChatMessage(role="critic", content="e"),
    ]
    assert engine_messages(messages) == [
        {"role": "system", "content": "a"},
        {"role": "user", "content": "b\nc"},
        {"role": "assistant", "content": "d"},
        {"role": "critic", "content": "e"},
    ]


@pytest.mark.parametrize(
    ("message", "words"),
    [
        (ToolMessage("4", tool_call_id="1"), "ToolMessage"),
        (
            AIMessage("", tool_calls=[{"name": "f", "args": {}, "id": "1"}]),
            "calls of tools",
        ),
        (
            HumanMessage([{"type": "image_url", "image_url": {"url": "data:image/png;base64,"}}]),
            "'image",
        ),
    ],
)
def test_what_is_not_text_is_refused(chat: ChatLazyKV, message: BaseMessage, words: str) -> None:
    with pytest.raises(RequestError, match=words):
        chat.invoke([HumanMessage("a"), message])


def test_two_human_turns_in_a_row_and_an_empty_system_text(chat: ChatLazyKV) -> None:
    assert chat.invoke([HumanMessage(PROMPT), HumanMessage("Begin with Monday.")]).text
    assert chat.invoke([SystemMessage(""), HumanMessage(PROMPT)]).text


def test_batch_of_eight_is_eight_calls(
    chat: ChatLazyKV, documents: list[Document], nothing_held: Callable[[], None]
) -> None:
    precompute_documents(documents, chat)
    texts = [document.page_content for document in documents]
    prompts = [
        f"{texts[n % 3]}\n\n{texts[(n + 1) % 3]}\n\nWhat is fact number {n}?" for n in range(8)
    ]
    single = [chat.invoke(prompt) for prompt in prompts]
    with collect_reports() as reports:
        together = chat.batch(prompts)
    assert [answer.text for answer in together] == [answer.text for answer in single]
    assert len(reports) == 8
    assert {report.nodes_reused for report in reports} == {2}

    async def at_once() -> list[AIMessage]:
        return await chat.abatch(prompts)

    assert [answer.text for answer in asyncio.run(at_once())] == [one.text for one in single]
    nothing_held()


def test_leaving_a_stream_frees_what_it_held(
    chat: ChatLazyKV, documents: list[Document], nothing_held: Callable[[], None]
) -> None:
    precompute_documents(documents, chat)
    prompt = f"{documents[0].page_content}\n\n{PROMPT}"

    async def leave() -> None:
        async for _ in (chat | StrOutputParser()).astream(prompt, max_tokens=3000):
            break
        task = asyncio.ensure_future(chat.ainvoke(prompt, max_tokens=3000))
        await asyncio.sleep(0.5)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

        async def read() -> None:
            async for _ in chat.astream(prompt, max_tokens=3000):
                pass

        task = asyncio.ensure_future(read())
        await asyncio.sleep(0.5)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    begun = time.monotonic()
    asyncio.run(leave())
    for _ in chat.stream(prompt, max_tokens=3000):
        break
    nothing_held()
    assert time.monotonic() - begun < 60
    assert chat.invoke(PROMPT, max_tokens=1).text is not None


def test_cancelling_before_the_first_text_ends_the_request(
    chat: ChatLazyKV, monkeypatch: pytest.MonkeyPatch, nothing_held: Callable[[], None]
) -> None:
    """The prompt is read in parts; the next part is not begun."""
    monkeypatch.setattr("lazyrag.engine.scheduler.STEP_TOKENS", 16)
    launch, calls = chat.engine._runner.launch, [0]

    def counted(*args: Any, **kwargs: Any) -> Any:
        calls[0] += 1
        return launch(*args, **kwargs)

    monkeypatch.setattr(chat.engine._runner, "launch", counted)

    async def leave() -> None:
        task = asyncio.ensure_future(chat.ainvoke(PROMPT + " word" * 800))
        while not calls[0]:
            await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(leave())
    nothing_held()
    assert calls[0] < 25


@pytest.mark.parametrize("form", ["invoke", "stream", "batch", "ainvoke", "astream", "abatch"])
def test_exception_in_the_model_reaches_the_consumer(
    chat: ChatLazyKV, monkeypatch: pytest.MonkeyPatch, form: str, nothing_held: Callable[[], None]
) -> None:
    """Also one that comes in the middle of an answer, after the first text."""
    launch, calls = chat.engine._runner.launch, [0]

    def fails(*args: Any, **kwargs: Any) -> Any:
        calls[0] += 1
        if calls[0] == 3:
            raise LazyRagError("the third pass fails")
        return launch(*args, **kwargs)

    async def astream() -> None:
        async for _ in chat.astream(PROMPT):
            pass

    calls_of: dict[str, Callable[[], Any]] = {
        "invoke": lambda: chat.invoke(PROMPT),
        "stream": lambda: list(chat.stream(PROMPT)),
        "batch": lambda: chat.batch([PROMPT]),
        "ainvoke": lambda: asyncio.run(chat.ainvoke(PROMPT)),
        "astream": lambda: asyncio.run(astream()),
        "abatch": lambda: asyncio.run(chat.abatch([PROMPT])),
    }
    with monkeypatch.context() as patch:
        patch.setattr(chat.engine._runner, "launch", fails)
        with pytest.raises(LazyRagError, match="third pass"):
            calls_of[form]()
    nothing_held()
    assert chat.invoke(PROMPT).text


def test_event_loop_stays_free(chat: ChatLazyKV) -> None:
    async def ticks() -> int:
        count, task = 0, asyncio.ensure_future(chat.ainvoke(PROMPT + " word" * 300))
        while not task.done():
            await asyncio.sleep(0.01)
            count += 1
        await task
        return count

    assert asyncio.run(ticks()) >= 5


def test_llama_index_and_langchain_share_one_engine(chat: ChatLazyKV) -> None:
    again = ChatLazyKV("smollm2", chat.store, kv_dtype="float32")
    other = LlamaIndexLLM(model="smollm2", store=chat.store, kv_dtype="float32")
    assert again.engine is other.engine is chat.engine


def test_copies_find_the_same_engine(chat: ChatLazyKV) -> None:
    assert copy.deepcopy(chat).engine is chat.engine
    assert chat.model_copy(update={"max_tokens": 3}).engine is chat.engine
    again = pickle.loads(pickle.dumps(chat))
    assert again.engine is chat.engine and again.max_tokens == 8
    assert len(pickle.dumps(chat)) < 10_000


def test_copies_of_a_tenants_model_stay_with_the_tenant(checkpoint: Any, tmp_path: Any) -> None:
    folder, store = checkpoint("llama"), tmp_path / "kv"
    secret = "The combination of the safe behind the lighthouse is nine, four, seven."
    with (
        Engine.from_pretrained(folder, store=store, tenant="a") as one,
        Engine.from_pretrained(folder, store=store, tenant="b") as two,
    ):
        chats = [ChatLazyKV(engine=engine, max_tokens=1) for engine in (one, two)]
        one.precompute([secret])
        for chat, engine in zip(chats, (one, two), strict=True):
            copies = [
                pickle.loads(pickle.dumps(chat)),
                copy.deepcopy(chat),
                ChatLazyKV(folder, store, tenant=engine.encoding.tenant),
                LlamaIndexLLM(engine=engine),
            ]
            assert all(other.engine is engine for other in copies)
        field = ConfigurableField(id="n")
        mine, theirs = (
            chat.configurable_fields(max_tokens=field).with_config(configurable={"n": 2})
            for chat in chats
        )
        for chain, reused in ((mine, 1), (theirs, 0)):
            answer = chain.invoke(f"{secret}\n\nWhat is it?")
            assert isinstance(answer, AIMessage)
            assert answer.response_metadata["lazyrag"]["nodes_reused"] == reused
        nobody = ChatLazyKV(folder, store)
        assert nobody.engine is not one and nobody.engine is not two
        nobody.engine.close()


def test_max_tokens_of_the_model_gives_way_to_the_window(checkpoint: Any, tmp_path: Any) -> None:
    with Engine.from_pretrained(checkpoint("llama"), store=tmp_path / "kv") as engine:
        chat = ChatLazyKV(engine=engine, max_tokens=400)
        room = engine.context_window - chat.get_num_tokens_from_messages([HumanMessage("x")]) + 1
        answer = chat.invoke("x" * (room - 300), seed=1, temperature=1.0)
        assert answer.usage_metadata is not None
        assert answer.usage_metadata["output_tokens"] == 300 or (
            answer.response_metadata["finish_reason"] == "stop"
        )
        with pytest.raises(RequestError, match="400 new tokens"):
            chat.invoke("x" * (room - 300), max_tokens=400)


def test_report_is_plain_json(chat: ChatLazyKV, documents: list[Document]) -> None:
    precompute_documents(documents, chat)
    prompt = f"{documents[0].page_content}\n\n{PROMPT}"
    report = chat.invoke(prompt, max_tokens=1).response_metadata["lazyrag"]

    def check(value: Any) -> None:
        assert type(value) in {dict, list, str, int, float, bool, type(None)}, repr(value)
        for part in value.values() if isinstance(value, dict) else ():
            check(part)
        for part in value if isinstance(value, list | dict) else ():
            check(part)

    check(report)


def test_configurable_fields_keep_the_engine(chat: ChatLazyKV) -> None:
    runnable = chat.configurable_fields(max_tokens=ConfigurableField(id="length"))
    answer = runnable.with_config(configurable={"length": 2}).invoke(PROMPT)
    assert isinstance(answer, AIMessage)
    assert answer.usage_metadata is not None and answer.usage_metadata["output_tokens"] == 2
    alternative = chat.configurable_alternatives(
        ConfigurableField(id="which"), full=ChatLazyKV(engine=chat.engine, quality="full")
    )
    answer = alternative.with_config(configurable={"which": "full"}).invoke(PROMPT, max_tokens=1)
    assert answer.response_metadata["lazyrag"]["quality"] == "full"


def test_cache_of_answers_tells_settings_apart(engine: Engine) -> None:
    cache = InMemoryCache()
    short = ChatLazyKV(engine=engine, max_tokens=2, cache=cache)
    longer = ChatLazyKV(engine=engine, max_tokens=6, cache=cache)
    with collect_reports() as reports:
        first, again, other = short.invoke(PROMPT), short.invoke(PROMPT), longer.invoke(PROMPT)
    assert first.text == again.text != other.text
    assert len(reports) == 2


def test_tokens_are_counted_with_the_models_own_tokenizer(chat: ChatLazyKV) -> None:
    assert chat.get_num_tokens("Hello there") == chat.engine.count_tokens("Hello there")
    messages = [HumanMessage(PROMPT)]
    answer = chat.invoke(messages, max_tokens=1)
    assert answer.usage_metadata is not None
    assert chat.get_num_tokens_from_messages(messages) == answer.usage_metadata["input_tokens"]


def test_tracing_names_provider_and_stop(chat: ChatLazyKV) -> None:
    parameters = ChatLazyKV(engine=chat.engine, stop="x", temperature=0.5)._get_ls_params()
    assert parameters["ls_provider"] == "lazyrag"
    assert parameters["ls_model_name"] == "smollm2"
    assert parameters["ls_temperature"] == 0.5
    assert parameters["ls_stop"] == ["x"]
