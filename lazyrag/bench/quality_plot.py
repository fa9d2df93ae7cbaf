"""Quality against work as SVG: gain kept over the share of full's work, one point a setting."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from html import escape
from math import isfinite, log

from lazyrag.bench.quality_rows import Row
from lazyrag.bench.quality_settings import EVERYTHING, OF_PARTS, Kept, Setting, Use
from lazyrag.bench.quality_statistics import Summary, Table

_LEFT, _TOP, _WIDTH, _HEIGHT = 60, 20, 560, 360
_KINDS = {
    "nodes reused": "#1f77b4",
    "some computed anew": "#c62828",
    "only the chosen nodes": "#7a7a7a",
    "full attention": "#000000",
}
_LOWEST, _HIGHEST = -1.0, 2.0
"""Gains beyond are drawn at the edge: with few examples an interval may have no end."""
_WORK = (4, 8, 16, 25, 50, 100)
"""Marks of the axis, percent; the axis is logarithmic."""


def kind_of(setting: Setting) -> str:
    """Under which mark a setting is drawn."""
    if setting.kept is Kept.CHOSEN:
        return "only the chosen nodes"
    if setting.use is Use.ANEW:
        return "full attention"
    return "nodes reused" if setting.use is Use.REUSED else "some computed anew"


def svg(rows: Sequence[Row], named: Sequence[str] = ()) -> str:
    """The plot.

    Args:
        rows: of a run.
        named: settings whose names are written beside their points.
    """
    table = Table(rows)
    known = {
        setting.name: setting
        for setting in (*EVERYTHING, *OF_PARTS)
        if setting.kept is not Kept.NONE
    }
    points = [
        (kind_of(known[name]), table.summary(name, table.examples_of()))
        for name in table.settings
        if name in known
    ]
    points = [(kind, one) for kind, one in points if isfinite(one.gain.value)]
    lowest = min([0.0, *(max(one.gain.low, _LOWEST) for _, one in points)])
    highest = max([1.0, *(min(one.gain.high, _HIGHEST) for _, one in points)])

    def across(work: float) -> float:
        share = log(max(100 * work, _WORK[0]) / _WORK[0]) / log(_WORK[-1] * 1.1 / _WORK[0])
        return _LEFT + _WIDTH * share

    def down(gain: float) -> float:
        return _TOP + _HEIGHT * (highest - min(max(gain, lowest), highest)) / (highest - lowest)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_LEFT + _WIDTH + 20}" '
        f'height="{_TOP + _HEIGHT + 100}" font-family="sans-serif" font-size="12">',
        '<rect width="100%" height="100%" fill="white"/>',
        f'<rect x="{_LEFT}" y="{_TOP}" width="{_WIDTH}" height="{_HEIGHT}" fill="none" '
        'stroke="#888888"/>',
        f'<text x="16" y="{_TOP + _HEIGHT / 2:g}" text-anchor="middle" '
        f'transform="rotate(-90 16 {_TOP + _HEIGHT / 2:g})">gain kept, %</text>',
        f'<text x="{_LEFT + _WIDTH / 2:g}" y="{_TOP + _HEIGHT + 38}" text-anchor="middle">'
        "tokens through the model, % of full attention's</text>",
    ]
    for percent in _WORK:
        parts.append(
            f'<text x="{across(percent / 100):.1f}" y="{_TOP + _HEIGHT + 18}" '
            f'text-anchor="middle">{percent}</text>'
        )
    for percent in range(20 * int(5 * lowest), int(100 * highest) + 1, 20):
        y = down(percent / 100)
        parts += [
            f'<line x1="{_LEFT}" y1="{y:.1f}" x2="{_LEFT + _WIDTH}" y2="{y:.1f}" '
            f'stroke="{"#888888" if percent == 100 else "#dddddd"}"/>',
            f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{percent}</text>',
        ]
    for kind, one in points:
        parts += _point(kind, one, across(one.work), down, one.setting in named)
    for number, (kind, colour) in enumerate(_KINDS.items()):
        x, y = _LEFT + 150 * number, _TOP + _HEIGHT + 70
        parts += [
            f'<circle cx="{x}" cy="{y - 4}" r="4" fill="{colour}"/>',
            f'<text x="{x + 10}" y="{y}">{kind}</text>',
        ]
    return "\n".join([*parts, "</svg>", ""])


def _point(
    kind: str, one: Summary, x: float, down: Callable[[float], float], named: bool
) -> list[str]:
    colour = _KINDS[kind]
    parts = [
        f'<line x1="{x:.1f}" y1="{down(one.gain.low):.1f}" x2="{x:.1f}" '
        f'y2="{down(one.gain.high):.1f}" stroke="{colour}" stroke-opacity="0.35"/>',
        f'<circle cx="{x:.1f}" cy="{down(one.gain.value):.1f}" r="4" fill="{colour}">'
        f"<title>{escape(one.setting)}</title></circle>",
    ]
    if named:
        parts.append(
            f'<text x="{x + 7:.1f}" y="{down(one.gain.value) + 4:.1f}" font-size="10">'
            f"{escape(one.setting)}</text>"
        )
    return parts
