"""Which nodes share words with the question: BM25 over the few nodes of one prompt.

Ten passages are too few to tell a rare word from a common one. The tokenizer knows: vocabularies
are made by frequency, so a common word is one token with a small id, a rare one has a large id or
is several tokens. That makes the words of an instruction ("Answer the query:") weigh next to
nothing beside those of the question it introduces.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import pairwise

from lazyrag.prompt.segments import LiveRun, NodeRun, Run
from lazyrag.prompt.tokenise import PromptTokenizer

K1, B = 1.2, 0.75
"""Of BM25, the usual values (Robertson and Zaragoza, 2009)."""
COMMON = 6.0
"""Nats of a word that tells nothing: the first 400 ids are bytes and the commonest words."""
LEAST_WORDS = 2
"""Of a stretch of live text that is taken for a question; one word may be the name of a role."""
KEPT_NODES = 256
"""Nodes whose words are remembered."""

_UNSPACED = (
    "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff"
)
"""Scripts without spaces between words: Thai, Lao, Burmese, Khmer, Japanese, Chinese."""
_WORDS = re.compile(rf"([{_UNSPACED}]+)|[^\W{_UNSPACED}]+")


def words(text: str) -> list[str]:
    """The words of a text, case folded; of a script without spaces every two neighbours."""
    found: list[str] = []
    for match in _WORDS.finditer(text.casefold()):
        whole = match[0]
        if match[1] and len(whole) > 1:
            found += (first + second for first, second in pairwise(whole))
        else:
            found.append(whole)
    return found


def by_words(question: Mapping[str, float], nodes: Sequence[Mapping[str, int]]) -> list[int] | None:
    """Node numbers, the best match first; of equals the first.

    Args:
        question: its words, and what each weighs.
        nodes: how often each word occurs in each; document frequencies are those of these nodes.

    Returns:
        None: the words do not tell any two nodes apart.
    """
    lengths = [sum(counts.values()) for counts in nodes]
    mean = sum(lengths) / max(1, len(lengths)) or 1.0
    scores = [0.0] * len(nodes)
    for word, weight in sorted(question.items()):
        having = sum(word in counts for counts in nodes)
        rarity = weight * math.log(1 + (len(nodes) - having + 0.5) / (having + 0.5))
        for number, counts in enumerate(nodes):
            often = counts.get(word, 0)
            damped = often + K1 * (1 - B + B * lengths[number] / mean)
            scores[number] += rarity * often * (K1 + 1) / damped
    if len(set(scores)) < 2:
        return None
    return sorted(range(len(nodes)), key=lambda number: (-scores[number], number))


class WordRanking:
    """Ranks the nodes of prompts by the words of their questions. Thread-safe.

    Args:
        tokenizer: of the model.
    """

    def __init__(self, tokenizer: PromptTokenizer) -> None:
        self._tokenizer = tokenizer
        self._weight = lru_cache(maxsize=8192)(self._weigh)
        self._counted = lru_cache(maxsize=KEPT_NODES)(self._count)

    def rank(self, runs: Sequence[Run]) -> list[int] | None:
        """Node numbers, the best match first; None: nothing in the prompt tells them apart.

        The question is the last stretch of live text whose words tell nodes apart: behind the nodes
        in most prompts, before them where a template has it first. Control tokens end a stretch, so
        that it reaches no further back than one message.

        Args:
            runs: of the prompt.
        """
        nodes = [self._counted(run.ids[: run.used]) for run in runs if isinstance(run, NodeRun)]
        if len(nodes) < 2:
            return None
        for ids in _stretches_from_the_end(runs, self._tokenizer.control_ids):
            asked = set(words(self._tokenizer.decode(ids)))
            if len(asked) < LEAST_WORDS:
                continue
            ranking = by_words({word: self._weight(word) for word in asked}, nodes)
            if ranking is not None:
                return ranking
        return None

    def _weigh(self, word: str) -> float:
        """Nats of a word by its ids, as far as they are more than those of a common one."""
        ids = self._tokenizer.encode_text(f" {word}")
        return max(0.0, sum(math.log(2 + id) for id in ids) - COMMON)

    def _count(self, ids: tuple[int, ...]) -> Counter[str]:
        return Counter(words(self._tokenizer.decode(ids)))


def _stretches_from_the_end(
    runs: Sequence[Run], control_ids: Collection[int]
) -> Iterator[list[int]]:
    """Live ids between nodes and control tokens, the last ones first."""
    stretch: list[int] = []
    for run in reversed(runs):
        for id in reversed(run.ids) if isinstance(run, LiveRun) else (None,):
            if id is not None and id not in control_ids:
                stretch.append(id)
            elif stretch:
                yield stretch[::-1]
                stretch = []
    if stretch:
        yield stretch[::-1]
