"""Command-line options that several commands share."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from lazyrag.types import DEFAULT_QUALITY, Quality


class Rung(StrEnum):
    """The qualities a user may choose."""

    FAST = Quality.FAST.value
    BALANCED = Quality.BALANCED.value
    BEST = Quality.BEST.value
    FULL = Quality.FULL.value


DEFAULT_RUNG = Rung(DEFAULT_QUALITY.value)

DEFAULT_NODES = 8
"""Passages to retrieve: enough for one or two to fit the quarter of `Quality.BALANCED`."""

IndexOption = Annotated[
    Path, typer.Option("--index", metavar="DIR", help="The index directory.", show_default=False)
]
JsonOption = Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")]
NodesOption = Annotated[
    int, typer.Option("-k", "--top-k", min=1, metavar="N", help="How many passages to retrieve.")
]
DeviceOption = Annotated[str, typer.Option(metavar="auto|cpu|cuda", help="Where to compute.")]
QualityOption = Annotated[
    Rung,
    typer.Option(
        help="fast reuses every known passage; balanced and best compute the passages that the "
        "question needs most anew; full computes the whole prompt."
    ),
]
TokensOption = Annotated[
    int,
    typer.Option("--max-new-tokens", min=1, metavar="N", help="At most so many tokens an answer."),
]
