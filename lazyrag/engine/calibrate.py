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
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from lazyrag_kernels.attention import Pages
from torch import Tensor

from lazyrag.engine.encode import Encoder, length_batches
from lazyrag.engine.passes import Passes, Trial, write_nodes
from lazyrag.engine.pool import PagePool, page_size_on
from lazyrag.errors import RequestError
from lazyrag.model.load import LoadedModel
from lazyrag.prompt.segments import LiveRun, NodeRun, Run, place
from lazyrag.quality.calibration import Calibration, recall, remember
from lazyrag.quality.choice import Head
from lazyrag.types import NodeKey

HEADS = 4
"""So many heads choose together."""
NODES = 8
"""In a made-up prompt."""
QUESTIONS = 32
WINDOW, WORDS = 20, 6
"""Of so many neighbouring words the rarest so many are asked for."""
LONGEST = 400
"""Longer nodes are passed over: a prompt has to stay short."""


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
    """Made-up questions; a text comes again when fewer than `NODES` others are left.

    Raises:
        RequestError: there are too few different texts with enough words.
    """
    usable = [text for text in dict.fromkeys(texts) if len(_words(text)) >= 2 * WORDS]
    if len(usable) < NODES:
        raise RequestError(
            f"{len(usable)} texts of at least {2 * WORDS} words are too few to calibrate with: "
            f"{NODES} are needed. Ingest more documents first."
        )
    common = Counter(word for text in usable for word in set(_words(text)))
    chooser = random.Random(seed)
    waiting: list[str] = []
    made = []
    for _ in range(count):
        if len(waiting) < NODES:
            rest = [text for text in usable if text not in waiting]
            waiting += chooser.sample(rest, len(rest))
        nodes, waiting = waiting[:NODES], waiting[NODES:]
        answer = chooser.randrange(NODES)
        words = _words(nodes[answer])
        start = chooser.randrange(max(1, len(words) - WINDOW))
        window = list(dict.fromkeys(words[start : start + WINDOW]))
        rare = sorted(window, key=lambda word: (common[word], word))[:WORDS]
        made.append(Riddle(tuple(nodes), answer, tuple(chooser.sample(rare, len(rare)))))
    return made


def riddles_of(
    model: LoadedModel, texts: Sequence[str], questions: int = QUESTIONS
) -> list[Riddle]:
    """`riddles` over the texts that are short enough for this model's prompts."""
    short = [text for text in texts if len(model.tokenizer.encode_text(text)) <= LONGEST]
    return riddles(short, questions)


def _words(text: str) -> list[str]:
    return re.findall(r"\w+", text.casefold())


def calibrate(
    model: LoadedModel,
    sink: tuple[int, ...],
    texts: Sequence[str],
    *,
    questions: int = QUESTIONS,
    progress: Callable[[int, int], None] | None = None,
) -> Calibration:
    """Find the heads.

    Args:
        model: a loaded checkpoint.
        sink: ids that nodes are encoded behind.
        texts: of the user's nodes.
        questions: how many are made up.
        progress: called with (questions done, questions in all).

    Raises:
        RequestError: too few texts.
    """
    asked = riddles_of(model, texts, questions)
    page = page_size_on(model.device)
    live = len(sink) + 64 + NODES * 8
    room = (LONGEST + page) * NODES + live + 2 * page
    pool = PagePool(
        model.geometry,
        pages=-(-room // page),
        page_size=page,
        dtype=model.dtype,
        device=model.device,
    )
    encoder = Encoder(model, sink, model.dtype)
    passes = Passes(model, pool)
    layers = range(len(model.geometry.layers))
    q_heads = model.geometry.all_heads.q_heads
    total = torch.zeros(len(layers), q_heads, dtype=torch.float64)
    for number, riddle in enumerate(asked):
        trial = _placed(model, encoder, pool, sink, riddle)
        try:
            (masses,) = passes.look([trial], layers)
        finally:
            for pages in trial.pages:
                pool.release(pages)
        total += torch.stack([_share(masses[layer], riddle.answer) for layer in layers])
        if progress is not None:
            progress(number + 1, len(asked))
    shares = total / len(asked)
    best = shares.flatten().argsort(descending=True, stable=True)[:HEADS].tolist()
    heads = [Head(*divmod(index, q_heads)) for index in best]
    return Calibration(
        tuple(heads), tuple(float(shares[head.layer, head.head]) for head in heads), len(asked)
    )


def _share(mass: Tensor, answer: int) -> Tensor:
    """fp64 [q_heads] of [q_heads, rows, nodes]: what the right node gets of all nodes' weight."""
    weights = mass.double().mean(dim=1)
    return weights[:, answer] / weights.sum(dim=-1).clamp_min(1e-30)


def _placed(
    model: LoadedModel, encoder: Encoder, pool: PagePool, sink: tuple[int, ...], riddle: Riddle
) -> Trial:
    tokenizer = model.tokenizer
    between = tuple(tokenizer.encode_text("\n\n"))
    asking = tokenizer.encode_text(
        f"Question: Which of the documents is about {' '.join(riddle.words)}?\nAnswer:"
    )
    nodes = [tuple(tokenizer.encode_text(text)) for text in riddle.texts]
    runs: list[Run] = [LiveRun(sink)] if sink else []
    for number, ids in enumerate(nodes):
        runs += [NodeRun(NodeKey(bytes([number]) * 32), ids, len(ids)), LiveRun(between)]
    held: dict[int, Pages] = {}
    for batch in length_batches([len(ids) for ids in nodes]):
        for index, kv in zip(batch, encoder.encode([nodes[i] for i in batch]), strict=True):
            pages = pool.allocate(len(kv.ids))
            assert pages is not None
            write_nodes(pool, model.geometry, [kv], [pages])
            held[index] = pages
    prompt = place([*runs, LiveRun(tuple(asking))])
    return Trial(prompt, tuple(held[number] for number in range(len(nodes))))


def calibrated(model: LoadedModel, sink: tuple[int, ...], texts: Sequence[str]) -> Calibration:
    """The kept calibration of a checkpoint, or a new one, which is kept.

    Raises:
        RequestError: as `calibrate`.
    """
    found = recall(model)
    if found is None:
        found = calibrate(model, sink, texts)
        remember(model, found)
    return found
