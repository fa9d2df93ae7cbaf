"""The store: publish complete nodes, load checked ones, put damaged ones aside."""

from __future__ import annotations

import logging
import os
import shutil
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
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
    read_encoding,
    read_node,
    write_node,
)
from lazyrag.store.index import NodeRow, Released, StoreIndex
from lazyrag.store.key import node_key
from lazyrag.types import NodeKey, Reference

logger = logging.getLogger("lazyrag")

SPARE_BYTES = 200 * 2**20
"""Disk space that ingestion leaves free."""
SECOND_LOOK_S = 0.05
"""Pause before a file that fails its check is judged."""
BEING_WRITTEN_S = 60.0
"""A temporary file younger than this may belong to a running process."""


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
    """It failed its check and was put aside."""
    UNREADABLE = "unreadable"
    """It could not be read just now (no file handle left, no permission); it stays as it is."""


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
        if not os.fspath(path):
            raise StoreError("the path of the KV store is empty.")
        folder = Path(path).expanduser()
        if not create and not (folder / "index.sqlite").is_file():
            raise StoreError(f"{folder} holds no KV store.")
        return cls(folder)

    def file(self, key: NodeKey) -> Path:
        """Where the node's file lies."""
        name = str(key)
        return self.path / "nodes" / name[:2] / f"{name}{SUFFIX}"

    def publish(self, encoding: bytes, nodes: Sequence[NewNode]) -> None:
        """Write each node's file, then list it in the index; what is listed already is left alone.

        Raises:
            StoreError: the disk is full or not writable; nodes written before stay valid.
        """
        for node in nodes:
            if self.has(node.key):
                continue
            try:
                size = write_node(self.file(node.key), node.key, encoding, node.kv, node.text)
            except OSError as error:
                raise StoreError(
                    f"cannot write to the KV store {self.path}: {error.strerror or error}. "
                    "Nodes written before stay valid; free some space and run the same again."
                ) from error
            self.index.add_nodes(encoding, [NodeRow(node.key, len(node.kv.ids), size)])

    def has(self, key: NodeKey) -> bool:
        """Whether the index lists the node."""
        return self.index.node(key) is not None

    def load(
        self, key: NodeKey, ids: Sequence[int], behind: Sequence[int] = ()
    ) -> StoredKV | LoadFailure:
        """Load a node and check it down to its token ids and those it was encoded behind.

        A damaged file is moved to ``quarantine`` and the node forgotten, so it can be made anew.

        Raises:
            StoreError: the index cannot be read.
        """
        failure = LoadFailure.ABSENT
        for attempt in range(2):  # another process may be between a file and its row: look twice
            row = self.index.node(key)
            if row is None:
                return LoadFailure.ABSENT
            try:
                kv = read_node(self.file(key), key, row.bytes)
                if (kv.ids, kv.behind) != (tuple(ids), tuple(behind)):
                    raise DamagedFileError("token ids differ")
                return kv
            except DamagedFileError:
                failure = LoadFailure.DAMAGED
            except OSError:
                gone = not os.path.lexists(self.file(key))
                failure = LoadFailure.MISSING if gone else LoadFailure.UNREADABLE
            if attempt == 0:
                time.sleep(SECOND_LOOK_S)
        if failure is not LoadFailure.UNREADABLE:
            self._forget(key)
        return failure

    def _forget(self, key: NodeKey) -> None:
        """Best effort: whatever fails here, the node is computed anew."""
        folder = self.path / "quarantine"
        with suppress(OSError):
            folder.mkdir(exist_ok=True, mode=0o700)
            os.replace(self.file(key), folder / self.file(key).name)
        with suppress(StoreError):
            self.index.remove_node(key)

    def release(self, encoding: bytes, kept: Mapping[Reference, Iterable[str]]) -> Released:
        """Drop references and what nobody refers to any more: texts, nodes and their files.

        The index forgets a node before its file is deleted. A file that could not be deleted, or
        was not because the process ended in between, is never served; `verify` names it.

        Args:
            kept: the references to drop, each with the texts that stay referred to by it.

        Raises:
            StoreError: the index cannot be written; nothing was dropped.
        """
        released = self.index.release(encoding, kept)
        self._delete_files(released.nodes)
        return released

    def sweep(self, keys: Iterable[NodeKey]) -> None:
        """Delete those of the nodes that no text stands for, in the order of `release`.

        Raises:
            StoreError: the index cannot be written; nothing was deleted.
        """
        self._delete_files(self.index.remove_unnamed(keys))

    def _delete_files(self, keys: Iterable[NodeKey]) -> None:
        for key in keys:
            try:
                self.file(key).unlink(missing_ok=True)
            except OSError as error:
                logger.warning("the file of released node %s could not be deleted: %s", key, error)

    def check_space(self, needed: int) -> None:
        """Refuse before writing what the disk cannot hold.

        Raises:
            StoreError: fewer than ``needed`` bytes (and some spare) are free.
        """
        try:
            free = shutil.disk_usage(self.path).free
        except OSError as error:
            raise StoreError(f"the KV store {self.path} is gone: {error.strerror}.") from error
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
                if node_key(read_encoding(path), kv.ids, kv.behind) != row.key:
                    raise DamagedFileError("token ids do not belong to this key")
            except FileNotFoundError:
                if self.has(row.key):  # else it was released meanwhile
                    problems.append(Problem(str(path), "listed in the index, but missing", row.key))
            except (DamagedFileError, OSError) as error:
                problems.append(Problem(str(path), str(error), row.key))
        problems += self._strangers(listed)
        return problems

    def _strangers(self, listed: set[Path]) -> Iterator[Problem]:
        """Files without a row, but for those that another process is just writing."""
        late = {self.file(row.key) for row in self.index.nodes()} - listed
        for path in self._files():
            try:
                age = time.time() - path.stat().st_mtime
            except FileNotFoundError:  # renamed since
                continue
            if path.name.startswith(TEMPORARY_PREFIX):
                if age > BEING_WRITTEN_S:
                    yield Problem(str(path), "left over from an interrupted write")
            elif path not in listed | late:
                yield Problem(str(path), "not listed in the index")

    def _files(self) -> Iterable[Path]:
        return sorted(path for path in (self.path / "nodes").rglob("*") if path.is_file())

    def close(self) -> None:
        self.index.close()
