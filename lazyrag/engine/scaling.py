"""Finding, without labels, how strongly a checkpoint should attend to reused nodes.

Full attention writes a few tokens behind made-up questions over the user's own nodes; the scale
(temperature and group scale, APE, arXiv 2502.05431) under which reuse is nearest to its next-token
distributions there is the one to serve with, if it is nearer than plain attention beyond doubt.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence

import torch
from lazyrag_kernels.attention import Pages
from torch import Tensor

from lazyrag.engine.calibrate import NODES, longest
from lazyrag.engine.climb import Ladder
from lazyrag.engine.encode import Encoder, length_batches
from lazyrag.engine.fill import PageFiller
from lazyrag.engine.passes import Passes, Trial
from lazyrag.engine.pool import PagePool, page_size_on
from lazyrag.model.load import LoadedModel
from lazyrag.prompt.segments import NodeRun, Run, as_live, place
from lazyrag.quality.moves import rearranged
from lazyrag.quality.scale import PLAIN, Scale
from lazyrag.types import NodeKey, Quality

QUESTIONS = 16
"""Two groups of nodes, each node asked for once."""
TOKENS = 12
"""That full attention writes behind each."""
GRID = (
    PLAIN,
    *(Scale(one, one) for one in (0.95, 0.9, 0.8)),
    *(Scale(one, 1.0) for one in (0.9, 0.8)),
    *(Scale(1.0, one) for one in (0.9, 0.8)),
)
CERTAIN = 2.0
"""Standard errors by which a scale must be nearer to full attention than `PLAIN`."""

OnDevice = Callable[[Callable[[], dict[Quality, list[float]]]], dict[Quality, list[float]]]
"""Runs forward passes where nothing else is in their way."""


def find_scales(
    model: LoadedModel,
    sink: tuple[int, ...],
    ladder: Ladder,
    prompts: Sequence[Sequence[Run]],
    on_device: OnDevice,
    progress: Callable[[int, int], None] | None = None,
) -> dict[Quality, Scale]:
    """The scale of every quality that one helps.

    Args:
        model: a loaded checkpoint.
        sink: ids that nodes are encoded behind.
        ladder: calibrated; says which nodes a quality computes anew.
        prompts: made-up questions over `NODES` nodes each; the last run is live.
        on_device: see there.
        progress: called with (questions done, questions in all).
    """
    bench = _Bench(model, sink, ladder)
    found: dict[Quality, list[list[float]]] = {}
    for number, runs in enumerate(prompts):
        measured = on_device(lambda runs=runs: bench.divergences(runs))  # type: ignore[misc]
        for quality, divergences in measured.items():
            found.setdefault(quality, []).append(divergences)
        if progress is not None:
            progress(number + 1, len(prompts))
    chosen = {quality: best(rows) for quality, rows in found.items()}
    return {quality: scale for quality, scale in chosen.items() if scale != PLAIN}


def best(divergences: Sequence[Sequence[float]]) -> Scale:
    """Of `GRID` the scale with the least mean divergence; `PLAIN` unless it is certainly less.

    Args:
        divergences: of every question, for every scale of `GRID`.
    """
    means = [statistics.fmean(column) for column in zip(*divergences, strict=True)]
    least = min(range(len(GRID)), key=means.__getitem__)
    gains = [row[GRID.index(PLAIN)] - row[least] for row in divergences]
    if len(gains) < 2:
        return PLAIN
    error = statistics.stdev(gains) / math.sqrt(len(gains))
    return GRID[least] if statistics.fmean(gains) > CERTAIN * error else PLAIN


class _Bench:
    """Reads made-up prompts in full and over reused nodes, in a pool of its own."""

    def __init__(self, model: LoadedModel, sink: tuple[int, ...], ladder: Ladder) -> None:
        page = page_size_on(model.device)
        most = longest(model)
        live = len(GRID) * (NODES * most // 4 + 512) + NODES * most + 512
        nodes = 2 * NODES * (most + page)
        self._model = model
        self._ladder = ladder
        self._pool = PagePool(
            model.geometry,
            pages=-(-(live + nodes) // page),
            page_size=page,
            dtype=model.dtype,
            device=model.device,
        )
        self._filler = PageFiller(self._pool, model.geometry)
        self._encoder = Encoder(model, sink, model.dtype)
        self._passes = Passes(model, self._pool, scaled=True)
        self._held: dict[NodeKey, Pages] = {}

    def divergences(self, runs: Sequence[Run]) -> dict[Quality, list[float]]:
        """KL to full attention in the same order, mean over tokens that it writes, by scale."""
        self._hold([run for run in runs if isinstance(run, NodeRun)])
        found: dict[Quality, list[float]] = {}
        for quality in (Quality.FAST, Quality.BALANCED):
            read, order = self._on_rung(runs, quality)
            (reading,) = self._passes.read([self._trial(as_live(list(order)))], TOKENS)
            (written,) = self._passes.greedy([reading], TOKENS, self._model.eos_ids)
            full = self._passes.score([reading], [written])[0] if written else None
            self._passes.close([reading])
            if full is None:
                continue
            readings = self._passes.read([self._trial(read, scale) for scale in GRID], TOKENS)
            scores = self._passes.score(readings, [written] * len(GRID))
            self._passes.close(readings)
            found[quality] = [_divergence(full, one) for one in scores]
        return found

    def _on_rung(self, runs: Sequence[Run], quality: Quality) -> tuple[list[Run], list[Run]]:
        """The prompt as a quality reads it, and as given but in the order of that."""
        climb = self._ladder.climb(runs, quality)
        if climb is None:
            return list(runs), list(runs)
        masses = None
        if climb.heads:
            (masses,) = self._passes.look([self._trial(runs)], climb.layers)
        climbed, _ = climb.reach(masses)
        order = [0 if one.given is None else one.given for one in climbed.nodes]
        return climbed.runs, rearranged(runs, order)

    def _trial(self, runs: Sequence[Run], scale: Scale = PLAIN) -> Trial:
        prompt = place(list(runs))
        return Trial(prompt, tuple(self._held[node.run.key] for node in prompt.nodes), scale)

    def _hold(self, nodes: Sequence[NodeRun]) -> None:
        """Encode what is not held; give back what is not needed."""
        needed = {node.key: node for node in nodes}
        for key in [key for key in self._held if key not in needed]:
            self._pool.release(self._held.pop(key))
        missing = [node for key, node in needed.items() if key not in self._held]
        for batch in length_batches([node.tokens_to_compute for node in missing]):
            encoded = self._encoder.encode(
                [missing[number].ids for number in batch],
                [missing[number].behind for number in batch],
            )
            for number, kv in zip(batch, encoded, strict=True):
                pages = self._pool.allocate(len(kv.ids))
                assert pages is not None, "the pool was made for it"
                self._filler.fill(kv.k, kv.v, pages)
                self._held[missing[number].key] = pages


@torch.inference_mode()
def _divergence(full: Tensor, other: Tensor) -> float:
    """KL in nats of log-probabilities fp32 [tokens, vocab], mean over tokens."""
    return float((full.exp() * (full - other)).sum(dim=-1).mean())
