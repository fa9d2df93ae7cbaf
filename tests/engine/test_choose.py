"""Tokens chosen together are those that each answer's sampler chooses alone."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

from lazyrag.engine.choose import Choice
from lazyrag.engine.forward import EagerLaunched
from lazyrag.engine.graphs import _choose
from lazyrag.engine.sampling import Sampler, make_options
from lazyrag.errors import LazyRagError

DEVICE = torch.device(os.environ.get("LAZYRAG_TEST_DEVICE", "cpu"))
VOCAB = 500
OPTIONS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.7, "seed": 1},
    {"temperature": 0.7, "seed": 2},
    {"temperature": 0.7, "top_k": 5, "seed": 3},
    {"temperature": 1.3, "top_p": 0.8, "min_p": 0.02, "seed": 4},
    {"temperature": 1.3, "top_p": 0.8, "min_p": 0.02, "seed": 5},
    {"repetition_penalty": 1.4},
    {"temperature": 0.7, "repetition_penalty": 1.4, "seed": 1},
    {"temperature": 1e-300, "seed": 6},
    {},
]


def samplers() -> list[Sampler]:
    return [Sampler(make_options(None, options), [3, 4]) for options in OPTIONS]


def test_each_row_gets_the_token_of_its_own_sampler() -> None:
    generator = torch.Generator().manual_seed(0)
    together, alone = samplers(), samplers()
    seen = set()
    for _ in range(40):
        logits = torch.randn(len(OPTIONS), VOCAB, generator=generator).to(DEVICE)
        chosen = Choice(EagerLaunched(logits), together).fetch()
        assert chosen == [one.next(row) for one, row in zip(alone, logits, strict=True)]
        seen.add(tuple(chosen))
    assert len(seen) == 40


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_row_that_is_not_finite_harms_no_other(bad: float) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(len(OPTIONS), VOCAB, generator=generator).to(DEVICE)
    expected = Choice(EagerLaunched(logits), samplers()).fetch()
    for row in range(len(OPTIONS)):
        broken = logits.clone()
        broken[row, 9] = bad
        chosen = Choice(EagerLaunched(broken), samplers()).fetch()
        assert isinstance(chosen[row], LazyRagError)
        assert "not finite" in str(chosen[row])
        others = [one for number, one in enumerate(chosen) if number != row]
        assert others == [one for number, one in enumerate(expected) if number != row]


def test_tokens_are_chosen_before_those_of_the_pass_before_are_fetched() -> None:
    """What overlaps draws the same numbers."""
    generator = torch.Generator().manual_seed(1)
    together, alone = samplers(), samplers()
    chained = [row for row, one in enumerate(together) if one.kind is not None]
    together = [together[row] for row in chained]
    before: Choice | None = None
    expected: list[int] = []
    for _ in range(20):
        logits = torch.randn(len(chained), VOCAB, generator=generator).to(DEVICE)
        choice = Choice(EagerLaunched(logits), together)
        assert choice.on_device
        if before is not None:
            assert before.fetch() == expected
        expected = [alone[row].next(one) for row, one in zip(chained, logits, strict=True)]
        before = choice


def test_a_constraint_or_penalty_needs_the_host() -> None:
    logits = torch.randn(2, VOCAB, generator=torch.Generator().manual_seed(2)).to(DEVICE)
    one, penalised = samplers()[1], samplers()[6]
    assert Choice(EagerLaunched(logits), [one, None]).on_device
    assert not Choice(EagerLaunched(logits), [one, penalised]).on_device


@pytest.mark.parametrize("rows", [0, 1, 5])
@pytest.mark.parametrize("vocab", [300, 320])
def test_the_likeliest_of_a_vocabulary_in_parts(rows: int, vocab: int) -> None:
    """Of equals the lowest; also of a long pass that only reads a prompt."""
    logits = torch.randn(rows, vocab, generator=torch.Generator().manual_seed(3)).to(DEVICE)
    logits[:, 7::100] = 9.0
    ids, tops = _choose(logits)
    assert ids.tolist() == [7] * rows
    assert tops.view(torch.float32).tolist() == [9.0] * rows
