"""What is measured of one answer."""

from __future__ import annotations

import string
import unicodedata
from collections import Counter
from collections.abc import Sequence

from torch import Tensor

_ARTICLES = frozenset(("a", "an", "the"))


def normalised(text: str) -> list[str]:
    """Words without case, punctuation and articles (as SQuAD's evaluation has them)."""
    folded = unicodedata.normalize("NFKC", text).casefold()
    spaced = "".join(" " if mark in string.punctuation else mark for mark in folded)
    return [word for word in spaced.split() if word not in _ARTICLES]


def exact(answer: str, gold: Sequence[str]) -> bool:
    """Whether the answer holds a gold answer as whole words."""
    words = normalised(answer)
    return any(_holds(words, normalised(one)) for one in gold)


def _holds(words: list[str], wanted: list[str]) -> bool:
    count = len(wanted)
    return bool(wanted) and any(
        words[start : start + count] == wanted for start in range(len(words) - count + 1)
    )


def f1(answer: str, gold: Sequence[str]) -> float:
    """Overlap of words with the best gold answer: 2 · common / (words of both)."""
    words = Counter(normalised(answer))
    best = 0.0
    for one in gold:
        wanted = Counter(normalised(one))
        common = sum((words & wanted).values())
        if common:
            best = max(best, 2 * common / (words.total() + wanted.total()))
    return best


def divergence(full: Tensor, other: Tensor) -> float:
    """KL(full || other) in nats, mean over tokens; log-probabilities [tokens, vocab]."""
    difference = full.double() - other.double()
    return float((full.double().exp() * difference).sum(dim=-1).mean())


def agreement(full: Tensor, other: Tensor) -> float:
    """Share of tokens at which both have the same likeliest token."""
    return float((full.argmax(dim=-1) == other.argmax(dim=-1)).float().mean())


def nll(scores: Tensor, answer: Sequence[int]) -> float:
    """Negative log-likelihood of an answer, nats a token; scores as above."""
    chosen = scores.new_tensor(answer, dtype=None).long()[:, None]
    return -float(scores.double().gather(1, chosen).mean())
