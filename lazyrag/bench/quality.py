"""Answer quality and work of many ways to treat the nodes of a prompt, example by example."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace

from torch import Tensor

from lazyrag.bench import quality_metrics as metrics
from lazyrag.bench.quality_case import LOOKING, PAGE, Case
from lazyrag.bench.quality_data import Example, bm25_ranking
from lazyrag.bench.quality_rows import Row
from lazyrag.bench.quality_settings import (
    FAST,
    FULL,
    OWN_SINK,
    Chooser,
    Setting,
    Told,
    Use,
)
from lazyrag.engine.encode import Encoder
from lazyrag.engine.fill import PageFiller
from lazyrag.engine.library import last_ids
from lazyrag.engine.passes import Passes, Reading, write_nodes
from lazyrag.engine.pool import PagePool
from lazyrag.engine.sink import sink_ids
from lazyrag.errors import RequestError
from lazyrag.model.load import LoadedModel
from lazyrag.prompt.segments import LiveRun, NodeRun
from lazyrag.quality import choice
from lazyrag.quality.choice import Head
from lazyrag.quality.scale import PLAIN
from lazyrag.quality.words import WordRanking

GROUP = {"cpu": 1, "cuda": 12}
"""Examples that share forward passes, by type of device."""
ENCODED_TOKENS = {"cpu": 1024, "cuda": 16384}
"""Padded tokens of one pass that encodes nodes, by type of device."""


class QualityBench:
    """Runs settings on examples with one model.

    Args:
        model: a loaded checkpoint.
        heads: whose attention chooses nodes.
        pool_tokens: room for the nodes and the live text of the examples of one call.
        greedy_tokens: of the greedy text; 0 = none is written.
        written: names of the settings for which a text is written.
    """

    def __init__(
        self,
        model: LoadedModel,
        *,
        heads: Sequence[Head],
        pool_tokens: int,
        greedy_tokens: int = 32,
        written: Collection[str] = (),
    ) -> None:
        self._model = model
        self._written = written
        self._heads = heads
        self._layers = frozenset(head.layer for head in heads)
        self._greedy_tokens = greedy_tokens
        self._pool = PagePool(
            model.geometry,
            pages=pool_tokens // PAGE,
            page_size=PAGE,
            dtype=model.dtype,
            device=model.device,
        )
        self._filler = PageFiller(self._pool, model.geometry)
        self._plain = Passes(model, self._pool)
        self._scaled = Passes(model, self._pool, scaled=True)
        self._words = WordRanking(model.tokenizer)
        self._encoders: dict[tuple[int, ...], Encoder] = {}
        self._batch = ENCODED_TOKENS["cpu" if model.device.type == "cpu" else "cuda"]

    def run(
        self, examples: Sequence[Example], settings: Sequence[Setting], *, timed: bool = False
    ) -> Iterator[Row]:
        """Measure; all the examples of a call share forward passes.

        Args:
            examples: few enough that the pool holds them.
            settings: `FULL` and `NO_DOCUMENTS` are among them.
            timed: also the time to first token of every setting, each read alone.

        Raises:
            RequestError: an example does not fit the context window or the pool.
        """
        looking = (max(self._layers) + 1) / len(self._model.geometry.layers)
        cases = [
            Case.read(self._model, example, looking, self._greedy_tokens) for example in examples
        ]
        try:
            for sink, told in sorted(_encodings(settings)):
                self._encode(cases, sink, told)
            self._rank(cases)
            yield from self._measure(cases, settings, timed)
        finally:
            for case in cases:
                for held in case.pages.values():
                    for pages in held.values():
                        self._pool.release(pages)

    # preparing

    def _new_tokens(self, case: Case) -> int:
        return max(self._greedy_tokens, *map(len, case.answers))

    def _sink(self, sink: str, case: Case) -> tuple[int, ...]:
        tokenizer = self._model.tokenizer
        if sink == OWN_SINK:
            first = case.runs[0]
            return first.ids if isinstance(first, LiveRun) else ()
        return sink_ids(sink, tokenizer)

    def _encode(self, cases: Sequence[Case], sink: str, told: Told) -> None:
        """Nodes of all cases behind a sink and what they are told, into the pool."""
        waiting: dict[tuple[int, ...], list[tuple[Case, NodeRun]]] = {}
        for case in cases:
            case.pages[sink, told] = {}
            ids = self._sink(sink, case)
            own = waiting.setdefault(ids, [])
            for number, node in enumerate(case.nodes):
                before = self._model.tokenizer.encode_text(case.example.before(number, told))
                room = self._model.geometry.max_positions - len(ids) - len(node.ids)
                own.append((case, replace(node, behind=last_ids(before, room))))
        for ids, owned in waiting.items():
            if ids not in self._encoders:
                self._encoders[ids] = Encoder(self._model, ids, self._model.dtype)
            owned.sort(key=lambda one: one[1].tokens_to_compute)
            for first, stop in _batches([node.tokens_to_compute for _, node in owned], self._batch):
                batch = owned[first:stop]
                encoded = self._encoders[ids].encode(
                    [node.ids for _, node in batch], [node.behind for _, node in batch]
                )
                places = []
                for case, node in batch:
                    pages = self._pool.allocate(len(node.ids))
                    if pages is None:
                        raise RequestError("the pool is too small for these examples.")
                    case.pages[sink, told][node.key] = pages
                    places.append(pages)
                write_nodes(self._filler, encoded, places)

    def _rank(self, cases: Sequence[Case]) -> None:
        trials = [case.trial(FAST)[0] for case in cases]
        masses = self._plain.look(trials, self._layers)
        for case, mass in zip(cases, masses, strict=True):
            example = case.example
            order = list(range(len(example.texts)))
            retrieved = bm25_ranking(example.question, example.texts)
            attended = choice.by_heads(mass, self._heads)
            told = self._words.rank(case.runs)
            shuffled = random.Random(example.seed).sample(order, len(order))
            case.rankings = {
                Chooser.RETRIEVER: retrieved,
                Chooser.ATTENTION: attended,
                Chooser.WORDS: order if told is None else told,
                Chooser.BOTH: attended if told is None else choice.together(told, attended),
                Chooser.RANDOM: shuffled,
                Chooser.GOLD: sorted(
                    order, key=lambda node: (node not in example.gold, retrieved.index(node))
                ),
            }

    # measuring

    def _measure(
        self, cases: Sequence[Case], settings: Sequence[Setting], timed: bool
    ) -> Iterator[Row]:
        jobs = [(case, setting) for case in cases for setting in settings]
        made = [case.trial(setting) for case, setting in jobs]
        room = max(self._new_tokens(case) for case in cases)
        readings: list[Reading | None] = [None] * len(jobs)
        scaled = [trial.scale != PLAIN for trial, _ in made]
        results: list[_Result] = [_Result() for _ in jobs]
        for passes, wanted in ((self._plain, False), (self._scaled, True)):
            numbers = [number for number, one in enumerate(scaled) if one is wanted]
            if not numbers:
                continue
            read = passes.read([made[number][0] for number in numbers], room)
            try:
                for number, reading in zip(numbers, read, strict=True):
                    readings[number] = reading
                self._answers(passes, jobs, numbers, readings, results)
            finally:
                passes.close(read)
        times = [self._time(case, setting) if timed else -1.0 for case, setting in jobs]
        full = {
            id(case): result
            for (case, setting), result in zip(jobs, results, strict=True)
            if setting == FULL
        }
        for (case, setting), (_, tokens), result, ttft in zip(
            jobs, made, results, times, strict=True
        ):
            yield _row(case, setting, tokens, result, full[id(case)], ttft)

    def _answers(
        self,
        passes: Passes,
        jobs: Sequence[tuple[Case, Setting]],
        numbers: Sequence[int],
        readings: Sequence[Reading | None],
        results: Sequence[_Result],
    ) -> None:
        for which in range(max(len(jobs[number][0].answers) for number in numbers)):
            having = [number for number in numbers if which < len(jobs[number][0].answers)]
            behind = [reading for number in having if (reading := readings[number]) is not None]
            answers = [jobs[number][0].answers[which] for number in having]
            scores = passes.score(behind, answers)
            for number, answer, one in zip(having, answers, scores, strict=True):
                results[number].nll.append(metrics.nll(one, answer))
                results[number].scores.append(one)
        writing = [number for number in numbers if jobs[number][1].name in self._written]
        if self._greedy_tokens and writing:
            behind = [reading for number in writing if (reading := readings[number]) is not None]
            written = passes.greedy(behind, self._greedy_tokens, self._model.eos_ids)
            for number, ids in zip(writing, written, strict=True):
                results[number].text = self._model.tokenizer.decode(ids)

    def _time(self, case: Case, setting: Setting) -> float:
        """Seconds from the prompt as runs to the logits of the first token, nodes in memory."""
        passes = self._plain if setting.scale == PLAIN else self._scaled
        started = time.perf_counter()
        if setting.chooser in LOOKING:
            self._rank([case])
        (reading,) = read = passes.read([case.trial(setting)[0]], 1)
        int(reading.logits.argmax())
        seconds = time.perf_counter() - started
        passes.close(read)
        return seconds


@dataclass(slots=True, eq=False)
class _Result:
    """Of each gold answer NLL and distributions, and the greedy text, if one was written."""

    nll: list[float] = field(default_factory=list)
    scores: list[Tensor] = field(default_factory=list)
    text: str | None = None


def _row(
    case: Case, setting: Setting, tokens: float, result: _Result, full: _Result, ttft: float
) -> Row:
    example = case.example
    best = min(range(len(full.nll)), key=full.nll.__getitem__)
    chosen = set(case.chosen(setting))
    found = len(chosen & example.gold) / len(example.gold) if chosen and example.gold else -1.0
    return Row(
        set=example.set,
        id=example.id,
        half=example.half,
        setting=setting.name,
        nll=min(result.nll),
        kl=metrics.divergence(full.scores[best], result.scores[best]),
        top1=metrics.agreement(full.scores[best], result.scores[best]),
        same_text=-1 if result.text is None else int(result.text == full.text),
        em=-1 if result.text is None else int(metrics.exact(result.text, example.answers)),
        f1=-1.0 if result.text is None else metrics.f1(result.text, example.answers),
        tokens=tokens,
        work=tokens / case.full_tokens,
        gold=found,
        ttft_s=ttft,
    )


def _encodings(settings: Sequence[Setting]) -> set[tuple[str, Told]]:
    """Everything that nodes have to be encoded behind."""
    reused = [setting for setting in settings if setting.use is not Use.ANEW]
    return {(setting.sink, setting.told) for setting in (FAST, *reused)}


def _batches(lengths: Sequence[int], limit: int) -> Iterator[tuple[int, int]]:
    """Of ascending lengths ranges [first, stop) whose padded tokens stay within the limit."""
    first = 0
    for index, length in enumerate(lengths):
        if index > first and length * (index + 1 - first) > limit:
            yield first, index
            first = index
    if lengths:
        yield first, len(lengths)


def _pool_tokens(
    model: LoadedModel, examples: Sequence[Example], settings: Sequence[Setting]
) -> int:
    """Room that any of the examples needs: nodes behind every sink, live text of every setting."""
    count = model.tokenizer.encode_text
    longest = max(sum(len(count(text)) for text in example.texts) for example in examples)
    live = sum(
        1.0 if setting.use is Use.ANEW else 0.5 if setting.use is not Use.REUSED else 0.0
        for setting in settings
    )
    pages = 2 * PAGE * max(len(example.texts) for example in examples)
    held = len(_encodings(settings))
    return int((longest + pages) * (held + live) + 1024 * len(settings))


def measure(
    model: LoadedModel,
    examples: Sequence[Example],
    settings: Sequence[Setting],
    heads: Sequence[Head],
    *,
    greedy_tokens: int,
    timed: int = 0,
    done: Callable[[Sequence[Row], int], None],
) -> list[Row]:
    """Run all settings on all examples.

    Args:
        model: a loaded checkpoint.
        examples: of any sets.
        settings: `FULL` and `NO_DOCUMENTS` among them.
        heads: whose attention chooses nodes.
        greedy_tokens: of the text written for each setting; 0 = none is.
        timed: of so many examples also the time to first token is measured.
        done: called with the rows of each group of examples and how many examples are done.

    Raises:
        RequestError: an example does not fit.
    """
    group = GROUP["cpu" if model.device.type == "cpu" else "cuda"]
    bench = QualityBench(
        model,
        heads=heads,
        pool_tokens=group * _pool_tokens(model, examples, settings),
        greedy_tokens=greedy_tokens,
        written=[setting.name for setting in settings],
    )
    rows: list[Row] = []
    for first in range(0, len(examples), group):
        part = examples[first : first + group]
        made = list(bench.run(part, settings, timed=first < timed))
        rows += made
        done(made, first + len(part))
    return rows
