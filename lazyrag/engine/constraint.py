"""Answers held to a JSON Schema: the only module that knows llguidance."""

from __future__ import annotations

import json
import math
import threading
from typing import Any, Protocol

import torch
from torch import Tensor

from lazyrag.errors import RequestError
from lazyrag.model.load import LoadedModel

_COMPACT = {"whitespace_flexible": False}
_LARGEST = 2**53
"""Larger whole numbers are rounded by llguidance, as by many readers of JSON."""
_LONGEST_REASON = 300


class Constraint(Protocol):
    """What one answer may still become; it follows the answer token by token."""

    @property
    def finished(self) -> bool:
        """True once nothing may follow."""
        ...

    def mask(self, scores: Tensor) -> Tensor:
        """A copy of ``scores`` ``[..., vocab]`` with -inf at every token that may not come next."""
        ...

    def accept(self, token: int) -> None:
        """Add the token chosen; it must be one that `mask` left."""
        ...


class JsonConstraints:
    """Makes the constraints of one model's answers; may be used from several threads.

    The first one reads the vocabulary: 0.4 s and 18 MB for the 49,152 tokens of SmolLM2. Further
    ones take milliseconds, and a token well under one.

    Whoever may write schemas is trusted with the machine's time: the text is bounded, but a few
    intersecting patterns or a ``multipleOf`` in the millions can keep llguidance busy for minutes.
    """

    def __init__(self, model: LoadedModel) -> None:
        self._model = model
        self._lock = threading.Lock()
        self._vocabulary: tuple[Any, Tensor] | None = None

    def make(self, schema: str) -> Constraint:
        """A constraint for one answer.

        Args:
            schema: a JSON Schema as JSON text.

        Raises:
            RequestError: llguidance is not installed, or it cannot hold an answer of this model to
                this schema; says why.
        """
        rules = _read(schema)
        llguidance = _library()
        with self._lock:
            if self._vocabulary is None:
                self._vocabulary = self._read_vocabulary()
            vocabulary, text = self._vocabulary
        try:
            grammar = llguidance.LLMatcher.grammar_from_json_schema(rules, overrides=_COMPACT)
        except ValueError as error:
            raise _refused(str(error)) from error
        limits = llguidance.LLParserLimits(verbose_errors=False)
        matcher = llguidance.LLMatcher(vocabulary, grammar, log_level=0, limits=limits)
        return _JsonConstraint(matcher, text, self._model.eos_ids)

    def _read_vocabulary(self) -> tuple[Any, Tensor]:
        """The vocabulary as llguidance reads it, and which tokens are text, ``[vocab]``."""
        from llguidance import hf

        tokenizer: Any = self._model.tokenizer.tokenizer
        try:
            vocabulary = hf.from_tokenizer(tokenizer)
        except ValueError as error:
            raise RequestError(
                f"the tokenizer of {self._model.name!r} cannot be held to a json_schema: {error}"
            ) from error
        text = torch.zeros(self._model.model.config.vocab_size, dtype=torch.bool)
        text[: vocabulary.vocab_size] = True  # rows of the logits behind it belong to no token
        for id in (
            *self._model.tokenizer.control_ids,
            *tokenizer.get_added_vocab().values(),
            *self._model.eos_ids,
            *vocabulary.eos_tokens,
        ):
            text[id : id + 1] = False
        return vocabulary, text


class _JsonConstraint:
    """One answer under one grammar.

    Args:
        matcher: of llguidance, at its start.
        text: the tokens that may ever stand in an answer, ``[vocab]``.
        eos_ids: allowed where the value may end.
    """

    def __init__(self, matcher: Any, text: Tensor, eos_ids: frozenset[int]) -> None:
        self._matcher = matcher
        self._text = text
        self._eos_ids = eos_ids
        self._advance()

    @property
    def finished(self) -> bool:
        return self._finished

    def mask(self, scores: Tensor) -> Tensor:
        return scores.masked_fill(~self._allowed.to(scores.device), -math.inf)

    def accept(self, token: int) -> None:
        if token in self._eos_ids:
            self._finished = True
            return
        self._matcher.consume_token(token)
        self._advance()

    def _advance(self) -> None:
        marks = torch.frombuffer(bytearray(self._matcher.compute_logit_bias()), dtype=torch.uint8)
        if self._matcher.is_error():
            raise _refused(self._matcher.get_error())
        size = min(len(marks), len(self._text))
        allowed = torch.zeros_like(self._text)
        allowed[:size] = self._text[:size] & (marks[:size] > 0)
        may_end = self._matcher.is_accepting()
        may_go_on = bool(allowed.any())
        if not may_end and not may_go_on:
            raise _refused("the tokenizer has no token for what must come next")
        allowed[[id for id in self._eos_ids if id < len(allowed)]] = may_end
        self._allowed = allowed
        self._finished = may_end and not may_go_on


def _library() -> Any:
    try:
        import llguidance
    except ImportError as error:
        raise RequestError(
            "json_schema needs llguidance, which is not installed: "
            "pip install 'lazyrag[structured]'"
        ) from error
    return llguidance


def _read(schema: str) -> str:
    """The schema as llguidance is to read it, without settings of its own that it may hold."""
    try:
        rules = json.loads(schema, parse_int=_whole, parse_constant=_no_number)
    except (ValueError, RecursionError) as error:
        raise _refused(f"it is not JSON: {error}") from error
    if not isinstance(rules, dict):
        raise _refused('it must be a JSON object, such as {"type": "object"}')
    rules.pop("x-guidance", None)
    _check_counts(rules)
    return json.dumps(rules)


def _check_counts(rules: dict[str, Any]) -> None:
    """Refuse a least number of properties that a property written twice would satisfy."""
    waiting: list[Any] = [rules]
    while waiting:
        part = waiting.pop()
        if isinstance(part, dict):
            least, required = part.get("minProperties"), part.get("required")
            named = len(required) if isinstance(required, list) else 0
            if isinstance(least, int) and least > named + 1:
                raise _refused("minProperties may exceed the number of required ones by 1 at most")
            waiting += part.values()
        elif isinstance(part, list):
            waiting += part


def _whole(digits: str) -> int:
    number = int(digits)
    if abs(number) > _LARGEST:
        raise ValueError(f"{digits} is beyond ±2^53 and would be rounded")
    return number


def _no_number(name: str) -> Any:
    raise ValueError(f"{name} is no number of JSON")


def _refused(reason: str) -> RequestError:
    return RequestError(
        f"json_schema cannot be served: {' '.join(reason.split())[:_LONGEST_REASON]}."
    )
