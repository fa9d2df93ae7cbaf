"""Other forms of a prompt: nodes in another order, computed anew, or left out.

Nodes are numbered in the order in which they stand in the prompt as given. A node may change places
only with nodes of its *group*: neighbours with the same live text between every two of them, of
which no letter, no digit and no control token is part. So a move never crosses the border of a
message, and whatever introduces a node or names its source keeps it. What has an explicit offset,
or is used in part, stays where it is.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from enum import StrEnum
from typing import Protocol

from lazyrag.prompt.segments import LiveRun, NodeRun, Run


class Spelling(Protocol):
    """What ids stand for, see `lazyrag.prompt.tokenise.PromptTokenizer`."""

    @property
    def control_ids(self) -> Collection[int]:
        """Ids that only a chat template writes."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids."""
        ...


def groups(runs: Sequence[Run], spelling: Spelling) -> list[range]:
    """Node numbers in groups whose members may change places; a lone node is a group of one.

    Args:
        runs: of the prompt.
        spelling: of its ids.
    """
    found: list[range] = []
    number = 0
    separator: tuple[int, ...] | None = None  # of the group so far
    between: list[LiveRun] = []  # since the last node
    before: NodeRun | None = None
    for run in runs:
        if isinstance(run, LiveRun):
            between.append(run)
            continue
        ids = tuple(id for live in between for id in live.ids)
        joins = (
            before is not None
            and _movable(before)
            and _movable(run)
            and all(live.offset is None for live in between)
            and separator in (None, ids)
            and _says_nothing(ids, spelling)
        )
        if joins:
            found[-1] = range(found[-1].start, number + 1)
            separator = ids
        else:
            found.append(range(number, number + 1))
            separator = None
        number, before, between = number + 1, run, []
    return found


def _says_nothing(ids: tuple[int, ...], spelling: Spelling) -> bool:
    if any(id in spelling.control_ids for id in ids):
        return False
    return not any(character.isalnum() for character in spelling.decode(ids))


def _movable(node: NodeRun) -> bool:
    return node.offset is None and node.used == len(node.ids)


def placed_last(
    found: Sequence[range], chosen: Sequence[int], *, ascending: bool = False
) -> list[int]:
    """The order of nodes in which the chosen ones stand last in their group.

    Args:
        found: as `groups` returns them.
        chosen: node numbers, the most wanted first.
        ascending: the most wanted stands last of all; else the chosen keep their order.

    Returns:
        ``order[place]`` is the number of the node that stands there.
    """
    order: list[int] = []
    for group in found:
        order += [number for number in group if number not in chosen]
        taken = [number for number in chosen if number in group]
        order += reversed(taken) if ascending else sorted(taken)
    return order


def rearranged(runs: Sequence[Run], order: Sequence[int]) -> list[Run]:
    """The prompt with node ``order[place]`` at each place; live text stays."""
    nodes = [run for run in runs if isinstance(run, NodeRun)]
    if sorted(order) != list(range(len(nodes))):
        raise ValueError(f"{list(order)} is no order of {len(nodes)} nodes")
    following = iter(order)
    return [run if isinstance(run, LiveRun) else nodes[next(following)] for run in runs]


def computed_anew(runs: Sequence[Run], places: Collection[int]) -> list[Run]:
    """The prompt with the nodes at ``places`` as live text, every token at the same position."""
    if all(run.offset is None for run in runs):
        made: list[Run] = []
        place = 0
        for run in runs:
            if isinstance(run, NodeRun):
                if place in places:
                    run = LiveRun(run.ids[: run.used])
                place += 1
            made.append(run)
        return made
    made, cursor, place = [], 0, 0
    for run in runs:  # an explicit offset moves a node alone, but live text and all that follows
        offset = cursor if run.offset is None else run.offset
        if isinstance(run, LiveRun):
            made.append(LiveRun(run.ids, offset))
            cursor = offset + len(run.ids)
            continue
        known = replace(run, offset=offset)
        made.append(LiveRun(run.ids[: run.used], offset) if place in places else known)
        cursor += run.used
        place += 1
    return made


def without(runs: Sequence[Run], places: Collection[int]) -> list[Run]:
    """The prompt without the nodes at ``places``; of the text on their two sides one piece goes.

    Between two nodes the text behind the node goes, behind the last node of the prompt that before
    it; the text before the first and behind the last node always stays.
    """
    nodes = [index for index, run in enumerate(runs) if isinstance(run, NodeRun)]
    gone: set[int] = set()
    kept = [index for place, index in enumerate(nodes) if place not in places]
    for place, index in enumerate(nodes):
        if place not in places:
            continue
        gone.add(index)
        behind = [other for other in kept if other > index]
        following = nodes[place + 1] if place + 1 < len(nodes) else None
        if behind and following is not None:
            gone.update(range(index + 1, following))
        elif place:
            gone.update(range(nodes[place - 1] + 1, index))
    if not kept and nodes:
        gone.update(range(nodes[0], nodes[-1] + 1))
    return [run for index, run in enumerate(runs) if index not in gone]


class Offsets(StrEnum):
    """Where the reused nodes of a group lie; what stands behind them moves along."""

    IN_LINE = "in line"
    """Each behind what stands before it, as the text reads."""
    ONE_START = "one start"
    """All begin where the first one does. Text lies as if the longest node had changed places with
    the first: all nodes are equally far from the question, and what stands behind the group lies
    where the text has it."""
    ONE_END = "one end"
    """As `ONE_START`, but all end where the longest does."""
    NEAR = "near"
    """As `ONE_START`, and the text behind follows the longest node (parallel positions: Parallel
    Context Windows, arXiv 2212.10947; APE, arXiv 2502.05431)."""


def offset(runs: Sequence[Run], found: Sequence[range], offsets: Offsets) -> list[Run]:
    """The prompt with its reused nodes moved; a group that holds what has an offset stays.

    Args:
        runs: of the prompt.
        found: as `groups` returns them for the same nodes; numbers are those of nodes in ``runs``.
        offsets: where nodes are to lie.
    """
    if offsets is Offsets.IN_LINE or any(run.offset is not None for run in runs):
        return list(runs)
    nodes = [run for run in runs if isinstance(run, NodeRun)]
    starts = {group.start: group for group in found if len(group) > 1}
    made: list[Run] = []
    cursor = number = 0
    start = end = stop = 0  # of the group being placed: first position, behind the longest, number
    first = longest = 0  # tokens of its first node; number of its longest
    for run in runs:
        if isinstance(run, LiveRun):
            made.append(LiveRun(run.ids, cursor))
            cursor += len(run.ids)
            continue
        if number in starts:
            group = starts[number]
            longest = max(group, key=lambda member: nodes[member].used)
            start, end, stop = cursor, cursor + nodes[longest].used, group.stop
            first = run.used
            cursor = end
            lead = True
        else:
            lead = False
        if number < stop:
            where = end - run.used if offsets is Offsets.ONE_END else start
            made.append(replace(run, offset=where))
            if not lead and offsets is not Offsets.NEAR:
                cursor += first if number == longest else run.used
        else:
            made.append(replace(run, offset=cursor))
            cursor += run.used
        number += 1
    return made


def reused_groups(found: Sequence[range], anew: Collection[int]) -> list[range]:
    """Groups of the nodes that are left when those at the places ``anew`` have become live text.

    The nodes computed anew are the last of their group, or the group falls apart.

    Args:
        found: groups, by place.
        anew: places.
    """
    made: list[range] = []
    number = 0
    for group in found:
        left = [place for place in group if place not in anew]
        whole = left == list(range(group.start, group.start + len(left)))
        if whole and left:
            made.append(range(number, number + len(left)))
        else:
            made += [range(number + one, number + one + 1) for one in range(len(left))]
        number += len(left)
    return made
