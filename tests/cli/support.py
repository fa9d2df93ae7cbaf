"""Running ``lazyrag`` in tests, and what it runs on."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from typer.testing import CliRunner, Result

from lazyrag.cli.main import app

FILES = {
    "lighthouse.md": "# Norrhamn\n\nThe lighthouse of Norrhamn was built in 1874. Its keeper is "
    "Marta Ekholm, who grows tomatoes behind it.\n",
    "ferry.txt": "The ferry to Norrhamn leaves at nine in the morning and again at five.\n",
    "sub/bakery.html": "<html><head><style>p {}</style></head><body><h1>Bakery</h1><p>The bakery "
    "of Norrhamn sells <b>cinnamon</b> buns on Saturdays.</p></body></html>",
    "long.rst": "\n\n".join(
        f"Lamp number {n} of the pier shines {n + 3} nights a year and is cleaned by crew {n % 4}."
        for n in range(12)
    ),
}


def run(*arguments: str | Path, input: str | None = None) -> Result:
    """Run ``lazyrag`` in this process."""
    return CliRunner().invoke(app, [str(argument) for argument in arguments], input=input)


def run_json(*arguments: str | Path) -> Any:
    """Run a command that succeeds and says nothing but JSON on stdout."""
    result = run(*arguments, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


@dataclass(frozen=True)
class Corpus:
    """A folder of documents and the index made of it."""

    docs: Path
    index: Path
    summary: dict[str, Any]

    def ingest(self) -> Any:
        """Ingest the folder again."""
        return run_json("ingest", self.docs, "--index", self.index)
