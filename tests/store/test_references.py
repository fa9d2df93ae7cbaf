"""Who needs a text: it goes with its last reference, its node with the last text, the file last."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch

from lazyrag.errors import StoreError
from lazyrag.store import (
    Encoding,
    KVStore,
    LoadFailure,
    NewNode,
    NewText,
    StoredKV,
    node_key,
)
from lazyrag.store import index as index_module
from lazyrag.store import store as store_module
from lazyrag.types import KVDType, NodeKey, Reference

ENCODING = Encoding("aa", "bb", "cc", (1, 2), KVDType.FLOAT32, "float32").digest
FIRST, SECOND = Reference("manual", "a.txt"), Reference("manual", "b.txt")

VERSION_1 = """
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
VERSION_2 = """
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
VERSIONS = (VERSION_1, VERSION_2)
LATEST = len(VERSIONS) + 1


@pytest.fixture
def store(tmp_path: Path) -> KVStore:
    return KVStore.open(tmp_path / "kv")


def publish(store: KVStore, number: int) -> NodeKey:
    kv = StoredKV((number,), torch.zeros(1, 1, 1, 2), torch.ones(1, 1, 1, 2))
    key = node_key(ENCODING, kv.ids)
    store.publish(ENCODING, [NewNode(key, kv)])
    return key


def register(
    store: KVStore, text: str, key: NodeKey, *references: Reference | None, alias: bool = False
) -> None:
    store.index.add_texts(
        ENCODING, [NewText(text, key, 1, alias, b"s", reference) for reference in references]
    )


def references(store: KVStore) -> list[tuple[bytes, str, str, str]]:
    """(encoding, owner, name, text) of every reference, as the table has them."""
    with sqlite3.connect(store.path / "index.sqlite") as db:
        return db.execute(
            "SELECT refs.encoding, owner, name, texts.text FROM refs "
            "LEFT JOIN texts ON texts.id = refs.text ORDER BY 4, 2, 3"
        ).fetchall()


def release(store: KVStore, *dropped: Reference, keep: Iterable[str] = ()) -> list[NodeKey]:
    return store.release(ENCODING, {reference: keep for reference in dropped}).nodes


def test_a_text_goes_with_its_last_reference(store: KVStore):
    key = publish(store, 1)
    register(store, "shared", key, FIRST, SECOND, FIRST)
    assert references(store) == [
        (ENCODING, "manual", "a.txt", "shared"),
        (ENCODING, "manual", "b.txt", "shared"),
    ]
    assert release(store, FIRST) == []
    assert isinstance(store.load(key, [1]), StoredKV)
    row = store.index.find_text(ENCODING, "shared")
    assert row is not None
    released = store.release(ENCODING, {SECOND: ()})
    assert (released.texts, released.nodes) == ([row.id], [key])
    assert store.index.find_text(ENCODING, "shared") is None
    assert store.load(key, [1]) is LoadFailure.ABSENT
    assert not store.file(key).exists()
    stats = store.stats()
    assert (stats.nodes, stats.tokens, stats.bytes, stats.texts) == (0, 0, 0, 0)
    assert store.verify() == []


@pytest.mark.parametrize("order", [(None, FIRST), (FIRST, None)], ids=["before", "after"])
def test_a_text_without_a_reference_is_kept_for_good(store: KVStore, order):
    key = publish(store, 1)
    for reference in order:
        register(store, "kept", key, reference)
    assert release(store, FIRST) == []
    assert references(store) == [(ENCODING, "", "", "kept")]
    assert isinstance(store.load(key, [1]), StoredKV)


def test_what_a_changed_document_still_holds_stays(store: KVStore):
    old, same, other = (publish(store, number) for number in range(3))
    register(store, "old", old, FIRST)
    register(store, "same", same, FIRST)
    register(store, "other", other, SECOND)
    assert release(store, FIRST, keep=["same", "other", "never registered"]) == [old]
    assert references(store) == [
        (ENCODING, "manual", "b.txt", "other"),
        (ENCODING, "manual", "a.txt", "same"),
    ]
    assert store.index.text_count() == 2


def test_each_reference_keeps_its_own_texts(store: KVStore):
    key = publish(store, 1)
    register(store, "shared", key, FIRST, SECOND)
    assert store.release(ENCODING, {FIRST: (), SECOND: ("shared",)}).texts == []
    assert references(store) == [(ENCODING, "manual", "b.txt", "shared")]


def test_unknown_references_and_other_encodings_are_left_alone(store: KVStore):
    key = publish(store, 1)
    register(store, "text", key, FIRST)
    assert release(store, SECOND, Reference("a.txt", "manual")) == []
    assert store.release(b"another encoding", {FIRST: ()}).texts == []
    assert isinstance(store.load(key, [1]), StoredKV)
    assert store.index.text_count() == 1


def test_a_node_goes_with_the_last_text_that_stands_for_it(store: KVStore):
    """Two texts of equal ids, say in two normal forms of Unicode."""
    key = publish(store, 1)
    register(store, "one form", key, FIRST)
    register(store, "another form", key, SECOND)
    assert release(store, FIRST) == []
    assert store.index.text_count() == 1 and store.has(key)
    assert release(store, SECOND) == [key]


def test_a_release_names_nodes_that_were_never_stored(store: KVStore):
    stored, absent, kept = publish(store, 1), *(node_key(ENCODING, [n]) for n in (2, 3))
    for name, one in (("stored", stored), ("absent", absent), ("kept", kept)):
        register(store, name, one, FIRST)
    register(store, "kept under another name", kept, SECOND)
    released = store.release(ENCODING, {FIRST: ()})
    assert set(released.keys) == {stored, absent} and released.nodes == [stored]


def test_an_alias_that_was_never_stored_goes_too(store: KVStore):
    register(store, "alias", node_key(ENCODING, [5]), FIRST, alias=True)
    released = store.release(ENCODING, {FIRST: ()})
    assert (len(released.texts), released.nodes) == (1, [])
    assert store.index.text_count() == 0


def test_sweep_deletes_what_no_text_stands_for(store: KVStore):
    named, unnamed, untouched = (publish(store, number) for number in range(3))
    register(store, "text", named, FIRST)
    store.sweep([named, unnamed, node_key(ENCODING, [99])])
    assert [store.has(key) for key in (named, unnamed, untouched)] == [True, False, True]
    assert not store.file(unnamed).exists()
    assert store.verify() == []


class Killed(BaseException):
    pass


@pytest.mark.parametrize("error", [Killed(), PermissionError(13, "Permission denied")], ids=repr)
def test_a_file_that_stays_is_named_and_not_served(store: KVStore, monkeypatch, caplog, error):
    """The row goes first: whatever happens to the file then, the index tells the truth."""
    key = publish(store, 1)
    register(store, "text", key, FIRST)

    def failing(*_, **__):
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", failing)
        if isinstance(error, OSError):
            assert release(store, FIRST) == [key]
            assert f"{key} could not be deleted: [Errno 13] Permission denied" in caplog.text
        else:
            with pytest.raises(Killed):
                release(store, FIRST)
    store.close()
    store = KVStore.open(store.path)
    assert [problem.reason for problem in store.verify()] == ["not listed in the index"]
    assert (store.stats().nodes, store.stats().texts) == (0, 0)
    assert store.load(key, [1]) is LoadFailure.ABSENT
    publish(store, 1)
    assert isinstance(store.load(key, [1]), StoredKV)
    assert store.verify() == []


def test_an_index_that_fails_drops_nothing(store: KVStore, monkeypatch):
    key = publish(store, 1)
    register(store, "text", key, FIRST)
    before = references(store)

    def failing(*_):
        raise sqlite3.OperationalError("disk I/O error")

    with monkeypatch.context() as patch:
        patch.setattr(index_module, "_remove_unnamed", failing)
        with pytest.raises(StoreError, match="disk I/O error"):
            release(store, FIRST)
    assert references(store) == before
    assert isinstance(store.load(key, [1]), StoredKV)


def test_what_is_released_while_it_is_verified_is_no_problem(store: KVStore, monkeypatch):
    keys = [publish(store, number) for number in range(2)]
    for key in keys:
        register(store, f"text of {key}", key, FIRST)
    original, other = store_module.read_node, KVStore.open(store.path)

    def reading(*arguments):
        release(other, FIRST)
        return original(*arguments)

    monkeypatch.setattr(store_module, "read_node", reading)
    assert store.verify() == []


def test_a_reader_between_row_and_file_finds_the_node_absent(store: KVStore, monkeypatch):
    """Another process releases a node whose row this one has just read."""
    key = publish(store, 1)
    register(store, "text", key, FIRST)
    original, other = store_module.read_node, KVStore.open(store.path)

    def reading(*arguments):
        release(other, FIRST)
        return original(*arguments)

    monkeypatch.setattr(store_module, "read_node", reading)
    assert store.load(key, [1]) is LoadFailure.ABSENT
    assert store.stats().quarantined == 0


def test_ids_of_forgotten_texts_are_not_given_again(store: KVStore):
    """A recogniser of another process may still hold the old id."""
    key = publish(store, 1)
    register(store, "text", key, FIRST)
    old = store.index.find_text(ENCODING, "text")
    release(store, FIRST)
    register(store, "other", key, FIRST)
    new = store.index.find_text(ENCODING, "other")
    assert old is not None and new is not None
    assert new.id > old.id and store.index.text(old.id) is None


# an index of an earlier version


def old_index(folder: Path, version: int) -> Path:
    """A store as a version left it: a node with two texts, and an alias not stored yet."""
    store = KVStore.open(folder)
    key = publish(store, 1)
    register(store, "text", key, None)
    register(store, "second text", key, None)
    register(store, "alias", node_key(ENCODING, [2]), None, alias=True)
    store.close()
    index = folder / "index.sqlite"
    index.rename(folder / "new")
    with sqlite3.connect(index) as db:
        db.executescript(VERSIONS[0])
        db.execute("ATTACH ? AS new", (str(folder / "new"),))
        for table in ("nodes", "texts"):
            columns = ", ".join(row[1] for row in db.execute(f"PRAGMA main.table_info({table})"))
            db.execute(f"INSERT INTO {table} SELECT {columns} FROM new.{table}")
        db.commit()
        for step in VERSIONS[1:version]:
            db.executescript(step)
        db.execute(f"PRAGMA user_version = {version}")
    db.close()
    for left in folder.glob("new*"):
        left.unlink()
    return index


@pytest.mark.parametrize("version", range(1, LATEST))
def test_an_old_index_is_migrated(tmp_path: Path, version: int):
    """Its texts were registered for good, and stay so; their nodes stood behind the sink alone."""
    index = old_index(tmp_path, version)
    for _ in range(2):  # the second time there is nothing to do
        store = KVStore.open(tmp_path)
        assert references(store) == [
            (ENCODING, "", "", text) for text in ("alias", "second text", "text")
        ]
        key = node_key(ENCODING, [1])
        register(store, "text", key, FIRST)
        assert release(store, FIRST) == []
        assert isinstance(store.load(key, [1]), StoredKV)
        assert store.verify() == []
        with sqlite3.connect(index) as db:
            assert db.execute("PRAGMA user_version").fetchone() == (LATEST,)
        row = store.index.find_text(ENCODING, "alias")
        assert row is not None and row.behind == ()
        store.close()


@pytest.mark.parametrize("version", range(1, LATEST))
def test_old_and_new_indexes_have_the_same_tables(tmp_path: Path, version: int):
    def tables(folder: Path) -> list[tuple[str, str]]:
        KVStore.open(folder).close()
        with sqlite3.connect(folder / "index.sqlite") as db:
            return db.execute(
                "SELECT name, sql FROM sqlite_master WHERE sql IS NOT NULL ORDER BY name"
            ).fetchall()

    (tmp_path / "old").mkdir()
    old_index(tmp_path / "old", version)
    assert tables(tmp_path / "old") == tables(tmp_path / "new")


def test_a_migration_that_fails_changes_nothing(tmp_path: Path):
    index = old_index(tmp_path, 1)
    with sqlite3.connect(index) as db:
        db.execute("CREATE TABLE refs_by_text (x)")  # in the way of the second statement
        before = db.execute("SELECT sql FROM sqlite_master ORDER BY name").fetchall()
    with pytest.raises(StoreError, match="refs_by_text"):
        KVStore.open(tmp_path)
    with sqlite3.connect(index) as db:
        assert db.execute("PRAGMA user_version").fetchone() == (1,)
        assert db.execute("SELECT sql FROM sqlite_master ORDER BY name").fetchall() == before


@pytest.mark.parametrize("version", [LATEST + 1, 99, -1])
def test_an_index_of_an_unknown_version_is_refused_by_name(store: KVStore, version: int):
    store.close()
    with sqlite3.connect(store.path / "index.sqlite") as db:
        db.execute(f"PRAGMA user_version = {version}")
    message = f"index version {version}, this lazyrag reads up to {LATEST}"
    with pytest.raises(StoreError, match=message):
        KVStore.open(store.path)
