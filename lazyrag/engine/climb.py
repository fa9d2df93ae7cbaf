"""Putting a prompt on its rung of the ladder: whether to look first, and what follows from it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from lazyrag.engine.attention import MAX_ROWS
from lazyrag.model.load import LoadedModel
from lazyrag.prompt.segments import PlacedPrompt, Run, place
from lazyrag.quality.calibration import Calibration, recall, recall_scales
from lazyrag.quality.choice import Head, by_heads, together
from lazyrag.quality.ladder import RUNGS, Climbed, Rung, climb
from lazyrag.quality.moves import Spelling
from lazyrag.quality.scale import PLAIN, Scale
from lazyrag.quality.words import WordRanking
from lazyrag.types import Quality

NO_ROOM_TO_CLIMB = (
    "The pool has no room for the nodes that were to be computed anew: all are reused as they "
    "stand."
)
NO_ROOM_TO_LOOK = (
    "The pool had no room to look which nodes the question attends to: those to compute anew were "
    "chosen by their words."
)


@dataclass(frozen=True, slots=True, eq=False)
class Climb:
    """A prompt on its way to a rung.

    Attributes:
        runs: of the prompt as given; the last one is live.
        prompt: the same, placed.
        rung: how far to go.
        spelling: of ids.
        ranking: node numbers, the most wanted first, as far as it can be told without a look: by
            their words, in the order of the prompt if these tell nothing.
        told: whether they tell something.
        heads: whose attention to the nodes has to be seen first; none = ``ranking`` is all.
        looked: tokens that seeing it takes, times the share of layers that are run.
    """

    runs: Sequence[Run]
    prompt: PlacedPrompt
    rung: Rung
    spelling: Spelling
    ranking: Sequence[int]
    told: bool = False
    heads: Sequence[Head] = ()
    looked: float = 0.0

    @property
    def layers(self) -> frozenset[int]:
        """Whose attention has to be seen."""
        return frozenset(head.layer for head in self.heads)

    def reach(self, masses: Mapping[int, Tensor] | None = None) -> tuple[Climbed, Sequence[str]]:
        """The prompt as the rung has it, and what the user should know.

        Args:
            masses: of ``layers``, see `lazyrag.engine.mass.MassStep`; None = nothing was seen.
        """
        ranking, looked = self.ranking, 0.0
        warnings = (NO_ROOM_TO_LOOK,) if self.heads and masses is None else ()
        if masses is not None:
            attended, looked = by_heads(masses, self.heads), self.looked
            ranking = together(ranking, attended) if self.told else attended
        return climb(self.runs, self.rung, ranking, self.spelling, looked), warnings


class Ladder:
    """The rungs as one checkpoint climbs them.

    Args:
        model: a loaded checkpoint.
        encoding: digest of what nodes are encoded with.

    Attributes:
        scales: of attention to reused nodes, by quality; others have none.
    """

    def __init__(self, model: LoadedModel, encoding: bytes) -> None:
        self._model = model
        self._words = WordRanking(model.tokenizer)
        self._calibration: Calibration | None = None
        shared = model.ranks is not None  # the others know of no scale
        self.scales: Mapping[Quality, Scale] = {} if shared else recall_scales(model, encoding)

    @property
    def calibration(self) -> Calibration | None:
        """What is known about the checkpoint; another process may have found it out."""
        if self._calibration is None:
            self._calibration = recall(self._model)
        return self._calibration

    @calibration.setter
    def calibration(self, found: Calibration) -> None:
        self._calibration = found

    def scale(self, quality: Quality | None) -> Scale:
        """Of attention to reused nodes."""
        return PLAIN if quality is None else self.scales.get(quality, PLAIN)

    def climb(self, runs: Sequence[Run], quality: Quality | None) -> Climb | None:
        """How a prompt gets to its rung; None = it is read as given.

        Args:
            runs: of the prompt; the last one is live.
            quality: see `Quality`.
        """
        rung = None if quality is None else RUNGS.get(quality)
        prompt = place(list(runs))
        if rung is None or not prompt.nodes:
            return None
        told = self._words.rank(runs)
        ranking = range(len(prompt.nodes)) if told is None else told
        made = Climb(runs, prompt, rung, self._model.tokenizer, ranking, told is not None)
        calibration = self.calibration
        live = len(prompt.live_ids)
        if calibration is None or len(prompt.nodes) < 2 or live > MAX_ROWS:
            return made
        last = max(head.layer for head in calibration.heads)
        looked = live * (last + 1) / len(self._model.geometry.layers)
        if all(node.run.used > rung.limit * prompt.tokens - live - looked for node in prompt.nodes):
            return replace(made, ranking=())  # whatever were seen, nothing can be chosen
        return replace(made, heads=calibration.heads, looked=looked)
