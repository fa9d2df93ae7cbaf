from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from lazyrag.engine.sampling import Sampler, make_options, validate
from lazyrag.errors import LazyRagError, RequestError
from lazyrag.types import GenerationOptions, Quality

VOCAB = 32


def logits(seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(VOCAB, generator=generator) * 2).to(dtype)


def drawn(options: GenerationOptions, scores: Tensor, seeds: int = 400) -> Tensor:
    """How often each id is the first token, over many seeds; ``[vocab]``."""
    counts = torch.zeros(scores.shape[0])
    for seed in range(seeds):
        one = make_options(options, {"seed": seed})
        counts[Sampler(one, ()).next(scores)] += 1
    return counts


class TestGreedy:
    @pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
    def test_takes_the_largest(self, dtype: torch.dtype) -> None:
        scores = logits(dtype=dtype)
        assert Sampler(GenerationOptions(), ()).next(scores) == int(scores.float().argmax())

    def test_ties_go_to_the_lowest_id(self) -> None:
        scores = torch.zeros(50_000)
        scores[[777, 41_000, 3_210]] = 5.0
        assert Sampler(GenerationOptions(), ()).next(scores) == 777

    def test_ignores_seed_and_truncation(self) -> None:
        options = GenerationOptions(top_k=2, top_p=0.1, seed=7)
        assert Sampler(options, ()).next(logits()) == int(logits().argmax())

    def test_repetition_penalty_counts_prompt_and_answer(self) -> None:
        scores = torch.tensor([3.0, 2.9, 2.8, -1.0])
        options = GenerationOptions(repetition_penalty=1.5)
        sampler = Sampler(options, prompt_ids=[0, 0, 3])
        assert [sampler.next(scores) for _ in range(3)] == [1, 2, 0]
        assert Sampler(GenerationOptions(), [0]).next(scores) == 0

    def test_leaves_the_logits_alone(self) -> None:
        scores = logits()
        Sampler(GenerationOptions(repetition_penalty=1.5), range(VOCAB)).next(scores)
        Sampler(GenerationOptions(temperature=0.5, top_k=3), ()).next(scores)
        assert torch.equal(scores, logits())


class TestRandom:
    def test_frequencies_follow_the_temperature(self) -> None:
        scores = torch.tensor([0.0, 1.0, 2.0])
        for temperature in (0.5, 1.0, 2.0):
            counts = drawn(GenerationOptions(temperature=temperature), scores, seeds=2000)
            expected = (scores / temperature).softmax(0)
            assert torch.allclose(counts / 2000, expected, atol=0.04), temperature

    def test_same_seed_same_answer_other_seed_another(self) -> None:
        def answer(seed: int | None) -> list[int]:
            sampler = Sampler(GenerationOptions(temperature=1.0, seed=seed), ())
            return [sampler.next(logits(step)) for step in range(20)]

        assert answer(5) == answer(5) != answer(6)
        assert answer(None) != answer(None)

    def test_a_fresh_seed_can_be_used_again(self) -> None:
        first = Sampler(GenerationOptions(temperature=1.0), ())
        again = Sampler(GenerationOptions(temperature=1.0, seed=first.seed), ())
        assert [first.next(logits(i)) for i in range(20)] == [
            again.next(logits(i)) for i in range(20)
        ]

    def test_stream_depends_on_seed_and_step_only(self) -> None:
        """Draws made elsewhere between two steps once moved a shared random stream."""
        alone = Sampler(GenerationOptions(temperature=1.0, seed=3), ())
        expected = [alone.next(logits(step)) for step in range(10)]
        one = Sampler(GenerationOptions(temperature=1.0, seed=3), ())
        other = Sampler(GenerationOptions(temperature=1.0, seed=3, top_k=5), range(9))
        mixed = []
        for step in range(10):
            torch.rand(step + 1)
            mixed.append(one.next(logits(step)))
            other.next(logits(99))
        assert mixed == expected

    def test_steps_draw_different_numbers(self) -> None:
        sampler = Sampler(GenerationOptions(temperature=1.0, seed=3), ())
        assert len({sampler.next(torch.zeros(10_000)) for _ in range(20)}) > 15

    def test_the_global_random_state_is_not_touched(self) -> None:
        before = torch.get_rng_state()
        Sampler(GenerationOptions(temperature=1.0, seed=3), ()).next(logits())
        assert torch.equal(torch.get_rng_state(), before)

    @pytest.mark.parametrize(
        ("options", "allowed"),
        [
            (GenerationOptions(temperature=1.0, top_k=2), {0, 1}),
            (GenerationOptions(temperature=1.0, top_k=10_000), {0, 1, 2, 3}),
            (GenerationOptions(temperature=1.0, top_p=0.5), {0}),
            (GenerationOptions(temperature=1.0, top_p=0.75), {0, 1}),
            (GenerationOptions(temperature=1.0, top_p=1.0), {0, 1, 2, 3}),
            (GenerationOptions(temperature=1.0, min_p=0.2), {0, 1, 2}),
            (GenerationOptions(temperature=1.0, min_p=0.0), {0, 1, 2, 3}),
            (GenerationOptions(temperature=1.0, top_k=3, top_p=0.6), {0, 1}),
            (GenerationOptions(temperature=1e-40), {0}),
        ],
        ids=["k2", "k-all", "p.5", "p.75", "p1", "minp.2", "minp0", "k3-p.6", "cold"],
    )
    def test_truncation_keeps_exactly(self, options: GenerationOptions, allowed: set[int]) -> None:
        scores = torch.tensor([0.55, 0.25, 0.15, 0.05]).log()
        counts = drawn(options, scores)
        assert set(counts.nonzero().flatten().tolist()) == allowed

    def test_masked_tokens_are_never_drawn(self) -> None:
        scores = torch.full((1000,), -math.inf)
        scores[[10, 999]] = 0.0
        counts = drawn(GenerationOptions(temperature=1.0), scores)
        assert set(counts.nonzero().flatten().tolist()) == {10, 999}

    def test_repetition_penalty_acts_before_the_temperature(self) -> None:
        scores = torch.tensor([4.0, 4.0])
        options = GenerationOptions(temperature=0.1, repetition_penalty=4.0, seed=1)
        sampler = Sampler(options, [0])
        assert sampler.next(scores) == 1


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_logits_that_are_not_finite_are_an_error(bad: float, temperature: float) -> None:
    scores = logits()
    scores[3] = bad
    with pytest.raises(LazyRagError, match="not finite"):
        Sampler(GenerationOptions(temperature=temperature), ()).next(scores)


def test_logits_all_masked_are_an_error() -> None:
    with pytest.raises(LazyRagError, match="not finite"):
        Sampler(GenerationOptions(), ()).next(torch.full((4,), -math.inf))


BAD_FIELDS: list[tuple[str, Any]] = [
    ("temperature", -0.1),
    ("temperature", math.nan),
    ("temperature", math.inf),
    ("temperature", "hot"),
    ("temperature", None),
    ("top_p", 0.0),
    ("top_p", 1.01),
    ("top_p", math.nan),
    ("top_k", 0),
    ("top_k", 2.5),
    ("top_k", True),
    ("min_p", -0.1),
    ("min_p", 1.5),
    ("max_new_tokens", 0),
    ("max_new_tokens", -3),
    ("max_new_tokens", 1.0),
    ("repetition_penalty", 0.0),
    ("repetition_penalty", -1.0),
    ("repetition_penalty", math.nan),
    ("seed", 1.5),
    ("stop", ("a", "")),
    ("stop", (1,)),
    ("stop", 7),
    ("strict", "yes"),
    ("json_schema", {"type": "object"}),
    ("json_schema", b"{}"),
]


@pytest.mark.parametrize(("name", "value"), BAD_FIELDS)
def test_a_bad_field_is_named_with_its_value_and_rule(name: str, value: Any) -> None:
    with pytest.raises(RequestError, match=f"^{name} must be .+, not ") as caught:
        make_options(None, {name: value})
    assert repr(value) in str(caught.value)


def test_every_bad_field_has_its_sentence() -> None:
    with pytest.raises(RequestError) as caught:
        validate(GenerationOptions(temperature=-1, top_p=2, max_new_tokens=0))
    assert str(caught.value).count("must be") == 3


@pytest.mark.parametrize(
    "good",
    [
        {},
        {"temperature": 0},
        {"temperature": np.float32(0.5), "top_k": np.int64(4), "seed": 2**70},
        {"top_p": 1, "min_p": 0, "top_k": 1, "max_new_tokens": 1, "seed": -1},
    ],
    ids=["default", "int", "numpy", "borders"],
)
def test_good_values_pass_and_can_be_sampled_with(good: dict[str, Any]) -> None:
    options = make_options(None, good)
    assert 0 <= Sampler(options, ()).next(logits()) < VOCAB


class TestMakeOptions:
    def test_overrides_win_and_the_rest_stays(self) -> None:
        base = GenerationOptions(max_new_tokens=9, temperature=0.3)
        made = make_options(base, {"temperature": 0.7})
        assert (made.max_new_tokens, made.temperature) == (9, 0.7)
        assert base.temperature == 0.3

    def test_unknown_names_are_refused_by_name(self) -> None:
        with pytest.raises(RequestError, match=r"'max_tokens', 'temprature'.*max_new_tokens"):
            make_options(None, {"temprature": 1, "max_tokens": 2})

    @pytest.mark.parametrize("given", ["full", Quality.FULL])
    def test_quality_may_be_a_string(self, given: str) -> None:
        assert make_options(None, {"quality": given}).quality is Quality.FULL

    @pytest.mark.parametrize("given", ["x", 3, ""])
    def test_unknown_quality(self, given: Any) -> None:
        with pytest.raises(RequestError) as caught:
            make_options(None, {"quality": given})
        assert (
            str(caught.value)
            == f"Unknown quality {given!r}: use 'fast', 'balanced', 'best' or 'full'."
        )

    @pytest.mark.parametrize(
        ("given", "expected"),
        [
            ("###", ("###",)),
            (["a", "b"], ("a", "b")),
            (("a",), ("a",)),
            (None, ()),
            ([], ()),
        ],
    )
    def test_stop_in_any_form(self, given: Any, expected: tuple[str, ...]) -> None:
        assert make_options(None, {"stop": given}).stop == expected

    def test_a_string_as_stop_of_the_options_is_one_stop(self) -> None:
        base: Any = GenerationOptions(stop="END")  # type: ignore[arg-type]
        assert make_options(base, {}).stop == ("END",)
