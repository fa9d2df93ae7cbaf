"""Answers held to a JSON Schema: by models of random weights, which obey nothing by themselves."""

from __future__ import annotations

import json
import math
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import AddedToken, Tokenizer, decoders, normalizers
from tokenizers.models import BPE
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from lazyrag import Engine, RequestError
from lazyrag.engine.constraint import Constraint, JsonConstraints
from lazyrag.engine.sampling import MAX_SCHEMA_CHARACTERS, Sampler, make_options
from lazyrag.errors import LazyRagError
from lazyrag.prompt.tokenise import PromptTokenizer
from lazyrag.types import GenerationOptions
from tests.prompt.conftest import metaspace
from tests.support import tiny

pytest.importorskip("llguidance")

EOS = 258
BYTES = 256
PROMPT = "The fox sleeps. As JSON: "
TOKENS = 120
SAMPLED: list[dict[str, Any]] = [{}, *({"temperature": 1.5, "seed": seed} for seed in range(3))]


def is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def is_item(value: Any) -> bool:
    return value.keys() == {"name", "n"} and len(value["name"]) <= 3 and value["n"] in (1, 2)


def is_tree(value: Any) -> bool:
    return value.keys() <= {"v", "c"} and is_whole(value["v"]) and all(map(is_tree, value["c"]))


def obj(required: bool = True, **properties: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties) if required else [],
        "additionalProperties": False,
    }


SHORT = {"type": "string", "maxLength": 3}
ITEM = obj(name=SHORT, n={"enum": [1, 2]})
TREE = obj(v={"type": "integer"}, c={"type": "array", "items": {"$ref": "#/$defs/Tree"}})

BOUNDED: dict[str, tuple[dict[str, Any], Callable[[Any], bool]]] = {
    "boolean": ({"type": "boolean"}, lambda v: isinstance(v, bool)),
    "null": ({"type": "null"}, lambda v: v is None),
    "enum": ({"enum": ["a", "ab", 7, None]}, lambda v: v in ("a", "ab", 7, None)),
    "enum of characters": (
        {"enum": ["ä🤗", "äh\n", '"漢"']},
        lambda v: v in ("ä🤗", "äh\n", '"漢"'),
    ),
    "const": ({"const": {"a": [1, {"b": None}]}}, lambda v: v == {"a": [1, {"b": None}]}),
    "range": (
        {"type": "integer", "minimum": -5, "maximum": 130},
        lambda v: is_whole(v) and -5 <= v <= 130,
    ),
    "short string": (SHORT, lambda v: isinstance(v, str) and len(v) <= 3),
    "pattern": (
        {"type": "string", "pattern": "^[ä-ü]{2}$"},
        lambda v: len(v) == 2 and all("ä" <= letter <= "ü" for letter in v),
    ),
    "object": (
        obj(a={"type": "boolean"}, b=SHORT),
        lambda v: list(v) == ["a", "b"] and isinstance(v["a"], bool) and len(v["b"]) <= 3,
    ),
    "optional": (obj(required=False, a={"const": 1}), lambda v: v in ({}, {"a": 1})),
    "nested": (
        obj(outer=obj(inner=obj(x={"type": "null"}))),
        lambda v: v == {"outer": {"inner": {"x": None}}},
    ),
    "array": (
        {"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 4},
        lambda v: 2 <= len(v) <= 4 and all(isinstance(one, bool) for one in v),
    ),
    "anyOf": (
        {"anyOf": [{"const": "yes"}, {"type": "null"}, obj(why=SHORT)]},
        lambda v: v in ("yes", None) or len(v["why"]) <= 3,
    ),
    "$ref as pydantic writes it": (
        {
            "$defs": {"Item": {**ITEM, "title": "Item", "description": "One of them."}},
            "title": "Items",
            **obj(items={"type": "array", "items": {"$ref": "#/$defs/Item"}, "maxItems": 2}),
        },
        lambda v: len(v["items"]) <= 2 and all(map(is_item, v["items"])),
    ),
    "oneOf with a tag": (
        {"oneOf": [obj(kind={"const": "a"}, n={"enum": [1]}), obj(kind={"const": "b"})]},
        lambda v: v in ({"kind": "a", "n": 1}, {"kind": "b"}),
    ),
}

OPEN: dict[str, tuple[dict[str, Any], Callable[[Any], bool]]] = {
    "any": ({}, lambda v: True),
    "any object": ({"type": "object"}, lambda v: isinstance(v, dict)),
    "string": ({"type": "string"}, lambda v: isinstance(v, str)),
    "integer": ({"type": "integer"}, is_whole),
    "number": ({"type": "number"}, lambda v: isinstance(v, int | float)),
    "integers": (
        {"type": "array", "items": {"type": "integer", "multipleOf": 7}, "minItems": 1},
        lambda v: len(v) >= 1 and all(one % 7 == 0 for one in v),
    ),
    "map": (
        obj(a={"type": "null"}) | {"additionalProperties": {"type": "null"}, "minProperties": 2},
        lambda v: len(v) >= 2 and set(v.values()) == {None},
    ),
    "tree": ({"$defs": {"Tree": TREE}, "$ref": "#/$defs/Tree"}, is_tree),
}


def byte_fallback_tokenizer() -> PreTrainedTokenizerFast:
    """A SentencePiece vocabulary of bytes alone: ids 0..255, then <unk>, <s>, </s>."""
    vocab = {f"<0x{byte:02X}>": byte for byte in range(BYTES)} | {"<unk>": BYTES}
    backend = Tokenizer(BPE(vocab, [], unk_token="<unk>", byte_fallback=True))
    backend.normalizer = normalizers.Replace(" ", "▁")
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    backend.add_special_tokens([AddedToken(name, special=True) for name in ("<s>", "</s>")])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )


@pytest.fixture(scope="module", params=["byte-level", "padded", "byte-fallback"])
def engine(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Engine]:
    """Padded: the logits have 41 rows more than there are bytes and control tokens.

    The first of them belongs to an added token that is not special, the others to none.
    """
    folder = tmp_path_factory.mktemp("model")
    with pytest.MonkeyPatch.context() as patch:
        rows = {"vocab_size": 300} if request.param == "padded" else {}
        patch.setitem(tiny.CONFIGS, "here", {"model_type": "llama", **rows})
        tiny.save_tiny(folder, "here")
    if request.param == "padded":
        tokenizer = tiny.tiny_tokenizer()
        tokenizer.add_tokens([AddedToken("toolcall", special=False)])
        tokenizer.save_pretrained(folder)
    if request.param == "byte-fallback":
        byte_fallback_tokenizer().save_pretrained(folder)
    with Engine.from_pretrained(folder) as engine:
        yield engine


@pytest.fixture(scope="module")
def plain(checkpoint: Callable[[str], Path]) -> Iterator[Engine]:
    with Engine.from_pretrained(checkpoint("llama")) as engine:
        yield engine


def ask(engine: Engine, schema: Any, **options: Any) -> Any:
    options = {"max_new_tokens": TOKENS, **options}
    return engine.generate(PROMPT, json_schema=json.dumps(schema), **options)


@pytest.mark.parametrize("name", BOUNDED)
def test_bounded_answers_end_and_satisfy(engine: Engine, name: str) -> None:
    schema, holds = BOUNDED[name]
    for options in SAMPLED:
        answer = ask(engine, schema, **options)
        assert answer.finish_reason == "stop"
        assert holds(json.loads(answer.text)), answer.text
        assert all(id < BYTES or id == EOS for id in answer.token_ids)
        assert EOS not in answer.token_ids[:-1]


@pytest.mark.parametrize("name", OPEN)
def test_open_answers_satisfy_when_they_end(engine: Engine, name: str) -> None:
    """Seeds are tried until one ends: a random model closes a string now and then."""
    schema, holds = OPEN[name]
    ended = 0
    for seed in range(60):
        answer = ask(engine, schema, temperature=5.0, seed=seed)
        assert all(id < BYTES or id == EOS for id in answer.token_ids)
        if answer.finish_reason == "stop":
            assert holds(json.loads(answer.text)), answer.text
            ended += 1
        if ended == 2:
            return
    assert ended, "no seed ended"


def test_without_a_schema_the_same_models_write_no_json(engine: Engine) -> None:
    answer = engine.generate(PROMPT, max_new_tokens=TOKENS)
    with pytest.raises(ValueError):
        json.loads(answer.text)


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 5.0},
        {"temperature": 5.0, "top_p": 0.05},
        {"temperature": 5.0, "top_k": 1, "min_p": 1.0},
        {"temperature": 1e300},
        {"repetition_penalty": 50.0},
        {"temperature": 1.0, "repetition_penalty": 0.01},
    ],
    ids=str,
)
def test_no_other_option_undoes_the_mask(plain: Engine, options: dict[str, Any]) -> None:
    schema, holds = BOUNDED["$ref as pydantic writes it"]
    for seed in range(3):
        answer = ask(plain, schema, seed=seed, **options)
        assert answer.finish_reason == "stop"
        assert holds(json.loads(answer.text))


class Only:
    """Lets some tokens through, and ends after three."""

    def __init__(self, *tokens: int) -> None:
        self.tokens = list(tokens)
        self.accepted: list[int] = []

    @property
    def finished(self) -> bool:
        return len(self.accepted) == 3

    def mask(self, scores: Tensor) -> Tensor:
        masked = torch.full_like(scores, -math.inf)
        masked[..., self.tokens] = scores[..., self.tokens]
        return masked

    def accept(self, token: int) -> None:
        self.accepted.append(token)


class TestSampler:
    def test_truncations_choose_among_the_tokens_left(self) -> None:
        """The two allowed tokens are the unlikeliest: a truncation made first would drop them."""
        scores = torch.linspace(10, -10, 50)
        for truncation in ({"top_k": 1}, {"top_p": 0.5}, {"min_p": 0.9}):
            options = make_options(None, {"temperature": 1.0, "seed": 1, **truncation})
            assert Sampler(options, (), Only(48, 49)).next(scores) == 48

    @pytest.mark.parametrize("temperature", [0.0, 1.0, 1e300])
    @pytest.mark.parametrize("penalty", [0.1, 1.0, 10.0])
    def test_only_allowed_tokens_are_drawn(self, temperature: float, penalty: float) -> None:
        allowed = Only(3, 7)
        options = GenerationOptions(temperature=temperature, repetition_penalty=penalty, seed=1)
        sampler = Sampler(options, range(50), allowed)
        drawn = []
        while not sampler.finished:
            drawn.append(sampler.next(torch.linspace(10, -10, 50)))
        assert set(drawn) <= {3, 7}
        assert drawn == allowed.accepted
        assert len(drawn) == 3

    def test_the_same_text_so_far_gives_the_same_token(self) -> None:
        options = GenerationOptions(temperature=1.0, seed=4)
        one, other = Sampler(options, (), Only(*range(50))), Sampler(options, ())
        logits = torch.linspace(1, -1, 50)
        assert [one.next(logits) for _ in range(3)] == [other.next(logits) for _ in range(3)]

    def test_allowed_logits_of_minus_infinity_are_an_error(self) -> None:
        scores = torch.tensor([1.0, -math.inf])
        with pytest.raises(LazyRagError, match="not finite"):
            Sampler(GenerationOptions(), (), Only(1)).next(scores)


def test_a_complete_value_ends_the_answer_without_an_end_of_text(plain: Engine) -> None:
    answer = ask(plain, {"const": True}, max_new_tokens=4)
    assert (answer.text, len(answer.token_ids), answer.finish_reason) == ("true", 4, "stop")


def test_a_value_that_may_go_on_ends_where_the_model_ends_it(plain: Engine) -> None:
    texts = set()
    for seed in range(12):
        answer = ask(plain, {"enum": [1, 12, 123]}, temperature=5.0, seed=seed)
        assert answer.finish_reason == "stop"
        assert (answer.token_ids[-1] == EOS) == (answer.text != "123")
        texts.add(answer.text)
    assert texts == {"1", "12", "123"}


def allowed(constraint: Constraint, rows: int) -> set[int]:
    return set(constraint.mask(torch.zeros(rows)).isfinite().nonzero().flatten().tolist())


def test_inside_a_string_no_token_but_text_is_allowed(engine: Engine) -> None:
    """Neither control tokens, added ones among them, nor rows behind the vocabulary."""
    rows = engine._model.model.config.vocab_size
    constraint = JsonConstraints(engine._model).make('{"type": "string"}')
    [quote] = engine.text_ids('"')
    assert allowed(constraint, rows) == {quote}
    constraint.accept(quote)
    assert set(engine.text_ids("toolcall")) < allowed(constraint, rows) < set(range(BYTES))


def test_every_end_of_text_of_the_model_may_end_a_value(plain: Engine) -> None:
    """Chat models name several; the tokenizer knows one of them."""
    model = replace(plain._model, eos_ids=frozenset({257, EOS, 9999}))
    constraint = JsonConstraints(model).make('{"enum": [1, 12]}')
    one, two = plain.text_ids("12")
    constraint.accept(one)
    assert allowed(constraint, 259) == {two, 257, EOS}
    constraint.accept(257)
    assert constraint.finished


def test_an_answer_cut_short_says_so(plain: Engine) -> None:
    answer = ask(plain, {"type": "string", "minLength": 9}, max_new_tokens=4)
    assert (answer.text[0], len(answer.token_ids), answer.finish_reason) == ('"', 4, "length")


def test_a_stop_string_wins(plain: Engine) -> None:
    answer = ask(plain, {"const": "abcd"}, stop="c")
    assert (answer.text, answer.finish_reason) == ('"ab', "stop")
    answer = ask(plain, {"const": "abcd"}, stop='d"')
    assert (answer.text, answer.finish_reason) == ('"abc', "stop")
    answer = ask(plain, {"const": "abcd"}, stop='"x')
    assert (answer.text, answer.finish_reason) == ('"abcd"', "stop")


def test_no_white_space_between_the_parts(plain: Engine) -> None:
    schema, _ = BOUNDED["nested"]
    assert ask(plain, schema).text == '{"outer":{"inner":{"x":null}}}'


@pytest.mark.parametrize("name", ["enum of characters", "anyOf"])
def test_streamed_equals_whole(engine: Engine, name: str) -> None:
    schema = BOUNDED[name][0]
    for options in SAMPLED:
        whole = ask(engine, schema, **options)
        arguments = {"max_new_tokens": TOKENS, "json_schema": json.dumps(schema), **options}
        with engine.stream(PROMPT, **arguments) as stream:
            deltas = list(stream)
        assert "".join(deltas) == whole.text == stream.result.text
        assert not any("\ufffd" in delta for delta in deltas)
        assert stream.result.token_ids == whole.token_ids


def test_threads_with_schemas_of_their_own(
    checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Streams begun here and read elsewhere, all at once; the vocabulary is read once."""
    names = [*BOUNDED][:8]
    reads: list[Any] = []
    read = JsonConstraints._read_vocabulary

    def counting(constraints: JsonConstraints) -> Any:
        reads.append(constraints)
        time.sleep(0.05)  # for the others to come
        return read(constraints)

    monkeypatch.setattr(JsonConstraints, "_read_vocabulary", counting)
    with Engine.from_pretrained(checkpoint("llama")) as engine:

        def start(name: str) -> Any:
            options = {"temperature": 1.0, "seed": 5, "max_new_tokens": TOKENS}
            return engine.stream(PROMPT, json_schema=json.dumps(BOUNDED[name][0]), **options)

        assert reads == [], "without a schema nothing is read"
        with ThreadPoolExecutor(8) as threads:
            streams = list(threads.map(start, names))
            together = list(threads.map("".join, streams))
        assert together == ["".join(start(name)) for name in names]
        assert len(reads) == 1
    for name, text in zip(names, together, strict=True):
        assert BOUNDED[name][1](json.loads(text))


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        ("", "not JSON"),
        ("{", "not JSON"),
        ('{"const": NaN}', "NaN is no number"),
        ('{"const": 1e999}', "json_schema cannot be served"),
        ('{"const": 9007199254740993}', "9007199254740993 is beyond"),
        ('{"items":' * 5000 + "{}" + "}" * 5000, "not JSON"),
        ('{"items":' * 300 + "{}" + "}" * 300, "recursion limit"),
        ("true", "must be a JSON object"),
        ("[]", "must be a JSON object"),
        ('{"type": "strong"}', "strong"),
        ('{"type": "' + "strong" * 1000 + '"}', "strong"),
        ('{"type": "string", "pattern": "("}', "regex"),
        ('{"properties": [1]}', "properties must be an object"),
        ('{"not": {"type": "string"}}', "not"),
        ('{"type": "array", "uniqueItems": true}', "uniqueItems"),
        ('{"oneOf": [{"type": "integer"}, {"type": "number"}]}', "oneOf"),
        ('{"$ref": "#/$defs/nowhere"}', "nowhere"),
        ('{"$ref": "https://example.com/schema.json"}', "example.com"),
        ('{"$ref": "#"}', "json_schema cannot be served"),
        ('{"type": "integer", "minimum": 3, "maximum": 2}', "minimum"),
        ('{"enum": []}', "Unsatisfiable"),
        ('{"anyOf": [{"type": "object", "minProperties": 2}]}', "minProperties"),
        ('{"const": "\\ud800"}', "json_schema cannot be served"),
        ({"type": "object"}, "^json_schema must be a JSON Schema as JSON text"),
        ('"' + "x" * MAX_SCHEMA_CHARACTERS, "^json_schema must be"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_schema_that_cannot_be_served_is_refused_before_any_work(
    plain: Engine, schema: Any, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plain, "_read", lambda _: pytest.fail("the prompt was read"))
    with pytest.raises(RequestError, match=reason) as caught:
        plain.stream(PROMPT, json_schema=schema)
    assert len(str(caught.value)) < 500


def test_settings_of_the_library_inside_a_schema_are_ignored(plain: Engine) -> None:
    """They could put letters between the parts, or switch checks off."""
    items = {"type": "array", "items": {"const": 1}, "minItems": 2, "maxItems": 2}
    settings = {"item_separator": "abc", "whitespace_pattern": "[a-z]+", "lenient": True}
    assert ask(plain, {"x-guidance": settings, **items}).text == "[1,1]"
    with pytest.raises(RequestError, match="uniqueItems"):
        ask(plain, {"x-guidance": settings, **items, "uniqueItems": True})


def test_without_the_library(plain: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(RequestError, match=r"pip install 'lazyrag\[structured\]'"):
        plain.stream_chat([{"role": "user", "content": "Hello"}], json_schema="{}")
    assert plain.generate(PROMPT, max_new_tokens=2).token_ids


def test_the_core_does_not_import_the_library() -> None:
    code = "import sys, lazyrag.engine.engine; sys.exit('llguidance' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_tokenizer_the_library_cannot_read_is_named(plain: Engine) -> None:
    model = replace(plain._model, tokenizer=PromptTokenizer(metaspace(legacy=True)))
    with pytest.raises(RequestError, match=r"tokenizer of .* cannot be held to a json_schema"):
        JsonConstraints(model).make("{}")


def test_a_vocabulary_that_cannot_write_the_answer_is_an_error(plain: Engine) -> None:
    constraints = JsonConstraints(plain._model)
    vocabulary, text = constraints._read_vocabulary()
    letter = plain._model.tokenizer.encode_text("t")
    text[letter] = False
    constraints._vocabulary = (vocabulary, text)
    with pytest.raises(RequestError, match="no token for what must come next"):
        constraints.make('{"const": true}')


def test_smollm2_fills_two_strings() -> None:
    line = {"type": "string", "maxLength": 40}
    schema = json.dumps(obj(animal=line, place=line))
    question = "A red fox sleeps under the old oak. Which animal is it, and where does it sleep?"
    with Engine.from_pretrained("smollm2") as engine:
        for options in ({}, {"temperature": 1.0, "seed": 3}):
            answer = engine.chat(
                [{"role": "user", "content": f"{question} Answer as JSON."}],
                json_schema=schema,
                max_new_tokens=120,
                **options,
            )
            value = json.loads(answer.text)
            assert answer.finish_reason == "stop"
            assert list(value) == ["animal", "place"]
            assert all(len(text) <= 40 for text in value.values())
