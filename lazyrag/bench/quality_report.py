"""Tables of `lazyrag bench quality` for people and for programs."""

from __future__ import annotations

import csv
import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lazyrag.bench.quality_data import Half
from lazyrag.bench.quality_rows import Row
from lazyrag.bench.quality_settings import (
    EVERYTHING,
    FAST,
    FULL,
    OF_PARTS,
    Chooser,
    Setting,
    Use,
)
from lazyrag.bench.quality_statistics import Interval, Key, Summary, Table
from lazyrag.quality.ladder import RUNGS

ENOUGH_EM = 0.15
"""Below this share of full attention, EM and F1 say too little to be shown."""
CLAIM = 0.98
"""Gain kept that may be claimed when the interval's lower end reaches it."""
LIMITS = {"fast": 0.0, **{quality.value: rung.limit for quality, rung in RUNGS.items()}}
"""Rungs of the ladder and the work they may take; ``fast`` computes no node anew."""

SUMMARY_COLUMNS = (
    "set", "setting", "examples", "nll", "gain", "gain_low", "gain_high", "behind_full", "kl",
    "top1", "same_text", "em", "f1", "gold", "work", "ttft_s",
)  # fmt: skip
EXPLAINED = (
    "NLL: nats a token of the likeliest gold answer. Gain kept: (NLL without documents − NLL) / "
    "(NLL without documents − NLL of full), of sums, with a 95% paired bootstrap interval over "
    "examples. "
    "KL and top-1 against full at every token of a gold answer. Gold: share of the gold documents "
    "among the chosen nodes. Work: all tokens through the model before the first one of the answer "
    "over those of full; the pass that chooses nodes counts with the share of layers it runs."
)


@dataclass(frozen=True, slots=True)
class Rung:
    """A rung of the ladder, tuned on one half and reported on the other, both ways.

    Attributes:
        name: of the rung.
        chosen: by half, the setting chosen on it.
        summary: over all examples, each by the setting chosen on the other half.
        by_set: the same for each set.
        against_fast: NLL minus that of `FAST`, mean.
    """

    name: str
    chosen: dict[Half, str]
    summary: Summary
    by_set: dict[str, Summary]
    against_fast: Interval

    @property
    def claimed(self) -> bool:
        """Whether `CLAIM` is reached with certainty."""
        return self.summary.gain.low >= CLAIM


def ladder(table: Table) -> list[Rung]:
    """Every rung for which there are candidates."""
    known = {setting.name: setting for setting in (*EVERYTHING, *OF_PARTS)}
    ran = [known[name] for name in table.settings if name in known and known[name].tunable]
    rungs = []
    for name, limit in LIMITS.items():
        candidates = [setting.name for setting in ran if _within(table, setting, limit)]
        if not candidates:
            continue
        examples = table.examples_of()
        chosen, best = table.tuned(candidates, examples)
        if not chosen or not all(table.examples_of(half=half) for half in Half):
            continue
        against = table.mixed_difference(chosen, FAST.name)
        rungs.append(
            Rung(
                name,
                best,
                table.mixed(name, chosen),
                {
                    one: table.mixed(name, part)
                    for one in table.sets
                    if (part := {key: setting for key, setting in chosen.items() if key[0] == one})
                },
                against,
            )
        )
    return rungs


def _within(table: Table, setting: Setting, limit: float) -> bool:
    if not limit:
        return setting.use is Use.REUSED and setting.chooser is Chooser.NOBODY
    return table.summary(setting.name, table.examples_of()).work <= limit


def summaries(table: Table) -> list[tuple[str, Summary]]:
    """Of every setting, over all its examples ("all") and over each set."""
    found = []
    for name in (None, *table.sets):
        examples = table.examples_of(name)
        for setting in table.settings:
            if table.having([setting], examples):
                found.append((name or "all", table.summary(setting, examples)))
    return found


def text(rows: Sequence[Row], note: str | None = None) -> str:
    """All of it for people, as Markdown."""
    table = Table(rows)
    lines = [] if note is None else [note, ""]
    counts = ", ".join(f"{name} {len(table.examples_of(name))}" for name in table.sets)
    lines.append(f"{len(table.examples)} examples ({counts}). {EXPLAINED}")
    for name in (None, *table.sets):
        examples = table.examples_of(name)
        if name is not None and len(table.sets) == 1:
            break
        lines += ["", f"### {name or 'all'}, n = {len(examples)}", ""]
        lines += _table(table, examples)
    rungs = ladder(table)
    if rungs:
        lines += ["", "### The ladder, tuned on one half and reported on the other", ""]
        lines += _ladder_table(rungs, table.sets)
    return "\n".join(lines)


def _table(table: Table, examples: Sequence[Key]) -> list[str]:
    found = [
        table.summary(setting, examples)
        for setting in table.settings
        if table.having([setting], examples)
    ]
    full = next(one for one in found if one.setting == FULL.name)
    shown_em = full.em is not None and full.em >= ENOUGH_EM
    timed = any(one.ttft_s is not None for one in found)
    head = [
        "setting",
        "n",
        "NLL",
        "gain kept %",
        "KL",
        "top-1 %",
        "same text %",
        "gold %",
        "work %",
    ]
    head += ["EM %", "F1 %"] if shown_em else []
    head += ["ttft s"] if timed else []
    lines = [_line(head), _line(["---"] * len(head))]
    for one in found:
        cells = [
            one.setting,
            str(one.examples),
            f"{one.nll:.3f}",
            _percent(one.gain),
            f"{one.kl:.3f}",
            f"{100 * one.top1:.1f}",
            _share(one.same_text),
            _share(one.gold),
            f"{100 * one.work:.1f}",
        ]
        cells += [_share(one.em), _share(one.f1)] if shown_em else []
        cells += ["–" if one.ttft_s is None else f"{one.ttft_s:.3f}"] if timed else []
        lines.append(_line(cells))
    return lines


def _ladder_table(rungs: Sequence[Rung], sets: Sequence[str]) -> list[str]:
    head = ["rung", "chosen on A", "chosen on B", "NLL", "against fast", "gain kept %", "work %"]
    head += sets if len(sets) > 1 else []
    lines = [_line(head), _line(["---"] * len(head))]
    for rung in rungs:
        cells = [
            rung.name,
            rung.chosen[Half.A],
            rung.chosen[Half.B],
            f"{rung.summary.nll:.3f}",
            _signed(rung.against_fast),
            _percent(rung.summary.gain) + (" (claimed)" if rung.claimed else ""),
            f"{100 * rung.summary.work:.1f}",
        ]
        if len(sets) > 1:
            cells += [
                _percent(rung.by_set[name].gain) if name in rung.by_set else "–" for name in sets
            ]
        lines.append(_line(cells))
    return lines


def as_json(rows: Sequence[Row], note: str | None = None) -> dict[str, Any]:
    """All of it for programs."""
    table = Table(rows)
    plain: dict[str, Any] = _without_infinities(_as_dict(table, note))
    return plain


def _as_dict(table: Table, note: str | None) -> dict[str, Any]:
    return {
        "note": note,
        "examples": {name: len(table.examples_of(name)) for name in table.sets},
        "settings": [{"set": name, **asdict(one)} for name, one in summaries(table)],
        "ladder": [{**asdict(rung), "claimed": rung.claimed} for rung in ladder(table)],
    }


def _without_infinities(value: Any) -> Any:
    """JSON has no infinite numbers: None stands for them."""
    if isinstance(value, dict):
        return {name: _without_infinities(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [_without_infinities(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def write_summary(rows: Sequence[Row], path: Path) -> None:
    """One line a set and setting."""
    table = Table(rows)
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(SUMMARY_COLUMNS)
        for name, one in summaries(table):
            numbers: Iterable[float | None] = (
                one.nll, one.gain.value, one.gain.low, one.gain.high, one.behind.value, one.kl,
                one.top1, one.same_text, one.em, one.f1, one.gold, one.work, one.ttft_s,
            )  # fmt: skip
            cells = ["" if number is None else f"{number:.4g}" for number in numbers]
            writer.writerow([name, one.setting, one.examples, *cells])


def _line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _percent(interval: Interval) -> str:
    return f"{100 * interval.value:.1f} ({100 * interval.low:.1f} to {100 * interval.high:.1f})"


def _signed(interval: Interval) -> str:
    return f"{interval.value:+.3f} ({interval.low:+.3f} to {interval.high:+.3f})"


def _share(value: float | None) -> str:
    return "–" if value is None else f"{100 * value:.1f}"
