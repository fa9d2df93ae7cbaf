"""What `lazyrag bench quality` compares: ways to treat the nodes of one prompt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from lazyrag.engine.sink import DOCUMENTS, NONE, TEMPLATE
from lazyrag.quality.ladder import RUNGS
from lazyrag.quality.moves import Offsets
from lazyrag.quality.scale import PLAIN, Scale
from lazyrag.types import DEFAULT_SINK, Quality

OWN_SINK = "own"
"""The prompt's own live text before its first node, as at query time."""


class Chooser(StrEnum):
    """Who chooses nodes."""

    NOBODY = "-"
    ATTENTION = "attention"
    WORDS = "words"
    """Those of the prompt (`lazyrag.quality.words.WordRanking`)."""
    BOTH = "both"
    """The two rankings as one (`lazyrag.quality.choice.together`): what the engine does."""
    RETRIEVER = "retriever"
    """BM25 of the question."""
    RANDOM = "random"
    GOLD = "gold"
    """The documents said to hold the answer, then the retriever's: a bound, not a method."""


class Told(StrEnum):
    """What a node was encoded behind besides the sink, if its document has other nodes."""

    NOTHING = "nothing"
    TITLE = "title"
    LEAD = "lead"
    """The first node of its document: the nearest thing to a summary that every document has."""
    PREVIOUS = "previous"
    """The node before it in its document."""


class Kept(StrEnum):
    """Which nodes are in the prompt."""

    ALL = "all"
    CHOSEN = "chosen"
    NONE = "none"


class Use(StrEnum):
    """How the nodes that are in the prompt get their K and V."""

    REUSED = "reused"
    CHOSEN_ANEW = "chosen anew"
    """The chosen ones are computed with the request, the others reused."""
    HEADS_ANEW = "heads anew"
    """The first tokens of every node are computed with the request (EPIC, arXiv 2410.15332)."""
    ANEW = "anew"
    """Full attention."""


@dataclass(frozen=True, slots=True)
class Setting:
    """One row of the table.

    Attributes:
        name: unique.
        kept, use: see there.
        sink: what reused nodes were encoded behind;
        told: and what stood between it and the node.
        chooser, count: so many nodes are chosen;
        limit: or, with count 0, as many as fit, best first, into this share of full's work.
        last: whether the chosen stand last; else every node stays where it is.
        best_last: the best of them last of all; else they keep their order.
        offsets: where reused nodes lie.
        scale: of attention to reused nodes.
        tunable: whether tuning may choose it (no control, no bound).
    """

    name: str
    kept: Kept = Kept.ALL
    use: Use = Use.REUSED
    sink: str = DEFAULT_SINK
    told: Told = Told.NOTHING
    chooser: Chooser = Chooser.NOBODY
    count: int = 0
    limit: float = 0.0
    last: bool = False
    best_last: bool = False
    offsets: Offsets = Offsets.IN_LINE
    scale: Scale = PLAIN
    tunable: bool = False


NO_DOCUMENTS = Setting("no documents", Kept.NONE, Use.ANEW)
FULL = Setting("full", use=Use.ANEW)
FAST = Setting("fast", tunable=True)


def anew(
    chooser: Chooser,
    count: int = 0,
    *,
    limit: float = 0.0,
    last: bool = True,
    best_last: bool = False,
    sink: str = DEFAULT_SINK,
) -> Setting:
    """The chosen nodes are computed anew."""
    place = ("best last" if best_last else "last") if last else "in place"
    behind = "" if sink == DEFAULT_SINK else f", sink {sink}"
    return Setting(
        f"{chooser} {_amount(count, limit)} {place}{behind}",
        use=Use.CHOSEN_ANEW,
        sink=sink,
        chooser=chooser,
        count=count,
        limit=limit,
        last=last,
        best_last=best_last,
        tunable=chooser in (Chooser.ATTENTION, Chooser.WORDS, Chooser.BOTH),
    )


def controls(setting: Setting) -> list[Setting]:
    """What a setting that computes nodes anew has to be compared with."""
    chosen = f"{setting.chooser} {_amount(setting.count, setting.limit)}"
    plain = replace(setting, tunable=False)
    plain_full = replace(plain, use=Use.ANEW, offsets=Offsets.IN_LINE)
    return [
        replace(plain_full, name=f"only {chosen}", kept=Kept.CHOSEN),
        replace(plain_full, name=f"full, {chosen} last"),
        replace(plain, name=f"reused, {setting.name}", use=Use.REUSED),
    ]


def _amount(count: int, limit: float) -> str:
    return str(count) if count else f"to {limit:.0%}"


def moved(setting: Setting, offsets: Offsets) -> Setting:
    """The same setting with other offsets of reused nodes."""
    return replace(setting, name=f"{setting.name}, {offsets}", offsets=offsets)


def behind(setting: Setting, sink: str) -> Setting:
    """The same setting with nodes encoded behind another sink."""
    return replace(setting, name=f"{setting.name}, sink {sink}", sink=sink)


def knowing(setting: Setting, told: Told) -> Setting:
    """The same setting with nodes encoded behind a part of their documents, too."""
    return replace(setting, name=f"{setting.name}, behind {told}", told=told)


def scaled(setting: Setting, temperature: float, lse_scale: float) -> Setting:
    """The same setting with other attention to reused nodes."""
    return replace(
        setting,
        name=f"{setting.name}, T {temperature:g} S {lse_scale:g}",
        scale=Scale(temperature, lse_scale),
    )


_SCALES = ((0.9, 0.9), (0.8, 0.8), (0.9, 1.0), (1.0, 0.9))
_ATTENTION, _WORDS, _BOTH = Chooser.ATTENTION, Chooser.WORDS, Chooser.BOTH


def _together(setting: Setting) -> Setting:
    """Reused nodes from one start."""
    return moved(setting, Offsets.ONE_START)


BALANCED, BEST = (
    anew(_BOTH, limit=RUNGS[quality].limit, best_last=True)
    for quality in (Quality.BALANCED, Quality.BEST)
)

SHORT: tuple[Setting, ...] = (
    NO_DOCUMENTS,
    FULL,
    FAST,
    behind(FAST, DOCUMENTS),
    _together(FAST),
    BALANCED,
    BEST,
    *(
        anew(chooser, limit=0.25, best_last=True)
        for chooser in (_ATTENTION, _WORDS, Chooser.RETRIEVER)
    ),
    anew(Chooser.RANDOM, limit=0.25),
    _together(BALANCED),
    _together(BEST),
    *controls(BALANCED),
)
"""The ladder and its controls."""

EVERYTHING: tuple[Setting, ...] = (
    *SHORT,
    *(behind(FAST, sink) for sink in (NONE, TEMPLATE, OWN_SINK)),
    replace(FAST, name="heads anew", use=Use.HEADS_ANEW),
    *(moved(FAST, offsets) for offsets in (Offsets.ONE_END, Offsets.NEAR)),
    *(moved(behind(FAST, DOCUMENTS), one) for one in (Offsets.ONE_START, Offsets.NEAR)),
    *(scaled(FAST, *scale) for scale in _SCALES),
    *(scaled(_together(FAST), *scale) for scale in _SCALES[:2]),
    *(anew(_ATTENTION, count) for count in (1, 2, 3)),
    *(anew(_ATTENTION, count, last=False) for count in (1, 2)),
    *(_together(anew(one, limit=0.25, best_last=True)) for one in (_ATTENTION, _WORDS)),
    behind(BALANCED, DOCUMENTS),
    anew(_ATTENTION, limit=0.4, best_last=True),
    *(_together(anew(_ATTENTION, count, best_last=True)) for count in (1, 2)),
    *(_together(anew(_WORDS, count, best_last=True)) for count in (1, 2)),
    *(_together(anew(_BOTH, count, best_last=True)) for count in (1, 2, 3)),
    *(anew(Chooser.GOLD, count) for count in (1, 2)),
    scaled(BALANCED, 0.9, 0.9),
    *controls(_together(anew(_ATTENTION, 1)))[:2],
    controls(BEST)[0],
)  # fmt: skip
"""What a whole run compares."""


OF_PARTS: tuple[Setting, ...] = tuple(
    knowing(setting, told)
    for setting in (FAST, BALANCED)
    for told in (Told.TITLE, Told.LEAD, Told.PREVIOUS)
)
"""What can be compared where documents are cut into several nodes."""


def with_scales(
    settings: Sequence[Setting], scales: Mapping[Quality, Scale]
) -> tuple[Setting, ...]:
    """Settings, and the rungs as a calibration has scaled them, where they are not among them."""
    rungs = {Quality.FAST: FAST, Quality.BALANCED: BALANCED}
    found = [scaled(rungs[quality], *scale) for quality, scale in scales.items()]
    known = {setting.name for setting in settings}
    return (*settings, *(setting for setting in found if setting.name not in known))


def named(settings: Sequence[Setting], names: Sequence[str]) -> list[Setting]:
    """Those of the given names, in the order of ``settings``.

    Raises:
        ValueError: there is none of a name.
    """
    unknown = set(names) - {setting.name for setting in settings}
    if unknown:
        raise ValueError(f"no setting is called {', '.join(sorted(map(repr, unknown)))}")
    return [setting for setting in settings if setting.name in names]
