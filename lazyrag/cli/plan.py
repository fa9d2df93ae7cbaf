"""What an ingestion has to do: the files found compared with the rows of the index."""

from __future__ import annotations

import hashlib
import os
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from lazyrag.cli.documents import (
    READER_VERSION,
    EmptyDocumentError,
    Scan,
    Skipped,
    SourceFile,
    UnreadableError,
    extract_text,
    printable,
    read_bytes,
)

if TYPE_CHECKING:
    from llama_index.core.schema import TextNode

    from lazyrag.cli.vectors import FileRows


@dataclass(slots=True, eq=False)
class ChangedFile:
    """A file whose rows in the index are missing or out of date; ``nodes`` once it is cut."""

    file: SourceFile
    digest: str
    text: str
    nodes: list[TextNode] = field(default_factory=list)


@dataclass(slots=True)
class Plan:
    """What an ingestion is going to do.

    Attributes:
        rows: what the index holds now, by source.
        skipped: what could not be read.
        unsupported: files of other types met in folders, by suffix.
        changed: files to encode.
        unchanged: sources that are in the index as they are.
        gone: sources whose rows are to be removed: the file is deleted, or empty now.
    """

    rows: dict[str, FileRows]
    skipped: list[Skipped]
    unsupported: Counter[str]
    changed: list[ChangedFile] = field(default_factory=list)
    unchanged: list[str] = field(default_factory=list)
    gone: list[str] = field(default_factory=list)

    def skip(self, changed: ChangedFile, reason: str) -> None:
        """Leave a file out after all."""
        self.changed.remove(changed)
        self.skipped.append(Skipped(printable(changed.file.source), reason))


def make_plan(found: Scan, rows: dict[str, FileRows], shape: str) -> Plan:
    """Read every file found and decide.

    Args:
        found: files and what was left out on the way.
        rows: of the index.
        shape: how texts are cut; part of a file's digest.
    """
    plan = Plan(rows=rows, skipped=list(found.skipped), unsupported=found.unsupported)
    for file in found.files:
        try:
            data = read_bytes(file)
            digest = hashlib.sha256(f"{READER_VERSION} {shape}\n".encode() + data).hexdigest()
            if file.source in rows and rows[file.source].holds(digest):
                plan.unchanged.append(file.source)
                continue
            text = extract_text(data, file.path.suffix.lower())
        except UnreadableError as error:
            if isinstance(error, EmptyDocumentError) and file.source in rows:
                plan.gone.append(file.source)
            plan.skipped.append(Skipped(printable(file.source), str(error)))
            continue
        plan.changed.append(ChangedFile(file, digest, text))
    for source in rows:
        inside = any(source.startswith(root.rstrip(os.sep) + os.sep) for root in found.roots)
        if inside and not os.path.lexists(source):
            plan.gone.append(source)
    return plan
