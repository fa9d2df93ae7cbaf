"""Rows of a measurement as CSV, each with the machine and the versions it was made with."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch


def write_csv(rows: Sequence[Any], path: Path) -> None:
    """Write dataclasses of one kind.

    Raises:
        OSError: the file cannot be written.
    """
    made = {
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else "none",
        **{name: version(name) for name in ("torch", "triton", "transformers", "lazyrag")},
        "date": datetime.now(UTC).date().isoformat(),
    }
    with path.open("w", newline="") as file:
        table = csv.DictWriter(file, [*asdict(rows[0]), *made])
        table.writeheader()
        for row in rows:
            numbers = {
                name: round(value, 4) if isinstance(value, float) else value
                for name, value in asdict(row).items()
            }
            table.writerow({**numbers, **made})
