"""The store: publish complete nodes, load checked ones, put damaged ones aside."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from lazyrag.errors import StoreError
from lazyrag.store.format import (
    SUFFIX,
    TEMPORARY_PREFIX,
    DamagedFileError,
    StoredKV,
    read_metadata,
    read_node,
    write_node,
)
from lazyrag.store.index import NodeRow, StoreIndex
from lazyrag.store.key import node_key
from lazyrag.types import NodeKey

SPARE_BYTES = 200 * 2**20
"""Disk space that ingestion leaves free."""


@dataclass(frozen=True, slots=True, eq=False)
class NewNode:
    """A node to publish; ``text`` is what it was made from, if it was made from a text."""

    key: NodeKey
    kv: StoredKV
    text: str | None = None


class LoadFailure(StrEnum):
    """Why a node cannot be loaded."""

    ABSENT = "absent"
    """The index does not list it."""
    MISSING = "missing"
    """The index lists it, its file is gone."""
    DAMAGED = "damaged"


@dataclass(frozen=True, slots=True)
class StoreStats:
    """Totals of a store; ``bytes`` counts the node files."""

    path: str
    nodes: int
    tokens: int
    bytes: int
    texts: int
    quarantined: int


@dataclass(frozen=True, slots=True)
class Problem:
    """Something `KVStore.verify` found; ``key`` is None for a file the index does not know."""

    file: str
    reason: str
    key: NodeKey | None = None


class KVStore:
    """Nodes on disk under one folder.

        index.sqlite          what is stored (written last)
        nodes/ab/abcd....safetensors
        quarantine/           files that failed their check, kept for inspection

    Several processes may read and write one store; a reader sees a node complete or not at all.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            path.mkdir(parents=True, exist_ok=True, mode=0o700)
            (path / "nodes").mkdir(exist_ok=True, mode=0o700)
        except OSError as error:
            raise StoreError(f"cannot use {path} as a KV store: {error.strerror}.") from error
        self.index = StoreIndex(path / "index.sqlite")

    @classmethod
    def open(cls, path: str | os.PathLike[str], *, create: bool = True) -> KVStore:
        """Open a store.

        Raises:
            StoreError: the folder cannot be used, or holds no store and ``create`` is false.
        """
        folder = Path(path).expanduser()
        if not create and not (folder / "index.sqlite").is_file():
            raise StoreError(f"{folder} holds no KV store.")
        return cls(folder)

    def file(self, key: NodeKey) -> Path:
        """Where the node's file lies."""
        name = str(key)
        return self.path / "nodes" / name[:2] / f"{name}{SUFFIX}"

    def publish(self, encoding: bytes, nodes: Sequence[NewNode]) -> None:
        """Write node files, then list them in the index.

        Raises:
            StoreError: the disk is full or not writable; nodes written before stay valid.
        """
        rows: list[NodeRow] = []
        try:
            for node in nodes:
                size = write_node(self.file(node.key), node.key, encoding, node.kv, node.text)
                rows.append(NodeRow(node.key, len(node.kv.ids), size))
        except OSError as error:
            raise StoreError(
                f"cannot write to the KV store {self.path}: {error.strerror or error}. "
                "Nodes written before stay valid; free some space and run the same again."
            ) from error
        finally:
            if rows:
                self.index.add_nodes(encoding, rows)

    def has(self, key: NodeKey) -> bool:
        """Whether the index lists the node."""
        return self.index.node(key) is not None

    def load(self, key: NodeKey, ids: Sequence[int]) -> StoredKV | LoadFailure:
        """Load a node and check it down to its token ids.

        A damaged file is moved to ``quarantine`` and the node forgotten, so it can be made anew.
        """
        row = self.index.node(key)
        if row is None:
            return LoadFailure.ABSENT
        try:
            kv = read_node(self.file(key), key, row.bytes)
            if kv.ids != tuple(ids):
                raise DamagedFileError("token ids differ")
        except FileNotFoundError:
            self.index.remove_node(key)
            return LoadFailure.MISSING
        except (DamagedFileError, OSError):
            self._quarantine(key)
            return LoadFailure.DAMAGED
        return kv

    def _quarantine(self, key: NodeKey) -> None:
        folder = self.path / "quarantine"
        with suppress(OSError):
            folder.mkdir(exist_ok=True, mode=0o700)
            os.replace(self.file(key), folder / self.file(key).name)
        self.index.remove_node(key)

    def check_space(self, needed: int) -> None:
        """Refuse before writing what the disk cannot hold.

        Raises:
            StoreError: fewer than ``needed`` bytes (and some spare) are free.
        """
        free = shutil.disk_usage(self.path).free
        if free < needed + SPARE_BYTES:
            raise StoreError(
                f"not enough space for the KV store {self.path}: {needed / 1e6:,.0f} MB and "
                f"{SPARE_BYTES / 1e6:,.0f} MB spare are needed, {free / 1e6:,.0f} MB are free. "
                "Free some space, use --dtype float16, or ingest less."
            )

    def stats(self) -> StoreStats:
        nodes, tokens, size = self.index.totals()
        quarantine = self.path / "quarantine"
        return StoreStats(
            path=str(self.path),
            nodes=nodes,
            tokens=tokens,
            bytes=size,
            texts=self.index.text_count(),
            quarantined=sum(1 for _ in quarantine.glob(f"*{SUFFIX}")) if quarantine.is_dir() else 0,
        )

    def verify(self) -> list[Problem]:
        """Read every node and check it; changes nothing."""
        problems: list[Problem] = []
        listed: set[Path] = set()
        for row in self.index.nodes():
            path = self.file(row.key)
            listed.add(path)
            try:
                kv = read_node(path, row.key, row.bytes)
                if len(kv.ids) != row.tokens:
                    raise DamagedFileError("token count differs from the index")
                if node_key(_encoding_of(path), kv.ids) != row.key:
                    raise DamagedFileError("token ids do not belong to this key")
            except FileNotFoundError:
                problems.append(Problem(str(path), "listed in the index, but missing", row.key))
            except (DamagedFileError, OSError) as error:
                problems.append(Problem(str(path), str(error), row.key))
        for path in self._files():
            if path.name.startswith(TEMPORARY_PREFIX):
                problems.append(Problem(str(path), "left over from an interrupted write"))
            elif path not in listed:
                problems.append(Problem(str(path), "not listed in the index"))
        return problems

    def _files(self) -> Iterable[Path]:
        return sorted(path for path in (self.path / "nodes").rglob("*") if path.is_file())

    def close(self) -> None:
        self.index.close()


def _encoding_of(path: Path) -> bytes:
    return bytes.fromhex(read_metadata(path).get("encoding", ""))
