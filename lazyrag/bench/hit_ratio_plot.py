"""A plot of `lazyrag.bench.hit_ratio` as SVG: one panel a budget, one line a policy."""

from __future__ import annotations

from collections.abc import Sequence

from lazyrag.bench.hit_ratio import POLICIES, Row, State

_COLOURS = dict(
    zip(
        POLICIES,
        ("#000000", "#1f77b4", "#e6741a", "#2f8f3a", "#c62828", "#8553b8", "#7a7a7a", "#d655a5"),
        strict=True,
    )
)
_BOUNDS = ("ideal", "optimum")
_LEFT, _TOP, _WIDTH, _HEIGHT, _GAP = 52, 30, 270, 230, 32
_LEGEND_COLUMNS = 4


def svg(rows: Sequence[Row]) -> str:
    """Warm hit ratio over alpha."""
    budgets = sorted({row.budget_gb for row in rows})
    width = max(_LEFT + len(budgets) * (_WIDTH + _GAP), 760)
    height = _TOP + _HEIGHT + 100
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
        f'<text x="14" y="{_TOP + _HEIGHT / 2:g}" text-anchor="middle" '
        f'transform="rotate(-90 14 {_TOP + _HEIGHT / 2:g})">tokens reused, % (warm)</text>',
    ]
    for number, budget in enumerate(budgets):
        chosen = [r for r in rows if r.budget_gb == budget and r.state is State.WARM]
        parts += _panel(chosen, f"{budget:g} GB", _LEFT + number * (_WIDTH + _GAP))
    for number, policy in enumerate(POLICIES):
        line, column = divmod(number, _LEGEND_COLUMNS)
        x, y = _LEFT + column * 175, _TOP + _HEIGHT + 62 + 20 * line
        parts += [
            _polyline(policy, [(x, y - 4), (x + 24, y - 4)]),
            f'<text x="{x + 30}" y="{y}">{policy}</text>',
        ]
    return "\n".join([*parts, "</svg>", ""])


def _panel(rows: Sequence[Row], title: str, left: float) -> list[str]:
    alphas = [row.alpha for row in rows]
    first, span = min(alphas), (max(alphas) - min(alphas)) or 1.0

    def across(alpha: float) -> float:
        return left + _WIDTH * (0.04 + 0.92 * (alpha - first) / span)

    def down(percent: float) -> float:
        return _TOP + _HEIGHT * (1 - percent / 104)

    parts = [
        f'<rect x="{left}" y="{_TOP}" width="{_WIDTH}" height="{_HEIGHT}" fill="none" '
        'stroke="#888888"/>',
        f'<text x="{left + _WIDTH / 2:g}" y="20" text-anchor="middle">{title}</text>',
        f'<text x="{left + _WIDTH / 2:g}" y="{_TOP + _HEIGHT + 36}" text-anchor="middle">'
        "Zipf alpha</text>",
    ]
    for percent in range(0, 101, 20):
        y = down(percent)
        parts += [
            f'<line x1="{left}" y1="{y:.1f}" x2="{left + _WIDTH}" y2="{y:.1f}" stroke="#dddddd"/>',
            f'<text x="{left - 5}" y="{y + 4:.1f}" text-anchor="end">{percent}</text>',
        ]
    for alpha in sorted(set(alphas)):
        parts.append(
            f'<text x="{across(alpha):.1f}" y="{_TOP + _HEIGHT + 17}" text-anchor="middle">'
            f"{alpha:g}</text>"
        )
    for policy in reversed(POLICIES):  # ours on top
        points = sorted(
            (across(row.alpha), down(100 * row.hit_ratio)) for row in rows if row.policy == policy
        )
        parts.append(_polyline(policy, points))
        if policy not in _BOUNDS:
            parts += [
                f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.5" fill="{_COLOURS[policy]}"/>'
                for x, y in points
            ]
    return parts


def _polyline(policy: str, points: Sequence[tuple[float, float]]) -> str:
    dashes = ' stroke-dasharray="5 4"' if policy in _BOUNDS else ""
    return (
        f'<polyline points="{" ".join(f"{x:.1f},{y:.1f}" for x, y in points)}" fill="none" '
        f'stroke="{_COLOURS[policy]}" stroke-width="{3 if policy == "ours" else 1.5}"{dashes}/>'
    )
