"""Answer quality and work of many ways to treat the nodes of a prompt, example by example."""

from __future__ import annotations

import hashlib
import random
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field

from lazyrag_kernels.attention import Pages
from torch import Tensor

from lazyrag.bench import quality_metrics as metrics
from lazyrag.bench.answers import SYSTEM, USER
from lazyrag.bench.quality_data import Example, bm25_ranking
from lazyrag.bench.quality_rows import Row
from lazyrag.bench.quality_settings import (
    FAST,
    FULL,
    LOOK,
    OWN_SINK,
    Chooser,
    Kept,
    Setting,
    Use,
)
from lazyrag.engine.encode import Encoder
from lazyrag.engine.passes import Passes, Reading, Trial, write_nodes
from lazyrag.engine.pool import PagePool
from lazyrag.engine.sink import sink_ids
from lazyrag.errors import RequestError
from lazyrag.model.load import LoadedModel
from lazyrag.prompt.read import FoundNode, FoundTexts, PromptReader
from lazyrag.prompt.segments import LiveRun, NodeRun, NodeSource, Run, as_live, place
from lazyrag.prompt.tokenise import PromptTokenizer
from lazyrag.quality import choice, moves
from lazyrag.quality.choice import Head
from lazyrag.quality.moves import Offsets
from lazyrag.types import NodeKey

PAGE = 16
"""Tokens a page; also what ``heads anew`` computes of each node."""
LOOKING = frozenset((Chooser.ATTENTION, Chooser.BOTH))
"""Choosers that read the question once to measure its attention."""
GROUP = {"cpu": 1, "cuda": 12}
"""Examples that share forward passes, by type of device."""
ENCODED_TOKENS = {"cpu": 1024, "cuda": 16384}
"""Padded tokens of one pass that encodes nodes, by type of device."""


class _Texts:
    """Finds the texts of one example in its prompt."""

    def __init__(self, tokenizer: PromptTokenizer, texts: Sequence[str]) -> None:
        self._tokenizer = tokenizer
        self._texts = texts

    def find(self, content: str) -> FoundTexts:
        """See `lazyrag.prompt.read.TextFinder`."""
        nodes = []
        cursor = 0
        for text in self._texts:
            start = content.find(text, cursor)
            if start >= 0:
                cursor = start + len(text)
                key, _ = self.identify(text)
                nodes.append(FoundNode(start, cursor, key, NodeSource.INGESTED))
        return FoundTexts(nodes, [])

    def identify(self, text: str) -> tuple[NodeKey, tuple[int, ...]]:
        """See `lazyrag.prompt.read.TextFinder`."""
        key = NodeKey(hashlib.sha256(text.encode()).digest())
        return key, tuple(self._tokenizer.encode_text(text))

    def source_of(self, text: str) -> NodeSource:
        """See `lazyrag.prompt.read.TextFinder`."""
        return NodeSource.INGESTED

    def text_of(self, key: NodeKey) -> str | None:
        """See `lazyrag.prompt.read.TextFinder`."""
        return None


@dataclass(slots=True, eq=False)
class _Case:
    """An example made ready: its prompt, its nodes in the pool, who would choose which.

    ``looking`` is the share of the layers that the pass runs which measures attention.
    """

    example: Example
    runs: list[Run]
    bare: list[Run]
    groups: list[range]
    answers: list[list[int]]
    looking: float
    pages: dict[str, dict[NodeKey, Pages]] = field(default_factory=dict)
    rankings: dict[Chooser, list[int]] = field(default_factory=dict)

    @property
    def nodes(self) -> list[NodeRun]:
        return [run for run in self.runs if isinstance(run, NodeRun)]

    @property
    def lengths(self) -> list[int]:
        return [len(node.ids) for node in self.nodes]

    @property
    def full_tokens(self) -> int:
        return sum(run.used if isinstance(run, NodeRun) else len(run.ids) for run in self.runs)

    @property
    def live_tokens(self) -> int:
        return sum(len(run.ids) for run in self.runs if isinstance(run, LiveRun))

    def chosen(self, setting: Setting) -> list[int]:
        """Node numbers, the most wanted first."""
        if setting.chooser is Chooser.NOBODY:
            return []
        ranking = self.rankings[setting.chooser]
        if setting.count:
            return ranking[: setting.count]
        return choice.within(ranking, self.lengths, self._room(setting))

    def looked(self, setting: Setting) -> float:
        """Tokens spent on choosing: none when no node would fit whatever were found out."""
        if setting.chooser not in LOOKING:
            return 0.0
        if not setting.count and min(self.lengths) > self._room(setting):
            return 0.0
        return self.live_tokens * self.looking

    def _room(self, setting: Setting) -> float:
        looked = self.live_tokens * self.looking if setting.chooser in LOOKING else 0.0
        return setting.limit * self.full_tokens - self.live_tokens - looked


class QualityBench:
    """Runs settings on examples with one model.

    Args:
        model: a loaded checkpoint.
        heads: whose attention chooses nodes.
        pool_tokens: room for the nodes and the live text of the examples of one call.
        greedy_tokens: of the greedy text; 0 = none is written.
        look: how the nodes are treated while the question's attention is measured.
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
        look: Setting = FAST,
    ) -> None:
        self._look = look
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
        self._plain = Passes(model, self._pool)
        self._scaled = Passes(model, self._pool, scaled=True)
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
        cases = [self._case(example) for example in examples]
        try:
            sinks = {setting.sink for setting in settings if setting.use is not Use.ANEW}
            for sink in sorted(sinks | {self._look.sink}):
                self._encode(cases, sink)
            self._rank(cases)
            yield from self._measure(cases, settings, timed)
        finally:
            for case in cases:
                for held in case.pages.values():
                    for pages in held.values():
                        self._pool.release(pages)

    # preparing

    def _case(self, example: Example) -> _Case:
        tokenizer = self._model.tokenizer
        finder = _Texts(tokenizer, example.texts)
        reader = PromptReader(
            tokenizer,
            finder,
            vocabulary=self._model.model.config.vocab_size,
            longest_node=self._model.geometry.max_positions,
        )
        prompts = []
        for texts in (example.texts, ()):
            user = USER.format(context="\n\n".join(texts), query=example.question)
            messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": user}]
            prompts.append(reader.read_chat(messages).runs)
        runs, bare = prompts
        nodes = sum(isinstance(run, NodeRun) for run in runs)
        if nodes != len(example.texts):
            raise RequestError(f"{example.set} {example.id}: {nodes} of its documents were found.")
        case = _Case(
            example,
            runs,
            bare,
            moves.groups(runs, tokenizer.control_ids),
            [tokenizer.encode_text(answer) for answer in example.answers],
            (max(self._layers) + 1) / len(self._model.geometry.layers),
        )
        room = self._model.geometry.max_positions - self._new_tokens(case)
        if case.full_tokens > room:
            raise RequestError(
                f"{example.set} {example.id} has {case.full_tokens:,} tokens, the context window "
                f"leaves {room:,}."
            )
        return case

    def _new_tokens(self, case: _Case) -> int:
        return max(self._greedy_tokens, *map(len, case.answers))

    def _sink(self, sink: str, case: _Case) -> tuple[int, ...]:
        tokenizer = self._model.tokenizer
        if sink == OWN_SINK:
            first = case.runs[0]
            return first.ids if isinstance(first, LiveRun) else ()
        return sink_ids(sink, tokenizer)

    def _encode(self, cases: Sequence[_Case], sink: str) -> None:
        """Nodes of all cases behind a sink, into the pool."""
        waiting: dict[tuple[int, ...], list[tuple[_Case, NodeRun]]] = {}
        for case in cases:
            case.pages[sink] = {}
            own = waiting.setdefault(self._sink(sink, case), [])
            own += [(case, node) for node in case.nodes]
        for ids, owned in waiting.items():
            if ids not in self._encoders:
                self._encoders[ids] = Encoder(self._model, ids, self._model.dtype)
            owned.sort(key=lambda one: len(one[1].ids))
            for first, stop in _batches([len(node.ids) for _, node in owned], self._batch):
                batch = owned[first:stop]
                encoded = self._encoders[ids].encode([node.ids for _, node in batch])
                places = []
                for (case, node), kv in zip(batch, encoded, strict=True):
                    pages = self._pool.allocate(len(kv.ids))
                    if pages is None:
                        raise RequestError("the pool is too small for these examples.")
                    case.pages[sink][node.key] = pages
                    places.append(pages)
                write_nodes(self._pool, self._model.geometry, encoded, places)

    def _rank(self, cases: Sequence[_Case]) -> None:
        trials = [self._trial(case, self._look)[0] for case in cases]
        masses = self._plain.look(trials, self._layers)
        for case, mass in zip(cases, masses, strict=True):
            example = case.example
            order = list(range(len(example.texts)))
            retrieved = bm25_ranking(example.question, example.texts)
            attended = choice.by_heads(mass, self._heads)
            shuffled = random.Random(example.seed).sample(order, len(order))
            case.rankings = {
                Chooser.RETRIEVER: retrieved,
                Chooser.ATTENTION: attended,
                Chooser.BOTH: choice.together(retrieved, attended),
                Chooser.RANDOM: shuffled,
                Chooser.GOLD: sorted(
                    order, key=lambda node: (node not in example.gold, retrieved.index(node))
                ),
            }

    # prompts

    def _trial(self, case: _Case, setting: Setting) -> tuple[Trial, float]:
        """The prompt of a setting, and how many tokens go through the model for it."""
        runs = list(case.bare if setting.kept is Kept.NONE else case.runs)
        chosen = case.chosen(setting)
        order = list(range(len(case.example.texts)))
        if setting.last:
            order = moves.placed_last(case.groups, chosen, ascending=setting.best_last)
            runs = moves.rearranged(runs, order)
        places = [order.index(node) for node in chosen]
        if setting.kept is Kept.CHOSEN:
            others = [place for place in range(len(order)) if place not in places]
            runs = moves.without(runs, others)
        elif setting.use is Use.CHOSEN_ANEW:
            runs = moves.computed_anew(runs, places)
        if setting.use is Use.ANEW:
            runs = as_live(runs)
        if setting.offsets is not Offsets.IN_LINE:
            anew = places if setting.use is Use.CHOSEN_ANEW else ()
            runs = moves.offset(runs, moves.reused_groups(case.groups, anew), setting.offsets)
        skipped = 0
        if setting.use is Use.HEADS_ANEW:
            runs, skipped = _heads_anew(runs), 1
        prompt = place(runs)
        held = case.pages.get(setting.sink, {})
        pages = tuple(held[node.run.key][skipped:] for node in prompt.nodes)
        tokens = len(prompt.live_ids) + case.looked(setting)
        return Trial(prompt, pages, setting.temperature, setting.lse_scale), tokens

    # measuring

    def _measure(
        self, cases: Sequence[_Case], settings: Sequence[Setting], timed: bool
    ) -> Iterator[Row]:
        jobs = [(case, setting) for case in cases for setting in settings]
        made = [self._trial(case, setting) for case, setting in jobs]
        room = max(self._new_tokens(case) for case in cases)
        readings: list[Reading | None] = [None] * len(jobs)
        scaled = [trial.temperature != 1.0 or trial.lse_scale != 1.0 for trial, _ in made]
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
        jobs: Sequence[tuple[_Case, Setting]],
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

    def _time(self, case: _Case, setting: Setting) -> float:
        """Seconds from the prompt as runs to the logits of the first token, nodes in memory."""
        scaled = setting.temperature != 1.0 or setting.lse_scale != 1.0
        passes = self._scaled if scaled else self._plain
        started = time.perf_counter()
        if setting.chooser in LOOKING:
            self._rank([case])
        (reading,) = read = passes.read([self._trial(case, setting)[0]], 1)
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
    case: _Case, setting: Setting, tokens: float, result: _Result, full: _Result, ttft: float
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


def _heads_anew(runs: Sequence[Run]) -> list[Run]:
    """The first page of every longer node as live text; the rest keeps its place and rotation.

    The rest's keys are rotated by their position in the whole node, so that its offset stays that
    of the whole node.
    """
    made: list[Run] = []
    cursor = 0
    for run in runs:
        if isinstance(run, LiveRun):
            made.append(LiveRun(run.ids, cursor))
            cursor += len(run.ids)
            continue
        made.append(LiveRun(run.ids[:PAGE], cursor))
        if len(run.ids) > PAGE:
            made.append(NodeRun(run.key, run.ids[PAGE:], len(run.ids) - PAGE, cursor))
        cursor += len(run.ids)
    return made


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
    sinks = {setting.sink for setting in settings} | {LOOK.sink}
    live = sum(
        1.0 if setting.use is Use.ANEW else 0.5 if setting.use is not Use.REUSED else 0.0
        for setting in settings
    )
    pages = 2 * PAGE * max(len(example.texts) for example in examples)
    return int((longest + pages) * (len(sinks) + live) + 1024 * len(settings))


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
        look=LOOK,
    )
    rows: list[Row] = []
    for first in range(0, len(examples), group):
        part = examples[first : first + group]
        made = list(bench.run(part, settings, timed=first < timed))
        rows += made
        done(made, first + len(part))
    return rows
