"""Make ../corpus/lazyrag-notes.pdf from lazyrag-notes.txt; needs fpdf2, which lazyrag does not."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

from fpdf import FPDF

HERE = Path(__file__).resolve().parent
SOURCE = HERE / "lazyrag-notes.txt"
TARGET = HERE.parent / "corpus" / "lazyrag-notes.pdf"


def main() -> None:
    """Set every block: `# ` is the title, `## ` a heading, anything else a paragraph."""
    pdf = FPDF(format="A4")
    pdf.set_creation_date(datetime(2026, 1, 1, tzinfo=UTC))
    pdf.set_title("Notes on lazyrag")
    pdf.set_margin(22)
    pdf.add_page()
    for line in filter(None, SOURCE.read_text(encoding="utf-8").splitlines()):
        marks, _, text = line.partition(" ")
        if marks in {"#", "##"}:
            pdf.set_font("Helvetica", "B", 17 if marks == "#" else 12)
            pdf.multi_cell(0, 9, text, new_x="LMARGIN", new_y="NEXT")
        else:
            pdf.set_font("Helvetica", size=10.5)
            pdf.multi_cell(0, 5, line, align="L", new_x="LMARGIN", new_y="NEXT")
            pdf.ln(2)
    pdf.output(str(TARGET))


if __name__ == "__main__":
    main()
