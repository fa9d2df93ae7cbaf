"""The sqlite index: which nodes are stored, which texts stand for them, and who needs those.

A node is listed only after its file is complete (`publish` writes the row last). Texts are
registered per encoding; a text whose node is not stored yet is an alias, encoded at its first use.
A text is registered for one or more references. It goes with the last of them, and a node goes with
the last text that stands for it.
"""

from __future__ import annotations

import os
import sqlite3
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from lazyrag.errors import StoreError
from lazyrag.types import NodeKey, Reference, TextId

_NODES_AND_TEXTS = """
CREATE TABLE nodes (
    key BLOB PRIMARY KEY,
    encoding BLOB NOT NULL,
    tokens INTEGER NOT NULL,
    bytes INTEGER NOT NULL,
    created REAL NOT NULL
) WITHOUT ROWID;
CREATE TABLE texts (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    encoding BLOB NOT NULL,
    digest BLOB NOT NULL,
    key BLOB NOT NULL,
    tokens INTEGER NOT NULL,
    alias INTEGER NOT NULL,
    text TEXT NOT NULL,
    signature BLOB NOT NULL,
    UNIQUE (encoding, digest)
);
CREATE INDEX texts_by_key ON texts (key);
"""
_REFERENCES = """
CREATE TABLE refs (
    encoding BLOB NOT NULL,
    owner TEXT NOT NULL,
    name TEXT NOT NULL,
    text INTEGER NOT NULL,
    PRIMARY KEY (encoding, owner, name, text)
) WITHOUT ROWID;
CREATE INDEX refs_by_text ON refs (text);
INSERT INTO refs SELECT encoding, '', '', id FROM texts;
"""
_BEHIND = "ALTER TABLE texts ADD COLUMN behind BLOB NOT NULL DEFAULT x''"
_STEPS = (_NODES_AND_TEXTS, _REFERENCES, _BEHIND)
"""What makes each version of the index from the one before; never changed, only added to."""
SCHEMA_VERSION = len(_STEPS)

_PERMANENT = Reference("", "")
"""Of a text that is kept for good; nobody can release it, since an empty name is refused."""

_SELECT_TEXT = "SELECT id, key, tokens, alias, text, behind FROM texts"


@dataclass(frozen=True, slots=True)
class NodeRow:
    key: NodeKey
    tokens: int
    bytes: int


@dataclass(frozen=True, slots=True)
class TextRow:
    """A registered text; the node of an ``alias`` is encoded and stored at its first use.

    ``behind`` are the ids that it is encoded behind, see `StoredKV`.
    """

    id: TextId
    key: NodeKey
    tokens: int
    alias: bool
    text: str
    behind: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class NewText:
    """A text to register; without a ``reference`` it is kept for good."""

    text: str
    key: NodeKey
    tokens: int
    alias: bool
    signature: bytes
    reference: Reference | None = None
    behind: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Released:
    """What went with its last reference.

    Attributes:
        texts: that were registered.
        keys: of nodes that no text stands for any more.
        nodes: those of them that were stored.
    """

    texts: list[TextId]
    keys: list[NodeKey]
    nodes: list[NodeKey]


class StoreIndex:
    """Typed access to the index; safe to use from several threads and processes."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.RLock()
        try:
            os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))
            self._inode = path.stat().st_ino
            self._db = sqlite3.connect(path, timeout=30, check_same_thread=False)
        except (OSError, sqlite3.Error) as error:
            raise StoreError(f"cannot open the store's index {path}: {error}.") from error
        try:
            self._db.execute("PRAGMA journal_mode = WAL")
            self._db.execute("PRAGMA synchronous = NORMAL")
            self._migrate()
        except sqlite3.Error as error:
            self._db.close()
            raise StoreError(f"cannot open the store's index {path}: {error}.") from error
        except StoreError:
            self._db.close()
            raise

    def _migrate(self) -> None:
        with self._transaction() as db:
            version = db.execute("PRAGMA user_version").fetchone()[0]
            if not 0 <= version <= SCHEMA_VERSION:
                raise StoreError(
                    f"{self._path} has index version {version}, this lazyrag reads up to "
                    f"{SCHEMA_VERSION}. Use the lazyrag that made it, or ingest into a new folder."
                )
            for number, step in enumerate(_STEPS[version:], version + 1):
                for statement in step.split(";"):
                    db.execute(statement)
                db.execute(f"PRAGMA user_version = {number}")

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        with self._lock:
            self._check_place()
            try:
                with self._db:
                    self._db.execute("BEGIN IMMEDIATE")
                    yield self._db
            except sqlite3.Error as error:
                raise StoreError(f"the store's index {self._path} failed: {error}.") from error

    def _check_place(self) -> None:
        """A folder removed while open must not swallow what is written."""
        try:
            here = self._path.stat().st_ino == self._inode
        except OSError:
            here = False
        if not here:
            raise StoreError(
                f"the store's index {self._path} was removed or replaced while it was in use. "
                "Open the store again."
            )

    def _rows(self, query: str, values: Sequence[object] = ()) -> list[tuple[Any, ...]]:
        with self._lock:
            try:
                return self._db.execute(query, values).fetchall()
            except sqlite3.Error as error:
                raise StoreError(f"the store's index {self._path} failed: {error}.") from error

    # nodes

    def add_nodes(self, encoding: bytes, rows: Iterable[NodeRow]) -> None:
        now = time.time()
        with self._transaction() as db:
            db.executemany(
                "INSERT OR REPLACE INTO nodes VALUES (?, ?, ?, ?, ?)",
                [(row.key.digest, encoding, row.tokens, row.bytes, now) for row in rows],
            )

    def remove_node(self, key: NodeKey) -> None:
        with self._transaction() as db:
            db.execute("DELETE FROM nodes WHERE key = ?", (key.digest,))

    def remove_unnamed(self, keys: Iterable[NodeKey]) -> list[NodeKey]:
        """Remove those of the nodes that no text stands for; returns them."""
        with self._transaction() as db:
            return _remove_unnamed(db, keys)

    def node(self, key: NodeKey) -> NodeRow | None:
        rows = self._rows("SELECT key, tokens, bytes FROM nodes WHERE key = ?", (key.digest,))
        return _node_row(rows[0]) if rows else None

    def nodes(self) -> list[NodeRow]:
        return [_node_row(row) for row in self._rows("SELECT key, tokens, bytes FROM nodes")]

    def totals(self) -> tuple[int, int, int]:
        """Number of nodes, their tokens, their bytes."""
        query = "SELECT COUNT(*), COALESCE(SUM(tokens), 0), COALESCE(SUM(bytes), 0) FROM nodes"
        nodes, tokens, size = self._rows(query)[0]
        return int(nodes), int(tokens), int(size)

    # texts

    def add_texts(self, encoding: bytes, rows: Iterable[NewText]) -> None:
        """Register texts.

        One that is known keeps its row, with what it is encoded behind, and gets one more
        reference.
        """
        with self._transaction() as db:
            for row in rows:
                digest, reference = _digest(row.text), row.reference or _PERMANENT
                db.execute(
                    "INSERT INTO texts "
                    "(encoding, digest, key, tokens, alias, text, signature, behind) "
                    "VALUES (?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT (encoding, digest) DO UPDATE SET "
                    "alias = MIN(alias, excluded.alias) WHERE text = excluded.text",
                    (
                        encoding,
                        digest,
                        row.key.digest,
                        row.tokens,
                        row.alias,
                        row.text,
                        row.signature,
                        np.asarray(row.behind, "<i4").tobytes(),
                    ),
                )
                db.execute(
                    "INSERT OR IGNORE INTO refs SELECT encoding, ?, ?, id FROM texts "
                    "WHERE encoding = ? AND digest = ? AND text = ?",
                    (reference.owner, reference.name, encoding, digest, row.text),
                )

    def release(self, encoding: bytes, kept: Mapping[Reference, Iterable[str]]) -> Released:
        """Drop references, then the texts that have none left, then the nodes without a text.

        Args:
            kept: the references to drop, each with the texts that stay referred to by it.
        """
        texts: list[TextId] = []
        keys: set[NodeKey] = set()
        with self._transaction() as db:
            for id in self._drop_references(db, encoding, kept):
                row = db.execute(
                    "SELECT key FROM texts WHERE id = ? "
                    "AND NOT EXISTS (SELECT 1 FROM refs WHERE refs.text = texts.id)",
                    (id,),
                ).fetchone()
                if row is not None:
                    db.execute("DELETE FROM texts WHERE id = ?", (id,))
                    texts.append(id)
                    keys.add(NodeKey(bytes(row[0])))
            named = "SELECT 1 FROM texts WHERE key = ?"
            unnamed = [key for key in keys if not db.execute(named, (key.digest,)).fetchone()]
            return Released(texts, unnamed, _remove_unnamed(db, unnamed))

    def _drop_references(
        self, db: sqlite3.Connection, encoding: bytes, kept: Mapping[Reference, Iterable[str]]
    ) -> set[TextId]:
        """Returns the texts that lost one."""
        lost: set[TextId] = set()
        of_reference = "FROM refs WHERE encoding = ? AND owner = ? AND name = ?"
        for reference, texts in kept.items():
            values = (encoding, reference.owner, reference.name)
            ids = {TextId(id) for (id,) in db.execute(f"SELECT text {of_reference}", values)}
            rows = (self.find_text(encoding, text) for text in texts)
            ids -= {row.id for row in rows if row is not None}
            db.executemany(f"DELETE {of_reference} AND text = ?", [(*values, id) for id in ids])
            lost |= ids
        return lost

    def text(self, id: TextId) -> TextRow | None:
        rows = self._rows(f"{_SELECT_TEXT} WHERE id = ?", (id,))
        return _text_row(rows[0]) if rows else None

    def find_text(self, encoding: bytes, text: str) -> TextRow | None:
        """The row of exactly this text."""
        query = f"{_SELECT_TEXT} WHERE encoding = ? AND digest = ?"
        rows = self._rows(query, (encoding, _digest(text)))
        row = _text_row(rows[0]) if rows else None
        return row if row is not None and row.text == text else None

    def text_of(self, encoding: bytes, key: NodeKey) -> TextRow | None:
        """A text that stands for the node."""
        query = f"{_SELECT_TEXT} WHERE encoding = ? AND key = ? LIMIT 1"
        rows = self._rows(query, (encoding, key.digest))
        return _text_row(rows[0]) if rows else None

    def signatures_after(self, encoding: bytes, last: int) -> list[tuple[TextId, bytes]]:
        """(id, signature) of every text registered after row ``last``, oldest first."""
        query = "SELECT id, signature FROM texts WHERE encoding = ? AND id > ? ORDER BY id"
        return [(TextId(int(row[0])), bytes(row[1])) for row in self._rows(query, (encoding, last))]

    def text_count(self) -> int:
        return int(self._rows("SELECT COUNT(*) FROM texts")[0][0])

    def close(self) -> None:
        with self._lock:
            self._db.close()


def _remove_unnamed(db: sqlite3.Connection, keys: Iterable[NodeKey]) -> list[NodeKey]:
    query = (
        "DELETE FROM nodes WHERE key = ? "
        "AND NOT EXISTS (SELECT 1 FROM texts WHERE texts.key = nodes.key)"
    )
    return [key for key in keys if db.execute(query, (key.digest,)).rowcount]


def _digest(text: str) -> bytes:
    return xxhash.xxh3_128_digest(text.encode("utf-8", "surrogatepass"))


def _node_row(row: tuple[Any, ...]) -> NodeRow:
    key, tokens, size = row
    return NodeRow(NodeKey(bytes(key)), int(tokens), int(size))


def _text_row(row: tuple[Any, ...]) -> TextRow:
    id, key, tokens, alias, text, behind = row
    before = np.frombuffer(bytes(behind), "<i4").tolist()
    return TextRow(
        TextId(int(id)), NodeKey(bytes(key)), int(tokens), bool(alias), str(text), tuple(before)
    )
