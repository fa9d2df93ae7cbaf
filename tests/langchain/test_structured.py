"""with_structured_output: whatever the model says, it is JSON of the schema, or an error."""

from __future__ import annotations

import asyncio
import json
from typing import Any, Literal, TypedDict

import pytest
from langchain_core.documents import Document
from langchain_core.exceptions import OutputParserException
from langchain_core.messages import AIMessage, HumanMessage
from langchain_core.prompts import ChatPromptTemplate
from langchain_lazyrag import ChatLazyKV, collect_reports, format_docs, precompute_documents
from pydantic import BaseModel, Field

from lazyrag import RequestError

QUESTION = "When was the lighthouse built, and which colours has it?"


class Lighthouse(BaseModel):
    """A lighthouse."""

    name: str = Field(max_length=12)
    century: Literal[17, 18, 19]
    colours: list[Literal["red", "white", "blue"]] = Field(max_length=2)
    open: bool


class Dict(TypedDict):
    """A lighthouse."""

    century: Literal[17, 18, 19]
    open: bool


@pytest.fixture
def chat(chat: ChatLazyKV) -> ChatLazyKV:
    return chat.model_copy(update={"max_tokens": 80})


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
@pytest.mark.parametrize("temperature", [0.0, 3.0])
def test_pydantic_schema(chat: ChatLazyKV, method: Any, temperature: float) -> None:
    hot = chat.model_copy(update={"temperature": temperature, "seed": 1})
    answer = hot.with_structured_output(Lighthouse, method=method, strict=True).invoke(QUESTION)
    assert isinstance(answer, Lighthouse)


def test_dict_schemas(chat: ChatLazyKV) -> None:
    for schema in (Dict, Lighthouse.model_json_schema()):
        answer = chat.with_structured_output(schema).invoke(QUESTION)
        assert answer["century"] in {17, 18, 19}
        assert isinstance(answer["open"], bool)


def test_streams_and_asynchronous_calls(chat: ChatLazyKV) -> None:
    runnable = chat.with_structured_output(Lighthouse)
    whole = runnable.invoke(QUESTION)
    assert list(runnable.stream(QUESTION))[-1] == whole
    assert asyncio.run(runnable.ainvoke(QUESTION)) == whole
    plain = chat.with_structured_output(Lighthouse.model_json_schema())
    parts = list(plain.stream(QUESTION))
    assert len(parts) > 2 and parts[-1] == plain.invoke(QUESTION)


def test_no_keys_but_those_of_the_schema(chat: ChatLazyKV) -> None:
    class Shelf(TypedDict):
        """A shelf with two lighthouses."""

        left: Dict
        right: Dict

    hot = chat.model_copy(update={"temperature": 5.0, "seed": 2})
    answer = hot.with_structured_output(Shelf).invoke(QUESTION)
    assert set(answer) == {"left", "right"}
    assert set(answer["left"]) == set(answer["right"]) == {"century", "open"}


def test_raw_answer_beside_the_parsed_one(chat: ChatLazyKV) -> None:
    result = chat.with_structured_output(Lighthouse, include_raw=True).invoke(QUESTION)
    assert isinstance(result["raw"], AIMessage)
    assert result["parsed"] == Lighthouse.model_validate_json(result["raw"].text)
    assert result["parsing_error"] is None
    assert "lazyrag" in result["raw"].response_metadata


@pytest.mark.parametrize("schema", [Lighthouse, Lighthouse.model_json_schema()])
def test_answer_cut_by_max_tokens_is_an_error(chat: ChatLazyKV, schema: Any) -> None:
    """LangChain's parsers alone would close the brackets and go on."""
    short = chat.model_copy(update={"max_tokens": 6})
    with pytest.raises(OutputParserException, match="max_tokens"):
        short.with_structured_output(schema).invoke(QUESTION)
    with pytest.raises(OutputParserException, match="max_tokens"):
        list(short.with_structured_output(schema).stream(QUESTION))
    result = short.with_structured_output(schema, include_raw=True).invoke(QUESTION)
    assert result["parsed"] is None
    assert isinstance(result["parsing_error"], OutputParserException)
    assert result["raw"].text


@pytest.mark.parametrize("stop", [",", "a"])
def test_answer_cut_by_a_stop_string_is_an_error(chat: ChatLazyKV, stop: str) -> None:
    for schema in (Lighthouse, Lighthouse.model_json_schema()):
        runnable = chat.with_structured_output(schema)
        with pytest.raises(OutputParserException, match="stop string"):
            runnable.invoke(QUESTION, stop=[stop])
        with pytest.raises(OutputParserException, match="stop string"):
            list(runnable.stream(QUESTION, stop=[stop]))


def test_arguments_of_a_call_reach_the_model(chat: ChatLazyKV) -> None:
    runnable = chat.with_structured_output(Lighthouse)
    with collect_reports() as reports:
        hot = [runnable.invoke(QUESTION, temperature=3.0, seed=seed) for seed in (1, 1, 2, 3, 4)]
        runnable.bind(quality="full").invoke(QUESTION)
    assert hot[0] == hot[1] and any(one != hot[0] for one in hot)
    assert reports[-1].quality == "full"
    with pytest.raises(RequestError, match="no_such"):
        runnable.invoke(QUESTION, no_such=1)
    with pytest.raises(RequestError, match="empty"):
        runnable.invoke([])


class Branch(BaseModel):
    """A branch that has branches."""

    leaf: bool
    branches: list[Branch] = Field(max_length=1)


def test_recursive_schema_holds(chat: ChatLazyKV) -> None:
    hot = chat.model_copy(update={"temperature": 2.0})
    for seed in range(3):
        result = hot.with_structured_output(Branch, include_raw=True).invoke(QUESTION, seed=seed)
        if result["raw"].response_metadata["finish_reason"] == "stop":
            assert isinstance(result["parsed"], Branch)


def test_plain_schema_needs_no_title(chat: ChatLazyKV) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}
    assert set(chat.with_structured_output(schema).invoke(QUESTION)) == {"a"}


def test_json_mode_is_any_object(chat: ChatLazyKV) -> None:
    words = "Return a JSON object with the key 'year' and no other, like {\"year\": 1874}."
    prompt = f"The lighthouse was built in 1874. {words}"
    raw = chat.with_structured_output(None, method="json_mode", include_raw=True)
    result = raw.invoke(prompt)
    assert result["raw"].text.startswith("{")
    assert result["raw"].usage_metadata["input_tokens"] == (
        chat.get_num_tokens_from_messages([HumanMessage(prompt)])
    )
    if result["raw"].response_metadata["finish_reason"] == "stop":
        assert result["parsed"] == json.loads(result["raw"].text)


def test_documents_are_reused_beside_a_schema(chat: ChatLazyKV, documents: list[Document]) -> None:
    precompute_documents(documents, chat)
    prompt = ChatPromptTemplate.from_messages([("system", "{context}"), ("human", "{question}")])
    chain = prompt | chat.with_structured_output(Dict)
    with collect_reports() as reports:
        answer = chain.invoke({"context": format_docs(documents), "question": QUESTION})
    assert set(answer) == {"century", "open"}
    assert (reports[0].nodes_reused, reports[0].nodes_recomputed) == (3, 0)


def test_last_message_made_of_blocks(chat: ChatLazyKV) -> None:
    message = HumanMessage([{"type": "text", "text": QUESTION}])
    assert set(chat.with_structured_output(Dict).invoke([message])) == {"century", "open"}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"schema": None}, "needs a schema"),
        ({"schema": Dict, "method": "xml"}, "method is 'xml'"),
        ({"schema": Dict, "tools": []}, "no tools"),
    ],
)
def test_refusals(chat: ChatLazyKV, arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(RequestError, match=words):
        chat.with_structured_output(**arguments)


def test_schema_that_cannot_be_held_is_refused_at_the_call(chat: ChatLazyKV) -> None:
    schema = {"title": "x", "type": "object", "properties": {"a": {"type": "array",
              "uniqueItems": True}}}  # fmt: skip
    with pytest.raises(RequestError, match="uniqueItems"):
        chat.with_structured_output(schema).invoke(QUESTION)
