"""From logits to the next token, and the checks of what a caller may ask for."""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import fields, replace
from hashlib import blake2b
from numbers import Integral, Real
from typing import Any

import torch
from torch import Tensor
from transformers.generation.logits_process import (
    LogitsProcessor,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from lazyrag.engine.constraint import Constraint
from lazyrag.errors import LazyRagError, RequestError
from lazyrag.types import GenerationOptions, Quality

MAX_SCHEMA_CHARACTERS = 64 * 1024
_LONGEST_SHOWN = 200
"""Characters of a wrong value that its error repeats."""


class Sampler:
    """Chooses the tokens of one answer, in order.

    A sampled token depends on the logits, the seed, the number of the step and, under a constraint
    or a repetition penalty, on the text so far; on nothing else that was drawn: neither on other
    requests, nor on the device.

    Args:
        options: as `make_options` returns them.
        prompt_ids: every id of the prompt, for the repetition penalty.
        constraint: what the answer may become; of this answer alone. Its mask comes first: penalty,
            temperature and truncations choose among the tokens it leaves.

    Attributes:
        seed: of the random stream, also when ``options.seed`` is None; the same seed gives the same
            answer again.
        kind: answers of one kind may be drawn together; None = this one has rules of its own.
        warpers: what `draw_rows` needs of this kind; nothing where the likeliest is taken.
    """

    def __init__(
        self,
        options: GenerationOptions,
        prompt_ids: Sequence[int],
        constraint: Constraint | None = None,
    ) -> None:
        self._constraint = constraint
        self.seed = secrets.randbits(32) if options.seed is None else int(options.seed)
        self._greedy = options.temperature == 0
        self._step = self._drawn = 0
        self.warpers = [] if self._greedy else _warpers(options)
        self.kind: Hashable = None
        if constraint is None and options.repetition_penalty == 1:
            self.kind = (options.temperature,) if self._greedy else _kind(options)
        self._penalty: RepetitionPenaltyLogitsProcessor | None = None
        if options.repetition_penalty != 1:
            self._penalty = RepetitionPenaltyLogitsProcessor(float(options.repetition_penalty))
        self._seen = set() if self._penalty is None else set(prompt_ids)
        self._seen_ids = torch.tensor([sorted(self._seen)], dtype=torch.long)

    @property
    def finished(self) -> bool:
        """True once the constraint lets nothing follow."""
        return self._constraint is not None and self._constraint.finished

    def next(self, logits: Tensor) -> int:
        """Choose a token; with temperature 0 the likeliest, of equals the lowest id.

        Args:
            logits: ``[vocab]``, any float dtype, any device; not changed.

        Raises:
            LazyRagError: the logits hold NaN or +inf, or nothing but -inf where the constraint
                allows a token.
        """
        scores = self._finite(logits.float()[None])
        if self._constraint is not None:
            scores = self._finite(self._constraint.mask(scores))
        if self._penalty is not None:
            self._seen_ids = self._seen_ids.to(scores.device)
            scores = self._penalty(self._seen_ids, scores)
        token = int(scores.argmax()) if self._greedy else self._draw(scores)
        self._step += 1
        self._remember(token)
        if self._constraint is not None:
            self._constraint.accept(token)
        return token

    def _finite(self, scores: Tensor) -> Tensor:
        self._check_finite(float(scores.max()))
        return scores

    def _check_finite(self, top: float) -> None:
        if not math.isfinite(top):
            raise LazyRagError(
                f"The model's logits are not finite (maximum {top}) at token {self._step} "
                "of the answer: its weights are damaged or its dtype overflows. Check the model "
                "files, or load it with dtype='float32'."
            )

    def uniform(self) -> float:
        """The random number in [0, 1) of the next token; of the one after when asked again."""
        generator = torch.Generator().manual_seed(_step_seed(self.seed, self._drawn))
        self._drawn += 1
        return float(torch.rand((), generator=generator, dtype=torch.float64))

    def accept(self, token: int, top: float) -> int:
        """Take a token that was chosen with others of this kind.

        Args:
            token: as `next` would have chosen it.
            top: the largest of its logits.

        Raises:
            LazyRagError: as `next`.
        """
        self._check_finite(top)
        self._step += 1
        return token

    def _draw(self, scores: Tensor) -> int:
        uniform = torch.tensor([self.uniform()], dtype=torch.float64)
        return int(draw_rows(scores, self.warpers, uniform))

    def _remember(self, token: int) -> None:
        if self._penalty is not None and token not in self._seen:
            self._seen.add(token)
            self._seen_ids = torch.cat(
                [self._seen_ids, self._seen_ids.new_tensor([[token]])], dim=1
            )


def draw_rows(scores: Tensor, warpers: Sequence[LogitsProcessor], uniform: Tensor) -> Tensor:
    """One token of each row, on the device of the scores.

    Args:
        scores: finite maxima, ``[rows, vocab]``.
        warpers: of every row.
        uniform: fp64 ``[rows]`` in [0, 1), on any device.

    Returns:
        int64 ``[rows]``.
    """
    nothing = torch.empty(len(scores), 0, dtype=torch.long, device=scores.device)
    # With 0 as the maximum, no temperature however small overflows.
    scores = scores - scores.max(dim=-1, keepdim=True).values
    for warp in warpers:
        scores = warp(nothing, scores)
    probabilities = scores.softmax(-1).double()
    cumulative = probabilities.cumsum(-1)
    draw = uniform.to(scores.device)[:, None] * cumulative[:, -1:]
    tokens = torch.searchsorted(cumulative, draw, right=True)[:, 0]
    last = probabilities.shape[-1] - 1 - (probabilities > 0).flip(-1).int().argmax(-1)
    return torch.minimum(tokens, last)


def make_options(
    options: GenerationOptions | None, overrides: Mapping[str, Any]
) -> GenerationOptions:
    """Options with some fields replaced, as a call's keywords do it, checked.

    ``quality`` may be a string, ``stop`` one string, a list or None.

    Raises:
        RequestError: an unknown name, or a value `validate` refuses.
    """
    names = [field.name for field in fields(GenerationOptions)]
    unknown = sorted(set(overrides) - set(names))
    if unknown:
        quoted = ", ".join(f"'{name}'" for name in unknown)
        raise RequestError(f"Unknown option {quoted}: there are {', '.join(names)}.")
    made = replace(options or GenerationOptions(), **overrides)
    made = replace(made, quality=_quality(made.quality), stop=_stop_tuple(made.stop))
    validate(made)
    return made


def validate(options: GenerationOptions) -> None:
    """Check every field.

    Raises:
        RequestError: with one sentence for each field that cannot be served.
    """
    wrong = [
        f"{name} must be {rule}, not {_shown(value)}."
        for name, rule, holds in _RULES
        if not holds(value := getattr(options, name))
    ]
    if wrong:
        raise RequestError(" ".join(wrong))


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _LONGEST_SHOWN else f"{text[:_LONGEST_SHOWN]}..."


def _number(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)


def _whole(value: Any) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


def _strings(value: Any) -> bool:
    return isinstance(value, tuple) and all(isinstance(one, str) and one for one in value)


_RULES: tuple[tuple[str, str, Callable[[Any], bool]], ...] = (
    (
        "max_new_tokens",
        "a whole number of at least 1, or None",
        lambda v: v is None or (_whole(v) and v >= 1),
    ),
    ("temperature", "0 (greedy) or a positive number", lambda v: _number(v) and v >= 0),
    (
        "top_k",
        "a whole number of at least 1, or None for off",
        lambda v: v is None or (_whole(v) and v >= 1),
    ),
    (
        "top_p",
        "above 0 and at most 1, or None for off",
        lambda v: v is None or (_number(v) and 0 < v <= 1),
    ),
    (
        "min_p",
        "between 0 and 1, or None for off",
        lambda v: v is None or (_number(v) and 0 <= v <= 1),
    ),
    ("repetition_penalty", "a positive number (1 is off)", lambda v: _number(v) and v > 0),
    ("seed", "a whole number, or None for a fresh one", lambda v: v is None or _whole(v)),
    ("stop", "a tuple of strings, none of them empty", _strings),
    (
        "json_schema",
        f"a JSON Schema as JSON text of at most {MAX_SCHEMA_CHARACTERS:,} characters, or None",
        lambda v: v is None or (isinstance(v, str) and len(v) <= MAX_SCHEMA_CHARACTERS),
    ),
    ("quality", "a Quality, or None", lambda v: v is None or isinstance(v, Quality)),
    ("shorten", "True or False", lambda v: isinstance(v, bool)),
    ("strict", "True or False", lambda v: isinstance(v, bool)),
    ("priority", "a whole number", _whole),
    ("timeout_s", "a positive number, or None", lambda v: v is None or (_number(v) and v > 0)),
)


def _quality(value: Any) -> Quality | None:
    try:
        return None if value is None else Quality(value)
    except ValueError:
        raise RequestError(
            f"Unknown quality {value!r}: use 'fast', 'balanced', 'best' or 'full'."
        ) from None


def _stop_tuple(value: Any) -> Any:
    if value is None:
        return ()
    if isinstance(value, str):
        return (value,)
    return tuple(value) if isinstance(value, Sequence) else value


def _warpers(options: GenerationOptions) -> list[LogitsProcessor]:
    # Beyond float32 it would be infinite, and -inf of a masked token divided by it is NaN.
    temperature = min(float(options.temperature), torch.finfo(torch.float32).max)
    chosen: list[LogitsProcessor] = [TemperatureLogitsWarper(temperature)]
    if options.top_k is not None:
        chosen.append(TopKLogitsWarper(int(options.top_k)))
    if options.top_p is not None and options.top_p < 1:
        chosen.append(TopPLogitsWarper(float(options.top_p)))
    if options.min_p:
        chosen.append(MinPLogitsWarper(float(options.min_p)))
    return chosen


def _kind(options: GenerationOptions) -> Hashable:
    return options.temperature, options.top_k, options.top_p, options.min_p


def _step_seed(seed: int, step: int) -> int:
    digest = blake2b(f"{seed}:{step}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
