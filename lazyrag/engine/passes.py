"""Several prompts read, scored and continued together, outside the engine's queue.

For measurements: every prompt is read once; any number of answers is then scored behind it, and its
greedy continuation is written.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass

import torch
from lazyrag_kernels.attention import Pages
from torch import Tensor

from lazyrag.engine.attention import paged_attention
from lazyrag.engine.fill import PageFiller
from lazyrag.engine.forward import run
from lazyrag.engine.mass import LayersDone, MassStep, Rows
from lazyrag.engine.pool import PagePool
from lazyrag.engine.sequence import PagedSequence, SeenNode
from lazyrag.errors import RequestError
from lazyrag.model import seam
from lazyrag.model.load import LoadedModel
from lazyrag.prompt.segments import PlacedPrompt
from lazyrag.quality.scale import PLAIN, Scale
from lazyrag.store import StoredKV

PASS_ROWS = {"cpu": 1024, "cuda": 4096}
"""Tokens of one forward pass, at most, by type of device."""


@dataclass(frozen=True, slots=True, eq=False)
class Trial:
    """A prompt to run.

    Attributes:
        prompt: placed; its last token is live.
        pages: of each placed node, where its rotated K and V lie.
        scale: of attention to the nodes.
    """

    prompt: PlacedPrompt
    pages: tuple[Pages, ...]
    scale: Scale = PLAIN


Wrapper = Callable[[seam.AttentionStep, Sequence[Rows]], seam.AttentionStep]
"""Puts a measuring step around the attention of one pass over some rows."""


@dataclass(slots=True, eq=False)
class Reading:
    """A prompt that was read.

    Attributes:
        trial: what was read.
        sequence: its place in the pool.
        logits: fp32 [vocab], behind the last token of the prompt.
    """

    trial: Trial
    sequence: PagedSequence
    logits: Tensor


class Passes:
    """Packs the tokens of many prompts into few forward passes. Not thread-safe.

    Args:
        model: a loaded checkpoint.
        pool: holds nodes and live text; nobody else uses it meanwhile.
        scaled: trials may have a scale.
    """

    def __init__(self, model: LoadedModel, pool: PagePool, *, scaled: bool = False) -> None:
        self._model = model
        self._pool = pool
        self._paged = paged_attention(pool, model.geometry, scaled=scaled)
        self._rows = PASS_ROWS["cpu" if model.device.type == "cpu" else "cuda"]

    @torch.inference_mode()
    def read(
        self, trials: Sequence[Trial], new_tokens: int, wrap: Wrapper | None = None
    ) -> list[Reading]:
        """Read every prompt and keep room for ``new_tokens`` behind each.

        Raises:
            RequestError: the pool cannot hold them all; nothing is held then.
        """
        readings: list[Reading] = []
        try:
            for trial in trials:
                readings.append(Reading(trial, self._sequence(trial, new_tokens), torch.empty(0)))
            pieces = [
                (number, first)
                for number, trial in enumerate(trials)
                for first in range(0, len(trial.prompt.live_ids), self._rows)
            ]
            lengths = [len(trials[number].prompt.live_ids) for number, _ in pieces]
            for group in _packed(
                [
                    min(self._rows, length - first)
                    for (_, first), length in zip(pieces, lengths, strict=True)
                ],
                self._rows,
            ):
                rows: list[Rows] = []
                for index in group:
                    number, first = pieces[index]
                    prompt, chunk = trials[number].prompt, slice(first, first + self._rows)
                    sequence = readings[number].sequence
                    rows.append((sequence, prompt.live_ids[chunk], prompt.live_positions[chunk]))
                logits = self._forward(rows, [1] * len(rows), wrap)
                for index, scores in zip(group, logits, strict=True):  # the last chunk stays
                    readings[pieces[index][0]].logits = scores[0]
        except BaseException:
            self.close(readings)
            raise
        return readings

    def look(self, trials: Sequence[Trial], layers: Collection[int]) -> list[dict[int, Tensor]]:
        """Read prompts, up to the last of ``layers``, to see which nodes their last rows attend to.

        Returns:
            Of each, by layer, fp32 [q_heads, rows, nodes], see `MassStep`.

        Raises:
            ValueError: a prompt's live text does not fit one pass.
        """
        found: dict[PagedSequence, dict[int, Tensor]] = {}
        pool, geometry = self._pool, self._model.geometry

        def measured(step: seam.AttentionStep, rows: Sequence[Rows]) -> MassStep:
            made = MassStep(step, rows, pool, geometry, layers, stop=True, ranks=self._model.ranks)
            owners = [sequence for sequence, _, _ in rows]
            found.update(zip(owners, made.masses, strict=True))
            return made

        readings = self.read(trials, 1, measured)
        self.close(readings)
        return [found[reading.sequence] for reading in readings]

    def close(self, readings: Sequence[Reading]) -> None:
        """Give the pages of live text back."""
        for reading in readings:
            self._pool.release(reading.sequence.live_pages)

    @torch.inference_mode()
    def score(self, readings: Sequence[Reading], answers: Sequence[Sequence[int]]) -> list[Tensor]:
        """The distribution at every token of an answer, given the prompt and the tokens before it.

        Args:
            readings: each once.
            answers: of each reading ids, at least one.

        Returns:
            Of each reading log-probabilities, fp32 [tokens of its answer, vocab].
        """
        heads = [reading.logits[None] for reading in readings]
        long = [number for number, answer in enumerate(answers) if len(answer) > 1]
        for group in _packed([len(answers[number]) - 1 for number in long], self._rows):
            rows: list[Rows] = []
            for number in (long[index] for index in group):
                first, given = readings[number].trial.prompt.next_position, answers[number][:-1]
                rows.append((readings[number].sequence, given, range(first, first + len(given))))
            rest = self._forward(rows, [len(given) for _, given, _ in rows])
            for index, scores in zip(group, rest, strict=True):
                heads[long[index]] = torch.cat((heads[long[index]], scores))
        self._rewind(readings)
        return [head.log_softmax(dim=-1) for head in heads]

    @torch.inference_mode()
    def greedy(
        self, readings: Sequence[Reading], tokens: int, ends: Collection[int]
    ) -> list[list[int]]:
        """The likeliest continuation of every prompt, up to an end token, which is left out."""
        written: list[list[int]] = [[] for _ in readings]
        following = [int(reading.logits.argmax()) for reading in readings]
        for step in range(tokens):
            going = []
            for number, token in enumerate(following):
                if len(written[number]) == step and token not in ends:
                    written[number].append(token)
                    going.append(number)
            if not going or step == tokens - 1:
                break
            for group in _packed([1] * len(going), self._rows):
                numbers = [going[index] for index in group]
                rows: list[Rows] = []
                for number in numbers:
                    position = readings[number].trial.prompt.next_position + step
                    rows.append((readings[number].sequence, (following[number],), (position,)))
                likeliest = torch.stack(
                    [scores[0] for scores in self._forward(rows, [1] * len(rows))]
                ).argmax(dim=-1)
                for number, token in zip(numbers, likeliest.tolist(), strict=True):
                    following[number] = token
        self._rewind(readings)
        return written

    def _rewind(self, readings: Sequence[Reading]) -> None:
        for reading in readings:
            reading.sequence.rewind(len(reading.trial.prompt.live_ids))

    def _sequence(self, trial: Trial, new_tokens: int) -> PagedSequence:
        capacity = len(trial.prompt.live_ids) + new_tokens
        pages = self._pool.allocate(capacity)
        if pages is None:
            raise RequestError(
                f"the pool has no room for {capacity:,} more tokens: give it more memory."
            )
        nodes = [
            SeenNode(where, node.run.used, node.offset, node.first_row)
            for where, node in zip(trial.pages, trial.prompt.nodes, strict=True)
        ]
        return PagedSequence(
            self._pool,
            nodes,
            pages,
            capacity,
            scale=trial.scale,
        )

    def _forward(
        self,
        rows: Sequence[Rows],
        wanted: Sequence[int],
        wrap: Wrapper | None = None,
    ) -> list[Tensor]:
        """One pass; of the last ``wanted`` tokens of each entry logits, fp32 [wanted, vocab]."""
        step = self._paged.step([sequence.rows(positions) for sequence, _, positions in rows])
        if wrap is not None:
            step = wrap(step, rows)
        ids = [id for _, tokens, _ in rows for id in tokens]
        index: list[int] = []
        stop = 0
        for (_, tokens, _), count in zip(rows, wanted, strict=True):
            stop += len(tokens)
            index += range(stop - count, stop)
        try:
            logits = run(self._model, ids, step, index)
        except LayersDone:  # who wraps the attention has seen enough
            logits = torch.empty(len(index), 0)
        return list(logits.split(list(wanted)))


def write_nodes(filler: PageFiller, encoded: Sequence[StoredKV], places: Sequence[Pages]) -> None:
    """Many nodes at once, each into its pages."""
    k, v = (
        torch.cat(parts, dim=1) for parts in zip(*((kv.k, kv.v) for kv in encoded), strict=True)
    )
    lengths = [len(kv.ids) for kv in encoded]
    filler.fill_all(k, v, list(zip(places, lengths, strict=True)))


def _packed(sizes: Sequence[int], limit: int) -> Iterator[list[int]]:
    """Indices in order, in groups whose sizes add up to at most ``limit`` (or one index)."""
    group: list[int] = []
    total = 0
    for index, size in enumerate(sizes):
        if group and total + size > limit:
            yield group
            group, total = [], 0
        group.append(index)
        total += size
    if group:
        yield group
