"""A plot of bars as SVG, on a logarithmic scale."""

from __future__ import annotations

import math
from collections.abc import Sequence
from xml.sax.saxutils import escape

_LEFT, _WIDTH, _LINE = 330, 420, 22
_LETTER = 6.5


def bars(title: str, rows: Sequence[tuple[str, float]], unit: str) -> str:
    """One bar a row, in order; ``rows`` are labels and positive values."""
    low = 10 ** math.floor(math.log10(min(value for _, value in rows)))
    span = math.log10(max(value for _, value in rows) / low) or 1.0
    left = max(_LEFT, round(_LETTER * max(len(label) for label, _ in rows)) + 16)
    width, height = left + _WIDTH + 90, 40 + _LINE * len(rows)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        'font-family="sans-serif" font-size="12">',
        '<rect width="100%" height="100%" fill="white"/>',
        f'<text x="10" y="20">{escape(title)}</text>',
    ]
    for number, (label, value) in enumerate(rows):
        y = 32 + _LINE * number
        length = max(2.0, _WIDTH * math.log10(value / low) / span)
        colour = "#2f8f3a" if "lazy" in label else "#9aa7b2"
        parts += [
            f'<text x="{left - 8}" y="{y + 13}" text-anchor="end">{escape(label)}</text>',
            f'<rect x="{left}" y="{y}" width="{length:.1f}" height="{_LINE - 6}" fill="{colour}"/>',
            f'<text x="{left + length + 6:.1f}" y="{y + 13}">{value:,.3g} {unit}</text>',
        ]
    return "\n".join([*parts, "</svg>", ""])
