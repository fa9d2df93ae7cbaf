"""The store: what is published is complete, what is loaded is checked, damage is put aside."""

from __future__ import annotations

import os
import pickle
import shutil
import stat
import subprocess
import sys
import textwrap
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

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
from lazyrag.store import store as store_module
from lazyrag.store.format import read_encoding
from lazyrag.store.index import NodeRow
from lazyrag.types import KVDType, NodeKey

ENCODING = Encoding("aa", "bb", "cc", (1, 2), KVDType.FLOAT32, "float32")


def make(
    ids: list[int], dtype: torch.dtype = torch.float32, behind: tuple[int, ...] = ()
) -> NewNode:
    generator = torch.Generator().manual_seed(sum(ids))
    k, v = (torch.randn(2, len(ids), 1, 4, generator=generator).to(dtype) for _ in range(2))
    key = node_key(ENCODING.digest, ids, behind)
    return NewNode(key, StoredKV(tuple(ids), k, v, behind), f"text {ids}")


@pytest.fixture
def store(tmp_path: Path) -> KVStore:
    return KVStore.open(tmp_path / "kv")


@pytest.mark.parametrize("behind", [(), (8, 9, 10, 11)], ids=["alone", "behind"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_a_node_comes_back_bit_for_bit(store: KVStore, dtype, behind):
    node = make([5, 6, 7], dtype, behind)
    store.publish(ENCODING.digest, [node])
    loaded = store.load(node.key, [5, 6, 7], behind)
    assert isinstance(loaded, StoredKV)
    assert loaded.ids == (5, 6, 7) and loaded.behind == behind
    assert torch.equal(loaded.k, node.kv.k) and torch.equal(loaded.v, node.kv.v)
    assert loaded.k.dtype == dtype
    assert store.verify() == []


def test_a_store_survives_reopening(store: KVStore):
    node = make([1, 2])
    store.publish(ENCODING.digest, [node])
    store.close()
    again = KVStore.open(store.path, create=False)
    assert isinstance(again.load(node.key, [1, 2]), StoredKV)
    assert again.verify() == []


def test_files_describe_themselves(store: KVStore):
    node = make([1, 2])
    store.publish(ENCODING.digest, [node])
    assert read_encoding(store.file(node.key)) == ENCODING.digest
    with safe_open(store.file(node.key), framework="pt") as file:
        metadata = file.metadata()
    assert metadata["key"] == str(node.key)
    assert metadata["text"] == node.text


def test_modes_are_private(store: KVStore):
    node = make([1])
    store.publish(ENCODING.digest, [node])
    for path in (store.file(node.key), store.path / "index.sqlite"):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    for path in (store.path, store.path / "nodes", store.file(node.key).parent):
        assert stat.S_IMODE(path.stat().st_mode) == 0o700


class Bomb:
    def __reduce__(self):
        return (os.mkdir, ("exploded",))


def _flip(path: Path, offset: int) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(data)


def _flip_tensor(path: Path, offset: int) -> None:
    """One bit of tensor data: only the checksum can tell (k first, then v, then ids)."""
    header = int.from_bytes(path.read_bytes()[:8], "little")
    _flip(path, 8 + header + offset)


DAMAGE = {
    "flipped bit of k": lambda path: _flip_tensor(path, 20),
    "flipped bit of v": lambda path: _flip_tensor(path, 120),
    "flipped bit at the end": lambda path: _flip(path, -1),
    "flipped bit in the middle": lambda path: _flip(path, path.stat().st_size // 2),
    "flipped bit in the header": lambda path: _flip(path, 12),
    "truncated": lambda path: path.write_bytes(path.read_bytes()[:-7]),
    "longer": lambda path: path.write_bytes(path.read_bytes() + b"x"),
    "empty": lambda path: path.write_bytes(b""),
    "a pickle": lambda path: path.write_bytes(
        pickle.dumps(Bomb()) + bytes(path.stat().st_size - len(pickle.dumps(Bomb())))
    ),
    "a huge header": lambda path: path.write_bytes(b"\xff" * 8 + path.read_bytes()[8:]),
    "a folder": lambda path: (path.unlink(), path.mkdir()),
}


@pytest.mark.parametrize("behind", [(), (8, 9)], ids=["alone", "behind"])
@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_file_is_found_and_never_served(
    store: KVStore, damage, behind, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    good, bad = make([1, 2, 3]), make([4, 5, 6], behind=behind)
    store.publish(ENCODING.digest, [good, bad])
    DAMAGE[damage](store.file(bad.key))
    problems = store.verify()
    assert [problem.key for problem in problems] == [bad.key]
    assert store.load(bad.key, [4, 5, 6], behind) is LoadFailure.DAMAGED
    assert store.load(bad.key, [4, 5, 6], behind) is LoadFailure.ABSENT
    assert store.stats().quarantined == 1
    assert not (tmp_path / "exploded").exists()
    assert isinstance(store.load(good.key, [1, 2, 3]), StoredKV)
    store.publish(ENCODING.digest, [bad])
    assert isinstance(store.load(bad.key, [4, 5, 6], behind), StoredKV)


def test_another_nodes_file_is_not_served(store: KVStore):
    """A file that is whole, but of another node, under this node's name."""
    first, second = make([1, 2, 3]), make([4, 5, 6])
    store.publish(ENCODING.digest, [first, second])
    shutil.copy(store.file(first.key), store.file(second.key))
    assert store.load(second.key, [4, 5, 6]) is LoadFailure.DAMAGED


def test_ids_are_compared_after_the_key(store: KVStore):
    node = make([1, 2, 3])
    store.publish(ENCODING.digest, [node])
    assert store.load(node.key, [1, 2, 4]) is LoadFailure.DAMAGED


def test_what_a_node_stood_behind_is_part_of_its_key(store: KVStore):
    alone, behind, other = (make([4, 5], behind=before) for before in ((), (8, 9), (9, 8)))
    assert len({alone.key, behind.key, other.key, make([8, 9, 4, 5]).key}) == 4
    store.publish(ENCODING.digest, [other])
    assert store.load(other.key, [4, 5], [8, 9]) is LoadFailure.DAMAGED
    assert store.load(other.key, [4, 5], [9, 8]) is LoadFailure.ABSENT
    store.publish(ENCODING.digest, [replace(alone, key=behind.key), other])
    assert [problem.key for problem in store.verify()] == [behind.key]


def test_a_lost_file_is_missing(store: KVStore):
    node = make([1, 2, 3])
    store.publish(ENCODING.digest, [node])
    store.file(node.key).unlink()
    (problem,) = store.verify()
    assert "missing" in problem.reason
    assert store.load(node.key, [1, 2, 3]) is LoadFailure.MISSING
    assert not store.has(node.key)


def test_leftovers_and_strangers_are_named(store: KVStore):
    node = make([1, 2, 3])
    store.publish(ENCODING.digest, [node])
    folder = store.file(node.key).parent
    (folder / ".partial-x").write_bytes(b"half")
    os.utime(folder / ".partial-x", (0, 0))
    (folder / ".partial-being-written").write_bytes(b"half")
    (folder / "foreign.safetensors").write_bytes(b"?")
    assert [problem.reason for problem in store.verify()] == [
        "left over from an interrupted write",
        "not listed in the index",
    ]


def test_a_failed_write_leaves_nothing_and_keeps_what_was_written(store: KVStore, monkeypatch):
    """No space at the second of three nodes: the first stays valid, no half file, a clear error."""
    nodes = [make([number]) for number in range(3)]
    original, calls = store_module.write_node, []

    def failing(path, *arguments):
        calls.append(path)
        if len(calls) == 2:
            raise OSError(28, "No space left on device")
        return original(path, *arguments)

    monkeypatch.setattr(store_module, "write_node", failing)
    with pytest.raises(StoreError, match=r"No space left on device.*free some space"):
        store.publish(ENCODING.digest, nodes)
    assert [store.has(node.key) for node in nodes] == [True, False, False]
    assert store.verify() == []


@pytest.mark.parametrize("opened", [1, 2], ids=["one store", "as two processes"])
def test_threads_that_publish_the_same_nodes_leave_them_whole(tmp_path: Path, opened: int):
    """Some equal, some not, in different orders; a reader meanwhile sees a node whole or not."""
    stores = [KVStore.open(tmp_path / "kv") for _ in range(opened)]
    nodes = [make([number, number + 1]) for number in range(12)]
    together = threading.Barrier(8)

    def publish(number: int) -> None:
        store = stores[number % opened]
        mine = nodes[number:] + nodes[:number]
        together.wait(20)
        for node in mine:
            store.publish(ENCODING.digest, [node])
            found = store.load(mine[-1].key, mine[-1].kv.ids)
            assert found is LoadFailure.ABSENT or isinstance(found, StoredKV)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(publish, range(8)))
    assert stores[0].stats().nodes == 12 and stores[0].stats().quarantined == 0
    assert stores[0].verify() == []
    for store in stores:
        store.close()


def test_too_little_space_is_said_before_writing(store: KVStore, monkeypatch):
    usage = shutil.disk_usage(store.path)
    monkeypatch.setattr(
        store_module.shutil, "disk_usage", lambda _: usage._replace(free=300 * 10**6)
    )
    store.check_space(1)
    with pytest.raises(StoreError, match=r"500 MB.*spare.*300 MB are free"):
        store.check_space(500 * 10**6)


def test_a_killed_writer_leaves_complete_nodes_only(tmp_path: Path):
    """A real process is killed at several points while it publishes; what is listed is whole."""
    program = textwrap.dedent(
        """
        import sys
        from pathlib import Path
        sys.path.insert(0, sys.argv[2])
        from tests.store.test_store import ENCODING, make
        from lazyrag.store import KVStore
        store = KVStore.open(sys.argv[1])
        print("ready", flush=True)
        for number in range(100000):
            store.publish(ENCODING.digest, [make([number % 50] * 200)])
            print(number, flush=True)
        """
    )
    root = Path(__file__).parents[2]
    for published in (0, 1, 3, 7):
        process = subprocess.Popen(
            [sys.executable, "-c", program, str(tmp_path / "kv"), str(root)],
            stdout=subprocess.PIPE,
            text=True,
        )
        assert process.stdout is not None
        for _ in range(published + 1):
            assert process.stdout.readline()
        process.kill()
        process.wait()
        store = KVStore.open(tmp_path / "kv")
        reasons = {problem.reason for problem in store.verify()}
        assert reasons <= {"left over from an interrupted write", "not listed in the index"}
        assert store.stats().nodes >= published
        for number in range(min(published, 50)):
            node = make([number] * 200)
            loaded = store.load(node.key, node.kv.ids)
            assert isinstance(loaded, StoredKV) and torch.equal(loaded.k, node.kv.k)
        store.close()


def test_a_reader_sees_a_node_whole_or_not_at_all(store: KVStore):
    """Another handle, as another process has it: nothing before publish, everything after."""
    reader = KVStore.open(store.path)
    node = make([9, 9])
    assert reader.load(node.key, [9, 9]) is LoadFailure.ABSENT
    store.publish(ENCODING.digest, [node])
    assert isinstance(reader.load(node.key, [9, 9]), StoredKV)


@pytest.mark.parametrize(
    "change",
    [
        {"weights": "ab"},
        {"tokenizer": "x"},
        {"rotary": "x"},
        {"sink": (1, 3)},
        {"sink": ()},
        {"dtype": KVDType.FLOAT16},
        {"compute_dtype": "bfloat16"},
        {"adapter": "a"},
        {"tenant": "t"},
        {"format_version": 2},
    ],
    ids=lambda change: next(iter(change)),
)
def test_everything_that_shapes_kv_is_in_the_key(change):
    other = replace(ENCODING, **change)
    assert node_key(other.digest, [1, 2]) != node_key(ENCODING.digest, [1, 2])


def test_keys_are_of_ids_and_read_back():
    key = node_key(ENCODING.digest, [1, 2])
    assert key != node_key(ENCODING.digest, [12])
    assert key != node_key(ENCODING.digest, [2, 1])
    assert NodeKey.parse(str(key)) == key
    with pytest.raises(ValueError):
        NodeKey.parse("abc")


def test_a_folder_without_a_store(tmp_path: Path):
    with pytest.raises(StoreError, match="holds no KV store"):
        KVStore.open(tmp_path, create=False)


def test_a_path_that_is_a_file(tmp_path: Path):
    file = tmp_path / "kv"
    file.write_text("x")
    with pytest.raises(StoreError, match=r"cannot use .*kv as a KV store"):
        KVStore.open(file)


def test_a_foreign_index(tmp_path: Path):
    (tmp_path / "index.sqlite").write_bytes(b"not a database" * 100)
    with pytest.raises(StoreError, match=r"index\.sqlite"):
        KVStore.open(tmp_path)


def test_equal_texts_share_one_row_and_others_do_not(store: KVStore):
    key = node_key(ENCODING.digest, [1])
    for _ in range(2):
        store.index.add_texts(
            ENCODING.digest,
            [NewText("same", key, 1, False, b"s"), NewText("other", key, 1, True, b"o")],
        )
    assert store.index.text_count() == 2
    row = store.index.find_text(ENCODING.digest, "same")
    assert row is not None and row.key == key
    assert store.index.find_text(b"other encoding", "same") is None
    assert len(store.index.signatures_after(ENCODING.digest, 0)) == 2
    assert store.index.signatures_after(ENCODING.digest, row.id + 1) == []


def _rewrite_header(path: Path, old: bytes, new: bytes) -> None:
    assert len(old) == len(new)
    data = path.read_bytes()
    assert old in data
    path.write_bytes(data.replace(old, new))


@pytest.mark.parametrize(
    ("old", "new"),
    [(b"[2,3,1,4]", b"[2,3,4,1]"), (b"[2,3,1,4]", b"[4,3,1,2]"), (b'"F32"', b'"I32"')],
)
def test_the_checksum_covers_shapes_and_dtypes(store: KVStore, old: bytes, new: bytes):
    node = make([1, 2, 3])
    store.publish(ENCODING.digest, [node])
    _rewrite_header(store.file(node.key), old, new)
    assert [problem.reason for problem in store.verify()] == ["checksum differs"]
    assert store.load(node.key, [1, 2, 3]) is LoadFailure.DAMAGED


def test_a_broken_encoding_in_the_header_is_a_problem_not_a_crash(store: KVStore):
    node = make([1, 2, 3])
    store.publish(ENCODING.digest, [node])
    good = ENCODING.digest.hex().encode()
    _rewrite_header(store.file(node.key), good, b"zz" + good[2:])
    (problem,) = store.verify()
    assert problem.key == node.key


def test_a_node_that_cannot_be_read_just_now_stays(store: KVStore, monkeypatch):
    """No file handle left, no permission: nothing is forgotten and nothing moved."""
    node = make([1, 2, 3])
    store.publish(ENCODING.digest, [node])

    def failing(*_):
        raise OSError(24, "Too many open files")

    with monkeypatch.context() as patch:
        patch.setattr(store_module, "read_node", failing)
        assert store.load(node.key, [1, 2, 3]) is LoadFailure.UNREADABLE
    assert isinstance(store.load(node.key, [1, 2, 3]), StoredKV)


def test_damage_is_found_even_if_the_index_cannot_be_written(store: KVStore, monkeypatch):
    node = make([1, 2, 3])
    store.publish(ENCODING.digest, [node])
    _flip_tensor(store.file(node.key), 20)

    def locked(*_):
        raise StoreError("database is locked")

    monkeypatch.setattr(store.index, "remove_node", locked)
    assert store.load(node.key, [1, 2, 3]) is LoadFailure.DAMAGED


def test_a_file_between_its_writing_and_its_row_is_looked_at_twice(store: KVStore, monkeypatch):
    """Another process rewrites a node: file first, row a moment later. Nothing is put aside."""
    node = make([1, 2, 3])
    store.publish(ENCODING.digest, [node])
    size = store.file(node.key).stat().st_size
    store.index.add_nodes(ENCODING.digest, [NodeRow(node.key, 3, size + 1)])
    monkeypatch.setattr(
        store_module.time,
        "sleep",
        lambda _: store.index.add_nodes(ENCODING.digest, [NodeRow(node.key, 3, size)]),
    )
    assert isinstance(store.load(node.key, [1, 2, 3]), StoredKV)
    assert store.stats().quarantined == 0


def test_a_store_removed_while_open_takes_nothing_in(store: KVStore):
    store.publish(ENCODING.digest, [make([1])])
    shutil.rmtree(store.path)
    with pytest.raises(StoreError, match="removed or replaced"):
        store.publish(ENCODING.digest, [make([2])])
    with pytest.raises(StoreError, match=r"is gone|removed or replaced"):
        shutil.rmtree(store.path, ignore_errors=True)
        store.check_space(1)


def test_an_empty_path(tmp_path):
    with pytest.raises(StoreError, match="empty"):
        KVStore.open("")
