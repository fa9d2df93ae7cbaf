"""The command reference, made of the commands' own help.

``python -m lazyrag.cli.reference docs/cli.md`` writes it between the marks of that page.
"""

from __future__ import annotations

from pathlib import Path

import typer
from typer.testing import CliRunner

from lazyrag.cli.main import app

COMMANDS = (
    (),
    ("ingest",),
    ("ask",),
    ("chat",),
    ("store",),
    ("store", "stats"),
    ("store", "verify"),
    ("bench",),
    ("bench", "hit-ratio"),
    ("bench", "quality"),
    ("calibrate",),
    ("env",),
)
BEGIN = "<!-- begin: made by python -m lazyrag.cli.reference docs/cli.md -->"
END = "<!-- end -->"


def render() -> str:
    """The help of every command as Markdown."""
    parts = [BEGIN]
    for command in COMMANDS:
        result = CliRunner().invoke(app, [*command, "--help"], prog_name="lazyrag", env=_TERMINAL)
        name = " ".join(("lazyrag", *command))
        help_text = "\n".join(line.rstrip() for line in result.output.strip().splitlines())
        parts.append(f"### `{name}`\n\n```text\n{help_text}\n```")
    parts.append(END)
    return "\n\n".join(parts)


_TERMINAL = {"COLUMNS": "100", "TERMINAL_WIDTH": "100", "NO_COLOR": "1"}


def main(page: Path) -> None:
    """Replace the reference in a page."""
    text = page.read_text(encoding="utf-8")
    before, _, rest = text.partition(BEGIN)
    page.write_text(before + render() + rest.partition(END)[2], encoding="utf-8")


if __name__ == "__main__":
    typer.run(main)
