"""A bar chart of the benchmark's CSV as SVG: ``python -m lazyrag_kernels.plot CSV SVG``."""

from __future__ import annotations

import csv
import sys
from pathlib import Path
from xml.sax.saxutils import escape

COLOURS = {"ours": "#1f6feb", "unjoined": "#79b8ff", "copy": "#d29922", "flex": "#8957e5"}
LABEL, BAR, ROW, WIDTH = 420, 330, 17, 900
LIMIT = 2.0
"""Longest bar, in units of SDPA's time; longer ones are cut and say so."""


def chart(rows: list[dict[str, str]]) -> str:
    """Time against SDPA of every case and provider, one bar each; 1 is the line."""
    shown = [row for row in rows if row["provider"] in COLOURS]
    height = ROW * (len(shown) + 3)
    one = LABEL + BAR / LIMIT
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{height}" fill="white"/>',
        f'<text x="{one}" y="{ROW}" text-anchor="middle">SDPA = 1</text>',
        f'<line x1="{one}" y1="{1.3 * ROW}" x2="{one}" y2="{height - ROW}" stroke="black"/>',
    ]
    for index, row in enumerate(shown):
        ratio = float(row["against_sdpa"])
        y = ROW * (index + 2)
        name = f"{row['q_heads']}/{row['kv_heads']} {row['case']}: {row['provider']}"
        length = BAR * min(ratio, LIMIT) / LIMIT
        more = " (cut)" if ratio > LIMIT else ""
        text = f"{ratio:.2f}, {float(row['median_us']):,.1f} us{more}"
        parts += [
            f'<text x="{LABEL - 8}" y="{y + 10}" text-anchor="end">{escape(name)}</text>',
            f'<rect x="{LABEL}" y="{y}" width="{length:.1f}" height="{ROW - 4}" '
            f'fill="{COLOURS[row["provider"]]}"/>',
            f'<text x="{LABEL + length + 6:.1f}" y="{y + 10}">{escape(text)}</text>',
        ]
    return "\n".join([*parts, "</svg>", ""])


def main() -> None:
    """Read the CSV named first, write the SVG named second."""
    source, target = map(Path, sys.argv[1:])
    with source.open(newline="") as file:
        target.write_text(chart(list(csv.DictReader(file))))


if __name__ == "__main__":
    main()
