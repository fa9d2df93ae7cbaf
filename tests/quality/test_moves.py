"""Which nodes may change places, and that a rearranged prompt keeps every token."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from lazyrag.prompt.segments import LiveRun, NodeRun, Run, place
from lazyrag.quality import moves
from lazyrag.quality.choice import Head, by_heads, together, within
from lazyrag.quality.ladder import Rung, climb
from lazyrag.quality.moves import Offsets
from lazyrag.types import NodeKey

GAP = LiveRun((7, 7))


class Spelling:
    """7 is a line break, 6 a dash, 8 and 9 are digits, 99 is a control token."""

    control_ids = frozenset((99,))

    def decode(self, ids) -> str:
        return "".join({7: "\n", 6: "-", 8: "1", 9: "2"}.get(id, "a") for id in ids)


SPELLING = Spelling()


def node(number: int, length: int = 4) -> NodeRun:
    return NodeRun(NodeKey(bytes([number]) * 32), tuple(range(number, number + length)), length)


def prompt(*gaps: LiveRun) -> list[Run]:
    """Text, then a node behind each gap and one before, then text."""
    runs: list[Run] = [LiveRun((1, 2)), node(10)]
    for number, gap in enumerate(gaps, 1):
        runs += [gap, node(10 + 10 * number, 4 + number)]
    return [*runs, LiveRun((3,))]


@pytest.mark.parametrize(
    ("gaps", "expected"),
    [
        ((GAP, GAP, GAP), [range(0, 4)]),
        ((GAP, LiveRun((6,)), LiveRun((6,))), [range(0, 2), range(2, 4)]),
        ((LiveRun((7, 8, 7)), LiveRun((7, 9, 7)), GAP), [range(0, 1), range(1, 2), range(2, 4)]),
        ((LiveRun((7, 3, 7)),) * 3, [range(0, 1), range(1, 2), range(2, 3), range(3, 4)]),
        ((LiveRun((99,)), GAP), [range(0, 1), range(1, 3)]),
        ((LiveRun((7, 99)), LiveRun((7, 99))), [range(0, 1), range(1, 2), range(2, 3)]),
        ((LiveRun((7, 7), 50), GAP), [range(0, 1), range(1, 3)]),
        ((LiveRun(()), LiveRun(())), [range(0, 3)]),
        ((), [range(0, 1)]),
    ],
    ids=[
        *("all", "two separators", "numbers", "words", "message", "template between"),
        *("own offset", "adjacent", "one"),
    ],
)
def test_groups(gaps: tuple[LiveRun, ...], expected: list[range]):
    assert moves.groups(prompt(*gaps), SPELLING) == expected


def test_a_node_with_an_offset_or_used_in_part_does_not_move():
    runs = prompt(GAP, GAP)
    for changed in (replace(node(20, 5), offset=3), replace(node(20, 5), used=2)):
        assert moves.groups([*runs[:3], changed, *runs[4:]], SPELLING) == [
            range(0, 1), range(1, 2), range(2, 3)
        ]  # fmt: skip


def test_the_chosen_stand_last_in_their_group():
    found = [range(0, 3), range(3, 5)]
    assert moves.placed_last(found, [2, 0, 3]) == [1, 0, 2, 4, 3]
    assert moves.placed_last(found, [2, 0, 3], ascending=True) == [1, 0, 2, 4, 3]
    assert moves.placed_last(found, [0, 2]) == [1, 0, 2, 3, 4]
    assert moves.placed_last(found, [0, 2], ascending=True) == [1, 2, 0, 3, 4]


def test_an_order_must_hold_every_node_once():
    with pytest.raises(ValueError, match="no order of 3 nodes"):
        moves.rearranged(prompt(GAP, GAP), [0, 1, 1])


def tokens(runs: list[Run]) -> list[int]:
    return [id for run in runs for id in (run.ids[: run.used] if hasattr(run, "used") else run.ids)]


def positions(runs: list[Run]) -> list[int]:
    """Of every token in the order of the runs."""
    found, cursor = [], 0
    for run in runs:
        offset = cursor if run.offset is None else run.offset
        count = run.used if isinstance(run, NodeRun) else len(run.ids)
        found += range(offset, offset + count)
        cursor = cursor + count if isinstance(run, NodeRun) else offset + count
    return found


@pytest.mark.parametrize("explicit", [False, True])
def test_computed_anew_keeps_tokens_and_positions(explicit: bool):
    runs = prompt(GAP, GAP, GAP)
    if explicit:
        runs[3] = replace(runs[3], offset=40)
        runs[4] = replace(runs[4], offset=100)
    for places in ([], [0], [1, 3], [0, 1, 2, 3]):
        made = moves.computed_anew(runs, places)
        assert tokens(made) == tokens(runs)
        assert positions(made) == positions(runs)
        assert sum(isinstance(run, NodeRun) for run in made) == 4 - len(places)


def test_without_leaves_no_separator_over():
    runs = prompt(GAP, GAP)
    first, second, third = (run for run in runs if isinstance(run, NodeRun))
    head, tail = runs[0], runs[-1]
    assert moves.without(runs, [0]) == [head, second, GAP, third, tail]
    assert moves.without(runs, [1]) == [head, first, GAP, third, tail]
    assert moves.without(runs, [2]) == [head, first, GAP, second, tail]
    assert moves.without(runs, [0, 2]) == [head, second, tail]
    assert moves.without(runs, [0, 1, 2]) == [head, tail]
    assert moves.without(runs, []) == runs


def test_offsets():
    """Text(2), nodes of 4, 5 and 6 tokens with gaps of 2, text(1)."""
    runs = prompt(GAP, GAP)
    found = moves.groups(runs, SPELLING)

    def laid(offsets: Offsets) -> tuple[list[int], tuple[int, ...]]:
        placed = place(moves.offset(runs, found, offsets))
        return [one.offset for one in placed.nodes], placed.live_positions

    assert laid(Offsets.IN_LINE) == ([2, 8, 15], (0, 1, 6, 7, 13, 14, 21))
    assert laid(Offsets.NEAR) == ([2, 2, 2], (0, 1, 8, 9, 10, 11, 12))
    assert laid(Offsets.ONE_START) == ([2, 2, 2], (0, 1, 8, 9, 15, 16, 21))
    assert laid(Offsets.ONE_END) == ([4, 3, 2], (0, 1, 8, 9, 15, 16, 21))


def test_offsets_stay_within_a_group():
    """Nodes of another message keep their distance to what stands before them."""
    runs = prompt(GAP, LiveRun((99,)), GAP)
    made = place(moves.offset(runs, moves.groups(runs, SPELLING), Offsets.ONE_START))
    first, second, third, fourth = (one.offset for one in made.nodes)
    assert first == second == 2
    assert third == fourth > second + 5


def test_reused_groups():
    found = [range(0, 4), range(4, 6)]
    assert moves.reused_groups(found, [2, 3]) == [range(0, 2), range(2, 4)]
    assert moves.reused_groups(found, [3, 4, 5]) == [range(0, 3)]
    assert moves.reused_groups(found, [1]) == [range(0, 1), range(1, 2), range(2, 3), range(3, 5)]


def test_climbing_keeps_tokens_and_stays_within_the_limit():
    chooser = random.Random(5)
    for _ in range(200):
        gaps = [
            chooser.choice((GAP, GAP, LiveRun((6,)), LiveRun((8,)), LiveRun((99,))))
            for _ in range(6)
        ]
        runs = prompt(*gaps)
        limit = chooser.choice((0.0, 0.3, 0.6, 2.0))
        made = climb(runs, Rung(limit), chooser.sample(range(7), 7), SPELLING, looked=3.0)
        assert sorted(tokens(made.runs)) == sorted(tokens(runs))
        assert sorted(one.given for one in made.nodes) == list(range(7))
        assert made.tokens == len(tokens(runs))
        assert made.computed == len(place(made.runs).live_ids)
        assert made.work <= max(
            limit, (made.looked + 3 + sum(len(g.ids) for g in gaps)) / made.tokens
        )
        if limit == 2.0:
            assert all(one.anew for one in made.nodes)
        offsets = {one.run.key: one.offset for one in made.nodes if not one.anew}
        assert offsets == {one.run.key: one.offset for one in place(made.runs).nodes}
        given = [run for run in runs if isinstance(run, NodeRun)]
        assert [given[one.given] for one in made.nodes] == [one.run for one in made.nodes]


def test_standing_nodes_computed_anew_say_where_they_begin():
    made = climb(prompt(GAP, GAP), Rung(0.6), [0, 1, 2], SPELLING)
    assert [(one.given, one.anew) for one in made.nodes] == [(1, False), (2, False), (0, True)]
    assert [one.offset for one in made.nodes] == [2, 9, 17]


@pytest.mark.parametrize("offsets", [Offsets.ONE_START, Offsets.ONE_END])
def test_what_stands_behind_a_group_lies_where_the_text_has_it(offsets: Offsets):
    """No position is beyond those of the text itself, whichever node is the longest."""
    chooser = random.Random(3)
    for _ in range(100):
        lengths = [chooser.randint(1, 9) for _ in range(5)]
        runs: list[Run] = [LiveRun((1, 2))]
        for number, length in enumerate(lengths):
            runs += [node(10 + 10 * number, length), GAP]
        made = place(moves.offset(runs, [range(0, 5)], offsets))
        assert made.next_position == place(runs).next_position
        assert len(set(made.live_positions)) == len(made.live_positions)
        assert max(one.offset + one.run.used for one in made.nodes) <= made.next_position


def test_choosing():
    import torch

    masses = {0: torch.tensor([[[0.1, 0.3, 0.0]], [[0.9, 0.0, 0.0]]])}
    assert by_heads(masses, [Head(0, 0)]) == [1, 0, 2]
    assert by_heads(masses, [Head(0, 1)]) == [0, 1, 2]
    assert by_heads(masses, [Head(0, 0), Head(0, 1)]) == [0, 1, 2]
    assert together([0, 1, 2, 3], [3, 0, 2, 1]) == [0, 3, 1, 2]
    assert within([2, 0, 1], [5, 3, 10], 7) == [0]
    assert within([0, 1, 2], [5, 3, 10], 8) == [0, 1]
    assert within([0], [5], 4.9) == []
