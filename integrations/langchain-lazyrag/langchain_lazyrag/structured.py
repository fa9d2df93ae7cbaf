"""Answers that are JSON: decoding constrained to a schema, and parsers that miss no cut answer."""

from __future__ import annotations

import json
from operator import itemgetter
from typing import TYPE_CHECKING, Any, Literal

from langchain_core.exceptions import OutputParserException
from langchain_core.language_models import LanguageModelInput
from langchain_core.messages import BaseMessage
from langchain_core.output_parsers import JsonOutputParser, PydanticOutputParser
from langchain_core.outputs import ChatGeneration, Generation
from langchain_core.runnables import Runnable, RunnableMap, RunnablePassthrough
from langchain_core.utils.function_calling import convert_to_json_schema
from langchain_core.utils.pydantic import is_basemodel_subclass
from pydantic import BaseModel

from lazyrag.errors import RequestError

if TYPE_CHECKING:
    from langchain_lazyrag.chat import ChatLazyKV

Method = Literal["json_schema", "function_calling", "json_mode"]
Schema = dict[str, Any] | type

ANY_OBJECT: dict[str, Any] = {"type": "object"}


def structured_output(
    chat: ChatLazyKV, schema: Schema | None, *, method: Method, include_raw: bool
) -> Runnable[LanguageModelInput, Any]:
    """See `ChatLazyKV.with_structured_output`."""
    if method not in ("json_schema", "function_calling", "json_mode"):
        raise RequestError(f"method is {method!r}; use 'json_schema' or 'json_mode'.")
    if schema is None and method != "json_mode":
        raise RequestError("with_structured_output needs a schema, or method='json_mode'.")
    free = schema is None or method == "json_mode"
    shape = ANY_OBJECT if schema is None or free else _closed(_json_schema(schema))
    model: Runnable[LanguageModelInput, Any] = chat.bind(
        json_schema=json.dumps(shape),
        tell_schema=not free,
        ls_structured_output_format={
            "kwargs": {"method": method},
            "schema": ANY_OBJECT if schema is None else _named(schema),
        },
    )
    parser: Runnable[Any, Any] = (
        _WholePydantic(pydantic_object=schema)
        if isinstance(schema, type) and is_basemodel_subclass(schema)
        else _WholeJson()
    )
    if not include_raw:
        return model | parser
    parsed = RunnablePassthrough.assign(
        parsed=itemgetter("raw") | parser, parsing_error=lambda _: None
    )
    failed = RunnablePassthrough.assign(parsed=lambda _: None)
    return RunnableMap(raw=model) | parsed.with_fallbacks([failed], exception_key="parsing_error")


def _closed(shape: Any) -> Any:
    """The schema without keys it does not name, where it does not speak of them itself."""
    if isinstance(shape, list):
        return [_closed(part) for part in shape]
    if not isinstance(shape, dict):
        return shape
    closed = {name: _closed(part) for name, part in shape.items()}
    if isinstance(closed.get("properties"), dict) and closed.get("type") == "object":
        closed.setdefault("additionalProperties", False)
    return closed


def with_schema(messages: list[BaseMessage], schema: str) -> list[BaseMessage]:
    """The messages with the schema at the end of the last one."""
    if not messages:
        return messages
    words = f"\n\nAnswer with JSON that fits this schema:\n{schema}"
    content: Any = messages[-1].content
    told = content + words if isinstance(content, str) else [*content, words]
    return [*messages[:-1], messages[-1].model_copy(update={"content": told})]


def _named(schema: Schema) -> dict[str, Any]:
    """The schema as LangChain's traces show it; a plain one may lack the title it wants."""
    if isinstance(schema, dict) and "type" in schema:
        schema = {"title": "answer", **schema}
    return convert_to_json_schema(schema)


def _json_schema(schema: Schema) -> dict[str, Any]:
    """The schema with its definitions; LangChain's conversion cuts recursive ones off."""
    if isinstance(schema, type) and issubclass(schema, BaseModel):
        return schema.model_json_schema()
    if isinstance(schema, dict) and "type" in schema:
        return schema
    return convert_to_json_schema(schema)


def _check_whole(result: list[Generation]) -> None:
    """LangChain's parsers would close an answer that ends in the middle, without a word."""
    first = result[0]
    if not isinstance(first, ChatGeneration):
        return
    finish = first.message.response_metadata.get("finish_reason")
    if finish is None:  # a stream that goes on
        return
    try:
        json.loads(first.text)
    except ValueError as error:
        why = (
            "the answer reached max_tokens before its JSON was complete; allow more tokens, or "
            "bound the schema's texts and lists (maxLength, maxItems)."
            if finish == "length"
            else "a stop string ended the answer before its JSON was complete; leave it out."
        )
        raise OutputParserException(why, llm_output=first.text) from error


class _WholeJson(JsonOutputParser):
    def parse_result(self, result: list[Generation], *, partial: bool = False) -> Any:
        _check_whole(result)
        return super().parse_result(result, partial=partial)


class _WholePydantic(PydanticOutputParser[Any]):
    def parse_result(self, result: list[Generation], *, partial: bool = False) -> Any:
        _check_whole(result)
        return super().parse_result(result, partial=partial)
