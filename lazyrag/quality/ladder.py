"""The rungs between reusing every node and computing everything: one setting, `Quality`."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from lazyrag.prompt.segments import LiveRun, NodeRun, Run
from lazyrag.quality import choice, moves
from lazyrag.types import Quality


@dataclass(frozen=True, slots=True)
class Rung:
    """How a quality treats the nodes of a prompt.

    Attributes:
        limit: nodes are computed anew, the most wanted first, while all tokens that go through the
            model stay within this share of full attention's.
    """

    limit: float


RUNGS = {Quality.BALANCED: Rung(limit=0.25), Quality.BEST: Rung(limit=0.4)}
"""Measured in docs/quality.md. `Quality.FAST` and `Quality.FULL` leave a prompt as it is."""


@dataclass(frozen=True, slots=True)
class Standing:
    """A node of a prompt as a rung has it.

    Attributes:
        run: the node.
        offset: position of its first token.
        given: its number in the prompt as given; None = its order was not to be changed.
        anew: whether it is computed anew.
    """

    run: NodeRun
    offset: int
    given: int | None = None
    anew: bool = False


@dataclass(frozen=True, slots=True)
class Climbed:
    """A prompt as a rung has it.

    Attributes:
        runs: what is read; nodes computed anew are live text in it.
        nodes: in the order in which they are read.
        tokens: of the whole prompt.
        computed: of live text, nodes computed anew among it.
        looked: tokens of the pass that chose the nodes, times the share of layers it ran.
    """

    runs: list[Run]
    nodes: tuple[Standing, ...]
    tokens: int
    computed: int
    looked: float

    @property
    def work(self) -> float:
        """Share of full attention's tokens that go through the model."""
        return (self.computed + self.looked) / max(1, self.tokens)


def climb(
    runs: Sequence[Run],
    rung: Rung,
    ranking: Sequence[int],
    spelling: moves.Spelling,
    looked: float = 0.0,
) -> Climbed:
    """Choose nodes, move them last within their group, and make them live text.

    The prompt keeps every token and reads on without a gap; nothing but the order of nodes of one
    group changes (see `lazyrag.quality.moves.groups`). In prompts with explicit offsets every token
    keeps its place.

    Args:
        runs: of the prompt as given; its last run is live.
        rung: how far to go.
        ranking: node numbers, the most wanted first.
        spelling: of ids, see `moves.groups`.
        looked: tokens already spent on the ranking, see `Climbed`.
    """
    nodes = [run for run in runs if isinstance(run, NodeRun)]
    live = sum(len(run.ids) for run in runs if isinstance(run, LiveRun))
    tokens = live + sum(node.used for node in nodes)
    room = rung.limit * tokens - live - looked
    anew = choice.within(ranking, [node.used for node in nodes], room)
    found = moves.groups(runs, spelling)
    order = moves.placed_last(found, anew, ascending=True)
    places = [order.index(number) for number in anew]
    moved = moves.rearranged(runs, order)
    climbed = moves.computed_anew(moved, places)
    return Climbed(
        runs=climbed,
        nodes=_standing(moved, climbed, order, places),
        tokens=tokens,
        computed=live + sum(nodes[number].used for number in anew),
        looked=looked,
    )


def _standing(
    moved: Sequence[Run], climbed: Sequence[Run], order: Sequence[int], anew: Collection[int]
) -> tuple[Standing, ...]:
    """Where the nodes of ``moved`` stand in ``climbed``, run by run the same tokens."""
    found: list[Standing] = []
    cursor = 0
    for node, run in zip(moved, climbed, strict=True):
        offset = cursor if run.offset is None else run.offset
        if isinstance(node, NodeRun):
            place = len(found)
            found.append(Standing(node, offset, order[place], place in anew))
        cursor = (cursor if isinstance(run, NodeRun) else offset) + (
            run.used if isinstance(run, NodeRun) else len(run.ids)
        )
    return tuple(found)
