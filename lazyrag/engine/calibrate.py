"""Finding, without labels, the heads of a checkpoint that look for what a question asks for.

Made-up questions over the user's own nodes: a few rare words of one node, out of order, are asked
for among other nodes. A head is worth the share of its attention to nodes that goes to the right
one. Such heads are few and belong to the checkpoint (retrieval heads, arXiv 2404.15574), so that
they are found once and kept in the cache under the digest of the weights.
"""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lazyrag.engine.sink import DOCUMENTS, sink_ids
from lazyrag.errors import RequestError
from lazyrag.model.load import LoadedModel
from lazyrag.quality.calibration import Calibration
from lazyrag.quality.choice import Head
from lazyrag.types import Live, Node, Segment

See = Callable[[Sequence[Segment]], Mapping[int, Tensor]]
"""Of every layer how much the last rows of a prompt attend to its nodes (`MassStep`)."""
HEADS = 4
"""So many heads choose together."""
NODES = 8
"""In a made-up prompt."""
QUESTIONS = 16
WINDOW, WORDS = 20, 6
"""Of so many neighbouring words the rarest so many are asked for."""
LONGEST = 1100
"""Tokens of a node: longer ones are passed over, a prompt has to stay short."""


@dataclass(frozen=True, slots=True)
class Riddle:
    """A made-up question.

    Attributes:
        texts: of the nodes.
        answer: number of the node that is asked for.
        words: what is asked for.
    """

    texts: tuple[str, ...]
    answer: int
    words: tuple[str, ...]


def riddles(texts: Sequence[str], count: int = QUESTIONS, seed: int = 0) -> list[Riddle]:
    """Made-up questions: of `NODES` texts each is asked for once, then of others, so that few nodes
    are needed. A text comes again when fewer than `NODES` others are left.

    Raises:
        RequestError: there are too few different texts with enough words.
    """
    usable = [text for text in dict.fromkeys(texts) if len(_words(text)) >= 2 * WORDS]
    if len(usable) < NODES:
        raise RequestError(
            f"{len(usable)} texts of at least {2 * WORDS} words that are short enough are too few "
            f"to calibrate with: {NODES} are needed. Ingest more documents, or in smaller passages."
        )
    common = Counter(word for text in usable for word in set(_words(text)))
    chooser = random.Random(seed)
    waiting: list[str] = []
    together: list[str] = []
    made = []
    for number in range(count):
        if number % NODES == 0:
            if len(waiting) < NODES:
                rest = [text for text in usable if text not in waiting]
                waiting += chooser.sample(rest, len(rest))
            together, waiting = waiting[:NODES], waiting[NODES:]
        asked = together[number % NODES]
        nodes = chooser.sample(together, NODES)
        words = _words(asked)
        start = chooser.randrange(max(1, len(words) - WINDOW))
        window = list(dict.fromkeys(words[start : start + WINDOW]))
        rare = sorted(window, key=lambda word: (common[word], word))[:WORDS]
        sample = tuple(chooser.sample(rare, len(rare)))
        made.append(Riddle(tuple(nodes), nodes.index(asked), sample))
    return made


def asked(riddle: Riddle, model: LoadedModel) -> list[Segment]:
    """A made-up question as a prompt."""
    segments: list[Segment] = [Live(ids=sink_ids(DOCUMENTS, model.tokenizer))]
    for text in riddle.texts:
        segments += [Node(text=text), Live(text="\n\n")]
    question = f"Question: Which of the documents is about {' '.join(riddle.words)}?\nAnswer:"
    return [*segments, Live(text=question)]


def _words(text: str) -> list[str]:
    return re.findall(r"\w+", text.casefold())


def short_enough(texts: Sequence[str], model: LoadedModel) -> list[str]:
    """Those of at most `longest` tokens."""
    most = longest(model)
    return [text for text in texts if len(model.tokenizer.encode_text(text)) <= most]


def longest(model: LoadedModel) -> int:
    """Tokens of a node that made-up questions may be about: `NODES` and more fit the window."""
    return min(LONGEST, model.geometry.max_positions // (NODES + 2))


def calibrate(
    model: LoadedModel,
    texts: Sequence[str],
    see: See,
    *,
    questions: int = QUESTIONS,
    progress: Callable[[int, int], None] | None = None,
) -> Calibration:
    """Find the heads.

    Args:
        model: a loaded checkpoint.
        texts: of the user's nodes.
        see: reads a prompt.
        questions: how many are made up.
        progress: called with (questions done, questions in all).

    Raises:
        RequestError: too few texts.
    """
    made = riddles(short_enough(texts, model), questions)
    layers, q_heads = len(model.geometry.layers), model.geometry.all_heads.q_heads
    total = torch.zeros(layers, q_heads, dtype=torch.float64)
    for number, riddle in enumerate(made):
        masses = see(asked(riddle, model))
        total += torch.stack([_share(masses[layer], riddle.answer) for layer in range(layers)])
        if progress is not None:
            progress(number + 1, len(made))
    shares = total / len(made)
    best = shares.flatten().argsort(descending=True, stable=True)[:HEADS].tolist()
    heads = [Head(*divmod(index, q_heads)) for index in best]
    return Calibration(
        tuple(heads), tuple(float(shares[head.layer, head.head]) for head in heads), len(made)
    )


def _share(mass: Tensor, answer: int) -> Tensor:
    """fp64 [q_heads] of [q_heads, rows, nodes]: what the right node gets of all nodes' weight."""
    weights = mass.double().mean(dim=1)
    return weights[:, answer] / weights.sum(dim=-1).clamp_min(1e-30)
