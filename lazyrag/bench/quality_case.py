"""One example of `lazyrag bench quality` made ready, and its prompt as every setting has it."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field

from lazyrag_kernels.attention import Pages

from lazyrag.bench.answers import SYSTEM, USER
from lazyrag.bench.quality_data import Example
from lazyrag.bench.quality_settings import Chooser, Kept, Setting, Told, Use
from lazyrag.engine.passes import Trial
from lazyrag.errors import RequestError
from lazyrag.model.load import LoadedModel
from lazyrag.prompt.read import FoundNode, FoundTexts, PromptReader
from lazyrag.prompt.segments import LiveRun, NodeIdentity, NodeRun, NodeSource, Run, as_live, place
from lazyrag.prompt.tokenise import PromptTokenizer
from lazyrag.quality import choice, moves
from lazyrag.quality.moves import Offsets
from lazyrag.types import NodeKey

PAGE = 16
"""Tokens a page; also what ``heads anew`` computes of each node."""
LOOKING = frozenset((Chooser.ATTENTION, Chooser.BOTH))
"""Choosers that read the question once to measure its attention."""


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
                nodes.append(FoundNode(start, cursor, self.identify(text), NodeSource.INGESTED))
        return FoundTexts(nodes, [])

    def identify(self, text: str) -> NodeIdentity:
        """See `lazyrag.prompt.read.TextFinder`."""
        key = NodeKey(hashlib.sha256(text.encode()).digest())
        return NodeIdentity(key, tuple(self._tokenizer.encode_text(text)))

    def source_of(self, text: str) -> NodeSource:
        """See `lazyrag.prompt.read.TextFinder`."""
        return NodeSource.INGESTED

    def text_of(self, key: NodeKey) -> str | None:
        """See `lazyrag.prompt.read.TextFinder`."""
        return None


@dataclass(slots=True, eq=False)
class Case:
    """An example made ready: its prompt, its nodes in the pool, who would choose which.

    ``looking`` is the share of the layers that the pass runs which measures attention.
    """

    example: Example
    runs: list[Run]
    bare: list[Run]
    groups: list[range]
    answers: list[list[int]]
    looking: float
    pages: dict[tuple[str, Told], dict[NodeKey, Pages]] = field(default_factory=dict)
    rankings: dict[Chooser, list[int]] = field(default_factory=dict)

    @classmethod
    def read(cls, model: LoadedModel, example: Example, looking: float, new_tokens: int) -> Case:
        """Through the chat template, the documents found as the engine finds them.

        Args:
            model: whose tokenizer and template.
            example: the question.
            looking: share of the layers that the pass runs which measures attention.
            new_tokens: room to keep behind the prompt, if the gold answers need less.

        Raises:
            RequestError: a document was not found, or the prompt does not fit the context window.
        """
        tokenizer = model.tokenizer
        reader = PromptReader(
            tokenizer,
            _Texts(tokenizer, example.texts),
            vocabulary=model.model.config.vocab_size,
            longest_node=model.geometry.max_positions,
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
        answers = [tokenizer.encode_text(answer) for answer in example.answers]
        case = cls(example, runs, bare, moves.groups(runs, tokenizer), answers, looking)
        room = model.geometry.max_positions - max(new_tokens, *map(len, answers))
        if case.full_tokens > room:
            raise RequestError(
                f"{example.set} {example.id} has {case.full_tokens:,} tokens, the context window "
                f"leaves {room:,}."
            )
        return case

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

    def trial(self, setting: Setting) -> tuple[Trial, float]:
        """The prompt of a setting, and how many tokens go through the model for it."""
        runs = list(self.bare if setting.kept is Kept.NONE else self.runs)
        chosen = self.chosen(setting)
        order = list(range(len(self.example.texts)))
        if setting.last:
            order = moves.placed_last(self.groups, chosen, ascending=setting.best_last)
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
            runs = moves.offset(runs, moves.reused_groups(self.groups, anew), setting.offsets)
        skipped = 0
        if setting.use is Use.HEADS_ANEW:
            runs, skipped = heads_anew(runs), 1
        prompt = place(runs)
        held = self.pages.get((setting.sink, setting.told), {})
        pages = tuple(held[node.run.key][skipped:] for node in prompt.nodes)
        tokens = len(prompt.live_ids) + self.looked(setting)
        return Trial(prompt, pages, setting.scale), tokens


def heads_anew(runs: Sequence[Run]) -> list[Run]:
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
