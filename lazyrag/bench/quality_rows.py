"""The rows of `lazyrag bench quality`, as values and as CSV."""

from __future__ import annotations

import csv
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from lazyrag.errors import RequestError


@dataclass(frozen=True, slots=True)
class Row:
    """What one setting did with one example.

    Attributes:
        set, id, half: of the example.
        setting: its name.
        nll: of the likeliest gold answer, nats a token.
        kl: KL(full || setting), mean over the tokens of the gold answer likeliest under full, nats.
        top1: share of these tokens at which the likeliest token is full's.
        same_text: whether the greedy text is full's, 1 or 0; -1 = no text was written.
        em, f1: of the greedy text against the gold answers; -1 = no text was written.
        tokens: through the model before the first token: live text, and the tokens of the pass that
            chose nodes times the share of layers it ran.
        work: ``tokens`` over those of full.
        gold: share of the gold documents among the chosen nodes; -1 = not known.
        ttft_s: of the request alone, nodes in memory; -1 = not measured.
    """

    set: str
    id: str
    half: str
    setting: str
    nll: float
    kl: float
    top1: float
    same_text: int
    em: int
    f1: float
    tokens: float
    work: float
    gold: float = -1.0
    ttft_s: float = -1.0


COLUMNS = [field.name for field in fields(Row)]
_NUMBERS = {field.name: field.type for field in fields(Row) if field.type in ("float", "int")}


class RowWriter:
    """Appends rows to a CSV file as they come, so that an interrupted run keeps what it has."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("w", newline="", encoding="utf-8")
        self._writer = csv.DictWriter(self._file, COLUMNS, lineterminator="\n")
        self._writer.writeheader()

    def write(self, rows: Iterable[Row]) -> None:
        """Write, and make sure that it is on disk."""
        for row in rows:
            self._writer.writerow({name: _shown(value) for name, value in asdict(row).items()})
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def read_rows(path: Path) -> list[Row]:
    """Rows as `RowWriter` wrote them.

    Raises:
        RequestError: the file cannot be read or is no such table.
    """
    try:
        with path.open(newline="", encoding="utf-8") as file:
            return [_row(raw) for raw in csv.DictReader(file)]
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise RequestError(f"{path} is no table of lazyrag bench quality: {error!r}.") from None


def _row(raw: dict[str, str]) -> Row:
    values: dict[str, Any] = dict(raw)
    for name, kind in _NUMBERS.items():
        values[name] = int(raw[name]) if kind == "int" else float(raw[name])
    return Row(**values)


def _shown(value: object) -> object:
    return f"{value:.6g}" if isinstance(value, float) else value
